"""`dynctl serve indexer`: the index of cached blocks alone, in the shape of Dynamo's indexer."""

from pathlib import Path
from typing import Annotated

import typer

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.cli.access_options import index_peers, secret
from dynctl.cli.serving_options import (
    LISTEN,
    Announce,
    ApiToken,
    Host,
    IndexMemory,
    LogFormat,
    LogLevel,
)
from dynctl.cli.shared_options import Needs, memory_of, one_choice, seconds
from dynctl.documents.index_dump import RegisteredRank

_ENGINES = "Engines"
_PEERS = "Restarts and other indexers"


def indexer(
    options: GlobalOptions,
    http_host: Host = "127.0.0.1",
    http_port: Annotated[
        int,
        typer.Option(
            "--port", "--http-port", metavar="PORT", min=0, max=65535,
            help="Listen port; 0: a free one.", rich_help_panel=LISTEN,
        ),
    ] = 8090,
    workers: Annotated[
        str,
        typer.Option(
            metavar="ID[:RANK]=ADDRESS,..",
            help="Engines to follow: number and ZMQ address of the KV events, separated by commas. "
            "More can be registered over HTTP.",
            rich_help_panel=_ENGINES,
        ),
    ] = "",
    replays: Annotated[
        str,
        typer.Option(
            metavar="ID[:RANK]=ADDRESS,..",
            help="Their replay sockets: what was cached before or missed is read there.",
            rich_help_panel=_ENGINES,
        ),
    ] = "",
    block_size: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", min=1, max=4096,
            help="Block size of the engines of --workers.",
            rich_help_panel=_ENGINES,
        ),
        Needs(("workers",)),
    ] = None,
    model_name: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Model of the engines of --workers.", rich_help_panel=_ENGINES
        ),
        Needs(("workers",)),
    ] = "default",
    routing_group: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Routing group of the engines of --workers.",
            rich_help_panel=_ENGINES,
        ),
        Needs(("workers",)),
    ] = "default",
    peers: Annotated[
        str,
        typer.Option(
            metavar="URL,..",
            help="Begin with the index of the first of these indexers that answers (ours or "
            "Dynamo's), separated by commas. They get the admin token.",
            rich_help_panel=_PEERS,
        ),
    ] = "",
    snapshot: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep a snapshot of the index in this directory, and begin with it: a local disk "
            "or a mounted object store.",
            rich_help_panel=_PEERS,
        ),
    ] = None,
    snapshot_interval: Annotated[
        float,
        typer.Option(
            metavar="DURATION", parser=seconds(0.1),
            help="Time between two snapshots; one is written at the end too.",
            rich_help_panel=_PEERS,
        ),
        Needs(("snapshot",)),
    ] = 30.0,
    api_token: ApiToken = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-token-file",
            metavar="FILE",
            help="File with the operators' token.",
            rich_help_panel=LISTEN,
        ),
    ] = None,
    index_memory: IndexMemory = "4GiB",
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    announce: Announce = False,
) -> int:  # fmt: skip
    """Run the index of cached blocks alone, over HTTP, in the shape of Dynamo's indexer.

    For example: dynctl serve indexer --block-size 16 --workers 1=tcp://127.0.0.1:5557
    """
    from dynctl.serving.routing.standalone_index import checked_listener
    from dynctl.serving.services.indexer import IndexerConfig, run_indexer

    one_choice("--log-format", log_format, ("text", "json"))
    memory = memory_of("--index-memory", index_memory)
    given, repeated = _addresses("--workers", workers), _addresses("--replays", replays)
    if given and block_size is None:
        raise UsageProblem(
            "--workers needs --block-size", "set the block size of the engines, in tokens"
        )
    for ref in repeated:
        if ref not in given:
            raise UsageProblem(f"--replays {ref[0]}:{ref[1]}: not an engine of --workers")
    for ref, endpoint in given.items():
        problem = checked_listener(endpoint, repeated.get(ref))
        if problem is not None:
            raise UsageProblem(f"--workers {ref[0]}:{ref[1]}: {problem}")
    return int(
        run_indexer(
            IndexerConfig(
                host=http_host,
                port=http_port,
                engines=tuple(
                    RegisteredRank(
                        *ref, model_name, routing_group, block_size or 0, at, repeated.get(ref)
                    )
                    for ref, at in given.items()
                ),
                peers=index_peers(_list_of_texts(peers), "--peers"),
                token=secret("--admin-token", api_token, token_file),
                snapshot=snapshot,
                snapshot_interval_s=snapshot_interval,
                index_memory_bytes=memory,
                log_format=log_format,
                log_level=log_level.strip().lower(),
                announce=announce,
            )
        )
    )


def _addresses(flag: str, text: str) -> dict[tuple[int, int], str]:
    """(id, rank) -> address of ``ID[:RANK]=ADDRESS,..``; raises UsageProblem."""
    addresses: dict[tuple[int, int], str] = {}
    for part in filter(None, (item.strip() for item in text.split(","))):
        name, equals, address = part.partition("=")
        number, colon, rank = name.partition(":")
        digits = (number, rank) if colon else (number, "0")
        if (
            not equals
            or not address
            or not all(digit.isascii() and digit.isdigit() for digit in digits)
        ):
            raise UsageProblem(
                f"{flag} {part[:200]}: expected ID[:RANK]=ADDRESS, for example "
                "1=tcp://127.0.0.1:5557"
            )
        ref = (int(number[:21]), int(digits[1][:11]))
        if ref[0] >= 2**64 or ref[1] >= 1 << 20:
            raise UsageProblem(f"{flag} {part[:200]}: expected an ID below 2^64, a rank below 2^20")
        if ref in addresses:
            raise UsageProblem(f"{flag} {part[:200]}: {ref[0]}:{ref[1]} occurs twice")
        addresses[ref] = address
    return addresses


def _list_of_texts(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
