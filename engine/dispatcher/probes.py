"""Rare excursions from the held arm, paid from a budget: what is never run is never learnt.

What is learnt from them is left to `acceptance` and `correction`.
"""

import enum
import math
from dataclasses import dataclass

from engine.dispatcher.control import DEVIATIONS, ArmEstimate, Situation

BUDGET = 0.005  # of the time, the most that probes may lose
_FIRST_BUDGET = 8.0  # plain steps that may be lost at the start
_MOST_SAVED = 3.0  # plain steps that may be saved up
_GAP = 96  # steps between two probes
_PLAIN_GAP = 16  # the same while decoding plainly, when nothing else teaches
_SHORT_GAP = 8  # the same, while trees are timed for the first time at a load
_MAX_PATIENCE = 16  # gaps between probes that taught nothing new
_COST_STEPS = 4  # the first of them may catch up, and is not a measurement
_NUM_OUTCOMES = 4  # roots that a probe of acceptance looks at
_LEAST_LOSS = 0.02  # of a step, however good a probe looks


@dataclass(frozen=True, slots=True)
class Probe:
    """Run `name` for `num_steps` steps instead of the held arm, at an expected `loss` of seconds in all."""

    name: str
    num_steps: int
    loss: float


class Aim(enum.Enum):
    """What a probe is to find out."""

    PLAIN = enum.auto()
    TIME = enum.auto()
    TOKENS = enum.auto()
    RECOVERY = enum.auto()


class Prober:
    """Decides when to look away. Three things can be worth it: plain decoding while speculating, since it is
    the measure; a tree that may turn out better than the held arm; and, while decoding plainly, the cheapest
    tree, to see whether acceptance came back.
    """

    def __init__(self) -> None:
        self.num_probes = 0
        self._credit: float | None = None  # seconds; none before the first plan
        self._most_saved = 0.0
        self._next_step = _SHORT_GAP
        self._patience = 1

    def earn(self, seconds: float) -> None:
        """Add the share of a step's time that probes may lose; what is beyond the most that may be saved, as
        at the start, is lost as fast.
        """
        if self._credit is not None:
            self._credit += BUDGET * seconds * (1.0 if self._credit < self._most_saved else -1.0)

    def hurry(self) -> None:
        """Forget that probes taught nothing: things changed."""
        self._patience = 1

    def plan(self, now: Situation, held: str, step: int, catch_up: float) -> Probe | None:
        """Return the probe to begin at `step`, if one is due, of use and paid for. `catch_up` is the seconds
        that a tree's first step takes more after plain decoding.
        """
        self._most_saved = _MOST_SAVED * now.plain.seconds
        credit = _FIRST_BUDGET * now.plain.seconds if self._credit is None else self._credit
        self._credit = credit
        arm = now.arm(held)
        if step < self._next_step or arm is None or now.num_blocked:
            return None
        wanted = _wanted(now, arm, catch_up if arm is now.plain else 0.0)
        if wanted is None:
            return None
        probe, aim = wanted
        # Timing a tree that may be the best is done once for each load, so it needs no budget.
        if aim is not Aim.TIME and credit < probe.loss:
            return None
        self._credit = max(0.0, credit - probe.loss)
        self.num_probes += 1
        gap = _PLAIN_GAP if arm is now.plain else _GAP
        gap = _SHORT_GAP if aim is Aim.TIME else gap
        if aim is Aim.RECOVERY:
            gap *= 2 * self._patience
            self._patience = min(2 * self._patience, _MAX_PATIENCE)
        self._next_step = step + probe.num_steps + gap
        return probe


def _wanted(now: Situation, held: ArmEstimate, extra: float) -> tuple[Probe, Aim] | None:
    """Return the most useful probe; one of a tree takes `extra` seconds besides its steps."""
    trees = [arm for arm in now.arms[1:] if arm is not held and arm.seconds <= now.max_seconds]
    trees = [arm for arm in trees if not math.isinf(arm.seconds)]
    hopeful = [arm for arm in trees if arm.upper_rate > held.rate]
    untimed = [arm for arm in hopeful if not arm.is_measured]
    num_steps = max(2, -(-_NUM_OUTCOMES // held.batch))
    if held is not now.plain and not now.plain.is_measured:
        return _probe(now.plain, held, _COST_STEPS - 1, 0.0), Aim.PLAIN
    if untimed:
        return _probe(max(untimed, key=lambda arm: arm.upper_rate), held, _COST_STEPS, extra), Aim.TIME
    if hopeful:
        return _probe(max(hopeful, key=lambda arm: arm.upper_rate), held, num_steps, extra), Aim.TOKENS
    if held is now.plain and trees:
        return _probe(
            min(trees, key=lambda arm: arm.seconds), held, max(2, num_steps // 2), extra
        ), Aim.RECOVERY
    return None


def _probe(arm: ArmEstimate, held: ArmEstimate, num_steps: int, extra: float) -> Probe:
    """Price a probe by what its steps are sure to bring, so that what is not known is paid for."""
    tokens = max(1.0, arm.tokens - DEVIATIONS * arm.error)
    loss = arm.seconds - held.seconds * tokens / held.tokens
    return Probe(arm.name, num_steps, num_steps * max(loss, _LEAST_LOSS * held.seconds) + extra)
