"""The bodies of requests: read as they arrive, within bounds for each, each peer and all together.

A declared length reserves nothing. Compressed bodies are refused unless they are enabled, because a
megabyte can expand to a gigabyte; they are decompressed in steps, up to the limit of a body.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

from aiohttp import web

from dynctl.base.turns import Turns
from dynctl.serving.http.plain_requests import ClientRequest
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.refusal import HttpError, overloaded

#: The largest piece that one step decompresses; the event loop runs between steps.
_STEP: Final = 256 * 1024
_ENCODINGS: Final = ("gzip", "deflate")
#: Part of the memory for all bodies that the requests of one peer may have.
PEER_SHARE: Final = 0.75


class Body:
    """The body of one request; ``complete`` once all of it is read. Its memory counts until the
    end of the ``with`` block, or until :meth:`release`."""

    __slots__ = ("_bodies", "_peer", "complete", "size")

    def __init__(self, bodies: Bodies, peer: str) -> None:
        self._bodies = bodies
        self._peer = peer
        self.size = 0
        self.complete = False

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Count its bytes no more."""
        bodies, peer = self._bodies, self._peer
        bodies.held -= self.size
        left = bodies.peers.get(peer, 0) - self.size
        if left:
            bodies.peers[peer] = left
        else:
            bodies.peers.pop(peer, None)

    async def read(self, http: ClientRequest, limit: int) -> bytes:
        """All bytes, decompressed. Raises HttpError: 400, 408, 413, 415 or the overload status."""
        declared = http.content_length
        if declared is not None and declared > limit:
            raise too_large(limit)
        encoding = http.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity" and declared != 0:
            self._bodies.check_encoding(encoding)
        content = http.content
        if content.is_eof() and encoding == "identity":
            raw = content.read_nowait()  # most bodies arrive with their headers
            if len(raw) > limit:
                raise too_large(limit)
            self._bodies.take(self, self._peer, len(raw))
        else:
            raw = await self._arriving(http, limit, encoding)
        self.complete = True
        return raw

    async def _arriving(self, http: ClientRequest, limit: int, encoding: str) -> bytes:
        seconds = self._bodies.limits.body_s
        body = bytearray()
        unpack = None if encoding == "identity" else zlib.decompressobj(zlib.MAX_WBITS | 32)
        try:
            async with asyncio.timeout(seconds):
                while piece := await http.content.readany():
                    if unpack is None:
                        self._add(body, piece, limit)
                        continue
                    while piece:
                        self._add(body, unpack.decompress(piece, _STEP), limit)
                        piece = unpack.unconsumed_tail
                        await asyncio.sleep(0)
                    if unpack.unused_data:
                        raise _corrupt(encoding)
        except TimeoutError:
            raise HttpError(
                408, f"the body did not arrive within {seconds:g} s", "invalid_request_error",
                "body_timeout", headers={"connection": "close"},
            ) from None  # fmt: skip
        except zlib.error:
            raise _corrupt(encoding) from None
        except (web.RequestPayloadError, ValueError) as error:
            raise HttpError(
                400, f"the body is not complete: {error}", "invalid_request_error", "invalid_body",
                headers={"connection": "close"},
            ) from None  # fmt: skip
        if unpack is not None and not unpack.eof:
            raise _corrupt(encoding)
        return bytes(body)

    def _add(self, body: bytearray, piece: bytes, limit: int) -> None:
        if len(body) + len(piece) > limit:
            raise too_large(limit)
        self._bodies.take(self, self._peer, len(piece))
        body += piece


class Bodies:
    """The memory that the bodies of all requests have. ``compressed``: whether they may be.
    ``turns``: in which large bodies are decoded."""

    def __init__(
        self,
        limits: Limits,
        *,
        compressed: bool = False,
        overload: int = 529,
        turns: Turns | None = None,
    ) -> None:
        self.limits = limits
        self.turns = turns or Turns("large bodies")
        self._compressed = compressed
        self._overload = overload
        #: Address of a peer -> bytes of its requests.
        self.peers: dict[str, int] = {}
        self.held = 0

    def of(self, http: ClientRequest) -> Body:
        """The body of a request; use it as a context manager."""
        return Body(self, http.remote or "")

    def take(self, body: Body, peer: str, size: int) -> None:
        """Count ``size`` more bytes; raises HttpError if there is no room for them."""
        most, of_peer = self.limits.all_bodies_bytes, self.peers.get(peer, 0)
        share = int(most * PEER_SHARE)
        # One request alone has its limit anyway.
        if self.held + size > most and self.held > body.size:
            problem = f"the requests in flight have {most} bytes, the maximum"
        elif of_peer + size > share and of_peer > body.size:
            problem = f"your requests in flight have {share} bytes, the maximum of one client"
        else:
            body.size += size
            self.held += size
            self.peers[peer] = of_peer + size
            return
        raise overloaded(self._overload, problem)

    def check_encoding(self, encoding: str) -> None:
        """Raises HttpError 415 for a Content-Encoding that is not accepted."""
        if self._compressed and encoding in _ENCODINGS:
            return
        accepted = ", ".join(_ENCODINGS) if self._compressed else "identity"
        problem = (
            f"expected one of {accepted}"
            if self._compressed
            else ("send the body uncompressed, or start dynctl serve with --compressed-requests")
        )
        raise HttpError(
            415, f"Content-Encoding {encoding[:40]!r} is not accepted: {problem}",
            "invalid_request_error", "compressed_body", headers={"accept-encoding": accepted},
        )  # fmt: skip


#: The bodies of an application; the default has the default limits.
BODIES: Final = web.AppKey("bodies", Bodies)


def bodies_of(http: ClientRequest) -> Bodies:
    bodies = http.app.get(BODIES)
    return Bodies(Limits()) if bodies is None else bodies


def too_large(limit: int) -> HttpError:
    return HttpError(
        413, f"the body has more than {limit} bytes, the maximum", "invalid_request_error",
        "body_too_large", headers={"connection": "close"},
    )  # fmt: skip


def _corrupt(encoding: str) -> HttpError:
    return HttpError(
        400, f"the body is not valid {encoding}", "invalid_request_error", "corrupt_body",
        headers={"connection": "close"},
    )  # fmt: skip
