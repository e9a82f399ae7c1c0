"""`dynctl why ID` and `dynctl why --last`: a past decision on the explain screen; `dynctl why`:
the last decisions."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.commands.decisions import list_decisions
from dynctl.cli.completion import names_of

MAX_FILE_BYTES = 64 * 1024 * 1024


def why(
    options: GlobalOptions,
    decision: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            autocompletion=names_of("decision"),
            help="Decision id (x-dynctl-decision header) or its last characters, as top shows "
            "them; or a JSON file with a RouteResult or an id.",
        ),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="Explain the last decision.")] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="List all candidates and rejections.")
    ] = False,
) -> int:
    """Explain a past decision of a frontend. Exit code 1: the decision was a refusal.

    Without ID and --last: list the last decisions, as dynctl decisions does.
    """
    from dynctl.base.errors import ExitCode, UsageProblem
    from dynctl.screens.render import emit
    from dynctl.screens.route import ExplainScreen
    from dynctl.sources.connect import connect

    if last and decision is not None:
        raise UsageProblem(f"{decision} and --last: expected one of them")
    if decision is None and not last:
        return int(list_decisions(options))
    saved: Any = None
    wanted = decision
    file = None if decision is None else Path(decision)
    if file is not None and file.exists() and not file.is_dir():
        saved, wanted = _from_file(file)
    result = saved if saved is not None else connect(options).decision(wanted)
    emit(result, options, screen=ExplainScreen(show_all))
    return ExitCode.YES if result.ok else ExitCode.NO


def _from_file(path: Path) -> tuple[Any, str]:
    """The RouteResult in a file, else the decision id in it."""
    import msgspec

    from dynctl.base.decode_errors import WireError
    from dynctl.base.errors import UsageProblem
    from dynctl.base.files import read_file
    from dynctl.base.json_reader import read_json
    from dynctl.documents.codec import decode
    from dynctl.documents.decisions import PastDecision
    from dynctl.documents.route_result import RouteResult

    data = read_file(path, MAX_FILE_BYTES)
    if len(data) > MAX_FILE_BYTES:
        raise UsageProblem(f"{path}: larger than {MAX_FILE_BYTES:,} bytes")
    try:
        document = read_json(data, str(path))
    except WireError as error:
        raise UsageProblem(
            str(error), "save one with: dynctl route PROMPT -o json > FILE"
        ) from None
    for candidate in _objects(document):
        if candidate.get("kind") == "RouteResult":
            try:
                form = PastDecision if "at" in candidate else RouteResult
                return decode(msgspec.json.encode(candidate), form), ""
            except WireError as error:
                raise UsageProblem(f"{path}: {error}") from None
    for candidate in _objects(document):
        for key in ("x-dynctl-decision", "decision_id", "decision"):
            value = candidate.get(key)
            if isinstance(value, str) and value:
                return None, value
    raise UsageProblem(
        f"{path}: contains neither a RouteResult nor a decision id",
        "expected one of: a document of kind RouteResult, x-dynctl-decision, decision_id",
    )


def _objects(document: Any, depth: int = 4) -> list[dict[str, Any]]:
    """The objects of a document, outermost first, a few levels deep."""
    if not isinstance(document, dict) or depth == 0:
        return []
    inner = [item for value in document.values() for item in _objects(value, depth - 1)]
    return [document, *inner]
