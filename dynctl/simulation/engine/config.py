"""EngineConfig: all settings of a simulated engine.

Each field has its help, bounds and choices; `OPTIONS` has the command-line flags and environment
variables of the same fields.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, cast, get_type_hints

from dynctl.base.quantities import duration, size
from router_core import Role

KvLoadFailurePolicy = Literal["recompute", "fail"]


#: Options of `serve engine` that a replay has too.
TIMED: Final = (
    "block_size",
    "total_blocks",
    "host_blocks",
    "disk_blocks",
    "max_num_seqs",
    "max_waiting",
    "max_num_batched_tokens",
    "prefill_tokens_per_s",
    "decode_itl_ms",
    "kv_transfer_ms_per_block",
    "kv_transfer_cross_domain_factor",
    "host_gb_per_s",
    "disk_gb_per_s",
    "kv_bytes_per_token",
)


class EngineConfigError(ValueError):
    """An invalid value of an option; the text has the option, the value and what was expected."""


def _option(
    default: object,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    needs: tuple[str, ...] = (),
) -> Any:
    """``needs``: fields of EngineConfig, ``NAME`` or ``NAME=VALUE``, of which one must be set for
    this one to have an effect."""
    return field(
        default=default,
        metadata={
            "help": help,
            "minimum": minimum,
            "maximum": maximum,
            "choices": choices,
            "metavar": metavar,
            "needs": needs,
        },
    )


@dataclass(frozen=True)
class Faults:
    """Failures to simulate; all are off by default and can be changed while the engine runs."""

    slow_factor: float = _option(
        1.0, "Multiply every simulated duration by this factor.", minimum=0.0, maximum=1e6
    )
    refuse: int = _option(
        0,
        "Return this HTTP status for /health and every inference request; 0 = off.",
        minimum=0,
        maximum=599,
        metavar="STATUS",
    )
    die_mid_stream_after: int = _option(
        0, "Cut the connection after this many output tokens; 0 = off.", minimum=0
    )
    stop_publishing: bool = _option(
        False,
        "Number and keep KV event batches for replay, but do not send them.",
        needs=("kv_events",),
    )
    drop_events: int = _option(
        0,
        "Do not send the next N KV event batches; replay still has them.",
        minimum=0,
        needs=("kv_events",),
    )

    def __post_init__(self) -> None:
        check_bounds(self, prefix="fault-")
        if self.refuse and self.refuse < 400:
            raise EngineConfigError(
                f"--fault-refuse is {self.refuse}; expected 0 (off) or an HTTP status 400..599"
            )


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine process. Durations are simulated time before the speed-up."""

    name: str = _option("engine", "Name shown in logs and in /engine/info.")
    model: str = _option("demo", "Model name served on the OpenAI endpoints.")
    model_path: str = _option(
        "", "Directory with tokenizer.json and its config; empty = the demo model.", metavar="DIR"
    )
    role: Role = _option(  # noqa: RUF009  a dataclasses.field
        Role.AGGREGATED,
        "Phases that the engine serves.",
        choices=tuple(role.value for role in Role),
    )
    can_prefill: bool = _option(
        True,
        "A decode engine prefills a request that arrives without a hand-off.",
    )
    host: str = _option("127.0.0.1", "Address to listen on.")
    advertise_host: str = _option(
        "",
        "Address of this engine for others; empty = the address it listens on.",
        metavar="HOST",
    )
    port: int = _option(0, "HTTP port; 0 picks a free one.", minimum=0, maximum=65535)

    block_size: int = _option(16, "Tokens in a KV block.", minimum=1, maximum=4096)
    total_blocks: int = _option(
        4096, "KV blocks of each data-parallel rank.", minimum=2, maximum=4_000_000
    )
    host_blocks: int = _option(
        0,
        "KV blocks of each rank in host memory, for what its own blocks evict; 0 = no such tier.",
        minimum=0,
        maximum=16_000_000,
    )
    disk_blocks: int = _option(
        0,
        "KV blocks of each rank on disk, for what host memory evicts; 0 = no such tier.",
        minimum=0,
        maximum=16_000_000,
    )
    host_gb_per_s: float = _option(
        25.0,
        "Loading from host memory to a rank, 10^9 bytes per second.",
        minimum=1e-3,
        maximum=1e6,
        needs=("host_blocks",),
    )
    disk_gb_per_s: float = _option(
        5.0,
        "Loading from disk to a rank, 10^9 bytes per second.",
        minimum=1e-3,
        maximum=1e6,
        needs=("disk_blocks",),
    )
    kv_bytes_per_token: float = _option(
        131_072.0,
        "Bytes of KV cache of a token, which loading takes its time for.",
        minimum=1.0,
        maximum=1e9,
        needs=("host_blocks", "disk_blocks"),
    )
    max_model_len: int = _option(
        0,
        "Context length in tokens; 0 = 8192, or the size of the KV blocks if that is less.",
        minimum=0,
        maximum=10_000_000,
    )
    max_num_seqs: int = _option(
        256, "Requests that run on a rank at the same time.", minimum=1, maximum=65536
    )
    max_waiting: int = _option(
        4096,
        "Requests that may wait on a rank; more requests get 503.",
        minimum=1,
        maximum=1_000_000,
    )
    max_num_batched_tokens: int = _option(
        8192, "Token budget of one engine step.", minimum=1, maximum=10_000_000
    )
    data_parallel_size: int = _option(
        1, "Data-parallel ranks, each with its own cache and events.", minimum=1, maximum=64
    )
    lora: tuple[str, ...] = _option(
        (), "Also serve this LoRA adapter's name (repeatable).", metavar="NAME"
    )

    prefill_tokens_per_s: float = _option(
        20_000.0, "Prefill speed of a rank, tokens per second.", minimum=1e-3, maximum=1e12
    )
    decode_itl_ms: float = _option(
        10.0, "Duration of a decode step, milliseconds.", minimum=0.0, maximum=600_000.0
    )
    speedup_ratio: float = _option(
        1.0, "Divide every simulated duration by this.", minimum=1e-6, maximum=1e9
    )
    default_output_tokens: int = _option(
        64,
        "Output length of a request that sets no max_tokens.",
        minimum=1,
        maximum=1_000_000,
    )
    seed: int = _option(0, "Seed of the generated text.", minimum=0, maximum=2**63)

    kv_transfer_ms_per_block: float = _option(
        0.5,
        "Time to pull one KV block from a prefill engine, ms.",
        minimum=0.0,
        maximum=60_000.0,
        needs=("role=decode",),
    )
    kv_transfer_cross_domain_factor: float = _option(
        1.0,
        "Factor for the time of a pull between different values of the KV transfer domain.",
        minimum=1.0,
        maximum=1e4,
        needs=("role=decode",),
    )
    kv_load_failure_policy: KvLoadFailurePolicy = _option(  # noqa: RUF009  a dataclasses.field
        "recompute",
        "Reaction of a decode engine if the prefill engine lost the KV blocks.",
        choices=("recompute", "fail"),
        needs=("role=decode",),
    )
    kv_hold_timeout_s: float = _option(
        30.0,
        "Seconds that a prefill engine keeps unpulled blocks and a decode engine waits for them.",
        minimum=0.01,
        maximum=3600.0,
        needs=("role=prefill", "role=decode"),
    )

    kv_events: str = _option(
        "tcp://127.0.0.1:0",
        "ZMQ endpoint of the KV events; rank N uses port + N; port 0 = free ports; empty = off.",
        metavar="ENDPOINT",
    )
    replay: str = _option(
        "tcp://127.0.0.1:0",
        "ZMQ endpoint that replays recent KV events, ranks as above; empty = off.",
        metavar="ENDPOINT",
        needs=("kv_events",),
    )
    kv_events_topic: str = _option(
        "", "First frame of each KV event message.", metavar="TOPIC", needs=("kv_events",)
    )
    kv_events_buffer_steps: int = _option(
        10_000,
        "KV event batches kept for replay (at most 16 MiB).",
        minimum=0,
        maximum=1_000_000,
        needs=("replay",),
    )

    max_body_bytes: int = _option(
        4 * 1024 * 1024, "Largest accepted request body.", minimum=1024, maximum=1 << 30
    )
    drain_timeout_s: float = _option(
        30.0,
        "Seconds for running requests to finish after SIGTERM.",
        minimum=0.0,
        maximum=3600.0,
    )

    faults: Faults = field(default_factory=Faults)

    # The worker's topology, with the names of ModelRuntimeConfig. It has no flags: it comes from
    # the worker environment contract (dynctl.base.worker_environment).
    topology_domains: Mapping[str, str] = field(default_factory=dict)
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        object.__setattr__(self, "role", Role(self.role))
        for name in ("name", "model"):
            if not getattr(self, name).strip():
                raise EngineConfigError(f"--{name} is empty; expected a name")
        capacity = self.total_blocks * self.block_size
        if self.max_model_len > capacity:
            raise EngineConfigError(
                f"--max-model-len is {self.max_model_len}, but {self.total_blocks} blocks of "
                f"{self.block_size} tokens hold {capacity}; lower it or raise --total-blocks"
            )
        if len({self.model, *self.lora}) != 1 + len(self.lora):
            raise EngineConfigError("--lora names must differ from each other and from --model")
        for option in ("kv_events", "replay"):
            value = getattr(self, option)
            if value:
                split_endpoint(value, flag=_flag(option))
        if self.replay and not self.kv_events:
            object.__setattr__(self, "replay", "")  # nothing to replay without a stream

    def reachable(self, host: str) -> str:
        """The address for others if the engine listens on `host`, which may be a wildcard."""
        return self.advertise_host or _WILDCARDS.get(host, host)

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and output; never more than the KV blocks."""
        return self.max_model_len or min(8192, self.total_blocks * self.block_size)


def split_endpoint(endpoint: str, *, flag: str = "endpoint") -> tuple[str, int]:
    """`tcp://HOST:PORT` -> (host, port); EngineConfigError names `flag` and the value."""
    scheme, separator, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not separator or not host or not colon or not port.isascii():
        raise EngineConfigError(f"--{flag} is {endpoint!r}; expected tcp://HOST:PORT")
    if not port.isdigit() or int(port) > 65535:
        raise EngineConfigError(f"--{flag} is {endpoint!r}; expected a port 0..65535")
    return host, int(port)


@dataclass(frozen=True)
class Option:
    """One command-line option: a field of EngineConfig (or, with `fault`, of Faults)."""

    field: str
    flag: str
    env: str
    type: type
    default: object
    help: str
    choices: tuple[str, ...]
    metavar: str
    fault: bool
    needs: tuple[str, ...] = ()

    @property
    def quantity(self) -> str:
        """The unit at the end of its name: ``s``, ``ms`` or ``bytes``; empty without one."""
        rest, _, unit = self.field.rpartition("_")
        return unit if unit in ("s", "ms", "bytes") and not rest.endswith("_per") else ""

    def parse(self, text: str, source: str = "") -> object:
        """The typed value of `text`; EngineConfigError names `source` (default: the flag)."""
        where = source or self.flag
        if self.type is bool:
            lowered = text.strip().lower()
            if lowered not in _BOOLEANS:
                raise EngineConfigError(f"{where} is {text!r}; expected true or false")
            return _BOOLEANS[lowered]
        if self.type is tuple:
            return tuple(part for part in text.split(",") if part)
        if (amount := self._amount(text)) is not None:
            return amount
        try:
            value = self.type(text)
        except ValueError:
            kind = "a whole number" if self.type is int else "a number"
            raise EngineConfigError(f"{where} is {text!r}; expected {kind}") from None
        return cast(object, value)

    def _amount(self, text: str) -> float | None:
        """The value of a text with a unit, such as 30s or 4MiB."""
        if self.quantity == "bytes":
            return size(text)
        if not self.quantity:
            return None
        seconds = duration(text, self.quantity)
        return seconds if seconds is None or self.quantity == "s" else seconds * 1000


_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104
_BOOLEANS = {"true": True, "1": True, "on": True, "yes": True}
_BOOLEANS |= {"false": False, "0": False, "off": False, "no": False}


def _flag(name: str, prefix: str = "") -> str:
    return prefix + name.replace("_", "-")


def check_bounds(config: object, prefix: str = "") -> None:
    """Raise EngineConfigError for the first field outside its declared bounds or choices."""
    for f in fields(cast(Any, config)):
        if not f.metadata:
            continue
        value = getattr(config, f.name)
        low, high = f.metadata["minimum"], f.metadata["maximum"]
        choices = f.metadata["choices"]
        if choices and value not in choices:
            expected = " or ".join(choices)
            raise EngineConfigError(f"--{_flag(f.name, prefix)} is {value!r}; expected {expected}")
        if low is None and high is None:
            continue
        low, high = low or 0, math.inf if high is None else high
        if not low <= value <= high:
            limit = f"{low:g} or more" if high == math.inf else f"{low:g}..{high:g}"
            raise EngineConfigError(f"--{_flag(f.name, prefix)} is {value}; expected {limit}")


#: How help pages name a value of each type.
_METAVARS: Final[Mapping[Any, str]] = {int: "N", float: "X"}


def _options(owner: type, prefix: str = "") -> tuple[Option, ...]:
    hints = get_type_hints(owner)
    options: list[Option] = []
    for f in fields(cast(Any, owner)):
        if not f.metadata:
            continue
        hint = hints[f.name]
        kind = hint if isinstance(hint, type) and hint is not Role else str
        if f.name == "lora":
            kind = tuple
        options.append(
            Option(
                field=f.name,
                flag="--" + _flag(f.name, prefix),
                env="DYNCTL_ENGINE_" + _flag(f.name, prefix).upper().replace("-", "_"),
                type=kind,
                default=f.default,
                help=f.metadata["help"],
                choices=f.metadata["choices"],
                metavar=f.metadata["metavar"] or _METAVARS.get(kind) or f.name.upper(),
                fault=owner is Faults,
                needs=f.metadata["needs"],
            )
        )
    return tuple(options)


OPTIONS: tuple[Option, ...] = (*_options(EngineConfig), *_options(Faults, "fault-"))
"""Every option of `serve engine`, in help order."""


def without_effect(
    config: EngineConfig, given: Mapping[str, object], env: Mapping[str, str] = os.environ
) -> list[str]:
    """Warnings for the options that are given, by flag or variable, and have no effect."""
    warnings = []
    for option in OPTIONS:
        flag = option.flag.removeprefix("--")
        typed = option.flag if flag in given else option.env
        value = given.get(flag, env.get(option.env))
        is_given = value or (flag in given and option.type is bool)
        if option.needs and is_given and not any(_is_met(config, need) for need in option.needs):
            flags = [f"--{_flag(need).replace('=', ' ')}" for need in option.needs]
            warnings.append(f"{typed} has no effect without {' or '.join(flags)}")
    return warnings


def _is_met(config: EngineConfig, need: str) -> bool:
    name, equals, wanted = need.partition("=")
    value = getattr(config, name)
    return str(value) == wanted if equals else bool(value)


def timed_options() -> list[Option]:
    """The options of the engine's timing and cache, in the order of TIMED."""
    options = {option.field: option for option in OPTIONS}
    return [options[name] for name in TIMED]


def build_config(given: Mapping[str, object], env: Mapping[str, str] = os.environ) -> EngineConfig:
    """EngineConfig from flags (`given`: flag without dashes -> typed value), then `env`.

    Raises EngineConfigError naming the flag or variable.
    """
    settings: dict[str, Any] = {}
    faults: dict[str, Any] = {}
    known = {option.flag.removeprefix("--") for option in OPTIONS}
    unknown = sorted(set(given) - known)
    if unknown:
        raise EngineConfigError(f"unknown engine option --{unknown[0]}")
    for option in OPTIONS:
        target = faults if option.fault else settings
        flag = option.flag.removeprefix("--")
        if flag in given:
            value = given[flag]
            target[option.field] = tuple(value) if isinstance(value, list) else value
        elif env.get(option.env):
            target[option.field] = option.parse(env[option.env], option.env)
    return EngineConfig(**settings, faults=Faults(**faults))
