"""What a step costs: times measured at the start by tree, batch and context, corrected by the steps since.

Timing is left to the caller of `LatencyTable.fit`, the choice of a tree to `control`.
"""

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from engine.dispatcher.isotonic import rising
from engine.errors import ConfigError

PLAIN = "off"
UNREACHABLE = math.inf
_MOST_BY_CONTEXT = 0.95  # of a step's seconds: noise must not make a step without context free


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement: a decode step of `batch` rows over a tree, each behind `context` cached tokens."""

    tree: str
    batch: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: each token of a forward reads `num_active` of `num_experts`."""

    num_experts: int
    num_active: int

    def distinct(self, num_tokens: float) -> float:
        """Return how many experts a forward of `num_tokens` is expected to read."""
        return self.num_experts * (1.0 - math.pow(1.0 - self.num_active / self.num_experts, num_tokens))


@dataclass(frozen=True, slots=True)
class ArmTimes:
    """Seconds of one tree at each batch of the table, 0 cached tokens, and what each cached token of the
    batch adds. A batch that was not measured holds infinity.
    """

    name: str
    num_nodes: int
    base: tuple[float, ...]
    per_token: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Seconds of a decode step by tree, batch and total cached tokens.

    `is_padded` says that a batch runs as the next larger one measured (captured graphs); else it is
    interpolated. `catch_up[i]` is what the first drafting step after a stretch of plain decoding costs more
    at `batches[i]`.
    """

    batches: tuple[int, ...]
    arms: tuple[ArmTimes, ...]
    catch_up: tuple[float, ...]
    is_padded: bool = False
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise ConfigError(f"a latency table needs rising batches from 1, found {self.batches}")
        if PLAIN not in self.names or math.inf in self.arm(PLAIN).base:
            raise ConfigError("a latency table needs plain decoding (off) at every batch")
        if len(self.catch_up) != len(self.batches):
            raise ConfigError(f"{len(self.batches)} batches need as many catch-up times: {self.catch_up}")

    @staticmethod
    def fit(
        timings: Iterable[Timing],
        num_nodes: dict[str, int],
        catch_up: Sequence[tuple[int, float]] = (),
        *,
        is_padded: bool = False,
        experts: Experts | None = None,
    ) -> "LatencyTable":
        """Return the table nearest to `timings`: linear in cached tokens, monotone in batch, and no tree
        cheaper than plain decoding, nor its cached tokens. A batch timed at one context takes what a cached
        token adds from the batch below. `num_nodes` names the trees, plain decoding among them; `catch_up`
        holds (batch, seconds), and an unknown one is that of the batch below.
        """
        cells: dict[tuple[str, int], list[Timing]] = defaultdict(list)
        for timing in timings:
            cells[timing.tree, timing.batch].append(timing)
        batches = tuple(sorted({batch for _, batch in cells}))
        plain = ArmTimes(PLAIN, 1, (0.0,) * len(batches), (0.0,) * len(batches))
        arms = []
        for name in sorted(num_nodes, key=lambda name: (num_nodes[name], name)):
            lines: list[tuple[float, float]] = []
            for idx, batch in enumerate(batches):
                least = max(plain.per_token[idx], lines[-1][1] if lines else 0.0)
                lines.append(_line(cells.get((name, batch), ()), plain.per_token[idx], least))
            base = _monotone([line[0] for line in lines])
            base = tuple(max(pair) for pair in zip(base, plain.base, strict=True))
            arm = ArmTimes(name, num_nodes[name], base, tuple(line[1] for line in lines))
            plain = arm if name == PLAIN else plain
            arms.append(arm)
        extra, known = dict(catch_up), [0.0]
        for batch in batches:
            seconds = extra.get(batch, UNREACHABLE)
            known.append(max(0.0, seconds) if seconds < UNREACHABLE else known[-1])
        return LatencyTable(batches, tuple(arms), tuple(known[1:]), is_padded, experts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.arms)

    def arm(self, name: str) -> ArmTimes:
        return next(arm for arm in self.arms if arm.name == name)

    def bucket(self, batch: int) -> int:
        """Return the index of the smallest measured batch that holds `batch`, the last one for more."""
        return min(bisect_left(self.batches, batch), len(self.batches) - 1)

    def seconds(self, name: str, batch: int, num_cached: float) -> float:
        """Return the seconds of a step; beyond what was measured, plain decoding grows in proportion and
        every tree is unreachable.
        """
        arm = self.arm(name)
        if batch > self.batches[-1]:
            scale = batch / self.batches[-1] if name == PLAIN else UNREACHABLE
            return scale * arm.base[-1] + arm.per_token[-1] * num_cached
        upper = self.bucket(batch)
        share = self._share(arm, upper, batch)
        if share == 1.0:
            return arm.base[upper] + arm.per_token[upper] * num_cached
        base = (1.0 - share) * arm.base[upper - 1] + share * arm.base[upper]
        return base + ((1.0 - share) * arm.per_token[upper - 1] + share * arm.per_token[upper]) * num_cached

    def catch_up_seconds(self, batch: int) -> float:
        return self.catch_up[self.bucket(batch)]

    def to_json(self) -> str:
        """Return the table as text that `from_json` reads; an unreachable cell is null."""
        values = asdict(self)
        for arm in values["arms"]:
            arm["base"] = [None if base == UNREACHABLE else base for base in arm["base"]]
        return json.dumps(values)

    @staticmethod
    def from_json(text: str) -> "LatencyTable":
        """Read what `to_json` wrote. Raises `ConfigError` for anything else."""
        try:
            values = json.loads(text)
            arms = tuple(
                ArmTimes(
                    name=str(arm["name"]),
                    num_nodes=int(arm["num_nodes"]),
                    base=tuple(UNREACHABLE if base is None else float(base) for base in arm["base"]),
                    per_token=tuple(map(float, arm["per_token"])),
                )
                for arm in values["arms"]
            )
            experts = None if values["experts"] is None else Experts(**values["experts"])
            batches, catch_up = tuple(values["batches"]), tuple(map(float, values["catch_up"]))
            return LatencyTable(batches, arms, catch_up, bool(values["is_padded"]), experts)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a latency table: {error!r}") from error

    def _share(self, arm: ArmTimes, upper: int, batch: int) -> float:
        """Return how far `batch` is on the way from the measured batch below to the one at index `upper`, in
        tokens, or in distinct experts where those are what a forward reads.
        """
        if self.is_padded or upper == 0 or self.batches[upper] == batch:
            return 1.0
        low, high = self.batches[upper - 1], self.batches[upper]
        if self.experts is None:
            return (batch - low) / (high - low)
        points = [self.experts.distinct(rows * arm.num_nodes) for rows in (low, batch, high)]
        return (points[1] - points[0]) / max(points[2] - points[0], 1e-9)


def _line(timings: Sequence[Timing], least: float, otherwise: float) -> tuple[float, float]:
    """Return (seconds at no cached token, seconds per cached token) of one tree and batch by least squares,
    neither negative and the latter not below `least`, and `otherwise` where one context was timed; the median
    of equal contexts counts.
    """
    if not timings:
        return UNREACHABLE, otherwise
    by_context: dict[int, list[float]] = defaultdict(list)
    for timing in timings:
        by_context[timing.batch * timing.context].append(timing.seconds)
    xs = sorted(by_context)
    ys = [sorted(by_context[x])[len(by_context[x]) // 2] for x in xs]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = otherwise
    if spread:
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    slope = min(max(slope, least), _MOST_BY_CONTEXT * mean_y / mean_x if mean_x else 0.0)
    return mean_y - slope * mean_x, slope


def _monotone(base: Sequence[float]) -> tuple[float, ...]:
    """Return the finite values made non-decreasing; the others stay where they are."""
    known = [idx for idx, value in enumerate(base) if value < UNREACHABLE]
    smooth = dict(zip(known, rising([base[idx] for idx in known], [1.0] * len(known)), strict=True))
    return tuple(smooth.get(idx, UNREACHABLE) for idx in range(len(base)))
