"""Errors of decoders: foreign bytes or requests that do not match their format."""


class WireError(ValueError):
    """A payload that cannot be decoded.

    ``where`` is the path of the wrong value (``events[3].block_size``); ``problem`` has what was
    found and what was expected. Neither has payload contents: token ids must not reach a log
    through an error.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class RequestError(ValueError):
    """A client's request that is invalid; becomes an HTTP error response.

    ``status`` is the HTTP status (4xx), ``code`` a stable word (``wrong_type``, ``unknown_field``,
    ...), ``field`` the path of the wrong field (``messages[0].role``; None for the whole body) and
    ``problem`` what was expected and what was found. Prompt text and token ids never appear in it.
    """

    def __init__(self, status: int, code: str, field: str | None, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.status = status
        self.code = code
        self.field = field
        self.problem = problem

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON response body in OpenAI's format."""
        return {
            "error": {
                "message": str(self),
                "type": "invalid_request_error",
                "code": self.code,
                "param": self.field,
            }
        }
