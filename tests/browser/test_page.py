"""The web page in a real browser: it renders, sorts, updates, explains, and breaks no rule."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.browser.chromium import chromium
from tests.dynctl.serving.fleets import SLOW_HEALTH, frontend_with_page, site, zone
from tests.waiting import until

pytestmark = pytest.mark.browser

#: Pictures for a look: make test-browser leaves them there.
PICTURES = Path("build/browser")
HOSTILE = "<img/src/onerror><script>document.write(1)</script>"
ENGINES = [
    {"name": f"{role}-{place}-{number}", "role": role, **zone(f"us-east-1{place}")}
    for place in "ab"
    for role, many in (("prefill", 2), ("decode", 2))
    for number in range(many)
]


@asynccontextmanager
async def shown(directory: Path, engines=ENGINES, **values):
    """A fleet with a few decisions, and a browser."""
    async with site(engines, health=SLOW_HEALTH, kind=frontend_with_page, **values) as fleet:
        headers = {"authorization": f"Bearer {values['api_token']}"} if values else {}
        for number in range(6):
            body = {"model": "demo", "messages": [{"role": "user", "content": f"{number} words"}]}
            await fleet.post("/v1/chat/completions", body, headers=headers)
        async with chromium(directory) as tab:
            yield fleet, tab


NAMES = "[...document.querySelectorAll('tbody th')].map(one => one.textContent)"


async def test_it_renders_sorts_updates_and_explains(tmp_path):
    async with shown(tmp_path) as (fleet, tab):
        await tab.size(1280)
        await tab.open(fleet.url("/ui"))
        assert await tab.run("document.querySelectorAll('.card').length") == 2
        names = await tab.run(NAMES)
        assert sorted(names) == sorted(one["name"] for one in ENGINES)

        # Sorted in place, by a key press on the heading.
        await tab.run("document.getElementById('s-name').focus()")
        await tab.press("Enter", 13)
        await tab.until("location.search.includes('sort=name')")
        await tab.until(f"String({NAMES}) === String({NAMES}.sort())")
        await tab.until("document.querySelector('th[aria-sort=ascending]') !== null")
        assert await tab.run("document.activeElement.id") == "s-name"

        # A domain opens its workers, in place; the sorting stays, and its card leads back.
        await tab.run("window.sameDocument = true")
        await tab.run("document.querySelector('.zoom').focus()")
        await tab.press("Enter", 13)
        await tab.until("location.search === '?sort=name&domain=us-east-1a'")
        await tab.until(f"{NAMES}.length === 4")
        assert await tab.run(f"{NAMES}.every(one => one.includes('-a-'))")
        await tab.until("document.querySelector('.card.zoomed .zoom[aria-current=true]') !== null")
        assert await tab.run("document.activeElement.className") == "zoom"
        await tab.run("document.getElementById('z-all').click()")
        await tab.until("location.search === '?sort=name'")
        await tab.until(f"{NAMES}.length === {len(ENGINES)}")

        # A decision appears without loading the page again.
        _, _, headers = await fleet.chat("one more prompt")
        decision = headers["x-dynctl-decision"]
        await tab.until(f"document.getElementById('d-{decision}') !== null")
        assert await tab.run("window.sameDocument")

        # It opens the explain in a dialog, and Escape closes it.
        await tab.run(f"document.getElementById('d-{decision}').click()")
        await tab.until("document.querySelector('dialog[open] pre') !== null")
        text = await tab.run("document.querySelector('dialog pre').textContent")
        assert "full block" in text
        assert "answer" in text
        await tab.press("Escape", 27)
        await tab.until("document.querySelector('dialog[open]') === null")

        # A worker that is lost becomes a condition with a fix.
        await fleet.engines["decode-a-1"].close()
        await fleet.frontend.fleet.remove("decode-a-1")
        await tab.until(f"!{NAMES}.includes('decode-a-1')")
        await tab.until("document.querySelectorAll('.findings li').length > 0")
        await tab.run("document.querySelector('.findings a').click()")
        await tab.until("document.querySelector('dialog[open] pre') !== null")

        await tab.run("document.getElementById('pause').click()")
        assert await tab.run("document.getElementById('live').textContent") == "paused"
        assert tab.problems == []
        assert {"/".join(one.split("/")[:3]) for one in tab.requests} == {fleet.frontend.url}


async def test_pictures_dark_and_light_wide_and_narrow(tmp_path):
    await asyncio.to_thread(PICTURES.mkdir, parents=True, exist_ok=True)
    async with shown(tmp_path) as (fleet, tab):
        backs = {}
        for dark in (False, True):
            for width in (1280, 400):
                await tab.size(width, dark=dark)
                await tab.open(fleet.url("/ui"))
                backs[dark] = await tab.run(
                    "getComputedStyle(document.documentElement).backgroundColor"
                )
                # Nothing is wider than the screen: only the table may scroll, in its own box.
                assert await tab.run("document.documentElement.scrollWidth") <= width
                await tab.picture(PICTURES / f"{'dark' if dark else 'light'}-{width}.png")
        assert backs[False] != backs[True]
        assert tab.problems == []


_CONTRAST = """(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b]
    .map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (node) => {
    for (; node; node = node.parentElement) {
      const found = parts(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].some(c => c.nodeType === 3 && c.data.trim());
    if (!text || !node.checkVisibility()) continue;
    const color = getComputedStyle(node).color;
    if (!color.startsWith("rgb")) continue;
    const [a, b] = [light(parts(color)), light(back(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${node.textContent.trim()}: ${color}`);
  }
  return low;
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_text_has_contrast_and_controls_have_names(tmp_path, dark):
    async with shown(tmp_path) as (fleet, tab):
        await tab.size(1280, dark=dark)
        await tab.open(fleet.url("/ui"))
        assert await tab.run(_CONTRAST) == []
        tree = await tab.command("Accessibility.getFullAXTree")
        roles = ("button", "link", "searchbox", "image", "region", "heading")
        for node in tree["nodes"]:
            if node.get("role", {}).get("value") in roles and not node.get("ignored"):
                assert node.get("name", {}).get("value"), node


async def test_without_script_it_is_read_sorted_and_explained(tmp_path):
    async with shown(tmp_path) as (fleet, tab):
        await tab.command("Emulation.setScriptExecutionDisabled", value=True)
        await tab.open(fleet.url("/ui"))
        # Evaluating is the debugger's; scripts of the page do not run.
        assert await tab.run("document.getElementById('pause').hidden")
        assert "Reload" in await tab.run("document.getElementById('live').textContent")
        link = await tab.run("document.getElementById('s-name').href")
        await tab.open(link)
        names = await tab.run(NAMES)
        assert names == sorted(names)
        await tab.open(await tab.run("document.querySelector('.lines a').href"))
        assert "answer" in await tab.run("document.querySelector('pre').textContent")
        assert tab.problems == []


async def test_a_browser_signs_in_with_the_token(tmp_path):
    token = "the token of this test"
    async with shown(tmp_path, api_token=token) as (fleet, tab):
        await tab.open(fleet.url("/ui"))
        assert await tab.run("document.querySelector('.card') === null")
        await tab.run(f"document.getElementById('token').value = '{token}'")
        await tab.run("document.querySelector('form').requestSubmit()")
        await tab.until("document.querySelectorAll('.card').length === 2")
        await tab.until("document.readyState === 'complete'")
        assert await tab.run("document.cookie") == ""
        assert token not in await tab.run("document.documentElement.outerHTML")
        assert not any("token" in address for address in tab.requests)
        await tab.run("document.querySelector('form[action=\"/ui/leave\"]').requestSubmit()")
        await tab.until("document.getElementById('token') !== null")


async def test_a_hostile_name_is_only_shown(tmp_path):
    engines = [{"name": "a0", **zone(HOSTILE)}]
    async with shown(tmp_path, engines) as (fleet, tab):
        await tab.open(fleet.url("/ui"))
        await tab.until("document.querySelector('.card') !== null")
        title = await tab.run("document.querySelector('.card h3').textContent")
        assert HOSTILE in title
        found = "document.querySelectorAll('img, body script').length"
        assert await tab.run(found) == 0
        assert tab.problems == []


async def test_a_frontend_that_is_gone_is_named_and_the_data_stays(tmp_path):
    async with shown(tmp_path) as (fleet, tab):
        await tab.open(fleet.url("/ui"))
        loop = asyncio.get_running_loop()
        closing = loop.create_task(fleet.frontend.close())
        await tab.until("document.getElementById('live').textContent.includes('not current')", 30)
        assert await tab.run("document.querySelectorAll('.card').length") == 2
        await until(closing.done, 20)
