"""The judgement and the plot of soak runs; the run itself is `make soak`."""

import xml.etree.ElementTree as ET

from tests.soak.__main__ import judge
from tests.soak.fleet import BLOCKS, ENGINES
from tests.soak.plot import Series, plot


def samples(**growth):
    flat = {"memory": 60e6, "descriptors": 40.0, "conditions": 0.0, "index": 100.0}
    return [
        {name: value * (1 + growth.get(name, 0.0) * at / 100) for name, value in flat.items()}
        for at in range(100)
    ]


def test_flat_state_is_no_problem():
    assert judge(samples()) == []


def test_what_grows_is_named():
    (problem,) = judge(samples(memory=2.0))
    assert problem.startswith("memory grew from 104,4")
    assert len(judge(samples(descriptors=3.0))) == 1


def test_an_index_over_the_caches_is_a_problem():
    (problem,) = judge(samples(index=2.0 * ENGINES * BLOCKS))
    assert problem.startswith("the index has")


def test_a_short_run_is_not_judged():
    assert "too few" in judge(samples()[:10])[0]


def test_the_plot_is_svg_with_a_panel_for_each_series():
    text = plot([Series("a", "MB", [1.0, 2.0]), Series("b", "", [0.0])], 1.0)
    root = ET.fromstring(text)
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2
