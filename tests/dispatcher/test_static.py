from pathlib import Path

import pytest

from engine.batch import Load
from engine.config import CPU_TABLE, CUDA_TABLE, EngineConfig, SpeculationConfig
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
    table = ((4, "tree-8"), (32, "chain-3"))
    dispatcher: Dispatcher = StaticDispatcher(SpeculationConfig(), table, TreeLibrary.search())
    assert dispatcher.choose(make_load(num_running)).name == name


@pytest.mark.parametrize("mode", ["off", "chain-5", "tree-16"])
@pytest.mark.parametrize("num_running", [0, 1, 1000])
def test_a_named_mode_is_chosen_for_every_step(mode, num_running):
    dispatcher = StaticDispatcher(SpeculationConfig(mode=mode), CPU_TABLE, TreeLibrary.search())
    assert dispatcher.choose(make_load(num_running)).name == mode


@pytest.mark.parametrize(
    ("mode", "table"), [("tree-9", CPU_TABLE), ("auto", ((1, "tree-9"),)), ("", CPU_TABLE)]
)
def test_an_unknown_tree_is_refused_at_construction(mode, table):
    with pytest.raises(ConfigError, match="no tree is called"):
        StaticDispatcher(SpeculationConfig(mode=mode), table, TreeLibrary.search())


def test_without_a_draft_auto_decodes_plainly_and_a_named_tree_is_refused():
    library = TreeLibrary.search(max_depth=0)
    assert StaticDispatcher(SpeculationConfig(), CPU_TABLE, library).choose(make_load(1)).name == "off"
    with pytest.raises(ConfigError):
        StaticDispatcher(SpeculationConfig(mode="tree-8"), CPU_TABLE, library)


@pytest.mark.parametrize(("is_cuda", "table"), [(False, CPU_TABLE), (True, CUDA_TABLE)])
def test_a_device_has_a_table_of_its_own_unless_one_is_given(is_cuda, table):
    assert EngineConfig(model=Path("unread")).device_sizes(is_cuda).table == table
    given = SpeculationConfig(table=((2, "chain-2"),))
    assert EngineConfig(model=Path("unread"), speculation=given).device_sizes(is_cuda).table == given.table


def test_what_can_be_reached_covers_every_number_of_rows_once():
    library = TreeLibrary.search()
    dispatcher = StaticDispatcher(SpeculationConfig(), ((2, "chain-2"), (4, "tree-8")), library)
    found = [(tree.name, list(rows)) for tree, rows in dispatcher.reachable(6)]
    assert found == [("chain-2", [1, 2]), ("tree-8", [3, 4]), ("off", [5, 6])]
    assert [(tree.name, list(rows)) for tree, rows in dispatcher.reachable(3)] == [
        ("chain-2", [1, 2]),
        ("tree-8", [3]),
    ]
