"""`dynctl bundle`."""

import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.cli.shared_options import FileOrFormat, file_or_format

if TYPE_CHECKING:
    from dynctl.cli.bundle.redaction import Redactor
    from dynctl.cli.bundle.sections import Section
    from dynctl.documents.bundle import BundleMember, LeftOut
    from dynctl.screens.progress import ProgressBar

_REDACTED = (
    "known secrets and texts that look like credentials are replaced by ***; prompts and tokens "
    "are replaced by hashes; only listed environment variables show their values"
)


def bundle(
    options: GlobalOptions,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="File to write. [default: dynctl-bundle-TIME.tar.gz]",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Same as the argument FILE.")
    ] = None,
    output: FileOrFormat = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes",
            help="Include topology verify of the kubeconfig's cluster. [default: if a cluster is "
            "specified]",
        ),
    ] = False,
) -> int:
    """Write reports, view, settings and versions into one .tar.gz file for a bug report.

    Secrets are masked, prompts and tokens hashed. manifest.json lists the contents, and what is
    missing and why. Only the owner can read the file. Exit code 3: a source is not reachable, 2:
    the context or an address is invalid; the file is written all the same.
    """
    from dynctl import version
    from dynctl.base.errors import ExitCode
    from dynctl.cli.bundle.archive import check_target, pack, write_new
    from dynctl.cli.bundle.redaction import Redactor, known_secrets
    from dynctl.cli.bundle.sections import sections
    from dynctl.documents.bundle import BundleManifest, BundleReport
    from dynctl.screens.progress import progress
    from dynctl.screens.render import emit

    now = time.time()
    path, options = _target(options, file, to, output, now)
    check_target(path, force=force)
    redactor = Redactor(known_secrets(options, os.environ))
    codes: list[int] = []
    wanted = sections(options, kubernetes=kubernetes)
    with progress(options) as bar:
        packed, members, left_out = _read_sections(bar, wanted, redactor, codes)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    manifest = BundleManifest(created, version(), members, left_out, _REDACTED)
    files = [("manifest.json", _redacted_json(manifest, redactor)), *packed]
    data = pack(files, now)
    write_new(path, data, force=force)
    emit(BundleReport(str(path), len(data), members, left_out), options)
    return max(codes, default=ExitCode.YES)


def _target(
    options: GlobalOptions, file: Path | None, to: Path | None, output: str | None, now: float
) -> tuple[Path, GlobalOptions]:
    """The file to write, and the options with the output format.

    Raises UsageProblem if several files are specified.
    """
    from dynctl.base.errors import UsageProblem

    written, options = file_or_format(options, output)
    named = {"FILE": file, "--to": to, "--output": written}
    if options.output in (OutputFormat.JUNIT, OutputFormat.CSV, OutputFormat.PROMETHEUS):
        raise UsageProblem(
            f"-o {options.output}: a bundle has no such report of its own", "-o json"
        )
    given = {flag: path for flag, path in named.items() if path is not None}
    if len(given) > 1:
        files = ", ".join(f"{flag} {path}" for flag, path in given.items())
        raise UsageProblem(f"{files}: {len(given)} files specified, expected one")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return next(iter(given.values()), Path(f"dynctl-bundle-{stamp}.tar.gz")), options


def _read_sections(
    bar: "ProgressBar", wanted: "list[Section]", redactor: "Redactor", codes: list[int]
) -> "tuple[list[tuple[str, bytes]], list[BundleMember], list[LeftOut]]":
    """The files, their descriptions, and the missing ones; appends exit codes to ``codes``."""
    from dynctl.cli.bundle.archive import MAX_MEMBER, MAX_TOTAL
    from dynctl.documents.bundle import BundleMember, LeftOut

    packed: list[tuple[str, bytes]] = []
    members: list[BundleMember] = []
    left_out: list[LeftOut] = []
    left = MAX_TOTAL
    bar.begin("bundle", len(wanted))
    for number, section in enumerate(wanted):
        bar.step(number, section.file)
        notes: list[str] = []
        data, why = _read(section, redactor, notes, codes)
        if len(data) > min(MAX_MEMBER, left):
            why = f"{len(data):,} bytes, the limit is {min(MAX_MEMBER, left):,}"
        if why:
            left_out.append(LeftOut(section.file, section.what, redactor.text(why)))
            continue
        left -= len(data)
        packed.append((section.file, data))
        digest = hashlib.sha256(data).hexdigest()
        notes = [redactor.text(note) for note in notes]
        members.append(BundleMember(section.file, section.what, len(data), digest, notes))
    return packed, members, left_out


def _read(
    section: "Section", redactor: "Redactor", notes: list[str], codes: list[int]
) -> tuple[bytes, str]:
    """A section's bytes, or why there are none; an error of one section does not end the others.

    Appends the exit code of an error that concerns the whole bundle: a source that is not
    reachable, an invalid context (``options.json``), or an invalid address of the fleet
    (``workers.json``, which every kind of source has).
    """
    from dynctl.base.errors import ExitCode, Unreachable, UsageProblem, exit_code_of

    try:
        data = _redacted_json(section.read(notes), redactor)
    except Exception as error:
        if isinstance(error, Unreachable):
            codes.append(ExitCode.UNREACHABLE)
        elif section.file == "options.json" or (
            section.file == "workers.json" and isinstance(error, UsageProblem)
        ):
            codes.append(ExitCode.USAGE)
        if exit_code_of(error) is not None:
            return b"", str(error)
        return b"", f"dynctl failed unexpectedly: {type(error).__name__}: {error}"
    if redactor.holds_secret(data):
        return b"", "it still contained a secret after redaction; this is a defect in dynctl"
    return data, ""


def _redacted_json(value: Any, redactor: "Redactor") -> bytes:
    """Redacted JSON of a Struct, plain data, or JSON bytes (which stay compact)."""
    import msgspec

    whole = isinstance(value, bytes)
    plain = msgspec.json.decode(value) if whole else msgspec.to_builtins(value)
    data = msgspec.json.encode(redactor.plain(plain))
    return data if whole else msgspec.json.format(data, indent=2) + b"\n"
