"""Every field: what is taken, what is refused and how it is named."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.openai_schema import parse_chat, parse_completion
from deployments.openai_unsupported import CHAT, COMPLETION
from replica.errors import InvalidRequest
from tests.unit.deployments.openai_bodies import VOCAB, chat, completion, refused

SAMPLES: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [None, 1, 2**31 - 1], [0, -1, 1.0, "8", 2**31, 2**63, 10**400, True, [1]]),
    ("temperature", [None, 0, 1e-12, 1e-4, 0.01, 1, 2], [2.01, -0.1, "0", True, 1e999, [1], 10**400]),
    ("top_p", [None, 1e-9, 0.5, 1], [0, 1.01, -1, "1", False]),
    ("top_k", [None, -1, 0, 1, VOCAB, VOCAB + 1], [-2, 1.5, True, "1", 2**31, 2**63]),
    ("n", [None, 1, 16], [0, -1, 17, 1.0, True, 2**63, "1"]),
    ("seed", [None, -1, 0, 2**63 - 1, -(2**63)], [2**63, 2**64, 1.0, True, "1"]),
    ("min_tokens", [None, 0, 5], [-1, True, 2**31, 1.0]),
    ("priority", [None, 0, -5, 5], [2**31, True, "high", 0.5]),
    ("ignore_eos", [None, True, False], [1, "true", 0]),
    ("skip_special_tokens", [None, True, False], [1, "no"]),
    ("stream", [None, True, False], [1, "true"]),
    ("cache_salt", [None, "tenant"], ["", 1, "x" * 513]),
    ("prompt_cache_key", [None, "", "talk", "x" * 512], [1, "x" * 513]),
    ("stop", [None, [], "a", ["a", "bc"], ["x"] * 16, "🌶"], ["", ["a", ""], [1], {"a": 1}, 5, ["x"] * 17, "x" * 1025]),
    ("user", [None, "me"], [1, "x" * 513]),
    ("store", [None, True, False], ["yes"]),
    ("service_tier", [None, "auto", "default"], ["flex", 1]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, good, _ in SAMPLES for value in good])
def test_possible_values_are_taken(field: str, value: object) -> None:
    chat(**{field: value})
    completion(**{field: value})


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, _, bad in SAMPLES for value in bad])
def test_impossible_values_are_refused_by_the_fields_name(field: str, value: object) -> None:
    assert refused(field, **{field: value}).startswith(field)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "seed", "max_tokens", "frequency_penalty", "user"])
def test_numbers_that_are_none_are_refused_by_the_fields_name(field: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_chat(
            b'{"model":"m","messages":[{"role":"user","content":"a"}],"%s":%s}' % (field.encode(), text.encode())
        )
    assert error.value.param == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"emoji \\ud83d"}]}',
        b'{"model":"\\ud83d","messages":[{"role":"user","content":"a"}]}',
        b'{"model":"m","stop":"\\udc00","messages":[{"role":"user","content":"a"}]}',
        b'{"a":' * 100_000,
        b"[" * 1_000_000,
        b'{"seed":' + b"9" * 1_000_000 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":"a"}]} trailing',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"' + b"x" * 100_000 + b'":1}',
    ],
)
def test_hostile_bodies_are_refused_briefly(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(InvalidRequest) as error:
            parse(body)
        assert len(error.value.message) < 500


def test_a_paired_surrogate_escape_is_its_character_and_of_equal_keys_the_last_counts() -> None:
    body = b'{"model":"a","model":"b","messages":[{"role":"user","content":"\\ud83c\\udf36"}]}'
    assert (parse_chat(body).model, parse_chat(body).messages[0].content) == ("b", "🌶")


def test_a_deep_content_in_a_message_is_refused() -> None:
    deep: Any = "a"
    for _ in range(150):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        chat(messages=[{"role": "user", "content": deep}])


@pytest.mark.parametrize(
    ("field", "wrong", "words"),
    [
        ("max_tokens", [0, 2**31, "8", 1.0, 2**63], "must be a whole number from 1 to 2147483647"),
        ("temperature", [-0.1, 2.01, "0", 1e999], "must be a number from 0 to 2"),
        ("top_p", [0, 1.01, "1"], "must be a number from more than 0 to 1"),
        ("n", [0, 17], "must be a whole number from 1 to 16"),
    ],
)
def test_whichever_end_of_a_range_was_missed_the_refusal_names_both(field: str, wrong: list[Any], words: str) -> None:
    assert {refused(field, **{field: value}) for value in wrong} == {f"{field}: {words}"}


def test_a_chat_without_messages_is_refused_in_plain_words() -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: must not be empty$"):
        chat(messages=[])


def test_unknown_fields_are_refused_by_name() -> None:
    assert refused("temprature", temprature=1) == "temprature is not a known field"


@pytest.mark.parametrize("field", ["model"])
def test_required_fields(field: str) -> None:
    assert refused(field, **{field: None}) == f"{field} is required"
    for parse in (parse_chat, parse_completion):
        with pytest.raises(InvalidRequest, match="is required"):
            parse(b'{"model": "m"}')


ASKING: dict[str, object] = {
    "logprobs": 1,
    "top_logprobs": 3,
    "logit_bias": {"5": 100},
    "frequency_penalty": 0.5,
    "presence_penalty": -2,
    "repetition_penalty": 1.1,
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "min_p": 0.1,
    "suffix": "end",
    "echo": True,
}


@pytest.mark.parametrize(("parse", "known"), [(chat, CHAT), (completion, COMPLETION)])
def test_what_is_not_supported_yet_is_refused_by_name_unless_it_asks_for_nothing(parse: Any, known: Any) -> None:
    for name, neutral in known.items():
        for value in (None, *neutral):
            parse(**{name: value})
        for value in (ASKING.get(name, {"asks": "something"}), "something", ["x"], 17):
            with pytest.raises(InvalidRequest, match=f"^{name} is not supported yet$") as error:
                parse(**{name: value})
            assert error.value.param == name


def test_false_is_no_zero_and_zero_is_no_false() -> None:
    assert refused("frequency_penalty", frequency_penalty=False)
    assert refused("logprobs", logprobs=0)


def test_stream_options_need_a_stream() -> None:
    assert refused("stream_options", stream_options={"include_usage": True})
    assert refused("stream_options", stream=False, stream_options={})
    assert refused("stream_options.include_usage", stream=True, stream_options={"include_usage": 1})
    assert refused("stream_options.more", stream=True, stream_options={"more": 1})
    for wanted, options in [
        (True, {"include_usage": True}),
        (False, {"include_usage": False}),
        (False, {}),
        (False, None),
    ]:
        assert chat(stream=True, stream_options=options).include_usage is wanted


def test_the_two_names_of_the_maximum_must_agree() -> None:
    assert chat(max_completion_tokens=5).max_output_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).max_output_tokens == 5
    assert chat(max_completion_tokens=None, max_tokens=6).max_output_tokens == 6
    assert chat().max_output_tokens is None
    with pytest.raises(InvalidRequest, match="differ") as error:
        chat(max_completion_tokens=5, max_tokens=6)
    assert error.value.param == "max_completion_tokens"


def test_min_tokens_can_not_exceed_the_maximum() -> None:
    assert refused("min_tokens", min_tokens=9, max_tokens=8)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_all_forms_of_a_prompt(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    "prompt", [[], 5, True, {}, ["a", 1], [1, "a"], [[1], 2], [-1], [1.0], [True], [[True]], [None]]
)
def test_other_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as error:
        completion(prompt=prompt)
    assert error.value.param == "prompt"


def test_the_number_of_choices_is_bounded() -> None:
    assert len(completion(prompt=["a"] * 512).prompt) == 512
    with pytest.raises(InvalidRequest, match="more than 512 choices") as error:
        completion(prompt=["a"] * 33, n=16)
    assert error.value.param == "prompt"


def test_best_of_is_only_possible_as_n() -> None:
    assert completion(best_of=2, n=2).n == 2
    with pytest.raises(InvalidRequest) as error:
        completion(best_of=3, n=2)
    assert error.value.param == "best_of"
