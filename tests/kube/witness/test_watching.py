"""Watches in detail, and all injected faults of requests."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kubernetes import client, watch

from tests.kube.api_server import ApiServer
from tests.kube.client import Api, ApiError
from tests.kube.objects.small import config_map
from tests.waiting import patience

MAPS = "/api/v1/namespaces/default/configmaps"
Json = dict[str, Any]


class Watching:
    """One watch read line by line; ``next`` waits for an event as long as the client does."""

    def __init__(self, api: Api, **query: Any) -> None:
        self._stream = api.http.stream("GET", MAPS, params={"watch": "true"} | query)
        self.response = self._stream.__enter__()
        self._lines = self.response.iter_lines()

    def next(self) -> Json:
        event: Json = json.loads(next(self._lines))
        return event

    def named(self) -> tuple[str, str]:
        event = self.next()
        return event["type"], event["object"]["metadata"]["name"]

    def rest(self) -> list[Json]:
        return [json.loads(line) for line in self._lines]

    def close(self) -> None:
        self._stream.__exit__(None, None, None)


@pytest.fixture
def watching(api: Api) -> Iterator[Any]:
    opened: list[Watching] = []

    def start(**query: Any) -> Watching:
        opened.append(Watching(api, **query))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_without_a_revision_it_starts_with_what_is_there(api_server: ApiServer, watching: Any):
    api_server.store.create(config_map("a"))
    one = watching()
    assert one.named() == ("ADDED", "a")
    api_server.store.create(config_map("b"))
    assert one.named() == ("ADDED", "b")


def test_of_a_revision_only_what_came_later(api_server: ApiServer, watching: Any):
    api_server.store.create(config_map("a"))
    one = watching(resourceVersion=api_server.store.revision)
    api_server.store.delete("configmaps", "a", "default")
    event = one.next()
    assert event["type"] == "DELETED"
    assert event["object"]["metadata"]["resourceVersion"] == str(api_server.store.revision)


def test_a_forgotten_revision_is_an_error_event_and_the_end(api_server: ApiServer, watching: Any):
    api_server.store.create(config_map("a"))
    running = watching(resourceVersion=api_server.store.revision)
    api_server.store.create(config_map("b"))
    assert running.named() == ("ADDED", "b")
    api_server.store.compact()
    one = watching(resourceVersion="2")
    assert one.response.status_code == 200
    (event,) = one.rest()
    assert event["type"] == "ERROR"
    status = event["object"]
    assert (status["kind"], status["code"], status["reason"]) == ("Status", 410, "Expired")
    assert status["message"] == f"too old resource version: 2 ({api_server.store.revision})"
    api_server.store.create(config_map("c"))
    assert running.named() == ("ADDED", "c")


def test_bookmarks_come_before_the_timeout_if_allowed(api_server: ApiServer, watching: Any):
    api_server.store.create(config_map("a"))
    revision = api_server.store.revision
    one = watching(resourceVersion=revision, allowWatchBookmarks="true", timeoutSeconds=1)
    other = watching(resourceVersion=revision, timeoutSeconds=1)
    api_server.store.create(config_map("elsewhere", "other"))
    (bookmark,) = one.rest()
    assert bookmark == {
        "type": "BOOKMARK",
        "object": {
            "kind": "ConfigMap",
            "apiVersion": "v1",
            "metadata": {
                "resourceVersion": str(api_server.store.revision),
                "creationTimestamp": None,
            },
        },
    }
    assert other.rest() == []


def test_a_list_as_a_watch_marks_its_end(api_server: ApiServer, watching: Any):
    for name in ("a", "b"):
        api_server.store.create(config_map(name))
    one = watching(
        sendInitialEvents="true", resourceVersionMatch="NotOlderThan", allowWatchBookmarks="true"
    )
    assert [one.named(), one.named()] == [("ADDED", "a"), ("ADDED", "b")]
    end = one.next()
    assert end["type"] == "BOOKMARK"
    assert end["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


def test_initial_events_want_their_resource_version_match(api: Api):
    with pytest.raises(ApiError, match="sendInitialEvents requires") as refused:
        api.get(MAPS, watch="true", sendInitialEvents="true")
    assert refused.value.status == 400


def test_writers_in_many_threads_are_all_seen_in_order(api_server: ApiServer, watching: Any):
    one = watching(resourceVersion=str(api_server.store.revision))

    def write(thread: int) -> None:
        for number in range(25):
            api_server.store.create(config_map(f"a{thread}-{number}"))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    seen = [int(one.next()["object"]["metadata"]["resourceVersion"]) for _ in range(100)]
    for thread in threads:
        thread.join()
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("yes", ["", "1", "t", "true", "True"])
def test_all_but_nought_and_false_are_a_yes(api: Api, yes: str):
    query = {"watch": yes, "timeoutSeconds": "1", "resourceVersion": "1"}
    with api.http.stream("GET", MAPS, params=query) as response:
        assert response.headers["Transfer-Encoding"] == "chunked"
    for no in ("0", "false", "False"):
        assert api.get(MAPS, watch=no)["kind"] == "ConfigMapList"


def test_a_cut_watch_breaks_in_the_middle_and_others_may_come(api_server: ApiServer, watching: Any):
    one = watching(resourceVersion=api_server.store.revision)
    api_server.store.create(config_map("a"))
    assert one.named() == ("ADDED", "a")
    api_server.faults.cut_watches()
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        one.rest()
    assert watching().named() == ("ADDED", "a")


def test_who_goes_away_in_the_middle_is_not_worth_a_word(
    api_server: ApiServer, watching: Any, caplog: pytest.LogCaptureFixture
):
    one, other = watching(), watching()
    one.close()
    for number in range(50):
        api_server.store.create(config_map(f"a{number}", k="v" * 1000))
    # Those that were created before the watch began come in the order of their names.
    assert {other.named()[1] for _ in range(50)} == {f"a{number}" for number in range(50)}
    assert caplog.records == []


def test_the_official_client_watches(api_server: ApiServer, official: client.ApiClient):
    core: Any = client.CoreV1Api(official)
    api_server.store.create(config_map("a"))
    found = []
    watching = watch.Watch()
    for event in watching.stream(core.list_namespaced_config_map, "default", timeout_seconds=10):
        found.append((event["type"], event["object"].metadata.name))
        if found[-1][1] == "a":
            api_server.store.create(config_map("b"))
        else:
            watching.stop()
    assert found == [("ADDED", "a"), ("ADDED", "b")]


def test_an_expired_watch_on_demand(api_server: ApiServer, watching: Any):
    api_server.faults.expire_watch(MAPS)
    revision = api_server.store.revision
    (event,) = watching(resourceVersion=revision).rest()
    assert event["object"]["code"] == 410
    api_server.store.create(config_map("a"))
    assert watching(resourceVersion=revision).named() == ("ADDED", "a")


def test_an_expired_continue_token_on_demand(api_server: ApiServer, api: Api):
    for name in ("a", "b"):
        api_server.store.create(config_map(name))
    api_server.faults.expire_continue(MAPS)
    with pytest.raises(ApiError) as refused:
        api.list(MAPS, limit=1)
    assert (refused.value.status, refused.value.reason) == (410, "Expired")
    assert len(api.list(MAPS, limit=1)) == 2


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (403, "Forbidden"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
    ],
)
def test_a_refusal_on_demand_has_a_count(api_server: ApiServer, api: Api, status: int, reason: str):
    api_server.faults.answer("/api/v1/nodes", status, times=2, message="not now", retry_after=7)
    for _ in range(2):
        response = api.http.get("/api/v1/nodes")
        assert response.status_code == status
        assert response.json()["reason"] == reason
        assert response.json()["message"] == "not now"
        assert response.headers["Retry-After"] == "7"
    assert api.list("/api/v1/nodes") == []
    assert [r.status for r in api_server.requests] == [status, status, 200]


def test_a_fault_meets_its_prefix_and_its_method_until_it_is_removed(
    api_server: ApiServer, api: Api
):
    fault = api_server.faults.answer("/api/v1/namespaces", 500, method="POST")
    assert api.list(MAPS) == []
    for _ in range(3):
        with pytest.raises(ApiError, match="500"):
            api.create(MAPS, config_map("a"))
    api_server.faults.remove(fault)
    api.create(MAPS, config_map("a"))
    api_server.faults.answer("", 503)
    with pytest.raises(ApiError, match="503"):
        api.get("/version")
    api_server.faults.clear()
    assert api.get("/version")["major"] == "1"


def test_a_silent_server_answers_nothing_and_then_hangs_up(api_server: ApiServer):
    with Api(api_server.url, timeout=0.2) as impatient:
        api_server.faults.hang("/api/v1/nodes", 30, times=1)
        with pytest.raises(httpx.ReadTimeout):
            impatient.list("/api/v1/nodes")
        api_server.faults.hang("/api/v1/nodes", 0.05, times=1)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            impatient.list("/api/v1/nodes")
        api_server.faults.delay("/api/v1/nodes", 0.05, times=1)
        assert impatient.list("/api/v1/nodes") == []


def test_stopping_ends_watches_and_silences_and_leaves_no_thread():
    before = threading.active_count()
    ended: list[Exception] = []

    def ask(api: Api) -> None:
        try:
            api.get("/version")
        except httpx.HTTPError as broken:
            ended.append(broken)

    with ApiServer() as server, Api(server.url) as api:
        one = Watching(api)
        server.store.create(config_map("a"))
        assert one.named() == ("ADDED", "a")
        hang = server.faults.hang("/version", 30)
        silent = threading.Thread(target=ask, args=(api,))
        silent.start()
        deadline = time.monotonic() + patience(10)
        while not hang.met:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        server.close()
        silent.join()
        assert len(ended) == 1
        assert one.rest() == []
        one.close()
    assert threading.active_count() == before
