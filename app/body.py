"""A JSON body from a client: strict about fields we know, tolerant of fields we do not.

A known field that we cannot honour is refused by name, never dropped. Which fields a body has is left to the
protocol modules.
"""

import re
from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from engine import RequestError

B = TypeVar("B", bound="Body")

# Fields that change the answer and that we cannot honour, with the values that ask for nothing.
_REFUSED: Mapping[str, tuple[object, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "web_search_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "return_token_ids": (None, False),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "logits_processors": (None, []),
    "prompt_embeds": (None,),
    "lora_request": (None,),
}


class Body(BaseModel):
    """A JSON object from a client. Unknown fields are kept only so that refused ones can be named."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        extra: Mapping[str, Any] = self.model_extra or {}
        for name, neutral in _REFUSED.items():
            # True == 1 in Python, so the type counts too.
            if name in extra and not any(type(extra[name]) is type(v) and extra[name] == v for v in neutral):
                raise RequestError(f"{name} is not supported by this server: leave it out", name)
        return self


def parse(kind: type[B], body: bytes) -> B:
    """Return the JSON `body` as a `kind`; the first fault is a `RequestError` that names its field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error) from error


def _request_error(error: ValidationError) -> RequestError:
    """Say the first fault only: the others often follow from it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return RequestError(f"the body must be JSON in UTF-8: {first['msg']}")
    parameter = ""
    for part in first["loc"]:
        if isinstance(part, str) and _BRANCH.match(part):
            continue
        parameter += f"[{part}]" if isinstance(part, int) else f".{part}" if parameter else part
    message = (
        f"{parameter}: {first['msg']}" if parameter else f"the body must be a JSON object: {first['msg']}"
    )
    return RequestError(message, parameter or None)


_BRANCH = re.compile(r"[A-Z]|\w+\[")  # names of a union's types stand in the path of a fault, as `list[str]`
