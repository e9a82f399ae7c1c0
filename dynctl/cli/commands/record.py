"""`dynctl record`: a recording of a frontend, of an observed Dynamo, or of a live one."""

import time
from pathlib import Path
from typing import Annotated

import typer

from dynctl.base.options import GlobalOptions
from dynctl.cli.shared_options import FileOrFormat, file_or_format, seconds_of


def record(
    options: GlobalOptions,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="File to write. [default: recording-TIME.dynrec]",
            show_default=False,
        ),
    ] = None,
    output: FileOrFormat = None,
    length: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="DURATION", help="Stop after this time, as 30s or 10m; else Ctrl-C."
        ),
    ] = None,
    max_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Stop at this size.")] = "1GiB",
    show: Annotated[
        bool, typer.Option("--show", help="Show what the file has; nothing is recorded.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="With --show: leave damaged chunks out.")
    ] = False,
) -> int:
    """Record what a router sees and does: requests as hashes, decisions, KV events, loads.

    From a dynctl frontend, router or observer (--frontend), or a live Dynamo (--discovery). The
    file has no prompts and no keys; only its owner can read it. Exit code 3: the source went away,
    or no space is left; the file is readable up to there.

    For example: dynctl record traffic.dynrec --for 10m --frontend http://127.0.0.1:8000
    """
    from dynctl.base.decode_errors import WireError
    from dynctl.base.errors import ExitCode, UsageProblem
    from dynctl.cli.shared_options import memory_of
    from dynctl.documents.recording_file import recording_report
    from dynctl.screens.render import emit, talk
    from dynctl.sources.recording import unreadable

    path, options = _target(options, file, output)
    lasts = None if length is None else max(1, round(seconds_of("--for", length)))
    most = memory_of("--max-bytes", max_bytes)
    code = ExitCode.YES
    if show and path is None:
        raise UsageProblem("--show: expected a FILE")
    if skip_bad and not show:
        raise UsageProblem("--skip-bad is for --show FILE")
    target = path or Path(f"recording-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.dynrec")
    if not show:
        problem = _record(options, target, lasts, most)
        if problem:
            talk(f"error: {problem}")
            code = ExitCode.UNREACHABLE
    try:
        report = recording_report(target, skip_bad=skip_bad)
    except WireError as error:
        raise UsageProblem(str(error)) from None
    except OSError as error:
        raise unreadable(target, error) from None
    emit(report, options)
    return code


def _target(
    options: GlobalOptions, file: Path | None, output: str | None
) -> tuple[Path | None, GlobalOptions]:
    """The file, and the options with the output format."""
    from dynctl.base.errors import UsageProblem

    named, options = file_or_format(options, output)
    if file is not None and named is not None:
        raise UsageProblem(f"{file} and -o {output}: 2 files specified, expected one")
    return file or named, options


def _record(options: GlobalOptions, path: Path, lasts: int | None, most: int) -> str:
    """Record until the end; why the source went away, empty if it did not."""
    from dynctl.base.errors import UsageProblem
    from dynctl.screens.render import talk
    from dynctl.serving.records.recorder import already_there
    from dynctl.sources.connect import recorded

    origin, urls, token = recorded(options)
    if path.exists():
        raise already_there(path)
    talk(f"recording to {path}{'' if lasts is None else f' for {lasts:,} s'}; Ctrl-C ends it")
    if origin == "--frontend":
        from dynctl.base.signals import sigterm_like_ctrl_c
        from dynctl.sources.frontend.recording import stream_recording

        if len(urls) != 1:
            raise UsageProblem(
                f"{len(urls)} frontends: a recording is of one", "start one command for each"
            )
        with sigterm_like_ctrl_c():
            return stream_recording(
                urls[0], token, path, timeout=options.timeout, seconds=lasts, max_bytes=most
            )
    from dynctl.adapters.dynamo.planes import namespace, open_planes
    from dynctl.serving.routing.config import FrontendConfig, Limits
    from dynctl.serving.services.observe_server import Observed, record_deployment
    from dynctl.sources.dynamo.beside import BesideDynamo

    beside = BesideDynamo(options, urls, None, None)
    record_deployment(
        FrontendConfig(decision_memory_bytes=0, limits=Limits(drain_s=0.0)),
        path,
        Observed(lambda: open_planes(options), namespace(options), beside),
        max_bytes=most,
        seconds=lasts,
    )
    return ""
