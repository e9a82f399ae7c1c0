"""The sentences of the explain screen, derived from the RouteResult alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from dynctl.base.quantities import chance, percent
from dynctl.documents.decisions import ClientResponse, PastDecision
from dynctl.documents.route_result import (
    UNKNOWN_LOAD,
    BypassRow,
    CandidateRow,
    Constraint,
    DecisionResult,
    DeviceBudgetRow,
    FunnelRow,
    ObservedChoice,
    PairRow,
    QueueRow,
    Ref,
    RejectedRow,
    RouteResult,
    SessionRow,
    waiting_text,
)
from dynctl.screens.numbers import age, amount, blocks, plural, seconds
from dynctl.wire.nvext import PREFILL_HEADER, WORKER_HEADER
from router_core import TERM_BY_NAME, TOPOLOGY_PREFIX, canonical_taint, topology_of

#: Filter -> the name of what remains, in the funnel line.
_STEPS = {
    "worker_set": "of the worker set",
    "served_name": "with the name",
    "direct": "named by the request",
    "allowed": "allowed",
    "available": "answering",
    "domain": "with the domain",
    "taints": "taints",
    "decode_capacity": "decode capacity",
    "busy": "not busy",
}
#: The status of a client that left before its response.
_LEFT = 499
_LOADS = {
    "active_prefill_tokens": "active prefill token",
    "active_decode_blocks": "active decode block",
    "active_requests": "active request",
}


def certainty(result: RouteResult) -> tuple[str, str] | None:
    """The label ``certain`` or ``doubts`` and its line; None where neither is known."""
    count = sum(one.matters for one in result.doubts)
    if count:
        past = isinstance(result, PastDecision)
        return "doubts", f"{count:,} " + (
            "when it was decided" if past else "could change the answer"
        )
    if not result.certain:
        return None
    if result.doubts:
        number = len(result.doubts)
        return "certain", f"no doubt can change the answer ({plural(number, 'doubt')}: --all)"
    ages = [
        one
        for hop in (result.prefill, result.decode)
        if hop is not None and hop.freshness is not None
        for one in (hop.freshness.index.oldest_s, hop.freshness.load.oldest_s)
        if one is not None
    ]
    return "certain", "every input is known" + (
        f" and at most {age(max(ages))} old" if ages else ""
    )


def counted(result: RouteResult, number: int, noun: str = "") -> str:
    """Tokens or blocks of the prompt: ``~450 tokens`` where the prompt was not tokenized."""
    text = plural(number, noun) if noun else f"{number:,}"
    return f"~{text}" if result.tokens_estimated else text


def assumptions(result: RouteResult) -> Iterator[str]:
    """The assumptions of the answer, most important first."""
    hops = [hop for hop in (result.prefill, result.decode) if hop is not None]
    blind = "cache overlap not modelled"
    assumed = list(dict.fromkeys(result.assumptions))
    modelled = all(hop.overlap_modelled for hop in hops)
    named = [*assumed, *(one.what for one in result.doubts)]
    if not modelled and not any(one.startswith(blind) for one in named):
        yield f"{blind}: no tokenizer"
    doubted = [one.what for one in result.doubts]
    yield from (one for one in assumed if not any(what.startswith(one) for what in doubted))


def worker_sets(result: RouteResult) -> Iterator[str]:
    """The sets of workers that the frontend draws from, each with what it would choose."""
    for row in result.worker_sets:
        chosen = [ref.worker for ref in (row.winner.prefill, row.winner.decode) if ref is not None]
        hops = [hop for hop in (row.prefill, row.decode) if hop is not None]
        refused = next((hop for hop in hops if hop.winner is None), None)
        if refused is None:
            answer = " -> ".join(chosen)
        else:
            answer = f"none: {refused.message or refused.outcome}"
        share = chance(row.share).rjust(5)
        shown = "  (shown below)" if row.name == result.worker_set else ""
        yield f"{share}  {row.name}, {plural(row.available, 'worker')}: {answer}{shown}"


def bypass(result: RouteResult) -> Iterator[str]:
    """Whether conditional disaggregation leaves out the prefill hop, and why."""
    if isinstance(result.bypass, BypassRow):
        yield result.bypass.message


def credits_overlap(hop: DecisionResult) -> bool:
    """Whether cached blocks count on the hop: not on a plain decode hop."""
    return hop.stage != "decode" or bool(hop.parameters.get("overlap_score_credit"))


def request_constraints(result: RouteResult) -> Iterator[str]:
    """The request's own constraints."""
    first = result.prefill or result.decode
    for item in first.constraints if first is not None else ():
        if item.origin == "request":
            yield _constraint(item)


def implied(result: RouteResult) -> Iterator[str]:
    """The constraints that the chosen prefill worker implies for decode."""
    decode = result.decode
    derived = [c for c in decode.constraints if c.origin != "request"] if decode else []
    for item in derived:
        yield f"{_constraint(item)}  ({item.origin})"
    if result.relaxed:
        yield "nothing: its domain has no decode worker, and the policy is fallback (see below)"
    elif not derived:
        yield "nothing for decode: no KV-transfer policy applies"


def funnel(hop: DecisionResult, model: str, room: int) -> str:
    """``6 workers > 3 prefill > 2 not busy > 2 scored``; steps without effect may be left out."""
    if not hop.funnel:
        return ""
    noun = "rank" if has_ranks(hop) else "worker"
    parts = [(plural(hop.funnel[0].entered, noun), True)]
    for step in hop.funnel:
        changed = step.left != step.entered
        parts.append((f"{step.left:,} {_step_name(step, hop, model)}", changed or not step.left))
    if hop.candidates:
        parts.append((f"{max(len(hop.candidates), hop.funnel[-1].left):,} scored", True))
    constrained = bool(hop.constraints)
    kept = [
        text
        for text, needed in parts
        if needed or (constrained and text.endswith("taints")) or text.endswith("not busy")
    ]
    line = " > ".join(kept)
    return line if len(line) <= room else " > ".join(text for text, needed in parts if needed)


def formula(hop: DecisionResult) -> str:
    """The cost formula of this hop with the names of the table's headings."""
    if not hop.terms or not hop.candidates:
        return ""
    parts = []
    for term in hop.terms:
        known = TERM_BY_NAME.get(term.name)
        name = term.name.replace("_", " ") if known is None else known.phrase
        parts.append(name if term.weight == 1.0 else f"{amount(term.weight)} * {name}")
    total = " + ".join(parts)
    preferred = any(row.multiplier != 1.0 for row in hop.candidates)
    if preferred:
        total = f"{total} * x pref" if len(parts) == 1 else f"({total}) * x pref"
    units = {term.unit for term in hop.terms}
    if any(row.following is not UNSET for row in hop.candidates):
        total += " + next hop"
    total += f"  ({units.pop()})" if len(units) == 1 else ""
    if not any(term.name == "decode_blocks" for term in hop.terms) and hop.stage == "prefill":
        total += "; decode blocks are not tracked on this hop" if hop.mode == "kv" else ""
    return total


def verdict(hop: DecisionResult, result: RouteResult) -> Iterator[str]:
    """Why the winner won, by how much, and the effect of guard and preference."""
    for step in hop.funnel:
        if step.filter == "decode_capacity" and step.left < step.entered and hop.winner:
            yield _guard(step)
        if step.skipped:
            yield f"{step.filter.replace('_', ' ')} filter not applied: {step.skipped}"
    if hop.queue is not UNSET and hop.queue.refused is None:
        yield _queue(hop.queue)
    if hop.winner is not None:
        yield " ".join(_how(hop, result))
    if hop.preference is not None:
        yield _preference(hop)
    yield from _prefill_load(hop, result)
    if hop.session:
        yield _session(hop.session)
    for note in hop.notes:
        known = any(one.what.startswith(note) for one in result.doubts)
        if note not in result.assumptions and not known:
            yield f"note: {note}"


def _prefill_load(hop: DecisionResult, result: RouteResult) -> Iterator[str]:
    """What the prefill load model leaves of the active prefill, and what it predicts."""
    fallen = [
        f"{row.active_prefill_tokens:,} of {row.booked_prefill_tokens:,} on {row.worker}"
        for row in hop.candidates
        if row.booked_prefill_tokens not in (UNSET, row.active_prefill_tokens)
    ]
    if fallen:
        more = f" and {len(fallen) - 3:,} more" if len(fallen) > 3 else ""
        listed = ", ".join(fallen[:3])
        yield f"active prefill tokens that are left of those booked: {listed}{more}"
    load = hop.prefill_load
    if load is not UNSET:
        yield (
            f"prefill of {counted(result, load.tokens, 'token')} is predicted to take "
            f"{load.seconds * 1e3:,.3g} ms ({load.model})"
        )


def pairs(result: RouteResult) -> Iterator[str]:
    """The chosen pair beside that of a choice hop by hop."""
    if result.pairs is UNSET:
        return
    best, greedy = result.pairs.best, result.pairs.greedy
    if greedy.prefill == best.prefill:
        yield f"best: {_pair(best)}; greedy chooses the same pair"
        return
    more = greedy.cost - best.cost
    lost = f"{blocks(more)} blocks more" if more > 0 else "the same"
    yield f"best: {_pair(best)}; greedy: {_pair(greedy)}, {lost}"


def _pair(row: PairRow) -> str:
    decode = "its decode worker" if row.decode is None else row.decode.worker
    return f"{row.prefill.worker} + {decode} = {blocks(row.cost)}"


def _session(bound: SessionRow) -> str:
    if bound.kept:
        return f"session affinity: {bound.worker}, {bound.left_s:.0f} s left"
    if bound.excluded:
        why = f"{bound.worker} is excluded ({bound.excluded})"
        return f"session affinity: {why}, so the session moves"
    extra = f"{bound.extra_cost:.3f} more" if bound.extra_cost else "more"
    return f"session affinity: {bound.worker} costs {extra}, so the session moves"


def answer(result: RouteResult) -> list[str]:
    """The answer, then the age of index and load."""
    if not result.ok:
        refused = refusal(result)
        message = refused.message if refused is not None and refused.message else "no worker"
        status = "" if result.status is None else f" (a Dynamo frontend answers {result.status})"
        return [f"none: {message}{status}"]
    prefill, decode = result.winner.prefill, result.winner.decode
    places = [_domains(hop) for hop in (result.prefill, result.decode) if hop is not None]
    chosen = [
        rank_name(ref, hop is not None and has_ranks(hop))
        for ref, hop in ((prefill, result.prefill), (decode, result.decode))
        if ref is not None
    ]
    if len(chosen) == 1:
        where = ", ".join(places[-1].values())
        lines = [chosen[0] + (f" in {where}" if where else "")]
    else:
        lines = [f"{' -> '.join(chosen)}{_together(places, result)}"]
    first, final = result.prefill or result.decode, result.decode or result.prefill
    if first is not None and first.queue is not UNSET and first.queue.waits:
        lines[0] += ", after a wait in the router queue"
    if final is not None:
        lines += _freshness(result, final)
    return lines


def no_retry(result: PastDecision) -> str:
    """Why a request that an engine failed was not sent to another one."""
    refused = refusal(result)
    message = refused.message if refused is not None and refused.message else "no worker"
    return f"no other worker could take the request: {message}"


def response(found: ClientResponse) -> str:
    """How a request ended, with its times and tokens; empty where that is not known."""
    if found.state == "running":
        return "the request is running"
    if found.state == "unknown":
        return f"unknown: {found.error}" if found.error else ""
    text = str(found.state)
    if found.state == "cancelled":
        text += f": the client left {_left(found)}"
    elif found.state == "cut":
        text += " in mid-response"
    if found.status not in (None, _LEFT):
        text = f"{found.status}, {text}"
    # The answer above it has the reason of a refusal.
    if found.error and found.state != "refused":
        text += f": {found.error}"
    details = list(_measured(found))
    return f"{text}; {', '.join(details)}" if details else text


def _left(found: ClientResponse) -> str:
    """When the client of a cancelled request left."""
    if found.status == 200:
        return "in mid-response"
    if found.attempts:
        return "before the response began"
    return "before an engine got the request"


def _measured(found: ClientResponse) -> Iterator[str]:
    """The times and tokens of a response."""
    if found.ttft_s is not None:
        yield f"first output after {seconds(found.ttft_s)}"
    if found.duration_s is not None:
        yield f"{seconds(found.duration_s)} in all"
    if found.prompt_tokens is not None:
        cached = "" if found.cached_tokens is None else f" ({found.cached_tokens:,} cached)"
        yield f"{plural(found.prompt_tokens, 'prompt token')}{cached}"
    if found.output_tokens is not None:
        yield plural(found.output_tokens, "output token")
    elif found.output_events is not None:
        yield f"~{plural(found.output_events, 'output token')}"


def attempts(found: ClientResponse) -> Iterator[str]:
    """The requests to engines, where one of them failed."""
    if any(one.problem for one in found.attempts):
        for one in found.attempts:
            done = "answered" if found.state == "complete" else "no failure seen"
            yield f"{one.worker} ({one.stage}): {one.problem or done}"


def observed(choice: ObservedChoice) -> str:
    """What a Dynamo frontend chose, and whether that was predicted."""
    router = f" {choice.router}" if choice.router else ""
    by = f"by Dynamo frontend{router} ({choice.source})"
    if choice.refused:
        return f"{choice.refused}, {by}"
    ranks = [ref for ref in (choice.prefill, choice.decode) if ref is not None]
    where = " -> ".join(rank_name(ref, bool(ref.dp_rank)) for ref in ranks)
    if choice.unpredicted:
        verdict = f"not predicted: {choice.unpredicted}"
    elif choice.as_predicted:
        verdict = "as predicted"
    elif choice.predicted is None:
        verdict = "dynctl predicted a refusal"
    else:
        verdict = f"dynctl predicted {rank_name(choice.predicted, bool(choice.predicted.dp_rank))}"
    cost = "" if choice.cost is None else f", at its cost of {blocks(choice.cost)} blocks"
    return f"{where}{cost}, {by}; {verdict}"


def refusal(result: RouteResult) -> DecisionResult | None:
    """The hop without a winner."""
    hops = (result.prefill, result.decode)
    return next((hop for hop in hops if hop is not None and hop.winner is None), None)


def remedies(result: RouteResult) -> Iterator[tuple[str, str]]:
    """For a refusal: the filter that emptied the set, the closest worker, and what to change."""
    hop = refusal(result)
    if hop is None:
        return
    if hop.outcome == "policy_underivable":
        yield "admits", "a prefill worker whose KV-transfer policy can be applied (see above)"
        return
    if hop.queue is not UNSET and hop.queue.refused is not None:
        full = hop.queue.refused
        yield "stopped", f"by the router queue: its limit of {full.limit_kind} is {full.limit:,}"
        yield "admits", "a shorter queue, less prefill load, or a higher limit"
        return
    step = next((one for one in hop.funnel if one.entered and not one.left), None)
    if step is None:
        yield "admits", f"a {hop.stage} worker of model {result.model} (dynctl serve engine)"
        return
    name = step.filter.replace("_", " ")
    noun = "rank" if has_ranks(hop) else "worker"
    yield (
        "stopped",
        f"by the {name} filter of the {hop.stage} hop: {plural(step.entered, noun)}"
        " entered, none left",
    )
    nearest = min(step.rejected, key=_distance, default=None)
    alike = ("model", "served_name", "role", "direct")
    if nearest is not None and len(step.rejected) > 1 and step.filter not in alike:
        yield "nearest", f"{nearest.worker}: {short_taints(nearest.message)}"
    yield "admits", _admits(hop, step, nearest, result)


def primary_domain(result: RouteResult) -> str | None:
    """The domain to show: the one of a transfer constraint, else the most common one."""
    hops = [hop for hop in (result.decode, result.prefill) if hop is not None]
    for hop in hops:
        for item in hop.constraints:
            place = topology_of(item.taint)
            if place is not None:
                return place[0]
    names: dict[str, int] = {}
    for hop in hops:
        for row in hop.candidates:
            for name in row.domains:
                names[name] = names.get(name, 0) + 1
        for step in hop.funnel:
            for rejected in step.rejected:
                for name in rejected.domains:
                    names[name] = names.get(name, 0) + 1
    # The domain of most workers; "zone" first if several are equally common.
    return min(names, key=lambda name: (-names[name], name != "zone", name), default=None)


def short_taints(text: str) -> str:
    """Canonical topology taints without their prefix: ``zone=zone-a``."""
    return text.replace(TOPOLOGY_PREFIX, "")


def has_ranks(hop: DecisionResult) -> bool:
    """Whether any worker has more than one data-parallel rank."""
    rejected = any(row.dp_rank for step in hop.funnel for row in step.rejected)
    return rejected or any(row.dp_rank for row in hop.candidates)


def rank_name(row: Ref | CandidateRow | RejectedRow, ranked: bool) -> str:
    """A worker's name, with ``/rank`` if there are several ranks."""
    return f"{row.worker}/{row.dp_rank}" if ranked else row.worker


# -- inside --------------------------------------------------------------------------------


def _constraint(item: Constraint) -> str:
    weight = "" if item.weight is None else f" with weight {amount(item.weight)}"
    return f"{item.kind} {item.taint}{weight}"


def _step_name(step: FunnelRow, hop: DecisionResult, model: str) -> str:
    if step.filter == "model":
        return f"serve {model}"
    if step.filter == "role":
        return hop.stage
    return _STEPS.get(step.filter, step.filter.replace("_", " "))


def _queue(queue: QueueRow) -> str:
    """What the router queue does with the request."""
    if queue.waits:
        return f"{waiting_text(queue)}. It is decided again when it leaves the queue."
    if queue.waited_s is None:
        rank = "the eligible rank has" if queue.ranks == 1 else "an eligible rank has"
        return f"router queue, class {queue.policy_class}: no wait, {rank} room."
    return f"{waiting_text(queue)}. It was decided when it left the queue."


def _guard(step: FunnelRow) -> str:
    places = _places(step)
    passed = ", ".join(row.worker for row in step.rejected[:3])
    more = len(step.rejected) - 3
    passed += f" and {more:,} more" if more > 0 else ""
    verb = "have" if len(places) > 1 else "has"
    why = f"{' and '.join(places)} {verb} no eligible decode worker" if places else "policy"
    return f"decode-capacity guard: skipped {passed}: {why}."


def _places(step: FunnelRow) -> list[str]:
    """The domains without decode capacity, each once."""
    rows = (row for row in step.rejected if row.code == "no_decode_capacity")
    return list(dict.fromkeys(f"{row.limit}={row.value}" for row in rows))


def _how(hop: DecisionResult, result: RouteResult) -> Iterator[str]:
    winner = hop.winner
    if winner is None:
        return
    ranked = has_ranks(hop)
    name = rank_name(winner, ranked)
    if len(hop.candidates) == 1:
        yield f"{name} is the only eligible {'rank' if ranked else 'worker'}."
        return
    if hop.devices is not UNSET:
        yield from _device_group(hop.devices)
    unit = "blocks" if hop.mode == "kv" else hop.terms[0].unit if hop.terms else ""
    others = [row for row in hop.candidates if not _is(row, winner.worker_id, winner.dp_rank)]
    if hop.drawn is not UNSET:
        yield _drawn_pair(hop, hop.drawn, ranked)
        if hop is result.prefill:
            yield from _after_tie(result)
        return
    if hop.devices is not UNSET:
        # Only workers of the class that is next compete.
        cpu = hop.devices.next == "cpu"
        others = [row for row in others if (row.device == "cpu") is cpu]
        if not others:
            yield f"{name} is the only one{_flip(hop)}."
            return
    second = min(others, key=lambda row: row.cost)
    second_name = rank_name(second, ranked)
    if hop.temperature > 0:
        share = next(
            (row.probability for row in hop.candidates
             if _is(row, winner.worker_id, winner.dp_rank)), 0.0
        )  # fmt: skip
        drawn = percent(share, 1)
        yield f"drawn at random, probability {drawn} at temperature {hop.temperature:g}."
        if hop.margin is not None and hop.margin < 0:
            yield f"{second_name} is cheaper by {blocks(-hop.margin)} {unit}."
    elif hop.tied:
        names = [
            rank_name(ref, ranked)
            for ref in hop.tied
            if not _is(ref, winner.worker_id, winner.dp_rank)
        ]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
        yield f"tie with {shown}: each is equally likely (1 in {len(hop.tied):,})."
        yield from _requests_of_tied(hop)
        if hop is result.prefill:
            yield from _after_tie(result)
    elif hop.mode == "round-robin":
        yield f"it is {name}'s turn; {second_name} is next."
    elif hop.margin is not None:
        margin = blocks(hop.margin) if hop.mode == "kv" else amount(hop.margin)
        unit = unit.removesuffix("s") if margin == "1" else unit
        yield f"wins by {margin} {unit} over {second_name}{_flip(hop)}."


def _requests_of_tied(hop: DecisionResult) -> Iterator[str]:
    """Why workers with different numbers of running requests cost the same in mode kv."""
    if hop.mode != "kv" or any(term.name == "active_requests" for term in hop.terms):
        return
    tied = [
        row.active_requests
        for row in hop.candidates
        if any(_is(row, ref.worker_id, ref.dp_rank) for ref in hop.tied)
    ]
    fewest, most = min(tied, default=0), max(tied, default=0)
    if fewest != most:
        yield (
            f"They run {fewest:,} to {most:,} requests: a request counts by its blocks and prefill "
            "tokens, not by number (--router-decode-active-request-weight counts the number too)."
        )


def _device_group(budget: DeviceBudgetRow) -> Iterator[str]:
    """Which class of devices gets the request, with the numbers compared."""
    if not (budget.cpu_workers and budget.accelerators):
        only = "CPU workers" if budget.cpu_workers else "accelerators"
        yield f"all candidates are {only}: the least loaded wins."
        return
    cpus = plural(budget.cpu_requests, "request")
    others = plural(budget.accelerator_requests, "request")
    allowed = f"{others} on {plural(budget.accelerators, 'accelerator')} allow {budget.allowed_cpu}"
    share = budget.accelerator_requests * budget.cpu_workers / (budget.ratio * budget.accelerators)
    if budget.next != "cpu" and share > budget.cpu_requests:
        allowed += f" ({share:.3g}, rounded down as in Dynamo)"
    yield (
        f"{'CPU workers' if budget.next == 'cpu' else 'accelerators'} are next: {allowed} on "
        f"{plural(budget.cpu_workers, 'CPU worker')} (ratio {amount(budget.ratio)}), which "
        f"{'have' if budget.cpu_workers > 1 else 'has'} {cpus}."
    )


def _drawn_pair(hop: DecisionResult, drawn: Sequence[Ref], ranked: bool) -> str:
    """The two that were drawn with their running requests, and how likely the winner was."""
    rows = [
        next(row for row in hop.candidates if _is(row, ref.worker_id, ref.dp_rank)) for ref in drawn
    ]
    first, second = (f"{rank_name(row, ranked)} ({row.active_requests:,} active)" for row in rows)
    winner = next(
        row for row in rows if hop.winner and _is(row, hop.winner.worker_id, hop.winner.dp_rank)
    )
    why = "the first of equals" if not hop.margin else "fewer active requests"
    count = hop.funnel[-1].left if hop.funnel else len(hop.candidates)
    drawn_of = "both drawn" if count == 2 else f"two of {count:,} drawn at random"
    text = f"{drawn_of}: {first} and {second}; {rank_name(winner, ranked)} wins, {why}{_flip(hop)}."
    # A past decision that was kept in brief has no others.
    if count > len(hop.candidates) or winner.probability == 1:
        return text
    return f"{text} Over all draws it wins {chance(winner.probability)}."


def _flip(hop: DecisionResult) -> str:
    flip = hop.flip
    if flip is None:
        return ""
    if flip.worker is None:
        direction = "higher" if flip.by > 0 else "lower"
        return f"; would flip with {flip.change} {amount(abs(flip.by))} {direction}"
    noun = _LOADS.get(flip.change, flip.change)
    number = abs(flip.by)
    more = "more" if flip.by > 0 else "fewer"
    ending = "" if number == 1 else "s"
    return f"; would flip with {amount(number)} {more} {noun}{ending} on {flip.worker}"


def _after_tie(result: RouteResult) -> Iterator[str]:
    for other in result.decode_by_prefill[:4]:
        chosen = result.winner.prefill
        if chosen is not None and other.prefill.worker_id == chosen.worker_id:
            continue
        decode = other.decode
        if decode is None or decode.winner is None:
            yield f"With {other.prefill.worker}, decode would be refused."
        else:
            yield f"With {other.prefill.worker}, decode goes to {decode.winner.worker}."


def _preference(hop: DecisionResult) -> str:
    meter = hop.preference
    if meter is None:
        return ""
    taint = short_taints(meter.taint)
    text = f"prefers {taint}: local may cost up to {meter.crossover:.3f}x the best other"
    if meter.now is not None:
        text += f"; now {meter.now:.3f}x {_bar(meter.now, meter.crossover)}"
    text += f": {meter.verdict}."
    if meter.smallest_weight is not None and meter.now is not None:
        text += f" Smallest weight that keeps it local: {meter.smallest_weight:.3g}."
    return text


def _bar(now: float, crossover: float, cells: int = 16) -> str:
    """``[#####....|...]``: the current ratio, with ``|`` at the crossover."""
    end = max(now, crossover) * 1.2 or 1.0
    filled = min(cells, round(now / end * cells))
    mark = min(cells - 1, round(crossover / end * cells))
    bar = ["#" if i < filled else "." for i in range(cells)]
    bar[mark] = "|"
    return f"[{''.join(bar)}]"


def _domains(hop: DecisionResult) -> dict[str, str]:
    winner = hop.winner
    if winner is None:
        return {}
    row = next((r for r in hop.candidates if _is(r, winner.worker_id, winner.dp_rank)), None)
    return {} if row is None else row.domains


def _together(places: list[dict[str, str]], result: RouteResult) -> str:
    domain = primary_domain(result)
    values = [place.get(domain) for place in places] if domain is not None else []
    if len(values) < 2 or None in values:
        return ""
    first, second = values[0], values[1]
    return f", both in {first}" if first == second else f", crosses {domain}: {first} to {second}"


def _freshness(result: RouteResult, final: DecisionResult) -> Iterator[str]:
    # Cache overlap counts on the first hop, which computes the prompt.
    judged = result.prefill or final
    if judged.freshness is None or final.freshness is None:
        yield "index age and load age: not recorded for past decisions"
        return
    index, load = judged.freshness.index, final.freshness.load
    noun = "rank" if has_ranks(judged) else "worker"
    if not judged.overlap_modelled:
        text = "cached blocks of this prompt unknown: routed by load only"
    elif index.estimated and index.publishers == 0:
        text = "no KV events: caches estimated from the requests sent there"
    elif index.publishers == 0:
        text = "caches of these workers unknown: routed by load only"
    else:
        text = f"index current for {index.current:,} of {plural(index.publishers, noun)}"
        if index.oldest_s is not None:
            text += f", oldest {age(index.oldest_s)}"
        if index.gaps:
            text += f", {plural(index.gaps, 'gap')}"
        silent = len(judged.candidates) - index.publishers - index.estimated
        if silent > 0:
            text += f", {silent:,} without KV events"
        if index.estimated:
            text += f", {index.estimated:,} estimated"
    if load.source == UNKNOWN_LOAD:
        yield f"{text}; load unknown"
    elif load.oldest_s is None:
        yield f"{text}; load counted by {load.source}, none reported"
    else:
        yield f"{text}; load {age(load.oldest_s)} old ({load.source})"


def _is(row: object, worker_id: int, dp_rank: int) -> bool:
    return (getattr(row, "worker_id", None), getattr(row, "dp_rank", None)) == (worker_id, dp_rank)


def _distance(row: RejectedRow) -> float:
    """How far a rejected rank is from being admitted: value over limit."""
    numbers = (int, float)
    if isinstance(row.value, numbers) and isinstance(row.limit, numbers) and row.limit:
        return float(row.value) / float(row.limit)
    return 1e9


def _taint_of_a_domain(hop: DecisionResult, nearest: RejectedRow | None) -> str:
    """The taint that a requirement such as ``zone=zone-a`` probably means; else nothing."""
    domains = {} if nearest is None else nearest.domains
    for item in hop.constraints:
        domain, equals, value = item.taint.partition("=")
        if item.kind == "required" and equals and domain in domains:
            return f"; the taint of a domain is {canonical_taint(domain, value)}"
    return ""


def _admits(
    hop: DecisionResult, step: FunnelRow, nearest: RejectedRow | None, result: RouteResult
) -> str:
    role = hop.stage
    if step.filter == "model":
        return f"a worker that serves {result.model}"
    if step.filter == "served_name":
        name = nearest.limit if nearest is not None else "the requested name"
        return (
            f"a worker of {result.model} that serves the name {name}: GET /v1/models of an engine"
        )
    if step.filter == "role":
        return f"a worker that can serve the {role} hop: start one with --role {role}"
    if step.filter == "direct":
        prefill = role == "prefill"
        header, name = (
            (PREFILL_HEADER, "prefill_worker_id")
            if prefill
            else (WORKER_HEADER, "decode_worker_id")
        )
        flag = "--pin-prefill" if prefill else "--pin-decode"
        return f"a worker id in the header {header} or in nvext.{name}; for route: {flag} WORKER"
    if step.filter == "allowed":
        return "a pin to an eligible worker, or no pin"
    if step.filter == "available":
        return "one of these workers, once it answers its health probe again"
    if step.filter == "domain":
        limit = nearest.limit if nearest is not None else "the domain"
        return f"a {role} worker that publishes {limit}, or the fallback mismatch policy"
    if step.filter == "taints":
        wanted = ", ".join(item.taint for item in hop.constraints if item.kind == "required")
        ours = any(item.origin != "request" for item in hop.constraints)
        other = " or a policy of preferred" if ours else " or a request without that constraint"
        return f"a {role} worker with {wanted},{other}{_taint_of_a_domain(hop, nearest)}"
    if step.filter == "decode_capacity":
        where = " or ".join(_places(step)) or "its transfer domain"
        return f"an eligible decode worker in {where}: dynctl workers list shows their state"
    if step.filter == "busy" and nearest is not None:
        over = float(nearest.value or 0) - float(nearest.limit or 0)
        return (
            f"{nearest.worker} once its load falls by {amount(over)}, or a higher busy "
            f"threshold: dynctl thresholds set {result.model} --help"
        )
    return "one more eligible worker"
