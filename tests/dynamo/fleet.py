"""A real Dynamo deployment on loopback: frontends, mock workers or workers that hold requests.

No GPU; by default no service either (file discovery, ZMQ events). ``DYNCTL_DYNAMO_PYTHON`` names
the Python that has ai-dynamo; ``make test-dynamo`` makes one and sets it.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tests.contract.nats_server import nats_executable
from tests.dynamo.client import FrontendClient
from tests.dynamo.held import HeldControl
from tests.dynamo.plans import WorkerPlan, aggregated, two_zones
from tests.dynamo.processes import Process, ProcessGroup
from tests.dynamo.versions import FIRST_WITHOUT_NATS, minor, older_environment, version_of
from tests.ports import free_port
from tests.waiting import patience

__all__ = [
    "DYNAMO_PYTHON",
    "DynamoFleet",
    "Frontend",
    "Worker",
    "WorkerPlan",
    "aggregated",
    "hands_over",
    "two_zones",
]

HERE = Path(__file__).resolve().parent
TINY_MODEL = HERE / "tiny-model"
READY_SECONDS = 60.0
LOOPBACK = (
    "DYN_TCP_RPC_HOST",
    "DYN_TCP_RESPONSE_STREAM_HOST",
    "DYN_EVENT_PLANE_HOST",
    "DYN_HTTP_RPC_HOST",
    "DYN_SYSTEM_HOST",
)
"""Without these Dynamo advertises the machine's first address."""

LOG_LEVELS = "info,dynamo_kv_router=debug,dynamo_llm::kv_router=debug"
_COMPLAINT = re.compile(
    r"\b(WARN|ERROR|WARNING|Traceback|panicked)\b(?! +mm_routing|.*: Adding worker )"
)
"""In the log of a Dynamo process; not what each start warns of."""

_FOREIGN = ("DYN_", "DYNCTL_", "ETCD_", "NATS_", "OTEL_", "PYTHON")

# Read when imported, since the tests' environment is emptied of DYNCTL_* variables.
DYNAMO_PYTHON = os.environ.get("DYNCTL_DYNAMO_PYTHON", "")


class Worker:
    """A worker's process. ``held`` is there for kind ``held``; ``instance_id`` once it is ready."""

    def __init__(self, plan: WorkerPlan, process: Process, system_port: int | None) -> None:
        self.plan = plan
        self.process = process
        self.system_port = system_port
        self._control = HeldControl(process) if plan.kind == "held" else None
        self._instance_id: int | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def held(self) -> HeldControl:
        if self._control is None:
            raise AssertionError(f"{self.name} is a mocker; only kind 'held' can be held")
        return self._control

    @property
    def instance_id(self) -> int:
        if self._instance_id is None:
            raise AssertionError(
                f"{self.name} has not reported its instance id\n{self.process.tail()}"
            )
        return self._instance_id

    def learn_instance_id(self) -> bool:
        """Its own metrics name it, for every discovery backend alike. True once it is known."""
        if self.system_port is None:
            return True
        if self._instance_id is None:
            with contextlib.suppress(OSError):
                _, text = FrontendClient(self.system_port).get("/metrics", timeout=2)
                found = re.search(r'dynamo_endpoint="generate",[^}]*worker_id="([0-9a-f]+)"', text)
                if found:
                    self._instance_id = int(found[1], 16)
                elif 'dynamo_endpoint="generate"' in text and "worker_id=" not in text:
                    return True  # before 1.2 its metrics do not name it
        return self._instance_id is not None


def hands_over(frontend: Process) -> bool:
    """Whether the router of each prefill pool that a frontend found is active.

    Dynamo says that a model is ready before that, and answers 503 meanwhile.
    """
    lines = frontend.lines()
    found = [n for n, line in enumerate(lines) if "activating prefill router" in line]
    # The second as 1.4 and older ones write it.
    ends = ("Prefill router target activated", "Prefill router activated successfully")
    active = [n for n, line in enumerate(lines) if any(end in line for end in ends)]
    return max(found, default=-1) <= max(active, default=-1)


class Frontend(FrontendClient):
    """A frontend's process, and a client of it."""

    def __init__(self, process: Process, port: int, model: str) -> None:
        super().__init__(port, model)
        self.process = process

    def log_lines(self, containing: str = "", since: int = 0) -> list[str]:
        """Lines of its log with ``containing`` in them; ``since`` a count of lines seen before."""
        return [line for line in self.process.lines(since) if containing in line]


class DynamoFleet:
    """Starts on enter and is ready then; ends every process on exit.

    ``frontends``: one list of flags for each frontend. ``frontend_args`` and
    ``frontend_environment`` go to all of them, ``worker_args`` to every mocker, ``environment`` to
    every process. ``discovery``: ``file``, or ``etcd`` with ``etcd_endpoints`` (as
    ETCD_ENDPOINTS); ``event_plane``: ``zmq``, or ``nats`` with
    ``nats_server`` (empty: a server of the fleet). ``blocks`` is
    each worker's number of KV blocks; ``speedup`` divides a mocker's times (0: no delays).
    ``directory`` holds logs and, for file discovery, ``kv`` (what DYN_FILE_KV names).
    ``serves`` False: the frontends refuse every request of these workers.
    """

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        *,
        frontends: Sequence[Sequence[str]] = ((),),
        frontend_args: Sequence[str] = (),
        frontend_environment: Mapping[str, str] | None = None,
        worker_args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        discovery: Literal["file", "etcd"] = "file",
        etcd_endpoints: str = "",
        event_plane: Literal["zmq", "nats"] = "zmq",
        nats_server: str = "",
        router_mode: str = "kv",
        namespace: str = "dynamo",
        model: str = "tiny",
        model_dir: Path = TINY_MODEL,
        block_size: int = 16,
        blocks: int = 512,
        speedup: float = 10,
        serves: bool = True,
        python: str = DYNAMO_PYTHON,
    ) -> None:
        if not python:
            raise RuntimeError(
                "DYNCTL_DYNAMO_PYTHON is not set; expected the path of a Python that has "
                "ai-dynamo: run `make test-dynamo`"
            )
        self.plans = list(plans)
        self.model = model
        self.model_dir = model_dir
        self.block_size = block_size
        self.namespace = namespace
        self.workers: dict[str, Worker] = {}
        self.frontends: list[Frontend] = []
        self.directory = Path()
        self._frontend_plans = [tuple(each) for each in frontends]
        self._frontend_args = tuple(frontend_args)
        self._frontend_environment = dict(frontend_environment or {})
        self._worker_args = tuple(worker_args)
        self._blocks = blocks
        self._speedup = speedup
        self._serves = serves
        self._router_mode = router_mode
        self._python = python
        self._group: ProcessGroup | None = None
        self.environment = {
            "DYN_DISCOVERY_BACKEND": discovery,
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": event_plane,
            "DYN_NAMESPACE": namespace,
            "HF_HUB_OFFLINE": "1",
            "DYN_SKIP_TELEMETRY": "1",
            **dict.fromkeys(LOOPBACK, "127.0.0.1"),
            **({"ETCD_ENDPOINTS": etcd_endpoints} if discovery == "etcd" else {}),
            **({"NATS_SERVER": nats_server} if nats_server else {}),
            **(environment or {}),
        }

    # -- coming and going --------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="dynctl-dynamo-"))
        self._group = ProcessGroup(self.directory)
        if self.environment["DYN_DISCOVERY_BACKEND"] == "file":
            (self.directory / "kv").mkdir()
            self.environment.setdefault("DYN_FILE_KV", str(self.directory / "kv"))
        version = version_of(self._python)
        self.environment |= older_environment(version, self.directory, self.model, self.model_dir)
        wants = minor(version) < FIRST_WITHOUT_NATS or self.environment["DYN_EVENT_PLANE"] == "nats"
        if wants and "NATS_SERVER" not in self.environment:
            self._start_nats()
        try:
            for args in self._frontend_plans:
                self._launch_frontend(args)
            for plan in self.plans:
                if not plan.late:
                    self._launch_worker(plan)
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._group is not None:
            error.add_note(self.complaints())
        self.close()

    def close(self) -> None:
        """End every process and remove the directory."""
        if self._group is not None:
            self._group.close()
            self._group = None
        if self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)

    # -- asking ------------------------------------------------------------------------------------

    @property
    def frontend(self) -> Frontend:
        return self.frontends[0]

    @property
    def file_kv(self) -> Path:
        """The discovery directory of file discovery."""
        return Path(self.environment["DYN_FILE_KV"])

    @property
    def reached_by(self) -> dict[str, str]:
        """The variables with which a command finds a fleet with file discovery."""
        names = ("DYN_FILE_KV", "NATS_SERVER")
        return {name: self.environment[name] for name in names if name in self.environment}

    @property
    def pids(self) -> list[int]:
        """Every process started and not yet closed, dead ones too."""
        return [process.pid for process in self._processes()]

    def worker_of(self, instance_id: int | None) -> Worker:
        """The worker that has this instance id (``answer.placement.prefill``)."""
        for worker in self.workers.values():
            if worker.instance_id == instance_id:
                return worker
        known = {worker.name: worker.instance_id for worker in self.workers.values()}
        raise KeyError(f"no worker has instance id {instance_id}; known: {known}")

    def logs(self) -> str:
        """The end of every process's log."""
        return "\n".join(process.tail() for process in self._processes())

    def complaints(self, most: int = 12) -> str:
        """The last warnings and errors of every process, and which of them have ended."""
        found = []
        for process in self._processes():
            state = "" if process.alive else f" (ended with {process.popen.returncode})"
            lines = [line for line in process.lines() if _COMPLAINT.search(line)]
            found += [f"{process.name}{state}: {line[:400]}" for line in lines[-most:]]
            if state and not lines:
                found.append(f"{process.name}{state}")
        return "\n".join(found) or "no process of the fleet has logged a warning, and all run"

    def all_respond(self) -> None:
        """A round trip to every process: returns when each of them has had time to run."""
        ports: list[int | None] = [one.port for one in self.frontends]
        for worker in self.workers.values():
            if worker.plan.kind == "held":
                worker.held.requests()
            else:
                ports.append(worker.system_port)
        for port in filter(None, ports):
            with contextlib.suppress(OSError):
                FrontendClient(port).get("/live")
        address = self.environment.get("NATS_SERVER", "").rpartition("/")[2]
        if address:
            host, _, port_text = address.partition(":")
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port_text)), patience(1)) as nats,
            ):
                nats.recv(1)  # it greets

    # -- changing ----------------------------------------------------------------------------------

    def start_worker(self, plan: WorkerPlan | str, *, wait: bool = True) -> Worker:
        """Start a new worker, a late one of the plans by name, or one that has died again."""
        if isinstance(plan, str):
            plan = next(each for each in self.plans if each.name == plan)
        worker = self._launch_worker(replace(plan, late=False))
        if wait:
            self.wait_ready()
        return worker

    def start_frontend(self, args: Sequence[str] = (), *, wait: bool = True) -> Frontend:
        """One more frontend, with these flags beside ``frontend_args``."""
        frontend = self._launch_frontend(args)
        if wait:
            self.wait_ready()
        return frontend

    def kill(
        self, name: str, number: signal.Signals = signal.SIGKILL, *, wait_gone: bool = False
    ) -> None:
        """Signal a worker; returns when its process has ended (for signals that end one).

        ``wait_gone``: until no frontend counts it any more (SIGKILL: the lease time, 10 to 30 s).
        SIGSTOP and SIGCONT leave it among the workers.
        """
        worker = self.workers[name]
        worker.process.kill(number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            return
        del self.workers[name]
        if wait_gone:
            self.wait_ready()

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait until every frontend counts exactly the workers that run, and all ids are known.

        Where these have every role that a request needs, and the fleet serves, every frontend
        accepts requests then.
        """
        expected: dict[str, int] = {}
        for worker in self.workers.values():
            expected[worker.plan.role] = expected.get(worker.plan.role, 0) + 1

        def ready() -> bool:
            self._fail_if_ended()
            return all(worker.learn_instance_id() for worker in self.workers.values()) and all(
                {kind: n for kind, n in frontend.worker_counts().items() if n} == expected
                and (not serves or (frontend.accepts() and hands_over(frontend.process)))
                for frontend in self.frontends
            )

        complete = "aggregated" in expected or {"prefill", "decode"} <= expected.keys()
        serves = self._serves and complete
        self._wait(ready, seconds, f"frontends to count {expected}")

    def wait_until(
        self, condition: Callable[[], bool], what: str, *, seconds: float = 15, every: float = 0.05
    ) -> None:
        """Poll; on the deadline fail with ``what`` and the logs' ends."""
        self._wait(condition, seconds, what, every)

    # -- how ---------------------------------------------------------------------------------------

    def _processes(self) -> Iterable[Process]:
        return list(self._group.children) if self._group is not None else []

    def _start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        pipes: bool = False,
    ) -> Process:
        if self._group is None:
            raise RuntimeError("the fleet is not running; use it as a context manager")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        return self._group.start(
            name,
            [self._python, *arguments],
            clean | self.environment | dict(environment),
            pipes=pipes,
        )

    def _launch_frontend(self, args: Sequence[str]) -> Frontend:
        port = free_port()
        command = ["-m", "dynamo.frontend", "--router-mode", self._router_mode]
        command += ["--http-host", "127.0.0.1", "--http-port", str(port)]
        command += ["--namespace", self.namespace, *self._frontend_args, *args]
        process = self._start(
            f"frontend-{len(self.frontends)}",
            command,
            {"DYN_LOG": LOG_LEVELS, "DYN_SDK_DISABLE_ANSI_LOGGING": "1"}
            | self._frontend_environment,
        )
        frontend = Frontend(process, port, self.model)
        self.frontends.append(frontend)
        return frontend

    def _launch_worker(self, plan: WorkerPlan) -> Worker:
        if plan.name in self.workers:
            raise ValueError(f"{plan.name} runs already")
        environment = {"DYN_SDK_DISABLE_ANSI_LOGGING": "1"}
        system_port = free_port() if plan.system_server else None
        if system_port is not None:
            environment["DYN_SYSTEM_PORT"] = str(system_port)
            environment["DYN_SYSTEM_STARTING_HEALTH_STATUS"] = "ready"
        environment |= {
            **self._topology(plan),
            **plan.environment,
        }
        kinds = {"mocker": self._mocker, "held": self._held, "scripted": self._scripted}
        command = kinds[plan.kind](plan)
        process = self._start(plan.name, command, environment, pipes=plan.kind != "mocker")
        worker = Worker(plan, process, system_port)
        self.workers[plan.name] = worker
        return worker

    def _mocker(self, plan: WorkerPlan) -> list[str]:
        mode = {"aggregated": "agg"}.get(plan.role, plan.role)
        component = "prefill" if plan.role == "prefill" else "backend"
        command = ["-m", "dynamo.mocker", "--model-path", str(self.model_dir)]
        command += ["--model-name", self.model, "--disaggregation-mode", mode]
        command += ["--endpoint", f"dyn://{self.namespace}.{component}.generate"]
        command += ["--block-size", str(self.block_size)]
        command += ["--num-gpu-blocks-override", str(self._blocks)]
        command += ["--speedup-ratio", f"{self._speedup:g}"]
        return [*command, *self._worker_args, *plan.args]

    def _held(self, plan: WorkerPlan) -> list[str]:
        command = [str(HERE / "held_worker.py"), "--model-path", str(self.model_dir)]
        command += ["--model-name", self.model, "--namespace", self.namespace]
        command += ["--role", plan.role, "--block-size", str(self.block_size)]
        return [*command, "--total-blocks", str(self._blocks), *plan.args]

    def _scripted(self, plan: WorkerPlan) -> list[str]:
        """Its record is in the fleet's directory; ``args`` may name another model."""
        command = [str(HERE / "scripted_worker.py"), "--model-path", str(self.model_dir)]
        command += ["--namespace", self.namespace]
        if "--model" not in plan.args:
            command += ["--model", f"{self.model}="]
        return [*command, "--record", str(self.directory / f"{plan.name}.jsonl"), *plan.args]

    def _topology(self, plan: WorkerPlan) -> dict[str, str]:
        if not plan.domains:
            return {}
        files = self.directory / "topology" / plan.name
        files.mkdir(parents=True, exist_ok=True)
        for domain, value in plan.domains.items():
            (files / domain).write_text(value)
        environment = {
            "DYN_TOPOLOGY_ENABLED": "true",
            "DYN_TOPOLOGY_MOUNT_PATH": str(files),
            "DYN_KV_TRANSFER_DOMAIN": plan.transfer_domain,
        }
        if plan.enforcement is not None:
            environment["DYN_KV_TRANSFER_ENFORCEMENT"] = plan.enforcement
        if plan.weight is not None:
            environment["DYN_KV_TRANSFER_PREFERRED_WEIGHT"] = f"{plan.weight:g}"
        return environment

    def _start_nats(self) -> None:
        """A NATS server of the fleet, with JetStream, for versions that need one."""
        assert self._group is not None
        port = free_port()
        store = str(self.directory / "nats")
        command = [nats_executable(), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", store]
        self._group.start("nats", command, dict(os.environ))
        self.environment |= {
            "DYN_EVENT_PLANE": "nats",
            "NATS_SERVER": f"nats://127.0.0.1:{port}",
        }

        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        self._wait(answers, READY_SECONDS, "the NATS server")

    def _fail_if_ended(self) -> None:
        processes = [each.process for each in self.workers.values()]
        for process in [*processes, *(each.process for each in self.frontends)]:
            if not process.alive:
                raise AssertionError(f"{process.name} ended\n{process.tail(60)}")

    def _wait(
        self, condition: Callable[[], bool], seconds: float, what: str, every: float = 0.1
    ) -> None:
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > patience(seconds):
                raise AssertionError(f"waited {seconds:g} s for {what}\n{self.logs()}")
            time.sleep(every)
