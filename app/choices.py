"""From a call and its prompts' tokens to the engine's requests, one per choice.

What can be refused before the engine is asked is refused here. Running the requests is left to `generation`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from app.call import CallOptions
from app.errors import ContextLengthError
from engine import EngineFacts, Request, RequestError, SamplingParams

_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: multiples of it are far apart modulo 2^64


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server takes: answers of one call, tokens of a prompt (None: what the context holds), and
    calls in flight (None: as many as the engine queues).
    """

    max_requests: int
    max_prompt_tokens: int | None = None
    max_concurrent_calls: int | None = None


def context_len(facts: EngineFacts) -> int:
    """Return how many tokens prompt and answer may have: what the model and the whole KV pool hold."""
    pool_len = facts.num_blocks * facts.block_size + 1  # the last token of an answer is never cached
    return min(facts.max_model_len, pool_len)


def check_num_requests(num_prompts: int, num_choices: int, parameter: str, limits: Limits) -> None:
    """Raise `RequestError` for a call of more answers than `limits` allow, before its prompts cost time."""
    num_requests = num_prompts * num_choices
    if num_requests > limits.max_requests:
        raise RequestError(
            f"one call may ask for {limits.max_requests} answers (prompts x n), found {num_requests}",
            "n" if num_prompts == 1 else parameter,
        )


def plan_requests(
    call_id: str,
    prompts: Sequence[tuple[int, ...]],
    options: CallOptions,
    facts: EngineFacts,
    parameter: str,
    limits: Limits,
) -> tuple[Request, ...]:
    """Return the requests of a call; choice k of prompt i is number i * num_choices + k.

    `parameter` names the body's field that holds the prompts. Raises `RequestError` for an empty or over-long
    prompt and for a token id outside the vocabulary.
    """
    _check_sampling(options.sampling, facts)
    requests: list[Request] = []
    for token_ids in prompts:
        _check_prompt(token_ids, facts, parameter, limits.max_prompt_tokens)
        max_tokens = _max_tokens(len(token_ids), options, facts)
        for choice in range(options.num_choices):
            sampling = dataclasses.replace(
                options.sampling, max_tokens=max_tokens, seed=_derive_seed(options.sampling.seed, choice)
            )
            request_id = f"{call_id}-{len(requests)}"
            requests.append(Request(request_id, token_ids, sampling, options.priority))
    return tuple(requests)


def _check_prompt(
    token_ids: tuple[int, ...], facts: EngineFacts, parameter: str, max_prompt_tokens: int | None
) -> None:
    if not token_ids:
        raise RequestError("the prompt is empty: send at least one token", parameter)
    if len(token_ids) >= context_len(facts):
        raise ContextLengthError(
            f"{_context_text(facts)} and the prompt alone has {len(token_ids)}: shorten it",
            parameter,
        )
    if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
        raise ContextLengthError(
            f"this server takes prompts of {max_prompt_tokens} tokens at most, found {len(token_ids)}: "
            "shorten it",
            parameter,
        )
    check_token_ids(token_ids, facts, parameter)


def _check_sampling(sampling: SamplingParams, facts: EngineFacts) -> None:
    check_token_ids(sampling.stop_token_ids, facts, "stop_token_ids")
    check_token_ids([token_id for token_id, _ in sampling.logit_bias], facts, "logit_bias")


def check_token_ids(token_ids: Sequence[int], facts: EngineFacts, parameter: str) -> None:
    """Raise `RequestError` for an id outside the vocabulary; `parameter` names the body's field."""
    for token_id in token_ids:
        if not 0 <= token_id < facts.vocab_size:
            raise RequestError(
                f"{parameter} holds token id {token_id}; the model's ids are 0 to {facts.vocab_size - 1}",
                parameter,
            )


def _max_tokens(prompt_len: int, options: CallOptions, facts: EngineFacts) -> int:
    room = context_len(facts) - prompt_len
    if options.max_tokens is not None and options.max_tokens > room:
        raise ContextLengthError(
            f"{_context_text(facts)}: {prompt_len} of the prompt and "
            f"{options.max_tokens} of max_tokens are too many",
            "max_tokens",
        )
    if options.sampling.min_tokens > room:
        raise ContextLengthError(
            f"min_tokens may be at most {room} after this prompt, found {options.sampling.min_tokens}",
            "min_tokens",
        )
    return min(room, options.sampling.max_tokens)


def _context_text(facts: EngineFacts) -> str:
    is_model = context_len(facts) == facts.max_model_len
    return f"{'the model' if is_model else 'the KV cache of this server'} holds {context_len(facts)} tokens"


def _derive_seed(seed: int | None, choice: int) -> int | None:
    """Choice 0 keeps the seed, so that n does not change the first answer; others get their own."""
    if seed is None:
        return None
    derived = (seed + choice * _SEED_STEP) % 2**64
    return derived - 2**64 if derived >= 2**63 else derived
