"""One choice of an answer that is not streamed, and the choice of the likeliest among several.

How it is written as JSON is left to `streaming`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.answer import AnswerEnd
from app.call import CallOptions, ToolCall
from app.generation import ChoiceDelta
from app.logprobs import ScoredToken


@dataclass(slots=True)
class WholeChoice:
    """All that the steps of one choice brought; `num_tokens` leaves out the echo, `tokens` has it."""

    index: int
    text: str = ""
    num_tokens: int = 0
    end: AnswerEnd | None = None
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text
        self.num_tokens = delta.num_tokens
        self.end = delta.end
        self.tokens += delta.tokens
        for call in delta.calls:
            if call.call_id is not None and call.name is not None:
                self.calls.append(ToolCall(call.call_id, call.name, call.arguments))
            else:
                last = self.calls[-1]
                self.calls[-1] = dataclasses.replace(last, arguments=last.arguments + call.arguments)

    @property
    def mean_logprob(self) -> float:
        """Return what OpenAI's best_of ranks by: the mean over the tokens of the answer, not of its echo."""
        own = self.tokens[len(self.tokens) - self.num_tokens :]
        return sum(token.logprob or 0.0 for token in own) / max(1, len(own))


def likeliest(choices: Sequence[WholeChoice], options: CallOptions) -> list[WholeChoice]:
    """Return the choices to answer, numbered anew: of each prompt's the `num_best` of the highest mean
    logprob, best first and in the order drawn where they tie; all of them where nothing is to be chosen.
    """
    if options.num_best is None:
        return list(choices)
    answered: list[WholeChoice] = []
    for first in range(0, len(choices), options.num_choices):
        drawn = choices[first : first + options.num_choices]
        ranked = sorted(drawn, key=lambda choice: -choice.mean_logprob)
        for choice in ranked[: options.num_best]:
            tokens = choice.tokens if options.shows_logprobs else []
            answered.append(dataclasses.replace(choice, index=len(answered), tokens=tokens))
    return answered
