"""`eyas trees`: what it prints, and that nothing needs a model."""

import json
from pathlib import Path

import pytest

from app.cli import main
from benchmarks.dispatcher_simulation import Simulation, Traffic, build_dispatcher
from benchmarks.dispatcher_world import Acceptance, h200_world
from engine import DEFAULT_PROFILE, TreeLibrary, acceptance_length
from engine.tree.search import search

PROFILE = ((0.5, 0.2, 0.1), (0.4, 0.2, 0.1))


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"source": "a test", "probabilities": PROFILE}))
    return str(path)


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["trees", *arguments]) == 0
    return capsys.readouterr().out


def test_search_prints_the_best_trees_and_writes_what_an_engine_reads(profile, tmp_path, capsys) -> None:
    out = tmp_path / "trees.json"
    arguments = ["search", "--profile", profile, "--nodes", "4,9", "--depth", "3", "--out", str(out)]
    text = run(arguments, capsys)
    library = TreeLibrary.load(out)
    assert library.names == ("off", "tree-4", "tree-9")
    for num_nodes in (4, 9):
        best = search(PROFILE, num_nodes, 3)
        assert library.get(best.name) == best
        assert f"{acceptance_length(best, PROFILE):.3f}" in text


def test_show_draws_every_node_with_its_chance(profile, capsys) -> None:
    lines = run(["show", "chain-2", "--draft", "none", "--profile", profile], capsys).splitlines()
    assert lines == [
        "chain-2: 3 nodes, 2 levels, 1.70 tokens per call",
        "root",
        "└─ 0  0.500",
        "   └─ 0  0.200",
    ]


def test_the_chances_of_a_drawing_add_up_to_its_tokens_per_call(capsys) -> None:
    """The shipped draft states its own acceptance and trees."""
    for name in ("tree-8", "tree-32"):
        first, _, *nodes = run(["show", name], capsys).splitlines()
        chances = [float(line.split()[-1]) for line in nodes]
        assert len(chances) == int(name.removeprefix("tree-")) - 1
        length = float(first.split(", ")[2].split()[0])
        assert 1 + sum(chances) == pytest.approx(length, abs=0.02)


def test_compare_lists_tokens_per_call_and_marks_the_fastest(profile, tmp_path, capsys) -> None:
    table = tmp_path / "latency.json"
    table.write_text(h200_world().table.to_json())
    arguments = ["compare", "off", "chain-1", "tree-8", "--draft", "none", "--profile", profile]
    text = run([*arguments, "--latency", str(table), "--context", "100"], capsys)
    assert "odds x 0.5" in text
    (chain,) = [line for line in text.splitlines() if line.startswith("chain-1  ")][:1]
    assert chain.split()[3] == "1.50"
    rates = text.partition("tokens per second")[2]
    (tree,) = [line for line in rates.splitlines() if line.startswith("tree-8")]
    assert tree.split()[1].endswith("*"), "at batch 1 nodes are free"
    (plain,) = [line for line in rates.splitlines() if line.startswith("off")]
    assert "*" not in plain.split()[1]


def test_explain_derives_the_choice_of_a_dispatcher_from_its_state(tmp_path, capsys) -> None:
    world = h200_world()
    dispatcher = build_dispatcher(world)
    process, traffic = Acceptance(lambda _: DEFAULT_PROFILE), Traffic(lambda _: 16)
    Simulation(world, process, traffic, dispatcher, 0).run(300)
    path = tmp_path / "state.json"
    path.write_text(dispatcher.stats().state)
    text = run(["explain", str(path)], capsys)
    assert f"Choice: {dispatcher.held} ({dispatcher.stats().reason})." in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["explain", "missing.json"], "cannot read missing.json"),
        (["explain", __file__], "not the state of a dispatcher"),
        (["compare", "--draft", "none", "--latency", __file__], "not a latency table"),
        (["show", "tree-999", "--draft", "none"], "no tree is called"),
        (["show", "--draft", "none", "--profile", __file__], "is no acceptance profile"),
        (["show", "--draft", "nowhere"], "draft must be a folder"),
    ],
)
def test_a_bad_file_or_name_is_one_clear_line(arguments, part, capsys) -> None:
    assert main(["trees", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert part in captured.err
    assert captured.err.count("\n") == 1
