"""The jinja2 environment for untrusted chat templates.

It is an ``ImmutableSandboxedEnvironment`` with the settings of Hugging Face (block trimming, loop
controls, ``tojson`` without HTML escapes) and with a meter: the compiled template counts every
body, comparison and slice; calls, filters, operators, literals and outputs pass through hooks. Only
the filters and methods on the lists below are allowed.

The remaining cost: one step may take as long as Python needs for the largest allowed value (a
search in a string of ``string_chars``, sorting ``nodes`` items), and a render may create
``created_chars`` characters. The deadline is checked between steps, not inside them.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import TemplateRuntimeError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dynctl.tokenization.budget import BudgetHolder, WorkLimitError

FILTERS = frozenset(
    (
        "abs capitalize center count d default dictsort e escape first float format groupby "
        "indent int items join last length list lower map max min reject rejectattr replace "
        "reverse round safe select selectattr sort string sum title tojson trim unique upper "
        "wordcount"
    ).split()
)
STRING_METHODS = frozenset(
    (
        "capitalize casefold center count endswith expandtabs find format format_map index "
        "isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isspace istitle "
        "isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex "
        "rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper "
        "zfill"
    ).split()
)
CONTAINER_METHODS = frozenset(("copy count get index items keys values").split())
# The sandbox wraps the two that format.
_PLAIN_STRING_METHODS = STRING_METHODS - {"format", "format_map"}
_DICT_NAMES = frozenset(dir(dict))
_EQUALITY = frozenset(("eq", "ne"))
_LOOP_NAMES = frozenset(
    ("depth depth0 first index index0 last length nextitem previtem revindex revindex0").split()
)
# Filters that do not print, join or compare the values inside their input.
_SHALLOW = frozenset(
    (
        "abs count d default first float int items last length list map reject rejectattr reverse "
        "round safe select selectattr"
    ).split()
)
# Filters that run Python code for each item: of a string, for each character.
_BY_ITEM = frozenset(
    (
        "dictsort groupby items join list map max min reject rejectattr select selectattr sort sum "
        "unique"
    ).split()
)
# Filters that run Python code for each word.
_BY_WORD = frozenset(("indent", "title", "wordcount"))
_WIDENING = frozenset(("indent", "join", "replace", "tojson"))
_SPLITS = frozenset(("split", "rsplit", "splitlines"))
# The longest whole number: divisions and powers of longer ones take long.
_BITS = 4096
# The arguments that compiled code adds to a call inside a loop or a block.
_HIDDEN = ("_loop_vars", "_block_vars")
_NUMBER = re.compile(r"\d+")
_PERCENT_SPEC = re.compile(r"%[^a-zA-Z%]*")
_BRACE_FIELD = re.compile(r"\{[^{}]*\}")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")


class RejectedByTemplate(TemplateRuntimeError):
    """The template called ``raise_exception``: it refuses these messages, with a reason."""


class QuietNamespace(Namespace):
    """A ``namespace()`` with a short repr: jinja2's own prints all values in it."""

    def __repr__(self) -> str:
        return "<Namespace>"


class GenerationTag(Extension):
    """``{% generation %}..{% endgeneration %}`` marks the assistant's text for training.

    As in inference servers, the body is passed through.
    """

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja2 reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class MeteredCode(CodeGenerator):
    """Compiles a template with a meter in every body, and with hooks that jinja2 does not have."""

    environment: "ChatEnvironment"

    def blockvisit(self, nodes_: Iterable[nodes.Node], frame: Frame) -> None:
        body = list(nodes_)
        chars = sum(
            len(part.data)
            for node in body
            if isinstance(node, nodes.Output)
            for part in node.nodes
            if isinstance(part, nodes.TemplateData)
        )
        # A branch of an `if` runs at most once for each turn of the loop or call that it is in.
        if chars or not frame.soft_frame:
            self.writeline(f"environment.meter({chars})")
        super().blockvisit(body, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        if all(
            operand.op in _EQUALITY and isinstance(operand.expr, nodes.Const)
            for operand in node.ops
        ):
            # Not more work than the length of the constant.
            super().visit_Compare(node, frame)
            return
        self.write("(environment.passing(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_bounded(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.passing(")
        self.visit(node.node, frame)
        self.write(")[")
        self.visit(node.arg, frame)
        self.write("]")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._visit_weighed(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._visit_weighed(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._visit_weighed(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _visit_weighed(
        self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame
    ) -> None:
        self.write("environment.weigh_value(")
        visit(node, frame)
        self.write(")")


class TrustedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of a template that its operator trusts: the same language in the plain
    sandbox, without a meter. Thread-safe.

    What a template reaches is bounded as before; the work of a render is not (`ChatEnvironment`).
    """

    def __init__(self, now: Callable[[], datetime], **options: Any) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            cache_size=0,
            extensions=[LoopControlExtension, GenerationTag],
            **options,
        )
        self.filters["tojson"] = _tojson
        self.filters = {
            name: function for name, function in self.filters.items() if name in FILTERS
        }
        self.globals = {
            "dict": dict,
            "namespace": QuietNamespace,
            "raise_exception": _raise_exception,
            "range": self.globals["range"],  # the sandbox's: at most MAX_RANGE numbers
            "strftime_now": lambda fmt: now().strftime(fmt),
        }

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As jinja2's, with short ways for what templates read most: keys of a message, methods of
        a string, the state of a loop, a namespace. All of these are safe there too."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_NAMES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif (kind is str and attribute in _PLAIN_STRING_METHODS) or (
            kind is LoopContext and attribute in _LOOP_NAMES
        ):
            return getattr(obj, attribute)
        elif kind is QuietNamespace and attribute[:1] != "_":
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As jinja2's, with a short way for keys of a message."""
        if type(obj) is dict and type(argument) is str:
            try:
                return obj[argument]
            except KeyError:
                if argument not in _DICT_NAMES:
                    return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)


class ChatEnvironment(TrustedEnvironment):
    """The environment of one template, with a meter. Thread-safe: each thread has its own
    budget."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])
    code_generator_class = MeteredCode

    def __init__(self, budget: BudgetHolder, now: Callable[[], datetime]) -> None:
        # Constant folding would run filters and operators while compiling.
        super().__init__(now, optimized=False, finalize=_print_value)
        self.budget = budget
        self.filters = {
            name: self._meter_filter(name, function) for name, function in self.filters.items()
        }

        def strftime_now(fmt: str) -> str:
            budget.get().string(_percent_width(fmt) + 64 * len(fmt))
            return now().strftime(fmt)

        self.globals["strftime_now"] = strftime_now

    # Called by the compiled template.

    def meter(self, chars: int) -> None:
        (self.budget.current or self.budget.get()).spend(1, chars)

    def passing(self, value: Any) -> Any:
        """Count one operation and the length of ``value`` before it is compared or sliced."""
        self.budget.get().spend(1, len(value) if isinstance(value, str | list | tuple) else 0)
        return value

    def weigh_value(self, value: Any) -> Any:
        self.budget.get().weigh(value)
        return value

    def concat_bounded(self, *values: Any) -> str:
        budget = self.budget.get()
        budget.spend()
        for value in values:
            budget.weigh(value)
        texts = [str(value) for value in values]
        budget.string(sum(map(len, texts)))
        return "".join(texts)

    # Called by jinja2.

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = self.budget.get()
        budget.spend()
        # The sandbox wraps str.format in its own function.
        method = getattr(callee, "__wrapped__", callee)
        owner = getattr(method, "__self__", None)
        if isinstance(method, BuiltinMethodType) or isinstance(owner, str):
            given = [*args, *(v for k, v in kwargs.items() if k not in _HIDDEN)]
            self._check_method(owner, str(getattr(method, "__name__", "")), given)
        result = super().call(context, callee, *args, **kwargs)
        if isinstance(result, str):
            budget.string(len(result))
        elif callee is dict or isinstance(result, list):
            budget.weigh(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget.current or self.budget.get()
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.string(len(left) + len(right))
            return left + right
        budget.spend()
        if operator == "**":
            _check_power(left, right)
        elif operator == "*":
            _check_product(budget, left, right)
        elif operator == "%" and isinstance(left, str):
            inner = budget.weigh(right) * (1 + left.count("%"))
            budget.string(len(left) + _percent_width(left) + inner)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, list | tuple):
            budget.weigh(result)
        _check_bits(result)
        return result

    def _check_method(self, owner: object, name: str, args: list[Any]) -> None:
        budget = self.budget.get()
        if isinstance(owner, str) and name in STRING_METHODS:
            _check_string_method(budget, owner, name, args)
        elif isinstance(owner, dict | list | tuple) and name in CONTAINER_METHODS:
            budget.spend(1 + len(owner) // 16)
        else:
            raise SecurityError(f"{type(owner).__name__}.{name}() is not allowed")

    def _meter_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Some filters get a context, an environment or an evaluation context as first argument.
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0
        shallow = name in _SHALLOW
        signature = inspect.signature(function) if name in _WIDENING else None

        @wraps(function)
        def metered_filter(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget.get()
            value = args[skip] if len(args) > skip else None
            budget.spend(_steps(name, value))
            rest = (*args[skip + 1 :], *kwargs.values())
            for argument in rest:
                budget.width(argument)
            weight = 0 if shallow else budget.weigh(value)
            # By name, because the template may name its arguments in any order.
            given = {} if signature is None else signature.bind(*args, **kwargs).arguments
            if name == "join":
                items = _check_join(budget, value, given.get("d", ""))
                args = (*args[:skip], items, *args[skip + 1 :])
            elif name == "format" and isinstance(value, str):
                inner = sum(budget.weigh(argument) for argument in rest)
                budget.string(len(value) + _percent_width(value) + inner * (1 + value.count("%")))
            else:
                _check_widening(budget, name, value, given, weight)
            result = function(*args, **kwargs)
            if isinstance(result, str):
                budget.string(len(result))
            elif isinstance(result, list) and not shallow:
                budget.weigh(result)
            _check_bits(result)
            return result

        return metered_filter


@pass_context
def _print_value(context: Context, value: Any) -> str:
    # pass_context stops jinja2 from folding outputs while it compiles.
    environment = context.environment
    assert isinstance(environment, ChatEnvironment)
    budget = environment.budget.current or environment.budget.get()
    if type(value) is str:
        budget.string(len(value))
        return value
    if not isinstance(value, str):
        budget.weigh(value)
    text = str(value)
    budget.string(len(text))
    return text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes <, >, & and ' for HTML; a prompt is not HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object = "") -> NoReturn:
    raise RejectedByTemplate(str(message))


_TOO_LONG = f"a number of more than {_BITS} bits"


def _steps(name: str, value: object) -> int:
    """Operations of one filter on a value, before it runs."""
    if not isinstance(value, str | list | tuple | dict):
        return 1  # a generator is metered where it begins
    size = len(value)
    if name in _BY_ITEM:
        return 1 + (size if isinstance(value, str) else size // 4)
    if name in _BY_WORD:
        return 1 + size // 8
    return 1 + size // 64


def _parts(name: str, text: str, args: list[Any]) -> int:
    """An upper bound of the parts that a method splits a text into."""
    separator = args[0] if args else None
    if name == "splitlines":
        return text.count("\n") + len(text) // 64
    if isinstance(separator, str) and separator:
        return text.count(separator)
    return len(text) // 2


def _check_string_method(budget: Any, text: str, name: str, args: list[Any]) -> None:
    """Count the work of a method before it runs, and bound its result."""
    for value in args:
        budget.width(value)
    budget.spend(1 + len(text) // 64)
    if name in _SPLITS:
        budget.spend(1 + _parts(name, text, args) // 4)
    elif name == "replace" and len(args) > 1:
        _check_replace(budget, text, args[0], args[1])
    elif name == "join" and args:
        _check_join(budget, args[0], text)
    elif name == "expandtabs":
        size = args[0] if args and isinstance(args[0], int) else 8
        budget.string(len(text) + text.count("\t") * size)
    elif name in ("format", "format_map"):
        inner = sum(budget.weigh(value) for value in args)
        budget.string(len(text) + _brace_width(text) + inner * (1 + text.count("{")))


def _check_widening(
    budget: Any, name: str, value: Any, given: Mapping[str, Any], weight: int
) -> None:
    """Bound the result of a filter by its arguments. ``weight``: of the value."""
    if name == "int":
        _check_digits(value)
    elif name == "replace":
        _check_replace(budget, str(value), str(given["old"]), str(given["new"]))
    elif name == "indent" and isinstance(value, str):
        each = _indent_width(given.get("width", 4))
        budget.string(len(value) + each * (1 + value.count("\n")))
    elif name == "tojson":
        budget.string(weight * (2 + _indent_width(given.get("indent") or "")) * 2)


def _indent_width(indent: Any) -> int:
    return indent if isinstance(indent, int) else len(str(indent))


def _check_digits(value: object) -> None:
    """Reading a number takes the square of its length, in any base."""
    if isinstance(value, str) and len(value) > _BITS:
        raise WorkLimitError(f"a number of more than {_BITS} characters")


def _check_bits(value: object) -> None:
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise WorkLimitError(_TOO_LONG)


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _percent_width(fmt: str) -> int:
    """An upper bound of the padding of a ``%`` format."""
    # Keys may contain parentheses, so with keys every number counts as a width.
    specs = [fmt] if "%(" in fmt else _PERCENT_SPEC.findall(fmt)
    if any("*" in spec for spec in specs):
        raise SecurityError("a format width taken from an argument")
    return _width_of(specs)


def _brace_width(fmt: str) -> int:
    """The same for ``str.format``."""
    if _NESTED_FIELD.search(fmt.replace("{{", "")):
        raise SecurityError("str.format() with a field inside a field")
    return _width_of(_BRACE_FIELD.findall(fmt))


def _width_of(specs: Iterable[str]) -> int:
    numbers = [digits for spec in specs for digits in _NUMBER.findall(spec)]
    if any(len(digits) > 5 for digits in numbers):
        raise WorkLimitError("a format width above 99999")
    return sum(map(int, numbers))


def _check_power(base: object, exponent: object) -> None:
    times = abs(exponent) if isinstance(exponent, int) else 1
    if _bits(base) * max(1, times) > _BITS:
        raise WorkLimitError(_TOO_LONG)


def _check_product(budget: Any, left: Any, right: Any) -> None:
    if not isinstance(left, int) or not isinstance(right, int):
        _check_repeat(budget, left, right)
    elif _bits(left) + _bits(right) > _BITS:
        raise WorkLimitError(_TOO_LONG)


def _check_repeat(budget: Any, left: Any, right: Any) -> None:
    sequence, times = (right, left) if isinstance(left, int) else (left, right)
    if not isinstance(times, int):
        return
    if isinstance(sequence, str):
        budget.string(len(sequence) * max(0, times))
    elif isinstance(sequence, list | tuple) and len(sequence) * times > budget.limits.nodes:
        raise WorkLimitError(f"a list of more than {budget.limits.nodes} nodes")


def _check_replace(budget: Any, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        # An empty ``old`` occurs between all characters: count("") is len + 1.
        budget.string(len(text) + text.count(old) * len(new))


def _check_join(budget: Any, items: Any, separator: Any = "") -> Any:
    if isinstance(items, Iterable) and not isinstance(items, str | list | tuple | dict):
        items = list(items)  # a generator of the filters: its source is bounded, each step metered
    count = len(items) if isinstance(items, str | list | tuple | dict) else 0
    budget.string(budget.weigh(items) + count * len(str(separator)))
    return items
