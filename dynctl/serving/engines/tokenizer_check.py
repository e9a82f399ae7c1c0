"""Whether each model has a tokenizer, and whether the frontend and all engines have the same.

Without one, and with a different one, every overlap is zero, without an error.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dynctl.documents.doubts import some_names
from dynctl.health import conditions as codes
from dynctl.serving.engines.fleet import Fleet, Member
from dynctl.serving.routing.prompts import NOT_MODELLED, Prompt
from dynctl.serving.routing.service import RoutingService
from dynctl.tokenization import TokenizationError

#: Texts on which tokenizers and templates tend to differ: digits, case, accents, code, spaces.
TEXT = "Tokenizer check 2026: Été, naïve  façade\n\tif x_1 >= 0x1F: return [3.14, 'ok'] 漢字"
_PROMPTS = (
    ("messages", Prompt(messages=({"role": "user", "content": TEXT},))),
    ("prompt", Prompt(text=TEXT)),
)


#: Statuses with which an engine refuses chats where its model has no chat template: then it
#: refuses the requests too, and no chat is routed without its cached blocks.
_REFUSED = (400, 422)


class TokenizerReading(NamedTuple):
    """What an engine makes of the prompts: name of a prompt -> token ids.

    ``process``: the engine's process that was read, None where unknown. ``chats``: how
    it reads chats, the same for some kinds of engines. ``unread``: prompts that it was tried with,
    and of which it has no tokens.
    """

    engine: str
    process: str | None
    chats: str
    ids: Mapping[str, Sequence[int]]
    unread: frozenset[str]


class TokenizerCheck:
    """Compares the tokenizers of each model: the frontend's, and those of its engines.

    Each engine with ``/tokenize`` is read once, and again after a restart. A model without a
    tokenizer here needs an engine with ``/tokenize``: NO_TOKENIZER holds from when each of its
    engines was tried and none has tokens of a chat, or none of a text.
    """

    def __init__(self, service: RoutingService, fleet: Fleet) -> None:
        self._service = service
        self._fleet = fleet
        self._readings: dict[str, TokenizerReading] = {}

    async def run(self) -> None:
        """Read the engines that are not read yet, and set or end the conditions."""
        names = {member.spec.name for member in self._fleet}
        for name in self._readings.keys() - names:
            del self._readings[name]
        models: dict[str, list[Member]] = {}
        for member in self._fleet:
            if member.worker is not None and member.problem is None:
                models.setdefault(member.worker.model, []).append(member)
        for model, members in models.items():
            await self._check(model, members)

    async def _check(self, model: str, members: Sequence[Member]) -> None:
        readings = [await self._read(member, model) for member in members]
        known = [reading for reading in readings if reading.ids]
        hold = self._fleet.hold_condition
        hold(codes.NO_TOKENIZER, model, self._missing(model, readings))
        if known or all(member.tokenize is False for member in members):
            hold(codes.ENGINE_TOKENIZERS_DIFFER, model, _difference_of_engines(model, known))
            hold(codes.TOKENIZER_DIFFERS, model, await self._difference(model, known))

    async def _read(self, member: Member, model: str) -> TokenizerReading:
        """The engine's reading, without ids where it has no ``/tokenize`` or did not answer."""
        name, process = member.spec.name, member.facts.engine_id
        known = self._readings.get(name)
        if known is not None and member.tokenize and known.process == process:
            return known
        ids: dict[str, Sequence[int]] = {}
        statuses: dict[str, int | None] = {}
        for what, prompt in _PROMPTS:
            if member.tokenize is False:
                statuses[what] = 404
                continue
            answer = await self._fleet.tokenize_at(member, prompt.to_tokenize_body(model))
            statuses[what] = answer.status
            if answer.ids is not None:
                ids[what] = answer.ids
        reading = TokenizerReading(
            name, process, member.kind.chat_reading, ids, _unread(ids, statuses)
        )
        self._readings.pop(name, None)
        if ids:
            self._readings[name] = reading
        return reading

    def _missing(self, model: str, readings: Sequence[TokenizerReading]) -> str | None:
        """That the model has no tokenizer, or none that reads chats, or texts; None where it has
        one, or an engine was not tried."""
        if self._service.preparation.tokenizers.of(model) is not None:
            return None
        unread = frozenset[str].intersection(*(reading.unread for reading in readings))
        if len(unread) == len(_PROMPTS):
            return NOT_MODELLED
        if not unread:
            return None
        prompts = "chats" if "messages" in unread else "texts"
        return (
            f"cache overlap of {prompts} not modelled: the engines' /tokenize returns no token "
            f"ids of {prompts}"
        )

    async def _difference(self, model: str, readings: Sequence[TokenizerReading]) -> str | None:
        """How the tokenizer here and those of engines differ; None without a difference."""
        if self._service.preparation.tokenizers.of(model) is None or not readings:
            return None
        ours, problem = await self._own_ids(model)
        engines, difference = [], problem
        for reading in readings:
            differs = problem or _first_difference(ours, reading.ids, "here", "there")
            if differs:
                engines.append(reading.engine)
                difference = difference or differs
        if not engines:
            return None
        return (
            f"--model-path tokenizes {model} differently from {some_names(engines)} "
            f"({difference}); cached prefixes will not match: use the model's own directory"
        )

    async def _own_ids(self, model: str) -> tuple[Mapping[str, Sequence[int]], str]:
        """What the tokenizer here makes of the prompts, and why it cannot read a text."""
        ids: dict[str, Sequence[int]] = {}
        tokenizers = self._service.preparation.tokenizers
        for what, prompt in _PROMPTS:
            try:
                ids[what] = (await tokenizers.tokenize(model, prompt)).ids or ()
            except TokenizationError as error:
                # Without a chat template here chats are refused, not misrouted.
                if what != "messages":
                    return ids, str(error)
        return ids, ""


def _unread(ids: Mapping[str, Sequence[int]], statuses: Mapping[str, int | None]) -> frozenset[str]:
    """The prompts that an engine answered without token ids, by the statuses of its answers."""
    unread = {what for what, status in statuses.items() if what not in ids and status is not None}
    if statuses["messages"] in _REFUSED and "prompt" not in unread:
        unread.discard("messages")
    return frozenset(unread)


def _difference_of_engines(model: str, readings: Sequence[TokenizerReading]) -> str | None:
    """How engines of one model tokenize differently; None without a difference.

    Texts are compared among all engines, chats among those that read them alike.
    """
    first_alike: dict[str, TokenizerReading] = {}
    for reading in readings:
        alike = first_alike.setdefault(reading.chats, reading)
        for other, prompts in ((readings[0], ("prompt",)), (alike, ("messages", "prompt"))):
            ids = {what: other.ids[what] for what in prompts if what in other.ids}
            difference = _first_difference(
                ids, reading.ids, f"at {other.engine}", f"at {reading.engine}"
            )
            if difference:
                return (
                    f"{other.engine} and {reading.engine} tokenize {model} differently "
                    f"({difference}): a prefix that one has cached is not found for the other"
                )
    return None


def _first_difference(
    ours: Mapping[str, Sequence[int]], theirs: Mapping[str, Sequence[int]], here: str, there: str
) -> str:
    """The difference of the first prompt that both have and tokenize differently; else empty."""
    for what, ids in ours.items():
        if what in theirs and list(ids) != list(theirs[what]):
            return difference_of(what, list(ids), list(theirs[what]), here, there)
    return ""


def difference_of(
    what: str, ours: list[int], theirs: list[int], here: str = "here", there: str = "there"
) -> str:
    """Two lists of token ids that differ, without their ids."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    return f"{what}: {len(ours)} tokens {here}, {len(theirs)} {there}, the first difference at {at}"
