"""The source that options, environment and context name, for commands and for top."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.sources.connect import connect, connect_live
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.sources.dynamo.source import DynamoSource
from dynctl.sources.frontend.source import FrontendSource

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize("by_option", [True, False])
@pytest.mark.parametrize(("kind", "source"), [("dynctl", FrontendSource), ("dynamo", DynamoSource)])
def test_whose_frontend_it_is_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_option: bool, kind: str, source: type
) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    monkeypatch.setattr(DynamoFrontend, "identify", lambda self: kind)
    if not by_option:
        monkeypatch.setenv("DYNCTL_FRONTEND", URL)
    options = GlobalOptions(frontend=(URL,) if by_option else ())
    assert isinstance(connect(options), source)


def test_planes_by_option_take_any_frontend_as_their_own(tmp_path: Path) -> None:
    assert isinstance(connect(GlobalOptions(file_kv=tmp_path, frontend=(URL,))), DynamoSource)


def test_a_view_and_planes_are_two_sources(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="two sources"):
        connect(GlobalOptions(file_kv=tmp_path, demo=True))


def test_commands_and_top_get_the_same_origin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dynctl.sources.demo.fleet import DemoSource
    from dynctl.sources.demo.live import LiveDemo
    from dynctl.sources.dynamo.live import LiveDynamo
    from dynctl.sources.frontend.live import LiveFrontends
    from dynctl.sources.view import StillView, ViewSource

    monkeypatch.delenv("DYNCTL_FRONTEND", raising=False)
    view = tmp_path / "view.json"
    view.write_bytes(DemoSource().save())
    origins: list[tuple[GlobalOptions, type, type]] = [
        (GlobalOptions(demo=True), DemoSource, LiveDemo),
        (GlobalOptions(view=view), ViewSource, StillView),
        (GlobalOptions(file_kv=tmp_path), DynamoSource, LiveDynamo),
        (GlobalOptions(frontend=(URL,)), FrontendSource, LiveFrontends),
    ]
    for options, source, live in origins:
        assert type(connect(options)) is source
        assert type(connect_live(options)) is live
        if live is not LiveDynamo:
            with pytest.raises(UsageProblem, match="does not need a log"):
                connect_live(options, "frontend.log")
