"""Any JSON is a request, or an error that names a field."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.openai_request import Api, ApiError, decode_body, parse_generate
from dynctl.tokenization import DEMO_MODEL_DIR, load_tokenizer

TOKENIZER = load_tokenizer(DEMO_MODEL_DIR)
SECRET = "xyzzy-secret"

anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False),
        st.sampled_from([SECRET, "demo", "", "127.0.0.1"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                "role content type text include_usage do_remote_prefill do_remote_decode "
                "remote_host remote_port remote_block_ids".split()
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=6,
)
NAMES = [
    *("model", "prompt", "messages", "tools", "chat_template_kwargs", "max_tokens"),
    *("max_completion_tokens", "stream", "stream_options", "stop", "n", "ignore_eos"),
    *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "cache_salt"),
    *("data_parallel_rank", "add_generation_prompt", "best_of", "input", "system", "instructions"),
    *("tool_choice", "response_format", "text", "include", "thinking", "stop_sequences"),
]


@given(
    st.dictionaries(st.sampled_from(NAMES), anything, max_size=8),
    st.sampled_from(["chat", "completions", "messages", "responses"]),
    st.sampled_from(["aggregated", "prefill", "decode"]),
    st.booleans(),
)
def test_any_body_is_a_request_or_a_named_refusal(fields, api: Api, role, valid: bool) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": [1, 2]}
    body |= {"messages": [{"role": "user", "content": "hi"}]}
    body |= {"input": "hi", "max_tokens": 4}
    body = {**body, **fields} if valid else fields
    config = EngineConfig(role=role)
    parsed, error = tried(partial(parse_generate, body, {}, config, TOKENIZER, api=api))
    if parsed is not None:
        assert parsed.prompt
        assert 1 <= parsed.max_tokens <= config.context_length - len(parsed.prompt)
    else:
        assert error is not None
        assert 400 <= error.status < 500
        assert error.param
        # Wrong values of controls are quoted on purpose; prompts and stop strings never are.
        if error.param.startswith(("messages", "prompt", "tools", "stop")):
            assert SECRET not in str(error)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | anything.map(json.dumps))
def test_any_bytes_are_a_body_or_a_400(raw: bytes | str) -> None:
    body, error = tried(partial(decode_body, raw.encode() if isinstance(raw, str) else raw))
    if body is not None:
        assert isinstance(body, dict)
    else:
        assert error is not None
        assert error.status == 400


def tried(call: Callable[[], Any]) -> tuple[Any, ApiError | None]:
    try:
        return call(), None
    except ApiError as error:
        return None, error
