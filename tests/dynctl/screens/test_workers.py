"""The remarks under `workers list`."""

from dynctl.documents.workers import WorkerList
from dynctl.screens.canvas import Canvas
from dynctl.screens.workers import worker_list
from tests.golden.fleets import view, worker


def test_the_note_about_missing_kv_events_excludes_decode_workers():
    workers = [
        worker("p", "prefill", 1, kv_events=False),
        worker("a", "aggregated", 2, kv_events=False),
        worker("d", "decode", 3, kv_events=False),
    ]
    text = worker_list(WorkerList("test", view(workers).workers()), Canvas())
    assert text.splitlines()[-1] == "no KV events, routed by load only: p, a"
    text = worker_list(WorkerList("test", view(workers[2:]).workers()), Canvas())
    assert "routed by load only" not in text
