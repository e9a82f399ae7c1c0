"""An engine behind a real Dynamo frontend, through ``dynctl serve attach``."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.dynamo.client import Answer
from tests.dynamo.fleet import DYNAMO_PYTHON, DynamoFleet
from tests.dynamo.processes import Process, ProcessGroup
from tests.vllm.stack import BLOCK, Engine, Stack
from tests.waiting import until_now

START_S = 60.0


class Joined:
    """The engine, its sidecar and the frontend."""

    def __init__(
        self, group: ProcessGroup, fleet: DynamoFleet, engine: Engine, model: str, role: str = ""
    ) -> None:
        self.fleet, self.engine = fleet, engine
        self._group, self._model, self._role = group, model, role
        self.sidecar = self.attach()

    def attach(self) -> Process:
        keys = f"{self.engine.url},kv-events={self.engine.events},replay={self.engine.replay}"
        keys += f",role={self._role}" if self._role else ""
        command = [sys.executable, "-m", "dynctl", "serve", "attach", "--engine", keys]
        command += ["--model-path", self._model, "--max-num-seqs", "8"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "ETCD", "NATS"))}
        self.sidecar = self._group.start(
            f"sidecar{self._role}", command, clean | self.fleet.reached_by
        )
        return self.sidecar

    def workers(self, count: int) -> None:
        """Wait until the frontend counts these, and accepts requests if there are any."""
        frontend = self.fleet.frontend

        def counted() -> bool:
            found = sum(frontend.worker_counts().values())
            return found == count and (frontend.accepts() or not count)

        until_now(counted, START_S)

    def ask(self, prompt: Any, tokens: int = 8, **fields: Any) -> Answer:
        nvext = {"extra_fields": ["worker_id", "timing"]}
        answer = self.fleet.frontend.complete(
            prompt, max_tokens=tokens, temperature=0, nvext=nvext, timeout=120, **fields
        )
        assert answer.ok, (answer.status, answer.body, self.sidecar.tail(), self.fleet.logs())
        return answer

    def hit_rate(self, prompt: str) -> float:
        """The part of a prompt that the frontend's index expects to be cached."""
        return float(self.ask(prompt, 1).timing["kv_hit_rate"])


@contextmanager
def joined_engine(stack: Stack) -> Iterator[Joined]:
    """One engine of the stack behind a Dynamo frontend; both are gone afterwards."""
    if not DYNAMO_PYTHON:
        pytest.exit("DYNCTL_DYNAMO_PYTHON is not set; `make` sets it", returncode=2)
    engine = stack.engine("a")
    model = stack.directory / "models" / "llama"
    with DynamoFleet([], model_dir=model, block_size=BLOCK) as fleet:
        stack.wait(engine)
        group = ProcessGroup(fleet.directory)
        try:
            made = Joined(group, fleet, engine, str(model))
            made.workers(1)
            yield made
        finally:
            group.close()
