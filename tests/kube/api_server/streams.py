"""Responses of a kubelet through the API server: exec, port-forward and logs of pods.

exec speaks ``v4.channel.k8s.io`` and ``v5.channel.k8s.io`` over WebSocket, as kubectl and the
official client do; port-forward speaks ``v4.channel.k8s.io`` as the official client does. SPDY,
and kubectl's ``SPDY/3.1+portforward.k8s.io`` over WebSocket, are not spoken.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import WSMsgType, web

from tests.kube.api_server.parameters import flag, number
from tests.kube.api_server.status import StatusError, bad_request

Json = dict[str, Any]


class Ran(NamedTuple):
    """What a command left."""

    stdout: bytes = b""
    stderr: bytes = b""
    code: int = 0


Files = Path | Callable[[list[str]], Ran]
"""The root directory of a container, or what runs its commands."""

_STDOUT, _STDERR, _ERROR = 1, 2, 3
_CHUNK = 32 * 1024
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"


def container_of(pod: Json, wanted: str | None) -> str:
    """The container meant; raises 400 where several could be, or where there is none such."""
    spec, name = pod["spec"], pod["metadata"]["name"]
    names = [c["name"] for c in spec["containers"]]
    every = names + [c["name"] for c in spec.get("initContainers", ())]
    if wanted:
        if wanted not in every:
            raise bad_request(f"container {wanted} is not valid for pod {name}")
        return wanted
    default: str = (pod["metadata"].get("annotations") or {}).get(_DEFAULT_CONTAINER, "")
    if default in names:
        return default
    if len(names) > 1:
        choices = f"choose one of: [{' '.join(names)}]"
        raise bad_request(f"a container name must be specified for pod {name}, {choices}")
    only: str = names[0]
    return only


def demand_running(pod: Json, container: str) -> None:
    """Raises what the server answers to exec where nothing runs."""
    phase = pod.get("status", {}).get("phase")
    if phase in ("Succeeded", "Failed"):
        raise bad_request(
            f"cannot exec into a container in a completed pod; current phase is {phase}"
        )
    if not pod["spec"].get("nodeName"):
        raise bad_request(f"pod {pod['metadata']['name']} does not have a host assigned")
    for status in pod.get("status", {}).get("containerStatuses") or ():
        if status["name"] == container and "running" not in status.get("state", {}):
            raise StatusError(
                500,
                "InternalError",
                f'unable to upgrade connection: container not found ("{container}")',
                {},
            )


def demand_websocket(request: web.Request) -> None:
    """Raises 400 for SPDY, which kubectl falls back to when its WebSocket was refused."""
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise bad_request("you must specify an upgrade to WebSocket; SPDY is not spoken here")


def run(files: Files | None, command: list[str]) -> Ran:
    """``cat PATH...`` and ``ls -1p PATH`` below the root; other commands are missing (126)."""
    if callable(files):
        return files(command)
    if command[:2] == ["ls", "-1p"]:
        return _listed(files, command[-1])
    if not command or command[0] != "cat":
        word = command[0] if command else ""
        complaint = f'exec: "{word}": executable file not found in $PATH\n'
        return Ran(stderr=complaint.encode(), code=126)
    out, err, code = b"", b"", 0
    for path in command[1:]:
        if path == "--":
            continue
        try:
            out += _inside(files, path).read_bytes()
        except IsADirectoryError:
            err, code = err + f"cat: {path}: Is a directory\n".encode(), 1
        except PermissionError:
            err, code = err + f"cat: {path}: Permission denied\n".encode(), 1
        except OSError:
            err, code = err + f"cat: {path}: No such file or directory\n".encode(), 1
    return Ran(out, err, code)


def _listed(root: Path | None, path: str) -> Ran:
    try:
        entries = sorted(_inside(root, path).iterdir())
    except OSError:
        return Ran(stderr=f"ls: {path}: No such file or directory\n".encode(), code=1)
    shown = [one for one in entries if not one.name.startswith(".")]
    # -p marks a directory, not a link to one.
    names = [one.name + ("/" if one.is_dir() and not one.is_symlink() else "") for one in shown]
    return Ran("".join(f"{name}\n" for name in names).encode())


def _inside(root: Path | None, path: str) -> Path:
    if root is None:
        raise FileNotFoundError(path)
    found = (root / path.lstrip("/")).resolve(strict=True)
    if not found.is_relative_to(root.resolve()):
        raise FileNotFoundError(path)
    return found


def exit_status(code: int) -> Json:
    """What is sent on the error channel when the command has ended."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def _upgrade() -> web.WebSocketResponse:
    return web.WebSocketResponse(protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"))


async def serve_exec(request: web.Request, files: Files | None) -> web.StreamResponse:
    """Run the command, send what it left, close. Standard input is not read."""
    socket = _upgrade()
    await socket.prepare(request)
    out, err, code = await asyncio.to_thread(run, files, request.query.getall("command", []))
    for channel, data, wanted in (
        (_STDOUT, out, flag(request.query, "stdout")),
        (_STDERR, err, flag(request.query, "stderr")),
    ):
        if wanted:
            for at in range(0, len(data), _CHUNK):
                await socket.send_bytes(bytes([channel]) + data[at : at + _CHUNK])
    await socket.send_bytes(bytes([_ERROR]) + msgspec.json.encode(exit_status(code)))
    await socket.close()
    return socket


async def serve_forward(
    request: web.Request, targets: Mapping[int, tuple[str, int] | None]
) -> web.StreamResponse:
    """``targets``: pod port -> address, in the order of the request; None is a closed port."""
    socket = _upgrade()
    await socket.prepare(request)
    writers: dict[int, asyncio.StreamWriter] = {}
    pumps: list[asyncio.Task[None]] = []
    for at, (port, target) in enumerate(targets.items()):
        for channel in (2 * at, 2 * at + 1):
            await socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
        try:
            if target is None:
                raise ConnectionRefusedError("connection refused")
            reader, writers[2 * at] = await asyncio.open_connection(*target)
            pumps.append(asyncio.create_task(_pump(reader, socket, 2 * at)))
        except OSError as problem:
            result = f"error forwarding port {port} to pod: {problem}"
            with contextlib.suppress(ConnectionError):  # the client may have gone
                await socket.send_bytes(bytes([2 * at + 1]) + result.encode())
    try:
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data:
                writer = writers.get(message.data[0])
                if writer is not None:
                    writer.write(message.data[1:])
                    with contextlib.suppress(OSError):
                        await writer.drain()
    finally:
        # Without waiting first: a client that went away cancels this at any await.
        for writer in writers.values():
            writer.close()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
    return socket


async def _pump(reader: asyncio.StreamReader, socket: web.WebSocketResponse, channel: int) -> None:
    """Until the target closes: then the whole connection ends, since v4 cannot say which half."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            await socket.send_bytes(bytes([channel]) + data)
    await socket.close()


def log_text(
    logs: Mapping[tuple[str, str, str, bool], str], pod: Json, query: Mapping[str, str]
) -> str:
    """The requested log; raises 400 if the container has no previous run."""
    container = container_of(pod, query.get("container"))
    previous = flag(query, "previous")
    metadata = pod["metadata"]
    text = logs.get((metadata["namespace"], metadata["name"], container, previous))
    if text is None:
        if previous:
            raise bad_request(
                f'previous terminated container "{container}" in pod "{metadata["name"]}" not found'
            )
        text = ""
    if query.get("tailLines"):
        lines = text.splitlines(keepends=True)
        text = "".join(lines[max(0, len(lines) - number(query, "tailLines")) :])
    if limit := number(query, "limitBytes"):
        text = text.encode()[:limit].decode(errors="ignore")
    return text
