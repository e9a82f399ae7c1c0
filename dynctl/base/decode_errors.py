"""What the wire room raises when bytes are not what their format says."""


class WireError(ValueError):
    """A payload could not be understood.

    ``where`` is the path of the offending value (``events[3].block_size``); ``problem`` says what
    was found and what was expected. Neither holds payload contents: token ids must not reach a
    log through an error.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class RequestError(ValueError):
    """A client's request that cannot be served as it stands; becomes an HTTP answer.

    ``status`` is the HTTP status (4xx), ``code`` a stable word (``wrong_type``, ``unknown_field``,
    ...), ``field`` the path of the offending field (``messages[0].role``; None where the whole body
    is meant) and ``problem`` what was expected and what came instead. Prompt text and token ids
    never appear in it.
    """

    def __init__(self, status: int, code: str, field: str | None, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.status = status
        self.code = code
        self.field = field
        self.problem = problem

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON answer in OpenAI's shape."""
        return {
            "error": {
                "message": str(self),
                "type": "invalid_request_error",
                "code": self.code,
                "param": self.field,
            }
        }
