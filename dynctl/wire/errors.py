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
