"""Calls of tools in generated text, in the formats that models write."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from dynctl.tokenization.tool_calls.calls import (
    SPACE,
    CallFormat,
    CallPiece,
    ToolCall,
    ToolCallError,
)
from dynctl.tokenization.tool_calls.deepseek_calls import DeepseekFormat
from dynctl.tokenization.tool_calls.guided import GuidedSplitter
from dynctl.tokenization.tool_calls.json_calls import JsonFormat
from dynctl.tokenization.tool_calls.kimi_calls import KimiFormat
from dynctl.tokenization.tool_calls.pythonic_calls import PythonicFormat
from dynctl.tokenization.tool_calls.splitter import Part, ToolCallSplitter
from dynctl.tokenization.tool_calls.xml_calls import XmlFormat, schemas_of

__all__ = [
    "SPACE",
    "TOOL_CALL_PARSERS",
    "CallPiece",
    "GuidedSplitter",
    "Part",
    "ToolCall",
    "ToolCallError",
    "ToolCallSplitter",
    "call_format",
]

_HERMES: Final = JsonFormat(
    start="<tool_call>",
    closes=("</tool_call>",),
    hides=True,
    names_only=True,
    ends_at="mark",
)

TOOL_CALL_PARSERS: Final[dict[str, CallFormat]] = {
    "deepseek_v3": DeepseekFormat(fenced=True),
    "deepseek_v3_1": DeepseekFormat(fenced=False),
    "hermes": _HERMES,
    "jamba": JsonFormat(start="<tool_calls>", closes=("</tool_calls>",), hides=True, drops=True),
    "kimi_k2": KimiFormat(),
    "llama3_json": JsonFormat(start="<|python_tag|>", closes=("",)),
    "minimax_m2": XmlFormat(
        outer=("<minimax:tool_call>", "</minimax:tool_call>"),
        function=("<invoke name=", "</invoke>"),
        parameter=("<parameter name=", "</parameter>"),
        strict=True,
    ),
    "mistral": JsonFormat(
        start="[TOOL_CALLS]",
        closes=("[/TOOL_CALLS]", ""),
        drops=True,
        leading=True,
        ends_at="bracket",
    ),
    "nemotron_deci": JsonFormat(
        start="<TOOLCALL>", closes=("</TOOLCALL>",), drops=True, ends_at="mark"
    ),
    "nemotron_nano": XmlFormat(),
    "phi4": JsonFormat(start="functools", closes=("",), ends_at="bracket"),
    "pythonic": PythonicFormat(),
    "qwen25": JsonFormat(
        start="<tool_call>",
        closes=("</tool_call>",),
        hides=True,
        names_only=True,
        repairs=False,
        ends_at="mark",
    ),
    "qwen3_coder": XmlFormat(),
}
"""Names of the supported parsers, as cards have them."""


def call_format(parser: str, tools: Sequence[Mapping[str, Any]]) -> CallFormat:
    """The format of a parser; ``tools`` of the request, as in its body."""
    form = TOOL_CALL_PARSERS[parser]
    return replace(form, schemas=schemas_of(tools)) if isinstance(form, XmlFormat) else form
