"""Why an arm is chosen, in words: the rules of `control` applied to a printed state, one after the other.

It decides nothing; `docs/dispatcher.md` explains the terms.
"""

import math

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
    leave_slack,
    may_run,
    settle,
)
from engine.dispatcher.state import DispatchState

_HEADER = ("arm", "rows", "tokens", "error", "ms", "tokens/s", "sure of", "up to", "timed")


def explain(state: DispatchState) -> str:
    """Return the derivation of the choice that follows from `state`."""
    asked = state.situation
    now = settle(asked) if asked.num_switches else asked
    choice = choose_arm(asked)
    load = "a new load" if asked.is_new_load else "the same load as before"
    lines = [f"step {state.step}: held arm {asked.held}, {load}", "", *_table(now), ""]
    if now is not asked:
        lines.append(
            f"Changes of the arm at this load lately: {asked.num_switches}. Single requests are left aside."
        )
    lines += [f"{idx}. {line}" for idx, line in enumerate(_rules(now, choice), start=1)]
    lines += ["", f"Choice: {choice.name} ({choice.reason})."]
    if state.probe is not None:
        lines.append(
            f"A probe runs {state.probe.name} for {state.probe.num_steps} steps, at an expected loss of"
            f" {1e3 * state.probe.loss:.2f} ms."
        )
    return "\n".join([*lines, ""])


def _table(now: Situation) -> list[str]:
    rows = [_HEADER, *(_cells(arm) for arm in now.arms)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _cells(arm: ArmEstimate) -> tuple[str, ...]:
    if math.isinf(arm.seconds):
        return (arm.name, str(arm.batch), f"{arm.tokens:.2f}", f"{arm.error:.2f}", *("-" * 5))
    return (
        arm.name,
        str(arm.batch),
        f"{arm.tokens:.2f}",
        f"{arm.error:.2f}",
        f"{1e3 * arm.seconds:.2f}",
        f"{arm.rate:.1f}",
        f"{arm.rate - arm.doubt:.1f}",
        f"{arm.upper_rate:.1f}",
        "yes" if arm.is_measured else "no",
    )


def _rules(now: Situation, choice: Choice) -> list[str]:
    if now.num_blocked:
        return [f"The watchdog blocks speculation for {now.num_blocked} more steps: it did not pay."]
    plain, leader = now.plain, now.arm(choice.leader)
    assert leader is not None, choice
    needed = (1.0 + MARGIN) * plain.rate
    held = now.arm(now.held)
    lines = [
        f"Plain decoding brings {plain.rate:.1f} tokens/s; a tree must be sure of {needed:.1f} to run.",
        *(_verdict(arm, now) for arm in now.arms[1:]),
        f"{leader.name} leads with {leader.rate:.1f} tokens/s.",
    ]
    if held is not None and not now.is_new_load and held.name != leader.name:
        lines.append(
            f"{leader.name} over the held {held.name}: {leader.rate / held.rate - 1.0:+.1%}, where"
            f" {GAIN:.0%} is needed."
            if not math.isinf(held.seconds)
            else f"The held {held.name} can no longer run."
        )
    return [*lines, _last_rule(now, choice)]


def _verdict(arm: ArmEstimate, now: Situation) -> str:
    if math.isinf(arm.seconds):
        return f"{arm.name} cannot run or pay at this batch."
    if arm.seconds > now.max_seconds:
        return f"{arm.name} is over the cap: {1e3 * arm.seconds:.2f} > {1e3 * now.max_seconds:.2f} ms a step."
    lower, upper = arm.rate - arm.doubt, arm.rate + leave_slack(arm, now)
    is_held = arm.name == now.held and not now.is_new_load
    if may_run(arm, now):
        bound = (
            f"not sure to lose: {upper:.1f} >= {now.plain.rate:.1f}" if is_held else f"sure of {lower:.1f}"
        )
        return f"{arm.name} may run: it is {bound}."
    if is_held:
        return f"{arm.name} may not run on: it is sure to stay under {upper:.1f} < {now.plain.rate:.1f}."
    return f"{arm.name} may not run: it is sure of {lower:.1f} only."


def _last_rule(now: Situation, choice: Choice) -> str:
    match choice.reason:
        case Reason.NEW_LOAD:
            return "At a new load the leader is taken at once."
        case Reason.GAIN:
            return f"A more expensive leader is taken after {PATIENCE} decisions in a row: this is the last."
        case Reason.CHEAPER:
            return "A cheaper leader is taken at once."
        case Reason.WAITING:
            number = now.num_leading + 1 if now.leader == choice.leader else 1
            return (
                f"A more expensive leader must lead {PATIENCE} decisions in a row: this is number {number}."
            )
        case Reason.TIMING:
            return "Another tree may turn out better still and is timed first."
        case Reason.TOO_MANY:
            return f"The arm stays: {now.num_switches} changes lately, {MAX_SWITCHES} are allowed."
        case Reason.LOSING:
            return "The held tree is sure to lose to plain decoding, so it is left at once."
        case Reason.BEST:
            return "The held arm stays: nothing is better by enough."
        case _:
            return f"Plain decoding stays: {choice.reason}."
