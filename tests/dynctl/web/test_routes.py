"""Who sees the page, and what a browser is told about it."""

import re
from collections.abc import Mapping
from contextlib import asynccontextmanager

import pytest

from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.services.router_server import build_router
from dynctl.tokenization import DEMO_MODEL_DIR
from dynctl.web.routes import SESSION_S, page_routes
from tests.dynctl.serving.fleets import SLOW_HEALTH, Site, frontend_with_page, site
from tests.dynctl.serving.fleets import zone as in_zone

SECRET = "an admin token of the tests"
PAGES = ("/ui", "/ui?sort=name", "/ui/decisions/x", "/ui/codes/DYT0901")


def fleet(**values):
    return site(
        [{"name": "a0", **in_zone("zone-a")}], health=SLOW_HEALTH, kind=frontend_with_page, **values
    )


async def get(found: Site, path: str, **headers: str) -> tuple[int, str, Mapping[str, str]]:
    async with found.client.get(found.url(path), headers=headers, allow_redirects=False) as answer:
        return answer.status, await answer.text(), answer.headers


async def sign_in(found: Site, token: str, **headers: str) -> tuple[int, str]:
    """The status, and the cookie that the browser got."""
    async with found.client.post(
        found.url("/ui/session"), data={"token": token}, headers=headers, allow_redirects=False
    ) as answer:
        assert token == "" or token not in await answer.text()
        return answer.status, answer.headers.get("set-cookie", "")


@pytest.mark.seed("dynamo-1.6: operation: web page")
async def test_the_page_of_a_frontend():
    async with fleet() as found:
        await found.chat("a prompt that nobody else may read")
        status, text, headers = await get(found, "/ui")
        assert status == 200
        assert headers["content-type"].startswith("text/html")
        assert "a0" in text
        assert "a prompt" not in text
        (decision,) = re.findall(r"/ui/decisions/([^\"]+)", text)
        status, text, _ = await get(found, f"/ui/decisions/{decision}")
        assert status == 200
        assert "full block" in text
        assert f"dynctl why {decision}" in text
        status, text, _ = await get(found, "/ui/decisions/unknown")
        assert (status, "no decision" in text) == (404, True)
        status, text, _ = await get(found, "/ui/codes/dyt0901")
        assert (status, "DYT0901" in text) == (200, True)
        assert (await get(found, "/ui/codes/<b>"))[0] == 404


@asynccontextmanager
async def _router(found: Site, token: str | None = None):
    config = FrontendConfig(
        port=0,
        workers=(f"{found.engines['a0'].url},name=a0",),
        model_path=DEMO_MODEL_DIR,
        api_token=token,
        health=SLOW_HEALTH,
    )
    process = build_router(config, (page_routes,))
    await process.start()
    try:
        yield process
    finally:
        await process.close()


async def test_the_page_of_a_router_and_of_a_frontend_that_shares_it():
    async with fleet() as found, _router(found) as router:
        async with found.client.get(f"{router.url}/ui") as answer:
            assert answer.status == 200
            assert "a0" in await answer.text()
        config = FrontendConfig(port=0, router_url=router.url, model_path=DEMO_MODEL_DIR)
        sharing = build_frontend(config, extra_routes=(page_routes,))
        await sharing.start()
        try:
            body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
            url = f"{sharing.url}/v1/chat/completions"
            async with found.client.post(url, json=body) as answer:
                decision = answer.headers["x-dynctl-decision"]
            async with found.client.get(f"{sharing.url}/ui") as answer:
                text = await answer.text()
            assert "a0" in text
            async with found.client.get(f"{sharing.url}/ui/decisions/{decision}") as answer:
                assert answer.status == 200
        finally:
            await sharing.close()


async def test_headers_allow_only_own_files_and_no_frame():
    async with fleet() as found:
        names = ("style.css", "script.js", "icon.svg")
        kinds = []
        for path in (*PAGES, *(f"/ui/files/{name}" for name in names)):
            _, text, headers = await get(found, path)
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert text
            kinds.append(headers["content-type"].partition(";")[0])
        assert kinds[-3:] == ["text/css", "text/javascript", "image/svg+xml"]
        tag = (await get(found, "/ui/files/style.css"))[2]["etag"]
        assert (await get(found, "/ui/files/style.css", **{"if-none-match": tag}))[0] == 304
        assert (await get(found, "/ui/files/page.html"))[0] == 404
        assert (await get(found, "/ui/files/..%2froutes.py"))[0] == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "dynctl.example.com"},
        {"origin": "http://127.0.0.1:3000"},
        {"x-forwarded-for": "192.0.2.7"},
    ],
    ids=str,
)
async def test_without_a_token_only_this_machine_sees_it(headers):
    async with fleet() as found:
        for path in PAGES:
            status, text, _ = await get(found, path, **headers)
            assert status == 403
            assert "--admin-token" in text
            assert "a0" not in text
        assert (await sign_in(found, "guess", **headers))[0] == 403


async def test_with_a_token_a_browser_signs_in():
    async with fleet(api_token=SECRET) as found:
        for path in PAGES:
            status, text, _ = await get(found, path)
            assert status == 401
            assert 'type="password"' in text
            assert "a0" not in text
        for wrong in ("", "guess", SECRET + "x", SECRET[:-1]):
            assert await sign_in(found, wrong) == (401, "")
        status, cookie = await sign_in(found, SECRET)
        assert status == 303
        value = cookie.partition(";")[0]
        assert SECRET not in cookie
        for part in ("HttpOnly", "SameSite=Strict", "Path=/ui"):
            assert part in cookie
        status, text, _ = await get(found, "/ui", cookie=value)
        assert status == 200
        assert "a0" in text
        assert "Sign out" in text
        # The cookie is for the page only.
        assert (await found.get("/v1/workers", headers={"cookie": value}))[0] == 401
        status, text, _ = await get(found, "/ui", authorization=f"Bearer {SECRET}")
        assert (status, "Sign out" in text) == (200, False)


async def test_forged_and_old_cookies_are_refused():
    async with fleet(api_token=SECRET) as found:
        _, cookie = await sign_in(found, SECRET)
        name, _, value = cookie.partition(";")[0].partition("=")
        until, _, signature = value.partition(".")
        forged = [f"{int(until) + 1}.{signature}", f"{until}.{'0' * 64}", f"{until}.", "", "x.y"]
        for one in (*forged, f"{10**30}.{signature}", f"{until}.é"):
            headers = {"cookie": f"{name}={one}".encode("utf-8", "ignore").decode("latin-1")}
            assert (await get(found, "/ui", **headers))[0] == 401, one
        wall = found.service.wall
        found.service.wall = lambda: wall() + SESSION_S + 1
        assert (await get(found, "/ui", cookie=f"{name}={value}"))[0] == 401


async def test_a_form_of_another_page_is_refused():
    async with fleet(api_token=SECRET) as found:
        for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
            assert await sign_in(found, SECRET, **headers) == (403, "")
        own = {"origin": found.frontend.url, "sec-fetch-site": "same-origin"}
        assert (await sign_in(found, SECRET, **own))[0] == 303


async def test_signing_out_needs_a_form_of_the_page():
    async with fleet(api_token=SECRET) as found:
        headers = {"sec-fetch-site": "cross-site"}
        url = found.url("/ui/leave")
        async with found.client.post(url, headers=headers, allow_redirects=False) as answer:
            assert answer.status == 303
            assert not answer.cookies


async def test_another_site_may_link_to_the_page_and_not_load_it():
    """Without a token, the browser on this machine is an operator's; pages of others are not."""
    site = {"sec-fetch-site": "cross-site"}
    link = {**site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    frame = {**site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}
    image = {**site, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    async with fleet() as found:
        for path, headers, status in (
            ("/ui", link, 200),
            ("/ui", frame, 403),
            ("/ui", image, 403),
            ("/v1/view", image, 403),
            ("/v1/view", link, 403),
            ("/v1/view", {"sec-fetch-site": "none"}, 200),
        ):
            async with found.client.get(found.url(path), headers=headers) as answer:
                assert answer.status == status, (path, headers)


async def test_a_form_has_a_bound_and_other_bodies_have_no_token():
    async with fleet(api_token=SECRET) as found:
        url = found.url("/ui/session")
        async with found.client.post(url, data={"token": "x" * 100_000}) as answer:
            assert answer.status == 413
        async with found.client.post(url, json={"token": SECRET}) as answer:
            assert answer.status == 401
        fields = "&".join(f"a{i}=1" for i in range(50))
        kind = {"content-type": "application/x-www-form-urlencoded"}
        async with found.client.post(url, data=fields, headers=kind) as answer:
            assert answer.status == 401


async def test_signing_out_ends_the_session_of_the_browser():
    async with (
        fleet(api_token=SECRET) as found,
        found.client.post(found.url("/ui/leave"), allow_redirects=False) as answer,
    ):
        assert answer.status == 303
        assert "Max-Age=0" in answer.headers["set-cookie"]


async def test_the_page_changes_nothing():
    methods = {
        (route.method, route.path) for route in page_routes(build_frontend(FrontendConfig(port=0)))
    }
    assert {path for method, path in methods if method != "GET"} == {"/ui/session", "/ui/leave"}


async def test_viewers_share_a_reading():
    async with fleet() as found:
        reads = 0
        steps = found.frontend.administration.feed.steps

        def counted(known=None):
            nonlocal reads
            reads += 1
            return steps(known)

        found.frontend.administration.feed.steps = counted
        clock = found.frontend.service.clock
        before = clock()
        for _ in range(30):
            assert (await get(found, "/ui"))[0] == 200
        assert reads <= 2 + (clock() - before)
