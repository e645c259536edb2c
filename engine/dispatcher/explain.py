"""Why an arm is chosen, in words: the rules of `control` applied to a printed state, one after the other.

It decides nothing; `docs/dispatcher.md` explains the terms.
"""

import math
from collections.abc import Iterator, Sequence

from engine.dispatcher.control import (
    GAIN,
    MARGIN,
    MAX_SWITCHES,
    PATIENCE,
    ArmEstimate,
    Choice,
    Reason,
    Situation,
    choose_arm,
    is_able,
    leave_slack,
    may_run,
    settle,
)
from engine.dispatcher.state import DispatchState

_INPUTS = ("leader before", "in a row", "changes", "timing", "broken", "blocked", "cap ms")
_ESTIMATES = (
    "arm",
    "rows",
    "tokens",
    "settled",
    "error",
    "ms",
    "least",
    "tokens/s",
    "sure of",
    "up to",
    "timed",
)


def explain(state: DispatchState) -> str:
    """Return the derivation of the choice that follows from `state`: what it rests on, then what each rule
    of the document makes of it, by the rule's number there.
    """
    asked = state.situation
    now = settle(asked) if asked.num_switches else asked
    choice = choose_arm(asked)
    load = "a new load" if asked.is_new_load else "the same load as before"
    lines = [f"step {state.step}: held arm {asked.held}, {load}", ""]
    lines += [*_aligned([_INPUTS, _inputs(now)]), ""]
    lines += [*_aligned([_ESTIMATES, *(_cells(arm) for arm in now.arms)]), ""]
    if now is not asked:
        lines.append("The arm was changed at this load, so what is known of single requests is left aside.")
    lines += [f"{number}. {line}" for number, line in _rules(now, choice)]
    lines += ["", f"Choice: {choice.name} ({choice.reason})."]
    if state.probe is not None:
        lines.append(
            f"A probe runs {state.probe.name} for {state.probe.num_steps} steps, at an expected loss of"
            f" {1e3 * state.probe.loss:.2f} ms."
        )
    return "\n".join([*lines, ""])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _inputs(now: Situation) -> tuple[str, ...]:
    return (
        now.leader,
        str(now.num_leading),
        str(now.num_switches),
        "over" if now.is_settled else "on",
        "yes" if now.is_broken else "no",
        str(now.num_blocked),
        "-" if math.isinf(now.max_seconds) else _ms(now.max_seconds),
    )


def _cells(arm: ArmEstimate) -> tuple[str, ...]:
    tokens = (f"{arm.tokens:.3f}", f"{arm.settled:.3f}", f"{arm.error:.3f}")
    if math.isinf(arm.seconds):
        return (arm.name, str(arm.batch), *tokens, *("-" * 6))
    times = (_ms(arm.seconds), _ms(arm.least_seconds))
    rates = (_rate(arm.rate), _rate(arm.rate - arm.doubt), _rate(arm.upper_rate))
    return (arm.name, str(arm.batch), *tokens, *times, *rates, "yes" if arm.is_measured else "no")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _rate(rate: float) -> str:
    """Return tokens per second, in as many digits as the rules' percents need."""
    return f"{rate:.{1 if rate >= 1000.0 else 2 if rate >= 100.0 else 3}f}"


def _rules(now: Situation, choice: Choice) -> list[tuple[int, str]]:
    if now.num_blocked:
        return [(1, f"The watchdog blocks speculation for {now.num_blocked} more steps: it did not pay.")]
    plain, leader = now.plain, now.arm(choice.leader)
    assert leader is not None, choice
    brought, needed = _rate(plain.rate), _rate((1.0 + MARGIN) * plain.rate)
    lines = [
        (2, f"Plain decoding brings {brought} tokens/s; a tree must be sure of {needed} to run."),
        *((2, _verdict(arm, now)) for arm in now.arms[1:]),
        (3, f"{leader.name} leads with {_rate(leader.rate)} tokens/s."),
    ]
    if not now.is_new_load and choice.reason is not Reason.LOSING:
        lines += _comparison(now, leader)
    return [*lines, _last_rule(now, choice)]


def _comparison(now: Situation, leader: ArmEstimate) -> Iterator[tuple[int, str]]:
    """Yield what the leader promises over the held arm, which counts as plain decoding where it cannot
    run.
    """
    held = now.arm(now.held) or now.plain
    if not is_able(held, now) and held is not now.plain:
        yield 2, f"The held {held.name} can no longer run: off counts as held."
        held = now.plain
    if held is not leader:
        gain = f"{leader.rate / held.rate - 1.0:+.2%}"
        yield 6, f"{leader.name} over the held {held.name}: {gain}, where {GAIN:.0%} is needed."


def _verdict(arm: ArmEstimate, now: Situation) -> str:
    if math.isinf(arm.seconds):
        return f"{arm.name} cannot run or pay at this batch."
    if arm.seconds > now.max_seconds:
        return f"{arm.name} is over the cap: {_ms(arm.seconds)} > {_ms(now.max_seconds)} ms a step."
    lower, upper = _rate(arm.rate - arm.doubt), _rate(arm.rate + leave_slack(arm, now))
    is_held = arm.name == now.held and not now.is_new_load
    if may_run(arm, now):
        bound = f"not sure to lose: {upper} >= {_rate(now.plain.rate)}" if is_held else f"sure of {lower}"
        return f"{arm.name} may run: it is {bound}."
    if is_held:
        return f"{arm.name} may not run on: it is sure to stay under {upper} < {_rate(now.plain.rate)}."
    return f"{arm.name} may not run: it is sure of {lower} only."


def _last_rule(now: Situation, choice: Choice) -> tuple[int, str]:
    match choice.reason:
        case Reason.NEW_LOAD:
            return 4, "At a new load the leader is taken at once."
        case Reason.LOSING:
            return 5, "The held tree is sure to lose to plain decoding, so it is left at once."
        case Reason.BEST:
            return 6, "The held arm stays: nothing is better by enough."
        case Reason.TIMING:
            return 7, "Another tree may turn out better still and is timed first."
        case Reason.TOO_MANY:
            return 8, f"The arm stays: after {MAX_SWITCHES} changes the leader must be sure of the gain."
        case Reason.CHEAPER:
            return 9, "A cheaper leader is taken at once."
        case Reason.WAITING:
            number = now.num_leading + 1 if now.leader == choice.leader else 1
            return 10, f"A dearer leader must lead {PATIENCE} decisions in a row: this is number {number}."
        case Reason.GAIN:
            return 10, f"A dearer leader is taken after {PATIENCE} decisions in a row: this is the last."
        case _:
            return 3, f"Plain decoding it is: {choice.reason}."
