"""Scenarios for the adaptive dispatcher, and what it may lose in them against an oracle.

Nothing is timed: costs are published or composed of measured parts (`dispatcher_world`), with 2% noise.
Regret is 1 - tokens per second over those of an oracle that knows every cost and every chance. Run:
python -m benchmarks.simulate_dispatcher [--seeds N] [--json]
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.dispatcher_simulation import Outcome, Simulation, Traffic, build_dispatcher
from benchmarks.dispatcher_world import (
    PUBLISHED_BATCHES,
    PUBLISHED_SURVIVAL,
    Acceptance,
    Process,
    Replay,
    World,
    chain_profile,
    h200_world,
    never,
    published_world,
    scaled,
)
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.search import Profile

RANKS = Path(__file__).parent / "data" / "smollm2_ranks.json"
TABLE_ERRORS = (0.0, 0.15)  # each tree's times up or down by so much, at random
CONTEXTS = (200, 2000, 16000, 30000)


@dataclass(frozen=True)
class Limits:
    """What a run may not exceed; None where it is only reported."""

    regret: float | None = None
    loss: float | None = None  # of tokens per second against plain decoding
    switches: int | None = 4  # in any 1,000 steps


FREE = Limits(None, None, None)


@dataclass(frozen=True)
class Scenario:
    """One kind of traffic. Steps before `start` warm the dispatcher up and are not counted."""

    name: str
    world: World
    process: Callable[[], Process]
    traffic: Callable[[random.Random], Traffic]
    num_steps: int
    limits: Limits
    start: int = 0

    def run(self, seed: int, table_error: float) -> Outcome:
        """Simulate once; traffic, luck and the table's mistakes follow from the seed."""
        source = random.Random(seed)  # noqa: S311 - a simulation
        table = self.world.mistaken(source, table_error)
        dispatcher = build_dispatcher(self.world, table)
        simulation = Simulation(self.world, self.process(), self.traffic(source), dispatcher, seed)
        return simulation.run(self.num_steps, self.start)


@dataclass(frozen=True)
class Summary:
    """A scenario over all seeds: means, and the worst."""

    scenario: str
    table_error: float
    regret: float
    worst_regret: float
    over_plain: float
    worst_over_plain: float
    num_seeds: int
    most_switches: int
    probe_share: float
    is_within: bool


def at_batch(batch: int) -> Callable[[random.Random], Traffic]:
    """Return traffic of one batch size."""
    return lambda _: Traffic(lambda _: batch)


def constant(profile: Profile, spread: float = 0.0) -> Callable[[], Process]:
    """Return acceptance that never changes; `spread` tells requests apart."""
    return lambda: Acceptance(lambda _: profile, spread)


def stationary(batches: tuple[int, ...] = PUBLISHED_BATCHES) -> Iterator[Scenario]:
    """Yield the published cells: each head at each batch. The first 1,000 steps learn; the regret of what
    follows is limited.
    """
    world = published_world()
    for head, survival in PUBLISHED_SURVIVAL.items():
        for batch in batches:
            process = constant(chain_profile(survival))
            yield Scenario(
                f"stationary {head} batch {batch}", world, process, at_batch(batch), 3000, Limits(0.02), 1000
            )


def collapse(batches: tuple[int, ...] = (1, 16, 64)) -> Iterator[Scenario]:
    """Yield drafts that are never right again after 1,500 steps; the next 2,000 are counted."""
    cells = (
        (published_world(), chain_profile(PUBLISHED_SURVIVAL["eagle3"])),
        (h200_world(), DEFAULT_PROFILE),
    )
    for world, profile in cells:
        for batch in batches:
            yield Scenario(
                f"collapse {world.name} batch {batch}",
                world,
                _broken_at(1500, profile),
                at_batch(batch),
                3500,
                Limits(loss=0.01),
                1500,
            )


def halved(batches: tuple[int, ...] = (1, 16, 64)) -> Iterator[Scenario]:
    """Yield drafts that are half as often right after 1,500 steps; what follows the next 300 is limited."""
    half = tuple(tuple(0.5 * p for p in ranks) for ranks in DEFAULT_PROFILE)
    for batch in batches:
        yield Scenario(
            f"halved batch {batch}",
            h200_world(),
            lambda: Acceptance(lambda step: DEFAULT_PROFILE if step < 1500 else half),
            at_batch(batch),
            3500,
            Limits(0.02),
            1800,
        )


def ramp() -> Scenario:
    """Return a batch that doubles every 188 steps to 256, and falls as it rose."""
    traffic = Traffic(lambda step: max(1, min(256, round(2 ** (8 * (1 - abs(step / 1500 - 1)))))))
    process = constant(DEFAULT_PROFILE)
    return Scenario("ramp 1-256-1", h200_world(), process, lambda _: traffic, 3000, Limits(0.05, None, None))


def others() -> Iterator[Scenario]:
    """Yield traffic that is only reported: drift, requests that differ, bursts, recorded answers."""
    world = h200_world()
    for batch in (1, 16, 64):
        yield Scenario(f"drift batch {batch}", world, _drifting, at_batch(batch), 4000, FREE)
    for batch in (1, 16):
        process = constant(DEFAULT_PROFILE, spread=0.6)
        yield Scenario(f"uneven requests batch {batch}", world, process, at_batch(batch), 3000, FREE)
    yield Scenario("bursts", world, constant(DEFAULT_PROFILE), _bursts, 3000, FREE)
    for batch in (1, 4, 16, 64):
        yield Scenario(f"replay batch {batch}", world, lambda: Replay(RANKS), at_batch(batch), 3000, FREE)


def _broken_at(step: int, profile: Profile) -> Callable[[], Process]:
    broken = never(profile)
    return lambda: Acceptance(lambda now: profile if now < step else broken)


def _drifting() -> Process:
    """The odds of acceptance sink to a twelfth over 2,000 steps and rise again."""
    profiles = [scaled(DEFAULT_PROFILE, -2.5 * idx / 50) for idx in range(51)]
    return Acceptance(lambda step: profiles[round(50 * (1 - abs(step / 2000 - 1)))])


def _bursts(source: random.Random) -> Traffic:
    """A batch that jumps every 50 steps or so, and contexts from 200 to 30,000 tokens."""
    batches = [16]
    for _ in range(3000):
        jumps = source.random() < 0.02
        batches.append(source.choice((1, 2, 4, 8, 16, 24, 32, 48, 64)) if jumps else batches[-1])
    return Traffic(lambda step: batches[step], lambda luck: luck.choice(CONTEXTS))


def summarize(scenario: Scenario, seeds: range, table_error: float) -> Summary:
    """Run a scenario with every seed and hold it against its limits."""
    outcomes = [scenario.run(seed, table_error) for seed in seeds]
    regrets = [1.0 - outcome.efficiency for outcome in outcomes]
    over_plain = [outcome.over_plain for outcome in outcomes]
    switches = max(outcome.most_switches() for outcome in outcomes)
    num_steps = sum(sum(outcome.steps_by_arm.values()) for outcome in outcomes)
    regret, limits = sum(regrets) / len(regrets), scenario.limits
    return Summary(
        scenario=scenario.name,
        table_error=table_error,
        regret=regret,
        worst_regret=max(regrets),
        over_plain=sum(over_plain) / len(over_plain),
        worst_over_plain=min(over_plain),
        num_seeds=len(seeds),
        most_switches=switches,
        probe_share=sum(outcome.num_probe_steps for outcome in outcomes) / num_steps,
        is_within=(limits.regret is None or regret <= limits.regret)
        and (limits.loss is None or min(over_plain) >= 1.0 - limits.loss)
        and (limits.switches is None or switches <= limits.switches),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="a quarter where nothing is limited")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    summaries = []
    print(f"{'scenario':32} table   regret  worst   over plain  worst  switches  probes", file=sys.stderr)
    for scenario in (*stationary(), *collapse(), *halved(), ramp(), *others()):
        for table_error in TABLE_ERRORS:
            is_limited = scenario.limits != FREE
            num_seeds = options.seeds if is_limited else max(1, options.seeds // 4)
            row = summarize(scenario, range(num_seeds), table_error)
            summaries.append(row)
            print(
                f"{row.scenario:32} {row.table_error:5.0%} {row.regret:8.2%} {row.worst_regret:6.2%}"
                f" {row.over_plain:12.3f} {row.worst_over_plain:6.3f} {row.most_switches:9}"
                f" {row.probe_share:7.2%}{'' if row.is_within else '  OVER THE LIMIT'}",
                file=sys.stderr,
                flush=True,
            )
    if options.json:
        rows = [asdict(row) for row in summaries]
        print(json.dumps({"jitter": 0.02, "rows": rows}, indent=1))
    return 0 if all(row.is_within for row in summaries) else 1


if __name__ == "__main__":
    sys.exit(main())
