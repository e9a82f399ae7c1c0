"""Where the program starts, as `dynctl` and as `python -m dynctl`.

Completion on TAB has no time for a command line parser, so it does not get that far.
"""

import sys


def main() -> None:
    """Run the command line of this process and end it."""
    if sys.argv[1:2] == ["__complete"]:
        from dynctl.cli.completion.live import answer

        answer(sys.argv[2:])
    try:
        from dynctl.cli.app import main as run

        run()
    except KeyboardInterrupt:  # while modules are imported: commands handle it themselves
        sys.exit(130)


if __name__ == "__main__":
    main()
