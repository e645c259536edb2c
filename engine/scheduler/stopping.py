"""Where a sequence ends, token by token.

Stop strings are left to the process that owns text.
"""

from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from typing import Self

from engine.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Cut:
    """The emitted tokens that stay, and why the sequence ends after them, if it does."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class StopRule:
    """When one request ends. `max_output` is the least of max_tokens and what the model's length leaves."""

    stop_token_ids: frozenset[int]
    min_output: int
    max_output: int

    @classmethod
    def build(
        cls, sampling: SamplingParams, num_prompt: int, eos_token_ids: frozenset[int], max_model_len: int
    ) -> Self:
        """Return the rule of one request: its own stops and limits beside the model's."""
        eos = frozenset[int]() if sampling.ignore_eos else eos_token_ids
        return cls(
            stop_token_ids=eos.union(sampling.stop_token_ids),
            min_output=sampling.min_tokens,
            max_output=min(sampling.max_tokens, max_model_len - num_prompt),
        )

    def may_end(self, num_output: int, token_ids: TokenIds[int]) -> bool:
        """Tell, at little cost, whether `cut` has something to look for: most steps end nothing."""
        return num_output + len(token_ids) >= self.max_output or not self.stop_token_ids.isdisjoint(token_ids)

    def cut(self, num_output: int, token_ids: TokenIds[int]) -> Cut:
        """Cut one step's tokens, which follow `num_output` earlier ones, after the first that ends it all.

        The stop token itself stays. A stop at exactly the last allowed token is a stop, not a length.
        """
        for num_kept, token_id in enumerate(token_ids, start=1):
            total = num_output + num_kept
            if token_id in self.stop_token_ids and total >= self.min_output:
                return Cut(tuple(token_ids[:num_kept]), FinishReason.STOP)
            if total >= self.max_output:
                return Cut(tuple(token_ids[:num_kept]), FinishReason.LENGTH)
        return Cut(tuple(token_ids), None)
