"""Every number in the tables of docs/routing/, worked out by the router itself."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from dynctl.serving.routing.transfer_file import read_transfer_file
from router_core import (
    Booked,
    LoadReported,
    Pin,
    PrefillDone,
    Router,
    Stage,
    ThresholdsSet,
    WorkerLost,
    preference,
    preset,
)
from router_core.cost import CostInputs, CostParameters, probabilities, total_costs
from router_core.taints import canonical_taint, constraints, preference_multiplier
from router_core.terms import kv_terms
from tests.docs.pages import DOCS, Block, blocks
from tests.docs.tables import page_of, table, tables
from tests.router_core.fleet import (
    MODEL,
    active,
    apply_all,
    costs,
    request,
    router,
    stored,
    worker,
)

PAGES = sorted((DOCS / "routing").iterdir())
HOPS: dict[str, Stage] = {"one pool": "aggregated", "prefill": "prefill", "decode": "decode"}


def rows(name: str) -> list[list[str]]:
    found = table(page_of(PAGES, name), name)
    assert found
    return found


def number(cell: str) -> float:
    return float(cell.strip("*").replace(",", "").removesuffix(" times").removesuffix("%"))


@pytest.mark.seed("smart-routing-guide-0.9: cost: prefill blocks")
def test_blocks() -> None:
    for tokens, prefill, complete in rows("blocks"):
        priced = formula(int(tokens), 0)
        assert f"{priced['prefill_blocks']:.3f}" == prefill
        assert priced["decode_blocks"] == number(complete)


def formula(tokens: int, cached: int, stage: Stage = "aggregated", scale: float = 1.0) -> Any:
    """Each term of the cost of an idle worker by its name, and ``cost``."""
    config = preset("dynamo-1.6").with_values({"prefill_load_scale": scale})
    inputs = CostInputs(tokens, 16, tokens // 16, [cached], [0], [0], [0], [0])
    terms = kv_terms(inputs, CostParameters.for_stage(config, stage))
    found: dict[str, float | None] = dict.fromkeys(("prefill_blocks", "decode_blocks"))
    found |= {term.name: float(term.values[0]) for term in terms}
    return found | {"cost": total_costs(terms, None, 1)[0]}


def test_lines_of_the_0_9_guide() -> None:
    for tokens, cached, hop, prefill, decode, cost in rows("log lines"):
        priced = formula(int(tokens), int(cached), HOPS[hop], 1.5)
        for cell, name in ((prefill, "prefill_blocks"), (decode, "decode_blocks")):
            assert priced[name] == (None if cell == "-" else number(cell))
        assert f"{priced['cost']:.3f}" == cost


@pytest.mark.seed("smart-routing-guide-0.9: cost: worker selection example")
def test_three_workers_of_the_0_9_guide() -> None:
    shown = rows("three workers")
    fleet = router(*(worker(int(row[0])) for row in shown))
    wanted = request(160)
    for name, cached, _, decode, _ in shown:
        # The guide's decode blocks are those of all; ten are the prompt's own.
        held = int(decode)
        apply_all(fleet, stored(int(name), int(cached)), active(int(name), name, blocks=held))
    plan = fleet.plan(wanted)
    own = 160 / 16
    priced = {row.worker.name: row for row in plan.final.rows()}
    for name, _, prefill, decode, cost in shown:
        row = priced[f"w{name}"]
        assert row.prefill_blocks == number(prefill)
        assert (row.decode_blocks or 0) - own == number(decode)
        assert row.cost - own == number(cost)
    (best,) = [row[0] for row in shown if row[4].startswith("**")]
    assert plan.final.worker is not None
    assert plan.final.worker.name == f"w{best}"


def test_load() -> None:
    prompts = {"X": request(40, "x"), "Y": request(40, "y", seed=7), "Z": request(64, "z")}
    shown = {row[0]: tuple(map(number, row[1:])) for row in rows("load")}

    def fleet() -> Router:
        return router(worker(1, "a"), worker(2, "b"))

    def hold(target: Router, *names: str, generating: bool) -> Router:
        for place, prompt in enumerate(names):
            booked = target.booking(
                target.plan(prompts[prompt], samples=(0.0, 0.0)).final, prompts[prompt]
            )
            name = f"{prompt}{place}"
            there = type(booked)(
                name, "aggregated", 1, 0, booked.prefill_tokens, booked.sequence_hashes
            )
            apply_all(target, there)
            if generating:
                apply_all(target, PrefillDone(name))
        return target

    cached = fleet()
    apply_all(cached, stored(1, 1))
    states = {
        "idle": fleet(),
        "computes X": hold(fleet(), "X", generating=False),
        "computes X twice": hold(fleet(), "X", "X", generating=False),
        "generates for X, twice": hold(fleet(), "X", "X", generating=True),
        "generates for X twice and for Y": hold(fleet(), "X", "X", "Y", generating=True),
        "idle, the first block of X cached": cached,
    }
    found = {
        name: tuple(costs(state, prompts[prompt])["a"] for prompt in "XYZ")
        for name, state in states.items()
    }
    assert found == shown


def test_two_hops() -> None:
    wanted = request(40, "x")

    def fleet(*changes: Any) -> Router:
        made = router(worker(1, "p", "prefill"), worker(2, "d", "decode"))
        apply_all(made, *changes)
        return made

    def both(target: Router) -> tuple[float, float]:
        return costs(target, wanted, "prefill")["p"], costs(target, wanted)["d"]

    idle = fleet()
    plan = idle.plan(wanted)
    assert plan.prefill is not None
    states = {
        "idle": idle,
        "the prefill worker computes X": fleet(idle.booking(plan.prefill, wanted)),
        "the decode worker generates for X": fleet(idle.booking(plan.final, wanted)),
        "the prefill worker has two blocks of X cached": fleet(stored(1, 2)),
    }
    shown = {name: (number(one), number(two)) for name, one, two in rows("two hops")}
    assert {name: both(state) for name, state in states.items()} == shown


@pytest.mark.seed("smart-routing-guide-0.9: tuning: temperature 0.2-0.5")
@pytest.mark.seed("smart-routing-guide-0.9: tuning: temperature 1.0+")
def test_temperature() -> None:
    for temperature, *shares in rows("temperature"):
        chances = probabilities([4.5, 6.5, 10.5], float(temperature))
        digits = [len(cell.partition(".")[2].removesuffix(" %")) for cell in shares]
        found = [f"{100 * one:.{n}f} %" for one, n in zip(chances, digits, strict=True)]
        assert found == shares


def test_two_workers_share_by_temperature_alone() -> None:
    for temperature, share in rows("two workers"):
        for dearer in (1.01, 10.0, 1e6):
            chance = probabilities([1.0, dearer], float(temperature))[1]
            digits = len(share.partition(".")[2].removesuffix(" %"))
            assert f"{100 * chance:.{digits}f} %" == share


def test_preferred() -> None:
    for weights, multiplier, most in rows("preferred"):
        each = [math.inf] if weights.startswith("any") else map(float, weights.split(" + "))
        found = preference_multiplier(each)
        assert f"{found:.3f}" == multiplier
        assert f"{1 / found:.3f} times" == most.removesuffix(" the best other")


def test_the_ratio_at_which_a_preference_gives_way() -> None:
    taint = canonical_taint("zone", "a")
    for local, other, ratio, now, smallest in rows("crossover"):
        wish = constraints((), {taint: 0.85})
        wanted = request(0, constraints=wish)
        fleet = router(worker(1, zone="a"), worker(2, zone="b"))
        # Costs with a fraction come from prefill; 16 tokens are a block.
        loads = (number(local), number(other))
        for place, load in enumerate(loads, start=1):
            blocks, tokens = int(load), 16 * (load - int(load))
            assert tokens.is_integer()
            apply_all(fleet, active(place, f"b{place}", blocks=blocks, prefill_tokens=int(tokens)))
        decision = fleet.plan(wanted).final
        meter = preference(decision)
        assert meter is not None
        assert meter.now is not None
        assert f"{meter.now:.3f}" == ratio
        weight = "none: use required"
        if meter.smallest_weight is not None:
            weight = f"{meter.smallest_weight:.3f}"
        assert weight == smallest
        assert decision.worker is not None
        assert decision.worker.name == ("w1" if now == "stays" else "w2")


def test_policies() -> None:
    shown = {row[0]: row[1:] for row in rows("policies")}

    def decided(policy: str, state: str) -> str:
        settings: dict[str, Any] = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": policy}
        if policy == "preferred":
            settings["kv_transfer_preferred_weight"] = 0.85
        local = None if state == "publishes no zone" else "zone-a"
        fleet = router(
            worker(1, "prefill", "prefill", zone="zone-a"),
            worker(2, "local", "decode", zone=local, total_kv_blocks=1000),
            worker(3, "remote", "decode", zone="zone-b", total_kv_blocks=1000),
            **settings,
        )
        extra = {"costs 1.9 times the other": 9, "costs 2.1 times the other": 11}.get(state, 0)
        if extra:
            apply_all(fleet, active(2, "busy", stage="decode", blocks=extra))
        if state == "is over a busy threshold":
            limit = {"active_decode_blocks_threshold": 0.5}
            full = LoadReported(2, 0, active_decode_blocks=600)
            apply_all(fleet, ThresholdsSet(MODEL, limit), full)
        if state == "is gone":
            apply_all(fleet, WorkerLost(2))
        ends = set()
        for sample in (0.0, 0.99):  # a tie is drawn
            plan = fleet.plan(request(160), samples=(sample, sample))
            chosen = plan.final.worker
            zones = {"local": "zone-a", "remote": "zone-b"}
            ends.add("refused" if chosen is None else zones[chosen.name])
        return ends.pop() if len(ends) == 1 else "either"

    policies = ("required", "preferred", "fallback")
    assert {state: [decided(one, state) for one in policies] for state in shown} == shown


def is_busy(target: Router) -> bool:
    return target.plan(request(16, pin_decode=Pin(1))).final.outcome == "all_busy"


def reported(text: str) -> LoadReported:
    """``51 used blocks`` as a report."""
    amount, _, what = text.partition(" ")
    field = {
        "active blocks": "active_decode_blocks",
        "used blocks": "kv_used_blocks",
        "waiting tokens": "active_prefill_tokens",
    }[what]
    return LoadReported(1, 0, **{field: int(number(amount))})


def test_busy() -> None:
    for threshold, has, reports, busy in rows("busy"):
        name, _, value = threshold.partition(" ")
        amount, _, what = has.partition(" ")
        runtime = {"KV blocks": "total_kv_blocks", "batched tokens": "max_num_batched_tokens"}
        card: dict[str, Any] = {runtime[what]: int(amount)} if what in runtime else {}
        fleet = router(worker(1, **card))
        limit = float(value) if "." in value else int(value)
        apply_all(fleet, ThresholdsSet(MODEL, {name: limit}), reported(reports))
        assert is_busy(fleet) is (busy == "yes"), reports


def test_prefill_load() -> None:
    made = {}
    for column, second in (("all", 6.0), ("one", None)):
        made[column] = router(worker(1))
        for name, tokens, seconds in (("a", 1000, 10.0), ("b", 600, second)):
            change = Booked(name, "aggregated", 1, 0, tokens, predicted_s=seconds)
            assert made[column].apply(change, 0.0).ok
    for at, what, *expected in rows("prefill-load"):
        for one, shown in zip(made.values(), expected, strict=True):
            if "first output" in what:
                one.apply(PrefillDone("a"), float(at))
            one.advance(float(at))
            assert f"{one.load.prefill_tokens[0]:,}" == shown


def test_latch() -> None:
    fleet = router(worker(1, total_kv_blocks=100))
    apply_all(fleet, ThresholdsSet(MODEL, {"active_decode_blocks_threshold": 0.5}))
    for reports, busy in rows("latch"):
        apply_all(fleet, reported(reports))
        assert is_busy(fleet) is (busy == "yes"), reports


def test_distance(tmp_path: Path) -> None:
    (text,) = [
        "\n".join(one.lines)
        for one in blocks((DOCS / "routing" / "distance.md").read_text(encoding="utf-8"))
        if isinstance(one, Block) and one.language == "yaml"
    ]
    path = tmp_path / "links.yaml"
    path.write_text(text)
    links = read_transfer_file(path)
    for tokens, *cells in rows("distance"):
        seconds = links.seconds(int(number(tokens)) * (links.bytes_per_token or 0))
        assert cells == [f"{one * 1000:,.1f} ms, {50 * one:,.3f} blocks" for one in seconds]


def test_every_table_of_the_pages_is_worked_out_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"rows\(\"(.+?)\"\)", here)) == {
        name for page in PAGES for name in tables(page)
    }
