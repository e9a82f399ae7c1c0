"""Checks of frontends and versions: pure, on :class:`CheckFacts`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from dynctl.findings.runner import Check, Found, Outcome, Passed, Skipped, found, outcome
from dynctl.health.checks.planes import count, deployment_of, entries_known, has_workers
from dynctl.health.conditions import NO_TOKENIZER, TOKENIZER_DIFFERS
from dynctl.health.facts import CheckFacts, FrontendFacts, Thresholds, Unread
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics
from router_core import Role

NO_FRONTENDS: Final = (
    "no frontend was specified: --frontend http://HOST:8000, once for every replica"
)
KNOWN_VERSIONS: Final = ("1.7", "1.6", "1.5", "1.4", "1.3", "1.2", "1.0")
"""Dynamo versions that dynctl is tested with."""


# -- what checks need ------------------------------------------------------------------------------


def _frontend_is_given(facts: CheckFacts) -> Skipped | None:
    if facts.frontends_unread:
        return Skipped(f"the cluster's frontends: {facts.frontends_unread}", unread=True)
    return None if facts.frontends else Skipped(NO_FRONTENDS)


def _frontend_answers(facts: CheckFacts) -> Skipped | None:
    if any(frontend.answers for frontend in facts.frontends):
        return None
    return Skipped("no frontend answers (DYR0401, DYR0402)", unread=True)


def _has_replicas(facts: CheckFacts) -> Skipped | None:
    if any(len(members) > 1 for members in _replicas(facts)):
        return None
    if len(facts.frontends) > 1:
        return Skipped("each graph has one frontend: there are no replicas to compare")
    return Skipped("only one frontend was specified; specify every replica to compare them")


def _replicas(facts: CheckFacts) -> list[list[FrontendFacts]]:
    """The frontends by graph: only those of one graph are replicas of each other."""
    groups: dict[str, list[FrontendFacts]] = {}
    for frontend in facts.frontends:
        groups.setdefault(frontend.graph, []).append(frontend)
    return [*groups.values()]


def _has_dynamo_frontend(facts: CheckFacts) -> Skipped | None:
    if any(frontend.is_dynamo for frontend in facts.frontends):
        return None
    return Skipped("no Dynamo frontend: this check is about Dynamo frontends")


def unanswered_frontends(facts: CheckFacts) -> list[str]:
    """Frontends that did not answer, with the codes that report them."""
    return [
        f"{frontend.url} (DYR0401, DYR0402)" for frontend in facts.frontends if not frontend.answers
    ]


def _frontend_metrics(
    facts: CheckFacts,
) -> tuple[list[tuple[FrontendFacts, FrontendMetrics]], list[str]]:
    """Dynamo frontends with their metrics, and what could not be read."""
    read, unread = [], unanswered_frontends(facts)
    for frontend in facts.frontends:
        if not frontend.is_dynamo:
            continue
        if isinstance(frontend.metrics, Unread):
            unread.append(f"{frontend.url}/metrics: {frontend.metrics.why}")
        else:
            read.append((frontend, frontend.metrics))
    return read, unread


# -- one by one ------------------------------------------------------------------------------------


def _frontends_answer(facts: CheckFacts) -> Outcome:
    findings = [
        found(
            frontend.url, why=frontend.kind.why, hint=frontend.kind.fix or "is the address right?"
        )
        for frontend in facts.frontends
        if isinstance(frontend.kind, Unread)
    ]
    return outcome(findings, summary=", ".join(frontend.url for frontend in facts.frontends))


def _ours_or_theirs(facts: CheckFacts) -> Outcome:
    unread = [f"{f.url} (DYR0401)" for f in facts.frontends if isinstance(f.kind, Unread)]
    kinds = [str(frontend.kind) for frontend in facts.frontends if frontend.answers]
    summary = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    return outcome(
        [found(frontend.url) for frontend in facts.frontends if frontend.kind == "other"],
        unread,
        summary,
    )


def _kv_mode(facts: CheckFacts) -> Outcome:
    measured, unread = _frontend_metrics(facts)
    findings = []
    for frontend, metrics in measured:
        if metrics.kv_routing is None:
            unread.append(f"{frontend.url} serves no model, so its mode is unknown")
        elif not metrics.kv_routing:
            findings.append(found(frontend.url, mode="other than kv"))
    for frontend in facts.frontends:
        if frontend.kind == "dynctl" and frontend.mode not in (None, "kv"):
            findings.append(found(frontend.url, mode=frontend.mode))
        elif frontend.kind == "dynctl":
            unread += _unread_mode(frontend)
    blind = [text for frontend in facts.frontends for text in _why_blind(frontend)]
    if blind and not findings and not unread:
        # The conditions themselves are findings of the fleet.
        return Skipped("; ".join(blind))
    return outcome(findings, unread)


def _why_blind(frontend: FrontendFacts) -> Iterator[str]:
    """Why a frontend in mode kv finds no cached block of a model's prompts."""
    if (
        frontend.kind != "dynctl"
        or frontend.mode != "kv"
        or isinstance(frontend.conditions, Unread)
    ):
        return
    for condition in frontend.conditions:
        if condition.code in (NO_TOKENIZER, TOKENIZER_DIFFERS):
            yield (
                f"{frontend.url} has mode kv, but finds no cached blocks of some or all prompts "
                f"of {condition.subject} ({condition.code})"
            )


def _uses_events(facts: CheckFacts) -> Outcome:
    measured, unread = _frontend_metrics(facts)
    routing = [(frontend, metrics) for frontend, metrics in measured if metrics.kv_routing]
    if not routing and not unread:
        return Skipped("no frontend routes by KV cache (DYR0403)")
    unread += [
        f"{frontend.url} does not report whether it uses KV events; Dynamo 1.4 does"
        for frontend, metrics in routing
        if metrics.kv_events is None
    ]
    silent = [found(frontend.url) for frontend, metrics in routing if metrics.kv_events is False]
    return outcome(silent, unread)


def _sources_match(facts: CheckFacts) -> Outcome:
    measured, unread = _frontend_metrics(facts)
    using = [(frontend, metrics) for frontend, metrics in measured if metrics.kv_events]
    unread += [
        f"{frontend.url} does not report its event sources; Dynamo 1.4 does"
        for frontend, metrics in measured
        if metrics.kv_routing and metrics.kv_events is None
    ]
    if not using and not unread:
        return Skipped("no frontend uses KV events (DYR0403, DYR0404)")
    findings = [
        found(frontend.url, workers=f"{workers:,}", target=target)
        for frontend, metrics in using
        for target, workers in metrics.event_source_mismatches.items()
        if workers
    ]
    return outcome(findings, unread)


def _models_are_ready(facts: CheckFacts) -> Outcome:
    findings: list[Found] = []
    unread, ready = unanswered_frontends(facts), set()
    for frontend in facts.frontends:
        for model, state in frontend.ready.items():
            if isinstance(state, Unread):
                unread.append(f"{model} on {frontend.url}: {state.why}")
            elif state.ready:
                ready.add(model)
            else:
                why = state.reason or "not ready"
                why += f"; missing: {', '.join(state.missing)}" if state.missing else ""
                findings.append(found(frontend.url, model=model, why=why))
    if not findings and not unread and not ready:
        return Skipped("no frontend serves a model")
    return outcome(findings, unread, ", ".join(sorted(ready)))


def _unread_mode(frontend: FrontendFacts) -> list[str]:
    """Why it is unknown whether a dynctl frontend in mode kv finds cached blocks."""
    if frontend.mode is None:
        return [f"{frontend.url} does not report its settings"]
    if isinstance(frontend.conditions, Unread):
        return [f"whether {frontend.url} finds cached blocks: {frontend.conditions.why}"]
    return []


def _uses_all(facts: CheckFacts) -> Outcome:
    registered = Counter(
        (item.card.endpoint.namespace, item.worker.model, item.worker.role.value)
        for item in deployment_of(facts).workers
    )
    unread = unanswered_frontends(facts)
    spaces = {frontend.space for frontend in facts.frontends}
    for name in sorted({namespace for namespace, _, _ in registered}):
        if not any(_reads_namespace(frontend, name, spaces) for frontend in facts.frontends):
            unread.append(f"no frontend of Dynamo namespace {name} was queried")
    findings, compared = [], 0
    for frontend in facts.frontends:
        for (namespace, model, role), total in sorted(registered.items()):
            state = frontend.ready.get(model)
            if state is None or not _reads_namespace(frontend, namespace, spaces):
                continue
            if isinstance(state, Unread):
                unread.append(f"{model} on {frontend.url}: {state.why}")
                continue
            compared += 1
            uses = state.workers(namespace, role)
            if uses != total:
                counts = {"uses": uses, "registered": total}
                findings.append(found(frontend.url, model=model, role=role, **counts))
    nothing = "" if compared else "no frontend serves a model of the registered workers"
    summary = count(sum(registered.values()), "worker")
    return outcome(findings, unread, summary, nothing=nothing)


def _reads_namespace(frontend: FrontendFacts, namespace: str, spaces: Collection[str]) -> bool:
    """Whether a frontend looks for workers in a Dynamo namespace; True if it is not known.

    In a graph it does so in its own one and in those of generations, which have a suffix. Of two
    ``spaces`` that both begin the name the longer one counts.
    """
    fitting = [space for space in spaces if space and _is_of_space(namespace, space)]
    return not frontend.space or frontend.space == max(fitting, key=len, default="")


def _is_of_space(namespace: str, space: str) -> bool:
    first, _, suffix = namespace.partition(space)
    return not first and (not suffix or suffix.startswith("-"))


def _thresholds_have_effect(facts: CheckFacts) -> Outcome:
    findings: list[Found] = []
    unread, limits = unanswered_frontends(facts), 0
    for frontend in facts.frontends:
        if isinstance(frontend.thresholds, Unread):
            if frontend.answers:
                unread.append(f"{frontend.url}/busy_threshold: {frontend.thresholds.why}")
            continue
        for model, values in frontend.thresholds.items():
            limits += sum(value is not None for value in values.values())
            findings += _fractions_of_nothing(facts, frontend, model, values)
    if not limits and not unread:
        return Skipped("no threshold is set: no worker is ever busy")
    return outcome(findings, unread, f"{count(limits, 'threshold')} set")


_FRACTIONS: Final = (
    ("active_decode_blocks_threshold", "total_kv_blocks", "they are never busy", Role.PREFILL),
    (
        "active_prefill_tokens_threshold_frac",
        "max_num_batched_tokens",
        "the fraction is taken of 10,000,000 tokens",
        Role.DECODE,
    ),
)
"""(threshold, the limit that it is a fraction of, the effect without that limit, exempt role)."""


def _fractions_of_nothing(
    facts: CheckFacts, frontend: FrontendFacts, model: str, values: Thresholds
) -> Iterator[Found]:
    """The thresholds of a model that are fractions of a limit that its workers do not have."""
    for name, lacks, effect, without in _FRACTIONS:
        limit = values.get(name)
        if limit is None:
            continue
        who = _without_limit(facts, frontend, model, lacks, without)
        if who is not None:
            texts = {"limit": f"{limit:g}", "who": who, "lacks": lacks, "effect": effect}
            yield found(frontend.url, model=model, name=name, **texts)


def _without_limit(
    facts: CheckFacts, frontend: FrontendFacts, model: str, lacks: str, without: Role
) -> str | None:
    """The workers whose card lacks the limit; None where all have it, or this is unknown."""
    if facts.deployment is not None:
        members = [w.worker for w in facts.deployment.workers if w.worker.model == model]
        members = [worker for worker in members if worker.role is not without]
        silent = [w for w in members if not getattr(w.runtime_config, lacks)]
        return f"{len(silent)} of {count(len(members), 'worker')}" if silent else None
    if isinstance(frontend.metrics, Unread) or model not in frontend.metrics.models:
        return None
    known = getattr(frontend.metrics.models[model], lacks)
    return "the workers of this model" if known is None else None


def _block_size(facts: CheckFacts) -> Outcome:
    measured, unread = _frontend_metrics(facts)
    findings, compared = [], set()
    for frontend, metrics in measured:
        for model, known in metrics.models.items():
            size = known.kv_cache_block_size
            theirs = _registered_block_sizes(facts, model)
            if size is None or not theirs or known.ready is None:
                continue
            compared.add(size)
            # Workers that differ among themselves are DYR0207.
            if size not in theirs:
                shown = " and ".join(map(str, sorted(theirs)))
                findings.append(found(frontend.url, model=model, frontend=size, workers=shown))
    if not findings and not unread and not compared:
        return Skipped("no frontend reports its block size")
    return outcome(findings, unread, ", ".join(f"{size} tokens" for size in sorted(compared)))


def _registered_block_sizes(facts: CheckFacts, model: str) -> set[int]:
    workers = (item.worker for item in deployment_of(facts).workers)
    return {worker.block_size for worker in workers if worker.model == model}


# -- replicas compared --------------------------------------------------------------------


def _same_thresholds(facts: CheckFacts) -> Outcome:
    unread = unanswered_frontends(facts)
    compared = False
    findings: list[Found] = []
    for replicas in _replicas(facts):
        read: dict[str, Mapping[str, Thresholds]] = {}
        for replica in replicas:
            if isinstance(replica.thresholds, Unread):
                if replica.answers:
                    unread.append(f"{replica.url}/busy_threshold: {replica.thresholds.why}")
            else:
                read[replica.url] = replica.thresholds
        models = sorted({model for thresholds in read.values() for model in thresholds})
        findings += _differences(read, models)
        compared |= len(read) > 1 and bool(models)
    return outcome(findings, unread, nothing="" if compared else "no replica serves a model")


def _differences(
    read: Mapping[str, Mapping[str, Thresholds]], models: list[str]
) -> Iterator[Found]:
    for model in models:
        # A replica that lacks the model is DYR0412.
        having = {url: rows[model] for url, rows in read.items() if model in rows}
        names = sorted({name for values in having.values() for name in values})
        for name in names:
            values = {url: row.get(name) for url, row in having.items()}
            if len(set(values.values())) > 1:
                shown = ", ".join(f"{_limit_text(v)} on {url}" for url, v in values.items())
                yield found(model, model=model, name=name, values=shown)


def _limit_text(limit: float | None) -> str:
    return "off" if limit is None else f"{limit:g}"


def _same_models(facts: CheckFacts) -> Outcome:
    unread = unanswered_frontends(facts)
    findings: list[Found] = []
    names: set[str] = set()
    for replicas in _replicas(facts):
        served: dict[str, set[str]] = {}
        for replica in replicas:
            if isinstance(replica.models, Unread):
                unread.append(f"{replica.url}/v1/models: {replica.models.why}")
            elif replica.answers:
                served[replica.url] = set(replica.models)
        everything = set().union(*served.values())
        names |= everything
        findings += [
            found(url, models=", ".join(sorted(everything - models)))
            for url, models in served.items()
            if everything - models
        ]
    nothing = "" if names else "no frontend serves a model"
    return outcome(findings, unread, ", ".join(sorted(names)), nothing=nothing)


def _replica_sync(facts: CheckFacts) -> Outcome:
    deployment = facts.deployment
    cards = [item.card.router_config for item in deployment.workers] if deployment else []
    routers = [card.get("kv_router_config") for card in cards if card is not None]
    advertised = {r.get("router_replica_sync", False) for r in routers if isinstance(r, dict)}
    if advertised == {True}:
        return Passed("advertised by the workers' cards")
    if False in advertised:
        return outcome([found("frontends", frontends=len(facts.frontends))])
    events = facts.planes.replica_sync_events if facts.planes is not None else 0
    if events:
        return Passed(f"frontends published {count(events, 'request')} during the check")
    why = "frontends and cards do not report it, and no replica-sync event arrived"
    if deployment is None:
        why = "frontends do not report it; a discovery backend may (--discovery)"
    return Skipped(why, unread=True)


# -- versions --------------------------------------------------------------------------------------


def _versions(facts: CheckFacts) -> tuple[dict[str, str], list[str]]:
    """url -> version of the Dynamo frontends that report one, and what could not be read."""
    versions, unread = {}, unanswered_frontends(facts)
    for frontend in facts.frontends:
        if frontend.is_dynamo and isinstance(frontend.version, Unread):
            unread.append(f"{frontend.url}/openapi.json: {frontend.version.why}")
        elif frontend.is_dynamo and isinstance(frontend.version, str):
            versions[frontend.url] = frontend.version
    return versions, unread


def _known_version(facts: CheckFacts) -> Outcome:
    versions, unread = _versions(facts)
    known = ", ".join(f"{version}.x" for version in KNOWN_VERSIONS)
    findings = [
        found(url, version=version, known=known)
        for url, version in versions.items()
        if ".".join(version.split(".")[:2]) not in KNOWN_VERSIONS
    ]
    if not findings and not unread and not versions:
        return Skipped("no frontend reports its version (DYR0502)", unread=True)
    return outcome(findings, unread, ", ".join(sorted(set(versions.values()))))


def _reports_version(facts: CheckFacts) -> Outcome:
    _, unread = _versions(facts)
    silent = [
        frontend.url
        for frontend in facts.frontends
        if frontend.is_dynamo and frontend.version is None
    ]
    return outcome([found(url) for url in silent], unread)


def _one_version(facts: CheckFacts) -> Outcome:
    versions, unread = _versions(facts)
    findings = []
    for replicas in _replicas(facts):
        each = {
            replica.url: versions[replica.url] for replica in replicas if replica.url in versions
        }
        if len(set(each.values())) > 1:
            findings += [found(url, version=version) for url, version in each.items()]
    return outcome(findings, unread, ", ".join(sorted(set(versions.values()))))


FRONTEND_NEEDS: Final = (_frontend_is_given, _frontend_answers)

FRONTEND_CHECKS: Final[Sequence[Check[CheckFacts]]] = (
    Check("DYR0401", _frontends_answer, (_frontend_is_given,)),
    Check("DYR0402", _ours_or_theirs, (_frontend_is_given,)),
    Check("DYR0403", _kv_mode, FRONTEND_NEEDS),
    Check("DYR0404", _uses_events, (*FRONTEND_NEEDS, _has_dynamo_frontend)),
    Check("DYR0405", _sources_match, (*FRONTEND_NEEDS, _has_dynamo_frontend)),
    Check("DYR0406", _models_are_ready, (*FRONTEND_NEEDS, _has_dynamo_frontend)),
    Check(
        "DYR0407", _uses_all, (*FRONTEND_NEEDS, _has_dynamo_frontend, entries_known, has_workers)
    ),
    Check("DYR0408", _same_thresholds, (*FRONTEND_NEEDS, _has_replicas)),
    Check("DYR0409", _replica_sync, (*FRONTEND_NEEDS, _has_replicas, _has_dynamo_frontend)),
    Check("DYR0410", _thresholds_have_effect, FRONTEND_NEEDS),
    Check(
        "DYR0411", _block_size, (*FRONTEND_NEEDS, _has_dynamo_frontend, entries_known, has_workers)
    ),
    Check("DYR0412", _same_models, (*FRONTEND_NEEDS, _has_replicas)),
)

VERSION_CHECKS: Final[Sequence[Check[CheckFacts]]] = (
    Check("DYR0501", _known_version, (*FRONTEND_NEEDS, _has_dynamo_frontend)),
    Check("DYR0502", _reports_version, (*FRONTEND_NEEDS, _has_dynamo_frontend)),
    Check("DYR0503", _one_version, (*FRONTEND_NEEDS, _has_replicas, _has_dynamo_frontend)),
)
