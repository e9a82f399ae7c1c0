"""Find a list of calls in text with the regular expression of Dynamo 1.6, in linear time.

An argument is ``name=text,``, whose text is what is left of a line, so one text has many readings.
Python's ``re`` tries them one after the other, in exponential time. RE2 follows all of them at the
same time and chooses the reading that a matcher which tries them in order finds first, as Dynamo's
library does.
"""

from typing import Final

import re2  # type: ignore[import-untyped]

from dynctl.tokenization.tool_calls.calls import SPACE

# In RE2 \w and \s are ASCII; Dynamo's are Unicode's. Unicode calls letters in circles and squares
# alphabetic (U+24B6.., U+1F130..), and joiners (U+200C, U+200D) are parts of words.
_WORD: Final = (
    r"[\pL\pM\p{Nd}\p{Nl}\p{Pc}\x{200C}\x{200D}"
    r"\x{24B6}-\x{24E9}\x{1F130}-\x{1F149}\x{1F150}-\x{1F169}\x{1F170}-\x{1F189}]"
)
_BLANK: Final = f"[{SPACE}]"
_NAME: Final = f"[a-zA-Z]+{_WORD}*"
_ARGUMENT: Final = f"{_NAME}=.*?"
_ARGUMENTS: Final = rf"(?:{_ARGUMENT},{_BLANK}*)*"
_FIRST: Final = rf"(?:{_NAME}\({_ARGUMENTS}(?:{_ARGUMENT}{_BLANK}?)?\),{_BLANK}*)*"
_LAST: Final = rf"(?:{_NAME}\({_ARGUMENTS}(?:{_ARGUMENT}{_BLANK}*)?\){_BLANK}*)+"


_OPTIONS: Final = re2.Options()
_OPTIONS.log_errors = False  # RE2 would write to stderr where it turns to a slower method
_LIST: Final = re2.compile(rf"\[{_FIRST}{_LAST}\]", _OPTIONS)


def find_list(text: str) -> tuple[int, int] | None:
    """The place of the first list of calls in a text and the place after it."""
    # RE2 reads UTF-8, which has no halves of surrogate pairs; a mark takes the place of each.
    encoded = text.encode(errors="replace")
    match = _LIST.search(encoded)
    if match is None:
        return None
    begin, end = match.span()
    return len(encoded[:begin].decode()), len(encoded[:end].decode())
