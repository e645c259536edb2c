"""Measures how much of a draft a model accepts on a set of prompts.

Speed is left to `bench`; reading prompts to `prompt_file`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from app.offline import Completion, StepEngine, run_to_end
from engine import EngineStats, Request, SamplingParams

REPEAT_LEN = 16  # tokens; an answer that repeats this many is a loop, which any draft predicts


@dataclass(frozen=True, slots=True)
class DepthAcceptance:
    """Of `reached` calls whose path got to the node above, `accepted` kept a draft at `depth`.

    A path that ended at a leaf counts as reached: there was no draft to keep, as for one that was refused.
    """

    depth: int
    accepted: int
    reached: int
    rate: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a draft did. `tokens_per_call` counts the token that the target adds itself.

    `tokens_per_call_unrepeated` leaves out the `num_repeating` answers that loop; None where all do.
    """

    num_prompts: int
    num_tokens: int
    num_calls: int
    tokens_per_call: float
    tokens_per_call_unrepeated: float | None
    num_repeating: int
    acceptance_by_depth: tuple[DepthAcceptance, ...]


def evaluate(
    engine: StepEngine, prompts: Sequence[tuple[int, ...]], tree: str, max_tokens: int
) -> Evaluation:
    """Answer every prompt at temperature 0 over `tree`. Raises `RequestError` where a prompt does not fit."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculation=tree)
    before = engine.stats()
    completions = run_to_end(
        engine, [Request(f"prompt-{idx}", prompt, sampling) for idx, prompt in enumerate(prompts)]
    )
    after = engine.stats()
    steady = [c for c in completions if not repeats(c.token_ids)]
    return Evaluation(
        num_prompts=len(prompts),
        num_tokens=sum(len(c.token_ids) for c in completions),
        num_calls=sum(c.num_calls for c in completions),
        tokens_per_call=_tokens_per_call(completions),
        tokens_per_call_unrepeated=_tokens_per_call(steady) if steady else None,
        num_repeating=len(completions) - len(steady),
        acceptance_by_depth=_by_depth(before, after),
    )


def repeats(token_ids: Sequence[int]) -> bool:
    """Say whether some run of 16 tokens occurs twice."""
    seen = set()
    for start in range(len(token_ids) - REPEAT_LEN + 1):
        gram = tuple(token_ids[start : start + REPEAT_LEN])
        if gram in seen:
            return True
        seen.add(gram)
    return False


def _tokens_per_call(completions: Sequence[Completion]) -> float:
    return sum(len(c.token_ids) for c in completions) / max(1, sum(c.num_calls for c in completions))


def _by_depth(before: EngineStats, after: EngineStats) -> tuple[DepthAcceptance, ...]:
    earlier = before.accepted_by_depth
    kept = [
        count - (earlier[idx] if idx < len(earlier) else 0)
        for idx, count in enumerate(after.accepted_by_depth)
    ]
    reached = [after.num_calls - before.num_calls, *kept]
    return tuple(
        DepthAcceptance(idx + 1, accepted, above, accepted / above if above else 0.0)
        for idx, (accepted, above) in enumerate(zip(kept, reached, strict=False))
    )
