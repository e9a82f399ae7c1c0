"""``GET /ui``: who may see the page, and its answers.

Operators see it, as all routing details: programs of this machine, or the admin token. A browser
gets the token by a form and keeps a signed date instead of it, so no page, script or history has
the token. The page only reads.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import wraps
from importlib.resources import files
from typing import Final
from urllib.parse import parse_qs, urlsplit

from aiohttp import web

from dynctl.findings.catalogue import all_codes
from dynctl.findings.pages import page as code_page
from dynctl.serving.http.auth import is_operator
from dynctl.serving.http.bodies import bodies_of
from dynctl.serving.http.process import ServingProcess
from dynctl.serving.routing.refusal import HttpError
from dynctl.web.page import View, explain_page, finding_page, page, problem_page, rate_tiles
from dynctl.web.reader import OwnReader, Readings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Seconds for which a browser stays signed in.
SESSION_S: Final = 12 * 3600
_FORM_BYTES: Final = 8 * 1024
#: Views that are kept for other viewers until the next reading.
_KEPT: Final = 32
_COOKIE: Final = "dynctl-ui"

_SECURE: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_STATIC: Final = {
    "style.css": "text/css",
    "script.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


def page_routes(process: ServingProcess) -> list[web.RouteDef]:
    """The endpoints of the page."""
    return WebPage(process).routes()


class WebPage:
    """The handlers of one application."""

    def __init__(self, process: ServingProcess) -> None:
        self._process = process
        self._token = process.config.api_token
        self._readings = Readings(OwnReader(process), "this frontend", wall=process.service.wall)
        #: The views of the last frame.
        self._views: OrderedDict[tuple[View, bool], str] = OrderedDict()
        self._viewed: object = None
        self._drawing = asyncio.Lock()
        self._files = {
            name: ((files("dynctl.web") / "files" / name).read_bytes(), kind)
            for name, kind in _STATIC.items()
        }

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/ui", self._seen(self.index)),
            web.get("/ui/decisions/{id}", self._seen(self.decision)),
            web.get("/ui/codes/{code}", self._seen(self.code)),
            web.get("/ui/files/{name}", self.file),
            web.post("/ui/session", self.sign_in),
            web.post("/ui/leave", self.leave),
        ]

    # -- pages -----------------------------------------------------------------------------

    async def index(self, http: web.Request) -> web.StreamResponse:
        """``GET /ui[?sort=COLUMN&desc=1&q=TEXT&domain=VALUE]``."""
        view, signed_in = View.of(http.query), self._signed_in(http)
        frame = await self._readings.frame()
        async with self._drawing:
            if self._viewed is not frame:
                self._views.clear()
                self._viewed = frame
            text = self._views.get((view, signed_in))
            if text is None:
                # In a thread: a full page takes milliseconds, and streams of tokens wait here.
                rates = rate_tiles(self._readings.history, frame.snapshot.at)
                text = await asyncio.to_thread(page, frame, view, rates, signed_in=signed_in)
                self._views[view, signed_in] = text
                if len(self._views) > _KEPT:
                    self._views.popitem(last=False)
        return _html(text)

    async def decision(self, http: web.Request) -> web.StreamResponse:
        """``GET /ui/decisions/{id}[?all=1]``."""
        found = await self._readings.reader.decision(http.match_info["id"])
        return _html(
            await asyncio.to_thread(explain_page, found, show_all=http.query.get("all") == "1")
        )

    async def code(self, http: web.Request) -> web.StreamResponse:
        """``GET /ui/codes/{code}``: as ``dynctl explain``."""
        entry = all_codes().get(http.match_info["code"].upper())
        if entry is None:
            return _html(problem_page("Unknown code", "No finding has this code."), 404)
        return _html(finding_page(code_page(entry)))

    async def file(self, http: web.Request) -> web.StreamResponse:
        """Style, script and icon: the same for all, so no access is needed."""
        found = self._files.get(http.match_info["name"])
        if found is None:
            return _html(problem_page("Not found", "The page has no such file."), 404)
        body, kind = found
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {**_SECURE, "Cache-Control": "no-cache", "ETag": tag}
        if http.headers.get("if-none-match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    # -- access ----------------------------------------------------------------------------

    async def sign_in(self, http: web.Request) -> web.StreamResponse:
        """``POST /ui/session`` with the form field ``token``: a cookie for a right one."""
        if self._token is None:
            return _to_the_page() if is_operator(http, None) else self._refused()
        if not _from_own_page(http):
            return _html(problem_page("Refused", "The form is not of this page."), 403)
        offered = await _field(http, "token")
        right = hmac.compare_digest(offered.encode("utf-8", "surrogateescape"), self._key)
        if not right and not is_operator(http, self._token):
            text = "Wrong token." if offered else "The token is required."
            return _html(problem_page("Sign in", text, sign_in=True), 401)
        answer = _to_the_page()
        until = int(self._process.service.wall()) + SESSION_S
        answer.set_cookie(
            _cookie_name(http),
            f"{until}.{self._signature(until)}",
            max_age=SESSION_S,
            path="/ui",
            secure=http.secure,
            httponly=True,
            samesite="Strict",
        )
        return answer

    async def leave(self, http: web.Request) -> web.StreamResponse:
        """``POST /ui/leave``: the browser forgets that it signed in; not for a form of others."""
        answer = _to_the_page()
        if _from_own_page(http):
            answer.del_cookie(_cookie_name(http), path="/ui")
        return answer

    @property
    def _key(self) -> bytes:
        return (self._token or "").encode()

    def _signature(self, until: int) -> str:
        return hmac.new(self._key, b"dynctl web page %d" % until, hashlib.sha256).hexdigest()

    def _signed_in(self, http: web.Request) -> bool:
        """Whether the request has a valid cookie: a date in the future that the token signed."""
        if self._token is None:
            return False
        until, _, signature = http.cookies.get(_cookie_name(http), "").partition(".")
        if not (until.isascii() and until.isdigit() and len(until) <= 12):
            return False
        expected = self._signature(int(until))
        valid = hmac.compare_digest(signature.encode("utf-8", "surrogateescape"), expected.encode())
        now = self._process.service.wall()
        return valid and now < int(until) <= now + SESSION_S + 60

    def _seen(self, handler: Handler) -> Handler:
        """``handler`` for operators; a page with what is missing for all others."""

        @wraps(handler)
        async def behind(http: web.Request) -> web.StreamResponse:
            if not (is_operator(http, self._token, links=True) or self._signed_in(http)):
                return self._refused()
            try:
                return await handler(http)
            except HttpError as error:
                return _html(problem_page("Not shown", error.message), error.status)

        return behind

    def _refused(self) -> web.Response:
        if self._token is not None:
            text = "This page shows workers and decisions: it needs the admin token."
            return _html(problem_page("Sign in", text, sign_in=True), 401)
        text = (
            "Without a token only browsers on the machine of the frontend may see this page, at "
            "its loopback address. Set --admin-token on dynctl serve, and sign in with the token."
        )
        return _html(problem_page("Not allowed", text), 403)


def _html(text: str, status: int = 200) -> web.Response:
    return web.Response(
        text=text,
        status=status,
        content_type="text/html",
        charset="utf-8",
        headers={**_SECURE, "Cache-Control": "no-store"},
    )


def _to_the_page() -> web.Response:
    return web.Response(
        status=303, headers={**_SECURE, "Location": "/ui", "Cache-Control": "no-store"}
    )


def _cookie_name(http: web.Request) -> str:
    """Cookies are those of a host: frontends on its other ports have cookies of their own."""
    return f"{_COOKIE}-{http.url.port or 0}"


def _from_own_page(http: web.Request) -> bool:
    """Whether a form was sent by this page, or by a program."""
    if http.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = http.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == http.host


async def _field(http: web.Request, name: str) -> str:
    """A field of the form, empty without one. Raises HttpError (400, 408, 413)."""
    if http.content_type != "application/x-www-form-urlencoded":
        return ""
    with bodies_of(http).of(http) as body:
        raw = await body.read(http, _FORM_BYTES)
    try:
        fields = parse_qs(raw.decode("utf-8", "surrogateescape"), max_num_fields=8)
    except ValueError:
        return ""
    return fields.get(name, [""])[0]
