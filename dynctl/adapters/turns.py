"""How much of a flood one turn of the event loop takes in before others run."""

from typing import Final

# Small, because streams of tokens wait behind it.
TURN_MESSAGES: Final = 16
TURN_BYTES: Final = 64 * 1024
