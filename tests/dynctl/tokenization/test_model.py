"""ModelTokenizer and its model directory."""

import asyncio
import importlib.util
import json
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.tokenization import (
    DEMO_MODEL_DIR,
    PromptError,
    PromptTooLongError,
    TemplateError,
    TokenizerError,
    load_tokenizer,
    read_model_config,
)
from dynctl.tokenization import model as module

DEMO = load_tokenizer(DEMO_MODEL_DIR)
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def directory(tmp_path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))


def configure(directory: Path, **changes) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@given(st.text())
def test_round_trip_of_text(text):
    assert DEMO.decode(DEMO.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_skipped_by_default():
    ids = DEMO.encode("a<|im_end|>b")
    assert DEMO.decode(ids) == "ab"
    assert DEMO.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


async def test_async_encoding_gives_the_same_ids():
    for text in ("short", "long and varied text. " * 1000):
        messages = [{"role": "user", "content": text}]
        assert list(await DEMO.encode_chat_async(messages)) == DEMO.encode_chat(messages)
        assert list(await DEMO.encode_prompt_async(text)) == DEMO.encode_prompt(text)


def test_threads_share_one_tokenizer():
    expected = DEMO.encode_chat(USER)
    wrong: list[object] = []

    def work() -> None:
        for _ in range(50):
            ids = DEMO.encode_chat(USER)
            if ids != expected:
                wrong.append(ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_long_prompt_is_refused_before_any_work():
    tokenizer = load_tokenizer(DEMO_MODEL_DIR, max_prompt_chars=100)
    with pytest.raises(PromptTooLongError, match="101 characters, the limit is 100"):
        tokenizer.encode_prompt("x" * 101)
    with pytest.raises(PromptTooLongError):
        tokenizer.render_chat([{"role": "user", "content": [{"type": "text", "text": "x" * 101}]}])


def test_a_lone_surrogate_is_a_prompt_error():
    with pytest.raises(PromptError):
        DEMO.encode("\ud800")


@pytest.mark.parametrize("ids", [[-1], [2**32], ["x"]])
def test_invalid_ids_are_a_prompt_error(ids):
    with pytest.raises(PromptError, match="token ids"):
        DEMO.decode(ids)


def test_the_demo_tokenizer_matches_its_corpus():
    path = Path(__file__).parents[2] / "fixtures" / "demo_model" / "train.py"
    spec = importlib.util.spec_from_file_location("train_demo_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(module.train().to_str()) == json.loads(
        (DEMO_MODEL_DIR / "tokenizer.json").read_text("utf-8")
    )


def test_different_tokenizers_have_different_fingerprints(directory):
    assert load_tokenizer(directory).fingerprint == DEMO.fingerprint
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(directory).fingerprint != DEMO.fingerprint


def test_templates_come_from_three_places(directory):
    def rendered(**options) -> str:
        return load_tokenizer(directory).render_chat(USER, **options)

    configure(directory, chat_template="from config")
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    (directory / "chat_template.jinja").write_text("from jinja")
    assert rendered() == "from jinja"
    (directory / "chat_template.jinja").unlink()
    assert rendered() == "from json"
    (directory / "chat_template.json").unlink()
    assert rendered() == "from config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    configure(directory, chat_template=named)
    assert rendered() == "plain"
    assert rendered(tools=[{"type": "function"}]) == "tools"


def test_special_tokens_reach_the_template(directory):
    bos = {"content": "<|endoftext|>", "lstrip": False, "special": True}
    configure(directory, bos_token=bos)
    (directory / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode_chat(USER) == [0, 2]


def test_the_error_without_a_chat_template_has_a_hint(directory):
    (directory / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(directory)
    assert not tokenizer.has_chat_template
    with pytest.raises(PromptError, match=r"chat_template\.jinja.*/v1/completions"):
        tokenizer.render_chat(USER)


def test_the_truncation_of_a_training_run_is_ignored(directory):
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(content))
    assert len(load_tokenizer(directory).encode("one two three four five")) > 2


def test_only_the_tokenizer_must_exist(directory):
    for path in directory.iterdir():
        if path.name != "tokenizer.json":
            path.unlink()
    tokenizer = load_tokenizer(directory)
    assert tokenizer.max_length is None
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.encode("hello") == DEMO.encode("hello")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "does not exist"),
        ("tokenizer.json", b"{}", "is not a tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "not UTF-8"),
        ("tokenizer_config.json", b"{", "is not JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "is not JSON"),
        ("tokenizer_config.json", b"[]", "expected a JSON object"),
        ("tokenizer_config.json", b'{"eos_token": 7}', "eos_token"),
        ("tokenizer_config.json", b'{"chat_template": 7}', "chat_template is int"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": 1}]}', "an entry of chat_template"),
        ("config.json", b" " * (4 * 1024 * 1024 + 1), "larger than"),
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_a_broken_file_is_named(directory, file, content, message):
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(directory)
    assert file in str(caught.value)


class Panic(BaseException):
    """As Rust code that panics."""


Panic.__module__ = "pyo3_runtime"


def test_a_panic_of_native_code_is_an_error_of_the_request(monkeypatch):
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)

    class Panics:
        def encode(self, *values, **options):
            raise Panic("index out of bounds")

        decode = encode_batch_fast = encode

    monkeypatch.setattr(tokenizer, "_reference", Panics())
    monkeypatch.setattr(tokenizer, "encoder", Panics())
    with pytest.raises(PromptError, match="cannot be encoded"):
        tokenizer.encode("hi")
    monkeypatch.setattr(tokenizer, "_tokenizer", Panics())
    with pytest.raises(PromptError, match="decoder failed"):
        tokenizer.decode([1, 2])


def test_an_interruption_is_not_a_panic(monkeypatch):
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)

    class Interrupted:
        def encode(self, text, *, add_special_tokens):
            raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "_reference", Interrupted())
    monkeypatch.setattr(tokenizer, "encoder", tokenizer._reference)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("hi")


def test_a_broken_template_is_an_error_at_load(directory):
    (directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(TemplateError, match=r"chat_template\.jinja.*line 1"):
        load_tokenizer(directory)


def test_a_path_that_is_not_a_directory(tmp_path):
    with pytest.raises(TokenizerError, match="is not a directory"):
        load_tokenizer(tmp_path / "nowhere")


def in_the_cache(hub, name, revision, **files):
    """The files of a model in a cache of the Hugging Face hub; revision main."""
    model = hub / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for file, text in files.items():
        (snapshot / f"{file}.json").write_text(text)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(revision)
    return snapshot


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    """An environment without a cache of the hub."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["nvidia/Llama-3.1-8B-Instruct-FP8", "org/name", "gpt2"])
@pytest.mark.parametrize("read", [load_tokenizer, read_model_config])
def test_a_name_of_the_hub_says_how_to_get_its_files(no_cache, name, read):
    with pytest.raises(TokenizerError, match=f"hf download {name} --local-dir DIR"):
        read(Path(name))


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("HF_HOME", "hub"),
        ("HF_HUB_CACHE", "."),
        ("HUGGINGFACE_HUB_CACHE", "."),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ],
)
@pytest.mark.parametrize("read", [load_tokenizer, read_model_config])
def test_files_in_the_cache_of_the_hub_are_found(
    no_cache, monkeypatch, tmp_path, variable, folder, read
):
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    hub = tmp_path / "cache" / folder
    in_the_cache(hub, "org/name", "old", tokenizer="{}", config="{}")
    snapshot = in_the_cache(hub, "org/name", "new", tokenizer="{}", config="{}")
    with pytest.raises(TokenizerError) as caught:
        read(Path("org/name"))
    assert str(caught.value).endswith(f"in the cache of this host: {hub.resolve() / snapshot}")
    with pytest.raises(TokenizerError, match=f"the model's files are in {snapshot}"):
        read(hub / "models--org--name")


def test_a_snapshot_without_the_file_is_not_named(no_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    in_the_cache(tmp_path / "hub", "org/name", "new", config="{}")
    with pytest.raises(TokenizerError, match="hf download org/name --local-dir DIR"):
        load_tokenizer("org/name")


async def test_long_prompts_are_encoded_in_a_bounded_number_of_threads(monkeypatch):
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    running, most, here = 0, 0, threading.get_ident()
    lock, both = threading.Lock(), threading.Event()
    encode = tokenizer.encode_flat

    def encode_flat(text, **options):
        nonlocal running, most
        assert threading.get_ident() != here
        with lock:
            running += 1
            most = max(most, running)
            if running >= module.THREADS:
                both.set()
        assert both.wait(60)  # until all threads are busy
        with lock:
            running -= 1
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode_flat", encode_flat)
    text = "word " * tokenizer.encoder.thread_chars
    asked = [tokenizer.encode_prompt_async(text) for _ in range(3 * module.THREADS)]
    found = await asyncio.gather(*asked)
    assert most == module.THREADS
    assert all(ids == found[0] for ids in found)
