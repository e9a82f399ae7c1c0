"""The question before a change of a fleet that no option, variable or context names."""

import sys

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions


def confirm_change(options: GlobalOptions, change: str, *, yes: bool) -> None:
    """Return where the user named the fleet, or agrees to change the one at the default address.

    ``change``: the command. ``yes``: --yes was given. Writes the fleet's address, models and
    workers to stderr; asks on a terminal. Raises UsageProblem where the user does not agree or
    cannot be asked, Unreachable or TimedOut where no dynctl frontend answers there.
    """
    from dynctl.screens.render import talk
    from dynctl.sources.connect import chosen_sources, described_default
    from dynctl.sources.named import DEFAULT_FRONTEND

    sources = chosen_sources(options)
    if len(sources) != 1 or sources[0].named:
        return
    fleet = described_default(options)
    if yes:
        talk(f"{change}: {fleet}")
        return
    name_it = f"--frontend {DEFAULT_FRONTEND} names it; DYNCTL_FRONTEND and a context do so too"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageProblem(
            f"{change} needs --yes: no option, variable or context names the fleet. The default "
            f"one is {fleet}",
            f"--yes changes this fleet\n{name_it}",
        )
    talk(f"{change}: no option, variable or context names the fleet. The default one is {fleet}")
    talk("Change this fleet? [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageProblem(f"{change}: not confirmed, nothing is changed", name_it)
