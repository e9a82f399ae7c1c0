"""The pages' lines for Dynamo, run as written against a real one, print what the pages show."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.docs.comparing import JUDGE, check
from tests.docs.pages import Scene, all_scenes
from tests.docs.running import Session, follow
from tests.dynamo.fleet import DynamoFleet, two_zones

SCENES = [scene for scene in all_scenes() if scene.world == "dynamo"]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.id)
def test_the_lines_of_a_page(scene: Scene, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    with DynamoFleet(two_zones("required"), speedup=0) as fleet:
        here = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(fleet.file_kv)}
        # What the pages export names an etcd and a frontend that are somewhere else.
        shell = Session(tmp_path, here, fixed=("DYN_DISCOVERY_BACKEND", "DYNCTL_FRONTEND"))
        shell.use_frontend(fleet.frontend.url)
        with contextlib.closing(shell):
            follow(scene, shell, pytestconfig.stash.get(JUDGE, check))


def test_there_are_lines_for_dynamo() -> None:
    assert SCENES
