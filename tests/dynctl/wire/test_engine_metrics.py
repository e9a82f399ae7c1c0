"""Queue length and KV cache usage of vLLM and SGLang, from the lines that they export."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.wire.engine_kinds.table import METRIC_NAMES
from dynctl.wire.engine_metrics import MAX_BYTES, EngineGauges, read_engine_metrics

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
"""
SGLANG = b"""\
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 7.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
"""


def test_vllm_by_rank():
    found = read_engine_metrics(VLLM, METRIC_NAMES)
    assert found == {
        0: EngineGauges(2, 0.25, 1000, 16, labelled=True),
        1: EngineGauges(0, 0.0, None, labelled=True),
    }
    assert (found[0].used_blocks(None), found[0].used_blocks(400)) == (250, 100)
    assert found[1].used_blocks(None) is None
    assert found[1].used_blocks(800) == 0


def test_the_cache_name_of_an_older_vllm():
    assert read_engine_metrics(b'vllm:gpu_cache_usage_perc{model_name="m"} 0.1', METRIC_NAMES) == {
        0: EngineGauges(kv_usage=0.1)
    }


def test_sglang():
    found = read_engine_metrics(SGLANG, METRIC_NAMES)
    assert found == {0: EngineGauges(7, 0.5)}
    assert found[0].used_blocks(64) == 32


def test_the_queue_of_one_priority_is_not_that_of_the_engine():
    lines = b"""\
sglang:num_queue_reqs{priority="",tp_rank="0"} 7.0
sglang:num_queue_reqs{priority="-1",tp_rank="0"} 5.0
sglang:num_queue_reqs{priority="10",tp_rank="0"} 2.0
"""
    assert read_engine_metrics(lines, METRIC_NAMES) == {0: EngineGauges(waiting=7)}


@pytest.mark.parametrize(
    "line",
    [
        b"", b"vllm:num_requests_waiting", b"vllm:num_requests_waiting{", b"\xff\xfe",
        b'vllm:num_requests_waiting{engine="0"} many', b'vllm:num_requests_waiting{engine="0"}',
        b"vllm:num_requests_waiting -1", b"vllm:num_requests_waiting 1.5",
        b"vllm:num_requests_waiting nan", b"vllm:kv_cache_usage_perc 7",
        b"# vllm:num_requests_waiting 3", b"x vllm:num_requests_waiting 3",
        b"vllm:num_requests_waiting_total 3", b'vllm:num_requests_waiting{engine="99999"} 3',
        b'vllm:cache_config_info{num_gpu_blocks="None"} 1',
        b'vllm:cache_config_info{num_gpu_blocks="0"} 1', b"a" * (MAX_BYTES + 1),
    ],
)  # fmt: skip
def test_invalid_lines_are_ignored(line: bytes):
    assert read_engine_metrics(line, METRIC_NAMES) == {}


@given(st.binary(max_size=200), st.sampled_from([b"vllm:num_requests_waiting{", SGLANG, VLLM]))
def test_any_body_is_accepted(junk: bytes, start: bytes):
    read_engine_metrics(start + junk, METRIC_NAMES)
