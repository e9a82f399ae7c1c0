"""`dynctl bundle`: what is seen, in one file that may be sent away."""

import hashlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynctl.base.options import GlobalOptions, OutputFormat

if TYPE_CHECKING:
    from dynctl.cli.bundle.redaction import Redactor
    from dynctl.cli.bundle.sections import Section
    from dynctl.documents.bundle import BundleMember, LeftOut

_REDACTED = (
    "known secrets and what looks like credentials are replaced by ***; prompts and their tokens "
    "are hashes; variables show their values only where they are on a list"
)


def bundle(
    options: GlobalOptions,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="The .tar.gz to write. [default: dynctl-bundle-TIME.tar.gz]",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="The same, as an option.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|FORMAT",
            help="The same; a word that is a format (json, yaml, ..) is how to answer.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes",
            help="Run topology verify too, on the kubeconfig's cluster. [default: where a cluster "
            "is named]",
        ),
    ] = False,
) -> int:
    """Write what dynctl sees into one .tar.gz for a bug report: reports, view, config, versions.

    Secrets are masked, prompts and tokens hashed; manifest.json says what is in it and what could
    not be had, and why. Each section may fail for itself. Only its owner can read the file.
    """
    from dynctl import version
    from dynctl.base.errors import ExitCode
    from dynctl.cli.bundle.archive import check_target, pack, write_new
    from dynctl.cli.bundle.redaction import Redactor, known_secrets
    from dynctl.cli.bundle.sections import sections
    from dynctl.documents.bundle import BundleManifest, BundleReport
    from dynctl.screens.render import emit

    now = time.time()
    path, options = _target(options, file, to, output, now)
    check_target(path, force=force)
    redactor = Redactor(known_secrets(options, os.environ))
    packed, members, left_out = _gathered(sections(options, kubernetes=kubernetes), redactor)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    manifest = BundleManifest(created, version(), members, left_out, _REDACTED)
    files = [("manifest.json", _encoded(manifest, redactor)), *packed]
    data = pack(files, now)
    write_new(path, data, force=force)
    emit(BundleReport(str(path), len(data), members, left_out), options)
    return ExitCode.YES


def _target(
    options: GlobalOptions, file: Path | None, to: Path | None, output: str | None, now: float
) -> tuple[Path, GlobalOptions]:
    """Where to write, and the options with the format that the answer is wanted in.

    Raises UsageProblem where several files are named.
    """
    from dynctl.base.errors import UsageProblem

    formats = [one.value for one in OutputFormat]
    named = {"FILE": file, "--to": to}
    if output is not None and output in formats:
        options = replace(options, output=OutputFormat(output))
    elif output is not None:
        named["--output"] = Path(output)
    if options.output is OutputFormat.JUNIT:
        raise UsageProblem("-o junit: a bundle holds no checks of its own", "-o json")
    given = {flag: path for flag, path in named.items() if path is not None}
    if len(given) > 1:
        told = ", ".join(f"{flag} {path}" for flag, path in given.items())
        raise UsageProblem(f"{told}: {len(given)} files to write were named, expected one")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return next(iter(given.values()), Path(f"dynctl-bundle-{stamp}.tar.gz")), options


def _gathered(
    wanted: "list[Section]", redactor: "Redactor"
) -> "tuple[list[tuple[str, bytes]], list[BundleMember], list[LeftOut]]":
    """The files that could be had, what they are, and those that could not."""
    from dynctl.cli.bundle.archive import MAX_MEMBER, MAX_TOTAL
    from dynctl.documents.bundle import BundleMember, LeftOut

    packed: list[tuple[str, bytes]] = []
    members: list[BundleMember] = []
    left_out: list[LeftOut] = []
    left = MAX_TOTAL
    for section in wanted:
        if sys.stderr.isatty():
            sys.stderr.write(f"{section.file}: {section.what}\n")
        notes: list[str] = []
        data, why = _asked(section, redactor, notes)
        if len(data) > min(MAX_MEMBER, left):
            why = f"{len(data):,} bytes, and there is room for {min(MAX_MEMBER, left):,}"
        if why:
            left_out.append(LeftOut(section.file, section.what, redactor.text(why)))
            continue
        left -= len(data)
        packed.append((section.file, data))
        digest = hashlib.sha256(data).hexdigest()
        told = [redactor.text(note) for note in notes]
        members.append(BundleMember(section.file, section.what, len(data), digest, told))
    return packed, members, left_out


def _asked(section: "Section", redactor: "Redactor", notes: list[str]) -> tuple[bytes, str]:
    """A section's bytes, and why there are none: whatever happens to one, the others go on."""
    from dynctl.base.errors import exit_code_of

    try:
        data = _encoded(section.ask(notes), redactor)
    except Exception as error:
        if exit_code_of(error) is not None:
            return b"", str(error)
        return b"", f"dynctl failed unexpectedly: {type(error).__name__}: {error}"
    if redactor.holds_secret(data):
        return b"", "a secret was still in it after redaction; this is a defect of dynctl"
    return data, ""


def _encoded(value: Any, redactor: "Redactor") -> bytes:
    """Redacted JSON of a Struct, of plain data, or of JSON in bytes, which stays compact."""
    import msgspec

    whole = isinstance(value, bytes)
    plain = msgspec.json.decode(value) if whole else msgspec.to_builtins(value)
    data = msgspec.json.encode(redactor.plain(plain))
    return data if whole else msgspec.json.format(data, indent=2) + b"\n"
