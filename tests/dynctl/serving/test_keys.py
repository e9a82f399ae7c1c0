"""API keys: who gets inference, with which limits, and what never leaves the process."""

import asyncio
import logging
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.serving.http.keys import ApiKeys, KeyLimits, KeysError
from dynctl.serving.http.server import build_frontend
from dynctl.serving.http.start import StartError
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.refusal import HttpError
from tests.dynctl.serving.fleets import chat_body, site, until

ENGINE = [{"name": "a0"}]
KEY, OTHER, ADMIN = "sk-first", "sk-second", "admin-t0ken"
INFERENCE = [
    ("POST", "/v1/chat/completions", chat_body("hi")),
    ("POST", "/v1/completions", {"model": "demo", "prompt": "hi"}),
    ("POST", "/v1/embeddings", {"model": "demo", "input": "hi"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/demo", None),
]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path", "body"), INFERENCE)
async def test_inference_needs_a_key(method, path, body):
    async with site(ENGINE, api_keys=(KEY, OTHER), api_token=ADMIN) as fleet:

        async def status_with(headers):
            async with fleet.client.request(
                method, fleet.url(path), json=body, headers=headers
            ) as answer:
                return answer.status, await answer.json()

        status, found = await status_with({})
        assert status == 401
        assert found["error"]["code"] == "invalid_api_key"
        assert found["error"]["type"] == "invalid_request_error"
        for wrong in (bearer("sk-third"), bearer(""), {"authorization": KEY}, bearer(KEY + "x")):
            status, found = await status_with(wrong)
            assert (status, found["error"]["code"]) == (401, "invalid_api_key")
            assert KEY not in str(found)
        for right in (KEY, OTHER, ADMIN):
            assert (await status_with(bearer(right)))[0] == 200


async def test_a_key_is_not_the_operators_token():
    async with site(ENGINE, api_keys=(KEY,), api_token=ADMIN) as fleet:
        assert (await fleet.get("/v1/workers", headers=bearer(KEY)))[0] == 401
        assert (await fleet.get("/v1/workers", headers=bearer(ADMIN)))[0] == 200
        assert (await fleet.get("/live"))[0] == 200


async def test_the_file_is_loaded_again_and_an_error_keeps_the_old_keys(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text(f"# the first\n{KEY} name=batch\n\n")
    caplog.set_level(logging.INFO)
    async with site(ENGINE, api_key_file=file) as fleet:
        assert (await fleet.chat())[0] == 401
        keys = fleet.frontend.core.keys

        async def chat(key):
            body = chat_body("hi")
            return (await fleet.post("/v1/chat/completions", body, headers=bearer(key)))[0]

        assert await chat(KEY) == 200
        file.write_text(f"{OTHER} concurrency=many\n")
        await until(lambda: "stay as they are" in caplog.text)
        assert await chat(KEY) == 200
        file.write_text(f"{OTHER}\n")
        await until(lambda: keys.find(OTHER.encode()) is not None)
        assert (await chat(KEY), await chat(OTHER)) == (401, 200)
        file.unlink()
        await until(lambda: "the file does not exist" in caplog.text)
        assert await chat(OTHER) == 200
    assert KEY not in caplog.text
    assert OTHER not in caplog.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{KEY} {OTHER}", "line 1: after the key expected name="),
        (f"{KEY}\n{KEY}", "line 2: the same key as"),
        (f"{KEY} concurrency=-1", "concurrency: expected 0 to 1000000"),
        (f"{KEY} requests-per-minute=9999999", "expected 0 to 1000000"),
        ("schlüssel-ä", "printable ASCII"),
    ],
)
def test_errors_name_the_line_and_never_the_key(tmp_path, text, problem):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(StartError) as caught:
        build_frontend(FrontendConfig(api_key_file=file))
    assert problem in str(caught.value)
    assert KEY not in str(caught.value)
    assert OTHER not in str(caught.value)


def test_an_empty_file_admits_no_client_and_a_missing_one_is_an_error(tmp_path):
    file = tmp_path / "keys"
    file.touch()
    keys = ApiKeys((), file, clock=Clock())
    assert keys.load()
    assert keys.required
    assert keys.find(b"") is None
    with pytest.raises(KeysError, match="the file does not exist"):
        ApiKeys((), tmp_path / "none", clock=Clock()).load()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        (f"{KEY} name=batch\n{OTHER[:5]}", "no line break"),
        (OTHER[:3], "no line break"),
    ],
)
def test_a_file_in_the_middle_of_a_write_keeps_the_old_keys(tmp_path, text, problem):
    file = tmp_path / "keys"
    file.write_text(f"{KEY} name=batch\n{OTHER}")  # as a Secret is, whole and without a line break
    keys = ApiKeys((), file, clock=Clock())
    assert keys.load()
    file.write_text(text)
    with pytest.raises(KeysError, match=problem) as caught:
        keys.load()
    assert KEY not in str(caught.value)
    assert {bool(keys.find(key.encode())) for key in (KEY, OTHER)} == {True}
    assert keys.find(OTHER[:3].encode()) is None
    file.write_text("# no client\n")
    assert keys.load()
    assert keys.required
    assert keys.find(KEY.encode()) is None


@given(
    st.lists(
        st.sampled_from(["start", "end", "concurrency=2", "concurrency=3", "name=b", "name=c"])
    )
)
def test_requests_that_run_while_limits_change_leave_their_key(tmp_path_factory, steps):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n")
    keys = ApiKeys((), file, clock=Clock())
    keys.load()
    running = []
    for count, step in enumerate([*steps, "concurrency=1"]):
        key = keys.find(KEY.encode())
        assert key is not None
        if step == "start":
            use = keys.use(key)
            try:
                use.__enter__()
            except HttpError:
                assert key.running >= key.limits.concurrency > 0
            else:
                running.append(use)
        elif step == "end" and running:
            running.pop(0).__exit__(None, None, None)
        elif "=" in step:
            file.write_text(f"{KEY} {step}\n")
            os.utime(file, ns=(count, count))
            assert keys.load()
    while running:
        running.pop().__exit__(None, None, None)
    key = keys.find(KEY.encode())
    assert key is not None
    assert (key.running, key.limits.concurrency) == (0, 1)
    with keys.use(key):
        pass


def test_a_key_of_the_command_line_keeps_its_limits(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEY} concurrency=1 name=file\n")
    keys = ApiKeys((KEY,), file, KeyLimits(concurrency=5), clock=Clock())
    keys.load()
    key = keys.find(KEY.encode())
    assert key is not None
    assert (key.name, key.limits.concurrency) == ("key 1", 5)


async def test_requests_per_minute():
    async with site(ENGINE, api_keys=(KEY, OTHER), key_requests_per_minute=2) as fleet:

        async def chat(key):
            return await fleet.post("/v1/chat/completions", chat_body("hi"), headers=bearer(key))

        assert [(await chat(KEY))[0] for _ in range(2)] == [200, 200]
        status, body, headers = await chat(KEY)
        assert status == 429
        assert body["error"]["type"] == "rate_limit_error"
        assert 1 <= int(headers["retry-after"]) <= 30
        # The allowance is the key's own.
        assert (await chat(OTHER))[0] == 200


async def test_concurrency():
    slow = [{"name": "a0", "speedup_ratio": 1.0, "prefill_tokens_per_s": 5.0}]
    async with site(slow, api_keys=(KEY,), key_concurrency=1) as fleet:
        body = chat_body("one two three four five six seven eight nine ten")
        first = asyncio.create_task(fleet.post("/v1/chat/completions", body, headers=bearer(KEY)))
        await until(lambda: fleet.engines["a0"].engine.active_requests == 1)
        status, found, headers = await fleet.post("/v1/chat/completions", body, headers=bearer(KEY))
        assert (status, headers["retry-after"]) == (429, "1")
        assert "1 requests of this key are running" in found["error"]["message"]
        first.cancel()
        await fleet.idle()
        key: Any = fleet.frontend.core.keys.find(KEY.encode())
        await until(lambda: key.running == 0)


@given(st.lists(st.floats(0, 100), max_size=60), st.integers(1, 100))
def test_never_more_than_the_rate(steps, most):
    clock = Clock()
    keys = ApiKeys((KEY,), limits=KeyLimits(most), clock=clock)
    key = keys.find(KEY.encode())
    assert key is not None
    started, waits = 0, []
    for step in steps:
        clock.now += step
        try:
            with keys.use(key):
                started += 1
        except HttpError as error:
            waits.append(int(error.headers["retry-after"]))
    assert all(1 <= wait <= 60 for wait in waits)
    assert started <= most + clock.now * most / 60 + 1e-6
    assert key.running == 0


async def test_engines_get_their_key_and_never_the_clients(monkeypatch):
    monkeypatch.setenv("KEY_OF_A1", "sk-engine-two")
    engines = [{"name": "a0"}, {"name": "a1"}]
    specs = {"a1": ",api-key-env=KEY_OF_A1", "a0": ",forward-authorization=true"}
    async with site(engines, specs=specs, api_keys=(KEY,), engine_api_key="sk-engine-one") as fleet:
        upstream = fleet.frontend.core.upstream
        sent = []
        client: Any = upstream._client
        original = client.post

        async def post(url, body, headers, **more):
            sent.append((url, dict(headers)))
            return await original(url, body, headers, **more)

        monkeypatch.setattr(client, "post", post)
        for text in ("a", "b", "c", "d"):
            status, _, _ = await fleet.post(
                "/v1/chat/completions", chat_body(text), headers=bearer(KEY)
            )
            assert status == 200
        expected = {
            fleet.engines["a0"].url: "Bearer sk-engine-one",
            fleet.engines["a1"].url: "Bearer sk-engine-two",
        }
        assert sent
        for url, headers in sent:
            assert headers["authorization"] == expected[url.removesuffix("/v1/chat/completions")]
        # Rows, the view and the log of workers show the variable's name at the most.
        for path in ("/v1/workers", "/v1/view", "/v1/config", "/metrics", "/health"):
            async with fleet.client.get(fleet.url(path)) as answer:
                assert "sk-engine" not in await answer.text()
        assert "sk-engine" not in repr(fleet.frontend.config)
        assert KEY not in repr(fleet.frontend.config)


async def test_workers_of_the_api_get_no_key_and_name_no_variable():
    async with site([{"name": "a0"}, {"name": "a1"}], api_token=ADMIN) as fleet:
        os.environ.setdefault("HOME", "/")
        body = {"url": "http://127.0.0.1:9", "name": "x", "api-key-env": "HOME"}
        status, found, _ = await fleet.post("/v1/workers", body, headers=bearer(ADMIN))
        assert status == 400
        assert "command line" in found["error"]["message"]


def test_a_variable_that_is_not_set():
    async def start():
        frontend = build_frontend(
            FrontendConfig(
                port=0, workers=("http://127.0.0.1:9,name=x,api-key-env=NOT_SET_AT_ALL",)
            )
        )
        await frontend.start()

    with pytest.raises(ValueError, match="NOT_SET_AT_ALL has no valid key"):
        asyncio.run(start())


# -- short keys, and a file that never ends --------------------------------------------------------


async def test_short_keys_are_named_at_the_start_and_never_shown(caplog):
    caplog.set_level(logging.WARNING)
    long = "sk-0123456789abcdef0123"
    async with site(ENGINE, api_keys=(KEY, long), api_token=ADMIN):
        [warning] = [one.getMessage() for one in caplog.records if "guessed" in one.getMessage()]
    assert warning.startswith("API keys with fewer than 16 characters can be guessed: key 1; make")
    assert KEY not in warning
    caplog.clear()
    async with site(ENGINE, api_keys=(long,), api_token=ADMIN):
        assert not any("guessed" in one.getMessage() for one in caplog.records)


def test_a_file_that_became_a_pipe_keeps_the_keys_and_blocks_nothing(tmp_path):
    file = tmp_path / "keys"
    file.write_text("sk-0123456789abcdef0123\n")
    keys = ApiKeys((), file, clock=Clock())
    assert keys.load()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(KeysError, match="is a pipe or a device"):
        keys.load()
    assert keys.find(b"sk-0123456789abcdef0123") is not None
