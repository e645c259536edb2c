"""A client's call as plain data, after the HTTP body was checked and before the engine is asked.

Parsing bodies is left to `protocol`, tokens and choices to `choices`.
"""

from dataclasses import dataclass, field

from engine import SamplingParams

Prompt = str | tuple[int, ...]  # text, or token ids


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by the model; `arguments` is JSON text, which need not be valid."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema as the client wrote it."""

    name: str
    description: str
    parameters: dict[str, object]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; `content` is text only. `tool_call_id` names the call that a tool answers."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class PromptShape:
    """How a chat is written as a prompt, besides its messages.

    With `adds_generation_prompt` the prompt ends where an answer begins; with `continues_final` it ends
    inside the last message, which the answer goes on with. `arguments` are more names for the template.
    """

    tools: tuple[Tool, ...] = ()
    adds_generation_prompt: bool = True
    continues_final: bool = False
    arguments: dict[str, object] = field(default_factory=dict)


PLAIN_SHAPE = PromptShape()


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What chat and completions have in common.

    `max_tokens` None means as many as `sampling.max_tokens` and the context allow, 0 the echo alone.
    `num_choices` sequences are drawn per prompt; where `num_best` is set, only so many of them are answered,
    the likeliest. `shows_logprobs` puts log-probabilities in the answer. Lower `priority` runs first.
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
    num_best: int | None = None
    shows_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class ChatCall:
    """`is_one_call` lets an answer make one call of a tool at most; with `is_call_forced` the whole answer is
    one, as JSON.
    """

    messages: tuple[Message, ...]
    options: CallOptions
    shape: PromptShape = PLAIN_SHAPE
    is_one_call: bool = False
    is_call_forced: bool = False


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
    wants_texts: bool
    shape: PromptShape = PLAIN_SHAPE


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
