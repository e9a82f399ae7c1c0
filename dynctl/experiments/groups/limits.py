"""Group "limits": bad requests get the right status, and the server answers afterwards."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from dynctl.base.errors import single_line
from dynctl.experiments.canary import Chat, Reply
from dynctl.experiments.groups.group import Bench, TrialGroup
from dynctl.findings.runner import Check, Outcome, Passed, Skipped, Wrong, found

_UNKNOWN_MODEL: Final = "dynctl-test-unknown-model"
_WORDS: Final = 12
_BAD_JSON: Final = b'{"model": "dynctl-test", "messages": ['
_WRONG_KEY: Final = "dynctl-test-wrong-key"
_MODEL: Final = "an unknown model"
_JSON: Final = "invalid JSON"
_KEY: Final = "a wrong key"
_LENGTH: Final = "a prompt beyond the context"
_ANSWERS_EVERY_NAME: Final = "sglang"
"""``owned_by`` of an engine that ignores the name of the model: SGLang 0.5 does."""
_LONGEST_CONTEXT: Final = 40_000
"""Tokens. A prompt beyond a larger context costs too much to be sent."""


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Replies to requests that must be refused; absent where they were not sent.

    ``context``: tokens of the model's context, None: the server does not report it. ``after``: by
    bad request, the reply to a good one that followed; the first that failed ends the group.
    ``any_name``: the engine is known to answer under every name of a model.
    """

    model: str
    refused: Mapping[str, Reply]
    after: Mapping[str, Reply]
    context: int | None
    any_name: bool = False


async def _gather(bench: Bench) -> LimitFacts:
    client, model = bench.client, bench.subject.model
    good = Chat(model, (bench.prompts.fresh(_WORDS),))
    body = json.dumps(good.body()).encode()
    context = bench.subject.context
    bad: dict[str, Callable[[], Awaitable[Reply]]] = {
        _MODEL: lambda: client.chat(Chat(_UNKNOWN_MODEL, good.turns)),
        _JSON: lambda: client.send_body(_BAD_JSON),
    }
    if client.has_key:
        bad[_KEY] = lambda: client.send_body(body, _WRONG_KEY)
    if context is not None and context <= _LONGEST_CONTEXT:
        long = Chat(model, (bench.prompts.fresh(context + 64),))
        bad[_LENGTH] = lambda: client.chat(long)
    refused: dict[str, Reply] = {}
    after: dict[str, Reply] = {}
    for name, send in bad.items():
        refused[name] = await send()
        after[name] = await client.chat(good)
        if not after[name].answered:
            break
    any_name = bench.subject.row.get("owned_by") == _ANSWERS_EVERY_NAME
    return LimitFacts(model, refused, after, context, any_name)


def _judge(facts: LimitFacts, name: str, right: tuple[int, ...], instead: str = "") -> Outcome:
    """``instead``: why the request was not sent, where no earlier one ended the group."""
    reply = facts.refused.get(name)
    if reply is None:
        ended = not all(reply.answered for reply in facts.after.values())
        return Skipped("the server did not answer after an earlier request" if ended else instead)
    if reply.status in right:
        return Passed(single_line(str(reply), 80))
    return Wrong((found(facts.model, reply=str(reply)),))


def _unknown_model(facts: LimitFacts) -> Outcome:
    if facts.any_name and facts.refused[_MODEL].answered:
        return Skipped("SGLang answers under every name: a router has to check names")
    return _judge(facts, _MODEL, (404, 400))


def _bad_json(facts: LimitFacts) -> Outcome:
    return _judge(facts, _JSON, (400, 422))


def _too_long(facts: LimitFacts) -> Outcome:
    large = f"a prompt of more than {facts.context} tokens is too large for a test"
    unknown = "/v1/models has no max_model_len"
    instead = unknown if facts.context is None else large
    return _judge(facts, _LENGTH, (400, 413, 422), instead)


def _wrong_key(facts: LimitFacts) -> Outcome:
    instead = "the requests of this test have no key (--api-key-env NAME)"
    return _judge(facts, _KEY, (401, 403), instead)


def _lives_on(facts: LimitFacts) -> Outcome:
    for name, reply in facts.after.items():
        if not reply.answered:
            return Wrong((found(facts.model, after=name, reply=str(reply)),))
    return Passed(f"{len(facts.after)} replies")


LIMITS: Final = TrialGroup(
    "limits",
    "limits",
    requests=8,
    generated=8,
    gather=_gather,
    checks=(
        Check("DYE0901", _unknown_model),
        Check("DYE0902", _bad_json),
        Check("DYE0903", _too_long),
        Check("DYE0904", _wrong_key),
        Check("DYE0905", _lives_on),
    ),
)
