"""All that a dispatcher decided by, as plain data and as JSON: what `eyas trees explain` reads.

Deriving the choice from it is left to `control`, wording it to `explain`.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from engine.dispatcher.control import ArmEstimate, Choice, Reason, Situation
from engine.dispatcher.probes import Probe
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DispatchState:
    """A decision and what it rests on. `step` counts choices; `probe` is the excursion under way, if any.

    `profile[d][r]` is the acceptance learnt over all rows, `num_nodes[d]` the visited nodes behind row d.
    """

    step: int
    situation: Situation
    choice: Choice
    probe: Probe | None
    profile: tuple[tuple[float, ...], ...]
    num_nodes: tuple[float, ...]

    def to_json(self) -> str:
        """Return text that `from_json` reads; infinity is null."""
        values = asdict(self)
        for arm in values["situation"]["arms"]:
            for name in ("seconds", "least_seconds"):
                arm[name] = None if math.isinf(arm[name]) else arm[name]
        if math.isinf(values["situation"]["max_seconds"]):
            values["situation"]["max_seconds"] = None
        return json.dumps(values)

    @staticmethod
    def from_json(text: str) -> "DispatchState":
        """Read what `to_json` wrote. Raises `ConfigError` for anything else."""
        try:
            values = json.loads(text)
            choice, probe = values["choice"], values["probe"]
            return DispatchState(
                step=int(values["step"]),
                situation=_situation(values["situation"]),
                choice=Choice(choice["name"], Reason(choice["reason"]), choice["leader"]),
                probe=None if probe is None else Probe(**probe),
                profile=tuple(tuple(map(float, row)) for row in values["profile"]),
                num_nodes=tuple(map(float, values["num_nodes"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not the state of a dispatcher: {error!r}") from error


def _situation(values: dict[str, Any]) -> Situation:
    arms = [ArmEstimate(**{key: _finite(value) for key, value in arm.items()}) for arm in values["arms"]]
    rest = {key: _finite(value) for key, value in values.items() if key != "arms"}
    if not arms:
        raise ValueError("no arms")
    return Situation(arms=tuple(arms), **rest)


def _finite(value: Any) -> Any:
    return math.inf if value is None else value
