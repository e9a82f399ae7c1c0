"""A dry run: the request of a query on a router's state, and where it would go.

Where the workers of a model form several worker sets (a live Dynamo), a frontend first draws a set,
by its number of workers, and then chooses a worker in it. Both steps are in the answer.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from dynctl.base.errors import UsageProblem
from dynctl.base.naming import resolve_worker
from dynctl.base.quantities import chance
from dynctl.documents.doubts import (
    Doubt,
    Varies,
    doubt,
    some_names,
    without_settings,
)
from dynctl.documents.prompt_parts import PromptParts
from dynctl.documents.route_of_plan import index_doubts, route_result
from dynctl.documents.route_result import RouteResult, WorkerSetRow
from dynctl.documents.view import SavedView
from dynctl.settings.policy_file import policy_classes
from dynctl.settings.router_settings import NoEffect, parse_assignments
from dynctl.sources.query import RouteQuery, choose_model
from dynctl.wire.openai import ChatRequest, CompletionRequest, EmbeddingRequest
from router_core import (
    SETTINGS,
    BlockHashes,
    Pin,
    Role,
    Router,
    RouterConfig,
    RoutingConstraints,
    RoutingPlan,
    RoutingRequest,
    RoutingView,
    TransferTable,
    WhatIf,
    Worker,
    constraints,
    hash_prompt,
)

if TYPE_CHECKING:
    from dynctl.serving.routing.prompts import Prompt
    from dynctl.tokenization import ModelTokenizer


@dataclass(frozen=True, slots=True)
class _TokenizedPrompt:
    """A prompt's tokens; without ``ids`` only an estimated ``count``, and why.

    ``more``: the tokens of the other prompts of a batch; ``count`` has those of all.
    """

    ids: list[int]
    count: int
    not_modelled: str | None = None
    more: tuple[list[int], ...] = ()


class NoTokenizer(UsageProblem):
    """The prompt is a text, and the source has no tokenizer for its model."""


class DryRun:
    """One query on one view. Raises UsageProblem where the view cannot answer it.

    ``load``: loads the tokenizer in a directory. ``doubts``: what this request makes uncertain,
    beside the doubts of the view.
    """

    def __init__(
        self,
        view: SavedView,
        query: RouteQuery,
        load: Callable[[str], ModelTokenizer] | None = None,
    ) -> None:
        self._load = load
        self._view = view
        self._query = query
        self._router = view.router
        self._of_dynamo = view.chats == "dynamo"
        self.doubts: list[Doubt] = []
        if query.in_session and self._of_dynamo:
            self.doubts.append(doubt("DYR0745"))
        elif query.session_id is not None:
            raise UsageProblem(
                "--session-id: only a running frontend has sessions",
                "remove it, or ask the frontend: --frontend URL, without --set and --view",
            )
        self.model, self.lora = self._served_name()
        self._parsed = query.request(self.model)
        if self._of_dynamo:
            self._parsed = _without_token_data(self._parsed)
        self._workers = [w for w in self._router.registry if self.model in w.served_names]
        if isinstance(self._parsed, EmbeddingRequest) and len(self._router.stages(self.model)) > 1:
            raise UsageProblem(
                f"prefill and decode workers serve {self.model}, which make no embeddings",
                "dynctl workers list shows roles; --model names another model",
            )
        self._prompt = self._prompt_tokens()

    # -- the answer ------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """The prompt's token ids; empty where they are not known."""
        return self._prompt.ids

    def parts(self) -> PromptParts:
        """The prompt part by part: what of it is cached where, and where it breaks."""
        from dynctl.health.hits.parts import prompt_parts
        from dynctl.tokenization.segments import segment_marks

        if self._prompt.not_modelled is not None:
            raise UsageProblem(
                f"the blocks of the prompt are unknown: {self._prompt.not_modelled}",
                "dynctl route --explain shows the choice without them",
            )
        starts: Sequence[tuple[str, int]] = ()
        if isinstance(self._parsed, ChatRequest):
            starts = segment_marks(self._tokenizer()).segments(self.tokens)
        registry = self._router.registry
        mask = 0
        for model in {worker.model for worker in self._workers}:
            ranks = registry.model(model)
            mask |= ranks & ~registry.roles[Role.DECODE] or ranks & registry.can_prefill
        sets = self._sets()
        hashes = self.hashes(next(iter(sets), None))
        parts = prompt_parts(self._router, self.model, mask, hashes, len(self.tokens), starts)
        return msgspec.structs.replace(parts, doubts=[*self._view.doubts, *self.doubts])

    def route(self) -> RouteResult:
        """Where the request would go, and why."""
        self._router.advance(self._view.now)
        state, settings = self._state()
        assumptions = self._assumptions(settings)
        sets = self._sets()
        if len(sets) < 2:
            return self._decide(next(iter(sets), None), state, assumptions, settings)
        decided = {name: self._decide(name, state, assumptions, settings) for name in sets}
        return self._of_sets(sets, decided)

    def _state(self) -> tuple[RoutingView, dict[str, Any]]:
        """The router's state with the settings of ``--set``, and those settings that count."""
        config, load, settings, ignored = what_if(self._router, self._query.assignments)
        modelled = (config or self._router.config).router_prefill_load_model != "none"
        if self._of_dynamo and modelled:
            # A frontend with the model decides by what is left of the load.
            ignored = [row for row in ignored if row.setting != "router_prefill_load_model"]
            self._note_unknown_durations()
        for row in ignored:
            self._note(doubt("DYR0727", matters=row.elsewhere, why=row.text))
            settings.pop(row.setting)
        classes = None
        if config is not None and "router_policy_config" in settings:
            classes = policy_classes(config, "--set router_policy_config")
        if self._of_dynamo:
            self._note_settings(settings)
        return self._router.view(config, load, self._table(config), classes), settings

    def _note_unknown_durations(self) -> None:
        names = self._without_duration()
        if names:
            varies = Varies(load="prefill", workers=names)
            self.doubts.append(doubt("DYR0748", varies=varies, workers=some_names(names)))

    def _note_settings(self, settings: Mapping[str, Any]) -> None:
        """The doubts about settings that a frontend of Dynamo does not have, or reads otherwise."""
        own = [name for name in settings if name in SETTINGS and SETTINGS[name].own]
        if own:
            self._note(doubt("DYR0780", settings=", ".join(own)))
        if "router_mode" in settings:
            mode = settings["router_mode"]
            for mode_doubt in mode_doubts(mode, f"--set router_mode={mode}"):
                self._note(mode_doubt)

    def _assumptions(self, settings: Mapping[str, Any]) -> list[str]:
        assumptions = list(self._view.assumptions)
        if self.lora is not None and self.model != self.lora:
            assumptions.append(
                f"adapter {self.lora} is not checked: a view does not list the adapters of workers"
            )
        if settings:
            given = ", ".join(f"{name}={value}" for name, value in settings.items())
            assumptions.append(f"what if {given}")
        return assumptions

    def _of_sets(self, sets: Mapping[str, int], decided: Mapping[str, RouteResult]) -> RouteResult:
        """The answer of the set with the most available workers, with the chances of each.

        ``sets``: worker set -> its available workers.
        """
        total = sum(sets.values())
        rows = [
            WorkerSetRow(
                name,
                workers=sum(name in w.worker_sets and _serves(w) for w in self._workers),
                available=count,
                share=count / total if total else 0.0,
                winner=decided[name].winner,
                prefill=decided[name].prefill,
                decode=decided[name].decode,
            )
            for name, count in sets.items()
        ]
        likely = max(rows, key=lambda row: row.available)
        best = decided[likely.name]
        drawn = [row for row in rows if row.share]
        doubts = best.doubts
        if len(drawn) > 1:
            shares = ", ".join(f"{row.name} {chance(row.share)}" for row in drawn)
            several = doubt("DYR0722", sets=len(drawn), model=self.model, shares=shares)
            doubts = [several, *doubts]
        return msgspec.structs.replace(
            best,
            worker_set=likely.name,
            worker_sets=rows,
            doubts=doubts,
            certain=not any(row.matters for row in doubts),
        )

    def _without_duration(self) -> list[str]:
        """The model's workers with active prefill whose predicted duration is not known."""
        slots = {
            rank.slot
            for rank in self._router.load
            if rank.prefill_tokens and rank.predicted_s is None
        }
        of = self._router.registry.worker
        serving = {worker.worker_id for worker in self._workers}
        names = [of(slot).name for slot in sorted(slots) if of(slot).worker_id in serving]
        return list(dict.fromkeys(names))

    def hashes(
        self, worker_set: str | None = None, tokens: Sequence[int] | None = None
    ) -> BlockHashes:
        """The block hashes of the prompt, with adapter and salt as the view's engines mix them.

        ``tokens``: another prompt of the same request.
        """
        members = self._members(worker_set)
        salt = self._salt()
        return hash_prompt(
            self._prompt.ids if tokens is None else tokens,
            _block_sizes(members)[0],
            lora_name=self.lora,
            cache_namespace=salt if self._of_dynamo else None,
            cache_salt=None if self._of_dynamo else salt,
            is_eagle=_is_eagle(members),
        )

    def _table(self, config: RouterConfig | None) -> TransferTable | None:
        """The table of links that ``--set`` names; None: the router's own."""
        from dynctl.serving.routing.transfer_file import configured_table

        own = self._router.config.router_kv_transfer_qos
        if config is None or config.router_kv_transfer_qos == own:
            return None
        return configured_table(config, self._model_path())[0]

    # -- sets ------------------------------------------------------------------------------

    def _sets(self) -> dict[str, int]:
        """Worker set -> its available workers; empty where the model's workers form one pool."""
        registry = self._router.registry
        counts: Counter[str] = Counter()
        for worker in self._workers:
            if _serves(worker):
                usable = registry.unavailable_reason(worker.worker_id) is None
                counts.update({name: int(usable) for name in worker.worker_sets})
        if len(counts) == 1 and all(w.worker_sets for w in self._workers):
            return {}
        return dict(sorted(counts.items()))

    def _members(self, worker_set: str | None) -> list[Worker]:
        """The workers of a set whose cards count: those that can be chosen, if there are any."""
        members = [w for w in self._workers if worker_set is None or worker_set in w.worker_sets]
        registry = self._router.registry
        usable = [w for w in members if registry.unavailable_reason(w.worker_id) is None]
        return usable or members or self._workers

    def _decide(
        self,
        worker_set: str | None,
        state: RoutingView,
        assumptions: Iterable[str],
        known: Iterable[str],
    ) -> RouteResult:
        """The answer of one worker set. ``known``: settings of this dry run."""
        router, view = self._router, self._view
        request = self._request(worker_set)
        plan = router.plan(request, samples=_samples(self.tokens), view=state, detail=True)
        doubts = [*view.doubts, *self.doubts]
        if "router_mode" in known:
            # Those of the view are about another mode.
            doubts = [
                known_doubt
                for known_doubt in doubts
                if known_doubt.code not in _OF_MODE or known_doubt in self.doubts
            ]
        if not any(known_doubt.code == "DYR0705" for known_doubt in doubts):
            doubts += index_doubts(router, plan)
        doubts += self._request_doubts(request, plan)
        result = route_result(
            router,
            request,
            plan,
            now=view.now,
            view=state,
            preset=view.preset,
            assumptions=assumptions,
            doubts=without_settings(doubts, known),
            load_source=view.source,
        )
        if result.ok or not self._of_dynamo:
            return result
        return msgspec.structs.replace(result, status=_status(result, router.config))

    # -- the request -----------------------------------------------------------------------

    def _served_name(self) -> tuple[str, str | None]:
        """(the name that the workers serve, the LoRA adapter)."""
        query, registry = self._query, self._router.registry
        served = registry.served_names()
        wanted = query.lora if query.lora in served else query.wanted
        model = choose_model(wanted, registry.models(), served)
        is_adapter = any(model in worker.adapters for worker in registry)
        return model, model if is_adapter else query.lora

    def _request(self, worker_set: str | None) -> RoutingRequest:
        members = self._members(worker_set)
        sizes = _block_sizes(members)
        if len(sizes) > 1:
            listed = ", ".join(map(str, sorted(sizes)))
            why = f"workers have different block sizes ({listed} tokens): {sizes[0]} is used"
            self._note(doubt("DYR0719", why=why))
        hashes, prompt = self.hashes(worker_set), self._prompt
        prefill, decode = self._pins(worker_set)
        hints = self._parsed.nvext.agent_hints
        # As a frontend: an alias or an adapter is routed by the model of the workers that have it.
        own = self.model in self._router.registry.models()
        return RoutingRequest(
            id=self._id(),
            model=self.model if own else min(w.model for w in self._workers),
            served_name=None if own else self.model,
            isl_tokens=prompt.count,
            block_size=sizes[0],
            sequence_hashes=hashes.sequence,
            local_hashes=hashes.local,
            constraints=self._constraints(),
            pin_prefill=prefill,
            pin_decode=decode,
            worker_set=worker_set,
            is_eagle=_is_eagle(members),
            overlap_modelled=prompt.not_modelled is None,
            notes=() if prompt.not_modelled is None else (prompt.not_modelled,),
            lora_name=self.lora,
            salted=self._salt() is not None,
            more_hashes=tuple(self.hashes(worker_set, tokens).sequence for tokens in prompt.more),
            priority=hints.priority or 0,
            strict_priority=hints.strict_priority or 0,
            arrived_at=self._view.now,
        )

    def _constraints(self) -> RoutingConstraints:
        """Those of the body and of the command line together."""
        query, taints = self._query, self._parsed.nvext.routing_constraints
        return constraints(
            [*(taints.required_taints or ()), *query.required],
            {**(taints.preferred_taints or {}), **query.preferred},
        )

    def _pins(self, worker_set: str | None) -> tuple[Pin | None, Pin | None]:
        """(prefill, decode): the command line's, else the body's."""
        query, nvext, registry = self._query, self._parsed.nvext, self._router.registry
        workers = [(worker.worker_id, worker.name) for worker in registry]
        pins = []
        for text, pin in (
            (query.pin_prefill, nvext.pin_prefill),
            (query.pin_decode, nvext.pin_decode),
        ):
            if text is not None:
                pin = Pin(resolve_worker(text, workers))
            elif pin is not None and registry.get(pin.worker_id) is None:
                raise UsageProblem(
                    f"nvext of the body pins worker {pin.worker_id}, which is not registered"
                    + (": Dynamo answers 400" if self._of_dynamo else ""),
                    "dynctl workers list -o json has the ids",
                )
            pins.append(pin)
        prefill, decode = pins
        if not self._of_dynamo:
            return prefill, decode
        if self._router.stages(self.model, worker_set) == ("aggregated",):
            # Dynamo has no prefill hop here, and ignores its pin.
            return None, decode
        if nvext.backend_instance_id is not None and nvext.decode_worker_id is None:
            raise UsageProblem(
                "nvext.backend_instance_id: a Dynamo with prefill workers refuses it with 400",
                "use prefill_worker_id and decode_worker_id",
            )
        return prefill, decode

    def _salt(self) -> str | None:
        """The cache salt. Dynamo prefers that of ``nvext``, engines the body's own."""
        own, nvext = self._parsed.cache_salt, self._parsed.nvext.cache_salt
        return (nvext or own) if self._of_dynamo else own

    def _id(self) -> str:
        """The same query has the same id: a dry run that is repeated prints the same bytes."""
        query, nvext = self._query, self._parsed.nvext
        limits = repr((query.required, sorted(query.preferred.items()), query.assignments))
        if self.lora is not None or self._salt() is not None:
            # Never the salt itself: an id is not secret, and salts may be short.
            limits += repr((self.lora, self._salt() is not None))
        pins = repr((query.pin_prefill, query.pin_decode))
        if query.body is not None:
            pins += repr((nvext.constraints, nvext.pin_prefill, nvext.pin_decode))
        tokens = array("q", self.tokens).tobytes()
        return "dry-" + xxh3_64_hexdigest(tokens + (limits + pins).encode())[:12]

    # -- its prompt ------------------------------------------------------------------------

    def _prompt_tokens(self) -> _TokenizedPrompt:
        from dynctl.serving.routing.prompts import NOT_MODELLED, estimate_tokens, prompts_of

        lengths = [w.runtime_config.context_length for w in self._workers]
        prompts, not_modelled = prompts_of(self._parsed, min(filter(None, lengths), default=None))
        if self._of_dynamo and len(prompts) > 1:
            self._note(doubt("DYR0720", prompts=len(prompts)))
            prompts = prompts[:1]
        known = not_modelled is None and all(prompt.token_ids is not None for prompt in prompts)
        tokenizer = None if known or not_modelled is not None else self._tokenizer()
        token_lists: list[list[int]] = []
        for prompt in prompts if not_modelled is None else ():
            ids = self._ids_of(prompt, tokenizer)
            if ids is None:
                not_modelled = prompt.engine_only or NOT_MODELLED
                break
            token_lists.append(list(ids))
        if not_modelled is None:
            return _TokenizedPrompt(
                token_lists[0], sum(map(len, token_lists)), None, tuple(token_lists[1:])
            )
        self._note(doubt("DYR0704", why=not_modelled))
        return _TokenizedPrompt([], sum(map(estimate_tokens, prompts)), not_modelled)

    def _ids_of(self, prompt: Prompt, tokenizer: ModelTokenizer | None) -> Sequence[int] | None:
        """The token ids of one prompt; None where only an engine can tokenize it."""
        from dynctl.serving.routing.prompts import dynamo_chat, encode
        from dynctl.tokenization import PromptError, TemplateError

        if prompt.token_ids is not None:
            return prompt.shortened(prompt.token_ids)
        assert tokenizer is not None, "a text needs the tokenizer"
        parsed = self._parsed
        try:
            if not self._of_dynamo or not isinstance(parsed, ChatRequest):
                return encode(tokenizer, prompt)
            if parsed.body.get("functions") is not None:
                raise PromptError("functions: a Dynamo frontend refuses this field")
            return dynamo_chat(tokenizer, parsed)
        except (PromptError, TemplateError) as error:
            raise UsageProblem(f"the prompt cannot be rendered: {error}") from None

    def _model_path(self) -> str | None:
        """The directory of the model's files: that of the command line, else that of the view.

        A file could name any directory, whose tokenizer and template would run here, so a path of
        a file counts for directories that dynctl itself filled.
        """
        path = self._view.model_paths.get(self.model)
        if self._query.model_path is not None:
            return self._query.model_path
        if path is None or not self._view.from_file or _is_of_dynctl(Path(path)):
            return path
        return None

    def _tokenizer(self) -> ModelTokenizer:
        from dynctl.tokenization import load_tokenizer

        model, view = self.model, self._view
        path = self._model_path()
        unfollowed = view.model_paths.get(model)
        if path is None and unfollowed is not None:
            raise UsageProblem(
                f"no tokenizer for model {model}: the file names {unfollowed}, and a path in a "
                "view or a recording is not followed",
                f"if you trust the model files there: --model-path {unfollowed}; or --tokens FILE",
            )
        # A path of the command line that is not a directory: its reader states how to get one.
        named = self._query.model_path is not None
        if path is None or not (named or Path(path).is_dir()):
            where = f"{path} of the view does not exist here" if path else "the source has none"
            hint = "give --model-path DIR (a directory with tokenizer.json), or --tokens FILE"
            kind = UsageProblem if path else NoTokenizer
            raise kind(f"no tokenizer for model {model}: {where}", hint)
        tokenizer = (self._load or load_tokenizer)(path)
        saved = view.tokenizers.get(model)
        if saved is not None and saved != tokenizer.fingerprint:
            why = f"the tokenizer in {path} is different from the one that the view was saved with"
            self._note(doubt("DYR0704", why=why))
        return tokenizer

    # -- doubts ----------------------------------------------------------------------------

    def _note(self, new: Doubt) -> None:
        if new not in self.doubts:
            self.doubts.append(new)

    def _request_doubts(self, request: RoutingRequest, plan: RoutingPlan) -> Iterator[Doubt]:
        """What the request itself makes uncertain."""
        final = plan.final.worker
        if final is None or not self._of_dynamo:
            return
        card = final.runtime_config
        held = card.total_kv_blocks and card.total_kv_blocks * final.block_size
        limits = [limit for limit in (card.context_length, held) if limit]
        if limits and request.isl_tokens >= min(limits):
            yield doubt(
                "DYR0721",
                tokens=f"{request.isl_tokens:,}",
                worker=final.name,
                limit=f"{min(limits):,}",
            )


def _without_token_data(parsed: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
    """The request without ``nvext.token_data`` where the prompt has ids, which Dynamo uses."""
    if isinstance(parsed, ChatRequest) or isinstance(parsed.prompts[0], str):
        return parsed
    return replace(parsed, nvext=msgspec.structs.replace(parsed.nvext, token_data=None))


def _status(result: RouteResult, config: RouterConfig) -> int | None:
    """The status of Dynamo 1.6.1's refusal, by the filter that left no worker; None if unknown."""
    refused = next(hop for hop in (result.prefill, result.decode) if hop and hop.winner is None)
    if refused.outcome == "policy_underivable":
        return 500
    emptied = next((step.filter for step in refused.funnel if step.entered and not step.left), "")
    by_filter = {"direct": 400, "allowed": 400, "available": 503, "taints": 500}
    return config.overload_status_code if emptied == "busy" else by_filter.get(emptied)


def _serves(worker: Worker) -> bool:
    """Whether requests are sent to the worker's sets; prefill workers only help those."""
    return worker.role is not Role.PREFILL


def _block_sizes(workers: Iterable[Worker]) -> list[int]:
    """The block sizes in order of registration, each once."""
    return list(dict.fromkeys(worker.block_size for worker in workers))


def _is_eagle(workers: Iterable[Worker]) -> bool:
    return any(worker.runtime_config.enable_eagle for worker in workers)


def _samples(tokens: Sequence[int]) -> tuple[float, float]:
    """Two random numbers in 0..1 that depend on the prompt alone.

    So a dry run with ``--set`` differs only by what was set, not by another draw.
    """
    data = array("q", tokens).tobytes()
    first, second = (xxh3_64_intdigest(data, seed) for seed in (1, 2))
    return (first >> 11) / 2**53, (second >> 11) / 2**53


#: Doubts that follow from the router mode.
_OF_MODE: Final = ("DYR0716", "DYR0744")


def mode_doubts(mode: str, why: str) -> list[Doubt]:
    """The doubt about a mode that decides by what a frontend counts and does not export."""
    if mode == "round-robin":
        return [doubt("DYR0716", varies=Varies(turn=True), why=why)]
    if mode in ("power-of-two", "least-loaded", "device-aware-weighted"):
        return [doubt("DYR0744", varies=Varies(load="more"), mode=mode)]
    return []


LOADS: Final = ("prefill_tokens", "decode_blocks", "active_requests")
_PREFIX = "load."
_MOST = 1 << 40


def what_if(
    router: Router, assignments: Iterable[str]
) -> tuple[RouterConfig | None, WhatIf | None, dict[str, Any], list[NoEffect]]:
    """``--set key=value``: other settings, or other load, for one dry run.

    Settings go by their names (``prefill_load_scale=1.5``); load by worker:
    ``load.prefill-a0.prefill_tokens=+500``, ``load.decode-b0.decode_blocks=-10``,
    ``load.decode-b0.active_requests=+2``, or without a sign to set it
    (``load.prefill-a0.prefill_tokens=0``). Returns settings, load (None where
    nothing changes), the values as they are shown, and why some have no effect. Raises UsageProblem
    or ConfigError.
    """
    texts = list(assignments)
    settings = [text for text in texts if not text.strip().startswith(_PREFIX)]
    config, shown, ignored = parse_assignments(router.config, settings, _unread(router))
    shifts: dict[str, dict[int, int]] = {name: {} for name in LOADS}
    for text in texts:
        if text.strip().startswith(_PREFIX):
            _shift(router, text.strip(), shifts)
            key, _, value = text.strip().partition("=")
            shown[key] = value
            why = _unused_load(config, key.rpartition(".")[2])
            if why:
                text = f"--set {text.strip()} has no effect {why}"
                ignored.append(NoEffect(key, text, elsewhere=False))
    changed = any(shifts.values())
    load = WhatIf(**shifts) if changed else None
    return config if settings else None, load, shown, ignored


def _is_of_dynctl(path: Path) -> bool:
    """Whether a directory is the demo's model, or in the cache of models that this user's dynctl
    fetched from workers."""
    from dynctl.adapters.dynamo.model_files import cache_directory
    from dynctl.tokenization import DEMO_MODEL_DIR

    try:
        real, cache = path.resolve(), cache_directory().resolve()
    except (OSError, RuntimeError, ValueError):
        return False
    return real == DEMO_MODEL_DIR.resolve() or real.is_relative_to(cache)


def _unread(router: Router) -> dict[str, str]:
    """Settings that this fleet does not read, with the reason."""
    own = any(
        worker.role is Role.PREFILL and worker.runtime_config.kv_transfer_domain is None
        for worker in router.registry
    )
    why = "no prefill worker uses the router's own policy"
    names = ("kv_transfer_enforcement", "kv_transfer_preferred_weight")
    return {} if own else dict.fromkeys(names, why)


def _unused_load(config: RouterConfig, load: str) -> str:
    """Why the mode does not read a load; empty where it does."""
    mode = config.router_mode
    if mode == "kv":
        counts = load != "active_requests" or config.decode_active_request_weight
        return "" if counts else "with decode_active_request_weight 0"
    counts = load == "active_requests" and mode not in ("round-robin", "random")
    return "" if counts else f"with router_mode {mode}"


def _shift(router: Router, text: str, shifts: dict[str, dict[int, int]]) -> None:
    key, separator, raw = text.partition("=")
    # Worker names may contain dots: the load's name is behind the last one.
    worker_text, _, load = key.removeprefix(_PREFIX).rpartition(".")
    if not separator or not worker_text or load not in LOADS:
        raise UsageProblem(
            f"--set {text}: expected load.WORKER.LOAD=+N, where LOAD is {', '.join(LOADS)}",
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
        columns = (router.load.prefill_tokens, router.load.decode_blocks, router.load.requests)
        column = columns[LOADS.index(load)]
        relative = raw.strip()[0] in "+-"
        shifts[load][slot] = number if relative else number - column[slot]
