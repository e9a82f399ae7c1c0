"""What ``dynctl explain`` finds for an error that a client saw."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

import dynctl.serving
from dynctl.findings.report import ClientError, Runbook
from dynctl.findings.runbook import client_errors, near, runbook
from dynctl.serving.routing.refusal import HttpError, internal_error, overloaded, unknown_model
from tests.commands import all_commands

SERVING = Path(dynctl.serving.__file__).parent


def known(question: str) -> Runbook:
    answer = runbook(question)
    assert answer is not None, question
    return answer


def only(question: str) -> ClientError:
    answer = known(question)
    assert len(answer.errors) == 1, [error.texts for error in answer.errors]
    return answer.errors[0]


DYNAMO = [  # bodies of Dynamo 1.6.1
    (500, "Failed to generate completions", "Internal Server Error"),
    (529, "Service temporarily overloaded", "Overloaded"),
    (404, "Model not found", "Not Found"),
    (400, "Invalid request", "Bad Request"),
    (
        503,
        "Model `tiny` is not ready to serve requests yet. The deployment may still be starting up "
        "or is not fully provisioned. Please retry shortly.",
        "Service Unavailable",
    ),
]


@pytest.mark.parametrize(("status", "message", "kind"), DYNAMO)
def test_dynamos_errors_are_found_by_body_log_line_and_exception(status, message, kind):
    body = {"message": message, "type": kind, "code": status}
    for asked in (
        message,
        json.dumps(body),
        json.dumps(json.dumps(body)),
        f"openai.APIStatusError: Error code: {status} - {body}",
        f'10:03:11 "POST /v1/chat/completions HTTP/1.1" {status} {message.upper()}',
    ):
        error = only(asked)
        assert error.by == "Dynamo's frontend"
        assert status in error.status
        assert error.source.startswith("observed")


@pytest.mark.parametrize(
    ("error", "codes"),
    [
        (overloaded(529, "512 requests are in flight, the maximum"), "too_many_requests_in_flight"),
        (internal_error("3f2a"), "internal_error"),
        (unknown_model("a", ["b"], []), "model_not_found"),
    ],
)
def test_our_own_bodies_are_found(error: HttpError, codes):
    for body in (error.body(), error.for_client().body()):
        found = only(body.decode())
        assert found.by == "dynctl"
        assert codes in found.codes
        assert error.status in found.status


def errors_of_the_source():
    """(file:line, status, code) of each HttpError in dynctl/serving whose values are literals."""
    for path in sorted(SERVING.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "HttpError":
                status = call.args[0] if call.args else None
                code = call.args[3] if len(call.args) > 3 else None
                yield (
                    f"{path.relative_to(SERVING)}:{call.lineno}",
                    status.value if isinstance(status, ast.Constant) else None,
                    code.value if isinstance(code, ast.Constant) else None,
                )


def test_each_error_that_we_send_has_an_entry():
    """A new refusal gets its entry in client_errors.toml."""
    sent = list(errors_of_the_source())
    assert len(sent) > 50
    assert sum(isinstance(code, str) for _, _, code in sent) > 30
    for where, status, code in sent:
        if isinstance(code, str):
            assert status is None or status in only(f'{{"code":"{code}"}}').status, where
        elif status is not None:
            entries = known(str(status)).errors
            assert any(error.by == "dynctl" and status in error.status for error in entries), where


def test_a_status_alone_lists_all_who_send_it():
    for asked in ("503", "HTTP/1.1 503 Service Unavailable", "Error code: 503", "status=503"):
        senders = {error.by for error in known(asked).errors}
        assert {"Dynamo's frontend", "dynctl", "Envoy"} <= senders
    assert known("503").status == 503


def test_what_is_not_known_is_not_guessed():
    for asked in ("", "blah", "418", "e", "no", "DYR9999", "127.0.0.1:8503", "*" * 9, "code"):
        assert runbook(asked) is None, asked
    assert near("failed to generate a completion")[0] == "Failed to generate completions"
    assert near("") == []


def test_a_text_is_more_than_the_status_beside_it():
    assert [e.by for e in known("HTTP/1.1 503: no healthy upstream").errors] == ["Envoy"]
    # A gateway may change the status; the text identifies the error.
    assert only("HTTP/1.1 502 Failed to generate completions").by == "Dynamo's frontend"


def test_large_texts_are_cut():
    assert len(known("503 " + "Failed to generate completions " * 100_000).question) <= 16 * 1024
    assert runbook("x" * 10_000_000) is None


def test_each_command_exists():
    """The commands of ``ask`` and ``fix``, with the options that they name."""
    root = all_commands()
    context = root.make_context("dynctl", ["version"], resilient_parsing=True)
    texts = [text for e in client_errors() for c in e.causes for text in (c.ask, c.fix)]
    named = [line for text in texts for line in re.findall(r"dynctl [^;:]*", text)]
    assert len(named) > 30
    for line in named:
        words = shlex.split(line)[1:]
        inner = root
        while words and hasattr(inner, "list_commands"):
            inner = inner.get_command(context, words.pop(0))
            assert inner is not None, line
        options = {option for parameter in inner.params for option in parameter.opts}
        for word in words:
            if word.startswith("--") and word not in ("--dyn-namespace",):
                assert word in options, line


def test_texts_are_single_sentences_of_one_line():
    for error in client_errors():
        for text in (*error.texts, error.meaning, error.source):
            assert "\n" not in text
        assert error.status == sorted(error.status, key=error.status.index)
        assert error.causes
