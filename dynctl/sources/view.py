"""A saved view: the router of one past moment decides here, without a network."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from dynctl import version
from dynctl.base.errors import UsageProblem
from dynctl.base.naming import resolve_worker
from dynctl.documents.config import ConfigDocument, config_document
from dynctl.documents.doubts import Doubt, doubt, without_settings
from dynctl.documents.route_result import RouteResult, index_doubts, route_result
from dynctl.documents.snapshot import Header, Part, Snapshot
from dynctl.documents.view import MAX_BYTES, SavedView, decode_view, encode_view
from dynctl.documents.workers import WorkerRow, worker_rows
from dynctl.settings.router_settings import parse_assignments
from dynctl.sources.query import RouteQuery, choose_model
from dynctl.sources.source import LiveSource
from dynctl.sources.thresholds import Thresholds, Values
from dynctl.sources.thresholds.replicas import Replica
from router_core import (
    SETTINGS,
    BlockHashes,
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
        assumptions, doubts = list(self.view.assumptions), list(self.view.doubts)
        tokens = self._tokens(query, model, doubts)
        size = self._block_size(model, doubts)
        workers = [(worker.worker_id, worker.name) for worker in router.registry]
        config, load, shown = what_if(router, query.assignments)
        if query.lora is not None:
            assumptions.append(
                f"adapter {query.lora} is not checked: a view does not list the adapters of workers"
            )
        if shown:
            assumptions.append("what if " + ", ".join(f"{k}={v}" for k, v in shown.items()))

        def pin(text: str | None) -> Pin | None:
            return None if text is None else Pin(resolve_worker(text, workers))

        hashes = self.hashes(query, tokens, size)
        request = RoutingRequest(
            id=_stable_id(tokens, query),
            model=model,
            isl_tokens=len(tokens),
            block_size=size,
            sequence_hashes=hashes.sequence,
            local_hashes=hashes.local,
            constraints=constraints(query.required, query.preferred),
            pin_prefill=pin(query.pin_prefill),
            pin_decode=pin(query.pin_decode),
            lora_name=query.lora,
            salted=query.cache_salt is not None,
        )
        state = router.view(config, load)
        plan = router.plan(request, samples=_samples(tokens), view=state, detail=True)
        if not any(one.code == "DYR0705" for one in doubts):
            doubts += index_doubts(router, plan)
        return route_result(
            router,
            request,
            plan,
            now=self.view.now,
            view=state,
            preset=self.view.preset,
            assumptions=assumptions,
            doubts=without_settings(doubts, shown),
            load_source=self.view.source,
        )

    def workers(self, *, index: bool = True) -> list[WorkerRow]:
        return worker_rows(self.router, self.view.now)

    def thresholds(self) -> dict[str, Thresholds]:
        registry, busy = self.router.registry, self.router.busy
        return {model: busy.thresholds(model).to_dict() for model in registry.models()}

    def set_thresholds(self, model: str, values: Values) -> Thresholds:
        raise UsageProblem(
            f"{self.title} is a saved view and cannot be changed",
            "--dry-run shows the effect of thresholds; --frontend URL sets them on a frontend",
        )

    def check_values(self, model: str, present: Values, values: Values) -> None:
        """Accept every value, for dry runs; :meth:`set_thresholds` raises."""

    def settable_values(self, values: Values) -> Thresholds:
        return dict(values)

    @contextmanager
    def replicas(self) -> Iterator[list[Replica]]:
        """The view itself, which has the thresholds of one frontend."""
        yield [Replica(self.title, self, self.workers)]

    def judged(self, model: str, values: Values) -> list[WorkerRow]:
        router = Router.restore(self.router.snapshot())
        applied = router.apply(ThresholdsSet(model, values), self.view.now)
        if not applied.ok:
            raise UsageProblem(applied.message)
        return worker_rows(router, self.view.now)

    def config(self) -> ConfigDocument:
        return config_document(
            self.router.config,
            version=version(),
            preset=self.view.preset,
            sources=dict.fromkeys(SETTINGS, self.title),
        )

    def decision(self, decision_id: str | None) -> RouteResult:
        wanted = "the last one" if decision_id is None else decision_id
        raise UsageProblem(
            f"{self.title} keeps no decisions: {wanted} cannot be looked up",
            "use the frontend that made it: dynctl why ID --frontend URL",
        )

    def save(self) -> bytes:
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
            doubts=view.doubts,
        )

    def tokens(self, query: RouteQuery, model: str) -> list[int]:
        """The prompt's token ids; raises UsageProblem where the model has no tokenizer."""
        return self._tokens(query, model, [])

    def hashes(self, query: RouteQuery, tokens: Sequence[int], block_size: int) -> BlockHashes:
        """The prompt's block hashes, with its adapter and its salt as the view's engines mix it."""
        dynamo = self.view.chats == "dynamo"
        return hash_prompt(
            tokens,
            block_size,
            lora_name=query.lora,
            cache_namespace=query.cache_salt if dynamo else None,
            cache_salt=None if dynamo else query.cache_salt,
        )

    def _tokens(self, query: RouteQuery, model: str, doubts: list[Doubt]) -> list[int]:
        if query.token_ids is not None:
            return list(query.token_ids)
        from dynctl.tokenization import load_tokenizer

        known = self.view.model_paths.get(model)
        path = query.model_path or known
        if path is None or not Path(path).is_dir():
            where = f"{path} of the view does not exist here" if path else "the view has none"
            raise UsageProblem(
                f"no tokenizer for model {model}: {where}",
                "give --model-path DIR (a directory with tokenizer.json), or --tokens FILE",
            )
        tokenizer = load_tokenizer(path)
        saved = self.view.tokenizers.get(model)
        if saved is not None and saved != tokenizer.fingerprint:
            why = f"the tokenizer in {path} is different from the one that the view was saved with"
            doubts.append(doubt("DYR0704", why=why))
        if query.messages is not None:
            return self._encode_chat(tokenizer, list(query.messages))
        return tokenizer.encode_prompt(query.prompt or "")

    def _encode_chat(
        self, tokenizer: ModelTokenizer, messages: list[Mapping[str, Any]]
    ) -> list[int]:
        """A chat's token ids, encoded as the view's own frontend does."""
        if self.view.chats == "dynamo":
            from dynctl.tokenization import as_dynamo_reads

            return tokenizer.encode_chat(as_dynamo_reads(tokenizer, messages).messages)
        return tokenizer.encode_chat(messages)

    def _block_size(self, model: str, doubts: list[Doubt]) -> int:
        sizes = [w.block_size for w in self.router.registry if w.model == model]
        if len(set(sizes)) > 1:
            why = (
                f"workers have different block sizes ({', '.join(map(str, sorted(set(sizes))))} "
                f"tokens): {sizes[0]} is used"
            )
            doubts.append(doubt("DYR0719", why=why))
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
    """A view from the bytes of its file; errors begin with ``where``."""
    from dynctl.base.decode_errors import WireError

    try:
        return ViewSource(decode_view(data), title)
    except WireError as error:
        raise UsageProblem(f"{where}: {error}", "save a new one: --save-view FILE") from None


def _stable_id(tokens: list[int], query: RouteQuery) -> str:
    """The same query has the same id: a dry run that is repeated prints the same bytes."""
    limits = repr((query.required, sorted(query.preferred.items()), query.assignments))
    if query.lora is not None or query.cache_salt is not None:
        # Never the salt itself: an id is not secret, and salts may be short.
        limits += repr((query.lora, query.cache_salt is not None))
    pins = repr((query.pin_prefill, query.pin_decode))
    return "dry-" + xxh3_64_hexdigest(array("q", tokens).tobytes() + (limits + pins).encode())[:12]


def _samples(tokens: list[int]) -> tuple[float, float]:
    """Two random numbers in 0..1 that depend on the prompt alone.

    So a dry run with ``--set`` differs only by what was set, not by another draw.
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
    """``--set key=value``: other settings, or other load, for one dry run.

    Settings go by their names (``prefill_load_scale=1.5``); load by worker:
    ``load.prefill-a0.prefill_tokens=+500``, ``load.decode-b0.decode_blocks=-10``, or without a
    sign to set it (``load.prefill-a0.prefill_tokens=0``). Returns settings, load (None where
    nothing changes) and the values as they are shown. Raises UsageProblem or ConfigError.
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
    # Worker names may contain dots: the load's name is behind the last one.
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


_NO_DECISIONS: Final = "a saved view keeps no decisions"
_NOT_LIVE: Final = "a saved view is one moment"
_USE_LIVE: Final = "dynctl top --frontend URL shows a running service"
_USE_ROUTE: Final = (
    'dynctl --view FILE route --explain "PROMPT" shows where a request would have gone'
)


class StillView(LiveSource):
    """The one snapshot of a saved view."""

    def __init__(self, source: ViewSource, wall: Callable[[], float] = time.time) -> None:
        super().__init__(source, source.title)
        self._view = source
        self._at = wall()
        self._rows = tuple(source.workers())

    async def snapshot(self) -> Snapshot:
        view, title = self._view, self.title
        settings = view.config().values
        here = Part(title, self._at)
        parts = dict.fromkeys(("workers", "load", "index", "thresholds", "settings"), here)
        parts["decisions"] = Part(title, unknown=_NO_DECISIONS, provide=_USE_ROUTE)
        for part in ("waiting", "transfers", "queue"):
            parts[part] = Part(title, unknown=_NOT_LIVE, provide=_USE_LIVE)
        return Snapshot(
            at=self._at,
            source=title,
            header=Header(
                models=tuple(sorted({row.model for row in self._rows})),
                mode=settings["router_mode"],
                preset=view.view.preset,
            ),
            workers=self._rows,
            thresholds=view.thresholds(),
            settings=settings,
            parts=parts,
        )

    async def read_index(self, worker: WorkerRow | None) -> str:
        raise UsageProblem(f"{_NOT_LIVE}: no more caches can be read", _USE_LIVE)
