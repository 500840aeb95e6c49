"""Chat messages as clients send them, and as templates want them: plain dicts whose content is one string."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import from_json

_Name = Annotated[str, Field(min_length=1, max_length=256)]
# Fields of our own and OpenAI's answers that clients send back in the history; empty they say nothing.
_EMPTY_ANSWER_FIELDS = ("annotations", "audio", "function_call", "reasoning_content", "refusal")


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FunctionCall(_Part):
    name: _Name
    arguments: str


class ToolCall(_Part):
    """A call in an assistant's message of the history."""

    id: _Name
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Part):
    """One message. `content` is a string when this is built: text parts are joined with nothing between them, null
    (allowed beside tool calls) is empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: _Name | None = None
    tool_calls: list[ToolCall] | None = Field(None, min_length=1, max_length=128)
    tool_call_id: _Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        kept = {k: v for k, v in fields.items() if not (k in _EMPTY_ANSWER_FIELDS and v in (None, [], ""))}
        if not kept.get("tool_calls", True):
            del kept["tool_calls"]
        if kept.get("content") is None and kept.get("role") == "assistant" and "tool_calls" in kept:
            kept["content"] = ""
        return kept

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: object) -> str:
        if isinstance(content, str):
            return content
        if content is None:
            raise ValueError("must not be null (only an assistant's message with tool_calls may have none)")
        if not isinstance(content, list):
            raise ValueError("must be a string or a list of text parts")
        if not content:
            raise ValueError("must not be an empty list")
        return "".join(_part_text(number, part) for number, part in enumerate(content))

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("only an assistant's message can have tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a tool's message needs a tool_call_id, and only that has one")
        return self

    def for_template(self) -> dict[str, Any]:
        """What chat templates expect; a call's arguments as an object where they are one."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls is not None:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return message


def _part_text(number: int, part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError(f"part {number} must be an object with a type")
    if part["type"] != "text":
        raise ValueError(f"part {number} has type {part['type'][:40]!r}, but only text parts are supported")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"part {number} has no string as text")
    if part.keys() > {"type", "text"}:
        raise ValueError(f"part {number} has unknown fields beside type and text")
    return str(part["text"])


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    arguments: object = call.function.arguments
    try:
        parsed = from_json(call.function.arguments, allow_inf_nan=False)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        arguments = parsed
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
