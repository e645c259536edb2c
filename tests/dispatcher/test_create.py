import pytest

from engine.batch import Load
from engine.config import SpeculationConfig
from engine.dispatcher.adaptive import AdaptiveDispatcher
from engine.dispatcher.create import create_dispatcher
from engine.dispatcher.latency import ArmTimes, LatencyTable
from engine.dispatcher.static import StaticDispatcher
from engine.errors import ConfigError
from engine.tree.library import DEFAULT_PROFILE, TreeLibrary

LIBRARY = TreeLibrary.search()
TABLE = LatencyTable(
    (1, 8),
    (
        ArmTimes("off", 1, (1.0, 1.1), (0.0, 0.0)),
        ArmTimes("chain-2", 3, (1.1, 1.3), (0.0, 0.0)),
        ArmTimes("tree-8", 8, (1.2, 1.9), (0.0, 0.0)),
    ),
    (0.0, 0.0),
)


def create(config, table=TABLE, library=LIBRARY):
    static = StaticDispatcher(config, config.table or (), library)
    return create_dispatcher(config, static, library, table, DEFAULT_PROFILE, block_size=16, max_num_seqs=8)


@pytest.mark.parametrize(
    ("table", "library", "kind"),
    [
        (TABLE, LIBRARY, AdaptiveDispatcher),
        (None, LIBRARY, StaticDispatcher),
        (TABLE, TreeLibrary.search(max_depth=0), StaticDispatcher),
    ],
)
def test_it_learns_where_steps_were_timed_and_a_draft_is_there(table, library, kind):
    assert type(create(SpeculationConfig(), table, library)) is kind


@pytest.mark.parametrize(
    ("mode", "name"), [("auto", "tree-8"), ("table", "chain-3"), ("off", "off"), ("chain-5", "chain-5")]
)
def test_the_mode_says_who_chooses_and_can_be_switched(mode, name):
    config = SpeculationConfig(mode="off", table=((1, "chain-3"),))
    dispatcher = create(config)
    load = Load(1, 0, 1000, 512)
    assert dispatcher.choose(load).name == "off"
    dispatcher.switch(mode)
    assert dispatcher.choose(load).name == name
    assert dispatcher.stats().arm == name


@pytest.mark.parametrize("mode", ["auto", "table", "tree-16"])
def test_what_may_be_chosen_is_what_is_prepared(mode):
    dispatcher = create(SpeculationConfig(mode=mode, table=((4, "chain-3"),)))
    prepared = {tree.name: rows for tree, rows in dispatcher.reachable(8)}
    if mode == "auto":
        assert prepared == {"chain-2": range(1, 9), "tree-8": range(1, 9)}
    else:
        assert {"table": "chain-3", "tree-16": "tree-16"}[mode] in prepared


def test_a_cap_from_the_config_is_kept():
    dispatcher = create(SpeculationConfig(max_step_seconds=1.15))
    assert dispatcher.choose(Load(1, 0, 1000, 512)).name == "chain-2"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_an_impossible_cap_is_refused(seconds):
    with pytest.raises(ConfigError, match="max_step_seconds"):
        SpeculationConfig(max_step_seconds=seconds)
