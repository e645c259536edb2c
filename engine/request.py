"""A request as asked (frozen) and a sequence as it grows (one owner: the engine).

Text is not known here: stop strings and detokenizing belong to the process that owns text.
"""

import enum
from dataclasses import dataclass, field

from engine.errors import RequestError

MAX_LOGIT_BIASES = 300
MAX_STOP_TOKENS = 64
MAX_COUNT = 2**31 - 1  # counts of tokens that fit in the device's integers


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Valid once built; a bad value raises `RequestError` naming the field.

    `top_k` 0 means off. `seed` None lets the engine choose one. `speculation` is "auto", "off" or a tree
    name.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculation: str = "auto"

    def __post_init__(self) -> None:
        for name in ("top_k", "max_tokens", "min_tokens"):
            _require_integer(name, getattr(self, name))
        _require("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "between 0 and 100")
        _require("top_k", self.top_k, 0 <= self.top_k <= MAX_COUNT, f"0 (off) to {MAX_COUNT}")
        _require("top_p", self.top_p, 1e-6 <= self.top_p <= 1.0, "in (0, 1], at least 1e-6")
        _require("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        _require(
            "repetition_penalty",
            self.repetition_penalty,
            0.01 <= self.repetition_penalty <= 10.0,
            "in [0.01, 10]",
        )
        _require("presence_penalty", self.presence_penalty, abs(self.presence_penalty) <= 2.0, "in [-2, 2]")
        _require(
            "frequency_penalty", self.frequency_penalty, abs(self.frequency_penalty) <= 2.0, "in [-2, 2]"
        )
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        most = min(self.max_tokens, MAX_COUNT)
        _require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= most, f"0 to {most}")
        if self.seed is not None:
            _require_integer("seed", self.seed)
            _require("seed", self.seed, -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        num_biases, num_stops = len(self.logit_bias), len(self.stop_token_ids)
        _require(
            "logit_bias", num_biases, num_biases <= MAX_LOGIT_BIASES, f"at most {MAX_LOGIT_BIASES} entries"
        )
        # The last places are for the model's own end-of-text tokens.
        _require(
            "stop_token_ids",
            num_stops,
            num_stops <= MAX_STOP_TOKENS - 8,
            f"at most {MAX_STOP_TOKENS - 8} ids",
        )
        for token_id, bias in self.logit_bias:
            _require("logit_bias", token_id, token_id >= 0, "token ids of 0 or more")
            _require("logit_bias", bias, abs(bias) <= 100.0, "biases in [-100, 100]")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_penalized(self) -> bool:
        """True where the history of the sequence changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_truncated(self) -> bool:
        """True where top-k, top-p or min-p removes tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def _require(name: str, value: float, is_valid: bool, expected: str) -> None:
    # NaN fails every comparison, so a NaN arrives here with is_valid False.
    if not is_valid:
        raise RequestError(f"{name} must be {expected}, found {value}", name)


def _require_integer(name: str, value: object) -> None:
    if not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, found {value!r}", name)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked: prompt ids and how to continue them. Lower `priority` runs first; ties run in arrival
    order.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0

    def __post_init__(self) -> None:
        _require_integer("priority", self.priority)
        if not self.prompt_token_ids:
            raise RequestError("the prompt is empty: send at least one token", "prompt")


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in flight.

    `tokens` holds the prompt and every emitted token. `num_cached` counts the tokens whose target K/V is
    known to be written; while decoding `num_cached == len(tokens) - 1`, since the last token is the next
    root. The device may be one step ahead of both. `slot` is the row of device state it owns while RUNNING,
    else -1.
    """

    request: Request
    seed: int
    arrival_idx: int
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    slot: int = -1
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    block_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_prefix_hits: int = 0
    num_calls: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    started: float = 0.0
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)
        if not self.tokens:
            self.tokens = list(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def sort_key(self) -> tuple[int, int]:
        """Orders the waiting queue and, reversed, the victims of preemption."""
        return (self.request.priority, self.arrival_idx)
