"""The kubelets of all nodes: volumes, containers, status, exec and logs.

The Downward API volume has the real layout (dated directories behind ``..data``), and follows the
pod's labels with a lag, as the real one does.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.dynctl.manifests.kubelet import DownwardApiVolume
from tests.kube.actors.acting import Clock, Hands
from tests.kube.actors.process import Process, State
from tests.kube.api_server import ApiServer
from tests.kube.deployment import env_of, is_worker
from tests.kube.objects import Json, key_of, stamp
from tests.kube.objects.pods import condition

_BACKOFF_S = (0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)


@dataclass(slots=True)
class _Volume:
    """``shown``: the labels that its files hold; ``fresh`` since ``changed`` the pod has others."""

    files: DownwardApiVolume
    keys: tuple[str, ...]
    shown: dict[str, str]
    fresh: dict[str, str]
    changed: float = 0.0

    @property
    def stale(self) -> bool:
        return self.shown != self.fresh


@dataclass(slots=True)
class Sandbox:
    """One pod on its node. ``starts``: when its container starts (again); None: not to be."""

    pod: Json
    root: Path
    ip: str
    starts: float | None
    volumes: list[_Volume] = field(default_factory=list)
    process: Process | None = None
    before: Process | None = None
    restarts: int = 0
    reported: Json | None = None

    @property
    def main(self) -> str:
        name: str = self.pod["spec"]["containers"][0]["name"]
        return name


class Kubelet:
    """``lag``: seconds until a changed label is in the files, ``lags`` by pod (None: never).

    ``unready``: names of pods whose readiness probe fails. ``start_s`` and ``ready_s``: from
    bound to started, and from serving to ready.
    """

    def __init__(self, hands: Hands, clock: Clock, server: ApiServer, root: Path) -> None:
        self.lag = 1.0
        self.lags: dict[str, float | None] = {}
        self.unready: set[str] = set()
        self.start_s, self.ready_s = 2.0, 10.0
        self.sandboxes: dict[str, Sandbox] = {}
        self._hands, self._clock, self._server, self._root = hands, clock, server, root
        self._addresses = 0

    def due(self) -> float | None:
        return min((at for one in self.sandboxes.values() for at in self._times(one)), default=None)

    def restart(self, pod: str) -> None:
        """Start the container of a pod (by name) once more, as after a crash with exit code 137."""
        for one in self.sandboxes.values():
            if one.pod["metadata"]["name"] == pod and one.process is not None:
                self._end(one, 137)
                one.starts = self._clock.now

    def step(self) -> bool:
        pods = {
            one["metadata"]["uid"]: one
            for one in self._hands.list("Pod")
            if one["spec"].get("nodeName")
        }
        did = False
        for uid in self.sandboxes.keys() - pods.keys():
            self._forget(self.sandboxes.pop(uid))
            did = True
        for uid, pod in pods.items():
            if uid not in self.sandboxes:
                self.sandboxes[uid] = self._admit(uid, pod)
                did = True
            one = self.sandboxes[uid]
            one.pod = pod
            did = any([self._refresh(one), self._run(one), self._report(one)]) or did
        return did

    # -- volumes -----------------------------------------------------------------------------------

    def _admit(self, uid: str, pod: Json) -> Sandbox:
        self._addresses += 1
        place = self._addresses + 9
        root = self._root / uid
        root.mkdir(parents=True)
        one = Sandbox(
            pod, root, f"10.0.{place // 250}.{place % 250 + 1}", self._clock.now + self.start_s
        )
        self.open_files(one)
        return one

    def open_files(self, one: Sandbox) -> None:
        """Commands in the pod's container see its files."""
        self._server.exec_files[(*key_of(one.pod), one.main)] = one.root

    def _mount(self, one: Sandbox) -> None:
        """Volumes are made right before the first start, with the labels as they are then."""
        labels = dict(one.pod["metadata"].get("labels", {}))
        container = one.pod["spec"]["containers"][0]
        paths = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", ())}
        for volume in one.pod["spec"].get("volumes", ()):
            if "downwardAPI" not in volume or volume["name"] not in paths:
                continue
            items = {
                item["path"]: _label_of(item["fieldRef"]["fieldPath"])
                for item in volume["downwardAPI"]["items"]
            }
            files = DownwardApiVolume(one.root / paths[volume["name"]].lstrip("/"), items)
            files.write(labels)
            keys = tuple(items.values())
            shown = {key: labels.get(key, "") for key in keys}
            one.volumes.append(_Volume(files, keys, shown, shown))

    def _refresh(self, one: Sandbox) -> bool:
        did = False
        labels = one.pod["metadata"].get("labels", {})
        for volume in one.volumes:
            now = {key: labels.get(key, "") for key in volume.keys}
            if now != volume.fresh:
                volume.fresh, volume.changed = now, self._clock.now
            lag = self._lag(one)
            if volume.stale and lag is not None and self._clock.now >= volume.changed + lag:
                volume.files.write(volume.fresh)
                volume.shown = volume.fresh
                did = True
        return did

    def _lag(self, one: Sandbox) -> float | None:
        return self.lags.get(one.pod["metadata"]["name"], self.lag)

    # -- containers --------------------------------------------------------------------------------

    def _run(self, one: Sandbox) -> bool:
        now = self._clock.now
        if one.starts is not None and now >= one.starts:
            if one.before is None and one.process is None:
                self._mount(one)
            one.starts = None
            one.process = Process(one.root, env_of(one.pod), now, worker=is_worker(one.pod))
            return True
        process = one.process
        if process is None or one.starts is not None:
            return False
        did = process.look(now)
        if process.state is State.EXITED:
            self._end(one, process.exit_code)
            one.starts = now + _BACKOFF_S[min(one.restarts - 1, len(_BACKOFF_S) - 1)]
            did = True
        return did

    def _end(self, one: Sandbox, code: int) -> None:
        assert one.process is not None
        one.process.exit(self._clock.now, code)
        one.before, one.process = one.process, None
        one.restarts += 1

    # -- status ------------------------------------------------------------------------------------

    def _report(self, one: Sandbox) -> bool:
        key = (*key_of(one.pod), one.main)
        for process, previous in ((one.process or one.before, False), (one.before, True)):
            if process is not None and not (previous and one.process is None):
                self._server.logs[(*key, previous)] = process.log
        status = self._status(one)
        if status == one.reported:
            return False
        one.reported = status
        self._hands.merge("Pod", *key_of(one.pod), {"status": status}, subresource="status")
        return True

    def _status(self, one: Sandbox) -> Json:
        container = one.pod["spec"]["containers"][0]
        ready_at = self._ready_at(one)
        ready = ready_at is not None and self._clock.now >= ready_at
        kept = [
            condition
            for condition in one.pod["status"].get("conditions", ())
            if condition["type"] == "PodScheduled"
        ]
        changed = self._changed(one, ready_at if ready else None)
        status: Json = {
            "phase": "Running" if one.process or one.before else "Pending",
            "conditions": [
                *kept,
                condition("Initialized", "True", changed),
                condition("ContainersReady", str(ready), changed),
                condition("Ready", str(ready), changed),
            ],
            "containerStatuses": [
                {
                    "name": one.main,
                    "image": container["image"],
                    "ready": ready,
                    "started": one.process is not None,
                    "restartCount": max(0, one.restarts - (one.process is None)),
                    "state": _state(one),
                    "lastState": _last(one),
                }
            ],
        }
        if one.process or one.before:
            status |= {"podIP": one.ip, "podIPs": [{"ip": one.ip}]}
        return status

    def _changed(self, one: Sandbox, ready_at: float | None) -> float:
        """When readiness last changed, as far as it is known to this kubelet."""
        if ready_at is not None:
            return ready_at
        return one.process.started if one.process else one.before.since if one.before else 0.0

    def _ready_at(self, one: Sandbox) -> float | None:
        process = one.process
        if process is None or process.state is not State.SERVING or process.refused:
            return None
        if one.pod["metadata"]["name"] in self.unready:
            return None
        return process.since + self.ready_s

    def _times(self, one: Sandbox) -> Iterator[float]:
        now = self._clock.now
        if one.starts is not None:
            yield one.starts
        lag = self._lag(one)
        if lag is not None:
            yield from (volume.changed + lag for volume in one.volumes if volume.stale)
        if one.process is not None and one.process.due is not None:
            yield one.process.due
        ready_at = self._ready_at(one)
        if ready_at is not None and ready_at > now:
            yield ready_at

    def _forget(self, one: Sandbox) -> None:
        key = (*key_of(one.pod), one.main)
        if self._server.exec_files.get(key) == one.root:
            del self._server.exec_files[key]
            for previous in (False, True):
                self._server.logs.pop((*key, previous), None)
        shutil.rmtree(one.root, ignore_errors=True)


def _label_of(path: str) -> str:
    """``metadata.labels['KEY']``; other fields show nothing here."""
    return path.partition("['")[2].removesuffix("']")


def _terminated(process: Process) -> Json:
    return {
        "terminated": {
            "exitCode": process.exit_code,
            "reason": "Error",
            "startedAt": stamp(process.started),
            "finishedAt": stamp(process.since),
        }
    }


def _state(one: Sandbox) -> Json:
    if one.process is not None:
        return {"running": {"startedAt": stamp(one.process.started)}}
    if one.before is None:
        return {"waiting": {"reason": "ContainerCreating"}}
    if one.restarts == 1:
        return _terminated(one.before)
    return {"waiting": {"reason": "CrashLoopBackOff"}}


def _last(one: Sandbox) -> Json:
    if one.before is None or (one.process is None and one.restarts == 1):
        return {}
    return _terminated(one.before)
