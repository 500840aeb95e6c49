"""A model's chat template: Jinja source that turns messages into the model's own prompt format.

Same names and filters as in `transformers` (tojson, raise_exception, strftime_now, break and continue, the `generation`
block), in Jinja's immutable sandbox. Templates come with models from anywhere, and what they render comes from
clients, so one rendering is bounded: its output, the sum of all its ranges, and results of `*` and `**`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from replica.errors import InvalidRequest, ModelUnsupported

Message = Mapping[str, Any]

_MAX_RANGE_ITEMS = 100_000
_MAX_OUTPUT_CHARS = 64 * 1024 * 1024
_MAX_PRODUCT = 1_000_000
_MAX_MESSAGE_CHARS = 500


class ChatTemplate:
    """`source` compiled once; `render` may run in several threads at a time.

    `special_tokens` become variables (bos_token, ...). `now` is the clock of `strftime_now`. Raises `ModelUnsupported`
    when the source is no valid template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        self.knows_developer = "developer" in source
        try:
            self._template = environment.from_string(source)
            self.literals = tuple(_literals(environment.parse(source)))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelUnsupported(f"the chat template is no valid Jinja: {_one_line(error)}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: object) -> str:
        """The prompt's text. `kwargs` are further variables.

        Raises `InvalidRequest` with the template's own words when it refuses the messages or can't render them.
        """
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **kwargs,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "range": _RangeBudget(),
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > _MAX_OUTPUT_CHARS:
                    raise OverflowError(f"its output is longer than {_MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except Exception as error:  # a template can raise anything that an expression can
            text = f"the model's chat template can't render these messages: {_one_line(error)}"
            raise InvalidRequest(text, param="messages") from error
        return "".join(pieces)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse huge products before they are computed, also of strings and lists."""
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > _MAX_PRODUCT:
                raise OverflowError(f"'{operator}' makes more than {_MAX_PRODUCT} items")
        if operator == "**" and not (abs(left) <= _MAX_PRODUCT and abs(right) <= 64):
            raise OverflowError("'**' makes too large a number")
        return super().call_binop(context, operator, left, right)


class _RangeBudget:
    """`range` of one rendering: all its ranges together may have so many items, so nested loops are bounded too."""

    def __init__(self) -> None:
        self._left = _MAX_RANGE_ITEMS

    def __call__(self, *bounds: int) -> range:
        found = range(*bounds)
        self._left -= max(len(found), 1)
        if self._left < 0:
            raise OverflowError(f"its ranges have more than {_MAX_RANGE_ITEMS} items")
        return found


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _literals(tree: jinja2.nodes.Template) -> set[str]:
    """Everything that the template itself may write: its plain text and its string constants."""
    plain = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    constants = {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    return plain | constants


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_MESSAGE_CHARS] or type(error).__name__
