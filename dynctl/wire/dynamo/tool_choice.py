"""What a Dynamo 1.6 frontend asks of an engine where a request forces a call of a tool."""

from collections.abc import Mapping, Sequence
from typing import Any

from dynctl.base.decode_errors import RequestError

ToolChoice = str | Mapping[str, Any] | None


def is_forced(choice: ToolChoice) -> bool:
    """Whether a ``tool_choice`` leaves the model no answer but a call."""
    return choice not in (None, "none", "auto")


def forced_function(choice: ToolChoice) -> str | None:
    """The function that a ``tool_choice`` names, None if any function may be called."""
    return choice["function"]["name"] if isinstance(choice, Mapping) else None


def calls_schema(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, *, parallel: bool
) -> dict[str, Any]:
    """The JSON schema of the output for a forced choice, which was checked against the tools.

    For a named function it is that of its arguments, else an array of calls; without ``parallel``
    of one call. Raises RequestError (400) for definitions that do not fit together.
    """
    function = forced_function(choice)
    functions = [tool["function"] for tool in tools]
    if function is not None:
        return next(_parameters(each) for each in functions if each["name"] == function)
    definitions: dict[str, Any] = {}
    calls = []
    for number, each in enumerate(functions):
        parameters = _parameters(each)
        field = f"tools[{number}].function.parameters.$defs"
        own = parameters.pop("$defs", {})
        if not isinstance(own, Mapping):
            raise RequestError(400, "out_of_range", field, "expected an object of schemas")
        for name, schema in own.items():
            if definitions.setdefault(name, schema) != schema:
                problem = f"{name[:40]!r} is another schema in a function before"
                raise RequestError(400, "conflict", field, problem)
        properties = {
            "name": {"type": "string", "enum": [each["name"]]},
            "parameters": parameters,
        }
        calls.append({"properties": properties, "required": ["name", "parameters"]})
    schema = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("parameters")
    return {"type": "object", "properties": {}} if given is None else dict(given)
