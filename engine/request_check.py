"""What the served model itself refuses of a request: ids that it lacks, more stop tokens than a row holds.

Whether there is room for it, and when it runs, is left to `scheduler`.
"""

from collections.abc import Sequence

from engine.errors import RequestError
from engine.request import MAX_STOP_TOKENS, Request, SamplingParams
from engine.stats import EngineFacts


def check_request(request: Request, facts: EngineFacts) -> None:
    """Raise `RequestError` for a request that would end the step of every other one on the device."""
    sampling = request.sampling
    _check_token_ids(request.prompt_token_ids, "prompt", facts.vocab_size)
    _check_token_ids(sampling.stop_token_ids, "stop_token_ids", facts.vocab_size)
    _check_token_ids([token_id for token_id, _ in sampling.logit_bias], "logit_bias", facts.vocab_size)
    _check_stops(sampling, facts.eos_token_ids)


def _check_token_ids(token_ids: Sequence[int], parameter: str, vocab_size: int) -> None:
    if not set(map(type, token_ids)) <= {int}:
        raise RequestError(f"{parameter} token ids must be integers", parameter)
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{parameter} token ids must lie in 0..{vocab_size - 1}, found {token_id}", parameter
            )


def _check_stops(sampling: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Refuse more stop tokens to hold back than a row of the device holds: the model's count as well."""
    eos = () if sampling.ignore_eos else eos_token_ids
    num_stops = len({*sampling.stop_token_ids, *eos})
    if sampling.min_tokens and num_stops > MAX_STOP_TOKENS:
        raise RequestError(
            f"min_tokens takes at most {MAX_STOP_TOKENS} stop tokens, found {num_stops} with the model's"
            f" own {len(eos)}: leave out min_tokens or some of stop_token_ids",
            "stop_token_ids",
        )
