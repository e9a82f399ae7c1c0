"""Situations that users have, one row each: requests, names, worker sets, rejected workers.

For every request the answer of `route` is compared with what the real frontend does. A row is right
if every request goes where the answer allows; an answer that is called certain allows one outcome.
The summary at the end of the run has the rates.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.documents.route_result import DecisionResult, RouteResult
from dynctl.sources.dynamo.source import DynamoSource
from dynctl.sources.query import RouteQuery
from tests.dynamo.chats import SEARCH, WEATHER, assistant, user, words
from tests.dynamo.fleet import HERE, TINY_MODEL, DynamoFleet, WorkerPlan, aggregated, two_zones
from tests.dynamo.observed import Observed, observing

Body = Mapping[str, Any]
Outcome = tuple[int, int] | None
"""(prefill worker, decode worker), as Dynamo reports them; None: the request is refused."""


# -- rows ------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One scenario: how many requests went where their answers allowed."""

    name: str
    asked: int = 0
    hits: int = 0
    decided: int = 0
    certain: int = 0
    refused: int = 0
    doubts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        codes = ", ".join(f"{code} {count}" for code, count in sorted(self.doubts.items()))
        return (
            f"{self.name}: {self.hits} of {self.asked}, {self.decided} with one outcome, "
            f"{self.certain} certain, {self.refused} refused" + (f"; doubts: {codes}" * bool(codes))
        )

    def take(self, body: Body, result: RouteResult | None, outcome: Outcome) -> None:
        """``result`` None: `route` refused the body."""
        expected = {None} if result is None else outcomes(result)
        self.asked += 1
        self.decided += len(expected) == 1
        self.refused += outcome is None
        hit = outcome in expected
        self.hits += hit
        if result is not None:
            self.certain += result.certain
            self.doubts.update({one.code for one in result.doubts if one.matters})
        if not hit:
            shown = {key: value for key, value in body.items() if key not in ("messages", "prompt")}
            self.wrong.append(f"{shown}: {outcome} is not in {expected}")
        if result is not None and result.certain:
            assert expected == {outcome}, f"certain, and wrong: {self.wrong}"

    def right(self) -> None:
        assert self.hits == self.asked, "\n".join([str(self), *self.wrong])


def outcomes(result: RouteResult) -> set[Outcome]:
    """What the answer allows: any worker set that can be drawn, any of the tied workers."""
    if result.worker_sets:
        drawn = [row for row in result.worker_sets if row.share]
        return set().union(*(hops(row.prefill, [row.decode]) for row in drawn)) or {None}
    found: set[Outcome] = set()
    for one in result.decode_by_prefill:
        found |= pairs(one.prefill.worker_id, one.decode)
    return found or hops(result.prefill, [result.decode])


def hops(prefill: DecisionResult | None, decodes: Sequence[DecisionResult | None]) -> set[Outcome]:
    if prefill is None:
        return set().union(*(pairs(None, decode) for decode in decodes))
    if prefill.winner is None:
        return {None}
    tied = prefill.tied or [prefill.winner]
    return set().union(*(pairs(ref.worker_id, one) for ref in tied for one in decodes))


def pairs(prefill: int | None, decode: DecisionResult | None) -> set[Outcome]:
    if decode is None or decode.winner is None:
        return {None}
    chosen = decode.tied or [decode.winner]
    return {(prefill or ref.worker_id, ref.worker_id) for ref in chosen}


def source(fleet: DynamoFleet, namespace: str = "dynamo", kv: Path | None = None) -> DynamoSource:
    options = GlobalOptions(
        discovery="file", file_kv=kv or fleet.file_kv, dyn_namespace=namespace, wait=10.0
    )
    return DynamoSource(options, (fleet.frontend.url,))


def predicted(fleet: DynamoFleet, body: Body, namespace: str = "dynamo") -> RouteResult | None:
    try:
        return source(fleet, namespace).route(RouteQuery(body=body))
    except UsageProblem as error:
        if "400" in error.message or "a Dynamo frontend refuses" in error.message:
            return None
        raise


async def ask(
    fleet: DynamoFleet, seen: Observed, row: Row, bodies: Sequence[Body], namespace: str = "dynamo"
) -> None:
    """Predict each request, send it, and compare; also the number of prompt tokens."""
    for body in bodies:
        await seen.quiet()
        result = await asyncio.to_thread(predicted, fleet, body, namespace)
        answer = await asyncio.to_thread(fleet.frontend.send, body)
        outcome = None
        if answer.ok:
            placed = answer.placement
            assert placed.decode is not None
            outcome = (placed.prefill or placed.decode, placed.decode)
            if result is not None and answer.prompt_tokens is not None:
                assert result.tokens == answer.prompt_tokens, body
        if outcome is None and result is not None and not result.worker_sets:
            assert result.status in (None, answer.status), body
        row.take(body, result, outcome)


def run_row(
    fleet: DynamoFleet, name: str, bodies: Sequence[Body], *, namespace: str = "dynamo"
) -> Row:
    """Ask for every body on a fleet that is observed meanwhile."""
    row = Row(name)

    async def run() -> None:
        async with observing(fleet, namespace=None if namespace == "*" else namespace) as seen:
            await ask(fleet, seen, row, bodies, namespace)

    asyncio.run(run())
    return row


def twice(bodies: Sequence[Body]) -> list[Body]:
    """Each body, and each again when its prompt is cached: then it has one best worker."""
    return [body for one in bodies for body in (one, one)]


def prompts(count: int, seed: int, least: int = 40) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randrange(3, 300) for _ in range(least + chance.randrange(90))]
        for _ in range(count)
    ]


def chats(count: int, seed: int) -> list[list[dict[str, Any]]]:
    return [[user(words(seed + number, 12 + 5 * number))] for number in range(count)]


# -- the body of a request -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoFleet]:
    """Three workers that keep what they see, with an alias and an adapter; one has a taint. The
    chat template prints everything that it gets."""
    model = tmp_path_factory.mktemp("scenarios") / "model"
    shutil.copytree(TINY_MODEL, model)
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    shutil.copy(HERE / "templates" / "everything.jinja", model / "chat_template.jinja")
    args = ("--cache", "--alias", "other", "--lora", "law")
    plans = aggregated(2, kind="held", args=args)
    plans.append(WorkerPlan("tainted", kind="held", args=(*args, "--taint", "gpu=x")))
    with DynamoFleet(plans, model_dir=model, blocks=4096) as fleet:
        yield fleet


ENDED = {"continue_final_message": True, "add_generation_prompt": False}
FIELDS: dict[str, list[dict[str, Any]]] = {
    "tools": [
        {"tools": [WEATHER]},
        {"tools": [WEATHER, SEARCH], "tool_choice": "auto"},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"tools": [SEARCH], "tool_choice": "required"},
    ],
    "template arguments": [
        {"chat_template_kwargs": {"style": "short"}},
        {"chat_template_args": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {
            "thinking": {"type": "disabled"},
            "chat_template_kwargs": {"add_generation_prompt": False},
        },
    ],
    "generation prompt": [{"add_generation_prompt": False}, {"add_generation_prompt": True}],
    "cache salt": [
        {"cache_salt": "one"},
        {"nvext": {"cache_salt": "two"}},
        {"cache_salt": "one", "nvext": {"cache_salt": "three"}},
    ],
    "fields that Dynamo refuses": [
        {"chat_template": "x"},
        {"documents": [{"text": "a"}]},
        {"continue_final_message": True},
    ],
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_a_body(name: str, bodies: DynamoFleet, finding: Callable[[str], None]) -> None:
    asked = [
        {"messages": chat, **fields}
        for number, fields in enumerate(FIELDS[name])
        for chat in chats(2, seed=100 * number + len(name))
    ]
    row = run_row(bodies, f"body: {name}", twice(asked))
    finding(str(row))
    row.right()
    assert row.decided >= row.asked / 2


def test_the_final_message_is_continued(
    bodies: DynamoFleet, finding: Callable[[str], None]
) -> None:
    endings = ["It is", "  padded on both sides ", "so", 'a "quoted" <end>', "line\nline\n"]
    asked = [
        {"messages": [user("so?"), assistant(words(7, 30) + text)], **ENDED} for text in endings
    ]
    row = run_row(bodies, "body: continue_final_message", twice(asked))
    finding(str(row))
    row.right()


def test_pins_and_constraints_of_a_body(
    bodies: DynamoFleet, finding: Callable[[str], None]
) -> None:
    ids = {name: worker.instance_id for name, worker in bodies.workers.items()}
    required = {"required_taints": ["gpu=x"]}
    controls: list[dict[str, Any]] = [
        {"backend_instance_id": ids["worker-1"]},
        {"decode_worker_id": ids["worker-0"]},
        {"decode_worker_id": ids["worker-0"], "dp_rank": 0},
        {"prefill_worker_id": ids["worker-1"]},
        {"backend_instance_id": 12345},
        {"routing_constraints": required},
        {"routing_constraints": {"preferred_taints": {"gpu=x": 0.5}}},
        {"routing_constraints": {"required_taints": ["gpu=y"]}},
        {"backend_instance_id": ids["worker-1"], "routing_constraints": required},
        {"token_data": prompts(1, 77)[0]},
    ]
    asked: list[Body] = [
        {"prompt": tokens, "nvext": nvext}
        for nvext, tokens in zip(controls, prompts(len(controls), 5), strict=True)
    ]
    given = {"token_data": prompts(1, 78)[0]}
    asked += [{"prompt": "a text", "nvext": given}, {"messages": chats(1, 79)[0], "nvext": given}]
    row = run_row(bodies, "body: nvext", twice(asked))
    finding(str(row))
    row.right()
    assert row.refused == 6


def test_adapters_and_aliases_are_names_of_the_same_workers(
    bodies: DynamoFleet, finding: Callable[[str], None]
) -> None:
    asked = [
        {"model": name, "prompt": tokens}
        for tokens in prompts(3, seed=11)
        for name in ("tiny", "other", "law", "law", "tiny")
    ]
    row = run_row(bodies, "names: base, alias, LoRA adapter", asked)
    finding(str(row))
    row.right()
    salted = [{"model": "law", "prompt": tokens, "cache_salt": "x"} for tokens in prompts(3, 12)]
    both = run_row(bodies, "names: LoRA adapter with a salt", twice(salted))
    finding(str(both))
    both.right()
    assert both.decided >= 3


def test_several_prompts_are_declared(bodies: DynamoFleet, finding: Callable[[str], None]) -> None:
    first, second = prompts(2, seed=13)
    result = predicted(bodies, {"prompt": [first, second]})
    assert result is not None
    assert "DYR0720" in {one.code for one in result.doubts}
    assert bodies.frontend.send({"prompt": [first, second]}).ok
    finding("body: several prompts: declared (DYR0720)")


def test_fields_of_a_card_that_are_not_known_are_declared(
    bodies: DynamoFleet, tmp_path: Path, finding: Callable[[str], None]
) -> None:
    kv = tmp_path / "kv"
    shutil.copytree(bodies.file_kv, kv)
    card = sorted((kv / "v1" / "mdc").glob("*[!l][!a][!w]"))[0]
    document = json.loads(card.read_text())
    document["card_json"]["runtime_config"]["cost_bias"] = 0.5
    card.write_text(json.dumps(document))
    result = source(bodies, kv=kv).route(RouteQuery(token_ids=prompts(1, 14)[0]))
    [found] = [one for one in result.doubts if one.code == "DYR0724"]
    assert found.what.endswith("runtime_config.cost_bias")
    assert not result.certain
    finding("card: unknown field: declared (DYR0724)")


# -- workers with another arithmetic, and limits ---------------------------------------------------


def test_speculative_workers(finding: Callable[[str], None]) -> None:
    lengths = [15, 16, 17, 32, 33, 48, 49, 120, 121]
    asked = [
        {"prompt": tokens[:length]}
        for length, tokens in zip(lengths, prompts(len(lengths), 21, least=130), strict=True)
    ]
    with DynamoFleet(aggregated(3, kind="held", args=("--eagle", "--cache"))) as fleet:
        row = run_row(fleet, "Eagle", twice(asked))
        longest = asked[-1]["prompt"]
        result = predicted(fleet, {"prompt": longest})
        logit = fleet.frontend.log_lines("Selected worker")
        fleet.frontend.dry_run(longest)
        fleet.wait_until(
            lambda: len(fleet.frontend.log_lines("Selected worker")) > len(logit), "a decision"
        )
        [chosen] = fleet.frontend.log_lines("Selected worker", 0)[-1:]
    finding(str(row))
    row.right()
    assert row.decided >= len(asked) - 3
    assert result is not None
    assert result.decode is not None
    cost = min(one.cost for one in result.decode.candidates)
    assert f"logit={cost:.4g}" in chosen.replace(f"{cost}", f"{cost:.4g}")


def test_a_prompt_over_the_length_is_declared(finding: Callable[[str], None]) -> None:
    plan = WorkerPlan("short", args=("--max-model-len", "512"))
    with DynamoFleet([plan], speedup=0) as fleet:
        tokens = prompts(1, 31, least=600)[0]
        for length, served in ((400, True), (600, False)):
            result = predicted(fleet, {"prompt": tokens[:length]})
            assert result is not None
            assert ("DYR0721" in {one.code for one in result.doubts}) is not served
            answer = fleet.frontend.send({"prompt": tokens[:length]})
            assert answer.status == (200 if served else 500), answer
    finding("prompt over the length: declared (DYR0721), Dynamo answers 500")


def test_pins_that_cross_the_required_domain(finding: Callable[[str], None]) -> None:
    with DynamoFleet(two_zones("required"), speedup=0) as fleet:
        ids = {name: worker.instance_id for name, worker in fleet.workers.items()}
        pins: list[dict[str, Any]] = [
            {"prefill_worker_id": ids["prefill-a0"], "decode_worker_id": ids["decode-b0"]},
            {"prefill_worker_id": ids["prefill-b0"], "decode_worker_id": ids["decode-b0"]},
            {"prefill_worker_id": ids["prefill-a0"]},
            {"decode_worker_id": ids["decode-b0"]},
            {"backend_instance_id": ids["decode-b0"]},
            {"prefill_worker_id": ids["decode-a0"]},
        ]
        asked = [
            {"prompt": tokens, "nvext": pin}
            for pin in pins
            for tokens in prompts(2, seed=41 + len(pin))
        ]
        row = run_row(fleet, "pins that cross the required domain", asked)
    finding(str(row))
    row.right()
    assert row.refused >= 6


# -- worker sets -----------------------------------------------------------------------------------

OTHER = ("--component", "other", "--cache")
SETS: dict[str, tuple[list[WorkerPlan], str, set[str]]] = {
    "two components": (
        [
            *aggregated(2, kind="held", args=("--cache",)),
            WorkerPlan("other-0", kind="held", args=OTHER),
        ],
        "dynamo",
        {"dynamo/backend", "dynamo/other"},
    ),
    "aggregated and disaggregated": (
        [
            *aggregated(2, kind="held", args=("--cache",)),
            WorkerPlan("prefill-0", "prefill", kind="held", args=("--cache",)),
            WorkerPlan("prefill-1", "prefill", kind="held", args=("--cache",)),
            WorkerPlan("decode-0", "decode", kind="held"),
        ],
        "dynamo",
        {"dynamo/backend aggregated", "dynamo/backend decode"},
    ),
    "namespace prefix": (
        [
            WorkerPlan("one", kind="held", args=("--namespace", "ns-1", "--cache")),
            WorkerPlan("prefill", "prefill", kind="held", args=("--namespace", "ns-2", "--cache")),
            WorkerPlan("decode", "decode", kind="held", args=("--namespace", "ns-2")),
            WorkerPlan("lonely", "decode", kind="held", args=("--namespace", "ns-3")),
        ],
        "ns-*",
        {"ns-1/backend", "ns-2/backend", "ns-3/backend"},
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_worker_sets(name: str, finding: Callable[[str], None]) -> None:
    plans, namespace, sets = SETS[name]
    flags = ("--namespace-prefix", "ns-") if namespace == "ns-*" else ()
    tokens = prompts(6, seed=51)
    with DynamoFleet(plans, frontend_args=flags) as fleet:
        row = run_row(
            fleet,
            f"worker sets: {name}",
            [{"prompt": one} for one in (*tokens, *tokens)],
            namespace=namespace,
        )
        result = predicted(fleet, {"prompt": tokens[0]}, namespace)
        # The same prompt, whose cache would attract every request within one set.
        used = Counter(
            fleet.frontend.send({"prompt": tokens[0]}).placement.decode for _ in range(72)
        )
        workers = {worker.instance_id: name for name, worker in fleet.workers.items()}
    finding(f"{row}; drawn: {dict(sorted((workers[one or 0], n) for one, n in used.items()))}")
    assert result is not None
    assert {one.name for one in result.worker_sets} == sets
    for one in result.worker_sets:
        members = one.decode.candidates if one.decode is not None else []
        drawn = sum(used[member.worker_id] for member in members)
        assert bool(drawn) is bool(one.share), (one.name, used)
    assert "DYR0722" in {one.code for one in result.doubts}
    shares = {one.name: one.share for one in result.worker_sets}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares.get("ns-3/backend", 0.0) == 0.0
    row.right()


def test_two_components_of_one_role(finding: Callable[[str], None]) -> None:
    """A frontend of 1.6.1 cannot pair them, and serves none."""
    plans = [
        WorkerPlan("prefill", "prefill", kind="held"),
        WorkerPlan("decode-0", "decode", kind="held"),
        WorkerPlan("decode-1", "decode", kind="held", args=("--component", "more")),
    ]
    with DynamoFleet(plans, serves=False) as fleet:
        row = run_row(fleet, "two components of one role", [{"prompt": prompts(1, 65)[0]}])
        result = predicted(fleet, {"prompt": prompts(1, 66)[0]})
    finding(str(row))
    row.right()
    assert result is not None
    assert (result.ok, result.status) == (False, 503)
    assert "DYR0726" in {one.code for one in result.doubts}


def test_a_pin_in_one_of_two_sets(finding: Callable[[str], None]) -> None:
    """Dynamo draws the set first, and refuses the request where the worker is not in it."""
    plans, _, _ = SETS["two components"]
    with DynamoFleet(plans) as fleet:
        pinned = {"backend_instance_id": fleet.workers["other-0"].instance_id}
        asked = [{"prompt": tokens, "nvext": pinned} for tokens in prompts(8, seed=61)]
        row = run_row(fleet, "worker sets: a pin", asked)
    finding(str(row))
    row.right()
    assert row.doubts["DYR0722"] == row.asked


# -- rejected workers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--context-length", "4096"), "context length 4,096 instead of 8,192"),
        (("--block-size", "32"), "block size 32 instead of 16"),
        (("--alias", "other"), "other aliases"),
    ],
    ids=["length", "block size", "aliases"],
)
def test_a_worker_whose_card_the_frontend_rejected(
    args: tuple[str, ...], why: str, finding: Callable[[str], None]
) -> None:
    late = WorkerPlan("late", kind="held", late=True, args=(*args, "--cache"))
    with DynamoFleet([*aggregated(1, kind="held", args=("--cache",)), late]) as fleet:
        fleet.start_worker("late", wait=False)
        fleet.wait_until(
            lambda: (
                fleet.workers["late"].learn_instance_id()
                and any(fleet.frontend.log_lines("Rejected incompatible workers"))
            ),
            "the frontend to reject the card",
        )
        row = run_row(fleet, f"rejected card: {why}", [{"prompt": one} for one in prompts(4, 71)])
        result = predicted(fleet, {"prompt": prompts(1, 72)[0]})
        assert result is not None
        assert result.decode is not None
        rejected = [one for step in result.decode.funnel for one in step.rejected]
        assert [one.message for one in rejected] == [f"the frontend rejected its card: {why}"]
        alone = DynamoSource(GlobalOptions(discovery="file", file_kv=fleet.file_kv))
        blind = alone.route(RouteQuery(token_ids=prompts(1, 73)[0]))
    finding(str(row))
    row.right()
    # Before its first request, the metrics of a frontend may be equal for two versions.
    assert row.decided >= row.asked - 1
    # Without a frontend nothing shows which of the cards it accepted.
    assert "DYR0723" in {one.code for one in blind.doubts}
    assert not blind.certain
