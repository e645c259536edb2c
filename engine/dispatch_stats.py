"""What a dispatcher answers about itself. Choosing trees is left to `dispatcher`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArmTotal:
    """What a tree realised in steps in which every row ran it and no prompt ran: accepted tokens, the token
    after them counted, and device time.
    """

    name: str
    num_steps: int
    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The realised rate of the arm."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class DispatchStats:
    """How the tree of coming steps was chosen: the arm, why, and what it is expected to bring beside plain
    decoding, in accepted tokens per second, where that is estimated.

    num_switches counts changes of the arm, num_probes excursions from it, num_alarms breaks of acceptance,
    num_trips steps at which speculation was blocked since it brought less than plain decoding. `state` is
    what `eyas trees explain` reads, as JSON. `totals` tells what each arm realised.
    """

    arm: str = "off"
    reason: str = ""
    tokens_per_second: float | None = None
    plain_tokens_per_second: float | None = None
    num_switches: int = 0
    num_probes: int = 0
    num_alarms: int = 0
    num_trips: int = 0
    state: str | None = None
    totals: tuple[ArmTotal, ...] = ()


NOT_CHOSEN = DispatchStats()  # before the first step
