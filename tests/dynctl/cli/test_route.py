"""`dynctl route`: the contract, reproduction, what-if, and every way to ask wrongly."""

from __future__ import annotations

import codecs
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import yaml

from dynctl.documents.doubts import doubt
from dynctl.documents.route_result import RouteResult
from dynctl.documents.view import encode_view
from dynctl.tokenization import DEMO_MODEL_DIR, load_tokenizer
from router_core import Router, hash_prompt
from tests.dynctl.health.test_parts import SIZE, holding
from tests.golden.fleets import TOKENS, two_zones

DEMO = "Explain KV cache reuse in distributed serving."


@pytest.fixture
def view_file(tmp_path: Path) -> Path:
    path = tmp_path / "view.json"
    path.write_bytes(two_zones(prefill_load_scale=1.5).save())
    return path


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return path


REF = {"worker", "worker_id", "dp_rank"}
DECISION = {
    "id", "stage", "outcome", "winner", "margin", "tied", "temperature", "parameters", "terms",
    "constraints", "funnel", "candidates", "flip", "preference", "freshness",
}  # fmt: skip
CANDIDATE = REF | {
    "domains", "overlap_blocks", "prefill_blocks", "decode_blocks", "active_requests", "terms",
    "multiplier", "cost", "probability",
}  # fmt: skip
RESULT = {
    "kind", "schema", "model", "mode", "preset", "tokens", "block_size", "blocks", "assumptions",
    "doubts", "certain",
    "winner", "prefill", "decode", "decode_by_prefill",
}  # fmt: skip


@pytest.mark.parametrize("explain", [True, False])
def test_json_is_the_contract_with_and_without_explain(dynctl, view_file, tokens_file, explain):
    extra = ["--explain"] if explain else []
    ran = dynctl("route", "--tokens", tokens_file, "--view", view_file, "-o", "json", *extra)
    assert (ran.code, ran.err) == (0, "")
    result = ran.json
    assert set(result) >= RESULT
    assert (result["kind"], result["schema"]) == ("RouteResult", 1)
    assert (result["tokens"], result["block_size"], result["blocks"]) == (36, 16, 2)
    assert set(result["winner"]) == {"prefill", "decode"}
    assert set(result["winner"]["prefill"]) == REF
    for hop in ("prefill", "decode"):
        decision = result[hop]
        assert set(decision) >= DECISION
        assert decision["stage"] == hop
        assert decision["parameters"]["prefill_load_scale"] == 1.5
        for step in decision["funnel"]:
            assert set(step) >= {"filter", "entered", "left", "rejected"}
            for row in step["rejected"]:
                assert set(row) >= REF | {"code", "value", "limit", "message"}
        assert decision["candidates"]
        for row in decision["candidates"]:
            assert set(row) >= CANDIDATE
    assert set(result["decode"]["constraints"][0]) == {"taint", "kind", "weight", "origin"}
    assert result["decode"]["constraints"][0]["origin"] == "kv-transfer policy of worker prefill-a0"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"prefill_load_scale": 1.5, "decode_active_request_weight": 0.7},
        {"overlap_score_credit": 0.3, "router_temperature": 0.5},
    ],
)
@pytest.mark.parametrize("policy", [("required", None), ("preferred", 0.85), (None, None)])
def test_every_cost_is_its_terms(dynctl, tmp_path, tokens_file, policy, config):
    path = tmp_path / "view.json"
    path.write_bytes(two_zones(*policy, **config).save())
    result = dynctl("route", "--tokens", tokens_file, "--view", path, "-o", "json").json
    for hop in (result["prefill"], result["decode"]):
        weights = {term["name"]: term["weight"] for term in hop["terms"]}
        for row in hop["candidates"]:
            total = sum(weights[name] * value for name, value in row["terms"].items())
            assert row["cost"] == pytest.approx(row["multiplier"] * total, abs=1e-9)


def test_the_guides_number(dynctl, view_file, tokens_file):
    result = dynctl("route", "--tokens", tokens_file, "--view", view_file, "-o", "json").json
    costs = {row["worker"]: row["cost"] for row in result["prefill"]["candidates"]}
    assert costs == {"prefill-a0": 1.875, "prefill-b0": 3.375}


def test_formats_render_the_same_value(dynctl, view_file, tokens_file):
    line = ["route", "--tokens", tokens_file, "--view", view_file, "-o"]
    document = dynctl(*line, "json").json
    assert json.loads(dynctl(*line, "jsonl").out) == document
    assert dynctl(*line, "jsonl").out.count("\n") == 1
    assert yaml.safe_load(dynctl(*line, "yaml").out) == document
    assert dynctl(*line, "name").out == "prefill-a0\ndecode-a0\n"
    assert msgspec.json.decode(dynctl(*line, "json").out, type=RouteResult).ok


@pytest.mark.parametrize("form", [["--explain"], ["-o", "json"], ["-o", "yaml"], []])
def test_a_saved_view_repeats_the_answer_byte_for_byte(dynctl, tmp_path, form):
    path = tmp_path / "saved.json"
    first = dynctl("route", "--demo", DEMO, *form, "--save-view", path)
    assert first.code == 0
    assert str(path) in first.err
    again = dynctl("route", DEMO, *form, "--view", path)
    assert (again.out, again.err) == (first.out, "")
    # A view that is saved from a view is the same view.
    copy = tmp_path / "copy.json"
    dynctl("route", DEMO, "--view", path, "--save-view", copy)
    assert copy.read_bytes() == path.read_bytes()


def test_a_view_holds_no_prompt_and_no_tokens(dynctl, tmp_path):
    path = tmp_path / "saved.json"
    dynctl("route", "--demo", "a very secret prompt", "--save-view", path)
    assert "secret" not in path.read_text()


def test_a_text_without_a_tokenizer_names_what_prevents_it(dynctl, tmp_path):
    path = tmp_path / "saved.json"
    dynctl("route", "--demo", DEMO, "--save-view", path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_paths": {}}))
    plain = dynctl("route", DEMO, "--view", path)
    assert (plain.code, "--tokens FILE" in plain.err, "--set" in plain.err) == (2, True, False)
    changed = dynctl("route", DEMO, "--view", path, "--set", "router_temperature=1")
    assert (changed.code, "--tokens FILE" in changed.err) == (2, True)


def test_prompt_raw_messages_stdin_and_tokens(dynctl, tmp_path, monkeypatch):
    def tokens(*arguments: object) -> int:
        return int(dynctl("route", "--demo", "-o", "json", *arguments).json["tokens"])

    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": DEMO}]))
    chat = tokens(DEMO)
    assert tokens("--messages", file) == chat
    file.write_text(json.dumps({"messages": [{"role": "user", "content": DEMO}]}))
    assert tokens("--messages", file) == chat
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert tokens("--messages", file) == chat
    assert 0 < tokens("--raw", DEMO) < chat
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(DEMO.encode())))
    assert tokens("-") == chat
    ids = tmp_path / "ids.txt"
    ids.write_text("1 2 3\n4, 5")
    assert tokens("--tokens", ids) == 5


def test_constraints_and_pins_reach_the_decision(dynctl):
    result = dynctl(
        "route", DEMO, "--demo", "-o", "json",
        "--require-taint", "dynamo.topology/zone=zone-b",
        "--prefer-taint", "dynamo.topology/zone=zone-b=0.5",
    ).json  # fmt: skip
    assert result["winner"]["prefill"]["worker"] == "prefill-b0"
    preferred = result["prefill"]["constraints"][1]
    assert (preferred["taint"], preferred["weight"]) == ("dynamo.topology/zone=zone-b", 0.5)
    pinned = dynctl("route", DEMO, "--demo", "-o", "name", "--pin-prefill", "ll-b1").out
    assert pinned.split() == ["prefill-b1", "decode-b1"]


def test_what_if_changes_settings_and_load_and_lists_them(dynctl):
    base = dynctl("route", DEMO, "--demo", "-o", "json").json
    by = base["prefill"]["flip"]["by"]
    line = ["route", DEMO, "--demo", "-o", "json", "--set"]
    under = dynctl(*line, f"load.prefill-a0.prefill_tokens=+{by - 1}").json
    over = dynctl(*line, f"load.prefill-a0.prefill_tokens=+{by}").json
    assert under["winner"]["prefill"]["worker"] == "prefill-a0"
    assert over["winner"]["prefill"]["worker"] == "prefill-b0"
    assert f"load.prefill-a0.prefill_tokens=+{by}" in over["assumptions"][-1]
    scaled = dynctl(*line, "prefill-load-scale=3").json
    assert scaled["prefill"]["parameters"]["prefill_load_scale"] == 3.0
    absolute = dynctl(*line, "load.prefill-b1.prefill_tokens=0").json
    rows = {row["worker"]: row for row in absolute["prefill"]["candidates"]}
    assert rows["prefill-b1"]["active_prefill_tokens"] == 0
    blocks = dynctl(*line, "load.decode-a0.decode_blocks=+7").json
    before = base["decode"]["candidates"][0]["decode_blocks"]
    assert blocks["decode"]["candidates"][0]["decode_blocks"] == before + 7


@pytest.mark.parametrize("output", ["table", "wide", "json"])
def test_a_refusal_is_an_answer_on_stdout_with_exit_code_1(dynctl, output):
    ran = dynctl("route", DEMO, "--demo", "--require-taint", "gpu=x", "-o", output)
    assert (ran.code, ran.err) == (1, "")
    assert "gpu=x" in ran.out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "expected one of PROMPT, --messages FILE and --tokens FILE, got none"),
        (["hi", "--tokens", "x"], "got PROMPT and --tokens"),
        (["--tokens", "{tmp}/absent"], "absent: the file does not exist"),
        (["--tokens", "{tmp}/words"], "expected a JSON list of token ids"),
        (["--tokens", "{tmp}/negative"], "ids are whole numbers from 0 to 4294967295"),
        (["--tokens", "{tmp}/floats"], "ids are whole numbers from 0 to 4294967295"),
        (["--tokens", "{tmp}/empty"], "no token ids"),
        (["--messages", "{tmp}/words"], "not JSON"),
        (["--messages", "{tmp}/negative"], "expected a list of messages"),
        (["--messages", "{tmp}/binary"], "not UTF-8 at byte 0"),
        (["hi", "--prefer-taint", "zone"], "--prefer-taint zone: expected TAINT=WEIGHT"),
        (["hi", "--prefer-taint", "zone=x"], "--prefer-taint zone=x: expected TAINT=WEIGHT"),
        (["hi", "--prefer-taint", "zone=inf"], "expected a finite weight"),
        (["hi", "--model", "other"], "error: model other: no such model; served: demo"),
        (["hi", "--pin-prefill", "absent"], "unknown worker 'absent'"),
        (["hi", "--pin-decode", "0"], "unknown worker '0'"),
        (["hi", "--pin-decode", "-b0"], "worker '-b0' is ambiguous: 2 workers end in it"),
        (["hi", "--set", "speed=3"], "speed: no such setting"),
        (["hi", "--set", "prefill_load_scale"], "expected key=value"),
        (["hi", "--set", "prefill_load_scale=-1"], "expected at least 0, got -1"),
        (
            ["hi", "--set", "load.prefill-a0.speed=1"],
            "expected load.WORKER.LOAD=+N, where LOAD is prefill_tokens, ",
        ),
        (["hi", "--set", "load.x.prefill_tokens=1"], "unknown worker 'x'"),
        (["hi", "--set", "load.prefill-a0.prefill_tokens=lots"], "expected a whole number"),
        (["hi", "--model-path", "{tmp}"], "tokenizer.json"),
    ],
)
def test_bad_input_is_named_with_exit_code_2(dynctl, tmp_path, arguments, expected):
    for name, content in (
        ("words", b"one two"),
        ("negative", b"[-1]"),
        ("floats", b"[1.5]"),
        ("empty", b" "),
        ("binary", b"\xff\xfe"),
    ):
        (tmp_path / name).write_bytes(content)
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    ran = dynctl("route", "--demo", *given)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert expected in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "not JSON"),
        (b'{"kind": "Other"}', "expected kind RoutingView, got 'Other'"),
        (b'{"kind": "RoutingView", "schema": 99}', "expected schema 1, got 99"),
        (b'{"kind": "RoutingView", "schema": 1}', "view"),
    ],
)
def test_a_file_that_is_no_view_is_named(dynctl, tmp_path, content, expected):
    path = tmp_path / "view.json"
    path.write_bytes(content)
    ran = dynctl("route", "hi", "--view", path)
    assert ran.code == 2
    assert f"--view {path}: " in ran.err
    assert expected in ran.err


def test_only_an_answer_without_doubt_is_certain(dynctl, tmp_path, tokens_file):
    """An equal cost, a draw, and what a saved view's source did not know are doubts."""
    certain = dynctl("route", "--demo", DEMO, "-o", "json").json
    assert (certain["doubts"], certain["certain"]) == ([], True)
    assert (
        "certain every input is known and at most 0.3 s old" in dynctl("route", "--demo", DEMO).out
    )

    drawn = dynctl("route", "--demo", DEMO, "--set", "router_temperature=0.5", "-o", "json").json
    assert {one["code"] for one in drawn["doubts"]} == {"DYR0702"}
    assert drawn["certain"] is False

    view = two_zones().view
    from dynctl.sources.view import ViewSource

    doubted = replace(view, doubts=(doubt("DYR0707"), doubt("DYR0714", why="-", matters=False)))
    path = tmp_path / "view.json"
    path.write_bytes(ViewSource(doubted, "x").save())
    ran = dynctl("route", "--tokens", tokens_file, "--view", path)
    assert "doubts  1 could change the answer" in ran.out
    assert "DYR0707  the load of the workers is unknown and counted as none:" in ran.out
    assert "DYR0714" not in ran.out
    assert (
        "DYR0714"
        in dynctl("route", "--tokens", tokens_file, "--view", path, "--explain", "--all").out
    )
    found = dynctl("route", "--tokens", tokens_file, "--view", path, "-o", "json").json
    assert [one["code"] for one in found["doubts"]] == ["DYR0707", "DYR0714"]
    assert found["certain"] is False


def test_a_view_file_without_doubts_is_not_certain(dynctl, tmp_path, tokens_file):
    from dynctl.sources.view import ViewSource

    plain = msgspec.json.decode(ViewSource(two_zones().view, "x").save())
    del plain["doubts"]
    path = tmp_path / "view.json"
    path.write_bytes(msgspec.json.encode(plain))
    ran = dynctl("route", "--tokens", tokens_file, "--view", path, "-o", "json")
    assert [one["code"] for one in ran.json["doubts"]] == ["DYR0703"]
    assert ran.json["certain"] is False


def test_a_view_from_elsewhere_needs_a_tokenizer_or_tokens(dynctl, tmp_path, tokens_file):
    from dynctl.adapters.dynamo.model_files import cache_directory
    from dynctl.sources.view import ViewSource

    view = two_zones().view
    gone = cache_directory() / "gone"
    view.model_paths["tiny"] = str(gone)
    path = tmp_path / "view.json"
    path.write_bytes(ViewSource(view, "x").save())
    ran = dynctl("route", "hi", "--view", path)
    assert ran.code == 2
    assert f"{gone} of the view does not exist here" in " ".join(ran.err.split())
    assert "--model-path DIR" in ran.err
    assert dynctl("route", "--tokens", tokens_file, "--view", path).code == 0
    named = dynctl("route", "hi", "--view", path, "--model-path", "org/name")
    assert (named.code, "of the view" in named.err) == (2, False)
    assert "hf download org/name --local-dir DIR" in " ".join(named.err.split())


def test_a_path_in_a_view_file_is_followed_only_where_the_operator_types_it(
    dynctl, tmp_path, monkeypatch
):
    from dynctl import tokenization
    from dynctl.sources.view import ViewSource

    model = shutil.copytree(tokenization.DEMO_MODEL_DIR, tmp_path / "model")
    outside = tmp_path / "cache" / "dynctl" / "models" / ".." / ".." / ".." / "model"
    view = two_zones().view
    loaded = []
    load = tokenization.load_tokenizer

    def noted(path):
        loaded.append(str(path))
        return load(path)

    monkeypatch.setattr(tokenization, "load_tokenizer", noted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "view.json"
    for named in (str(model), str(outside), "/etc", "/etc\0"):
        view.model_paths["tiny"] = named
        path.write_bytes(ViewSource(view, "x").save())
        ran = dynctl("route", "hi", "--view", path)
        assert (ran.code, loaded) == (2, [])
        text = " ".join(ran.err.split())
        assert "a path in a view or a recording is not followed" in text
        assert "if you trust the model files there: --model-path" in text
        # A copy of the view names the same directory, and is not followed either.
        ran = dynctl("route", "hi", "--view", path, "--save-view", tmp_path / "copy.json")
        assert (ran.code, loaded) == (2, [])
    assert dynctl("route", "hi", "--view", path, "--model-path", model).code == 0
    assert loaded == [str(model)]
    cached = shutil.copytree(model, tmp_path / "cache" / "dynctl" / "models" / "abc")
    view.model_paths["tiny"] = str(cached)
    path.write_bytes(ViewSource(view, "x").save())
    assert dynctl("route", "hi", "--view", path).code == 0
    assert loaded[1:] == [str(cached)]


def test_two_sources_are_a_usage_error_and_none_is_unreachable(dynctl, tmp_path, monkeypatch):
    ran = dynctl("route", "hi", "--demo", "--view", tmp_path / "x")
    assert ran.code == 2
    assert "--demo and --view: two sources are set" in ran.err
    monkeypatch.setattr("dynctl.sources.named.DEFAULT_FRONTEND", "http://127.0.0.1:1")
    ran = dynctl("route", "hi")
    assert ran.code == 3
    for way in ("--demo", "--view FILE", "--frontend http", "dynctl serve frontend"):
        assert way in ran.err


def test_adapters_and_salts_share_no_cache(dynctl, view_file, tokens_file, tmp_path):
    def cached(*extra):
        ran = dynctl("route", "--tokens", tokens_file, "--view", view_file, "-o", "json", *extra)
        assert "secret" not in ran.out + ran.err
        hop = ran.json["prefill"]
        assert hop["salted"] == ("--cache-salt" in extra)
        assert hop["lora"] == ("tuned" if "--lora" in extra else None)
        return max(row["overlap_blocks"] for row in hop["candidates"])

    assert cached() > 0
    assert cached("--cache-salt", "secret") == 0
    (tmp_path / "salt").write_text("secret\n")
    assert cached("--cache-salt", f"@{tmp_path / 'salt'}") == 0
    assert cached("--lora", "tuned") == 0
    ran = dynctl("route", "--tokens", tokens_file, "--view", view_file, "--cache-salt", "")
    assert ran.code == 2
    assert "--cache-salt: expected 1 to 1,024 characters, got 0" in ran.err


def test_messages_takes_a_whole_body(dynctl, tmp_path):
    def tokens(document) -> int:
        file = tmp_path / "body.json"
        file.write_text(json.dumps(document))
        return int(dynctl("route", "--demo", "--messages", file, "-o", "json").json["tokens"])

    chat = [{"role": "user", "content": DEMO}]
    plain = tokens(chat)
    assert tokens({"messages": chat, "model": "demo", "stream": True}) == plain
    assert tokens({"messages": chat, "add_generation_prompt": False}) < plain
    assert tokens({"prompt": [1, 2, 3], "model": "demo"}) == 3
    file = tmp_path / "body.json"
    file.write_text(json.dumps({"messages": chat, "nvext": {"unknown": 1}}))
    ran = dynctl("route", "--demo", "--messages", file)
    assert (ran.code, "nvext.unknown: unknown field" in ran.err) == (2, True)


def test_a_prompt_in_another_locale_is_read_as_utf_8(dynctl):
    """Python gives the bytes of a line that its locale cannot read as half characters."""
    typed = "caf\u00e9 \u2013 \u2713"
    halves = typed.encode().decode("ascii", "surrogateescape")
    answers = [dynctl("route", "--demo", one, "-o", "json").json for one in (typed, halves)]
    assert answers[0]["tokens"] == answers[1]["tokens"]
    ran = dynctl("route", "--demo", "\udcff")
    assert (ran.code, ran.out) == (2, "")
    assert "PROMPT: not UTF-8 text" in ran.err
    assert "dynctl route - < FILE" in ran.err


def test_a_required_domain_without_its_prefix_names_the_taint(dynctl):
    ran = dynctl("route", "--demo", DEMO, "--require-taint", "zone=zone-a")
    shown = " ".join(ran.out.split())
    assert (ran.code, "the taint of a domain is dynamo.topology/zone=zone-a" in shown) == (1, True)
    ran = dynctl("route", "--demo", DEMO, "--require-taint", "dynamo.topology/zone=zone-c")
    assert (ran.code, "the taint of a domain" in ran.out) == (1, False)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt_embeds": "AAAA"},
        {"prompt": None, "prompt_embeds": ["AAAA"]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
    ],
)
def test_what_cannot_be_counted_is_routed_with_a_doubt(dynctl, tmp_path, body):
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))
    ran = dynctl("route", "--messages", str(file), "--demo", "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    assert "cache overlap not modelled" in ran.out


def test_route_shows_a_chat_of_a_view_part_by_part_and_no_text_of_it(
    dynctl, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    words = " ".join(f"zebra{number}" for number in range(40))
    chat = [{"role": "system", "content": words}, {"role": "user", "content": f"giraffe {words}"}]
    ids = tokenizer.encode_chat(chat)
    router = Router()
    holding(router, 1, hash_prompt(ids, SIZE).local)
    view, changed = tmp_path / "view.json", tmp_path / "chat.json"
    view.write_bytes(encode_view(router.capture(), now=1.0))
    chat[1]["content"] = f"elephant {words}"
    changed.write_text(json.dumps(chat))
    given = (
        "route",
        "--view",
        view,
        "--model-path",
        DEMO_MODEL_DIR,
        "--messages",
        changed,
        "--parts",
    )
    ran = dynctl(*given)
    assert ran.code == 0, ran.err
    assert [line.split("  ")[0] for line in ran.out.splitlines()[2:6]] == [
        "PART", "system", "turn 1 (user)", "turn 1 (assistant)",
    ]  # fmt: skip
    assert "most cached on w1" in ran.out
    assert "no worker has block" in ran.out
    report = dynctl(*given, "-o", "json")
    assert report.json["kind"] == "PromptParts"
    system, turn, _ = report.json["parts"]
    assert system["tokens"] - SIZE < system["cached"] <= system["tokens"]
    assert turn["cached"] < 2 * SIZE < turn["tokens"]
    assert report.json["breaks"]["block"] == system["tokens"] // SIZE
    assert all(word not in ran.out + report.out for word in ("zebra", "giraffe", "elephant"))
