"""The README's lines for Dynamo, run as written against a real one."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.dynamo.fleet import DynamoFleet, two_zones
from tests.waiting import patience

README = Path(__file__).parents[2] / "README.md"


def test_the_lines_of_the_readme() -> None:
    section = README.read_text().split("### See what a live Dynamo does")[1].split("\n### ")[0]
    block = section.split("```sh\n")[1].split("```")[0]
    lines = [shlex.split(line) for line in block.splitlines() if line.startswith("dynctl ")]
    assert len(lines) == 5
    named = set(re.findall(r"(\w+)=", block.splitlines()[0]))
    with DynamoFleet(two_zones("required"), speedup=0) as fleet:
        ours = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(fleet.file_kv),
            "DYNCTL_FRONTEND": fleet.frontend.url,
        }
        assert named == {"DYN_DISCOVERY_BACKEND", "ETCD_ENDPOINTS", "DYNCTL_FRONTEND"}
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "ETCD", "NATS"))}
        for words in lines:
            done = subprocess.run(
                [sys.executable, "-m", *words],
                capture_output=True,
                text=True,
                timeout=patience(60),
                env=clean | ours,
            )
            # `check` may have findings (exit 1); none of the lines may fail to answer.
            assert done.returncode in ((0, 1) if words[1] == "check" else (0,)), done.stderr
            assert "Traceback" not in done.stderr
            expected = {"check": " passed, ", "events": ""}.get(words[1], "zone-a")
            assert expected in done.stdout, done.stdout
