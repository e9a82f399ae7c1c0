"""Every check can pass, can fail, and is skipped (never passed) where it could not look."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynctl.documents.fleet_load import Condition
from dynctl.documents.workers import StreamState
from dynctl.findings.catalogue import all_codes, catalogue, conditions
from dynctl.findings.report import FLEET, CheckResult, Report, State
from dynctl.findings.suppression import Suppressions
from dynctl.health.checks.run import SECTIONS, judge
from dynctl.health.facts import NATS, CheckFacts, FrontendFacts, PlaneFacts, Unread
from router_core import ModelRuntimeConfig
from tests.dynctl.health import check_facts as made
from tests.dynctl.health.check_facts import BROKEN, FIRST, SECOND, Broken, healthy, ours

ALL = [check.code for name, checks in SECTIONS if name != FLEET for check in checks]


OF_FLEET = [check.code for name, checks in SECTIONS if name == FLEET for check in checks]


def result(report: Report, code: str) -> CheckResult:
    return next(check for check in report.checks if check.code == code)


def states(report: Report) -> dict[str, State]:
    return {check.code: check.state for check in report.checks}


def test_a_healthy_deployment_passes_every_check():
    report = judge(healthy())
    assert states(report) == dict.fromkeys(ALL, State.PASS)
    assert report.summary.passed == len(ALL)
    assert report.passes("warn")


@pytest.mark.parametrize("broken", BROKEN, ids=lambda one: f"{one.code} {one.name}".strip())
def test_each_broken_deployment_fails_its_check(broken: Broken):
    found = result(judge(broken.change(healthy())), broken.code)
    assert found.state == catalogue()[broken.code].level
    subjects = [finding.subject for finding in found.findings]
    assert any(subject.startswith(broken.subject) for subject in subjects), subjects
    for finding in found.findings:
        assert "{" not in finding.value + finding.expected + finding.fix
        assert finding.value.strip()
        assert finding.fix.strip()


def test_every_check_can_be_broken():
    assert {broken.code for broken in BROKEN} == set(ALL)


def test_every_code_of_the_file_has_its_check():
    current = {code for code, entry in catalogue().items() if not entry.retired}
    assert {code for code in current if code.startswith("DYR")} == set(ALL)
    assert len(ALL) == len(set(ALL))
    assert ["DYT0901", "DYT0902", *conditions()] == OF_FLEET
    for section, checks in SECTIONS:
        if section != FLEET:
            assert {catalogue()[check.code].section for check in checks} == {section}


# -- what is not there -----------------------------------------------------------------------------


def test_without_frontends_their_sections_are_skipped_with_the_option():
    report = judge(replace(healthy(), frontends=()))
    for check in report.checks:
        if check.section in ("frontends", FLEET, "versions"):
            assert check.state is State.SKIP
            assert "--frontend" in check.message
            assert not check.unread
        else:
            assert check.state is State.PASS
    assert report.passes("warn")


def of_two_graphs() -> CheckFacts:
    """The two frontends of the healthy facts in a graph each; the second one has no workers."""
    facts = healthy()
    first, second = facts.frontends
    apart = replace(
        second,
        ready={"tiny": made.readiness(prefill=0, decode=0)},
        models=("small",),
        version="1.5.1",
        thresholds={},
    )
    frontends = (
        replace(first, graph="one.prod", space="dynamo"),
        replace(apart, graph="two.prod", space="other"),
    )
    return replace(facts, frontends=frontends)


def test_frontends_of_two_graphs_are_no_replicas():
    report = judge(of_two_graphs())
    assert not [one.code for one in report.checks if one.findings]
    assert result(report, "DYR0407").state is State.PASS
    for code in ("DYR0408", "DYR0412", "DYR0503"):
        assert result(report, code).state is State.SKIP
    facts = of_two_graphs()
    joined = replace(facts, frontends=tuple(replace(one, graph="") for one in facts.frontends))
    assert {"DYR0412", "DYR0503"} <= {one.code for one in judge(joined).checks if one.findings}


@pytest.mark.parametrize(
    ("spaces", "state"),
    [
        (("dynamo", "dynamo"), State.FAIL),
        (("dynamo", ""), State.FAIL),
        # The longer name is the namespace of another graph, not of a generation.
        (("dynamo", "dyn"), State.PASS),
        (("other", "third"), State.SKIP),
    ],
)
def test_a_frontend_needs_the_workers_of_its_own_namespace(
    spaces: tuple[str, str], state: State
) -> None:
    facts = of_two_graphs()
    pairs = zip(facts.frontends, spaces, strict=True)
    report = judge(replace(facts, frontends=tuple(replace(one, space=s) for one, s in pairs)))
    assert result(report, "DYR0407").state is state


def test_decode_workers_of_another_namespace_serve_no_prefill():
    facts = healthy()
    assert facts.planes is not None
    deployment = facts.planes.deployment
    moved = tuple(
        replace(one, card=replace(one.card, endpoint=one.card.endpoint._replace(namespace="new")))
        if one.worker.role == "decode" and one.worker.domains["zone"] == "zone-a"
        else one
        for one in deployment.workers
    )
    planes = replace(facts.planes, deployment=replace(deployment, workers=moved))
    found = result(judge(replace(facts, planes=planes)), "DYR0210")
    assert [one.subject for one in found.findings] == ["tiny in namespace dynamo"]


def test_without_planes_only_frontends_are_judged():
    report = judge(replace(healthy(), planes=None))
    for check in report.checks:
        if check.section in ("planes", "workers", "events"):
            assert check.state is State.SKIP
            assert "--discovery" in check.message
    assert result(report, "DYR0406").state is State.PASS
    assert result(report, "DYR0407").state is State.SKIP


def test_an_unreachable_discovery_passes_no_check_and_counts_as_unread():
    facts = CheckFacts(PlaneFacts("etcd x:2379", "dynamo", Unread("refused")), ())
    report = judge(facts)
    assert State.PASS not in states(report).values()
    assert result(report, "DYR0101").state is State.FAIL
    assert result(report, "DYR0302").unread
    assert report.summary.unread > 20
    assert report.sources == ["etcd x:2379"]


def test_checks_of_an_unreachable_frontend_do_not_pass():
    facts = replace(
        healthy(), frontends=(made.frontend(FIRST), made.frontend(SECOND, kind=Unread("refused")))
    )
    report = judge(facts)
    for code in ("DYR0403", "DYR0404", "DYR0406", "DYR0407", "DYR0408", "DYR0410", "DYR0501"):
        found = result(report, code)
        assert (found.state, found.unread) == (State.SKIP, True), code
        assert SECOND in found.message


def test_a_finding_is_reported_beside_unread_facts():
    other = made.frontend("http://frontend-2:8000", version="2.0.0")
    frontends = (made.frontend(FIRST, kind=Unread("refused")), other)
    found = result(judge(replace(healthy(), frontends=frontends)), "DYR0501")
    assert found.state is State.WARN
    assert FIRST in found.message


@pytest.mark.parametrize(
    ("field", "code"),
    [
        ("metrics", "DYR0403"),
        ("metrics", "DYR0405"),
        ("metrics", "DYR0411"),
        ("thresholds", "DYR0408"),
        ("thresholds", "DYR0410"),
        ("models", "DYR0412"),
        ("version", "DYR0501"),
        ("version", "DYR0502"),
    ],
)
def test_a_missing_answer_of_a_frontend_is_skipped(field: str, code: str):
    unread = made.frontend(SECOND, **{field: Unread("it answered 500")})
    facts = replace(healthy(), frontends=(made.frontend(FIRST), unread))
    found = result(judge(facts), code)
    assert (found.state, found.unread) == (State.SKIP, True)
    assert "it answered 500" in found.message


@pytest.mark.parametrize("code", ["DYR0305", "DYR0306", "DYR0307", "DYR0308", "DYR0309"])
def test_a_disconnected_worker_is_skipped_and_its_failure_reported(code: str):
    whole = made.planes()
    ranks = (replace(whole.ranks[0], state=StreamState()), whole.ranks[1])
    report = judge(replace(healthy(), planes=replace(whole, ranks=ranks)))
    found = result(report, code)
    assert (found.state, found.unread) == (State.SKIP, True)
    assert whole.ranks[0].worker in found.message
    assert result(report, "DYR0302").state is State.FAIL


def test_a_lost_nats_server_is_one_finding():
    whole = made.planes()
    why = "cannot reach NATS at nats://127.0.0.1:1: connection refused"
    lost = replace(whole.ranks[0], channel=NATS, state=StreamState(), disconnected=why)
    for ranks in ((lost, replace(lost, worker="prefill/other")), (lost, whole.ranks[1])):
        report = judge(replace(healthy(), planes=replace(whole, ranks=ranks)))
        assert [code for code, state in states(report).items() if state is State.FAIL] == [
            "DYR0103"
        ]
        (finding,) = result(report, "DYR0103").findings
        assert finding.subject == "NATS"
        assert finding.value.endswith(f"channels connect: {why}")
        for code in ("DYR0302", "DYR0305", "DYR0306", "DYR0307", "DYR0308", "DYR0309"):
            found = result(report, code)
            assert (found.state, found.unread) == (State.SKIP, True), code
            assert "NATS is not reachable (DYR0103)" in found.message, code
            assert "NATS at" not in found.message, code


def test_a_worker_that_nats_does_not_connect_is_its_own_finding():
    whole = made.planes()
    ranks = tuple(replace(rank, channel=NATS) for rank in whole.ranks)
    ranks = (replace(ranks[0], state=StreamState()), *ranks[1:])
    report = judge(replace(healthy(), planes=replace(whole, ranks=ranks)))
    assert result(report, "DYR0103").state is State.PASS
    assert [one.subject for one in result(report, "DYR0302").findings] == [ranks[0].name]


def test_an_idle_fleet_cannot_show_that_events_flow():
    whole = made.planes()
    idle = StreamState(connected=True, last_seq=7)
    ranks = tuple(replace(rank, state=idle) for rank in whole.ranks)
    found = result(judge(replace(healthy(), planes=replace(whole, ranks=ranks))), "DYR0306")
    assert (found.state, found.unread) == (State.SKIP, False)
    assert "send a request" in found.message


def test_block_hashes_are_not_compared_without_a_shared_block():
    facts = replace(healthy(), planes=made.planes(comparable=False))
    assert result(judge(facts), "DYR0309").state is State.SKIP


def test_replica_sync_is_not_guessed():
    entries = made.captured()
    facts = replace(healthy(), planes=made.planes(entries))
    found = result(judge(facts), "DYR0409")
    assert (found.state, found.unread) == (State.SKIP, True)
    heard = replace(healthy(), planes=made.planes(entries, replica_sync_events=3))
    assert result(judge(heard), "DYR0409").state is State.PASS
    one = replace(facts, frontends=facts.frontends[:1])
    assert not result(judge(one), "DYR0409").unread


def test_without_thresholds_their_effect_is_skipped():
    off = {"tiny": dict.fromkeys((made.DECODE_BLOCKS, made.PREFILL_TOKENS))}
    frontends = (made.frontend(FIRST, thresholds=off), made.frontend(SECOND, thresholds=off))
    found = result(judge(replace(healthy(), frontends=frontends)), "DYR0410")
    assert found.state is State.SKIP
    assert "never" in found.message or "ever busy" in found.message


# -- the verdict -----------------------------------------------------------------------------------


def test_a_warning_fails_only_with_fail_on_warn():
    warned = next(broken for broken in BROKEN if broken.code == "DYR0502")
    report = judge(warned.change(healthy()))
    assert report.passes("fail")
    assert report.passes("skip")
    assert not report.passes("warn")


def test_unread_facts_are_a_warning():
    entries = made.captured()
    report = judge(replace(healthy(), planes=made.planes(entries)))
    assert report.summary.warnings == report.summary.failed == 0
    assert report.summary.unread == 1
    assert report.passes("fail")
    assert not report.passes("skip")
    assert not report.passes("warn")


def test_a_suppressed_code_is_not_checked():
    broken = next(broken for broken in BROKEN if broken.code == "DYR0403")
    facts = broken.change(healthy())
    assert not judge(facts).passes("fail")
    report = judge(facts, Suppressions(frozenset({"DYR0403"})))
    assert result(report, "DYR0403").message == "suppressed"
    assert report.passes("fail")


def test_a_closed_way_back_is_reported_once():
    broken = next(broken for broken in BROKEN if broken.code == "DYR0104")
    found = result(judge(broken.change(healthy())), "DYR0303")
    assert (found.state, found.unread) == (State.SKIP, True)
    assert "DYR0104" in found.message


# -- a fleet of ours -------------------------------------------------------------------------------

DEAD = (
    Condition("WORKER_UNREACHABLE", "a", "10.0.0.7:8001 refused the connection", 1.0, 2.0),
    Condition("WORKER_UNREACHABLE", "b", "10.0.0.8:8001 refused the connection", 1.0, 2.0),
    Condition("DYT0902", "zone=a", "one decode worker takes all that is prefilled here", 1.0, 2.0),
)


def test_a_healthy_fleet_passes_every_condition():
    report = judge(CheckFacts(frontends=(ours(),)))
    assert {states(report)[code] for code in OF_FLEET} == {State.PASS}


def test_every_condition_has_its_check_with_message_level_and_fix():
    for code in OF_FLEET:
        report = judge(CheckFacts(frontends=(ours(Condition(code, "a", "seen", 1.0, 2.0)),)))
        (check,) = (one for one in report.checks if one.findings)
        assert (check.code, check.section, check.state) == (code, FLEET, all_codes()[code].level)
        (finding,) = check.findings
        assert (finding.subject, finding.value) == ("a", "seen")
        assert "{" not in finding.expected + finding.fix
        assert finding.expected.strip()
        assert finding.fix.strip()


@pytest.mark.parametrize("code", ["DYT0901", "DYT0902"])
def test_a_fleet_without_a_required_domain_has_none_that_passes(code: str):
    without = replace(ours(), requires_domain=False)
    assert result(judge(CheckFacts(frontends=(without,))), code).state is State.SKIP
    required = replace(ours(url=SECOND), requires_domain=True)
    assert result(judge(CheckFacts(frontends=(without, required))), code).state is State.PASS
    found = replace(ours(Condition(code, "zone=a", "seen", 1.0, 2.0)), requires_domain=False)
    assert result(judge(CheckFacts(frontends=(found,))), code).findings


@pytest.mark.parametrize("code", ["NO_TOKENIZER", "TOKENIZER_DIFFERS"])
def test_a_frontend_that_finds_no_cached_block_does_not_pass_as_routing_by_cache(code: str):
    report = judge(CheckFacts(frontends=(ours(Condition(code, "demo", "seen", 1.0, 2.0)),)))
    kv_mode = result(report, "DYR0403")
    assert (kv_mode.state, kv_mode.unread) == (State.SKIP, False)
    assert code in kv_mode.message
    assert "demo" in kv_mode.message


def test_conditions_of_replicas_are_reported_once():
    frontends = (ours(*DEAD), ours(*DEAD, url=SECOND))
    found = result(judge(CheckFacts(frontends=frontends)), "WORKER_UNREACHABLE")
    assert [(one.subject, one.value) for one in found.findings] == [
        (one.subject, one.message) for one in DEAD[:2]
    ]


@pytest.mark.parametrize(
    "second",
    [
        FrontendFacts(SECOND, Unread("refused")),
        FrontendFacts(SECOND, "dynctl", conditions=Unread("needs a token", "set it\nor not")),
        ours(Condition("NEW_CODE", "a", "of a later version", 1.0, 2.0), url=SECOND),
    ],
    ids=["frontend", "evaluation", "unknown code"],
)
def test_without_every_evaluation_no_condition_passes(second: FrontendFacts):
    report = judge(CheckFacts(frontends=(ours(*DEAD), second)))
    found = {code: result(report, code) for code in OF_FLEET}
    assert found["WORKER_UNREACHABLE"].state is State.FAIL
    assert found["DYT0902"].state is State.WARN
    others = [check for check in found.values() if not check.findings]
    assert {(check.state, check.unread) for check in others} == {(State.SKIP, True)}
    assert all(SECOND in check.message for check in others)


def test_an_evaluation_that_was_not_read_shows_what_to_try():
    for why in (f"{SECOND}/v1/fleet needs a token", "needs a token"):
        facts = CheckFacts(
            frontends=(FrontendFacts(SECOND, "dynctl", conditions=Unread(why, "set it\nor not")),)
        )
        message = result(judge(facts), "WORKER_UNREACHABLE").message
        assert message.count("/v1/fleet") == 1
        assert message.endswith("needs a token; set it")


def test_advice_of_several_lines_is_one_line_of_a_report():
    """A document has no line breaks: they would show as characters of a name."""
    facts = CheckFacts(
        frontends=(FrontendFacts(SECOND, Unread("refused", "up?\nset it\nname one")),)
    )
    [wrong] = result(judge(facts), "DYR0401").findings
    assert wrong.fix == "up? set it; name one"


def test_conditions_can_be_suppressed():
    facts = CheckFacts(frontends=(ours(*DEAD),))
    suppressed = Suppressions.parse(["worker_unreachable", "DYT0902=zone=*"], all_codes())
    assert judge(facts, suppressed).passes("warn")


# -- nothing to judge ------------------------------------------------------------------------------


def bare() -> CheckFacts:
    """Two replicas and one worker of which nothing is known but that it is there."""
    facts = healthy()
    assert facts.planes is not None
    kept = facts.planes.deployment.workers[0]
    card = replace(kept.card, router_config=None, needs=())
    worker = replace(kept.worker, runtime_config=ModelRuntimeConfig())
    deployment = replace(
        facts.planes.deployment, workers=(replace(kept, card=card, worker=worker),)
    )
    ranks = tuple(replace(rank, state=StreamState(connected=True)) for rank in facts.planes.ranks)
    frontends = tuple(replace(one, models=(), thresholds={}, ready={}) for one in facts.frontends)
    planes = replace(facts.planes, deployment=deployment, ranks=ranks)
    return replace(facts, planes=planes, frontends=frontends)


@pytest.mark.parametrize(
    "code",
    ["DYR0208", "DYR0209", "DYR0211", "DYR0305", "DYR0308", "DYR0407", "DYR0408", "DYR0412"],
)
def test_a_check_that_judged_nothing_does_not_pass(code: str):
    found = result(judge(bare()), code)
    assert (found.state, found.findings) == (State.SKIP, [])
    assert found.message
