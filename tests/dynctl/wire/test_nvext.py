"""The nvext controls: every key read, every wrong one named."""

import pytest

from dynctl.base.decode_errors import RequestError
from dynctl.wire.nvext import (
    KNOWN_KEYS,
    NO_NVEXT,
    NvExt,
    apply_headers,
    parse_nvext,
    request_id_of,
    strip_for_engine,
)
from router_core import constraints

# What a Dynamo 1.6.1 frontend listed when it refused the key `bogus`.
DYNAMO_KEYS = (
    "greed_sampling, use_raw_prompt, annotations, backend_instance_id, token_data, "
    "max_thinking_tokens, cache_salt, extra_fields, metadata_upload, prefill_worker_id, "
    "decode_worker_id, dp_rank, prefill_dp_rank, agent_hints, request_timestamp_ms, "
    "routing_constraints, router"
)

EVERYTHING = {
    "greed_sampling": True,
    "use_raw_prompt": False,
    "annotations": ["query_instance_id:"],
    "backend_instance_id": 17655340255331378299,
    "token_data": [1, 2, 2**32 - 1],
    "max_thinking_tokens": 5,
    "cache_salt": "tenant-1",
    "extra_fields": ["worker_id", "timing", "novel"],
    "metadata_upload": {"any": ["thing"]},
    "prefill_worker_id": 0,
    "decode_worker_id": 2**64 - 1,
    "dp_rank": 1,
    "prefill_dp_rank": 0,
    "agent_hints": {
        "priority": -3,
        "strict_priority": 2,
        "osl": 100,
        "speculative_prefill": True,
        "latency_sensitivity": 0.5,
    },
    "request_timestamp_ms": 1795252157752.5,
    "routing_constraints": {
        "required_taints": ["dynamo.topology/zone=zone-a"],
        "preferred_taints": {"fast": 0.85, "slow": -1},
    },
    "router": {"ttft_target": 0.5, "itl_target": 0.02},
}


def refused(value):
    with pytest.raises(RequestError) as caught:
        parse_nvext(value)
    assert caught.value.status == 400
    return caught.value


def test_keys_are_those_of_dynamo():
    assert ", ".join(KNOWN_KEYS) == DYNAMO_KEYS
    assert set(EVERYTHING) == set(KNOWN_KEYS)


def test_every_key_is_read():
    nvext = parse_nvext(EVERYTHING)
    assert nvext.constraints == constraints(
        ["dynamo.topology/zone=zone-a"], {"fast": 0.85, "slow": -1.0}
    )
    assert nvext.agent_hints.priority == -3
    assert nvext.agent_hints.latency_sensitivity == 0.5
    assert nvext.router.itl_target == 0.02
    assert nvext.token_data == (1, 2, 2**32 - 1)
    assert nvext.backend_instance_id == 17655340255331378299
    assert nvext.dry_run
    assert nvext.wants("timing")
    assert not nvext.wants("tokens")
    plain = set(EVERYTHING) - {
        *("routing_constraints", "agent_hints", "router", "token_data"),
        *("annotations", "extra_fields"),
    }
    for key in plain:
        assert getattr(nvext, key) == EVERYTHING[key]


@pytest.mark.parametrize("nothing", [None, {}, dict.fromkeys(KNOWN_KEYS)])
def test_null_means_not_given(nothing):
    assert parse_nvext(nothing) == NO_NVEXT == NvExt()


@pytest.mark.parametrize(
    ("annotations", "dry"),
    [
        (["query_instance_id:"], True),
        (["other", "query_instance_id:x"], True),
        (["query_instance_id"], False),
        ([" query_instance_id:"], False),
        ([], False),
    ],
)
def test_dry_run_needs_the_colon(annotations, dry):
    assert parse_nvext({"annotations": annotations}).dry_run is dry


def test_unknown_keys_are_named_with_the_known_ones():
    error = refused({"dp_rank": 0, "bogus": 1})
    assert str(error) == f"nvext.bogus: unknown field, expected one of {DYNAMO_KEYS}"
    assert error.body() == {
        "error": {
            "message": str(error),
            "type": "invalid_request_error",
            "code": "unknown_field",
            "param": "nvext.bogus",
        }
    }
    assert (
        str(refused({"agent_hints": {"x": 1}})) == "nvext.agent_hints.x: unknown field, expected "
        "one of priority, strict_priority, osl, speculative_prefill, latency_sensitivity"
    )
    assert (
        str(refused({"router": {"x": 1}}))
        == "nvext.router.x: unknown field, expected one of ttft_target, itl_target"
    )
    assert (
        str(refused({"routing_constraints": {"required": []}})) == "nvext.routing_constraints."
        "required: unknown field, expected one of required_taints, preferred_taints"
    )
    assert len(str(refused({"x" * 10_000: 1}))) < 500


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "nvext: expected an object, got an array"),
        ("x", "nvext: expected an object, got 'x'"),
        (
            {"routing_constraints": {"required_taints": ["a", 3]}},
            "nvext.routing_constraints.required_taints[1]: expected a string, got 3",
        ),
        (
            {"routing_constraints": {"required_taints": "a"}},
            "nvext.routing_constraints.required_taints: expected an array, got 'a'",
        ),
        (
            {"routing_constraints": {"preferred_taints": ["a"]}},
            "nvext.routing_constraints.preferred_taints: expected an object, got an array",
        ),
        (
            {"routing_constraints": {"preferred_taints": {"a": "1"}}},
            "nvext.routing_constraints.preferred_taints['a']: expected a number, got '1'",
        ),
        (
            {"routing_constraints": {"preferred_taints": {"a": True}}},
            "nvext.routing_constraints.preferred_taints['a']: expected a number, got true",
        ),
        (
            {"routing_constraints": {"preferred_taints": {"a": float("nan")}}},
            "nvext.routing_constraints.preferred_taints['a']: expected a finite number, got nan",
        ),
        (
            {"routing_constraints": {"preferred_taints": {"a": float("-inf")}}},
            "nvext.routing_constraints.preferred_taints['a']: expected a finite number, got -inf",
        ),
        (
            {"routing_constraints": {"preferred_taints": {"a": 10**400}}},
            "nvext.routing_constraints.preferred_taints['a']: expected a finite number, "
            "got a huge integer",
        ),
        ({"routing_constraints": 1}, "nvext.routing_constraints: expected an object, got 1"),
        ({"prefill_worker_id": "7"}, "nvext.prefill_worker_id: expected an integer, got '7'"),
        ({"decode_worker_id": 1.0}, "nvext.decode_worker_id: expected an integer, got 1.0"),
        (
            {"backend_instance_id": -1},
            "nvext.backend_instance_id: expected an integer from 0 to 18446744073709551615, got -1",
        ),
        (
            {"backend_instance_id": 2**64},
            "nvext.backend_instance_id: expected an integer from 0 to 18446744073709551615, "
            "got 18446744073709551616",
        ),
        ({"dp_rank": True}, "nvext.dp_rank: expected an integer, got true"),
        (
            {"prefill_dp_rank": -1},
            "nvext.prefill_dp_rank: expected an integer from 0 to 4294967295, got -1",
        ),
        ({"agent_hints": {"osl": 1.5}}, "nvext.agent_hints.osl: expected an integer, got 1.5"),
        (
            {"agent_hints": {"speculative_prefill": 1}},
            "nvext.agent_hints.speculative_prefill: expected true or false, got 1",
        ),
        ({"cache_salt": 5}, "nvext.cache_salt: expected a string, got an integer"),
        (
            {"cache_salt": "x" * 1025},
            "nvext.cache_salt: expected at most 1024 characters, got 1025",
        ),
        ({"annotations": "query_instance_id:"}, "nvext.annotations: expected an array, got "
         "'query_instance_id:'"),
        ({"extra_fields": [None]}, "nvext.extra_fields[0]: expected a string, got null"),
        (
            {"extra_fields": ["x"] * 257},
            "nvext.extra_fields: expected at most 256 entries, got 257",
        ),
        ({"request_timestamp_ms": "now"}, "nvext.request_timestamp_ms: expected a number, "
         "got 'now'"),
        ({"router": {"ttft_target": []}}, "nvext.router.ttft_target: expected a number, "
         "got an array"),
        ({"greed_sampling": 0}, "nvext.greed_sampling: expected true or false, got 0"),
        ({"token_data": []}, "nvext.token_data: must not be empty"),
        ({"token_data": "hi"}, "nvext.token_data: expected an array, got a string"),
        (
            {"token_data": [1, "secret"]},
            "nvext.token_data[1]: expected a token id (an integer), got a string",
        ),
        (
            {"token_data": [2**32]},
            "nvext.token_data[0]: expected a token id from 0 to 4294967295",
        ),
    ],
)  # fmt: skip
def test_wrong_value_is_named(value, message):
    assert str(refused(value)) == message


def test_taints_are_bounded():
    error = refused({"routing_constraints": {"preferred_taints": {str(i): 1 for i in range(257)}}})
    assert "at most 256 entries, got 257" in str(error)


def test_headers_pin_workers_and_win():
    nvext = parse_nvext({"decode_worker_id": 1, "prefill_worker_id": 2, "dp_rank": 3})
    pinned = apply_headers(
        nvext, {"X-Worker-Instance-Id": "17655340255331378299", "x-prefill-instance-id": " 9 "}
    )
    assert pinned.decode_worker_id == pinned.backend_instance_id == 17655340255331378299
    assert (pinned.prefill_worker_id, pinned.dp_rank) == (9, 3)
    assert apply_headers(nvext, {"accept": "*/*"}) is nvext


def test_the_prefixed_headers_pin_too_and_count_first():
    pinned = apply_headers(
        NO_NVEXT,
        {"x-dynamo-worker-instance-id": "1", "x-worker-instance-id": "2",
         "X-Dynamo-Prefill-Instance-Id": "3"},
    )  # fmt: skip
    assert (pinned.decode_worker_id, pinned.prefill_worker_id) == (1, 3)


@pytest.mark.parametrize("name", ["x-worker-instance-id", "X-Dynamo-Prefill-Instance-Id"])
@pytest.mark.parametrize("value", ["", "w1", "-1", "1.5", "0x10", str(2**64), "٣", "9" * 5000])
def test_header_without_a_worker_id(name, value):
    with pytest.raises(RequestError) as caught:
        apply_headers(NO_NVEXT, {name: value})
    assert (caught.value.status, caught.value.field) == (400, name.lower())


def test_request_id():
    assert request_id_of({"X-Request-ID": "abc-1"}) == "abc-1"
    assert request_id_of({}) is None
    assert request_id_of({"x-request-id": ""}) is None
    for bad in ("x" * 257, "a\nb", "caf\u00e9"):
        with pytest.raises(RequestError) as caught:
            request_id_of({"x-request-id": bad})
        assert caught.value.field == "x-request-id"


def test_engine_sees_everything_but_nvext():
    body = {"model": "m", "nvext": EVERYTHING, "novel": {"nvext": 1}}
    assert strip_for_engine(body) == {"model": "m", "novel": {"nvext": 1}}
    assert "nvext" in body
