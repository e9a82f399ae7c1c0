"""The errors of tokenization.

::

    TokenizationError
    ├── TokenizerError              the model directory: a file is missing, broken or too large
    ├── TemplateError               the model's chat template: broken, unsafe or too much work
    └── PromptError                 the request: a client's mistake, a 4xx
        ├── PromptTooLongError      more characters than the limit
        └── UnsupportedContentError a content part that this template cannot render (an image, ...)

Messages name the file or the field, never the text of a prompt.
"""

from typing import NamedTuple


class OverLimit(NamedTuple):
    """A file of a model that exceeded a limit. ``limit``: which one, as a part of a sentence."""

    file: str
    limit: str


class TokenizationError(Exception):
    """The base of all errors of this package.

    ``over_limit``: the file and the limit, where the work for a request exceeded one; operators see
    it as a condition, clients do not.
    """

    over_limit: OverLimit | None = None


class TokenizerError(TokenizationError):
    """A model directory without a usable tokenizer; names the file and what to do."""


class TemplateError(TokenizationError):
    """The model's own chat template failed: its syntax, an unsafe access, or a limit.

    ``origin`` is the template, a path for one of a file. ``reason`` is without it, for clients.
    """

    def __init__(self, origin: str, reason: str) -> None:
        super().__init__(f"{origin}: {reason}")
        self.origin = origin
        self.reason = reason


class PromptError(TokenizationError):
    """The request cannot become a prompt; ``field`` names the invalid part."""

    def __init__(self, message: str, *, field: str = "messages") -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(PromptError):
    """The prompt has more characters than the limit allows."""

    def __init__(self, chars: int, limit: int, *, field: str = "messages") -> None:
        super().__init__(
            f"the prompt has {chars} characters, the limit is {limit}; shorten the prompt",
            field=field,
        )
        self.chars = chars
        self.limit = limit


class UnsupportedContentError(PromptError):
    """A message part that is not text, for a template that supports text only."""


def raise_unless_native(error: BaseException) -> None:
    """Raise ``error`` again, unless it is an error of a native package.

    A panic of Rust code is a BaseException: without this it passes every ``except Exception``, and
    the request that met it ends without an answer.
    """
    if isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime":
        return
    raise error
