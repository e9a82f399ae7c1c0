"""Answers from a saved view (or the embedded demo fleet): no network, the router itself decides."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from dynctl import version
from dynctl.base.errors import UsageProblem
from dynctl.base.naming import resolve_worker
from dynctl.documents.config import ConfigDocument, config_document
from dynctl.documents.route_result import RouteResult, route_result
from dynctl.documents.snapshot import DecisionLine, Header, Part, Snapshot
from dynctl.documents.view import MAX_BYTES, SavedView, decode_view, encode_view
from dynctl.documents.workers import WorkerRow, worker_rows
from dynctl.settings.router_settings import parse_assignments
from dynctl.sources.query import RouteQuery, choose_model
from dynctl.sources.source import Values
from dynctl.sources.thresholds.replicas import Replica
from router_core import (
    SETTINGS,
    Pin,
    Router,
    RouterConfig,
    RoutingRequest,
    ThresholdsSet,
    WhatIf,
    constraints,
    hash_prompt,
)

if TYPE_CHECKING:
    from dynctl.tokenization import ModelTokenizer


class ViewSource:
    """A router at one moment. Dry runs never change it, so they repeat byte for byte."""

    def __init__(self, view: SavedView, title: str) -> None:
        self.view = view
        self.title = title
        self.doubts: tuple[str, ...] = ()

    @property
    def router(self) -> Router:
        return self.view.router

    def route(self, query: RouteQuery) -> RouteResult:
        """The plan for a prompt; raises UsageProblem where the view cannot answer."""
        router = self.router
        model = choose_model(query.model, router.registry.models())
        assumptions = list(self.view.assumptions)
        tokens = self._tokens(query, model, assumptions)
        size = self._block_size(model, assumptions)
        workers = [(worker.worker_id, worker.name) for worker in router.registry]
        config, load, shown = what_if(router, query.assignments)
        if shown:
            assumptions.append("what if " + ", ".join(f"{k}={v}" for k, v in shown.items()))

        def pin(text: str | None) -> Pin | None:
            return None if text is None else Pin(resolve_worker(text, workers))

        request = RoutingRequest(
            id=_stable_id(tokens, query),
            model=model,
            isl_tokens=len(tokens),
            block_size=size,
            sequence_hashes=hash_prompt(tokens, size).sequence,
            constraints=constraints(query.required, query.preferred),
            pin_prefill=pin(query.pin_prefill),
            pin_decode=pin(query.pin_decode),
        )
        looked_at = router.view(config, load)
        plan = router.plan(request, samples=_samples(tokens), view=looked_at, detail=True)
        return route_result(
            router,
            request,
            plan,
            now=self.view.now,
            view=looked_at,
            preset=self.view.preset,
            assumptions=assumptions,
            load_source=self.view.source,
        )

    def workers(self, *, index: bool = True) -> list[WorkerRow]:
        return worker_rows(self.router, self.view.now)

    def thresholds(self) -> dict[str, dict[str, float | int | None]]:
        """Model -> threshold name -> value."""
        registry, busy = self.router.registry, self.router.busy
        return {model: busy.thresholds(model).to_dict() for model in registry.models()}

    def set_thresholds(
        self, model: str, values: Mapping[str, float | int | None]
    ) -> dict[str, float | int | None]:
        """A view is a record of the past: it can be asked "what if", not changed."""
        raise UsageProblem(
            f"{self.title} is a saved view and cannot be changed",
            "--dry-run shows what the thresholds would do; --frontend URL sets them live",
        )

    def refuse(self, model: str, present: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Trying out is what a view is for; :meth:`set_thresholds` refuses."""

    def nearest(self, values: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
        return dict(values)

    @contextmanager
    def replicas(self) -> Iterator[list[Replica]]:
        """The view itself, which holds what one frontend held."""
        yield [Replica(self.title, self, self.workers)]

    def judged(self, model: str, values: Mapping[str, float | int | None]) -> list[WorkerRow]:
        """The workers as they would be under other thresholds; the view itself stays."""
        router = Router.restore(self.router.snapshot())
        applied = router.apply(ThresholdsSet(model, values), self.view.now)
        if not applied.ok:
            raise UsageProblem(applied.message)
        return worker_rows(router, self.view.now)

    def config(self) -> ConfigDocument:
        """The router's settings; their source is this view."""
        return config_document(
            self.router.config,
            version=version(),
            preset=self.view.preset,
            sources=dict.fromkeys(SETTINGS, self.title),
        )

    def decision(self, decision_id: str) -> RouteResult:
        raise UsageProblem(
            f"{self.title} keeps no decisions, so {decision_id} cannot be looked up in it",
            "ask the frontend that made it: dynctl why ID --frontend URL",
        )

    def save(self) -> bytes:
        """The view as a file's bytes."""
        view = self.view
        return encode_view(
            view.router.capture(),
            now=view.now,
            preset=view.preset,
            model_paths=view.model_paths,
            tokenizers=view.tokenizers,
            assumptions=view.assumptions,
            source=view.source,
            chats=view.chats,
        )

    def tokens(self, query: RouteQuery, model: str) -> list[int]:
        """The prompt's token ids; raises UsageProblem where no tokenizer is known."""
        return self._tokens(query, model, [])

    def _tokens(self, query: RouteQuery, model: str, assumptions: list[str]) -> list[int]:
        if query.token_ids is not None:
            return list(query.token_ids)
        from dynctl.tokenization import load_tokenizer

        known = self.view.model_paths.get(model)
        path = query.model_path or known
        if path is None or not Path(path).is_dir():
            where = f"the view names {path}, which is not here" if path else "the view names none"
            raise UsageProblem(
                f"no tokenizer for model {model}: {where}",
                "give --model-path DIR (a directory with tokenizer.json), or --tokens FILE",
            )
        tokenizer = load_tokenizer(path)
        saved = self.view.tokenizers.get(model)
        if saved is not None and saved != tokenizer.fingerprint:
            assumptions.append(
                f"{path} is not the tokenizer that the view was saved with: cached blocks may "
                "not match"
            )
        if query.messages is not None:
            return self._encode_chat(tokenizer, list(query.messages))
        return tokenizer.encode_prompt(query.prompt or "")

    def _encode_chat(
        self, tokenizer: ModelTokenizer, messages: list[Mapping[str, Any]]
    ) -> list[int]:
        """A chat's token ids, as the frontend that the view is of would make them."""
        if self.view.chats == "dynamo":
            from dynctl.tokenization import as_dynamo_reads

            return tokenizer.encode_chat(as_dynamo_reads(tokenizer, messages).messages)
        return tokenizer.encode_chat(messages)

    def _block_size(self, model: str, assumptions: list[str]) -> int:
        sizes = [w.block_size for w in self.router.registry if w.model == model]
        if len(set(sizes)) > 1:
            assumptions.append(
                f"workers have blocks of {', '.join(map(str, sorted(set(sizes))))} tokens; "
                f"{sizes[0]} is used"
            )
        return sizes[0]


def open_view(path: Path) -> ViewSource:
    """Read a view file; raises UsageProblem or WireError naming the file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageProblem(f"--view {path}: over the limit of {MAX_BYTES:,} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise UsageProblem(
            f"--view {path}: {error.strerror}", "save one: dynctl route PROMPT --save-view FILE"
        ) from None
    return open_view_bytes(data, f"--view {path}", f"view {path.name}")


def open_view_bytes(data: bytes, where: str, title: str) -> ViewSource:
    """A view from the bytes of its file; ``where`` is what an error names."""
    from dynctl.base.decode_errors import WireError

    try:
        return ViewSource(decode_view(data), title)
    except WireError as error:
        raise UsageProblem(f"{where}: {error}", "save a new one: --save-view FILE") from None


def _stable_id(tokens: list[int], query: RouteQuery) -> str:
    """The same question has the same id: a dry run that is repeated prints the same bytes."""
    asked = repr((query.required, sorted(query.preferred.items()), query.assignments))
    pins = repr((query.pin_prefill, query.pin_decode))
    return "dry-" + xxh3_64_hexdigest(array("q", tokens).tobytes() + (asked + pins).encode())[:12]


def _samples(tokens: list[int]) -> tuple[float, float]:
    """Chance for a dry run: fair over prompts, and the same for the same prompt.

    Only the prompt counts, so that ``--set`` shows what it changes and not another draw.
    """
    data = array("q", tokens).tobytes()
    first, second = (xxh3_64_intdigest(data, seed) for seed in (1, 2))
    return (first >> 11) / 2**53, (second >> 11) / 2**53


LOADS = ("prefill_tokens", "decode_blocks")
_PREFIX = "load."
_MOST = 1 << 40


def what_if(
    router: Router, assignments: Iterable[str]
) -> tuple[RouterConfig | None, WhatIf | None, dict[str, Any]]:
    """The settings and the load that ``assignments`` describe; None where nothing changes.

    The third value is what was set, for people. Raises UsageProblem or ConfigError.
    """
    texts = list(assignments)
    settings = [text for text in texts if not text.strip().startswith(_PREFIX)]
    config, shown = parse_assignments(router.config, settings)
    shifts: dict[str, dict[int, int]] = {name: {} for name in LOADS}
    for text in texts:
        if text.strip().startswith(_PREFIX):
            _shift(router, text.strip(), shifts)
            key, _, value = text.strip().partition("=")
            shown[key] = value
    changed = any(shifts.values())
    load = WhatIf(shifts["prefill_tokens"], shifts["decode_blocks"]) if changed else None
    return config if settings else None, load, shown


def _shift(router: Router, text: str, shifts: dict[str, dict[int, int]]) -> None:
    key, separator, raw = text.partition("=")
    # Worker names may hold dots: the load's name is what stands behind the last one.
    worker_text, _, load = key.removeprefix(_PREFIX).rpartition(".")
    if not separator or not worker_text or load not in LOADS:
        raise UsageProblem(
            f"--set {text}: expected load.WORKER.prefill_tokens=+N or load.WORKER.decode_blocks=+N",
            "for example: --set load.prefill-a0.prefill_tokens=+500",
        )
    try:
        number = int(raw.replace("_", ""))
    except ValueError:
        raise UsageProblem(
            f"--set {text}: expected a whole number, +N or -N, got {raw!r}"
        ) from None
    if abs(number) > _MOST:
        raise UsageProblem(f"--set {text}: expected at most {_MOST:,}, got {raw}")
    workers = [(worker.worker_id, worker.name) for worker in router.registry]
    for slot in router.registry.slots(resolve_worker(worker_text, workers)):
        column = router.load.prefill_tokens if load == LOADS[0] else router.load.decode_blocks
        relative = raw.strip()[0] in "+-"
        shifts[load][slot] = number if relative else number - column[slot]


_NOT_KEPT: Final = "a saved view keeps no decisions"
_NOT_LIVE: Final = "a saved view is one moment"
_LIVE: Final = "dynctl top --frontend URL shows a running service"
_ASK: Final = 'ask it where a request would go: dynctl --view FILE route --explain "PROMPT"'


class StillView:
    """Shows the view that ``source`` holds."""

    def __init__(self, source: ViewSource, wall: Callable[[], float] = time.time) -> None:
        self.title = source.title
        self._source = source
        self._at = wall()
        self._rows = tuple(source.workers())

    async def __aenter__(self) -> StillView:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is open."""

    async def snapshot(self) -> Snapshot:
        source, title = self._source, self.title
        settings = source.config().values
        here = Part(title, self._at)
        told = dict.fromkeys(("workers", "load", "index", "thresholds", "settings"), here)
        told["decisions"] = Part(title, unknown=_NOT_KEPT, provide=_ASK)
        for part in ("waiting", "transfers", "queue"):
            told[part] = Part(title, unknown=_NOT_LIVE, provide=_LIVE)
        return Snapshot(
            at=self._at,
            source=title,
            header=Header(
                models=tuple(sorted({row.model for row in self._rows})),
                mode=settings["router_mode"],
                preset=source.view.preset,
            ),
            workers=self._rows,
            thresholds=source.thresholds(),
            settings=settings,
            told=told,
        )

    async def settle(self) -> None:
        """Nothing comes any more."""

    async def decision(self, line: DecisionLine) -> RouteResult:
        raise UsageProblem(_NOT_KEPT, _ASK)

    async def judged(self, model: str, values: Values) -> list[WorkerRow]:
        return self._source.judged(model, values)

    async def set_thresholds(self, model: str, values: Values) -> dict[str, float | int | None]:
        return self._source.set_thresholds(model, values)

    async def save(self) -> bytes:
        return self._source.save()

    async def read_index(self, worker: WorkerRow | None) -> str:
        raise UsageProblem(f"{_NOT_LIVE}: what is not in it cannot be read any more", _LIVE)
