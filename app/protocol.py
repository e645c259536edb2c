"""The OpenAI bodies that clients send: strict about fields we know, tolerant of fields we do not.

A known field that we cannot honour is refused by name, never dropped. Whether a prompt fits and a token id
exists is left to `choices`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from app.call import CallOptions, ChatCall, CompletionCall, Message, Prompt
from engine import RequestError, SamplingParams

T = TypeVar("T")
B = TypeVar("B", bound="Body")

MAX_CHOICES = 128
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
UNBOUNDED_TOKENS = 2**31 - 1  # stands in for max_tokens until the prompt's length is known

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


def _as_stops(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _as_text(value: object) -> str:
    """Join the text parts of a message's content; `None` (an assistant turn without text) is empty."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise PydanticCustomError("content", "Input should be a string or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError("content", "this model takes parts of type 'text' only")
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", "a part of type 'text' needs a string in 'text'")
        texts.append(part["text"])
    return "".join(texts)


def _as_prompts(value: object) -> list[Prompt]:
    """Normalise OpenAI's four forms of `prompt`: text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "Input should be a string, a non-empty list, or token ids")
    if all(type(item) is int for item in value):
        return [tuple(value)]
    return [_as_prompt(item) for item in value]


def _as_prompt(value: object) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    raise PydanticCustomError("prompt", "each prompt should be a string or a list of integer token ids")


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


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_as_text)] = ""
    name: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("tool_calls", "function_call"):
            if (self.model_extra or {}).get(name):
                raise PydanticCustomError("message", "tool calls are not supported by this server")
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise PydanticCustomError("message", "a message needs content")
        return self

    def to_message(self) -> Message:
        # The developer role is OpenAI's newer name of the system role; templates know only the old one.
        role = "system" if self.role == "developer" else self.role
        return Message(role, self.content, self.name)


class _GenerationBody(Body):
    """What chat and completions share, our extensions included."""

    model: str
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[list[str], BeforeValidator(_as_stops)] = []
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    speculation: str | None = None
    speculation_stats: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    user: str | None = None

    def options(self, max_tokens: int | None, default_max_tokens: int) -> CallOptions:
        """Return the call's options; values out of range raise `RequestError` naming the field."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only valid with stream: true", "stream_options")
        stream_options = self.stream_options or StreamOptions()
        return CallOptions(
            model=self.model,
            sampling=self._sampling(_default(max_tokens, default_max_tokens)),
            max_tokens=max_tokens,
            num_choices=self.n or 1,
            stops=tuple(self.stop),
            includes_stop=bool(self.include_stop_str_in_output),
            skips_special_tokens=self.skip_special_tokens is not False,
            is_stream=bool(self.stream),
            includes_usage=bool(stream_options.include_usage),
            has_continuous_usage=bool(stream_options.continuous_usage_stats),
            wants_speculation_stats=bool(self.speculation_stats),
            priority=self.priority or 0,
        )

    def _sampling(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=_default(self.temperature, 1.0),
            top_k=0
            if self.top_k is None or self.top_k == -1
            else self.top_k,  # vLLM's clients write -1 for off
            top_p=_default(self.top_p, 1.0),
            min_p=_default(self.min_p, 0.0),
            repetition_penalty=_default(self.repetition_penalty, 1.0),
            presence_penalty=_default(self.presence_penalty, 0.0),
            frequency_penalty=_default(self.frequency_penalty, 0.0),
            logit_bias=_as_bias(self.logit_bias or {}),
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=_default(self.min_tokens, 0),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            speculation=_default(self.speculation, "auto"),
        )


class ChatBody(_GenerationBody):
    messages: list[MessageBody] = Field(min_length=1)
    max_completion_tokens: int | None = None

    def to_call(self) -> ChatCall:
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return ChatCall(
            tuple(message.to_message() for message in self.messages), self.options(asked, UNBOUNDED_TOKENS)
        )


class CompletionBody(_GenerationBody):
    prompt: Annotated[list[Prompt], BeforeValidator(_as_prompts)]
    best_of: int | None = None
    echo: bool | None = None

    def to_call(self) -> CompletionCall:
        if self.best_of not in (None, self.n or 1):
            raise RequestError("best_of is supported only where it equals n: leave it out", "best_of")
        is_echoed = bool(self.echo)
        is_echo_alone = is_echoed and self.max_tokens == 0
        options = self.options(1 if is_echo_alone else self.max_tokens, DEFAULT_COMPLETION_TOKENS)
        options = dataclasses.replace(
            options, is_echoed=is_echoed, max_tokens=0 if is_echo_alone else options.max_tokens
        )
        return CompletionCall(tuple(self.prompt), options)


def parse_chat(body: bytes) -> ChatCall:
    """Return the call that a body of /v1/chat/completions asks for, or raise `RequestError`."""
    return parse(ChatBody, body).to_call()


def parse_completion(body: bytes) -> CompletionCall:
    """Return the call that a body of /v1/completions asks for, or raise `RequestError`."""
    return parse(CompletionBody, body).to_call()


def parse(kind: type[B], body: bytes) -> B:
    """Return the JSON `body` as a `kind`; the first fault is a `RequestError` that names its field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error) from error


def _default(value: T | None, default: T) -> T:
    return default if value is None else value


def _as_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    entries = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10:
            raise RequestError(f"logit_bias keys must be token ids, found {key[:40]!r}", "logit_bias")
        entries.append((int(key), value))
    return tuple(entries)


def _request_error(error: ValidationError) -> RequestError:
    """Say the first fault only: the others often follow from it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return RequestError(f"the body must be JSON in UTF-8: {first['msg']}")
    parameter = ""
    for part in first["loc"]:
        parameter += f"[{part}]" if isinstance(part, int) else f".{part}" if parameter else part
    message = (
        f"{parameter}: {first['msg']}" if parameter else f"the body must be a JSON object: {first['msg']}"
    )
    return RequestError(message, parameter or None)
