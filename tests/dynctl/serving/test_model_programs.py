"""Files of a model that cost more than their text, and a frontend beside them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dynctl.serving.routing.prompts import Prompt, PromptTokenizers
from dynctl.tokenization import DEMO_MODEL_DIR, load_tokenizer
from tests.dynctl.serving.fleets import Site, site
from tests.waiting import patience

#: Sorts 400,000 texts of 8,000 equal characters: in this process it takes seconds, in few calls.
SORT = "{% set rows = ['a' * 8000] * 400000 %}{{ rows | sort | length }}"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if 'snow' in messages[0].content %}" + SORT + "{% endif %}"
)
#: A pattern that takes the square of a number's length.
DIGITS = {
    "type": "Split",
    "pattern": {"Regex": r"\d{1,3}(?=(?:\d{3})*\b)"},
    "behavior": "Isolated",
    "invert": False,
}


def model(tmp_path: Path, *, template: str | None = None, pattern: bool = False) -> Path:
    """The demo's model with another template, or with a costly pre-tokenizer."""
    made = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))
    if template is not None:
        (made / "chat_template.jinja").write_text(template, encoding="utf-8")
    if pattern:
        content = json.loads((made / "tokenizer.json").read_text(encoding="utf-8"))
        parts = [DIGITS, content["pre_tokenizer"]]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
        (made / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return made


async def slowest_live(fleet: Site, work: asyncio.Task[object]) -> float:
    """Seconds of the slowest ``GET /live`` while ``work`` runs."""
    slowest, last = 0.0, time.perf_counter()
    while not work.done():
        # The pause counts: the loop of frontend and client may stand still in it.
        await asyncio.sleep(0.002)
        status, _ = await fleet.get("/live")
        assert status == 200
        slowest, last = max(slowest, time.perf_counter() - last), time.perf_counter()
    return slowest


async def test_no_text_of_a_process_is_awaited_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(model(tmp_path, template=TEMPLATE, pattern=True))
    threads: list[int] = []
    child = tokenizer._parts
    assert child is not None
    running = child._running

    def noted() -> AbstractContextManager[object]:
        threads.append(threading.get_ident())
        return running()

    monkeypatch.setattr(child, "_running", noted)
    tokenizers = PromptTokenizers(tokenizer)
    chat = Prompt(messages=[{"role": "user", "content": "hello"}])
    for prompt in (chat, Prompt(text="hello"), Prompt(text="hello", keep=2)):
        assert (await tokenizers.tokenize("m", prompt)).ids
    assert len(threads) == 4
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("kind", ["template", "pattern"])
async def test_a_costly_file_of_a_model_leaves_the_frontend_free(tmp_path: Path, kind: str) -> None:
    template = TEMPLATE if kind == "template" else None
    made = model(tmp_path, template=template, pattern=kind == "pattern")
    text = "snow" if template else "7" * 400_000
    async with site([{"name": "a0"}], model_path=made) as fleet:
        assert (await fleet.chat("hello"))[0] == 200
        costly: asyncio.Task[object] = asyncio.create_task(fleet.chat(text))
        slowest = await slowest_live(fleet, costly)
        status, _, _ = await fleet.chat(text)
        assert status in (400, 500)
        # The aim is 50 ms on two busy cores. In the process of the frontend this takes seconds.
        assert slowest < patience(0.2)
        [held] = [one for one in fleet.service.conditions if one.code == "MODEL_FILE_OVER_LIMIT"]
        file = "chat_template.jinja" if template else "tokenizer.json"
        assert held.message.startswith(f"{made / file}")
        limit = r"more than (2(\.0 s| s of CPU)|1,024 MiB of memory); 2 requests are refused, the"
        assert re.search(limit, held.message)
        _, health = await fleet.get("/health")
        assert "MODEL_FILE_OVER_LIMIT" in json.dumps(health)
        assert (await fleet.chat("hello"))[0] == 200
