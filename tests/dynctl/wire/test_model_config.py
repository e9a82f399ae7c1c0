"""The shape of a model from its config.json, against published numbers of known models."""

from __future__ import annotations

from typing import Any

import pytest

from dynctl.wire.model_config import UnknownSize, model_shape

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
MIXTRAL_8X7B = {
    **LLAMA_8B,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
}


@pytest.mark.parametrize(
    ("config", "total", "active", "kv_bytes"),
    [
        # Billions of parameters as the model cards publish them, with both embeddings.
        pytest.param(LLAMA_8B, 8.03, 8.03, 131_072, id="Llama 3.1 8B"),
        pytest.param(MIXTRAL_8X7B, 46.7, 12.9, 131_072, id="Mixtral 8x7B"),
        pytest.param(QWEN3_30B, 30.5, 3.3, 98_304, id="Qwen3 30B-A3B"),
        pytest.param(DEEPSEEK_V3, 671.0, 37.0, 70_272, id="DeepSeek V3"),
        pytest.param(
            {**LLAMA_8B, "layer_types": ["sliding_attention"] * 32},
            8.03,
            8.03,
            131_072,
            id="window",
        ),
        pytest.param({"text_config": LLAMA_8B}, 8.03, 8.03, 131_072, id="nested"),
    ],
)
def test_parameters_and_cache_are_those_that_are_published(
    config: dict[str, Any], total: float, active: float, kv_bytes: int
) -> None:
    found = model_shape(config)
    embeddings = 2 * found.hidden * found.vocabulary
    everything = found.dense_weights + found.experts * found.expert_weights
    assert (everything + embeddings) / 1e9 == pytest.approx(total, rel=0.01)
    assert (found.active_weights + embeddings) / 1e9 == pytest.approx(active, rel=0.03)
    assert found.kv_bytes_per_token == kv_bytes


def test_a_long_prefill_reads_all_experts_and_one_token_its_own() -> None:
    found = model_shape(MIXTRAL_8X7B)
    everything = found.dense_weights + found.experts * found.expert_weights
    assert found.touched_weights(1) == pytest.approx(found.active_weights)
    assert found.touched_weights(1000) == pytest.approx(everything)
    dense = model_shape(LLAMA_8B)
    assert dense.touched_weights(1) == dense.dense_weights == dense.active_weights


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8"}, ("fp8", "fp8")),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, ("fp8", "fp8")),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, ("int4", "bf16")),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, ("int8", "int8")),
        ({"quant_method": "awq", "bits": 4}, ("int4", "bf16")),
        ({"quant_method": "gptq", "bits": 8}, ("int8", "bf16")),
        ({"quant_method": "mxfp4"}, ("fp4", "bf16")),
        ({"quant_algo": "NVFP4"}, ("fp4", "fp4")),
        ({"quant_method": "unknown"}, ("bf16", "bf16")),
    ],
)
def test_the_number_formats_follow_from_the_quantization(
    quantization: dict[str, Any], expected: tuple[str, str]
) -> None:
    inside = model_shape({**LLAMA_8B, "quantization_config": quantization})
    beside = model_shape(LLAMA_8B, quantization)
    for found in (inside, beside):
        assert (found.weights, found.arithmetic) == expected


def test_the_quantization_file_of_nvidias_models_is_read() -> None:
    found = model_shape(LLAMA_8B, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
    assert (found.weights, found.kv_bytes_per_token) == ("fp8", 65_536)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**LLAMA_8B, "hidden_size": None}, "hidden_size: expected 1 to .*, got None"),
        ({**LLAMA_8B, "num_hidden_layers": "32"}, "num_hidden_layers: .* got '32'"),
        ({**LLAMA_8B, "vocab_size": -1}, "vocab_size: .* got -1"),
        ({**LLAMA_8B, "num_key_value_heads": True}, "num_key_value_heads: .* got True"),
        ({**LLAMA_8B, "full_attention_interval": 4}, "full_attention_interval: not every layer"),
        ({**LLAMA_8B, "layer_types": ["mamba", "attention"]}, "layer_types: not every layer"),
        ({**MIXTRAL_8X7B, "num_experts_per_tok": 9}, "num_experts_per_tok: expected 1 to 8, got 9"),
    ],
)
def test_what_is_missing_or_wrong_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnknownSize, match=named):
        model_shape(config)
