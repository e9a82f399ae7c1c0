"""The messages in tests/dynctl/wire are those of Envoy's own stubs."""

import json
import os
import subprocess
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "dynctl" / "wire" / "ext_proc_messages.json"
# Read when imported, since the tests' environment is emptied of DYNCTL_* variables.
PYTHON = os.environ.get("DYNCTL_ENVOY_PYTHON", "")


def test_the_messages_are_current() -> None:
    program = Path(__file__).parent / "golden.py"
    made = subprocess.run([PYTHON, str(program)], capture_output=True, text=True, check=True)
    assert json.loads(made.stdout) == json.loads(GOLDEN.read_text())
