"""Read the tokenizer files of a model directory, within bounds."""

import hashlib
import json
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
            f"model path {directory} is not a directory; expected one with a tokenizer.json"
        )
    tokenizer = _read(directory / "tokenizer.json", MAX_TOKENIZER_BYTES)
    if tokenizer is None:
        raise TokenizerError(
            f"{directory / 'tokenizer.json'} does not exist; dynctl reads Hugging Face fast "
            "tokenizers (a slow one is converted by AutoTokenizer.from_pretrained(..)"
            ".save_pretrained(..))"
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
        raise TokenizerError(f"{path} does not exist")
    return read_json_object(path)


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
    found = _named_templates(settings.get("chat_template"), path)
    path = directory / "chat_template.json"
    found |= _named_templates(read_json_object(path).get("chat_template"), path)
    path = directory / "chat_template.jinja"
    text = _read(path, MAX_CONFIG_BYTES)
    if text is not None:
        found["default"] = (text, path.name)
    return found


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
