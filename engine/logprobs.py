"""How likely the target held a token of a text, as plain data.

Computing it is left to `sampling/logprobs`, wording it to the process that owns text.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of the target's probabilities at one position, before temperature, penalties, bias
    and masks: `logprob` is that of the token which stands there. `top` holds the likeliest tokens as (id,
    logprob), likeliest first and by id where they tie; as many as the request asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
