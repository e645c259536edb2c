"""A reader who knows `docs/dispatcher.md` and sees a printed state, but neither the code nor its answer.

Whether the reader is right is left to `test_document`.
"""

import math
from dataclasses import dataclass

from engine.dispatcher.control import ArmEstimate, Situation


@dataclass(frozen=True)
class Printed:
    """The part of what `explain` prints that stands before the first rule, as numbers by their columns."""

    held: str
    is_new_load: bool
    inputs: dict[str, str]
    arms: dict[str, dict[str, str]]

    def number(self, arm: str, column: str) -> float:
        cell = self.arms[arm][column]
        return math.inf if cell == "-" else float(cell)

    @property
    def cap(self) -> float:
        return math.inf if self.inputs["cap ms"] == "-" else float(self.inputs["cap ms"])


def read(text: str) -> Printed:
    """Return the columns of a printed state."""
    head, inputs, arms, *_ = text.split("\n\n")
    held, load = head.partition("held arm ")[2].split(", ")
    names = ("leader before", "in a row", "changes", "timing", "broken", "blocked", "cap ms")
    names_line, values = inputs.strip().splitlines()
    assert names_line.split() == " ".join(names).split()
    columns, *rows = (
        line.strip().replace("sure of", "sure-of").replace("up to", "up-to").split()
        for line in arms.splitlines()
    )
    found = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    return Printed(held, load.startswith("a new"), dict(zip(names, values.split(), strict=True)), found)


def predict(state: Printed) -> tuple[str, str]:
    """Return the arm and the reason that follow by the document's ten rules."""
    if state.inputs["blocked"] != "0":
        return "off", "realised less than plain decoding"
    plain = state.number("off", "tokens/s")
    able = [name for name in state.arms if name != "off" and _is_able(state, name)]
    held = state.held if state.held in able else "off"
    may_run = [name for name in able if _may_run(state, name, plain)]
    rates = {name: state.number(name, "tokens/s") for name in may_run}
    leader = max(rates, key=rates.__getitem__, default="off")
    if leader == "off" and (held == "off" or state.is_new_load):
        return "off", _why_plain(state, plain)
    if state.is_new_load:
        return leader, "new load"
    if held != "off" and held not in may_run and _most(state, held, "settled") < plain:
        return leader, "loses to plain decoding"
    return _gain(state, held, leader)


def _gain(state: Printed, held: str, leader: str) -> tuple[str, str]:
    best = state.number(leader, "tokens/s")
    if best < 1.01 * state.number(held, "tokens/s") or leader == held:
        return held, "best"
    others = [name for name in state.arms if name not in ("off", held) and _is_able(state, name)]
    untimed = [name for name in others if state.arms[name]["timed"] == "no"]
    if state.inputs["timing"] == "on" and any(state.number(name, "up-to") > best for name in untimed):
        return held, "a better tree, but others are being timed"
    is_sure = state.number(leader, "sure-of") >= 1.01 * state.number(held, "tokens/s")
    if int(state.inputs["changes"]) >= 3 and not is_sure:
        return held, "a better tree, but too many switches lately"
    if state.number(leader, "ms") < state.number(held, "ms"):
        return leader, "cheaper tree is better"
    before = int(state.inputs["in a row"]) if state.inputs["leader before"] == leader else 0
    return (leader, "sustained gain") if before >= 2 else (held, "a better tree must stay so")


def _is_able(state: Printed, name: str) -> bool:
    return state.arms[name]["ms"] != "-" and state.number(name, "ms") <= state.cap


def _may_run(state: Printed, name: str, plain: float) -> bool:
    if name == state.held and not state.is_new_load:
        return _most(state, name, "tokens") >= plain
    return state.number(name, "sure-of") >= 1.005 * plain


def _most(state: Printed, name: str, tokens: str) -> float:
    """What the held tree may bring at most."""
    errors = 0 if state.inputs["broken"] == "yes" else 2
    emitted = state.number(name, tokens) + errors * state.number(name, "error")
    return 1000 * state.number(name, "rows") * emitted / state.number(name, "ms")


def _why_plain(state: Printed, plain: float) -> str:
    known = [name for name in state.arms if name != "off" and state.arms[name]["ms"] != "-"]
    if not known:
        return "no tree can run"
    if any(state.number(name, "sure-of") >= 1.005 * plain for name in known):
        return "every better tree is over the cap on the step time"
    return "no tree is sure to beat plain decoding"


def situation_of(state: Printed) -> Situation:
    """Return the situation whose numbers are the printed ones."""
    arms = tuple(
        ArmEstimate(
            name,
            int(state.number(name, "rows")),
            *(state.number(name, column) for column in ("tokens", "settled", "error")),
            *(state.number(name, column) / 1000 for column in ("ms", "least")),
            state.arms[name]["timed"] == "yes",
        )
        for name in state.arms
    )
    return Situation(
        arms,
        held=state.held,
        is_new_load=state.is_new_load,
        leader=state.inputs["leader before"],
        num_leading=int(state.inputs["in a row"]),
        num_switches=int(state.inputs["changes"]),
        num_blocked=int(state.inputs["blocked"]),
        is_settled=state.inputs["timing"] == "over",
        is_broken=state.inputs["broken"] == "yes",
        max_seconds=state.cap / 1000,
    )
