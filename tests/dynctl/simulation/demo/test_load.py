"""Traffic of the demo: the same every time, with everything that a screen should show."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import httpx

from dynctl.simulation.demo.load import CYCLE_S, PRESSURE, DemoLoad, DemoRequest, requests
from tests.waiting import patience, until_now


def constraint(one: DemoRequest) -> list[str]:
    limits = one.body.get("nvext", {}).get("routing_constraints", {})
    return list(limits.get("required_taints", []))


def test_the_same_seed_sends_the_same_requests():
    assert list(islice(requests(3), 50)) == list(islice(requests(3), 50))
    assert list(islice(requests(3), 50)) != list(islice(requests(4), 50))


def test_prefixes_repeat_a_zone_is_pressed_and_some_are_refused():
    sent = list(islice(requests(), 1500))
    assert [one.at for one in sent] == sorted(one.at for one in sent)
    systems = {one.body["messages"][0]["content"] for one in sent}
    assert len(systems) == 6
    assert any(len(one.body["messages"]) > 5 for one in sent)
    bursts = [one for one in sent if PRESSURE[0] <= one.at % CYCLE_S < PRESSURE[1]]
    calm = [one for one in sent if one.at % CYCLE_S < PRESSURE[0]]
    pressed = ["dynamo.topology/zone=zone-a"]
    assert sum(constraint(one) == pressed for one in bursts) > len(bursts) / 3
    assert sum(constraint(one) == pressed for one in calm) < len(calm) / 20
    lost = [one for one in sent if constraint(one) == ["dynamo.topology/zone=zone-c"]]
    assert 5 < len(lost) < 100


def test_the_load_ends_with_its_context_also_without_a_frontend():
    with DemoLoad("http://127.0.0.1:1") as load:
        until_now(lambda: load.sent > 2)
    sent = load.sent
    assert not load._thread.is_alive()
    assert load.sent == sent


def test_demo_load_sends_traffic_and_leaves_no_process(tmp_path: Path):
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dynctl", "demo", "--keep", "--load", "--port", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until_now(lambda: "Ctrl-C stops it" in log.read_text(), 60)
        text = log.read_text()
        assert "Traffic is running. Now run, in another terminal:" in text
        assert "dynctl top" in text
        url = next(word for word in text.split() if word.startswith("http://127.0.0.1:"))

        def routed() -> bool:
            made = httpx.get(f"{url}/v1/decisions?limit=20", timeout=30).json()["decisions"]
            return any(row["cached_blocks"] for row in made)

        until_now(routed, 30)
        process.send_signal(signal.SIGINT)
        assert process.wait(patience(20)) == 0
        children = subprocess.run(
            ["ps", "-o", "pid=", "-s", str(process.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert children.stdout.split() == []
    finally:
        process.kill()
        process.wait()


def test_load_needs_keep():
    done = subprocess.run(
        [sys.executable, "-m", "dynctl", "demo", "--load"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "dynctl demo --keep --load" in done.stderr) == (2, True)
