"""`tests/kubernetes/isolated.sh`: what it starts ends with it and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.waiting import patience, until_now

SCRIPT: Final = Path(__file__).parent / "kubernetes" / "isolated.sh"
GROUPS: Final = Path("/sys/fs/cgroup")
# A directory of its own, a control group named after it, and a child that outlives its parent.
BEGIN: Final = """
for folder in /sys/fs/cgroup /sys/fs/cgroup/pids; do
  mkdir "$folder/${DYNCTL_TEST_ISOLATED##*/}-node" 2>/dev/null || true
done
ip address show lo | grep -q 10.88.254.1 || exit 9
sleep 1000 &
echo "$DYNCTL_TEST_ISOLATED"
"""


def permitted() -> bool:
    unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    try:
        return subprocess.run(unshare, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not permitted(), reason="namespaces need root and its rights")


def is_clean(state: str) -> bool:
    group = f"{Path(state).name}-node"
    paths = [Path(state), GROUPS / group, GROUPS / "pids" / group]
    return not any(path.exists() for path in paths)


def started(script: str) -> tuple[subprocess.Popen[str], str]:
    """The script in a process group of its own, and its directory."""
    process = subprocess.Popen(
        # A run in the background ignores SIGINT, and so would the script.
        ["env", "--default-signal=INT", SCRIPT, "sh", "-euc", BEGIN + script],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_all_and_nothing_is_left(number: signal.Signals) -> None:
    process, state = started("wait")
    assert Path(state).is_dir()
    os.killpg(process.pid, number)
    # The end of its output: no process is left that could write there.
    process.communicate(timeout=patience(10))
    until_now(lambda: is_clean(state))
    expected = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
    assert process.returncode == expected[number]


def test_the_status_is_that_of_the_command() -> None:
    process, state = started("exit 3")
    process.communicate(timeout=patience(10))
    assert process.returncode == 3
    assert is_clean(state)


def test_without_rights_the_command_finds_the_reason() -> None:
    deprived = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", str(SCRIPT)]
    done = subprocess.run(
        [*deprived, "sh", "-c", 'echo "$DYNCTL_TEST_NOT_ISOLATED"'],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience(10),
    )
    assert "not permitted" in done.stdout
