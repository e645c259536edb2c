"""The adaptive dispatcher against published costs and acceptance, and against an oracle in simulated
traffic.
"""

import pytest

from benchmarks.dispatcher_simulation import build_dispatcher
from benchmarks.dispatcher_world import (
    PUBLISHED_BATCHES,
    PUBLISHED_SURVIVAL,
    chain_profile,
    published_world,
)
from engine.batch import Load
from engine.dispatcher.adaptive import AdaptiveDispatcher
from engine.tree.search import acceptance_length

WORLD = published_world()


def load_of(batch: int) -> Load:
    return Load(num_running=batch, num_waiting=0, num_free_blocks=1000, num_cached_tokens=512 * batch)


def oracle(profile, batch):
    return max(
        WORLD.arms, key=lambda tree: acceptance_length(tree, profile) / WORLD.seconds(tree.name, batch, 0)
    ).name


def knowing(profile) -> AdaptiveDispatcher:
    """Return a dispatcher that has seen so much of `profile` that it is sure of it."""
    return build_dispatcher(WORLD, prior=profile, prior_strength=1e6)


@pytest.mark.parametrize("batch", PUBLISHED_BATCHES)
@pytest.mark.parametrize("head", PUBLISHED_SURVIVAL)
def test_the_chosen_arm_is_the_oracles_in_every_published_cell(head, batch):
    profile = chain_profile(PUBLISHED_SURVIVAL[head])
    assert knowing(profile).choose(load_of(batch)).name == oracle(profile, batch)


def test_low_acceptance_at_batch_64_decodes_plainly():
    profile = chain_profile(PUBLISHED_SURVIVAL["eagle-low"])
    assert knowing(profile).choose(load_of(64)).name == "off"


@pytest.mark.parametrize("head", PUBLISHED_SURVIVAL)
def test_the_cliff_is_never_chosen_on_the_way_to_it(head):
    dispatcher = knowing(chain_profile(PUBLISHED_SURVIVAL[head]))
    chosen = {dispatcher.choose(load_of(batch)).name for batch in range(33, 65)}
    assert "chain-7" not in chosen
