"""The choice of a tree from a printed situation: pure rules over a handful of numbers.

Where the numbers come from is left to `acceptance` and `latency`, remembering to `adaptive`.
"""

import enum
import math
from dataclasses import dataclass, replace

from engine.dispatcher.latency import PLAIN

MARGIN = 0.005  # a tree must be sure to beat measured plain decoding by this much
DEVIATIONS = 1.0  # standard errors that a tree's tokens may be off: beyond them a comparison is sure
LEAVING = 2.0  # the same for a tree that is held: it is left when sure to lose, since evidence ends with it
OPTIMISM = 2.5  # standard errors added to a tree's tokens for what it may turn out to bring
GAIN = 0.01  # a change at the same load must promise this much
MAX_SWITCHES = 3  # recent ones after which the arm is held at the same load, unless it is sure to be worse
PATIENCE = 3  # decisions in a row that must agree before a more expensive tree is taken


class Reason(enum.StrEnum):
    """Why an arm was chosen."""

    BEST = "best"
    NEW_LOAD = "new load"
    GAIN = "sustained gain"
    CHEAPER = "cheaper tree is better"
    WAITING = "a better tree must stay so"
    TIMING = "a better tree, but others are being timed"
    TOO_MANY = "a better tree, but too many switches lately"
    NOT_SURE = "no tree is sure to beat plain decoding"
    LOSING = "loses to plain decoding"
    WATCHDOG = "realised less than plain decoding"
    TOO_SLOW = "every better tree is over the cap on the step time"
    ONLY_PLAIN = "no tree can run"
    FIXED = "set by the operator"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class ArmEstimate:
    """What one arm promises now. `batch` is how many rows would run with it, `tokens` what each would emit
    per step; `settled` leaves aside what is known of single requests; `error` is the standard error of both.
    `seconds` is the step's time, `least_seconds` what it may turn out to be. `is_measured` says that live
    steps confirm it.
    """

    name: str
    batch: int
    tokens: float
    settled: float
    error: float
    seconds: float
    least_seconds: float
    is_measured: bool

    @property
    def rate(self) -> float:
        """Expected accepted tokens per second."""
        return self.batch * self.tokens / self.seconds

    @property
    def settled_rate(self) -> float:
        return self.batch * self.settled / self.seconds

    @property
    def doubt(self) -> float:
        """How far the rate may be off."""
        return DEVIATIONS * self.batch * self.error / self.seconds

    @property
    def upper_rate(self) -> float:
        """What the rate may turn out to be."""
        return self.batch * (self.settled + OPTIMISM * self.error) / self.least_seconds


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a decision depends on.

    `arms` lists plain decoding first. `held` is the arm in use. `is_new_load` says that the batch moved to
    another bucket since the last decision. `leader` was the best arm in the last `num_leading` decisions.
    `num_switches` counts changes at the same load and acceptance in the last 1,000 steps. `is_settled` says
    that trees had time to be timed at this load. `num_blocked` is for how many more steps the watchdog
    forbids speculation. `is_broken` says that acceptance broke since the last decision. `max_seconds` caps
    the step.
    """

    arms: tuple[ArmEstimate, ...]
    held: str
    is_new_load: bool
    leader: str
    num_leading: int
    num_switches: int
    num_blocked: int
    is_settled: bool = True
    is_broken: bool = False
    max_seconds: float = math.inf

    @property
    def plain(self) -> ArmEstimate:
        return self.arms[0]

    def arm(self, name: str) -> ArmEstimate | None:
        return next((arm for arm in self.arms if arm.name == name), None)


@dataclass(frozen=True, slots=True)
class Choice:
    """The arm for the coming steps, why, and the best arm that may be chosen, held back or not."""

    name: str
    reason: Reason
    leader: str


def choose_arm(situation: Situation) -> Choice:
    """Return the arm for the coming steps.

    A tree may be taken where it is sure to beat plain decoding, and held until it is sure not to. The best of
    the trees that may run leads by its expected rate, else plain decoding does. At a new load the leader is
    taken at once; at the same load a cheaper leader is taken at once, a more expensive one after `PATIENCE`
    decisions, either only for a gain, after too many switches only for one that is sure. A held tree that is
    sure to lose to plain decoding is always left. Once the arm was changed at this load, what is known of
    single requests no longer counts: they come and go.
    """
    now = settle(situation) if situation.num_switches else situation
    plain = now.plain
    if now.num_blocked:
        return Choice(PLAIN, Reason.WATCHDOG, PLAIN)
    able = [arm for arm in now.arms[1:] if is_able(arm, now)]
    held = next((arm for arm in able if arm.name == now.held), plain)
    sure = [arm for arm in able if may_run(arm, now)]
    leader = max(sure, key=lambda arm: (arm.rate, -arm.seconds), default=plain)
    if now.is_new_load:
        return Choice(leader.name, Reason.NEW_LOAD if leader is not plain else _why_plain(now), leader.name)
    if held is not plain and held not in sure and is_losing(held, now):
        return Choice(leader.name, Reason.LOSING, leader.name)
    return _switch_or_hold(now, held, leader)


def settle(now: Situation) -> Situation:
    """Return the situation without what is known of single requests."""
    return replace(now, arms=tuple(replace(arm, tokens=arm.settled) for arm in now.arms))


def is_able(arm: ArmEstimate, now: Situation) -> bool:
    """Return whether a step with this arm is possible here, and not over the cap."""
    return arm.seconds <= now.max_seconds and not math.isinf(arm.seconds)


def may_run(arm: ArmEstimate, now: Situation) -> bool:
    """Return whether a tree is sure to beat plain decoding; the held one, at the same load, whether it is not
    sure to lose.
    """
    if arm.name == now.held and not now.is_new_load:
        return arm.rate + leave_slack(arm, now) >= now.plain.rate
    return arm.rate - arm.doubt >= (1.0 + MARGIN) * now.plain.rate


def is_losing(arm: ArmEstimate, now: Situation) -> bool:
    """Return whether a tree is sure to lose to plain decoding, single requests left aside."""
    return arm.settled_rate + leave_slack(arm, now) < now.plain.rate


def leave_slack(arm: ArmEstimate, now: Situation) -> float:
    """Return by how much the rate of a held tree may be underestimated; none is granted where acceptance
    broke.
    """
    return 0.0 if now.is_broken else LEAVING / DEVIATIONS * arm.doubt


def _switch_or_hold(now: Situation, held: ArmEstimate, leader: ArmEstimate) -> Choice:
    if leader is held or leader.rate < (1.0 + GAIN) * held.rate:
        reason = _why_plain(now) if held is leader is now.plain else Reason.BEST
        return Choice(held.name, reason, leader.name)
    if not now.is_settled and _is_timing(now, held, leader):
        return Choice(held.name, Reason.TIMING, leader.name)
    if now.num_switches >= MAX_SWITCHES and leader.rate - leader.doubt < (1.0 + GAIN) * held.rate:
        return Choice(held.name, Reason.TOO_MANY, leader.name)
    if leader.seconds < held.seconds:
        return Choice(leader.name, Reason.CHEAPER, leader.name)
    num_leading = now.num_leading if now.leader == leader.name else 0
    if num_leading + 1 < PATIENCE:
        return Choice(held.name, Reason.WAITING, leader.name)
    return Choice(leader.name, Reason.GAIN, leader.name)


def _is_timing(now: Situation, held: ArmEstimate, leader: ArmEstimate) -> bool:
    """True where a tree that was not timed yet may turn out better than the leader: changes are few, so they
    wait for it.
    """
    others = (arm for arm in now.arms[1:] if arm is not held and arm.seconds <= now.max_seconds)
    return any(not arm.is_measured and arm.upper_rate > leader.rate for arm in others)


def _why_plain(now: Situation) -> Reason:
    """Return why plain decoding is the best that may run."""
    able = [arm for arm in now.arms[1:] if not math.isinf(arm.seconds)]
    if not able:
        return Reason.ONLY_PLAIN
    if any(arm.rate - arm.doubt >= (1.0 + MARGIN) * now.plain.rate for arm in able):
        return Reason.TOO_SLOW
    return Reason.NOT_SURE
