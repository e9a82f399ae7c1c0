"""Tiny models with random weights, and a LoRA adapter: what an engine needs to start.

The tokenizer is that of ``tests/dynamo/tiny-model`` (bytes and a few merges, 317 entries). The
engine makes the weights of a model itself (``--load-format dummy``). ``head_dim`` is 64: below 32,
vLLM's attention on CPUs ends the engine at the first request.
"""

import json
import math
import random
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TOKENIZER = Path(__file__).resolve().parent.parent / "dynamo" / "tiny-model"
_LAYERS = 2
_HIDDEN = 128
_HEAD = 64
_INNER = 256
_VOCABULARY = 317
_RANK = 8
WINDOW = 64
"""Tokens of the hybrid model's sliding window: two blocks of 32."""

# An empty turn and one that is None differ, tools and their calls are part of the prompt: a router
# that renders any of them in another way than the engine predicts another prefix.
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}"
    "<call>{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_models(directory: Path) -> None:
    """``directory``/llama, /gemma (sliding windows and full attention) and /adapter (LoRA)."""
    _write_model(
        directory / "llama",
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        num_hidden_layers=_LAYERS,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        hidden_act="silu",
        tie_word_embeddings=False,
    )
    rope = {"rope_type": "default"}
    _write_model(
        directory / "gemma",
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        sliding_window=WINDOW,
        query_pre_attn_scalar=_HEAD,
        rms_norm_eps=1e-6,
        rope_parameters={
            "full_attention": {**rope, "rope_theta": 1_000_000.0},
            "sliding_attention": {**rope, "rope_theta": 10_000.0},
        },
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        hidden_activation="gelu_pytorch_tanh",
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    _write_adapter(directory / "adapter")


def _write_model(folder: Path, **config: Any) -> None:
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copyfile(_TOKENIZER / name, folder / name)
    tokenizer = json.loads((_TOKENIZER / "tokenizer_config.json").read_text())
    _write_json(folder / "tokenizer_config.json", {**tokenizer, "chat_template": _TEMPLATE})
    common = {
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 8192,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    _write_json(folder / "config.json", {**common, **config})


def _write_adapter(folder: Path) -> None:
    """An adapter of the query and value projections of ``llama``, as a safetensors file."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "llama",
    }
    _write_json(folder / "adapter_config.json", config)
    shapes = {}
    for layer in range(_LAYERS):
        for projection, width in (("q_proj", 2 * _HEAD), ("v_proj", _HEAD)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            shapes[f"{name}.lora_A.weight"] = (_RANK, _HIDDEN)
            shapes[f"{name}.lora_B.weight"] = (width, _RANK)
    _write_tensors(folder / "adapter_model.safetensors", shapes)


def write_weights(folder: Path) -> None:
    """Random weights of ``llama`` as a file, for engines that do not make them where adapters are
    loaded too."""
    vocabulary = (_VOCABULARY, _HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": vocabulary,
        "lm_head.weight": vocabulary,
        "model.norm.weight": (_HIDDEN,),
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{name}.{norm}.weight"] = (_HIDDEN,)
        for projection, width in (("q", 2 * _HEAD), ("k", _HEAD), ("v", _HEAD)):
            shapes[f"{name}.self_attn.{projection}_proj.weight"] = (width, _HIDDEN)
        shapes[f"{name}.self_attn.o_proj.weight"] = (_HIDDEN, 2 * _HEAD)
        for projection in ("gate", "up"):
            shapes[f"{name}.mlp.{projection}_proj.weight"] = (_INNER, _HIDDEN)
        shapes[f"{name}.mlp.down_proj.weight"] = (_HIDDEN, _INNER)
    _write_tensors(folder / "model.safetensors", shapes)


def _write_tensors(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    header, data, chance = {}, bytearray(), random.Random(0)
    for name, shape in shapes.items():
        start, count = len(data), math.prod(shape)
        data += struct.pack(f"<{count}f", *(chance.gauss(0, 0.1) for _ in range(count)))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))
