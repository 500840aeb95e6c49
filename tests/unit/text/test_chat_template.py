from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from replica.errors import InvalidRequest, ModelUnsupported
from replica.text.chat_template import ChatTemplate
from tests.tokenizer_families import CHAT_TEMPLATE

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, object]] | None = None, **kwargs: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 1, 2))
    return template.render(messages or HELLO, **kwargs)


def test_messages_become_the_models_format() -> None:
    assert render(CHAT_TEMPLATE) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHAT_TEMPLATE, {}).render(HELLO, False) == "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hello"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{% set ns = namespace(x=1) %}{% for m in messages %}{% set ns.x = 2 %}{% endfor %}{{ ns.x }}", "2"),
        ("a\n   {% if tools is none and documents is none %}\nb{% endif %}", "a\nb"),
        ("{{ extra }}", "1"),
    ],
)
def test_templates_find_what_transformers_gives_them(source: str, expected: str) -> None:
    assert render(source, extra=1) == expected


def test_a_refusal_of_the_template_is_told_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        render("{{ raise_exception('roles must alternate') }}")
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.strip() }}",
        "{{ missing.field }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ messages.append(1) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 // 0 }}",
    ],
)
def test_whatever_a_template_raises_is_a_clear_refusal(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template can't render"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ 9**9**9 }}",
    ],
)
def test_a_template_can_not_stall_the_server(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template can't render"):
        render(source)


def test_one_renderings_ranges_do_not_count_for_the_next() -> None:
    template = ChatTemplate("{% for i in range(60000) %}{% endfor %}x", {})
    assert [template.render(HELLO) for _ in range(3)] == ["x", "x", "x"]


def test_a_template_that_does_not_parse_refuses_the_model() -> None:
    with pytest.raises(ModelUnsupported, match="no valid Jinja"):
        ChatTemplate("{% for %}", {})
