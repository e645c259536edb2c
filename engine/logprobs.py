"""Asking for log-probabilities, and what is told of a token, as plain data.

Computing them is left to `sampling/logprobs`, wording them to the process that owns text.
"""

from dataclasses import dataclass

from engine.errors import RequestError

MAX_TOP = 20


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """What a request asks for: of each emitted token its own and those of the `num_top` likeliest there; with
    `scores_prompt` of the prompt's tokens as well. Raises `RequestError` for a bad count.
    """

    num_top: int = 0
    scores_prompt: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.num_top, int) or not 0 <= self.num_top <= MAX_TOP:
            raise RequestError(
                f"logprobs must be an integer, 0 to {MAX_TOP}, found {self.num_top!r}", "logprobs"
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of the target's probabilities at one position, before temperature, penalties, bias
    and masks: `logprob` is that of the token which stands there. `top` holds the likeliest tokens as (id,
    logprob), likeliest first and by id where they tie; as many as the request asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


Logprobs = tuple[TokenLogprob, ...]


@dataclass(slots=True)
class PromptScores:
    """How far a scored prompt has been told: of `num_told` tokens behind its first."""

    num_told: int = 0

    def take(self, logprobs: tuple[TokenLogprob, ...], end: int, num_prompt: int) -> tuple[TokenLogprob, ...]:
        """Return what a chunk up to position `end` says of the prompt and was not told before.

        `logprobs` has an entry for each position, about the token after it. A preempted prompt runs again
        from its start, with what was emitted behind it.
        """
        first = end - len(logprobs) + 1  # the token that the first entry is about
        told = logprobs[self.num_told + 1 - first : num_prompt - first] if logprobs else ()
        self.num_told += len(told)
        return told
