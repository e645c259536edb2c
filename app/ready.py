"""How long a replica took until it could serve, phase by phase.

Taking the times is left to `replica`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadyTimes:
    """Seconds. `model`: finding the model, its tokenizer and template; `load`: reading weights and wiring
    them; `capture`: the rest of the core's start, its process and the capture of steps; `first_token`: one
    token, which warms what is left.
    """

    model: float
    load: float
    capture: float
    first_token: float

    @property
    def total(self) -> float:
        return self.model + self.load + self.capture + self.first_token


NOT_TIMED = ReadyTimes(0.0, 0.0, 0.0, 0.0)
