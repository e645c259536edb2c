import pytest

from engine.batch import Load
from engine.config import SpeculationConfig
from engine.dispatcher.dispatcher import Dispatcher
from engine.dispatcher.static import StaticDispatcher
from engine.errors import ConfigError
from engine.tree.library import TreeLibrary


def make_load(num_running: int) -> Load:
    return Load(num_running=num_running, num_waiting=5, num_free_blocks=100, num_cached_tokens=1000)


@pytest.mark.parametrize(
    ("num_running", "name"),
    [(0, "tree-8"), (1, "tree-8"), (4, "tree-8"), (5, "chain-3"), (32, "chain-3"), (33, "off"), (500, "off")],
)
def test_auto_follows_the_table_by_running_rows(num_running, name):
    dispatcher: Dispatcher = StaticDispatcher(
        SpeculationConfig(table=((4, "tree-8"), (32, "chain-3"))), TreeLibrary.search()
    )
    assert dispatcher.choose(make_load(num_running)).name == name


@pytest.mark.parametrize("mode", ["off", "chain-5", "tree-16"])
@pytest.mark.parametrize("num_running", [0, 1, 1000])
def test_a_named_mode_is_chosen_for_every_step(mode, num_running):
    dispatcher = StaticDispatcher(SpeculationConfig(mode=mode), TreeLibrary.search())
    assert dispatcher.choose(make_load(num_running)).name == mode


@pytest.mark.parametrize(
    "config",
    [SpeculationConfig(mode="tree-9"), SpeculationConfig(table=((1, "tree-9"),)), SpeculationConfig(mode="")],
)
def test_an_unknown_tree_is_refused_at_construction(config):
    with pytest.raises(ConfigError, match="no tree is called"):
        StaticDispatcher(config, TreeLibrary.search())


def test_without_a_draft_auto_decodes_plainly_and_a_named_tree_is_refused():
    library = TreeLibrary.search(max_depth=0)
    assert StaticDispatcher(SpeculationConfig(), library).choose(make_load(1)).name == "off"
    with pytest.raises(ConfigError):
        StaticDispatcher(SpeculationConfig(mode="tree-8"), library)
