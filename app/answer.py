"""The text of one choice as its tokens arrive: where it ends, and how many tokens it took.

It joins the detokenizer and the stop strings; which request a choice belongs to is left to `choices`.
"""

from collections.abc import Sequence
from typing import Literal

from app.run_detokenizer import RunDetokenizer
from app.tokenizer import Tokenizer
from engine import FinishReason, SequenceDelta, StepError, StopStrings

AnswerEnd = Literal["stop", "length", "tool_calls"]
FAILURES = (FinishReason.ERROR, FinishReason.ABORT)


class Answer:
    """One choice as it grows by runs of tokens.

    Text, `num_tokens` and `end` are cut at the same place: the token that completes a stop string is the last
    one counted. Stop strings count from the first character after `min_tokens` tokens, as stop tokens do.
    A token of `stop_token_ids` that ends the answer is counted but has no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stops: StopStrings,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = RunDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stops = stops
        self._min_tokens = min_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._num_unscanned = 0  # characters of the first `min_tokens` tokens, which no stop string sees
        self.num_tokens = 0
        self.end: AnswerEnd | None = None

    @property
    def is_over(self) -> bool:
        return self.end is not None

    def offset_of(self, token_idx: int) -> int:
        """Return how many characters of the answer came before a token, those held back included."""
        ends = self._detokenizer.text_lens
        return ends[min(token_idx, len(ends)) - 1] if token_idx and ends else 0

    def append(self, delta: SequenceDelta) -> str:
        """Take what a step brought and return the text that may go out.

        Sets `end` with the last one. Raises `StepError` where the engine gave the sequence up.
        """
        assert self.end is None, f"a step of {delta.request_id} after its answer ended"
        if delta.finish_reason in FAILURES:
            raise StepError(delta.message or f"the engine ended the request: {delta.finish_reason}")
        token_ids = delta.token_ids
        shown = token_ids[:-1] if self._ends_with_stop_token(delta) else token_ids
        num_early = max(0, min(len(shown), self._min_tokens - self.num_tokens))
        early = self._detokenizer.append(shown[:num_early])
        self._num_unscanned += len(early)
        text = early + self._scan(self._detokenizer.append(shown[num_early:]))
        if self.is_over:
            return text
        self.num_tokens += len(token_ids)
        if delta.finish_reason is not None:
            text += self._finish(delta.finish_reason)
        return text

    def _ends_with_stop_token(self, delta: SequenceDelta) -> bool:
        is_stop = delta.finish_reason is FinishReason.STOP and bool(delta.token_ids)
        return is_stop and delta.token_ids[-1] in self._stop_token_ids

    def _scan(self, delta: str) -> str:
        scan = self._stops.feed(delta)
        if scan.end is not None:
            self.end = "stop"
            self.num_tokens = self._detokenizer.num_tokens_for(self._num_unscanned + scan.end)
        return scan.text

    def _finish(self, reason: FinishReason) -> str:
        """Let go of what the detokenizer and the stop strings held back."""
        text = self._scan(self._detokenizer.flush())
        if not self.is_over:
            text += self._stops.flush()
            self.end = "length" if reason is FinishReason.LENGTH else "stop"
        return text
