"""Every command of the documentation, run as it is written, prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.comparing import JUDGE, check
from tests.docs.pages import Command, Scene, all_scenes
from tests.docs.running import Session, follow
from tests.docs.worlds import ELSEWHERE, Fleet, session

SCENES = [scene for scene in all_scenes() if scene.world.split()[0] not in ELSEWHERE]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.id)
def test_the_commands_of_a_page_do_what_it_shows(
    scene: Scene, tmp_path: Path, fleet: Fleet, pytestconfig: pytest.Config
) -> None:
    with session(scene.world, tmp_path, fleet) as shell:
        follow(scene, shell, pytestconfig.stash.get(JUDGE, check))


def test_where_nothing_runs_no_program_of_this_machine_is_a_source(tmp_path: Path) -> None:
    """Another program can have port 8000: a session has a default frontend of its own."""
    shell = Session(tmp_path, {})
    code, printed = shell.run(Command("dynctl workers list", 1))
    (real,) = (real for real, written in shell.written_ports.items() if written == "8000")
    assert code == 3
    assert real != "8000"
    assert f"no dynctl frontend answers at http://127.0.0.1:{real}\n" in printed
