"""Every command of the documentation, run as it is written, prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.comparing import difference, exchange
from tests.docs.pages import Command, File, Scene, pages, scenes
from tests.docs.running import Session
from tests.docs.worlds import ELSEWHERE, Fleet, session

SCENES = [
    scene for path in pages() for scene in scenes(path) if scene.world.split()[0] not in ELSEWHERE
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.id)
def test_the_commands_of_a_page_do_what_it_shows(
    scene: Scene, tmp_path: Path, fleet: Fleet
) -> None:
    with session(scene.world, tmp_path, fleet) as shell:
        follow(scene, shell)


def follow(scene: Scene, shell: Session) -> None:
    """Do what a scene does, in its order; the first line that is not as the page says fails."""
    for step in scene.steps:
        if isinstance(step, File):
            shell.write(step)
        else:
            _check(shell.run(step), step, shell.written_ports, scene.page)


def _check(done: tuple[int, str], command: Command, ports: dict[str, str], page: str) -> None:
    code, printed = done
    where = f"{page}:{command.line}: {command.text}"
    assert "Traceback" not in printed, f"{where}\n{printed}"
    assert code == command.exit, f"{where}\nexit code {code}, expected {command.exit}\n{printed}"
    if command.shown is not None:
        missing = difference(command.shown, printed, ports)
        if missing is not None and command.exchanged:
            printed = exchange(printed, command.exchanged)
            missing = difference(command.shown, printed, ports) and missing
        assert missing is None, f"{where}\n{missing}"
