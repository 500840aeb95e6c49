"""Fields of OpenAI's API, and of servers like this one, that brimful knows and doesn't support yet.

Each has the values that ask for nothing; null always does. With one of them the field is accepted, with any other the
request is refused by the field's name. A field that is in no list here and not in the schema is refused as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replica.errors import InvalidRequest

BOTH: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": ((),),
    "bad_words": ((),),
    "detokenize": (True,),
    "early_stopping": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ((),),
    "min_p": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

CHAT: Mapping[str, tuple[object, ...]] = {
    **BOTH,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ((),),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ((),),
    "logprobs": (False,),
    "mm_processor_kwargs": ({},),
    "modalities": (("text",),),
    "prediction": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ((),),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

COMPLETION: Mapping[str, tuple[object, ...]] = {
    **BOTH,
    "add_special_tokens": (True,),
    "echo": (False,),
    "logprobs": (),
    "prompt_embeds": (),
    "suffix": ("",),
}


def without_unsupported(fields: dict[str, Any], known: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
    """`fields` without those of `known`. Raises `InvalidRequest` for the first of them that asks for something."""
    for name, value in fields.items():
        if name in known and value is not None and not any(_same(value, neutral) for neutral in known[name]):
            raise InvalidRequest(f"{name} is not supported yet", param=name)
    return {name: value for name, value in fields.items() if name not in known}


def _same(value: object, neutral: object) -> bool:
    """Equality in JSON's sense: true isn't 1, a list equals a tuple."""
    if isinstance(value, list):
        value = tuple(value)
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
