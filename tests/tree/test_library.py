import json

import pytest

from engine.errors import ConfigError
from engine.tree.library import DEFAULT_PROFILE, TreeLibrary
from engine.tree.search import acceptance_length
from engine.tree.topology import TreeTopology, chain, root_only


def test_plain_decoding_is_always_there():
    assert TreeLibrary([]).get("off") == root_only()
    assert TreeLibrary([]).names == ("off",)


@pytest.mark.parametrize("num_drafts", [1, 9, 10, 63])
def test_chains_are_made_on_demand(num_drafts):
    assert TreeLibrary([]).get(f"chain-{num_drafts}") == chain(num_drafts)


@pytest.mark.parametrize("num_nodes", [8, 16, 32, 64])
def test_a_default_tree_has_its_size_and_beats_the_chain_of_equal_depth(num_nodes):
    tree = TreeLibrary.search().get(f"tree-{num_nodes}")
    assert tree.num_nodes == num_nodes
    assert acceptance_length(tree, DEFAULT_PROFILE) > acceptance_length(chain(tree.depth), DEFAULT_PROFILE)


@pytest.mark.parametrize(
    "name",
    [
        "chain-0",
        "chain-64",
        "chain-03",
        "chain-",
        "tree-9",
        "tree-x",
        "",
        "OFF",
        "chain-3 ",
        "auto",
        "chain-٣",
    ],
)
def test_an_unknown_name_says_what_exists(name):
    with pytest.raises(ConfigError, match="off, tree-8, tree-16, tree-32, tree-64 and chain-1 to chain-63"):
        TreeLibrary.search().get(name)


def test_max_depth_bounds_trees_and_chains():
    library = TreeLibrary.search(max_depth=3)
    assert max(library.get(name).depth for name in library.names) == 3
    assert library.get("chain-3").depth == 3
    with pytest.raises(ConfigError, match="chain-1 to chain-3"):
        library.get("chain-4")


def test_an_engine_without_a_draft_has_plain_decoding_only():
    library = TreeLibrary.search(max_depth=0)
    assert library.names == ("off",)
    with pytest.raises(ConfigError, match=r"there are off$"):
        library.get("chain-1")


def test_a_saved_library_loads_equal(tmp_path):
    library = TreeLibrary.search()
    library.save(tmp_path / "trees.json")
    loaded = TreeLibrary.load(tmp_path / "trees.json")
    assert [loaded.get(name) for name in loaded.names] == [library.get(name) for name in library.names]


@pytest.mark.parametrize(
    "entries",
    [
        [1],
        {"tree-2": [-1, 1]},
        {"tree-3": [-1, 0]},
        {"tree-2": "ab"},
        {"tree-2": [-1, 0.0]},
        {"tree-2": [-1, False]},
        {"off": [-1]},
        {"chain-1": [-1, 0]},
        {"tree-0": []},
        {"wide": [-1, 0, 0]},
        {"tree-4": [-1, 0, 1, 0]},
    ],
)
def test_a_bad_file_is_refused_at_load(entries, tmp_path):
    path = tmp_path / "trees.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(ConfigError):
        TreeLibrary.load(path)


@pytest.mark.parametrize("text", [None, "{", "\udcff"])
def test_an_unreadable_file_is_refused_at_load(text, tmp_path):
    path = tmp_path / "trees.json"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match="cannot read"):
        TreeLibrary.load(path)


def test_a_loaded_tree_deeper_than_the_engine_drafts_is_refused(tmp_path):
    TreeLibrary([TreeTopology("tree-4", (-1, 0, 1, 2))]).save(tmp_path / "trees.json")
    with pytest.raises(ConfigError, match="3 deep"):
        TreeLibrary.load(tmp_path / "trees.json", max_depth=2)


def test_two_trees_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two trees"):
        TreeLibrary([TreeTopology("tree-3", (-1, 0, 0)), TreeTopology("tree-3", (-1, 0, 1))])
