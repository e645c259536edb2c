"""Rare excursions from the held arm, paid from a budget: what is never run is never learnt.

What is learnt from them is left to `acceptance` and `correction`.
"""

import math
from dataclasses import dataclass

from engine.dispatcher.control import ArmEstimate, Situation
from engine.dispatcher.correction import TABLE_ERROR
from engine.dispatcher.latency import PLAIN

BUDGET = 0.005  # of the time, the most that probes may lose
_FIRST_BUDGET = 6.0  # plain steps that may be lost at the start
_MOST_SAVED = 12.0  # plain steps that may be saved up
_GAP = 48  # steps between two probes
_MAX_PATIENCE = 16  # gaps between probes that taught nothing new
_OPTIMISM = 2.0  # standard errors
_COST_STEPS = 4  # the first of them may catch up, and is not a measurement
_NUM_OUTCOMES = 8  # roots that a probe of acceptance looks at
_LEAST_LOSS = 0.05  # of a step, however good a probe looks


@dataclass(frozen=True, slots=True)
class Probe:
    """Run `name` for `num_steps` steps instead of the held arm, at an expected `loss` of seconds in all."""

    name: str
    num_steps: int
    loss: float


class Prober:
    """Decides when to look away. Three things can be worth it: plain decoding while speculating, since it is
    the measure; a tree that may turn out better than the held arm; and, while decoding plainly, the cheapest
    tree, to see whether acceptance came back.
    """

    def __init__(self) -> None:
        self.num_probes = 0
        self.credit = -1.0  # seconds; below zero before the first plan
        self._next_step = _GAP
        self._patience = 1

    def earn(self, seconds: float) -> None:
        """Add the share of a step's time that probes may lose."""
        if self.credit >= 0.0:
            self.credit += BUDGET * seconds

    def hurry(self) -> None:
        """Forget that probes taught nothing: things changed."""
        self._patience = 1

    def plan(self, now: Situation, held: str, step: int) -> Probe | None:
        """Return the probe to begin at `step`, if one is due, of use and paid for."""
        most = _MOST_SAVED * now.plain.seconds
        self.credit = min(self.credit, most) if self.credit >= 0.0 else _FIRST_BUDGET * now.plain.seconds
        arm = now.arm(held)
        if step < self._next_step or arm is None or now.num_blocked:
            return None
        probe, is_repeated = _wanted(now, arm)
        if probe is None or self.credit < probe.loss:
            return None
        self.credit -= probe.loss
        self.num_probes += 1
        self._next_step = step + probe.num_steps + _GAP * (self._patience if is_repeated else 1)
        if is_repeated:
            self._patience = min(2 * self._patience, _MAX_PATIENCE)
        return probe


def _wanted(now: Situation, held: ArmEstimate) -> tuple[Probe | None, bool]:
    """Return the most useful probe, and whether it may be asked for again and again."""
    if held is not now.plain and not now.plain.is_measured:
        return _probe(now.plain, held, _COST_STEPS - 1), False
    trees = [arm for arm in now.arms[1:] if arm is not held and arm.seconds <= now.max_seconds]
    trees = [arm for arm in trees if not math.isinf(arm.seconds)]
    hopeful = [arm for arm in trees if _upper_rate(arm) > held.rate]
    num_steps = max(2, -(-_NUM_OUTCOMES // held.batch))
    if hopeful:
        arm = max(hopeful, key=_upper_rate)
        return _probe(arm, held, num_steps if arm.is_measured else _COST_STEPS), arm.is_measured
    if held is now.plain and trees:
        return _probe(min(trees, key=lambda arm: arm.seconds), held, num_steps), True
    return None, False


def _upper_rate(arm: ArmEstimate) -> float:
    """What the rate may turn out to be."""
    seconds = arm.seconds if arm.is_measured else arm.seconds * (1.0 - TABLE_ERROR)
    return arm.batch * (arm.tokens + _OPTIMISM * arm.error) / seconds


def _probe(arm: ArmEstimate, held: ArmEstimate, num_steps: int) -> Probe:
    """Price a probe. From plain decoding, no draft is expected to be right."""
    tokens = 1.0 if held.name == PLAIN else arm.tokens
    loss = arm.seconds - held.seconds * tokens / held.tokens
    return Probe(arm.name, num_steps, num_steps * max(loss, _LEAST_LOSS * held.seconds))
