"""The echo of a prompt in the steps of a completion: its text, and its tokens where they are scored.

Answering the prompt is left to `generation`.
"""

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from app.generation import ChoiceDelta
from app.logprobs import ScoredToken, scored_prompt
from app.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """What one choice begins with."""

    text: str
    token_ids: tuple[int, ...]


async def with_echo(
    steps: AsyncGenerator[list[ChoiceDelta], None], echoes: Sequence[Echo], tokenizer: Tokenizer | None
) -> AsyncGenerator[list[ChoiceDelta], None]:
    """Yield `steps` with the prompt in front of each choice; `echoes` has one per choice. With a `tokenizer`
    the prompts were scored, and their tokens are spelled by it.
    """
    begun: set[int] = set()
    async with aclosing(steps):
        async for deltas in steps:
            echoed = []
            for delta in deltas:
                echo = echoes[delta.index]
                text, tokens = delta.text, tuple(token.moved(len(echo.text)) for token in delta.tokens)
                if delta.index not in begun:
                    text = echo.text + text
                    tokens = (*_prompt_tokens(echo, delta, tokenizer), *tokens)
                begun.add(delta.index)
                echoed.append(dataclasses.replace(delta, text=text, tokens=tokens))
            yield echoed


def _prompt_tokens(echo: Echo, delta: ChoiceDelta, tokenizer: Tokenizer | None) -> tuple[ScoredToken, ...]:
    if tokenizer is None:
        return ()
    return scored_prompt(tokenizer, echo.text, echo.token_ids, delta.prompt_logprobs)


async def unanswered(num_choices: int) -> AsyncGenerator[list[ChoiceDelta], None]:
    """Yield the steps of answers of no token: a prompt that is echoed and not continued."""
    yield [ChoiceDelta(index, "", 0, 0, "length") for index in range(num_choices)]


async def without_answer(
    steps: AsyncGenerator[list[ChoiceDelta], None],
) -> AsyncGenerator[list[ChoiceDelta], None]:
    """Yield `steps`, of one token per choice, as if there were none: only the prompt was to be scored."""
    async with aclosing(steps):
        async for deltas in steps:
            yield [
                dataclasses.replace(delta, text="", num_tokens=0, end="length", tokens=()) for delta in deltas
            ]
