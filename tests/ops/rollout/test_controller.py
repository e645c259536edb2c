"""A rollout over a fleet of known drafts: where it ends, and that kills anywhere do not change that."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.registry.entry import RegistryError
from ops.rollout.controller import Pace
from ops.rollout.state import DraftRef, Phase, RolloutError, RolloutState
from ops.rollout.state_store import ConflictError, FileStore, Kept
from ops.rollout.target import Desired
from tests.ops.rollout.fleet import LIMITS, PACE, Killed, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(FileStore(tmp_path / "rollout.json"))


def roll_out(world: World, draft: str) -> RolloutState:
    world.controller().start(draft)
    return world.controller().run()


ENDS = [
    ("id-better", Phase.SUCCEEDED, "better", "all replicas"),
    ("id-worse", Phase.ROLLED_BACK, "old", "fail: acceptance length 0.7"),
    ("id-slower", Phase.ROLLED_BACK, "old", "time per token 1.2"),
]


@pytest.mark.parametrize(("draft", "phase", "digest", "reason"), ENDS)
def test_a_better_draft_is_promoted_and_a_worse_one_rolled_back(draft, phase, digest, reason, world):
    state = roll_out(world, draft)
    assert (state.phase, world.fleet.digests()) == (phase, {digest})
    assert reason in state.reason
    assert world.drafts.stable == ([draft] if phase is Phase.SUCCEEDED else [])


def test_one_replica_and_no_other_saw_the_candidate_before_the_verdict(world):
    state = roll_out(world, "id-worse")
    assert state.canary == ("r0",)
    candidate = DraftRef("/drafts/id-worse", "worse")
    stable = DraftRef(None, "old")
    assert world.fleet.applied == [Desired(stable, candidate, ("r0",)), Desired(stable)]


def test_a_corrupt_draft_is_refused_before_any_replica_sees_it(world):
    world.drafts.corrupt.add("id-better")
    state = roll_out(world, "id-better")
    assert (state.phase, world.fleet.applied) == (Phase.FAILED, [])
    assert "model.safetensors is corrupt" in state.reason


def test_a_draft_that_replicas_cannot_load_is_rolled_back(world):
    world.fleet.unloadable.add("better")
    state = roll_out(world, "id-better")
    assert (state.phase, world.fleet.digests()) == (Phase.ROLLED_BACK, {"old"})
    assert "canary replica r0 serves old" in state.reason


def test_a_refused_draft_is_not_waited_for(world):
    world.fleet.refused.add("better")
    world.fleet.replicas["r1"] = dataclasses.replace(world.fleet.replicas["r1"], num_refusals=3)
    state = roll_out(world, "id-better")
    assert (state.phase, world.fleet.digests()) == (Phase.ROLLED_BACK, {"old"})
    assert "canary replica r0 serves old; replica r0 could not load the draft: see its log" in state.reason
    assert world.clock.time < 2 * world.fleet.delay < PACE.follow_s


def test_a_draft_that_one_replica_refuses_when_promoted_is_rolled_back_at_once(world):
    controller = world.controller()
    controller.start("id-better")
    world.clock.sleepers.append(
        lambda _: world.fleet.refused.add("better") if world.fleet.desired.stable.digest == "better" else None
    )
    state = controller.run()
    assert (state.phase, world.fleet.digests()) == (Phase.ROLLED_BACK, {"old"})
    assert "replica r1 could not load the draft" in state.reason


def test_a_replica_that_refuses_while_the_fleet_goes_back_does_not_end_that(world):
    controller = world.controller()
    controller.start("id-better")

    def refuse_late(_: float) -> None:
        fleet = world.fleet
        if fleet.desired.stable.digest == "better":
            fleet.refused.add("better")
        elif "better" in fleet.refused and world.clock.time - fleet.since == 1.0:
            fleet.replicas["r1"] = dataclasses.replace(fleet.replicas["r1"], num_refusals=2)

    world.clock.sleepers.append(refuse_late)
    state = controller.run()
    assert (state.phase, world.fleet.digests()) == (Phase.ROLLED_BACK, {"old"})
    assert world.fleet.replicas["r1"].num_refusals == 2


def test_a_canary_that_is_lost_while_watching_is_an_error(world):
    world.clock.sleepers.append(
        lambda _: world.fleet.replicas.pop("r0", None) if world.clock.time > 30 else None
    )
    state = roll_out(world, "id-better")
    assert state.phase is Phase.ROLLED_BACK
    assert "error: canary replica r0 is gone" in state.reason


def test_a_canary_that_gives_its_draft_up_is_an_error(world):
    def give_up(_: float) -> None:
        if world.clock.time > 30:
            world.fleet.replicas["r0"] = dataclasses.replace(world.fleet.replicas["r0"], is_off=True)

    world.clock.sleepers.append(give_up)
    state = roll_out(world, "id-better")
    assert state.phase is Phase.ROLLED_BACK
    assert "error: canary replica r0 gave the draft up" in state.reason


@pytest.mark.parametrize("begin", [0.0, 0.5, 20.0, 62.5])
def test_a_fleet_out_of_sight_for_a_while_is_asked_again(begin, world):
    """In each phase that looks at it: a page of all replicas fails while one of them is replaced."""
    world.controller().start("id-better")
    world.fleet.dark = (begin, begin + 30)
    state = world.controller().run()
    assert (state.phase, world.fleet.digests()) == (Phase.SUCCEEDED, {"better"})


def test_a_canary_that_takes_the_page_with_it_is_rolled_back(world):
    def die(_: float) -> None:
        if world.clock.time > 30 and "r0" in world.fleet.replicas:
            del world.fleet.replicas["r0"]
            world.fleet.dark = (world.clock.time, world.clock.time + 5)

    world.clock.sleepers.append(die)
    state = roll_out(world, "id-better")
    assert (state.phase, world.fleet.desired) == (Phase.ROLLED_BACK, Desired(DraftRef(None, "old")))
    assert "error: canary replica r0 is gone" in state.reason


def test_a_fleet_that_stays_out_of_sight_ends_the_process_and_not_the_rollout(world):
    world.controller().start("id-better")
    world.fleet.dark = (20, 1e9)
    with pytest.raises(RolloutError, match="503"):
        world.controller().run()
    assert 20 + PACE.follow_s <= world.clock.time <= 20 + 2 * PACE.follow_s
    assert world.store.load().state.phase is Phase.WATCHING
    world.fleet.dark = (0, 0)
    assert world.controller().run().phase is Phase.SUCCEEDED


def test_a_registry_that_cannot_be_written_does_not_hold_up_a_promotion(world):
    def refuse(draft: str) -> None:
        raise RegistryError("cannot use the registry /r: Read-only file system")

    world.drafts.mark_stable = refuse
    state = roll_out(world, "id-better")
    assert (state.phase, world.fleet.digests()) == (Phase.SUCCEEDED, {"better"})
    assert "Read-only file system" in state.reason


def test_without_traffic_nothing_is_promoted(world):
    world.fleet.batch = 0
    state = roll_out(world, "id-better")
    assert (state.phase, state.num_looks) == (Phase.PAUSED, LIMITS.max_looks)
    assert "no batch bucket has 5 windows" in state.reason
    assert world.controller().run().phase is Phase.PAUSED


@pytest.mark.parametrize(
    ("asked", "end", "digest"),
    [(Phase.PROMOTING, Phase.SUCCEEDED, "better"), (Phase.ROLLING_BACK, Phase.ROLLED_BACK, "old")],
)
def test_a_person_decides_a_paused_rollout(asked, end, digest, world):
    world.fleet.batch = 0
    roll_out(world, "id-better")
    world.controller().ask(asked)
    assert world.controller().run().phase is end
    assert world.fleet.digests() == {digest}


def test_whoever_runs_a_rollout_follows_what_another_process_asks(world):
    controller = world.controller()
    controller.start("id-better")
    other = world.controller()
    asked = []

    def abort(_: float) -> None:
        if world.clock.time > 20 and not asked:
            asked.append(other.ask(Phase.ROLLING_BACK))

    world.clock.sleepers.append(abort)
    state = controller.run()
    assert (state.phase, state.reason) == (Phase.ROLLED_BACK, "asked for")
    assert world.fleet.digests() == {"old"}


def test_a_second_rollout_waits_for_the_first(world):
    world.controller().start("id-better")
    with pytest.raises(RolloutError, match="a rollout of id-better is verifying"):
        world.controller().start("id-worse")


@pytest.mark.parametrize("other", ["id-better", "id-worse"])
def test_of_two_that_start_at_once_the_later_one_takes_up_the_same_or_is_told(other, world):
    keep = world.store.replace

    def replace(state: RolloutState, version: str | None) -> Kept:
        world.store.replace = keep
        world.controller().start(other)  # between the look and the act of the first
        return keep(state, version)

    world.store.replace = replace
    if other == "id-better":
        assert world.controller().start("id-better").draft == other
    else:
        with pytest.raises(RolloutError, match="a rollout of id-worse is verifying"):
            world.controller().start("id-better")
    assert world.store.load().state.draft == other


def test_what_cannot_be_asked_is_told(world):
    with pytest.raises(RolloutError, match="there is no rollout"):
        world.controller().run()
    roll_out(world, "id-better")
    with pytest.raises(RolloutError, match="that is succeeded cannot be aborted"):
        world.controller().ask(Phase.ROLLING_BACK)
    with pytest.raises(RolloutError, match="draft id-better serves already"):
        world.controller().start("id-better")


@pytest.mark.parametrize("num_canaries", [2, 3])
def test_a_canary_needs_replicas_to_be_compared_with(num_canaries, world):
    pace = dataclasses.replace(PACE, num_canaries=num_canaries)
    with pytest.raises(RolloutError, match="found 2"):
        world.controller(pace=pace).start("id-better")


def test_replicas_that_already_differ_are_told(world):
    world.fleet.replicas["r1"] = dataclasses.replace(world.fleet.replicas["r1"], digest="better")
    with pytest.raises(RolloutError, match="2 different drafts"):
        world.controller().start("id-better")


class Mortal:
    """Counts the events of a rollout, and kills at the one it is told, before or after it happens."""

    def __init__(self, world: World, kill_at: int, is_after: bool) -> None:
        self.world, self.kill_at, self.is_after, self.num_events = world, kill_at, is_after, 0
        self.trace: list[tuple[str, str]] = []
        self.store, world.store = world.store, self
        fleet, drafts = world.fleet, world.drafts
        fleet.apply = self.deadly("apply", fleet.apply)
        drafts.verify = self.deadly("verify", drafts.verify)
        drafts.fetch = self.deadly("fetch", drafts.fetch)
        drafts.mark_stable = self.deadly("mark_stable", drafts.mark_stable)

    def load(self) -> Kept | None:
        return self.store.load()

    def replace(self, state: RolloutState, version: str | None) -> Kept:
        return self.deadly("replace", self.store.replace)(state, version)

    def deadly(self, name: str, event: Callable) -> Callable:
        def wrapped(*arguments):
            kept = self.store.load()
            self.trace.append((name, "" if kept is None else kept.state.phase))
            self.num_events += 1
            is_last = self.num_events == self.kill_at
            if is_last and not self.is_after:
                raise Killed
            result = event(*arguments)
            if is_last:
                raise Killed
            return result

        return wrapped


def run_to_the_end(world: World, draft: str) -> RolloutState:
    """As an operator who types the command again whenever it was killed."""
    for _ in range(3):
        try:
            if world.store.load() is None:
                world.controller().start(draft)
            return world.controller().run()
        except Killed:
            continue
    raise AssertionError("killed more than once")


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize(("draft", "phase", "digest", "reason"), ENDS)
def test_a_kill_at_any_event_leads_to_the_same_end(draft, phase, digest, reason, is_after, tmp_path):
    calm = World(FileStore(tmp_path / "calm.json"))
    events = Mortal(calm, 0, is_after)
    assert run_to_the_end(calm, draft).phase is phase
    assert events.num_events >= 8
    for kill_at in range(1, events.num_events + 1):
        world = World(FileStore(tmp_path / f"{kill_at}.json"))
        Mortal(world, kill_at, is_after)
        state = run_to_the_end(world, draft)
        assert (state.phase, world.fleet.digests()) == (phase, {digest}), kill_at
        assert world.drafts.stable == calm.drafts.stable, kill_at
        assert world.fleet.desired == calm.fleet.desired, kill_at


def test_each_phase_is_kept_before_what_it_does(world):
    events = Mortal(world, 0, is_after=False)
    run_to_the_end(world, "id-better")
    acts = [(name, phase) for name, phase in events.trace if name != "replace"]
    assert acts == [
        ("verify", Phase.VERIFYING),
        ("fetch", Phase.PREFETCHING),
        ("apply", Phase.CANARY),
        ("apply", Phase.PROMOTING),
        ("mark_stable", Phase.PROMOTING),
    ]


def test_a_process_with_an_old_state_changes_nothing(world):
    """It was suspended between its look at the state and its act."""
    stale = world.controller()
    stale.start("id-better")
    kept = world.store.load()
    world.controller().ask(Phase.ROLLING_BACK)
    with pytest.raises(ConflictError):
        stale._start_canary(dataclasses.replace(kept, state=kept.state.to(Phase.CANARY, "", canary=("r0",))))
    assert world.fleet.applied == []


def test_a_fleet_that_cannot_go_back_is_told_and_asked_again(world):
    roll_out_started = world.controller()
    roll_out_started.start("id-worse")
    world.fleet.unloadable.add("old")
    world.fleet.replicas["r0"] = dataclasses.replace(world.fleet.replicas["r0"], digest="worse")
    world.controller().ask(Phase.ROLLING_BACK)
    with pytest.raises(RolloutError, match="replica r0 serves worse; run eyas rollout abort again"):
        world.controller().run()
    world.fleet.unloadable.clear()
    world.controller().ask(Phase.ROLLING_BACK)
    assert world.controller().run().phase is Phase.ROLLED_BACK


def test_the_default_pace_gives_a_verdict_in_its_looks():
    assert Pace().windows_per_look >= LIMITS.min_windows
