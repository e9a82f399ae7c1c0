"""Workers that come to a running router, and leave it: POST and DELETE /v1/workers."""

import asyncio

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.serving.http.openapi import openapi_document
from dynctl.sources.frontend.source import FrontendSource
from tests.dynctl.serving.fleets import site


async def test_workers_are_added_and_removed_with_the_rights_of_cordon():
    async with site([{"name": "a"}, {"name": "b"}]) as fleet:
        source = FrontendSource([fleet.frontend.url])
        url = next(row["endpoint"] for row in (await fleet.get("/v1/workers"))[1]["workers"])
        # Under another address, as an engine is added once.
        body = {"url": url.replace("127.0.0.1", "localhost"), "name": "c", "zone": "zone-c"}
        tried = await asyncio.to_thread(source.add, body, dry_run=True)
        assert (tried.change, tried.applied, tried.status) == ("added", False, None)
        added = await asyncio.to_thread(source.add, body)
        assert (added.change, added.applied, added.status) == ("added", True, "ready")
        assert added.domains == {"zone": "zone-c"}
        assert (await asyncio.to_thread(source.add, body)).change == "replaced"
        assert len((await fleet.get("/v1/workers"))[1]["workers"]) == 3
        tried = await asyncio.to_thread(source.remove, "c", dry_run=True)
        assert (tried.change, tried.applied) == ("removed", False)
        gone = await asyncio.to_thread(source.remove, "c")
        assert (gone.change, gone.applied, gone.running, gone.same) == ("removed", True, 0, 0)
        names = [row["name"] for row in (await fleet.get("/v1/workers"))[1]["workers"]]
        assert names == ["a", "b"]


async def test_a_program_without_the_token_gets_no_key_of_clients():
    body = {"url": "http://127.0.0.1:9", "name": "x", "forward-authorization": True}
    async with site([{"name": "a"}]) as fleet:
        status, found, _ = await fleet.post("/v1/workers", body)
        assert (status, "--admin-token" in found["error"]["message"]) == (400, True)
        foreign = {"origin": "http://127.0.0.1:3000"}
        status, _, _ = await fleet.post("/v1/workers", body, headers=foreign)
        assert status == 403


async def test_a_frontend_that_refuses_leaves_the_others_as_they_were():
    async with site([{"name": "a"}]) as one, site([{"name": "a"}], api_token="t0ken") as other:
        source = FrontendSource([one.frontend.url, other.frontend.url], "wrong")
        with pytest.raises(UsageProblem, match=other.frontend.url):
            await asyncio.to_thread(source.add, {"url": "http://127.0.0.1:9", "name": "x"})
        assert len((await one.get("/v1/workers"))[1]["workers"]) == 1


async def test_the_interface_document_has_both():
    async with site([{"name": "a"}]) as fleet:
        document = openapi_document(fleet.frontend.build_app(), "dynctl")
        post = document["paths"]["/v1/workers"]["post"]
        schema = post["requestBody"]["content"]["application/json"]["schema"]
        fields = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        assert {"url", "name", "kv-events", "block-size", "domains"} <= set(fields["properties"])
        assert fields["required"] == ["url"]
        delete = document["paths"]["/v1/workers/{worker}"]["delete"]
        assert delete["parameters"][0]["name"] == "worker"
