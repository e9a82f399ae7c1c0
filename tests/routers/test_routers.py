"""`dynctl test` behind routers that others made: quiet where they are well, and right about them.

One test for each router, as each takes seconds to start: its engines get one fault after another.
"""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web

from tests.dynctl.experiments.faulty_proxy import Fault, faulty_proxy
from tests.dynctl.experiments.test_faults import (
    AllCached,
    Buffers,
    CutsHistory,
    ErrorAs200,
    ErrorInStream,
    NewIdInFront,
    NoEnd,
    NoSalt,
    NoStreamOptions,
    NoUsage,
    OtherSalt,
    OtherTemplate,
    Repeats,
    engines_alone,
)
from tests.dynctl.experiments.trials import result_of, wrong
from tests.routers.router import ROUTERS, router_before

#: What is wrong with a router as it comes. sglang-router 0.3 sends on the fields that it knows, and
#: cache_salt is none of them: tenants share caches.
KNOWN: Final = {"sglang-router": {"DYE0601"}}
FAULTS: Final[tuple[tuple[type[Fault], str, str], ...]] = (
    (ErrorAs200, "names", "DYE0102"),
    (NoUsage, "tokens", "DYE0201"),
    (OtherTemplate, "tokens", "DYE0202"),
    (Buffers, "streams", "DYE0301"),
    (NoEnd, "streams", "DYE0302"),
    (ErrorInStream, "streams", "DYE0302"),
    (NoStreamOptions, "streams", "DYE0303"),
    (Repeats, "streams", "DYE0305"),
    (NewIdInFront, "reuse", "DYE0401"),
    (AllCached, "reuse", "DYE0403"),
    (CutsHistory, "reuse", "DYE0404"),
    (NoSalt, "isolation", "DYE0601"),
    (OtherSalt, "isolation", "DYE0602"),
)
#: Faults that a router hides: what it does not send on cannot get lost.
HIDDEN: Final = {"sglang-router": {OtherSalt}}
#: Of engines that generate 32 tokens in 0.3 s.
SLOW: Final = {"speedup_ratio": 1.0}
#: What routers for SGLang read of an engine.
SGLANG_FACTS: Final = ("/model_info", "/get_model_info", "/server_info", "/get_server_info")


class Switch:
    """The fault that all engines have now."""

    def __init__(self) -> None:
        self.fault = Fault()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fault, name)


async def show_facts(_: web.Request) -> web.Response:
    return web.json_response({"model_path": "demo", "served_model_name": "demo"})


@pytest.mark.parametrize("name", ROUTERS or ["none"])
async def test_a_router_is_quiet_and_each_fault_of_its_engines_is_named(name: str, tmp_path: Path):
    switch: Any = Switch()
    switch.routes = [web.get(path, show_facts) for path in SGLANG_FACTS]
    async with AsyncExitStack() as stack:
        # Slow ones: a held answer that a busy machine sends in parts is no stream of theirs.
        engines = await stack.enter_async_context(engines_alone(*({**SLOW} for _ in range(3))))
        urls = [
            await stack.enter_async_context(faulty_proxy(engine.url, switch)) for engine in engines
        ]
        url = await stack.enter_async_context(router_before(name, urls, tmp_path))
        whole = await result_of(url, model="demo")
        assert wrong(whole) == KNOWN.get(name, set()), [
            check for check in whole.checks if check.findings
        ]
        codes = {}
        for fault, group, _ in FAULTS:
            switch.fault = fault()
            codes[fault.__name__] = wrong(await result_of(url, only=(group,), model="demo"))
    assert codes == {
        fault.__name__: KNOWN.get(name, set()) if fault in HIDDEN.get(name, ()) else {code}
        for fault, _, code in FAULTS
    }


@pytest.mark.skipif("smg" not in ROUTERS, reason="smg, which starts fastest, is not installed")
async def test_a_router_that_does_not_look_at_prompts(tmp_path: Path):
    """It has no gauge of its requests, so the load of others may be the cause."""
    async with (
        engines_alone({}, {}) as engines,
        router_before("smg", [engine.url for engine in engines], tmp_path, "round_robin") as url,
    ):
        report = await result_of(url, only=("reuse",), model="demo")
    assert wrong(report) == set()
    doubt = next(check.message for check in report.checks if check.code == "DYE0402")
    assert re.match(r"\d of 8 repeats: the router does not read caches, or load decided", doubt)
