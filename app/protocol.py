"""The OpenAI bodies of the generating endpoints, as calls.

What every body has in common is in `body`, messages and tools are in `chat_protocol`. Whether a prompt fits
and a token id exists is left to `choices`.
"""

import dataclasses
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from app.body import Body, parse
from app.call import CallOptions, ChatCall, CompletionCall, Prompt
from app.chat_protocol import MessageBody, ShapeFields, ToolChoice, check_choice
from engine import RequestError, SamplingParams

T = TypeVar("T")

MAX_CHOICES = 128
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_COUNT = 2**31 - 1
UNBOUNDED_TOKENS = MAX_COUNT  # stands in for max_tokens until the prompt's length is known


def _as_stops(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


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


# The last types are what the document of the API shows of these fields.
Stops = Annotated[list[str], BeforeValidator(_as_stops, json_schema_input_type=str | list[str] | None)]
Prompts = Annotated[
    list[Prompt],
    BeforeValidator(_as_prompts, json_schema_input_type=str | list[str] | list[int] | list[str | list[int]]),
]


def _bounded(minimum: float, maximum: float) -> Any:
    """Return a field whose bounds the document shows; `SamplingParams` holds them and words the refusal."""
    return Field(default=None, json_schema_extra={"minimum": minimum, "maximum": maximum})


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _GenerationBody(Body):
    """What chat and completions share, our extensions included."""

    model: str
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops = Field(default_factory=list)
    seed: int | None = _bounded(-(2**63), 2**63 - 1)
    temperature: float | None = _bounded(0, 100)
    top_p: float | None = _bounded(1e-6, 1)
    top_k: int | None = _bounded(-1, MAX_COUNT)
    min_p: float | None = _bounded(0, 1)
    presence_penalty: float | None = _bounded(-2, 2)
    frequency_penalty: float | None = _bounded(-2, 2)
    repetition_penalty: float | None = _bounded(0.01, 10)
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = _bounded(0, MAX_COUNT)
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


class ChatBody(_GenerationBody, ShapeFields):
    messages: list[MessageBody] = Field(min_length=1)
    max_completion_tokens: int | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    def to_call(self) -> ChatCall:
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        check_choice(self.tool_choice, bool(self.tools))
        return ChatCall(
            tuple(message.to_message() for message in self.messages),
            self.options(asked, UNBOUNDED_TOKENS),
            self.shape(self.messages[-1], has_tools=self.tool_choice != "none"),
            is_one_call=self.parallel_tool_calls is False,
        )


class CompletionBody(_GenerationBody):
    prompt: Prompts
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


def _default(value: T | None, default: T) -> T:
    return default if value is None else value


def _as_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    entries = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10:
            raise RequestError(f"logit_bias keys must be token ids, found {key[:40]!r}", "logit_bias")
        entries.append((int(key), value))
    return tuple(entries)
