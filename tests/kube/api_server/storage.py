"""Objects by revision, like etcd of a real API server.

An object that was written is never changed again, so readers share it without copying. The log of
changes lets a watch start at any kept revision and lets a paged list see one revision throughout.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Key = tuple[str, str]
Place = tuple[str, str]
"""Namespace ("" for what has none) and name."""


@dataclass(frozen=True, slots=True)
class Change:
    """One write. A DELETED one's ``object`` is its last state under the deletion's revision."""

    revision: int
    kind: str
    object: Json
    previous: Json | None


class Compacted(Exception):
    """The requested revision is older than the log; ``oldest`` is the oldest available one."""

    def __init__(self, oldest: int) -> None:
        super().__init__(f"compacted up to revision {oldest}")
        self.oldest = oldest


class Storage:
    """All objects of all resources under one counter of revisions. Every method is thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._revision = 1
        self._oldest = 1
        self._objects: dict[Key, dict[Place, Json]] = {}
        self._log: dict[Key, list[Change]] = {}
        self._changed: dict[Key, int] = {}
        self._listeners: list[Callable[[], None]] = []

    @property
    def revision(self) -> int:
        return self._revision

    def changed(self, *keys: Key) -> int:
        """The last revision in which an object of these resources changed; 0 before the first."""
        return max(self._changed.get(key, 0) for key in keys)

    def read(self, key: Key, place: Place) -> Json | None:
        return self._objects.get(key, {}).get(place)

    def write(self, key: Key, place: Place, body: Json) -> Json:
        """Keep ``body`` (which the caller gives away) under the next revision."""
        with self.lock:
            self._revision += 1
            body["metadata"]["resourceVersion"] = str(self._revision)
            objects = self._objects.setdefault(key, {})
            previous = objects.get(place)
            objects[place] = body
            self._record(key, "ADDED" if previous is None else "MODIFIED", body, previous)
        return body

    def remove(self, key: Key, place: Place) -> Json:
        """Raises KeyError for what is not there."""
        with self.lock:
            previous = self._objects[key].pop(place)
            self._revision += 1
            metadata = previous["metadata"] | {"resourceVersion": str(self._revision)}
            last = previous | {"metadata": metadata}
            self._record(key, "DELETED", last, previous)
        return last

    def _record(self, key: Key, kind: str, body: Json, previous: Json | None) -> None:
        change = Change(self._revision, kind, body, previous)
        self._log.setdefault(key, []).append(change)
        self._changed[key] = self._revision
        for listener in tuple(self._listeners):
            listener()

    def snapshot(self, key: Key, revision: int | None = None) -> tuple[int, list[Json]]:
        """(revision, objects by namespace and name) as they were then; now for None.

        Raises Compacted for a revision of before the log.
        """
        with self.lock:
            objects = self._objects.get(key, {})
            if revision is None or revision >= self._revision:
                revision = self._revision
            elif revision < self._oldest:
                raise Compacted(self._oldest)
            else:
                objects = dict(objects)
                for change in reversed(self._log.get(key, [])):
                    if change.revision <= revision:
                        break
                    place = place_of(change.object)
                    if change.previous is None:
                        objects.pop(place, None)
                    else:
                        objects[place] = change.previous
            return revision, [objects[place] for place in sorted(objects)]

    def everything(self) -> list[tuple[Key, Place, Json]]:
        with self.lock:
            return [
                (key, place, body)
                for key, objects in self._objects.items()
                for place, body in objects.items()
            ]

    def changes(self, key: Key, after: int, *, running: bool) -> tuple[int, list[Change]]:
        """(current revision, the changes later than ``after``).

        Raises Compacted when ``after`` is forgotten, except for a ``running`` watch.
        """
        with self.lock:
            if after < self._oldest and not running:
                raise Compacted(self._oldest)
            log = self._log.get(key, [])
            start = bisect.bisect_right(log, after, key=lambda change: change.revision)
            return self._revision, log[start:]

    def compact(self) -> None:
        """Nobody may start from the past any more, as after etcd's compaction every five minutes.

        Watches that run are not disturbed.
        """
        with self.lock:
            self._oldest = self._revision

    def copy_to(self, other: Storage) -> None:
        """Give all objects and their past to one that has no readers yet."""
        with self.lock:
            other._revision, other._oldest = self._revision, self._oldest
            other._changed = dict(self._changed)
            other._objects = {key: dict(objects) for key, objects in self._objects.items()}
            other._log = {key: list(log) for key, log in self._log.items()}

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each write, from the writer's thread and under the lock."""
        self._listeners.append(listener)


def place_of(body: Json) -> Place:
    metadata = body["metadata"]
    return (metadata.get("namespace", ""), metadata["name"])
