"""A client's call as plain data, after the HTTP body was checked and before the engine is asked.

Parsing bodies is left to `protocol`, tokens and choices to `choices`.
"""

from dataclasses import dataclass

from engine import SamplingParams

Prompt = str | tuple[int, ...]  # text, or token ids


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; `content` is text only."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What chat and completions have in common.

    `max_tokens` None means as many as `sampling.max_tokens` and the context allow, 0 the echo alone.
    `num_choices` sequences are drawn per prompt. Lower `priority` runs first.
    """

    model: str
    sampling: SamplingParams
    max_tokens: int | None
    num_choices: int
    stops: tuple[str, ...]
    includes_stop: bool
    skips_special_tokens: bool
    is_stream: bool
    includes_usage: bool
    has_continuous_usage: bool
    is_echoed: bool = False
    wants_speculation_stats: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ChatCall:
    messages: tuple[Message, ...]
    options: CallOptions


@dataclass(frozen=True, slots=True)
class CompletionCall:
    prompts: tuple[Prompt, ...]
    options: CallOptions


Call = ChatCall | CompletionCall


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """`source` is a text, or a chat. `model` None means the served one."""

    model: str | None
    source: str | tuple[Message, ...]
    adds_special_tokens: bool
    adds_generation_prompt: bool
    wants_texts: bool


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    model: str | None
    token_ids: tuple[int, ...]


TokenCall = TokenizeCall | DetokenizeCall


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP answer: a JSON body, its status, and extra headers."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
