"""The sizes of a model, from its ``config.json`` (Hugging Face): its KV cache, and what a prefill
computes and reads.

Each layer with full attention keeps keys and values of every token: 2 x KV heads x head size. A
layer with multi-head latent attention (DeepSeek) keeps one compressed vector and one rotary key
instead. Sizes are those of the whole model: a tensor-parallel engine divides them among its ranks,
and a transfer moves all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_BYTES: Final = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
}
#: The number format of weights and arithmetic -> bytes of one weight.
WEIGHT_BYTES: Final = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "int4": 0.5}
#: Names of the number of routed experts.
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
#: Fields of models in which some layers have no attention -> the values with which all have it.
_NOT_ALL_ATTENTION: Final[Mapping[str, tuple[object, ...]]] = {
    "layer_types": ("full_attention", "attention", "sliding_attention", "chunked_attention"),
    "layers_block_type": ("full_attention", "attention"),
    "block_types": ("attention",),
    "attn_type_list": (1,),
    "full_attention_interval": (1,),
    "attn_layer_period": (1,),
    "attn_layer_indices": (),
    "full_attn_idxs": (),
    "linear_attn_config": (),
    "hybrid_override_pattern": (),
    "block_configs": (),
}
#: Fields of models in which some layers keep less, or more, than keys and values of every token.
_NOT_EVERY_TOKEN: Final[Mapping[str, tuple[object, ...]]] = {
    **_NOT_ALL_ATTENTION,
    "layer_types": ("full_attention", "attention"),
    "block_types": (),
    "attention_chunk_size": (),
    "cross_attention_layers": (),
    "num_kv_shared_layers": (0,),
    "use_cla": (False,),
    "index_topk": (),
}
#: Other names of the number of KV heads, and signs that they are fewer than the heads.
_OTHER_KV_HEADS: Final = (
    *("num_kv_heads", "multi_query", "multi_query_attention", "multi_query_group_num"),
    *("num_attention_groups", "num_key_value_heads_per_layer"),
)
#: Larger numbers are not those of a model.
_MOST: Final = 1 << 20


class UnknownSize(ValueError):
    """A size does not follow from a config.json; the message has the reason."""


def kv_bytes_per_token(config: Mapping[str, Any]) -> float:
    """Bytes of KV cache for each token, on all layers. Raises UnknownSize."""
    text = config.get("text_config")
    model = {**config, **text} if isinstance(text, Mapping) else config
    layers = _number(model, "num_hidden_layers")
    _refuse_layers(model, _NOT_EVERY_TOKEN, "not every layer keeps keys and values of every token")
    window = model.get("sliding_window")
    if window is not None and model.get("use_sliding_window", True) and window:
        raise UnknownSize("sliding_window: not every layer keeps every token")
    return layers * _values_per_layer(model) * _bytes_per_value(model)


def _refuse_layers(
    model: Mapping[str, Any], fields: Mapping[str, tuple[object, ...]], problem: str
) -> None:
    """Raise UnknownSize with the first field whose value, or an entry of it, is another one."""
    for name, allowed in fields.items():
        value = model.get(name)
        entries = value if isinstance(value, list) and value else [value]
        if value is not None and any(entry not in allowed for entry in entries):
            raise UnknownSize(f"{name}: {problem}")


def _values_per_layer(model: Mapping[str, Any]) -> int:
    if model.get("kv_lora_rank") is not None:
        return _number(model, "kv_lora_rank") + _number(model, "qk_rope_head_dim")
    heads = _number(model, "num_attention_heads")
    if model.get("num_key_value_heads") is not None:
        shared = _number(model, "num_key_value_heads")
    elif other := next((name for name in _OTHER_KV_HEADS if model.get(name)), None):
        raise UnknownSize(f"{other}: the number of KV heads is read from num_key_value_heads only")
    else:
        shared = heads
    size = model.get("head_dim")
    if size is None:
        return 2 * shared * (_number(model, "hidden_size") // heads)
    return 2 * shared * _number(model, "head_dim")


def _bytes_per_value(model: Mapping[str, Any]) -> float:
    quantized = model.get("quantization_config")
    scheme = quantized.get("kv_cache_scheme") if isinstance(quantized, Mapping) else None
    if isinstance(scheme, Mapping):
        return _number(scheme, "num_bits") / 8
    kind = model.get("dtype") or model.get("torch_dtype")
    size = _BYTES.get(kind.removeprefix("torch.")) if isinstance(kind, str) else None
    if size is None:
        raise UnknownSize(f"torch_dtype: expected one of {', '.join(_BYTES)}, got {kind!r:.80}")
    return size


def _number(model: Mapping[str, Any], name: str, most: int = _MOST) -> int:
    value = model.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UnknownSize(f"{name}: expected 1 to {most:,}, got {value!r:.80}")
    return value


def _optional(model: Mapping[str, Any], name: str) -> int:
    """0 where it is missing or null."""
    return 0 if model.get(name) in (None, 0) else _number(model, name)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What one token costs. Weights are counted without the embedding and the output matrix.

    ``dense_weights``: of all layers, those that every token uses (attention, dense feed-forward,
    shared experts). ``expert_weights``: of one routed expert, summed over the layers that have
    experts; a token uses ``active_experts`` of ``experts``. ``attention_width``: heads times the
    size of a head, of queries and keys plus of values; ``kv_elements``: numbers in the KV cache for
    one token, of all layers. ``weights`` is a key of :data:`WEIGHT_BYTES`; ``arithmetic`` is
    ``bf16`` too where only the weights are quantized.
    """

    layers: int
    hidden: int
    vocabulary: int
    dense_weights: int
    attention_width: int
    kv_elements: int
    experts: int = 0
    active_experts: int = 0
    expert_weights: int = 0
    weights: str = "bf16"
    arithmetic: str = "bf16"
    kv_bytes: float = 2.0

    @property
    def active_weights(self) -> int:
        """Weights that one token uses."""
        return self.dense_weights + self.active_experts * self.expert_weights

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the KV cache of one token, of all layers and heads."""
        return self.kv_elements * self.kv_bytes

    def touched_weights(self, tokens: int) -> float:
        """Weights that a prefill of ``tokens`` reads, with experts chosen evenly."""
        if not self.experts:
            return float(self.dense_weights)
        unused = (1.0 - self.active_experts / self.experts) ** tokens
        return self.dense_weights + self.experts * (1.0 - unused) * self.expert_weights


def model_shape(config: Mapping[str, Any], quantization: object = None) -> ModelShape:
    """The shape of a model. Raises UnknownSize with the field that is missing or invalid.

    ``quantization``: that of a ``hf_quant_config.json`` beside it, where ``config`` has none.
    Feed-forward layers are taken as gated (three matrices), as in Llama, Qwen, Mistral, Mixtral,
    DeepSeek and their relatives.
    """
    text = config.get("text_config")
    model = {**config, **text} if isinstance(text, Mapping) else config
    stated = model.get("quantization_config", quantization)
    formats: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
    _refuse_layers(model, _NOT_ALL_ATTENTION, "not every layer has attention")
    weights, arithmetic = _formats(formats)
    cache = str(formats.get("kv_cache_quant_algo") or "").lower()
    hidden, layers = _number(model, "hidden_size"), _number(model, "num_hidden_layers")
    projections, width = _attention(model, hidden)
    experts = next(filter(None, (_optional(model, name) for name in _EXPERTS)), 0)
    dense_layers, expert_weights, shared, active = layers, 0, 0, 0
    if experts:
        active = _number(model, "num_experts_per_tok", experts)
        size = _optional(model, "moe_intermediate_size") or _number(model, "intermediate_size")
        dense_layers = min(layers, _optional(model, "first_k_dense_replace"))
        expert_weights = 3 * hidden * size * (layers - dense_layers)
        shared = _optional(model, "shared_expert_intermediate_size")
        shared = shared or size * _optional(model, "n_shared_experts")
        shared *= 3 * hidden * (layers - dense_layers)
    wide = 3 * hidden * _number(model, "intermediate_size") if dense_layers else 0
    return ModelShape(
        layers=layers,
        hidden=hidden,
        vocabulary=_number(model, "vocab_size"),
        dense_weights=projections * layers + wide * dense_layers + shared,
        attention_width=width,
        kv_elements=_values_per_layer(model) * layers,
        experts=experts,
        active_experts=active,
        expert_weights=expert_weights,
        weights=weights,
        arithmetic=arithmetic,
        kv_bytes=1.0 if "fp8" in cache else 2.0,
    )


def _attention(model: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Of one layer: its weights, and heads times the sizes of a key and a value."""
    heads = _number(model, "num_attention_heads")
    latent = _optional(model, "kv_lora_rank")
    if latent:  # multi-head latent attention
        rope, value = _number(model, "qk_rope_head_dim"), _number(model, "v_head_dim")
        key = _number(model, "qk_nope_head_dim") + rope
        query = _optional(model, "q_lora_rank")
        to_query = query * (hidden + heads * key) if query else hidden * heads * key
        to_cache = hidden * (latent + rope) + latent * heads * (key - rope + value)
        return to_query + to_cache + heads * value * hidden, heads * (key + value)
    size = _optional(model, "head_dim") or hidden // heads
    return 2 * hidden * heads * size + hidden * _values_per_layer(model), 2 * heads * size


def _formats(quantization: Mapping[str, Any]) -> tuple[str, str]:
    """The formats of weights and of arithmetic."""
    names = ("quant_method", "quant_algo", "fmt", "format", "quantization_scheme")
    words = " ".join(str(quantization.get(name) or "") for name in names).lower()
    bits = {quantization.get("bits"), quantization.get("w_bit")} - {None}
    if re.search(r"fp4|mxfp4|nvfp4", words):
        return "fp4", "bf16" if "a16" in words or "mxfp4" in words else "fp4"
    if re.search(r"fp8|float-quantized|e4m3", words):
        return "fp8", "fp8"
    if re.search(r"awq|gptq|w4a16|int4|pack-quantized", words):
        return ("int8" if bits == {8} else "int4"), "bf16"
    if re.search(r"int8|w8a8|int-quantized", words):
        return "int8", "int8"
    return "bf16", "bf16"
