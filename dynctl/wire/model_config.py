"""The size of a model's KV cache, from its ``config.json`` (Hugging Face).

Each layer with full attention keeps keys and values of every token: 2 x KV heads x head size. A
layer with multi-head latent attention (DeepSeek) keeps one compressed vector and one rotary key
instead. Sizes are those of the whole model: a tensor-parallel engine divides them among its ranks,
and a transfer moves all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_BYTES: Final = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
}
#: Larger numbers are not those of a model.
_MOST: Final = 1 << 20


class UnknownSize(ValueError):
    """The size of the KV cache does not follow from a config.json; the message has the reason."""


def kv_bytes_per_token(config: Mapping[str, Any]) -> float:
    """Bytes of KV cache for each token, on all layers. Raises UnknownSize."""
    text = config.get("text_config")
    model = {**config, **text} if isinstance(text, Mapping) else config
    layers = _number(model, "num_hidden_layers")
    for name in ("layer_types", "layers_block_type", "attn_layer_indices", "linear_attn_config"):
        kinds = model.get(name)
        if isinstance(kinds, list) and set(map(str, kinds)) == {"full_attention"}:
            continue
        if kinds is not None:
            raise UnknownSize(f"{name}: not every layer keeps every token")
    window = model.get("sliding_window")
    if window is not None and model.get("use_sliding_window", True) and window:
        raise UnknownSize("sliding_window: not every layer keeps every token")
    return layers * _values_per_layer(model) * _bytes_per_value(model)


def _values_per_layer(model: Mapping[str, Any]) -> int:
    if model.get("kv_lora_rank") is not None:
        return _number(model, "kv_lora_rank") + _number(model, "qk_rope_head_dim")
    heads = _number(model, "num_attention_heads")
    shared = (
        heads if model.get("num_key_value_heads") is None else _number(model, "num_key_value_heads")
    )
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


def _number(model: Mapping[str, Any], name: str) -> int:
    value = model.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise UnknownSize(f"{name}: expected 1 to {_MOST:,}, got {value!r:.80}")
    return value
