"""`dynctl route PROMPT`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dynctl.base.errors import ExitCode, UsageProblem, file_problem
from dynctl.base.options import GlobalOptions
from dynctl.cli.completion import assignments, names_of
from dynctl.cli.shared_options import seconds

#: A prompt file or stdin larger than this is a mistake.
MAX_INPUT_BYTES = 64 * 1024 * 1024
MAX_SALT = 1024
#: The doubt about a --set that has no effect.
_NO_EFFECT = "DYR0727"


def route(
    options: GlobalOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="User message for the model's chat template; - reads stdin.",
            show_default=False,
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain the decision, hop by hop.")
    ] = False,
    parts: Annotated[
        bool,
        typer.Option(
            "--parts",
            help="Show the prompt part by part: what is cached where, and where it breaks.",
        ),
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="List all candidates and rejections (with --explain).")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Use PROMPT as it is, without a chat template.")
    ] = False,
    messages: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Chat messages, or a whole request body, as JSON."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Token ids: a JSON list, or separated by white space."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=names_of("model"),
            help="Model; required if there are several.",
        ),
    ] = None,
    model_path: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Tokenizer directory, for a --view from another machine."),
    ] = None,
    require_taint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TAINT",
            autocompletion=names_of("taint"),
            help="Only workers with this taint (repeatable).",
        ),
    ] = None,
    prefer_taint: Annotated[
        list[str] | None,
        typer.Option(metavar="TAINT=W", help="Prefer this taint with weight W (repeatable)."),
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="LoRA adapter; its cached blocks are separate."),
    ] = None,
    cache_salt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Cache salt of the request; @FILE reads it from a file."),
    ] = None,
    session: Annotated[
        bool, typer.Option("--session", help="The request has a session id (x-session-id).")
    ] = False,
    session_id: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Session of the request, for a dynctl frontend."),
    ] = None,
    follow: Annotated[
        float,
        typer.Option(
            metavar="DURATION",
            parser=seconds(0.0, 3600.0),
            help="Follow a live Dynamo until its running requests are known one by one.",
        ),
    ] = 0.0,
    pin_prefill: Annotated[
        str | None,
        typer.Option(
            metavar="WORKER", autocompletion=names_of("worker"), help="Force the prefill worker."
        ),
    ] = None,
    pin_decode: Annotated[
        str | None,
        typer.Option(
            metavar="WORKER", autocompletion=names_of("worker"), help="Force the decode worker."
        ),
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            autocompletion=assignments,
            help="Change a setting or a load, for example load.WORKER.prefill_tokens=+500 "
            "(repeatable).",
        ),
    ] = None,
    save_view: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the router's state; --view FILE repeats the answer.",
        ),
    ] = None,
) -> int:
    """Show which workers would serve a prompt, without sending it.

    Exit code 0: workers were chosen, 1: the request would be refused.
    """
    from dynctl.screens.render import emit, talk
    from dynctl.screens.route import ExplainScreen
    from dynctl.sources.connect import connect
    from dynctl.sources.query import RouteQuery

    query = RouteQuery(
        **_prompt(prompt, raw=raw, messages=messages, tokens=tokens),
        model=model,
        model_path=model_path,
        required=tuple(require_taint or ()),
        preferred=dict(_weighted_taint(text) for text in prefer_taint or ()),
        pin_prefill=pin_prefill,
        pin_decode=pin_decode,
        assignments=tuple(assign or ()),
        lora=lora,
        cache_salt=_salt(cache_salt),
        in_session=session or session_id is not None,
        session_id=session_id,
        follow=follow,
    )
    source = connect(options)
    if save_view is not None:
        source = _save_view(source, save_view)
    if parts:
        emit(_parts(source, query), options)
        return ExitCode.YES
    result = source.route(query)
    for doubt in result.doubts:
        if doubt.code == _NO_EFFECT:
            talk(f"warning: {doubt.what}")
    emit(result, options, screen=ExplainScreen(show_all) if explain else None)
    return ExitCode.YES if result.ok else ExitCode.NO


def _parts(source: Any, query: Any) -> Any:
    """The prompt part by part, beside the view of a source."""
    from dynctl.sources.dry_run import DryRun
    from dynctl.sources.view import ViewSource, open_view_bytes

    if not isinstance(source, ViewSource):
        source = open_view_bytes(source.save(), "--parts", source.title, from_file=False)
    return DryRun(source.view, query).parts()


def _save_view(source: Any, path: Path) -> Any:
    """Save the source's view and return it as the source, so that --view repeats the answer."""
    from dynctl.base.files import write_private_file
    from dynctl.screens.render import talk
    from dynctl.sources.view import ViewSource, open_view_bytes

    data = source.save()
    write_private_file(path, data)
    talk(f"saved {path} ({len(data):,} bytes, without prompts and tokens); --view {path} reads it")
    from_file = isinstance(source, ViewSource) and source.view.from_file
    where, title = f"--save-view {path}", f"view {path.name}"
    return open_view_bytes(data, where, title, from_file=from_file)


def _prompt(
    prompt: str | None, *, raw: bool, messages: str | None, tokens: str | None
) -> dict[str, Any]:
    given = [
        name
        for name, value in (("PROMPT", prompt), ("--messages", messages), ("--tokens", tokens))
        if value is not None
    ]
    if len(given) != 1:
        inputs = " and ".join(given) if given else "none"
        raise UsageProblem(
            f"expected one of PROMPT, --messages FILE and --tokens FILE, got {inputs}",
            'for example: dynctl route --explain "Explain KV cache reuse."',
        )
    if tokens is not None:
        if raw:
            raise UsageProblem("--raw is for PROMPT; --tokens needs no chat template")
        return {"token_ids": _token_ids(_read(tokens, "--tokens"), tokens)}
    if messages is not None:
        if raw:
            raise UsageProblem("--raw is for PROMPT, not for --messages")
        return _body(_read(messages, "--messages"), messages)
    text = _read("-", "PROMPT") if prompt == "-" else _typed_prompt(prompt or "")
    if raw:
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


def _typed_prompt(prompt: str) -> str:
    """A prompt of the command line. Where the locale is not that of the terminal, Python keeps the
    bytes that it cannot read as half characters."""
    import os

    try:
        prompt.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(prompt).decode()
        except UnicodeDecodeError:
            raise UsageProblem(
                "PROMPT: not UTF-8 text", "read it from a file: dynctl route - < FILE"
            ) from None
    return prompt


def _read(name: str, option: str) -> str:
    import codecs
    import sys

    from dynctl.base.files import read_file

    if name == "-":
        data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    else:
        try:
            data = read_file(name, MAX_INPUT_BYTES)
        except OSError as error:
            raise UsageProblem(f"{option} {name}: {file_problem(error)}") from None
    if len(data) > MAX_INPUT_BYTES:
        raise UsageProblem(f"{option} {name}: larger than {MAX_INPUT_BYTES:,} bytes")
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise UsageProblem(f"{option} {name}: not UTF-8 at byte {error.start}") from None


def _salt(text: str | None) -> str | None:
    if text is not None and text.startswith("@"):
        text = _read(text[1:], "--cache-salt").rstrip("\n")
    if text is not None and not 0 < len(text) <= MAX_SALT:
        raise UsageProblem(f"--cache-salt: expected 1 to {MAX_SALT:,} characters, got {len(text)}")
    return text


def _token_ids(text: str, name: str) -> list[int]:
    import json

    expected = "expected a JSON list of token ids, or ids separated by white space"
    try:
        ids = json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split()
        token_ids = [int(item) for item in ids if not isinstance(item, (bool, float))]
    except (ValueError, TypeError, RecursionError):
        raise UsageProblem(f"--tokens {name}: {expected}") from None
    wrong = [item for item in token_ids if not 0 <= item < 2**32]
    if wrong or len(token_ids) != len(ids):
        raise UsageProblem(f"--tokens {name}: ids are whole numbers from 0 to 4294967295")
    if not token_ids:
        raise UsageProblem(f"--tokens {name}: no token ids; {expected}")
    return token_ids


def _body(text: str, name: str) -> dict[str, Any]:
    """The messages of a list; an object is the whole body of an inference request."""
    import json

    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageProblem(f"--messages {name}: not JSON: {error}") from None
    whole = isinstance(document, dict) and document.keys() & {"prompt", "prompt_embeds", "input"}
    if whole and "messages" not in document:
        return {"body": document}
    messages = document.get("messages") if isinstance(document, dict) else document
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise UsageProblem(
            f"--messages {name}: expected a list of messages, or a request body with such a list",
            'for example: [{"role": "user", "content": "hello"}]',
        )
    return {"body": document} if isinstance(document, dict) else {"messages": messages}


def _weighted_taint(text: str) -> tuple[str, float]:
    # Taints contain "=" themselves: the weight follows the last one.
    taint, separator, raw = text.rpartition("=")
    try:
        weight = float(raw)
    except ValueError:
        separator = ""
        weight = 0.0
    if not separator or not taint:
        raise UsageProblem(
            f"--prefer-taint {text}: expected TAINT=WEIGHT",
            "for example: --prefer-taint dynamo.topology/zone=zone-a=0.85",
        )
    return taint, weight
