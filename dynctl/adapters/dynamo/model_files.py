"""A model's tokenizer files, as a worker's card names them: fetched, checked, kept privately.

A card is what a stranger wrote into discovery. It may make us read only what is served by the
worker's own host (or by one that the operator allowed), or a file of ours that is exactly the one
it describes; the checksum that it states has to hold in both cases.
"""

import asyncio
import hashlib
import ipaddress
import os
import secrets
import stat
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
from blake3 import blake3

from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.wire.dynamo.discovery import CardFile, Instance, ModelCard

MAX_FILE_BYTES: Final = 64 * 1024 * 1024
CONNECT_SECONDS: Final = 4.0

_NAMES: Final = {
    "hf_config_json": "config.json",
    "hf_tokenizer_json": "tokenizer.json",
    "hf_tokenizer_config_json": "tokenizer_config.json",
    "hf_chat_template": "chat_template.jinja",
    "hf_chat_template_jinja": "chat_template.jinja",
    "hf_chat_template_json": "chat_template.json",
}
"""Dynamo's formats that dynctl reads, and what such a file is called in a model directory."""

_PARTS: Final = ("tokenizer", "prompt_formatter", "chat_template_file", "model_info")
_OPTIONAL: Final = frozenset({"model_info"})
"""Its absence changes no token, so what we cannot read of it is no reason to stop."""

_CHUNK: Final = 256 * 1024
_HINT: Final = (
    "copy the model's tokenizer.json and tokenizer_config.json here and give their directory: "
    "--model-path DIR"
)


class ModelFilesError(UsageProblem):
    """A card whose files cannot be used; the message names card, file, expected and got."""

    def __init__(self, message: str) -> None:
        super().__init__(message, _HINT)


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A directory for :func:`dynctl.tokenization.load_tokenizer`.

    ``origins``: file name -> the URL or path it came from, or ``cache``. ``requests`` and
    ``received_bytes`` say what asking the worker took.
    """

    directory: Path
    origins: Mapping[str, str] = field(default_factory=dict)
    requests: int = 0
    received_bytes: int = 0


def host_of(instance: Instance) -> str:
    """The host that an instance is served on; empty where its transport names none (NATS)."""
    if instance.transport != "tcp":
        return ""
    address = instance.address.partition("/")[0]
    return address.rpartition(":")[0].strip("[]")


async def fetch_model_files(
    card: ModelCard,
    instance_host: str,
    into: Path,
    *,
    allowed_hosts: Collection[str] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
    timeout: float = 30.0,
) -> FetchedModel:
    """Bring what tokenization needs into a directory of its own below ``into``.

    ``into`` is made with mode 0700 or has to be private to us already. Files that are there and
    whose checksums hold are not fetched again. URLs are asked on ``instance_host`` and
    ``allowed_hosts`` alone, without redirects and without the environment's proxies; a path is
    used if that file is here with that checksum. ``timeout``: seconds a file may take.

    Raises ModelFilesError for what the card or an answer says, Unreachable for a worker that does
    not answer.
    """
    wanted = _wanted(card)
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
                    f"{_called(card, file)}: {_shown(url)} took longer than {timeout:g} s", _HINT
                ) from None
            received += sum(map(len, data))
            _write(target, file, card, iter(data))
            origins[name] = _shown(url)
    return FetchedModel(directory, origins, requests, received)


# -- what the card asks for ------------------------------------------------------------------------


def _wanted(card: ModelCard) -> dict[str, CardFile]:
    """File name -> file, for the parts of the card that decide about tokens."""
    wanted: dict[str, CardFile] = {}
    for part in _PARTS:
        file = card.files.get(part)
        if file is None:
            if part == "tokenizer":
                raise ModelFilesError(f"{_card(card)} names no tokenizer file")
            continue
        name = _NAMES.get(file.kind)
        if name is None:
            if part in _OPTIONAL:
                continue
            raise ModelFilesError(
                f"{_called(card, file)}: its {part} is a {file.kind[:40]!r}; expected one of "
                f"{', '.join(_NAMES)}"
            )
        wanted[name] = file
    return wanted


def _check_stated(card: ModelCard, file: CardFile, limit: int) -> None:
    algorithm, _, digest = (file.checksum or "").partition(":")
    if algorithm != "blake3" or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        stated = "none" if file.checksum is None else repr(file.checksum[:80])
        raise ModelFilesError(
            f"{_called(card, file)}: checksum {stated}; expected blake3: and 64 hex digits"
        )
    if file.size is not None and not 0 <= file.size <= limit:
        raise ModelFilesError(
            f"{_called(card, file)}: {file.size:,} bytes; expected at most {limit:,}"
        )


def _url(card: ModelCard, file: CardFile, hosts: Collection[str]) -> httpx.URL | None:
    """The URL to ask, or None for a path. Raises for a URL that must not be asked.

    The very object that is judged is asked, so that no second parser can read it differently.
    """
    if "://" not in file.path:
        return None
    try:
        url = httpx.URL(file.path)
    except httpx.InvalidURL:
        raise ModelFilesError(f"{_called(card, file)}: its URL cannot be read") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ModelFilesError(
            f"{_called(card, file)}: {_shown(url)} cannot be fetched; expected http or https"
        )
    if url.userinfo:
        raise ModelFilesError(f"{_called(card, file)}: {_shown(url)} carries credentials")
    host = url.raw_host.decode("ascii", "replace")
    if _canonical(host) not in hosts:
        allowed = " or ".join(sorted(hosts)) or "no host"
        raise ModelFilesError(
            f"{_called(card, file)}: {_shown(url)} is not on the worker's own host; expected "
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
    """The file's bytes, never more than stated or allowed."""
    # A compressed body could grow past any bound between two looks at it.
    headers = {"accept-encoding": "identity"}
    most = limit if file.size is None else file.size
    received = 0
    try:
        async with client.stream("GET", url, headers=headers) as response:
            if response.status_code != 200:
                redirects = " (redirects are not followed)" if response.is_redirect else ""
                raise ModelFilesError(
                    f"{_called(card, file)}: {_shown(url)} answered {response.status_code}"
                    f"{redirects}; expected 200"
                )
            encoding = response.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise ModelFilesError(
                    f"{_called(card, file)}: {_shown(url)} is encoded as {encoding[:40]!r}; "
                    "expected it as it is"
                )
            async for chunk in response.aiter_raw(_CHUNK):
                received += len(chunk)
                if received > most:
                    raise ModelFilesError(
                        f"{_called(card, file)}: {_shown(url)} sends more than the "
                        f"{most:,} bytes expected"
                    )
                yield chunk
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise Unreachable(
            f"{_called(card, file)}: {_shown(url)} does not answer: {reason}", _HINT
        ) from error


def _read_local(card: ModelCard, file: CardFile, limit: int) -> Iterator[bytes]:
    """A path of the card, which is a worker's disk and only perhaps ours too."""
    path = Path(file.path)
    missing = ModelFilesError(
        f"{_called(card, file)}: {file.path[:300]!r} is a path on the worker's disk, and no such "
        "file is here; expected one, or a URL (a worker serves its files if DYN_SYSTEM_PORT is "
        "set)"
    )
    if not path.is_absolute() or "\0" in file.path:
        raise missing
    try:
        # Not blocking: the path may be a pipe here.
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
                f"{_called(card, file)}: {file.path[:300]!r} here has {found.st_size:,} bytes; "
                f"expected {expected}"
            )
        # Bounded again: it may grow while it is read.
        return iter([opened.read(limit)])


def _write(target: Path, file: CardFile, card: ModelCard, chunks: Iterator[bytes]) -> None:
    """All of it under its final name, or nothing; checked before it has that name."""
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
                f"{_called(card, file)}: got {size:,} bytes; expected {file.size:,}"
            )
        got = f"blake3:{digest.hexdigest()}"
        if got != file.checksum:
            raise ModelFilesError(
                f"{_called(card, file)}: got checksum {got}; expected {file.checksum}"
            )
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _checksum_of_file(path: Path, limit: int) -> str | None:
    """The checksum of a file of our own cache; None if there is none to use."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError:
        return None
    return None if len(data) > limit else f"blake3:{blake3(data).hexdigest()}"


def _private(directory: Path) -> Path:
    """The directory, made if need be; raises unless it is ours and nobody else can use it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ModelFilesError(
            f"{directory} is no private directory (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}); expected one of user {os.getuid()} with mode 700"
        )
    return directory


def _key(wanted: Mapping[str, CardFile]) -> str:
    """One directory for one set of contents, so that a cache never mixes two models."""
    told = "\n".join(f"{name} {file.checksum}" for name, file in sorted(wanted.items()))
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


# -- words -----------------------------------------------------------------------------------------


def _card(card: ModelCard) -> str:
    return f"card of model {card.name[:100]!r} ({card.endpoint}, instance {card.instance_id:x})"


def _called(card: ModelCard, file: CardFile) -> str:
    return f"{_card(card)}, file {_NAMES.get(file.kind, file.kind[:40])}"


def _shown(url: httpx.URL) -> str:
    """Without credentials and query; a card's text may hold either."""
    host = url.netloc.decode("ascii", "replace")
    shown = f"{url.scheme}://{host}{url.path}"
    return "".join(c if c.isprintable() else "?" for c in shown)[:300]
