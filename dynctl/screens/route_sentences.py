"""The sentences of the explain screen, derived from the RouteResult alone."""

from __future__ import annotations

from collections import Counter
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
    IndexFreshness,
    ObservedChoice,
    PairRow,
    PreferenceRow,
    QueueRow,
    Ref,
    RejectedRow,
    RouteResult,
    SessionRow,
    Term,
    waiting_text,
)
from dynctl.screens.numbers import age, amount, blocks, first_names, plural, seconds
from router_core import TERM_BY_NAME, TOPOLOGY_PREFIX, topology_of

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
    number = sum(doubt.matters for doubt in result.doubts)
    if number and isinstance(result, PastDecision):
        return "doubts", f"{number:,} when it was decided"
    if number:
        return "doubts", f"{number:,} could change the answer"
    if not result.certain:
        return None
    if result.doubts:
        doubts = plural(len(result.doubts), "doubt")
        return "certain", f"no doubt can change the answer ({doubts}: --all)"
    ages = list(_input_ages(result))
    oldest = f" and at most {age(max(ages))} old" if ages else ""
    return "certain", f"every input is known{oldest}"


def _input_ages(result: RouteResult) -> Iterator[float]:
    """Seconds since the oldest report of index and load, where known."""
    for hop in result.hops:
        if hop.freshness is not None:
            for oldest in (hop.freshness.index.oldest_s, hop.freshness.load.oldest_s):
                if oldest is not None:
                    yield oldest


def token_count_text(result: RouteResult, number: int, noun: str = "") -> str:
    """Tokens or blocks of the prompt: ``~450 tokens`` where the prompt was not tokenized."""
    text = plural(number, noun) if noun else f"{number:,}"
    return f"~{text}" if result.tokens_estimated else text


def assumptions(result: RouteResult) -> Iterator[str]:
    """The assumptions of the answer, most important first."""
    blind = "cache overlap not modelled"
    doubted = [doubt.what for doubt in result.doubts]
    assumed = list(dict.fromkeys(result.assumptions))
    modelled = all(hop.overlap_modelled for hop in result.hops)
    if not modelled and not any(text.startswith(blind) for text in [*assumed, *doubted]):
        yield f"{blind}: no tokenizer"
    for text in assumed:
        if not any(what.startswith(text) for what in doubted):
            yield text


def worker_sets(result: RouteResult) -> Iterator[str]:
    """The sets of workers that the frontend draws from, each with what it would choose."""
    for row in result.worker_sets:
        hops = [hop for hop in (row.prefill, row.decode) if hop is not None]
        refused = next((hop for hop in hops if hop.winner is None), None)
        if refused is None:
            refs = (row.winner.prefill, row.winner.decode)
            answer = " -> ".join(ref.worker for ref in refs if ref is not None)
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


def implied_constraints(result: RouteResult) -> Iterator[str]:
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
    # Each step, and whether it stays where room is short.
    parts = [(plural(hop.funnel[0].entered, noun), True)]
    for step in hop.funnel:
        needed = step.left != step.entered or not step.left
        parts.append((f"{step.left:,} {_step_name(step, hop, model)}", needed))
    if hop.candidates:
        parts.append((f"{max(len(hop.candidates), hop.funnel[-1].left):,} scored", True))
    telling = ("not busy", "taints") if hop.constraints else ("not busy",)
    line = " > ".join(text for text, needed in parts if needed or text.endswith(telling))
    return line if len(line) <= room else " > ".join(text for text, needed in parts if needed)


def formula(hop: DecisionResult) -> str:
    """The cost formula of this hop with the names of the table's headings."""
    if not hop.terms or not hop.candidates:
        return ""
    total = " + ".join(map(_term_text, hop.terms))
    if any(row.multiplier != 1.0 for row in hop.candidates):
        total = f"{total} * x pref" if len(hop.terms) == 1 else f"({total}) * x pref"
    if any(row.following is not UNSET for row in hop.candidates):
        total += " + next hop"
    units = {term.unit for term in hop.terms}
    if len(units) == 1:
        total += f"  ({units.pop()})"
    tracked = any(term.name == "decode_blocks" for term in hop.terms)
    if hop.stage == "prefill" and hop.mode == "kv" and not tracked:
        total += "; decode blocks are not tracked on this hop"
    return total


def _term_text(term: Term) -> str:
    """``2 * prefill blocks``."""
    known = TERM_BY_NAME.get(term.name)
    name = term.name.replace("_", " ") if known is None else known.phrase
    return name if term.weight == 1.0 else f"{amount(term.weight)} * {name}"


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
        yield " ".join(_reasons(hop, hop.winner, result))
    if hop.preference is not None:
        yield _preference(hop.preference)
    yield from _prefill_load(hop, result)
    if hop.session:
        yield _session(hop.session)
    yield from _notes(hop, result)


def _notes(hop: DecisionResult, result: RouteResult) -> Iterator[str]:
    """The notes of a hop that no assumption and no doubt repeats."""
    for note in hop.notes:
        doubted = any(doubt.what.startswith(note) for doubt in result.doubts)
        if note not in result.assumptions and not doubted:
            yield f"note: {note}"


def _prefill_load(hop: DecisionResult, result: RouteResult) -> Iterator[str]:
    """What the prefill load model leaves of the active prefill, and what it predicts."""
    fallen = [
        f"{row.active_prefill_tokens:,} of {row.booked_prefill_tokens:,} on {row.worker}"
        for row in hop.candidates
        if row.booked_prefill_tokens not in (UNSET, row.active_prefill_tokens)
    ]
    if fallen:
        text = first_names(fallen, 3)
        yield f"active prefill tokens that are left of those booked: {text}"
    load = hop.prefill_load
    if load is not UNSET:
        yield (
            f"prefill of {token_count_text(result, load.tokens, 'token')} is predicted to take "
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
    pairs = ((result.winner.prefill, result.prefill), (result.winner.decode, result.decode))
    chosen = [
        rank_name(ref, hop is not None and has_ranks(hop)) for ref, hop in pairs if ref is not None
    ]
    places = [_winner_domains(hop) for hop in result.hops]
    if len(chosen) == 1:
        where = ", ".join(places[-1].values())
        text = chosen[0] + (f" in {where}" if where else "")
    else:
        text = f"{' -> '.join(chosen)}{_together(places, result)}"
    if not result.hops:
        return [text]
    first, final = result.hops[0], result.hops[-1]
    if first.queue is not UNSET and first.queue.waits:
        text += ", after a wait in the router queue"
    return [text, *_freshness(first, final)]


def no_retry(result: PastDecision) -> str:
    """Why a request that an engine failed was not sent to another one."""
    refused = refusal(result)
    message = refused.message if refused is not None and refused.message else "no worker"
    return f"no other worker could take the request: {message}"


def response_text(response: ClientResponse) -> str:
    """How a request ended, with its times and tokens; empty where that is not known."""
    if response.state == "running":
        return "the request is running"
    if response.state == "unknown":
        return f"unknown: {response.error}" if response.error else ""
    text = str(response.state)
    if response.state == "cancelled":
        text += f": the client left {_when_left(response)}"
    elif response.state == "cut":
        text += " in mid-response"
    if response.status not in (None, _LEFT):
        text = f"{response.status}, {text}"
    # The answer above it has the reason of a refusal.
    if response.error and response.state != "refused":
        text += f": {response.error}"
    details = list(_measures(response))
    return f"{text}; {', '.join(details)}" if details else text


def _when_left(response: ClientResponse) -> str:
    """When the client of a cancelled request left."""
    if response.status == 200:
        return "in mid-response"
    if response.attempts:
        return "before the response began"
    return "before an engine got the request"


def _measures(response: ClientResponse) -> Iterator[str]:
    """The times and tokens of a response."""
    if response.ttft_s is not None:
        yield f"first output after {seconds(response.ttft_s)}"
    if response.duration_s is not None:
        yield f"{seconds(response.duration_s)} in all"
    if response.prompt_tokens is not None:
        cached = "" if response.cached_tokens is None else f" ({response.cached_tokens:,} cached)"
        yield f"{plural(response.prompt_tokens, 'prompt token')}{cached}"
    if response.output_tokens is not None:
        yield plural(response.output_tokens, "output token")
    elif response.output_events is not None:
        yield f"~{plural(response.output_events, 'output token')}"


def attempt_texts(response: ClientResponse) -> Iterator[str]:
    """The requests to engines, where one of them failed."""
    if any(attempt.problem for attempt in response.attempts):
        for attempt in response.attempts:
            done = "answered" if response.state == "complete" else "no failure seen"
            yield f"{attempt.worker} ({attempt.stage}): {attempt.problem or done}"


def observed_text(choice: ObservedChoice) -> str:
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
    return next((hop for hop in result.hops if hop.winner is None), None)


def primary_domain(result: RouteResult) -> str | None:
    """The domain to show: the one of a transfer constraint, else the most common one."""
    hops = result.hops[::-1]
    for hop in hops:
        for constraint in hop.constraints:
            place = topology_of(constraint.taint)
            if place is not None:
                return place[0]
    workers: Counter[str] = Counter()
    for hop in hops:
        workers.update(name for row in hop.candidates for name in row.domains)
        for step in hop.funnel:
            workers.update(name for row in step.rejected for name in row.domains)
    # The domain of most workers; "zone" first if several are equally common.
    return min(workers, key=lambda name: (-workers[name], name != "zone", name), default=None)


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


def is_rank(row: Ref | CandidateRow, ref: Ref | None) -> bool:
    """Whether the row is of the rank that ``ref`` names."""
    return ref is not None and (row.worker_id, row.dp_rank) == (ref.worker_id, ref.dp_rank)


def winner_row(hop: DecisionResult) -> CandidateRow | None:
    """The candidate that won; None where none did, or where it was not recorded."""
    return next((row for row in hop.candidates if is_rank(row, hop.winner)), None)


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
    places = domains_without_decode(step)
    passed = first_names([row.worker for row in step.rejected], 3)
    verb = "have" if len(places) > 1 else "has"
    why = f"{' and '.join(places)} {verb} no eligible decode worker" if places else "policy"
    return f"decode-capacity guard: skipped {passed}: {why}."


def domains_without_decode(step: FunnelRow) -> list[str]:
    """The domains without decode capacity, each once."""
    rows = (row for row in step.rejected if row.code == "no_decode_capacity")
    return list(dict.fromkeys(f"{row.limit}={row.value}" for row in rows))


def _reasons(hop: DecisionResult, winner: Ref, result: RouteResult) -> Iterator[str]:
    """Why the winner won; one sentence an item."""
    ranked = has_ranks(hop)
    name = rank_name(winner, ranked)
    if len(hop.candidates) == 1:
        yield f"{name} is the only eligible {'rank' if ranked else 'worker'}."
        return
    if hop.devices is not UNSET:
        yield from _device_group(hop.devices)
    if hop.drawn is not UNSET:
        yield _drawn_pair(hop, hop.drawn, ranked)
        yield from _after_tie(hop, result)
        return
    rivals = _rivals(hop)
    if not rivals:
        yield f"{name} is the only one{_flip(hop)}."
        return
    second = min(rivals, key=lambda row: row.cost)
    if hop.temperature > 0:
        yield from _random_win(hop, rank_name(second, ranked))
    elif hop.tied:
        names = [rank_name(ref, ranked) for ref in hop.tied if not is_rank(ref, winner)]
        yield f"tie with {first_names(names, 3)}: each is equally likely (1 in {len(hop.tied):,})."
        yield from _requests_of_tied(hop)
        yield from _after_tie(hop, result)
    elif hop.mode == "round-robin":
        yield f"it is {name}'s turn; {rank_name(second, ranked)} is next."
    elif hop.margin is not None:
        yield f"wins by {_margin(hop, hop.margin)} over {rank_name(second, ranked)}{_flip(hop)}."


def _rivals(hop: DecisionResult) -> list[CandidateRow]:
    """The candidates that the winner competed with: where devices count, those of its class."""
    others = [row for row in hop.candidates if not is_rank(row, hop.winner)]
    if hop.devices is UNSET:
        return others
    cpu = hop.devices.next == "cpu"
    return [row for row in others if (row.device == "cpu") is cpu]


def _unit(hop: DecisionResult) -> str:
    if hop.mode == "kv":
        return "blocks"
    return hop.terms[0].unit if hop.terms else ""


def _margin(hop: DecisionResult, margin: float) -> str:
    """``1.5 blocks``, ``1 request``."""
    number = blocks(margin) if hop.mode == "kv" else amount(margin)
    unit = _unit(hop)
    return f"{number} {unit.removesuffix('s') if number == '1' else unit}"


def _random_win(hop: DecisionResult, second: str) -> Iterator[str]:
    winner = winner_row(hop)
    drawn = percent(0.0 if winner is None else winner.probability, 1)
    yield f"drawn at random, probability {drawn} at temperature {hop.temperature:g}."
    if hop.margin is not None and hop.margin < 0:
        yield f"{second} is cheaper by {blocks(-hop.margin)} {_unit(hop)}."


def _requests_of_tied(hop: DecisionResult) -> Iterator[str]:
    """Why workers with different numbers of running requests cost the same in mode kv."""
    if hop.mode != "kv" or any(term.name == "active_requests" for term in hop.terms):
        return
    tied = [
        row.active_requests for row in hop.candidates if any(is_rank(row, ref) for ref in hop.tied)
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
    rows = [next(row for row in hop.candidates if is_rank(row, ref)) for ref in drawn]
    first, second = (f"{rank_name(row, ranked)} ({row.active_requests:,} active)" for row in rows)
    winner = next(row for row in rows if is_rank(row, hop.winner))
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


def _after_tie(hop: DecisionResult, result: RouteResult) -> Iterator[str]:
    """Where decode goes with the other prefill workers that could have won."""
    if hop is not result.prefill:
        return
    for other in result.decode_by_prefill[:4]:
        chosen = result.winner.prefill
        if chosen is not None and other.prefill.worker_id == chosen.worker_id:
            continue
        decode = other.decode
        if decode is None or decode.winner is None:
            yield f"With {other.prefill.worker}, decode would be refused."
        else:
            yield f"With {other.prefill.worker}, decode goes to {decode.winner.worker}."


def _preference(meter: PreferenceRow) -> str:
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


def _winner_domains(hop: DecisionResult) -> dict[str, str]:
    row = winner_row(hop)
    return {} if row is None else row.domains


def _together(places: list[dict[str, str]], result: RouteResult) -> str:
    domain = primary_domain(result)
    values = [place.get(domain) for place in places] if domain is not None else []
    if len(values) < 2 or None in values:
        return ""
    first, second = values[0], values[1]
    return f", both in {first}" if first == second else f", crosses {domain}: {first} to {second}"


def _freshness(judged: DecisionResult, final: DecisionResult) -> Iterator[str]:
    """The age of index and load. ``judged``: the first hop, which computes the prompt, so that
    cache overlap counts there."""
    if judged.freshness is None or final.freshness is None:
        yield "index age and load age: not recorded for past decisions"
        return
    load = final.freshness.load
    text = _index_text(judged, judged.freshness.index)
    if load.source == UNKNOWN_LOAD:
        yield f"{text}; load unknown"
    elif load.oldest_s is None:
        yield f"{text}; load counted by {load.source}, none reported"
    else:
        yield f"{text}; load {age(load.oldest_s)} old ({load.source})"


def _index_text(hop: DecisionResult, index: IndexFreshness) -> str:
    if not hop.overlap_modelled:
        return "cached blocks of this prompt unknown: routed by load only"
    if index.publishers == 0 and index.estimated:
        return "no KV events: caches estimated from the requests sent there"
    if index.publishers == 0:
        return "caches of these workers unknown: routed by load only"
    noun = "rank" if has_ranks(hop) else "worker"
    parts = [f"index current for {index.current:,} of {plural(index.publishers, noun)}"]
    if index.oldest_s is not None:
        parts.append(f"oldest {age(index.oldest_s)}")
    if index.gaps:
        parts.append(plural(index.gaps, "gap"))
    silent = len(hop.candidates) - index.publishers - index.estimated
    if silent > 0:
        parts.append(f"{silent:,} without KV events")
    if index.estimated:
        parts.append(f"{index.estimated:,} estimated")
    return ", ".join(parts)
