"""A fleet of replicas with known drafts, a clock that only moves when it is slept on, and drafts in a dict.

What a rollout makes of them is left to the tests.
"""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from engine import ModelLoadError
from ops.rollout.analysis import Limits, Window
from ops.rollout.controller import Controller, Pace
from ops.rollout.state import DraftRef, RolloutError
from ops.rollout.target import Desired, Replica

# Tokens per call and seconds per step, by digest.
SPEEDS = {"old": (2.0, 0.010), "better": (2.6, 0.010), "worse": (1.5, 0.010), "slower": (2.0, 0.012)}
PACE = Pace(poll_s=1.0, window_s=10.0, windows_per_look=6, follow_s=60.0)
LIMITS = Limits(max_looks=5)


class Killed(BaseException):
    """What kill -9 is to a process, as no `except` of the code under test may catch it."""


@dataclass
class FakeClock:
    time: float = 0.0
    sleepers: list[Callable[[float], None]] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for sleeper in self.sleepers:
            sleeper(seconds)


class FakeFleet:
    """Replicas load what is asked for after `delay` seconds, unless they cannot; they work while time goes
    by.
    """

    def __init__(self, clock: FakeClock, num_replicas: int = 2, batch: int = 4, delay: float = 3.0) -> None:
        self.clock, self.batch, self.delay = clock, batch, delay
        self.replicas = {
            f"r{idx}": Replica(f"r{idx}", "old", False, 0.0, 0, 0, 0) for idx in range(num_replicas)
        }
        self.desired = Desired(DraftRef(None, "old"))
        self.since = 0.0
        self.unloadable: set[str] = set()
        self.refused: set[str] = set()  # told so, once by every replica that is asked
        self.told: set[tuple[str, str | None, float]] = set()
        self.applied: list[Desired] = []
        self.dark: tuple[float, float] = (0.0, 0.0)  # the time in which nobody answers
        self.random = random.Random(3)
        clock.sleepers.append(self.work)

    def reach(self) -> None:
        begin, end = self.dark
        if begin <= self.clock.time < end:
            raise RolloutError("/metrics answered 503")

    def observe(self) -> list[Replica]:
        self.reach()
        return list(self.replicas.values())

    def apply(self, desired: Desired) -> None:
        self.reach()
        self.applied.append(desired)
        if desired != self.desired:
            self.desired, self.since = desired, self.clock.time

    def stable(self) -> str | None:
        return self.desired.stable.folder

    def work(self, seconds: float) -> None:
        for name, replica in self.replicas.items():
            wanted = self.wanted(name)
            if wanted not in self.unloadable and self.clock.time - self.since >= self.delay:
                if wanted not in self.refused:
                    replica = dataclasses.replace(replica, digest=wanted)
                elif (name, wanted, self.since) not in self.told:
                    self.told.add((name, wanted, self.since))
                    replica = dataclasses.replace(replica, num_refusals=replica.num_refusals + 1)
            window = self.window(replica.digest, seconds) if self.batch else Window(0, 0, 0, 0)
            self.replicas[name] = dataclasses.replace(
                replica,
                seconds=replica.seconds + window.seconds,
                steps=replica.steps + window.steps,
                calls=replica.calls + window.calls,
                tokens=replica.tokens + window.tokens,
            )

    def wanted(self, name: str) -> str | None:
        if self.desired.candidate is not None and name in self.desired.canary:
            return self.desired.candidate.digest
        return self.desired.stable.digest

    def window(self, digest: str | None, seconds: float) -> Window:
        length, step_s = SPEEDS[digest or "old"]
        steps = max(1, round(seconds / step_s * self.random.uniform(0.97, 1.03)))
        calls = steps * self.batch
        return Window(seconds, steps, calls, round(calls * length * self.random.uniform(0.98, 1.02)))

    def digests(self) -> set[str | None]:
        return {replica.digest for replica in self.replicas.values()}


class FakeDrafts:
    """A draft's id is its digest with "id-" before it."""

    def __init__(self) -> None:
        self.corrupt: set[str] = set()
        self.stable: list[str] = []

    def digest(self, draft: str) -> str:
        return draft.removeprefix("id-")

    def verify(self, draft: str) -> None:
        if draft in self.corrupt:
            raise ModelLoadError("model.safetensors is corrupt")

    def fetch(self, draft: str) -> str:
        return f"/drafts/{draft}"

    def mark_stable(self, draft: str) -> None:
        if draft not in self.stable[-1:]:
            self.stable.append(draft)


@dataclass
class World:
    """All that outlives a controller."""

    store: object
    clock: FakeClock = field(default_factory=FakeClock)
    drafts: FakeDrafts = field(default_factory=FakeDrafts)
    fleet: FakeFleet = field(init=False)

    def __post_init__(self) -> None:
        self.fleet = FakeFleet(self.clock)

    def controller(self, limits: Limits = LIMITS, pace: Pace = PACE) -> Controller:
        return Controller(self.store, self.fleet, self.drafts, self.clock, limits, pace)
