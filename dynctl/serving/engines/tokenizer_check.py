"""Whether each model has a tokenizer, and whether it is the engine's.

Without one, and with a different one, every overlap is zero, without an error.
"""

from dynctl.health import conditions as codes
from dynctl.serving.fleet import Fleet, Member
from dynctl.serving.prompts import NOT_MODELLED, Prompt
from dynctl.serving.service import RoutingService
from dynctl.tokenization import TokenizationError

#: Texts on which tokenizers and templates tend to differ: digits, case, accents, code, spaces.
TEXT = "Tokenizer check 2026: Été, naïve  façade\n\tif x_1 >= 0x1F: return [3.14, 'ok'] 漢字"
_PROMPTS = (
    ("messages", Prompt(messages=({"role": "user", "content": TEXT},))),
    ("prompt", Prompt(text=TEXT)),
)


class TokenizerCheck:
    """Compares once for each model, with the first of its engines that has ``/tokenize``.

    A model without a tokenizer here needs an engine with ``/tokenize``: NO_TOKENIZER holds while
    it has none.
    """

    def __init__(self, service: RoutingService, fleet: Fleet) -> None:
        self._service = service
        self._fleet = fleet
        self._checked: set[str] = set()

    async def run(self) -> None:
        """Check the models that are not checked yet. A model that left is checked again."""
        self._checked &= set(self._service.models())
        for model in self._service.models():
            await self._find_tokenizer(model)
        for member in self._fleet:
            worker = member.worker
            if worker is None or member.problem is not None or worker.model in self._checked:
                continue
            if self._service.tokenizers.of(worker.model) is None or member.tokenize is False:
                continue
            await self._check(member, worker.model)

    async def _find_tokenizer(self, model: str) -> None:
        members = [
            member
            for member in self._fleet
            if member.worker is not None and member.worker.model == model and not member.problem
        ]
        if self._service.tokenizers.of(model) is None:
            for member in members:
                if member.tokenize is None:
                    body = Prompt(text=TEXT).to_tokenize_body(model)
                    await self._fleet.tokenize_at(member, body)
                if member.tokenize:
                    break
            else:
                if members and all(member.tokenize is False for member in members):
                    self._service.set_condition(codes.NO_TOKENIZER, model, NOT_MODELLED)
                return
        self._service.clear_condition(codes.NO_TOKENIZER, model)

    async def _check(self, member: Member, model: str) -> None:
        compared, difference = False, None
        for what, prompt in _PROMPTS:
            theirs = await self._fleet.tokenize_at(member, prompt.to_tokenize_body(model))
            if theirs is None:
                continue
            try:
                ours = list((await self._service.tokenizers.tokenize(model, prompt)).ids or ())
            except TokenizationError as error:
                if what == "messages":
                    continue  # no chat template here: chats are refused, not misrouted
                difference = str(error)
                continue
            compared = True
            if ours != theirs:
                difference = difference_of(what, ours, theirs)
                break
        if difference is not None:
            message = (
                f"--model-path tokenizes {model} differently from {member.spec.name} "
                f"({difference});"
                " cached prefixes will not match: use the model's own directory"
            )
            self._service.set_condition(codes.TOKENIZER_DIFFERS, model, message)
        if compared:
            self._checked.add(model)


def difference_of(what: str, ours: list[int], theirs: list[int]) -> str:
    """Two lists of token ids that differ, without their ids."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    return f"{what}: {len(ours)} tokens here, {len(theirs)} there, the first difference at {at}"
