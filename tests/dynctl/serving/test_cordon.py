"""Workers that an operator takes out of routing: at once, with their requests left alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.documents.workers import CORDONED
from dynctl.sources.frontend.source import FrontendSource
from tests.dynctl.serving.fleets import chat_body, site
from tests.dynctl.serving.routed import worker
from tests.waiting import until

ENGINES: list[dict[str, Any]] = [
    {"name": "a", "speedup_ratio": 1.0, "default_output_tokens": 4000},
    {"name": "b"},
]


@pytest.mark.seed("dynamo-1.6: operation: take a worker out")
async def test_routing_stops_at_once_and_running_requests_go_on():
    async with site(ENGINES) as fleet:
        source = FrontendSource([fleet.frontend.url])
        await asyncio.to_thread(source.cordon, "b", cordoned=True)
        body = chat_body("a long answer", stream=True, max_tokens=4000)
        async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
            assert answer.status == 200
            await answer.content.readany()
            await asyncio.to_thread(source.cordon, "b", cordoned=False)
            tried = await asyncio.to_thread(source.cordon, "a", cordoned=True, dry_run=True)
            assert (tried.applied, tried.before, tried.running, tried.same) == (False, False, 1, 1)
            change = await asyncio.to_thread(source.cordon, "a", cordoned=True)
            assert (change.applied, change.running, change.same) == (True, 1, 1)
            for turn in range(4):
                status, _, headers = await fleet.chat(f"question {turn}", max_tokens=2)
                assert status == 200
                _, made = await fleet.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
                assert made["winner"]["decode"]["worker"] == "b"
            assert await asyncio.to_thread(source.running, "a") == 1
            assert await answer.content.readany()
        await fleet.idle()
        assert await asyncio.to_thread(source.running, "a") == 0
        again = await asyncio.to_thread(source.cordon, "a", cordoned=False)
        assert again.before
        assert fleet.service.router.registry.unavailable_reason(change.worker_id) is None


async def test_every_screen_names_the_operator():
    async with site([{"name": "a"}, {"name": "b"}]) as fleet:
        status, row, _ = await fleet.post("/v1/workers/a/cordon", {})
        assert (status, row["status"], row["reason"]) == (200, "unavailable", CORDONED)
        _, load = await fleet.get("/v1/fleet")
        codes = {(one["code"], one["subject"]) for one in load["conditions"]}
        assert ("WORKER_CORDONED", "a") in codes
        assert [one.get("reason") for one in load["loads"]] == [CORDONED, None]
        status, result, _ = await fleet.post("/v1/route", chat_body("hello"))
        assert status == 200
        [left_out] = [
            one
            for step in result["decode"]["funnel"]
            if step["filter"] == "available"
            for one in step["rejected"]
        ]
        assert (left_out["worker"], left_out["message"]) == ("a", CORDONED)
        assert (await fleet.post("/v1/workers/b/cordon", {}))[0] == 200
        status, refusal, _ = await fleet.chat()
        assert (status, CORDONED in refusal["error"]["message"]) == (503, True)
        assert (await fleet.post("/v1/workers/a/uncordon", {}))[0] == 200
        assert (await fleet.chat())[0] == 200
        assert (await fleet.post("/v1/workers/none/cordon", {}))[0] == 404


async def test_a_cordon_holds_while_the_engine_is_away_and_after_it_returns():
    async with site([{"name": "a"}, {"name": "b"}]) as fleet:
        service = fleet.service
        service.membership.cordon("a", cordoned=True)
        found = service.membership.find("a")
        assert found is not None

        def reason() -> Any:
            return service.router.registry.unavailable_reason(found.worker_id)

        await fleet.engines["a"].close()
        await until(lambda: (reason() or "").startswith(f"{CORDONED}; "))
        service.membership.cordon("a", cordoned=False)
        assert reason() is not None
        assert CORDONED not in str(reason())
        service.membership.cordon("a", cordoned=True)
        service.membership.remove(found.worker_id)
        service.membership.upsert(worker(found.worker_id, name="a", model="demo"))
        assert reason() == CORDONED


async def test_a_cordon_is_lifted_for_the_return_of_a_worker_that_left():
    async with site([{"name": "a"}]) as fleet:
        cordoned = fleet.service.membership.cordoned
        fleet.service.membership.cordon("left", cordoned=True)
        assert (await fleet.post("/v1/workers/left/cordon", {}))[0] == 404
        status, answer, _ = await fleet.post("/v1/workers/left/uncordon", {})
        assert (status, answer) == (200, {"uncordoned": "left"})
        assert not cordoned
        assert (await fleet.post("/v1/workers/left/uncordon", {}))[0] == 404
    async with site([{"name": "a"}], admin_api=False) as fleet:
        fleet.service.membership.cordon("left", cordoned=True)
        assert (await fleet.post("/v1/workers/left/uncordon", {}))[0] == 403


async def test_only_operators_cordon_and_only_where_the_admin_api_is_on():
    async with site([{"name": "a"}], api_token="secret") as fleet:
        assert (await fleet.post("/v1/workers/a/cordon", {}))[0] == 401
    async with site([{"name": "a"}], admin_api=False) as fleet:
        status, body, _ = await fleet.post("/v1/workers/a/cordon", {})
        assert (status, body["error"]["code"]) == (403, "admin_api_disabled")
        assert not fleet.service.membership.cordoned


async def test_where_one_frontend_fails_the_others_are_set_back():
    async with site([{"name": "a"}]) as one, site([{"name": "a"}], admin_api=False) as two:
        both = FrontendSource([one.frontend.url, two.frontend.url])
        with pytest.raises(UsageProblem, match="admin API"):
            await asyncio.to_thread(both.cordon, "a", cordoned=True)
        assert not one.service.membership.cordoned
