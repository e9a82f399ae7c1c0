"""What clients do, with their own libraries: run by the Python that has these, not by ours.

``client.py CALLS URL KEY``: calls one function below, and prints what it found as JSON.
"""

import json
import sys
from importlib import import_module
from typing import Any

TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
HELLO = [{"role": "user", "content": "hello"}]


def openai_calls(url: str, key: str) -> dict[str, Any]:
    openai: Any = import_module("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    chat = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=5)
    stream = client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=5, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = client.completions.create(model="demo", prompt="hello", max_tokens=5)
    response = client.responses.create(
        model="demo",
        instructions="be brief",
        input=[*HELLO],
        max_output_tokens=5,
        tools=[{"type": "function", "name": "weather", "parameters": TOOL, "strict": False}],
    )
    events = list(
        client.responses.create(model="demo", input="hello", max_output_tokens=5, stream=True)
    )
    with client.responses.stream(model="demo", input="hello", max_output_tokens=5) as streaming:
        final = streaming.get_final_response()
    vectors = client.embeddings.create(model="demo", input=["one", "two"])
    models = [model.id for model in client.models.list()]
    return {
        "chat": chat.choices[0].message.content,
        "chat_stream": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "chat_usage": chunks[-1].usage.completion_tokens,
        "text": text.choices[0].text,
        "response": response.output_text,
        "response_usage": [response.usage.input_tokens, response.usage.output_tokens],
        "response_events": [event.type for event in events],
        "response_final": final.output_text,
        "embeddings": [len(row.embedding) for row in vectors.data],
        "models": models,
    }


def openai_errors(url: str, key: str) -> dict[str, Any]:
    openai: Any = import_module("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    wrong = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)

    def kind(call: Any) -> list[Any]:
        try:
            call()
        except openai.APIStatusError as error:
            return [type(error).__name__, error.status_code, error.param]
        return []

    return {
        "model": kind(lambda: client.responses.create(model="other", input="x")),
        "kept": kind(
            lambda: client.responses.create(model="demo", input="x", previous_response_id="r")
        ),
        "forced": kind(
            lambda: client.chat.completions.create(
                model="demo", messages=HELLO, tool_choice="required"
            )
        ),
        "key": kind(lambda: wrong.responses.create(model="demo", input="x")),
        "path": kind(lambda: client.images.generate(model="demo", prompt="x")),
    }


def anthropic_calls(url: str, key: str) -> dict[str, Any]:
    anthropic: Any = import_module("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    wrong = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    tools = [{"name": "weather", "description": "the weather", "input_schema": TOOL}]
    turns = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}}
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}],
        },
    ]
    more = {"model": "demo", "max_tokens": 5}
    message = client.messages.create(messages=turns, tools=tools, system="be brief", **more)
    with client.messages.stream(messages=HELLO, **more) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    plain = client.messages.create(messages=HELLO, **more)
    count = client.messages.count_tokens(model="demo", messages=HELLO)

    def kind(call: Any) -> list[Any]:
        try:
            call()
        except anthropic.APIStatusError as error:
            return [type(error).__name__, error.status_code, error.body["error"]["type"]]
        return []

    return {
        "answer": message.content[0].text,
        "stop_reason": message.stop_reason,
        "plain": plain.content[0].text,
        "stream": text,
        "usage": [final.usage.input_tokens, final.usage.cache_read_input_tokens],
        "output_tokens": final.usage.output_tokens,
        "count": count.input_tokens,
        "key": kind(lambda: wrong.messages.create(messages=HELLO, **more)),
        "model": kind(lambda: client.messages.create(model="other", max_tokens=5, messages=HELLO)),
    }


def litellm_calls(url: str, key: str) -> dict[str, Any]:
    litellm: Any = import_module("litellm")
    as_openai = {"model": "openai/demo", "api_base": f"{url}/v1", "api_key": key}
    as_anthropic = {"model": "anthropic/demo", "api_base": url, "api_key": key}
    chat = litellm.completion(messages=HELLO, max_tokens=5, **as_openai)
    streamed = litellm.completion(messages=HELLO, max_tokens=5, stream=True, **as_openai)
    other = litellm.completion(messages=HELLO, max_tokens=5, **as_anthropic)
    response = litellm.responses(input="hello", max_output_tokens=5, **as_openai)
    vectors = litellm.embedding(input=["one"], **as_openai)
    return {
        "chat": chat.choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in streamed),
        "anthropic": other.choices[0].message.content,
        "response": response.output[0].content[0].text,
        "embedding": len(vectors.data[0]["embedding"]),
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
