"""The page as HTML: everything of the fleet is escaped, and one view has a bounded size."""

import re
from html.parser import HTMLParser

import msgspec
import pytest

from dynctl.documents.fleet_load import Traffic
from dynctl.documents.snapshot import Alert, Header, Snapshot, TopFrame
from dynctl.sources.alerts import AlertBoard
from dynctl.sources.demo.live import LiveDemo
from dynctl.sources.domains import DomainBoard
from dynctl.top.history import History
from dynctl.web import page as pages
from dynctl.web.page import View, page, rate_tiles

HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}</script>"


_FRAME: list[TopFrame] = []


async def frame() -> TopFrame:
    """One frame of the demo fleet for all tests: making it takes seconds."""
    if not _FRAME:
        _FRAME.append(await _read_frame())
    return _FRAME[0]


async def _read_frame() -> TopFrame:
    async with LiveDemo() as live:
        snapshot = await live.snapshot()
    board = DomainBoard()
    alerts = AlertBoard().alerts(snapshot, board.capacity(snapshot))
    return TopFrame(snapshot, board.view(snapshot), list(alerts))


def hostile(found: TopFrame) -> TopFrame:
    """The frame with every name and text replaced by what a page must not run."""
    replace = msgspec.structs.replace
    workers = tuple(
        replace(row, name=f"{HOSTILE}{i}", model=HOSTILE, reason=HOSTILE, domains={"zone": HOSTILE})
        for i, row in enumerate(found.snapshot.workers)
    )
    decisions = tuple(
        replace(
            line,
            id=f"{HOSTILE}{i}",
            model=HOSTILE,
            message=HOSTILE,
            outcome=HOSTILE if i % 2 else "selected",
            prefill=None if line.prefill is None else replace(line.prefill, worker=HOSTILE),
            decode=None if line.decode is None else replace(line.decode, worker=HOSTILE),
        )
        for i, line in enumerate(found.snapshot.decisions)
    )
    header = replace(found.snapshot.header, models=(HOSTILE,), mode=HOSTILE, preset=HOSTILE)
    snapshot = replace(
        found.snapshot, workers=workers, decisions=decisions, header=header, problem=HOSTILE
    )
    alert = Alert(HOSTILE, "fail", HOSTILE, HOSTILE, HOSTILE)
    return TopFrame(snapshot, DomainBoard().view(snapshot), [alert])


class Elements(HTMLParser):
    """Names of elements and attributes, the addresses, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.addresses: list[str] = []
        self.headings: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.addresses += [value for name, value in attrs if name in ("href", "src", "action")]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(tag)

    def handle_data(self, data):
        self.text += data


async def test_the_page_has_what_top_has():
    found = await frame()
    read = Elements(page(found, View()))
    for row in found.snapshot.workers:
        assert row.name in read.text
    for domain in found.domains.rows:
        assert str(domain.value) in read.text
    for line in found.snapshot.decisions[:10]:
        assert f"/ui/decisions/{line.id}" in read.addresses
    for one in found.alerts:
        assert f"/ui/codes/{one.code}" in read.addresses
        assert one.fix in read.text


async def test_hostile_names_and_texts_are_text():
    plain = Elements(page(await frame(), View()))
    text = page(hostile(await frame()), View(text="<b>", sort='"><b>'))
    read = Elements(text)
    assert read.names <= plain.names | {"pre"}
    assert not any(name.startswith("on") for name in read.attributes)
    assert "style" not in read.attributes | read.names
    text = page(hostile(await frame()), View())
    assert HOSTILE in Elements(text).text
    assert "{{7*7}}" in text  # a name is not a template
    for address in Elements(text).addresses:
        assert address.startswith(("/ui", "#")), address


async def test_nothing_is_inline_and_nothing_comes_from_elsewhere():
    text = page(await frame(), View())
    assert not re.search(r"\sstyle=|<style|\son[a-z]+=|javascript:|https?://(?!127)", text)
    assert re.findall(r"<script[^>]*>[^<]*</script>", text) == [
        '<script src="/ui/files/script.js" defer></script>'
    ]


async def test_it_can_be_used_with_a_keyboard_and_read_aloud():
    text = page(await frame(), View(sort="cached_blocks", descending=True))
    read = Elements(text)
    assert read.headings[0] == "h1"
    assert {"h2", "h3"} == set(read.headings[1:])
    assert '<html lang="en">' in text
    assert text.count('scope="col"') > 5
    assert 'aria-sort="descending"' in text
    assert '<label for="q">' in text
    for image in re.findall(r"<svg[^>]*>", text):
        assert 'aria-hidden="true"' in image or ('role="img"' in image and "aria-label=" in image)


def test_rates_are_lines_within_their_box():
    history = History()
    assert rate_tiles(history, 0.0) == []
    for at in range(120):
        traffic = Traffic(requests=at * at, errors=at, refused=0)
        history.add(Snapshot(at=float(at), source="x", header=Header(traffic=traffic)))
    tiles = rate_tiles(history, 119.0)
    assert tiles[0].text.endswith("req/s")
    for tile in tiles:
        for point in tile.points.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 100
            assert 0 <= y <= 20


async def test_workers_are_sorted_by_any_column_unknown_values_last():
    found = await frame()
    values = [sum(rank.cached_blocks for rank in row.ranks) for row in found.snapshot.workers]
    for descending in (False, True):
        text = page(found, View(sort="cached_blocks", descending=descending))
        order = re.findall(r'<th scope="row"[^>]*><bdi>([^<]*)', text)
        by_name = {
            row.name: value for row, value in zip(found.snapshot.workers, values, strict=True)
        }
        shown = [by_name[name] for name in order]
        assert shown == sorted(values, reverse=descending)


async def test_an_unknown_column_is_no_error():
    found = await frame()
    assert page(found, View(sort="nothing")).count('scope="row"') == len(found.snapshot.workers)


async def test_a_filter_keeps_matching_workers_and_decisions():
    found = await frame()
    name = found.snapshot.workers[0].name
    text = page(found, View(text=name.upper()))
    assert re.findall(r'<th scope="row"[^>]*><bdi>([^<]*)', text) == [name]
    assert page(found, View(text="no such thing")).count("/ui/decisions/") == 0


async def test_a_domain_opens_its_workers_and_decisions() -> None:
    found = await frame()
    whole = page(found, View(text="demo"))
    link = re.search(r'class="zoom"[^>]*href="([^"]*domain=zone-a)"', whole)
    assert link is not None
    assert link[1] == "/ui?q=demo&amp;domain=zone-a"

    text = page(found, View(place="zone-a"))
    names = [row.name for row in found.snapshot.workers if row.domains["zone"] == "zone-a"]
    assert re.findall(r'<th scope="row"[^>]*><bdi>([^<]*)', text) == names == [
        *("prefill-a0", "decode-a0"),
    ]  # fmt: skip
    assert "2 of 6" in text
    shown = set(re.findall(r"/ui/decisions/([\w-]+)", text))
    touching = [
        line.id
        for line in found.snapshot.decisions
        if "zone-a" in (line.domains.get("zone"), line.prefill_domains.get("zone"))
    ]
    assert 0 < len(touching) < len(found.snapshot.decisions)
    assert shown == set(touching[: pages.DECISIONS])
    # The other domains stay, and the way back is there twice: on the card and beside the workers.
    assert text.count('class="zoom"') == 2
    assert text.count('aria-current="true"') == 1
    assert text.count('href="/ui" data-view') == 2
    # Sorting and a filter keep the domain.
    assert "sort=name&amp;domain=zone-a" in text
    assert '<input type="hidden" name="domain" value="zone-a">' in text


async def test_a_domain_that_does_not_exist_shows_nothing_and_the_way_back() -> None:
    found = await frame()
    text = page(found, View(place=HOSTILE))
    assert "No worker matches the filter." in text
    assert 'href="/ui" data-view>Show all' in text
    assert "<img" not in text


async def test_decisions_are_of_the_domains_of_both_hops() -> None:
    found = await frame()
    replace = msgspec.structs.replace
    crossed = replace(
        next(one for one in found.snapshot.decisions if one.prefill and one.decode),
        prefill_domains={"zone": "zone-a"},
        domains={"zone": "zone-b"},
    )
    snapshot = replace(found.snapshot, decisions=(crossed,))
    for place in ("zone-a", "zone-b"):
        for view in (View(place=place), View(text=f"zone={place}")):
            assert f"/ui/decisions/{crossed.id}" in page(
                TopFrame(snapshot, found.domains, []), view
            )
    assert "/ui/decisions/" not in page(TopFrame(snapshot, found.domains, []), View(place="zone-c"))


async def test_a_view_of_a_large_fleet_is_bounded():
    found = await frame()
    replace = msgspec.structs.replace
    row = replace(found.snapshot.workers[0], name="w" * 5_000)
    workers = tuple(replace(row, worker_id=i) for i in range(3_000))
    lines = found.snapshot.decisions * 100
    snapshot = replace(found.snapshot, workers=workers, decisions=lines)
    alerts = [Alert("NO_WORKERS", "fail", f"{i}", "m" * 10_000) for i in range(2_000)]
    text = page(TopFrame(snapshot, found.domains, alerts), View())
    assert len(text) < 800_000
    assert text.count('scope="row"') == pages.WORKERS
    assert f"{pages.WORKERS} of 3000 are shown" in text


async def test_a_part_that_is_unknown_says_why_and_what_to_do():
    found = await frame()
    parts = dict(found.snapshot.parts)
    parts["decisions"] = msgspec.structs.replace(
        parts["decisions"], unknown="the frontend keeps no decisions", provide="--decision-memory"
    )
    snapshot = msgspec.structs.replace(found.snapshot, parts=parts)
    text = page(TopFrame(snapshot, found.domains, found.alerts), View())
    assert "the frontend keeps no decisions" in text
    assert "--decision-memory" in text


@pytest.mark.parametrize("text", ["", "a b", "\x00\x1b[31m", "x" * 10_000])
def test_views_are_read_from_any_query(text):
    view = View.of({"q": text, "sort": text, "desc": text, "domain": text, "other": text})
    assert len(view.text) <= pages.FILTER
    assert len(view.place) <= pages.CELL
    assert view.place.isprintable()
    assert view.text.isprintable()
    assert view.link(descending=True).startswith("/ui?desc=1") or view.sort
