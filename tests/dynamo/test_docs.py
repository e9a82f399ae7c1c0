"""The pages' lines for Dynamo, run as written against a real one, print what the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import Scene, pages, scenes
from tests.docs.running import Session
from tests.docs.test_docs_commands import follow
from tests.dynamo.fleet import DynamoFleet, two_zones

SCENES = [scene for path in pages() for scene in scenes(path) if scene.world == "dynamo"]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.id)
def test_the_lines_of_a_page(scene: Scene, tmp_path: Path) -> None:
    with DynamoFleet(two_zones("required"), speedup=0) as fleet:
        here = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(fleet.file_kv)}
        # What the pages export names an etcd and a frontend that are somewhere else.
        shell = Session(tmp_path, here, fixed=("DYN_DISCOVERY_BACKEND", "DYNCTL_FRONTEND"))
        shell.use_frontend(fleet.frontend.url)
        follow(scene, shell)


def test_there_are_lines_for_dynamo() -> None:
    assert SCENES
