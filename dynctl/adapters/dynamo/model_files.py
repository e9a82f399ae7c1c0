"""The tokenizer files of a worker's card: fetched, verified, kept in a private directory.

Cards are untrusted. A card may refer only to files served by the worker's own host (or by one that
the operator allowed), or to a local file; the card's checksum must match in both cases.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
from blake3 import blake3

from dynctl.base.errors import Unreachable, UsageProblem, network_reason
from dynctl.base.terminal import printable
from dynctl.wire.dynamo.discovery import CardFile, Instance, ModelCard

MAX_FILE_BYTES: Final = 64 * 1024 * 1024
CONNECT_SECONDS: Final = 4.0
#: What the cache holds of models that are not used at the moment.
MOST_MODELS: Final = 64
MOST_CACHE_BYTES: Final = 4 * 1024**3
_IN_USE_S: Final = 60.0
_KEY: Final = re.compile(r"[0-9a-f]{32}")

_NAMES: Final = {
    "hf_config_json": "config.json",
    "hf_tokenizer_json": "tokenizer.json",
    "hf_tokenizer_config_json": "tokenizer_config.json",
    "hf_chat_template": "chat_template.jinja",
    "hf_chat_template_jinja": "chat_template.jinja",
    "hf_chat_template_json": "chat_template.json",
}
"""Dynamo's formats that dynctl supports, and their file names in a model directory."""

_PARTS: Final = ("tokenizer", "prompt_formatter", "chat_template_file", "model_info")
_OPTIONAL: Final = frozenset({"model_info"})
"""It does not affect tokens, so problems with it are ignored."""

_CHUNK: Final = 256 * 1024
_HINT: Final = (
    "copy the model's tokenizer.json and tokenizer_config.json here and set their directory: "
    "--model-path DIR"
)


class ModelFilesError(UsageProblem):
    """A card with invalid files; the message has card, file, what was expected and found."""

    def __init__(self, message: str) -> None:
        super().__init__(message, _HINT)


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A directory for :func:`dynctl.tokenization.load_tokenizer`.

    ``origins``: file name -> the URL or path it came from, or ``cache``. ``requests`` and
    ``received_bytes`` count the requests to the worker and their bytes.
    """

    directory: Path
    origins: Mapping[str, str] = field(default_factory=dict)
    requests: int = 0
    received_bytes: int = 0


def cache_directory() -> Path:
    """Where the files of models are kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dynctl" / "models"


def host_of(instance: Instance) -> str:
    """The host that an instance is served on; empty if its transport has none (NATS)."""
    if instance.transport != "tcp":
        return ""
    address = instance.address.partition("/")[0]
    return address.rpartition(":")[0].strip("[]")


def file_hosts(card: ModelCard) -> set[str]:
    """The hosts of the URLs in a card; a URL that is invalid has none and is never fetched."""
    hosts = set()
    for file in card.files.values():
        if "://" in file.path:
            with suppress(ValueError):
                hosts.add(urlsplit(file.path).hostname)
    return {host for host in hosts if host}


async def fetch_model_files(
    card: ModelCard,
    instance_host: str,
    into: Path,
    *,
    allowed_hosts: Collection[str] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
    timeout: float = 30.0,
) -> FetchedModel:
    """Fetch the tokenizer files into a separate directory below ``into``.

    ``into`` is created with mode 0700 or must be private to the user already. Files with matching
    checksums are not fetched again. URLs are fetched only from ``instance_host`` and
    ``allowed_hosts``, without redirects and without the environment's proxies; a path is
    used if a local file has that checksum. ``timeout``: seconds for each file.

    Raises ModelFilesError for an invalid card or response, Unreachable for a worker that does not
    respond.
    """
    wanted = _token_files(card)
    for file in wanted.values():
        _check_stated(card, file, max_file_bytes)
    hosts = {_canonical(host) for host in (instance_host, *allowed_hosts) if host}
    directory = _private(_private(into) / _key(wanted))
    origins: dict[str, str] = {}
    requests = received = 0
    limits = httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout))
    async with httpx.AsyncClient(timeout=limits, trust_env=False) as client:
        for name, file in wanted.items():
            target = directory / name
            if _checksum_of_file(target, max_file_bytes) == file.checksum:
                origins[name] = "cache"
                continue
            url = _url(card, file, hosts)
            if url is None:
                _write(target, file, card, _read_local(card, file, max_file_bytes))
                origins[name] = file.path
                continue
            requests += 1
            try:
                async with asyncio.timeout(timeout):
                    chunks = _download(client, card, file, url, max_file_bytes)
                    async with aclosing(chunks):
                        data = [chunk async for chunk in chunks]
            except TimeoutError:
                raise Unreachable(
                    f"{_file_title(card, file)}: {_public(url)} took longer than {timeout:g} s",
                    _HINT,
                ) from None
            received += sum(map(len, data))
            _write(target, file, card, iter(data))
            origins[name] = _public(url)
    _make_room(into, directory)
    return FetchedModel(directory, origins, requests, received)


# -- what the card asks for ------------------------------------------------------------------------


def _token_files(card: ModelCard) -> dict[str, CardFile]:
    """File name -> file, for the parts of the card that affect tokens."""
    wanted: dict[str, CardFile] = {}
    for part in _PARTS:
        file = card.files.get(part)
        if file is None:
            if part == "tokenizer":
                raise ModelFilesError(f"{_card(card)} has no tokenizer file")
            continue
        name = _NAMES.get(file.kind)
        if name is None:
            if part in _OPTIONAL:
                continue
            raise ModelFilesError(
                f"{_file_title(card, file)}: its {part} is a {file.kind[:40]!r}; expected one of "
                f"{', '.join(_NAMES)}"
            )
        wanted[name] = file
    return wanted


def _check_stated(card: ModelCard, file: CardFile, limit: int) -> None:
    algorithm, _, digest = (file.checksum or "").partition(":")
    if algorithm != "blake3" or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        stated = "none" if file.checksum is None else repr(file.checksum[:80])
        raise ModelFilesError(
            f"{_file_title(card, file)}: checksum {stated}; expected blake3: and 64 hex digits"
        )
    if file.size is not None and not 0 <= file.size <= limit:
        raise ModelFilesError(
            f"{_file_title(card, file)}: {file.size:,} bytes; expected at most {limit:,}"
        )


def _url(card: ModelCard, file: CardFile, hosts: Collection[str]) -> httpx.URL | None:
    """The URL to fetch, or None for a path. Raises for a URL that is not allowed.

    The checked object itself is fetched, so that a second parser cannot read it differently.
    """
    if "://" not in file.path:
        return None
    try:
        url = httpx.URL(file.path)
    except httpx.InvalidURL:
        raise ModelFilesError(f"{_file_title(card, file)}: invalid URL") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ModelFilesError(
            f"{_file_title(card, file)}: {_public(url)} cannot be fetched; expected http or "
            "https; to read the model's files from a directory, set --model-path DIR"
        )
    if url.userinfo:
        raise ModelFilesError(f"{_file_title(card, file)}: {_public(url)} has credentials")
    host = url.raw_host.decode("ascii", "replace")
    if _canonical(host) not in hosts:
        allowed = " or ".join(sorted(hosts)) or "no host"
        raise ModelFilesError(
            f"{_file_title(card, file)}: {_public(url)} is not on the worker's own host; expected "
            f"{allowed}, got {host[:200]!r}"
        )
    return url


def _canonical(host: str) -> str:
    """One spelling of a host: lower case, no brackets or trailing dot, addresses as numbers."""
    bare = host.strip().strip("[]").rstrip(".").lower()
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return bare
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


# -- bytes -----------------------------------------------------------------------------------------


async def _download(
    client: httpx.AsyncClient, card: ModelCard, file: CardFile, url: httpx.URL, limit: int
) -> AsyncGenerator[bytes, None]:
    """The file's bytes, at most its stated size and the limit."""
    # A compressed body could exceed any bound in one step.
    headers = {"accept-encoding": "identity"}
    most = limit if file.size is None else file.size
    received = 0
    try:
        async with client.stream("GET", url, headers=headers) as response:
            if response.status_code != 200:
                redirects = " (redirects are not followed)" if response.is_redirect else ""
                raise ModelFilesError(
                    f"{_file_title(card, file)}: {_public(url)} returned status "
                    f"{response.status_code}{redirects}; expected 200"
                )
            encoding = response.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise ModelFilesError(
                    f"{_file_title(card, file)}: {_public(url)} is encoded as {encoding[:40]!r}; "
                    "expected no encoding"
                )
            async for chunk in response.aiter_raw(_CHUNK):
                received += len(chunk)
                if received > most:
                    raise ModelFilesError(
                        f"{_file_title(card, file)}: {_public(url)} sends more than the "
                        f"{most:,} bytes expected"
                    )
                yield chunk
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(
            f"{_file_title(card, file)}: {_public(url)} does not respond: {network_reason(error)}",
            _HINT,
        ) from error


def _read_local(card: ModelCard, file: CardFile, limit: int) -> Iterator[bytes]:
    """A path of the card, on the worker's disk; a local file may have it too."""
    path = Path(file.path)
    missing = ModelFilesError(
        f"{_file_title(card, file)}: {file.path[:300]!r} is a path on the worker's disk, and "
        "this machine has no such file; expected one, or a URL (a worker serves its files if "
        "DYN_SYSTEM_PORT is set)"
    )
    if not path.is_absolute() or "\0" in file.path:
        raise missing
    try:
        # Not blocking: the local path may be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise missing from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise missing
    with os.fdopen(descriptor, "rb") as opened:
        if found.st_size > limit or (file.size is not None and found.st_size != file.size):
            expected = f"at most {limit:,}" if file.size is None else f"{file.size:,}"
            raise ModelFilesError(
                f"{_file_title(card, file)}: {file.path[:300]!r} is a local file of "
                f"{found.st_size:,} bytes; expected {expected}"
            )
        # Bounded again: the file may grow during the read.
        return iter([opened.read(limit)])


def _write(target: Path, file: CardFile, card: ModelCard, chunks: Iterator[bytes]) -> None:
    """Write the whole file under its final name, or nothing; verified before."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    digest = blake3()
    size = 0
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as output:
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                output.write(chunk)
        if file.size is not None and size != file.size:
            raise ModelFilesError(
                f"{_file_title(card, file)}: got {size:,} bytes; expected {file.size:,}"
            )
        got = f"blake3:{digest.hexdigest()}"
        if got != file.checksum:
            raise ModelFilesError(
                f"{_file_title(card, file)}: got checksum {got}; expected {file.checksum}"
            )
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _checksum_of_file(path: Path, limit: int) -> str | None:
    """The checksum of a cached file; None if it is missing or invalid."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError:
        return None
    return None if len(data) > limit else f"blake3:{blake3(data).hexdigest()}"


def _private(directory: Path) -> Path:
    """Create the directory if needed; raises unless it belongs to the user with mode 0700."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ModelFilesError(
            f"{directory} is not a private directory (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}); expected one of user {os.getuid()} with mode 700"
        )
    return directory


def _make_room(into: Path, used: Path) -> None:
    """Remove the models that were not used for the longest time, down to the bounds.

    ``used``: the model of now; it counts as the newest and stays, as do those of the last minute,
    which another process may be about to read.
    """
    with contextlib.suppress(OSError):
        os.utime(used)
    now = time.time()
    models = sorted(_cached_models(into), reverse=True)
    total = 0
    for place, (last_used, size, path) in enumerate(models):
        total += size
        kept = path == used or now - last_used < _IN_USE_S
        if not kept and (place >= MOST_MODELS or total > MOST_CACHE_BYTES):
            shutil.rmtree(path, ignore_errors=True)


def _cached_models(into: Path) -> Iterator[tuple[float, int, Path]]:
    """When each model of the cache was used last, its bytes and its directory."""
    with contextlib.suppress(OSError):
        for path in into.iterdir():
            if _KEY.fullmatch(path.name) is None:
                continue
            with contextlib.suppress(OSError):
                size = sum(file.lstat().st_size for file in path.iterdir())
                yield path.lstat().st_mtime, size, path


def _key(wanted: Mapping[str, CardFile]) -> str:
    """One directory for each set of contents, so that the cache never mixes two models."""
    checksums = "\n".join(f"{name} {file.checksum}" for name, file in sorted(wanted.items()))
    return hashlib.blake2b(checksums.encode(), digest_size=16).hexdigest()


# -- words -----------------------------------------------------------------------------------------


def _card(card: ModelCard) -> str:
    return f"card of model {card.name[:100]!r} ({card.endpoint}, instance {card.instance_id:x})"


def _file_title(card: ModelCard, file: CardFile) -> str:
    return f"{_card(card)}, file {_NAMES.get(file.kind, file.kind[:40])}"


def _public(url: httpx.URL) -> str:
    """The URL without credentials and query."""
    host = url.netloc.decode("ascii", "replace")
    shown = f"{url.scheme}://{host}{url.path}"
    return printable(shown)[:300]
