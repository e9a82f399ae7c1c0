"""Every command of the documentation, run as it is written, prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.comparing import JUDGE, check
from tests.docs.pages import Scene, all_scenes
from tests.docs.running import follow
from tests.docs.worlds import ELSEWHERE, Fleet, session

SCENES = [scene for scene in all_scenes() if scene.world.split()[0] not in ELSEWHERE]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.id)
def test_the_commands_of_a_page_do_what_it_shows(
    scene: Scene, tmp_path: Path, fleet: Fleet, pytestconfig: pytest.Config
) -> None:
    with session(scene.world, tmp_path, fleet) as shell:
        follow(scene, shell, pytestconfig.stash.get(JUDGE, check))
