"""SECURITY.md is true line by line, and each attack of docs/security.md has its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynctl.serving.http.bodies import PEER_SHARE
from dynctl.serving.http.json_responses import CONTROL_BODY_BYTES
from dynctl.serving.http.keys import ApiKeys
from dynctl.serving.routing.config import FrontendConfig, HealthConfig, Limits

TESTS = Path(__file__).parent
ROOT = TESTS.parent
STATEMENTS = ROOT / "SECURITY.md"
ATTACKS = ROOT / "docs" / "security.md"

#: The beginning of each statement of SECURITY.md -> the tests that hold it.
HELD_BY = {
    "the user who starts dynctl": [
        "dynctl/cli/test_serve.py::test_defaults_are_loopback_and_quiet"
    ],
    "operators: clients with the admin token": [
        "dynctl/serving/test_access.py::test_with_a_token_and_keys",
        "test_security.py::test_the_numbers_are_those_of_the_code",
    ],
    "clients of inference": [
        "dynctl/serving/test_keys.py::test_inference_needs_a_key",
        "test_security.py::test_the_numbers_are_those_of_the_code",
    ],
    "engines": [
        "dynctl/serving/test_judged_answers.py::test_an_endless_stream_is_ended_at_its_bound",
        "dynctl/serving/test_engine_http.py::test_more_than_the_limit",
    ],
    "what workers register": [
        "dynctl/sources/test_rejected_cards.py",
        "router_core/test_topology.py::test_canonical_taints_are_rebuilt_and_forged_ones_dropped",
    ],
    "chat templates of models": [
        "dynctl/tokenization/test_template_attacks.py::test_access_to_python_is_refused",
        "dynctl/tokenization/test_template_attacks.py::test_a_bomb_is_stopped_by_count",
    ],
    "tokenizer files": [
        "dynctl/adapters/test_model_files.py::test_only_the_workers_own_host_is_asked",
        "dynctl/adapters/test_model_files.py::test_redirects_are_not_followed",
        "dynctl/adapters/test_model_files.py::test_other_bytes_than_stated_are_not_kept",
        "dynctl/adapters/test_model_files.py::test_an_endless_answer_ends_at_the_limit",
    ],
    "manifests, views": [
        "dynctl/base/test_yaml_reader.py::test_bounds",
        "dynctl/cli/test_hostile_documents.py::test_files",
    ],
    "answers of frontends": [
        "dynctl/cli/test_hostile_documents.py::test_answers",
        "dynctl/cli/test_escape_sequences.py::test_errors",
    ],
    "`serve` listens on 127.0.0.1": [
        "dynctl/cli/test_serve.py::test_defaults_are_loopback_and_quiet",
        "dynctl/serving/test_access.py::test_the_table_has_every_endpoint",
    ],
    "With `--admin-token`": [
        "dynctl/serving/test_auth.py::test_wrong_credentials",
        "dynctl/serving/test_access.py::test_with_a_token_and_keys",
    ],
    "Without a token they are": [
        "dynctl/serving/test_access.py::test_without_a_token_others_get_inference_only",
        "dynctl/serving/test_access.py::test_from_another_address_than_loopback",
    ],
    "A request with headers of a proxy": [
        "dynctl/serving/test_access.py::test_without_a_token_others_get_inference_only"
    ],
    "`--unix-socket PATH`": [
        "dynctl/serving/test_listeners.py::test_the_unix_socket_is_for_the_owner_and_counts_as_operator",
        "dynctl/serving/test_listeners.py::test_a_left_socket_is_replaced_and_a_used_one_is_not",
    ],
    "With `--api-key`": [
        "dynctl/serving/test_keys.py::test_inference_needs_a_key",
        "dynctl/serving/test_keys.py::test_a_key_is_not_the_operators_token",
    ],
    "A key may start": [
        "dynctl/serving/test_keys.py::test_never_more_than_the_rate",
        "dynctl/serving/test_keys.py::test_concurrency",
        "dynctl/serving/test_keys.py::test_the_file_is_loaded_again_and_an_error_keeps_the_old_keys",
    ],
    "Fields and headers that direct": [
        "dynctl/serving/test_tenants.py::test_no_api_passes_a_direction_of_a_client_on",
        "dynctl/serving/test_tenants.py::test_headers_that_direct_engines_do_not_pass",
        "dynctl/serving/test_epp.py::test_no_engine_behind_a_gateway_is_directed_by_a_client",
    ],
    "Keys share cached prefixes": [
        "dynctl/serving/test_tenants.py::test_an_isolated_key_learns_nothing_of_what_others_sent",
        "dynctl/serving/test_tenants.py::test_without_details_answers_show_nothing_of_the_cache",
        "vllm/test_reuse.py::test_isolated_keys_share_nothing",
    ],
    "`/live`, `/ready`": [
        "dynctl/serving/test_access.py::test_health_shows_engines_to_operators_only",
        "dynctl/serving/test_access.py::test_with_a_token_and_keys",
    ],
    "Errors name no worker": [
        "dynctl/serving/test_access.py::test_refusals_name_no_worker_or_zone_to_clients",
        "dynctl/serving/test_access.py::test_failures_of_engines_name_no_engine_to_clients",
    ],
    "`--tls-cert` and": [
        "dynctl/serving/test_listeners.py::test_tls_and_a_new_certificate_without_restart",
        "dynctl/serving/test_listeners.py::test_plain_http_and_old_tls_are_refused",
    ],
    "The clients' `Authorization`": [
        "dynctl/serving/test_controls.py::test_engines_never_see_nvext_nor_our_token",
        "dynctl/serving/test_keys.py::test_engines_get_their_key_and_never_the_clients",
    ],
    "`--engine-api-key` is sent": [
        "dynctl/serving/test_keys.py::test_engines_get_their_key_and_never_the_clients",
        "dynctl/serving/test_keys.py::test_workers_of_the_api_get_no_key_and_name_no_variable",
    ],
    "A frontend with `--router` sends": [
        "dynctl/serving/test_remote.py::test_only_hashes_travel",
        "dynctl/serving/test_remote.py::test_keys_of_engines_and_the_token_stay_apart",
        "dynctl/serving/test_remote.py::test_a_wrong_token_is_named",
    ],
    "A frontend process has the rights": [
        "dynctl/serving/test_access.py::test_the_table_has_every_endpoint",
        "dynctl/serving/test_remote.py::test_frontends_share_a_port",
    ],
    "With `--router-replica-sync`": [
        "dynctl/serving/test_replicas.py::test_a_router_cannot_end_the_bookings_of_another",
        "dynctl/serving/test_replicas.py::test_the_events_are_those_of_dynamo",
        "dynctl/cli/test_serve.py::test_replicas",
    ],
    "`--index-peer` gets": [
        "dynctl/serving/test_index_exchange.py::test_the_index_needs_the_token_and_the_second_peer_is_tried",
        "dynctl/serving/test_index_exchange.py::test_an_engine_that_restarted_since_is_read_from_its_start",
    ],
    "`DYN_DISABLE_FRONTEND_ADMIN_API": [
        "dynctl/serving/test_admin.py::test_the_admin_api_can_be_switched_off"
    ],
    "The simulated engine": [],  # a warning, not a promise
    "dynctl only reads from": [
        "contract/test_discovery.py::test_observing_writes_nothing",
        "kube/test_verify_command.py::test_verify_changes_nothing",
    ],
    "`serve observe` writes nothing": [
        "dynctl/serving/test_shadow.py::test_what_is_no_read_is_refused_by_name",
        "dynamo/test_observe.py::test_both_hops_of_two_zones_and_faults_of_etcd_and_frontend",
    ],
    "`serve frontend --router-replica-sync` on": [
        "dynctl/serving/test_fleet_sync.py::test_bookings_are_published_for_their_pool",
        "dynctl/serving/test_fleet_sync.py::test_unreadable_messages_are_counted",
        "contract/test_durable_events.py::test_acknowledged_messages_are_removed_and_a_snapshot_stays",
    ],
    "`serve epp` listens": [
        "dynctl/serving/test_epp.py::test_tls_with_a_certificate_of_its_own",
        "dynctl/serving/test_epp.py::test_clients_cannot_choose_a_worker_by_the_pickers_headers",
    ],
    "`serve attach` registers": [
        "contract/test_registration.py::test_entries_are_listed_until_the_lease_is_closed",
        "dynctl/serving/test_attach.py::test_an_engine_is_registered_and_answers_with_its_own_tokens",
        "dynctl/adapters/test_request_server.py::test_unknown_endpoints_and_ids_are_refused",
    ],
    "Workers answer over": [],  # a warning about Dynamo's planes
    "Tokens and keys come from": [
        "dynctl/settings/test_contexts_precedence.py::test_a_token_goes_to_the_servers_of_its_context_only",
        "dynctl/settings/test_contexts_precedence.py::test_tokens_come_from_variable_or_file_and_are_never_shown",
        "dynctl/settings/test_contexts_keys.py::test_a_secret_is_refused_and_not_repeated",
    ],
    "Of the keys in": ["test_security.py::test_no_key_is_kept_as_text"],
    "Prompts are not logged": [
        "dynctl/serving/test_process.py::test_sigterm_lets_running_streams_end_and_exits_0",
        "dynctl/serving/test_controls.py::test_salts_keep_prefixes_apart",
    ],
    "`dynctl bundle` masks": [
        "dynctl/cli/test_bundle.py::test_no_planted_secret_and_no_prompt_is_in_it"
    ],
    "Nothing that dynctl prints": [
        "dynctl/cli/test_escape_sequences.py::test_data",
        "dynctl/cli/test_escape_sequences.py::test_there_is_one_writer_of_each_stream",
    ],
}


def statements() -> list[str]:
    """The rows of the table and the items of the lists, without their marks."""
    found = []
    for line in STATEMENTS.read_text(encoding="utf-8").splitlines():
        item = re.match(r"(?:\| |- )(.+)", line)
        if item and not item[1].startswith(("|", "---")) and " trusted | bounded" not in line:
            found.append(item[1])
    return found


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    path = TESTS / file
    return path.is_file() and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("statement", statements(), ids=lambda text: text[:40])
def test_each_statement_has_its_test(statement: str) -> None:
    begun = [start for start in HELD_BY if statement.startswith(start)]
    assert len(begun) == 1, f"SECURITY.md: name the tests of {statement[:60]!r} in HELD_BY"
    missing = [test for test in HELD_BY[begun[0]] if not exists(test)]
    assert missing == []


def test_no_test_is_named_for_a_statement_that_is_gone() -> None:
    gone = [start for start in HELD_BY if not any(one.startswith(start) for one in statements())]
    assert gone == []


def rows() -> list[tuple[str, str, list[str]]]:
    found = []
    for line in ATTACKS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "attack":
            found.append((cells[0], cells[1], re.findall(r"`([^`]+\.py::\w+)`", cells[2])))
    return found


@pytest.mark.parametrize(("attack", "effect", "named"), rows(), ids=lambda value: str(value)[:50])
def test_each_attack_has_its_test(attack: str, effect: str, named: list[str]) -> None:
    assert attack
    assert effect
    assert named, f"docs/security.md: no test for {attack!r}"
    for test in named:
        assert exists(test) or exists(f"dynctl/{test}"), test


#: What was found to work once; each must stay in the list.
KNOWN = [
    "text/plain", "Host of another name", "Content-Length: 600000000", "gzip bomb", "half a header",
    "256 descriptors", "1e308", "30,000 deep", "escape sequences", "to learn workers",
    "collects the clients' credentials", "hangs but answers", "HTML", "without `[DONE]`",
    "ZMQ message", "damaged gzip", "worker of the attacker's own",
]  # fmt: skip


def test_the_known_attacks_are_listed() -> None:
    text = " ".join(attack for attack, _, _ in rows())
    assert [name for name in KNOWN if name not in text] == []


def test_the_numbers_are_those_of_the_code() -> None:
    limits, text = Limits(), STATEMENTS.read_text(encoding="utf-8")
    mib = 1 << 20
    for number in (
        f"body {limits.body_bytes // mib} MiB",
        f"{limits.all_bodies_bytes // mib} MiB together",
        f"{limits.body_s:g} s to arrive",
        f"headers {limits.header_bytes // 1024} KiB, {limits.header_s:g} s",
        f"{limits.unread_s:g} s without reading an answer",
        f"{limits.in_flight:,} requests in flight",
        f"{limits.workers:,} workers",
        f"body {CONTROL_BODY_BYTES // mib} MiB, of dry runs and selections",
        f"{limits.unary_answer_bytes // mib} MiB an answer",
        f"{limits.stream_answer_bytes // (1 << 30)} GiB a stream",
        f"{limits.idle_s:g} s between bytes",
        f"{limits.attempts} attempts a request",
    ):
        assert number in text, number
    assert PEER_SHARE == 0.75
    assert FrontendConfig().system_host == FrontendConfig().host == "127.0.0.1"
    assert HealthConfig().path == "/health"


def test_no_key_is_kept_as_text(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-secret")
    keys = ApiKeys((), file, clock=lambda: 0.0)
    keys.load()
    found = keys.find(b"sk-secret")
    assert found is not None
    assert b"sk-secret" not in found.digest + found.secret
    assert "sk-secret" not in repr(vars(keys))
