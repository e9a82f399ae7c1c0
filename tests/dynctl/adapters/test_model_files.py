"""A card may make us read what its worker serves, checked, and nothing else."""

import asyncio
import gzip
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from blake3 import blake3

from dynctl.adapters.dynamo import model_files
from dynctl.adapters.dynamo.model_files import (
    ModelFilesError,
    fetch_model_files,
    file_hosts,
    host_of,
)
from dynctl.base.errors import ExitCode, Unreachable, exit_code_of
from dynctl.tokenization import load_tokenizer
from dynctl.wire.dynamo.discovery import CardFile, EndpointId, Instance, ModelCard, parse_entry
from tests.http_servers import served

MODEL = Path(__file__).parents[2] / "captures" / "tiny-model"
BACKEND = EndpointId("dynamo", "backend", "generate")
KINDS = {
    "tokenizer": ("hf_tokenizer_json", "tokenizer.json"),
    "prompt_formatter": ("hf_tokenizer_config_json", "tokenizer_config.json"),
    "model_info": ("hf_config_json", "config.json"),
}


def checksum(data):
    return f"blake3:{blake3(data).hexdigest()}"


def card_of(base, model=MODEL):
    """A card as a worker writes it, its files below ``base``."""
    files = {}
    for part, (kind, name) in KINDS.items():
        data = (model / name).read_bytes()
        files[part] = CardFile(f"{base}/{name}", checksum(data), len(data), kind)
    return ModelCard(BACKEND, 0x2A, "tiny", 16, files=files)


def changed(card, part, **values):
    return replace(card, files={**card.files, part: replace(card.files[part], **values)})


class Server:
    """A worker's metadata server; ``answers`` replaces what a path answers."""

    def __init__(self):
        self.asked = []
        self.answers = {}
        self.base = ""

    async def handle(self, request):
        self.asked.append(request.path)
        name = request.path.rsplit("/", 1)[1]
        if name in self.answers:
            return await self.answers[name](request)
        return web.Response(body=(MODEL / name).read_bytes())


@pytest.fixture
async def server():
    server = Server()
    application = web.Application()
    application.router.add_get("/{path:.*}", server.handle)
    async with served(application, shutdown_timeout=0) as url:
        server.base = f"{url}/v1/metadata"
        yield server


@pytest.fixture
def into(tmp_path):
    return tmp_path / "cache"


def left_behind(into):
    return sorted(path.name for path in into.rglob("*") if path.is_file())


async def test_fetches_what_tokenization_needs(server, into):
    found = await fetch_model_files(card_of(server.base), "127.0.0.1", into)

    assert left_behind(into) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert found.requests == 3
    assert found.received_bytes == sum((MODEL / name).stat().st_size for _, name in KINDS.values())
    assert found.origins["tokenizer.json"] == f"{server.base}/tokenizer.json"
    for path in [into, *into.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    chat = [{"role": "user", "content": "hello world"}]
    tokenizer = load_tokenizer(found.directory)
    assert tokenizer.encode_chat(chat) == load_tokenizer(MODEL).encode_chat(chat)
    assert tokenizer.max_length == 8192


async def test_what_is_here_is_not_fetched_again_and_what_was_spoilt_is(server, into):
    first = await fetch_model_files(card_of(server.base), "127.0.0.1", into)
    server.asked.clear()

    again = await fetch_model_files(card_of(server.base), "127.0.0.1", into)
    assert (again.directory, again.requests, server.asked) == (first.directory, 0, [])
    assert set(again.origins.values()) == {"cache"}

    (first.directory / "tokenizer.json").write_text("{}")
    healed = await fetch_model_files(card_of(server.base), "127.0.0.1", into)
    assert healed.requests == 1
    assert (healed.directory / "tokenizer.json").read_bytes() == (
        MODEL / "tokenizer.json"
    ).read_bytes()


async def test_two_models_do_not_share_a_directory(server, into):
    other = card_of(server.base)
    del other.files["prompt_formatter"]
    first = await fetch_model_files(card_of(server.base), "127.0.0.1", into)
    second = await fetch_model_files(other, "127.0.0.1", into)
    assert first.directory != second.directory
    assert not load_tokenizer(second.directory).has_chat_template


@pytest.mark.parametrize("kind", ["hf_chat_template", "hf_chat_template_json"])
async def test_a_chat_template_of_its_own_is_read_from_the_live_shape_of_a_card(tmp_path, kind):
    """As Dynamo 1.6.1 writes it: one level deeper than the other files."""
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    text = template if kind == "hf_chat_template" else json.dumps({"chat_template": template})
    path = tmp_path / "template"
    path.write_text(text)
    values = {"path": str(path), "checksum": checksum(text.encode()), "size": len(text)}
    tokenizer = (MODEL / "tokenizer.json").read_bytes()
    value = {
        "type": "Model",
        "namespace": "dynamo",
        "component": "backend",
        "endpoint": "generate",
        "instance_id": 1,
        "card_json": {
            "display_name": "tiny",
            "tokenizer": {
                "hf_tokenizer_json": {
                    "path": str(MODEL / "tokenizer.json"),
                    "checksum": checksum(tokenizer),
                    "size": len(tokenizer),
                }
            },
            "chat_template_file": {kind: {"is_custom": False, "file": values}},
        },
    }
    card = parse_entry("v1/mdc/dynamo/backend/generate/1", json.dumps(value).encode())
    assert isinstance(card, ModelCard)
    found = await fetch_model_files(card, "", tmp_path / "cache")
    assert load_tokenizer(found.directory).render_chat([{"role": "user", "content": "x"}]) == "[x]"


# -- what is refused without asking ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("http://169.254.169.254/latest/tokenizer.json", "got '169.254.169.254'"),
        ("http://127.0.0.1.example.com/tokenizer.json", "got '127.0.0.1.example.com'"),
        ("http://127.0.0.1@example.com/tokenizer.json", "credentials"),
        ("http://127.0.0.1\\@example.com/tokenizer.json", "credentials"),
        ("http://example.com#@127.0.0.1/", "got 'example.com'"),
        ("file:///etc/passwd", "expected http or https"),
        ("ftp://127.0.0.1/tokenizer.json", "expected http or https"),
        ("http:///tokenizer.json", "expected http or https"),
        ("http://127.0.0.1:port/tokenizer.json", "invalid URL"),
        ("hf://org/model", "expected http or https"),
    ],
)
async def test_only_the_workers_own_host_is_asked(into, path, expected):
    card = changed(card_of("http://127.0.0.1:9"), "tokenizer", path=path)
    with pytest.raises(ModelFilesError) as caught:
        await fetch_model_files(card, "127.0.0.1", into)
    assert expected in caught.value.message
    assert "card of model 'tiny' (dynamo.backend.generate, instance 2a)" in caught.value.message
    assert "tokenizer.json" in caught.value.message
    assert "--model-path DIR" in caught.value.hint
    assert exit_code_of(caught.value) is ExitCode.USAGE
    assert left_behind(into) == []


def test_a_url_that_no_parser_reads_names_no_host() -> None:
    """It ended the task that follows a Dynamo whose workers are on NATS."""
    card = card_of("http://[")
    assert file_hosts(card) == set()
    assert file_hosts(card_of("http://10.0.0.1:80")) == {"10.0.0.1"}


async def test_an_allowed_host_is_asked_too(server, into):
    with pytest.raises(ModelFilesError, match=r"expected 10\.0\.0\.1, got '127\.0\.0\.1'"):
        await fetch_model_files(card_of(server.base), "10.0.0.1", into)
    assert server.asked == []
    found = await fetch_model_files(
        card_of(server.base), "10.0.0.1", into, allowed_hosts=["127.0.0.1"]
    )
    assert found.requests == 3


async def test_a_transport_without_a_host_allows_none(server, into):
    with pytest.raises(ModelFilesError, match="expected no host"):
        await fetch_model_files(card_of(server.base), "", into)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, "checksum none; expected blake3:"),
        ("", "checksum ''"),
        ("sha256:" + "0" * 64, "checksum 'sha256:"),
        ("blake3:" + "0" * 63, "checksum 'blake3:"),
        ("blake3:" + "G" * 64, "checksum 'blake3:"),
    ],
)
async def test_a_file_needs_a_checksum_that_we_can_check(server, into, stated, expected):
    card = changed(card_of(server.base), "tokenizer", checksum=stated)
    with pytest.raises(ModelFilesError) as caught:
        await fetch_model_files(card, "127.0.0.1", into)
    assert expected in caught.value.message
    assert server.asked == []


async def test_a_stated_size_over_the_limit_is_not_asked_for(server, into):
    card = changed(card_of(server.base), "tokenizer", size=64 * 1024 * 1024 + 1)
    with pytest.raises(ModelFilesError, match="67,108,865 bytes; expected at most 67,108,864"):
        await fetch_model_files(card, "127.0.0.1", into)
    assert server.asked == []


async def test_a_tokenizer_of_another_kind_is_named(into):
    card = changed(card_of("http://127.0.0.1:9"), "tokenizer", kind="tik_token_model")
    with pytest.raises(ModelFilesError, match="'tik_token_model'; expected one of"):
        await fetch_model_files(card, "127.0.0.1", into)
    card = card_of("http://127.0.0.1:9")
    del card.files["tokenizer"]
    with pytest.raises(ModelFilesError, match="has no tokenizer file"):
        await fetch_model_files(card, "127.0.0.1", into)


async def test_a_directory_that_others_can_use_is_refused(server, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(ModelFilesError, match=r"mode 755\); expected one of user"):
        await fetch_model_files(card_of(server.base), "127.0.0.1", shared)
    link = tmp_path / "link"
    (tmp_path / "private").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "private")
    with pytest.raises(ModelFilesError, match="not a private directory"):
        await fetch_model_files(card_of(server.base), "127.0.0.1", link)
    assert server.asked == []


# -- answers that are not what the card says -------------------------------------------------------


async def test_other_bytes_than_stated_are_not_kept(server, into):
    real = (MODEL / "tokenizer.json").read_bytes()

    async def altered(request):
        return web.Response(body=real[:-1] + bytes([real[-1] ^ 1]))

    server.answers["tokenizer.json"] = altered
    card = card_of(server.base)
    with pytest.raises(ModelFilesError) as caught:
        await fetch_model_files(card, "127.0.0.1", into)
    assert f"expected {card.files['tokenizer'].checksum}" in caught.value.message
    assert "got checksum blake3:" in caught.value.message
    assert left_behind(into) == []


@pytest.mark.parametrize(
    ("body", "expected"), [(b"{}", "got 2 bytes; expected"), (b"x" * 20_000, "sends more than")]
)
async def test_other_sizes_than_stated_are_refused(server, into, body, expected):
    async def answer(request):
        return web.Response(body=body)

    server.answers["tokenizer.json"] = answer
    with pytest.raises(ModelFilesError) as caught:
        await fetch_model_files(card_of(server.base), "127.0.0.1", into)
    assert expected in caught.value.message
    assert left_behind(into) == []


async def test_an_endless_answer_ends_at_the_limit(server, into):
    sent = 0

    async def endless(request):
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)
            sent += 65536

    server.answers["tokenizer.json"] = endless
    card = changed(card_of(server.base), "tokenizer", size=None)
    limit = 1024 * 1024
    with pytest.raises(ModelFilesError, match="sends more than the 1,048,576 bytes"):
        await fetch_model_files(card, "127.0.0.1", into, max_file_bytes=limit)
    # What the sockets between us hold comes on top.
    assert sent < limit * 16


async def test_redirects_are_not_followed(server, into):
    async def elsewhere(request):
        raise web.HTTPFound("/v1/metadata/config.json")

    server.answers["tokenizer.json"] = elsewhere
    with pytest.raises(ModelFilesError, match=r"status 302 \(redirects are not followed\)"):
        await fetch_model_files(card_of(server.base), "127.0.0.1", into)
    assert server.asked == ["/v1/metadata/tokenizer.json"]


async def test_compressed_and_missing_answers_are_refused(server, into):
    async def compressed(request):
        assert request.headers["accept-encoding"] == "identity"
        data = gzip.compress((MODEL / "tokenizer.json").read_bytes())
        return web.Response(body=data, headers={"content-encoding": "gzip"})

    server.answers["tokenizer.json"] = compressed
    with pytest.raises(ModelFilesError, match="encoded as 'gzip'"):
        await fetch_model_files(card_of(server.base), "127.0.0.1", into)

    async def missing(request):
        raise web.HTTPNotFound

    server.answers["tokenizer.json"] = missing
    with pytest.raises(ModelFilesError, match="returned status 404; expected 200"):
        await fetch_model_files(card_of(server.base), "127.0.0.1", into)


async def test_a_worker_that_does_not_answer_is_unreachable(server, into):
    never = asyncio.Event()

    async def silent(request):
        await never.wait()

    server.answers["tokenizer.json"] = silent
    with pytest.raises(Unreachable, match=r"tokenizer\.json") as caught:
        await fetch_model_files(card_of(server.base), "127.0.0.1", into, timeout=0.2)
    assert exit_code_of(caught.value) is ExitCode.UNREACHABLE
    assert "--model-path DIR" in caught.value.hint
    never.set()


async def test_a_trickle_runs_out_of_time(server, into):
    async def trickle(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.01)

    server.answers["tokenizer.json"] = trickle
    with pytest.raises(Unreachable, match=r"took longer than 0\.3 s"):
        await fetch_model_files(card_of(server.base), "127.0.0.1", into, timeout=0.3)


async def test_a_closed_port_is_unreachable(server, into):
    with pytest.raises(Unreachable, match="does not respond"):
        await fetch_model_files(card_of("http://127.0.0.1:1"), "127.0.0.1", into)


async def test_proxies_of_the_environment_are_not_used(server, into, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert (await fetch_model_files(card_of(server.base), "127.0.0.1", into)).requests == 3


# -- paths -----------------------------------------------------------------------------------------


async def test_a_path_is_used_where_it_is_here_with_that_checksum(tmp_path, into):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    card = card_of(str(model))
    found = await fetch_model_files(card, "127.0.0.1", into)
    assert found.requests == 0
    assert found.origins["tokenizer.json"] == str(model / "tokenizer.json")
    assert load_tokenizer(found.directory).has_chat_template

    (model / "tokenizer_config.json").write_text("{}" + " " * 337)
    with pytest.raises(ModelFilesError, match=r"tokenizer_config\.json: got checksum"):
        await fetch_model_files(card, "127.0.0.1", tmp_path / "other")
    (model / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelFilesError, match="a local file of 2 bytes; expected 339"):
        await fetch_model_files(card, "127.0.0.1", tmp_path / "other")


async def test_a_path_that_is_not_here_says_so(tmp_path, into):
    for path in ("/no/such/tokenizer.json", "tokenizer.json", "/\0", str(tmp_path)):
        card = changed(card_of(str(MODEL)), "tokenizer", path=path)
        with pytest.raises(ModelFilesError, match="a path on the worker's disk"):
            await fetch_model_files(card, "127.0.0.1", into)


async def test_a_pipe_is_no_file(tmp_path, into):
    os.mkfifo(tmp_path / "tokenizer.json")
    card = changed(card_of(str(MODEL)), "tokenizer", path=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFilesError, match="this machine has no such file"):
        await fetch_model_files(card, "127.0.0.1", into)


# -- hosts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "address", "host"),
    [
        ("tcp", "127.0.0.1:33757/2040a1fd55501308/dynamo/backend/generate", "127.0.0.1"),
        ("tcp", "[fd00::7]:33757/2040a1fd55501308/dynamo/backend/generate", "fd00::7"),
        ("tcp", "worker-0.pods:5/1/a/b/c", "worker-0.pods"),
        ("tcp", "nonsense", ""),
        ("nats_tcp", "dynamo_backend.generate-2040a1fd55501453", ""),
    ],
)
def test_the_host_of_an_instance(transport, address, host):
    assert host_of(Instance(BACKEND, 1, transport, address)) == host


@pytest.mark.parametrize("own", ["::1", "0:0:0:0:0:0:0:1", "[::1]"])
async def test_spellings_of_one_host_are_one(own, into):
    card = card_of("http://[::1]:1")
    with pytest.raises(Unreachable):
        await fetch_model_files(card, own, into)


# -- the bound of the cache ------------------------------------------------------------------------


async def test_the_cache_of_models_has_a_bound(server, into, monkeypatch):
    monkeypatch.setattr(model_files, "MOST_MODELS", 3)
    into.mkdir(mode=0o700)
    other = into / "not-a-model"
    other.mkdir()
    old = []
    for number in range(6):
        directory = into / f"{number:032x}"
        directory.mkdir(mode=0o700)
        (directory / "tokenizer.json").write_text("{}")
        os.utime(directory, (number, number))
        old.append(directory)
    fetched = await fetch_model_files(card_of(server.base), "127.0.0.1", into)
    assert fetched.directory.is_dir()
    assert [one.exists() for one in old] == [False] * 4 + [True] * 2
    assert other.is_dir()


async def test_the_bytes_of_the_cache_have_a_bound(server, into, monkeypatch):
    monkeypatch.setattr(model_files, "MOST_CACHE_BYTES", 10)
    into.mkdir(mode=0o700)
    old = into / ("a" * 32)
    old.mkdir(mode=0o700)
    (old / "tokenizer.json").write_text("{}" * 100)
    os.utime(old, (1, 1))
    fresh = into / ("b" * 32)
    fresh.mkdir(mode=0o700)
    fetched = await fetch_model_files(card_of(server.base), "127.0.0.1", into)
    assert (old.exists(), fresh.exists(), fetched.directory.exists()) == (False, True, True)
