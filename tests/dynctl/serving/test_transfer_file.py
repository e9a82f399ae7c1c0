"""The file of --router-kv-transfer-qos, and the size of a model's KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.errors import UsageProblem
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.transfer_file import configured_table, read_transfer_file
from dynctl.wire.model_config import UnknownSize, kv_bytes_per_token
from router_core import Link, RouterConfig

GOOD = """\
levels:
  - level: rack
    latency: 20us
    bandwidth: 400Gbit/s
  - level: zone
    latency: 0.5ms
    bandwidth: 3 GB/s
beyond:
  latency: 30ms
  bandwidth: 5Gbit/s
"""
BITS = ["&a ", "*a", "<<: ", "- ", "{", "[", "~", "!!int ", "1e9s", "\t", "---\n", "? "]
LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def written(folder: Path, text: str) -> Path:
    path = folder / "links.yaml"
    path.write_text(text)
    return path


def settings(path: Path, **more: Any) -> RouterConfig:
    return RouterConfig(router_kv_transfer_weight=50.0, router_kv_transfer_qos=str(path), **more)


@pytest.mark.seed("dep-topology: future work: table of levels")
def test_a_file_becomes_a_table(tmp_path: Path) -> None:
    table = read_transfer_file(written(tmp_path, GOOD + "bytes_per_token: 131072\n"))
    assert table.levels == (("rack", Link(20e-6, 50e9)), ("zone", Link(0.0005, 3e9)))
    assert table.beyond == Link(0.03, 0.625e9)
    assert table.size_of("any") == 131_072
    table = read_transfer_file(written(tmp_path, GOOD + "bytes_per_token: {m: 70000}\n"))
    assert (table.size_of("m"), table.size_of("other")) == (70_000, None)


@pytest.mark.seed("dynamo-1.6: bad input: a QoS file with a missing level")
@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("levels:\n", "level:\n", 1, "unknown key 'level': did you mean levels?"),
        (GOOD[GOOD.index("beyond") :], "", 1, "beyond is missing"),
        ("    latency: 20us\n", "", 2, "levels: latency is missing"),
        ("    latency: 20us\n", "    latency: 20us\n    delay: 1\n", 4, "unknown key 'delay'"),
        ("20us", "20", 3, "latency: expected a number and a unit (us, ms, s)"),
        ("20us", "-20us", 3, "latency: expected a number and a unit"),
        ("400Gbit/s", "400", 4, "bandwidth: expected a number and a unit"),
        ("400Gbit/s", "400Gb/s", 4, "bandwidth: expected a number and a unit"),
        ("400Gbit/s", "0Gbit/s", 4, "bandwidth: expected 1 to 1e18"),
        ("30ms", "9999s", 9, "latency: expected 0 to 3600 seconds, got 9999"),
        ("level: zone", "level: rack", 5, "level rack occurs twice"),
        ("level: zone", "level: beyond", 5, "level beyond: give it as"),
        ("level: zone", "level: 7", 5, "level: expected a topology domain, got 7"),
        (
            "20us\n    bandwidth: 400Gbit/s",
            "1s\n    bandwidth: 1B/s",
            2,
            "rack is slower than zone",
        ),
        ("levels:\n", "levels: 7\nold:\n", 2, "unknown key 'old'"),
        ("beyond:", "bytes_per_token: -1\nbeyond:", 8, "expected 1 to 1e12 bytes, got -1"),
        ("beyond:", "bytes_per_token: {m: x}\nbeyond:", 8, "expected 1 to 1e12 bytes, got 'x'"),
    ],
)
def test_a_wrong_file_names_the_line(
    tmp_path: Path, old: str, new: str, line: int, expected: str
) -> None:
    path = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(UsageProblem) as caught:
        read_transfer_file(path)
    message = str(caught.value)
    assert message.startswith(f"--router-kv-transfer-qos {path}: line {line}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("levels: [", "invalid YAML: line 2"),
        ("levels: []\nbeyond: {}\n", "levels: expected a list of levels"),
        ("[]", "line 1: expected levels, beyond, got []"),
        ("", "line 1: expected levels, beyond, got None"),
        ("a: &a [*a]\n", "invalid YAML"),
        (f"levels: {'[' * 200}\n", "invalid YAML"),
        ("levels: [zone]\nbeyond: x\n", "line 1: levels: expected level, latency, bandwidth"),
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        read_transfer_file(written(tmp_path, text))
    assert expected in str(caught.value)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_content_is_an_internal_error(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageProblem):
        read_transfer_file(path)


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="the file does not exist"):
        build_frontend(FrontendConfig(router=settings(tmp_path / "none.yaml")))


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("kv_transfer_domain", "host", "--router-kv-transfer-topology-level"),
        ("router_own_domains", "zone=a,host=b", "--router-own-domains"),
    ],
)
def test_a_domain_of_the_settings_is_a_level_of_the_file(
    tmp_path: Path, name: str, value: str, flag: str
) -> None:
    config = settings(written(tmp_path, GOOD), **{name: value})
    with pytest.raises(UsageProblem, match=f"the level host of {flag} is missing"):
        configured_table(config)


def test_the_size_comes_from_the_models_config(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    table, why = configured_table(settings(path), tmp_path)
    assert table is not None
    assert (table.bytes_per_token, why) == (131_072, None)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "int3"}))
    table, why = configured_table(settings(path), tmp_path)
    assert table is not None
    assert table.bytes_per_token is None
    assert why is not None
    assert "torch_dtype: expected one of" in why
    table, why = configured_table(settings(path))
    assert why == "no --model-path"
    assert configured_table(RouterConfig()) == (None, None)


def test_a_dry_run_can_set_a_weight_that_the_frontend_has_not(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + "bytes_per_token: 131072\n")
    config = RouterConfig(router_kv_transfer_qos=str(path))
    router = build_frontend(FrontendConfig(router=config)).service.router
    assert router.transfer is not None
    assert router.view().transfer is None
    tried = router.view(config.with_values({"router_kv_transfer_weight": 50.0}))
    assert tried.transfer == router.transfer


@given(st.integers(0, len(GOOD)), st.integers(0, 30), st.text(max_size=5) | st.sampled_from(BITS))
def test_a_changed_file_is_read_or_refused(
    tmp_path_factory: Any, start: int, count: int, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.yaml"
    path.write_bytes((GOOD[:start] + text + GOOD[start + count :]).encode(errors="replace"))
    refused = ""
    try:
        assert all(seconds >= 0 for seconds in read_transfer_file(path).seconds(1e9))
    except UsageProblem as error:
        refused = str(error)
    assert refused.startswith(f"--router-kv-transfer-qos {path}: " if refused else "")


def test_the_frontend_applies_the_table(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + "bytes_per_token: 131072\n")
    frontend = build_frontend(FrontendConfig(router=settings(path)))
    assert frontend.service.router.transfer == read_transfer_file(path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 131_072),
        ({**LLAMA, "head_dim": 64}, 65_536),
        ({**LLAMA, "num_key_value_heads": None}, 524_288),
        ({**LLAMA, "torch_dtype": "torch.float32"}, 262_144),
        ({**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, 65_536),
        ({"text_config": LLAMA, "torch_dtype": "bfloat16"}, 131_072),
        ({**LLAMA, "layer_types": ["full_attention"] * 32}, 131_072),
        ({**LLAMA, "layer_types": ["attention"] * 32}, 131_072),
        ({**LLAMA, "attn_type_list": [1] * 32}, 131_072),
        ({**LLAMA, "full_attention_interval": 1, "use_cla": False}, 131_072),
        ({**LLAMA, "num_kv_heads": 32}, 131_072),
        ({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}, 131_072),
        (DEEPSEEK, 70_272),
    ],
)
def test_the_size_of_a_kv_cache(config: dict[str, Any], expected: float) -> None:
    assert kv_bytes_per_token(config) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": None},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 2**40},
        {"num_attention_heads": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": 4096},
        {"torch_dtype": None},
        {"kv_lora_rank": 512},
        {"linear_attn_config": {}},
        {"layer_types": ["conv", "full_attention"]},
        {"attn_type_list": [0, 0, 1]},
        {"full_attention_interval": 4},
        {"full_attn_idxs": [1]},
        {"attn_layer_period": 8},
        {"hybrid_override_pattern": "M-M*"},
        {"block_configs": [{"attention": {"no_op": True}}]},
        {"attention_chunk_size": 8192},
        {"cross_attention_layers": [3]},
        {"num_kv_shared_layers": 10},
        {"use_cla": True},
        {"index_topk": 2048},
        {"num_kv_heads": 8, "num_key_value_heads": None},
        {"multi_query": True, "num_key_value_heads": None},
        {"multi_query_group_num": 2, "num_key_value_heads": None},
        {"num_attention_groups": 8, "num_key_value_heads": None},
    ],
)
def test_an_unknown_size_has_a_reason(change: dict[str, Any]) -> None:
    with pytest.raises(UnknownSize, match=next(iter(change)) + "|qk_rope_head_dim"):
        kv_bytes_per_token({**LLAMA, **change})
