"""Worker specs: ``URL[,key=value]...`` on the command line, the same keys in YAML.

``http://127.0.0.1:8001,name=prefill-a0,role=prefill,zone=zone-a,kv-events=tcp://127.0.0.1:5557``

Keys that are not reserved are topology domains. Missing values are read from the engine
(:mod:`dynctl.serving.engines.facts`).
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from xxhash import xxh3_64_intdigest

from dynctl.base.errors import single_line, without_credentials
from dynctl.base.json_fields import describe
from router_core import MAX_RANKS, Role

_ROLES: Final = tuple(role.value for role in Role)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
_DOMAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
_DEVICE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_SPEC: Final = 4096
_MAX_ERROR: Final = 1000

#: Key -> the expected value, for error messages.
RESERVED: Final[Mapping[str, str]] = {
    "url": "http://HOST:PORT",
    "name": "a name of letters, digits and . _ / : -, at most 128",
    "role": " or ".join(_ROLES),
    "kv-events": "tcp://HOST:PORT or ipc:///PATH of the engine's KV events, or off",
    "replay": "tcp://HOST:PORT or ipc:///PATH of the engine's replay socket, or off",
    "block-size": "tokens per block, 1 to 4096",
    "dp": f"data-parallel ranks, 1 to {MAX_RANKS}",
    "total-blocks": "KV blocks of a rank, 1 or more",
    "max-num-batched-tokens": "tokens, 1 or more",
    "model": "a model name",
    "bootstrap": "HOST:PORT where decode engines fetch the KV cache (SGLang)",
    "device": "cpu, or the kind of accelerator (cuda), at most 64 letters, digits and . _ -",
    "can-prefill": "true or false",
    "forward-authorization": "true to send the clients' Authorization header to the engine",
    "api-key-env": "the environment variable of dynctl serve with the engine's API key",
    "taint": "a taint; repeat the key for more",
}


class WorkerSpecError(ValueError):
    """An invalid worker spec; the message has the key, the value and what was expected."""

    def __init__(self, problem: str) -> None:
        super().__init__(single_line(problem, _MAX_ERROR))


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The description of one engine; None means "read it from the engine".

    ``url`` has no trailing slash. ``kv_events`` and ``replay`` are ``""`` if off.
    """

    url: str
    name: str
    role: Role | None = None
    domains: Mapping[str, str] = field(default_factory=dict)
    kv_events: str | None = None
    replay: str | None = None
    block_size: int | None = None
    dp: int | None = None
    total_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    model: str | None = None
    bootstrap: str | None = None
    can_prefill: bool | None = None
    device: str | None = None
    taints: tuple[str, ...] = ()
    forward_authorization: bool = False
    api_key_env: str | None = None
    instance_id: int | None = None

    @property
    def worker_id(self) -> int:
        """``instance_id`` of a worker in discovery, else a u64 from the name: the same after a
        restart."""
        if self.instance_id is not None:
            return self.instance_id
        return xxh3_64_intdigest(self.name.encode())

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"


def parse_worker_spec(text: str, flag: str = "--worker") -> WorkerSpec:
    """Parse a ``--worker`` argument (``flag``); raises WorkerSpecError."""
    fields = spec_fields(text, flag)
    return worker_spec(fields, where=f"{flag} {without_credentials(str(fields['url']))}")


def spec_fields(text: str, flag: str = "--worker") -> dict[str, Any]:
    """The keys and values of a ``--worker`` argument (``flag``), as ``POST /v1/workers`` has them;
    raises WorkerSpecError. The values are not checked."""
    if len(text) > _MAX_SPEC:
        raise WorkerSpecError(f"{flag}: at most {_MAX_SPEC} characters, got {len(text)}")
    url, *rest = text.split(",")
    plain: dict[str, Any] = {"url": url.strip()}
    for part in rest:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise WorkerSpecError(
                f"{flag} {without_credentials(url)}: {part!r} is not key=value; expected one of "
                f"{', '.join(k for k in RESERVED if k != 'url')}, or a domain such as zone=zone-a"
            )
        if _canonical(key) == "taint":
            plain.setdefault("taint", []).append(value.strip())
            continue
        if _canonical(key) in plain:
            raise WorkerSpecError(f"{flag} {without_credentials(url)}: {key} occurs twice")
        plain[_canonical(key)] = value.strip()
    return plain


def worker_spec(plain: Mapping[str, Any], *, where: str) -> WorkerSpec:
    """A spec from keys and values (YAML, ``POST /v1/workers``); raises WorkerSpecError.

    ``domains`` may be a mapping, with or without separate keys. ``where`` starts every
    message.
    """
    given = {_canonical(str(key)): value for key, value in plain.items()}
    url = _url(given.pop("url", None), where)
    domains = given.pop("domains", None) or {}
    if not isinstance(domains, Mapping):
        raise WorkerSpecError(
            f"{where}: domains is {describe(domains)}; expected domain: value pairs"
        )
    own = {key: value for key, value in given.items() if key not in RESERVED and key != "taints"}
    all_domains = {}
    for key, value in own.items():
        _not_a_slip(key, value, where)
    for key, value in {**domains, **own}.items():
        all_domains[str(key)] = _domain(str(key), value, where)
    name = given.get("name")
    if name is None:
        name = urlsplit(url).netloc
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(where, "name", name)
    return WorkerSpec(
        url=url,
        name=name,
        role=_role(given.get("role"), where),
        domains=all_domains,
        kv_events=_endpoint(given, "kv-events", where),
        replay=_endpoint(given, "replay", where),
        block_size=_count(given, "block-size", where, 4096),
        dp=_count(given, "dp", where, MAX_RANKS),
        total_blocks=_count(given, "total-blocks", where, 2**40),
        max_num_batched_tokens=_count(given, "max-num-batched-tokens", where, 2**40),
        model=_text(given, "model", where),
        bootstrap=_bootstrap(given.get("bootstrap"), where),
        can_prefill=_truth(given, "can-prefill", where),
        device=_device(given.get("device"), where),
        taints=_taints(given, where),
        forward_authorization=bool(_truth(given, "forward-authorization", where)),
        api_key_env=_text(given, "api-key-env", where),
    )


def _canonical(key: str) -> str:
    dashed = key.strip().replace("_", "-")
    return dashed if dashed in RESERVED or dashed in ("domains", "taints") else key.strip()


def _wrong(where: str, key: str, value: object) -> WorkerSpecError:
    shown = without_credentials(value) if isinstance(value, str) else value
    found = "missing" if value is None else describe(shown)
    return WorkerSpecError(f"{where}: {key} is {found}; expected {RESERVED[key]}")


def _url(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(where, "url", value)
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise _wrong(where, "url", value) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise _wrong(where, "url", value)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise WorkerSpecError(
            f"{where}: url must not have credentials, a query or a fragment; expected "
            f"{RESERVED['url']}"
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _not_a_slip(key: str, value: object, where: str) -> None:
    """Refuse a key that is almost a reserved one: most likely a typing error, not a domain."""
    near = difflib.get_close_matches(key.replace("_", "-"), RESERVED, n=1, cutoff=0.8)
    if near:
        raise WorkerSpecError(
            f"{where}: {key}={value} would be a topology domain named {key!r}; "
            f"did you mean {near[0]}? (a domain of that name goes under `domains:` in a workers "
            "file)"
        )


def _domain(key: str, value: object, where: str) -> str:
    if not _DOMAIN.fullmatch(key):
        raise WorkerSpecError(
            f"{where}: domain {key!r}; expected letters, digits and . _ / -, at most 64"
        )
    if not isinstance(value, str) or not value or value != value.strip() or "=" in value:
        raise WorkerSpecError(
            f"{where}: domain {key} is {describe(value)}; expected text without '=' or outer space"
        )
    if len(value) > 256:
        raise WorkerSpecError(f"{where}: domain {key} has {len(value)} characters; at most 256")
    return value


def _role(value: object, where: str) -> Role | None:
    if value is None:
        return None
    if value not in _ROLES:
        raise _wrong(where, "role", value)
    return Role(str(value))


def _endpoint(given: Mapping[str, Any], key: str, where: str) -> str | None:
    value = given.get(key)
    if value is None:
        return None
    if value is False or value in ("off", "none", ""):
        return ""
    if not isinstance(value, str):
        raise _wrong(where, key, value)
    scheme, _, address = value.partition("://")
    if scheme == "ipc" and address.startswith("/") and "\0" not in address and len(address) < 100:
        return value
    if scheme != "tcp" or not _is_address(address):
        raise _wrong(where, key, value)
    return value


def _is_address(text: str) -> bool:
    """Whether this is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535


def _count(given: Mapping[str, Any], key: str, where: str, most: int) -> int | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:20])
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise _wrong(where, key, given[key])
    return value


def _text(given: Mapping[str, Any], key: str, where: str) -> str | None:
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value or len(value) > 256:
        raise _wrong(where, key, value)
    return value


def _bootstrap(value: object, where: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _is_address(value):
        raise _wrong(where, "bootstrap", value)
    return value


def _device(value: object, where: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise _wrong(where, "device", value)
    return value.lower()


def _truth(given: Mapping[str, Any], key: str, where: str) -> bool | None:
    value = given.get(key)
    if value is None or isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in known:
        raise _wrong(where, key, value)
    return known[str(value).lower()]


def _taints(given: Mapping[str, Any], where: str) -> tuple[str, ...]:
    taints: list[Any] = []
    for key in ("taint", "taints"):
        value = given.get(key) or []
        taints += value if isinstance(value, list) else [value]
    if len(taints) > 256 or not all(isinstance(t, str) and 0 < len(t) <= 512 for t in taints):
        raise WorkerSpecError(f"{where}: taint: expected at most 256 texts, each up to 512 long")
    return tuple(dict.fromkeys(taints))
