"""Read the tokenizer files of a model directory, within bounds."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynctl.base.errors import file_problem
from dynctl.base.files import read_file
from dynctl.tokenization.errors import TokenizerError

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_CONFIG_BYTES = 4 * 1024 * 1024
# Some tokenizer_config.json have 1e30 for "no limit".
_NO_LIMIT = 1_000_000_000
#: A model's name on the Hugging Face hub: ``org/name``, or ``name`` of the oldest ones.
_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}")
_MOST_SNAPSHOTS = 64
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The content of a model directory.

    ``templates``: name (``default``, ``tool_use``, ...) -> (source, file). ``special_tokens`` has
    ``bos_token``, ``eos_token`` ... as text. ``max_length`` is in tokens, ``None`` if no file has
    it. ``fingerprint`` is equal for two directories with equal tokenization.
    """

    directory: Path
    tokenizer_json: str
    templates: Mapping[str, tuple[str, str]]
    special_tokens: Mapping[str, str]
    eos_token_ids: frozenset[int]
    max_length: int | None
    fingerprint: str


def read_model_files(directory: Path) -> ModelFiles:
    """Read a directory. Raises :class:`TokenizerError` with the missing or invalid file."""
    if not directory.is_dir():
        raise TokenizerError(
            f"model path {directory} is not a directory; expected one with a tokenizer.json; "
            + getting_files(directory, "tokenizer.json")
        )
    tokenizer = _read(directory / "tokenizer.json", MAX_TOKENIZER_BYTES)
    if tokenizer is None:
        snapshot = _snapshot(directory, "tokenizer.json")
        raise TokenizerError(
            f"{directory / 'tokenizer.json'} does not exist; "
            + (
                f"the model's files are in {snapshot}"
                if snapshot is not None
                else "dynctl reads Hugging Face fast tokenizers (a slow one is converted by "
                "AutoTokenizer.from_pretrained(..).save_pretrained(..))"
            )
        )
    settings = read_json_object(directory / "tokenizer_config.json")
    model = read_json_object(directory / "config.json")
    templates = _templates(directory, settings)
    special = {
        name: text
        for name in _SPECIAL
        if (text := _token_text(settings.get(name), directory, name)) is not None
    }
    return ModelFiles(
        directory=directory,
        tokenizer_json=tokenizer,
        templates=templates,
        special_tokens=special,
        eos_token_ids=_ids(model.get("eos_token_id")),
        max_length=_max_length(settings, model),
        fingerprint=_fingerprint(tokenizer, templates, special),
    )


def read_model_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a model directory; raises TokenizerError where there is none."""
    path = directory / "config.json"
    if not path.is_file():
        raise TokenizerError(f"{path} does not exist; {getting_files(directory, path.name)}")
    return read_json_object(path)


def getting_files(path: Path, file: str) -> str:
    """How to get a directory with ``file`` where ``path`` is not one, as a part of a sentence.

    ``path`` may be a model's name on the Hugging Face hub. Its files are looked up in the cache of
    this host; nothing is downloaded.
    """
    snapshot = _snapshot(path, file)
    if snapshot is not None:
        return f"the model's files are in {snapshot}"
    name = str(path)
    if path.exists() or _HUB_NAME.fullmatch(name) is None:
        return "hf download ORG/NAME --local-dir DIR makes a directory with the files of a model"
    for cache in _hub_caches():
        snapshot = _snapshot(cache / f"models--{name.replace('/', '--')}", file)
        if snapshot is not None:
            return f"the files of {name} are in the cache of this host: {snapshot}"
    return (
        f"for the model {name} of the Hugging Face hub, get its files with hf download {name} "
        "--local-dir DIR, and specify DIR; dynctl downloads none"
    )


def _hub_caches() -> list[Path]:
    """The directories in which the tools of Hugging Face keep models, the one in use first."""
    named = [os.environ.get(key) for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")]
    home = os.environ.get("HF_HOME")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    caches = [*named, home and f"{home}/hub", f"{base}/huggingface/hub"]
    return [Path(os.path.expanduser(cache)) for cache in caches if cache]


def _snapshot(model: Path, file: str) -> Path | None:
    """The snapshot with ``file`` in a model's directory of that cache: of the branch main, else the
    newest; None where there is none."""
    try:
        main = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    try:
        snapshots = [path.parent for path in model.glob(f"snapshots/*/{file}")][:_MOST_SNAPSHOTS]
        return max(
            snapshots, key=lambda path: (path.name == main, path.stat().st_mtime), default=None
        )
    except OSError:
        return None


def _read(path: Path, limit: int) -> str | None:
    """The text of a file, None if it does not exist."""
    try:
        data = read_file(path, limit, pipe=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {file_problem(error)}") from error
    if len(data) > limit:
        raise TokenizerError(f"{path} is larger than {limit} bytes, the limit for this file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 (byte {error.start})") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file, empty if it does not exist. Raises :class:`TokenizerError`."""
    text = _read(path, MAX_CONFIG_BYTES)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} contains a {type(value).__name__}; expected a JSON object")
    return value


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The chat templates; as in Hugging Face, separate files override tokenizer_config.json."""
    path = directory / "tokenizer_config.json"
    templates = _named_templates(settings.get("chat_template"), path)
    path = directory / "chat_template.json"
    templates |= _named_templates(read_json_object(path).get("chat_template"), path)
    path = directory / "chat_template.jinja"
    text = _read(path, MAX_CONFIG_BYTES)
    if text is not None:
        templates["default"] = (text, path.name)
    return templates


def _named_templates(value: object, path: Path) -> dict[str, tuple[str, str]]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": (value, path.name)}
    if isinstance(value, list):
        named: dict[str, tuple[str, str]] = {}
        for entry in value:
            match entry:
                case {"name": str(name), "template": str(template)}:
                    named[name] = (template, path.name)
                case _:
                    raise TokenizerError(
                        f"{path}: an entry of chat_template is not "
                        '{"name": "...", "template": "..."}'
                    )
        return named
    raise TokenizerError(
        f"{path}: chat_template is {type(value).__name__}; expected text or a list of named ones"
    )


def _token_text(value: object, directory: Path, name: str) -> str | None:
    match value:
        case None:
            return None
        case str(text) | {"content": str(text)}:
            return text
    raise TokenizerError(
        f"{directory / 'tokenizer_config.json'}: {name} is neither text nor a token object"
    )


def _ids(value: object) -> frozenset[int]:
    items = value if isinstance(value, list) else [value]
    return frozenset(i for i in items if type(i) is int and i >= 0)


def _max_length(settings: Mapping[str, Any], model: Mapping[str, Any]) -> int | None:
    nested = model.get("text_config")
    candidates = [
        settings.get("model_max_length"),
        model.get("max_position_embeddings"),
        nested.get("max_position_embeddings") if isinstance(nested, dict) else None,
    ]
    limits = [int(n) for n in candidates if isinstance(n, int | float) and 0 < n < _NO_LIMIT]
    return min(limits, default=None)


def _fingerprint(
    tokenizer: str, templates: Mapping[str, tuple[str, str]], special: Mapping[str, str]
) -> str:
    digest = hashlib.blake2b(digest_size=16)
    sources = {name: source for name, (source, _) in templates.items()}
    for part in (
        tokenizer,
        json.dumps(sources, sort_keys=True),
        json.dumps(special, sort_keys=True),
    ):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
