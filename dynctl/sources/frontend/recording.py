"""Recordings that dynctl frontends, routers or observers stream, each written to a file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import Unreachable, UsageProblem, file_problem, network_reason
from dynctl.documents.recording_file import HEADER, chunk_header
from dynctl.serving.records.recorder import FileSink
from dynctl.sources.client import refused_caller
from dynctl.sources.http import CONNECT_S, error_message, frontend_url, tls_context, tls_hint

#: Seconds without a chunk: a recording has a sign of life every 5 s.
_SILENT_S: Final = 30.0


def stream_recording(
    url: str,
    token: str | None,
    path: Path,
    *,
    timeout: float,
    seconds: int | None,
    max_bytes: int,
) -> str:
    """:func:`stream_recordings` of one frontend."""
    (reason,) = stream_recordings(
        [(url, path)], token, timeout=timeout, seconds=seconds, max_bytes=max_bytes
    )
    return reason


def stream_recordings(
    places: Sequence[tuple[str, Path]],
    token: str | None,
    *,
    timeout: float,
    seconds: int | None,
    max_bytes: int,
) -> list[str]:
    """Record frontends at the same time, ``(url, new file)`` each, until their ends, or Ctrl-C.

    Files have whole chunks. Returns for each why it ended before its time, empty if it did not.
    Raises Unreachable or UsageProblem at once where one does not begin.
    """
    begun: set[Path] = set()

    async def all_of_them() -> list[str]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_stream(url, token, path, begun, timeout, seconds, max_bytes))
                    for url, path in places
                ]
        except* Exception as problems:  # the others are cancelled: one cause is enough
            raise problems.exceptions[0] from None
        return [task.result() for task in tasks]

    try:
        return asyncio.run(all_of_them())
    except KeyboardInterrupt:
        if len(begun) != len(places):
            raise
        return [""] * len(places)


async def _stream(
    url: str,
    token: str | None,
    path: Path,
    begun: set[Path],
    timeout: float,
    seconds: int | None,
    max_bytes: int,
) -> str:
    """Adds ``path`` to ``begun`` once its file is there."""
    url = frontend_url(url)
    query: dict[str, int] = {"max_bytes": max_bytes}
    if seconds is not None:
        query["seconds"] = seconds
    headers = {"authorization": f"Bearer {token}"} if token else {}
    limits = httpx.Timeout(max(timeout, _SILENT_S), connect=min(timeout, CONNECT_S))
    try:
        async with (
            httpx.AsyncClient(
                timeout=limits,
                headers=headers,
                trust_env=False,
                verify=tls_context() if url.startswith("https:") else False,
            ) as client,
            client.stream("GET", f"{url}/v1/recording", params=query) as response,
        ):
            await _check(url, response)
            sink = FileSink(path)
            begun.add(path)
            try:
                return await _copy(response, sink)
            finally:
                sink.close()
    except httpx.HTTPError as error:
        reason = f"{url}: {network_reason(error)}"
        if path in begun:
            return f"{reason}; the recording ends there"
        raise Unreachable(
            reason, tls_hint(url, error) or "name a dynctl frontend: --frontend http://HOST:PORT"
        ) from None
    except OSError as error:  # of the file, such as a full disk
        return f"{path}: {file_problem(error, writing=True)}; the recording ends there"


async def _copy(response: httpx.Response, sink: FileSink) -> str:
    """Copy the stream to the file, chunk by chunk, so that the file ends with a whole one."""
    held, begun = bytearray(), False
    try:
        async for part in response.aiter_bytes():
            held += part
            if not begun and len(held) >= len(HEADER):
                sink.write_now(bytes(held[: len(HEADER)]))
                del held[: len(HEADER)]
                begun = True
            while begun:
                header = chunk_header(bytes(held[:64]))
                if header is None or len(held) < header.end:
                    break
                sink.write_now(bytes(held[: header.end]))
                del held[: header.end]
    except WireError as error:
        return f"the frontend sent no recording: {error.problem}"
    return "the stream ended within a chunk" if held else ""


async def _check(url: str, response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    await response.aread()
    message, status = error_message(response), response.status_code
    if status in (401, 403):
        raise refused_caller(f"{url}/v1/recording", response)
    if status == 404:
        raise UsageProblem(
            f"{url}/v1/recording: 404, not a dynctl frontend of this version",
            "dynctl version --frontend URL shows what answers there; a Dynamo needs --discovery",
        )
    raise UsageProblem(f"{url}/v1/recording answered {status}: {message}")
