"""A small run of `make fuzz-programs`: some cases of each kind, and that a defect is seen."""

import json

import pytest

from tests.fuzz import programs


@pytest.mark.parametrize("kind", programs.KINDS)
def test_cases_are_handled(kind, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    outcomes, defects = programs.fuzz(kind, seed=5, seconds=600.0, most=12)
    assert defects == 0
    assert sum(outcomes.values()) == 12


def test_a_seed_gives_the_same_case():
    assert programs.template_of(7) == programs.template_of(7) != programs.template_of(8)
    assert programs.tokenizer_of(7) == programs.tokenizer_of(7) != programs.tokenizer_of(8)
    json.loads(programs.tokenizer_of(7))


def test_grammars_make_valid_and_refused_programs():
    compiled = {programs.run_template(seed).outcome for seed in range(40)}
    assert {"rendered", "does not compile", "TemplateError"} <= compiled


def test_an_unexpected_error_is_a_defect(monkeypatch, capsys):
    def read(seed):
        raise KeyError("x")

    monkeypatch.setitem(programs.KINDS, "template", read)
    outcomes, defects = programs.fuzz("template", seed=1, seconds=60.0, most=2)
    assert (outcomes, defects) == ({"error": 2}, 2)
    assert "FAIL  template 1000000: KeyError" in capsys.readouterr().out


def test_a_process_that_ends_is_an_outcome():
    def end(seed):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    assert programs.isolated(end, 1).outcome == "ended by signal 9"
