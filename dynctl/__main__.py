"""`python -m dynctl`: the same as the `dynctl` script."""

from dynctl.cli import main

if __name__ == "__main__":
    main()
