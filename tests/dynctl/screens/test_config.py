"""`config show` on narrow terminals."""

from dynctl.cli.config_report import remote_report
from dynctl.documents.config import config_document
from dynctl.screens.canvas import Canvas
from dynctl.screens.config import config_report
from router_core import SETTINGS, RouterConfig


def test_the_names_of_settings_are_whole_on_narrow_terminals():
    """A setting is typed by its name; a long origin is shortened instead."""
    sources = {name: f"flag --router-{name.replace('_', '-')}" for name in SETTINGS}
    document = config_document(RouterConfig(), version="1", preset=None, sources=sources)
    text = config_report(remote_report("http://a:8000", document), Canvas(80))
    assert max(map(len, text.splitlines())) <= 80
    assert {line.split()[0] for line in text.splitlines() if "flag" in line} == set(SETTINGS)
