"""The command line: what it prints, its exit status, and one clear line where it fails."""

import dataclasses
import io
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app import cli_bench_synthetic
from app.cli import main
from app.cli_bench import judge
from app.cli_generate import Piece, pieces
from app.cli_serve import failure_reason
from app.tokenizer import Tokenizer
from engine import FinishReason, IncrementalDetokenizer, MeasuredProfile, SequenceDelta, StepError
from engine.draft.loader import load_draft, write_draft
from tests.app.harness import free_port, make_facts
from tests.app.test_bench import make_cell
from tests.app.tiny_model import write_random_draft, write_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tiny")
    write_random_model(folder)
    write_random_draft(folder / "draft")
    return ["--model", str(folder), "--draft", str(folder / "draft"), "--dtype", "float32"]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def expect_line(result: tuple[int, str, str], *parts: str) -> None:
    """The command failed with one line that holds `parts`."""
    status, out, err = result
    assert status == 1
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_generate_prints_the_answer_alone_and_its_speed_beside_it(
    model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "hello", *model, "--max-tokens", "12"]
    status, out, err = run(arguments, capsys)
    assert status == 0
    assert len(Tokenizer(Path(model[1])).encode(out.removesuffix("\n"), add_special_tokens=False)) >= 12
    assert out.endswith("\n")
    assert "tokens per call" not in out
    assert re.fullmatch(r"12 tokens in [0-9.]+ s: [0-9.]+ tokens/s, [0-9.]+ tokens per call\n", err)
    assert "\x1b" not in run([*arguments, "--show-drafts"], capsys)[1], "colours without a terminal"


@pytest.mark.parametrize("extra", [["--raw"], ["--temperature", "1", "--seed", "3"]])
def test_generate_says_the_same_with_and_without_speculation(
    model: list[str], capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    arguments = ["generate", "hello", *model, "--max-tokens", "40", *extra]
    texts = {run([*arguments, "--speculation", mode], capsys)[1] for mode in ("off", "tree-8")}
    assert len(texts) == 1


def test_accepted_drafts_are_told_from_the_targets_own_token(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("abcé", add_special_tokens=False)
    delta = SequenceDelta("r", token_ids[:3], 2, None, 1, 7, 2, 0)
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert list(pieces(detokenizer, delta)) == [Piece("ab", True), Piece("c", False)]
    last = SequenceDelta("r", token_ids[3:], 1, FinishReason.LENGTH, 2, 14, 3, 0)
    (piece,) = pieces(detokenizer, last)
    assert piece == Piece("é", False), "a character belongs to the token that completes it"
    assert Piece("x", True).coloured() == "\x1b[32mx\x1b[0m"


def test_bench_writes_the_documented_json(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", *model, "--batch", "1,2", "--max-tokens", "6", "--rounds", "2", "--tree", "tree-8"]
    status, out, err = run([*arguments, "--json"], capsys)
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert {"cpu", "torch", "dtype", "threads"} <= report["environment"].keys()
    assert [(cell["batch"], cell["arm"]) for cell in report["cells"]] == [
        (1, "off"),
        (1, "tree-8"),
        (2, "off"),
        (2, "tree-8"),
    ]
    expected = {"batch", "context", "arm", "tokens_per_second", "tokens_per_call", "speedup"}
    assert all({*expected, "ci_low", "ci_high"} <= cell.keys() for cell in report["cells"])
    assert report["identity"] == {"rows": 6, "identical_rows": 6, "share": 1.0, "gaps": [], "max_gap": 1e-3}


def test_bench_prints_a_table_at_the_asked_context(
    model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", *model, "--batch", "1", "--max-tokens", "4", "--rounds", "1", "--context", "300"]
    status, out, _ = run(arguments, capsys)
    assert status == 0
    (row,) = [line.split() for line in out.splitlines() if " auto " in line]
    assert abs(int(row[1]) - 300) <= 4
    assert "answers identical to plain decoding: 1 of 1" in out


def test_bench_answers_the_prompts_of_a_file_over_several_trees(
    model: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"turns": ["abcdefgh", "second"]}\n')
    arguments = ["bench", *model, "--batch", "2", "--max-tokens", "4", "--rounds", "1", "--json"]
    status, out, _ = run([*arguments, "--prompts", str(prompts), "--tree", "chain-2,tree-8"], capsys)
    assert status == 0
    report = json.loads(out)
    assert [cell["arm"] for cell in report["cells"]] == ["off", "chain-2", "tree-8"]
    assert report["identity"]["rows"] == 4
    texts = {
        len(Tokenizer(Path(model[1])).encode(text, add_special_tokens=False)) for text in ("a", "abcdefgh")
    }
    assert len(texts) == 2
    assert 2 * report["cells"][0]["context"] >= sum(texts)


def test_bench_of_a_synthetic_model_prints_cells_of_every_context_batch_and_temperature(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    monkeypatch.setattr(
        cli_bench_synthetic, "run_plan", lambda plan, source, out, folder: seen.append((plan, folder))
    )
    arguments = ["bench", "--synthetic", "llama-3.1-8b", "--batch", "1,64", "--context", "1k,8k"]
    arguments += [
        "--temperature",
        "0,0.8",
        "--tree",
        "chain-3,tree-6",
        "--trees",
        "6:3",
        "--out",
        str(tmp_path),
    ]
    status, _, err = run([*arguments, "--out", str(tmp_path)], capsys)
    assert (status, err) == (0, "")
    ((plan, folder),) = seen
    assert folder == tmp_path
    assert (plan.name, plan.tree_sizes, plan.sizes.block_size) == ("llama-3.1-8b", ((6, 3),), 64)
    assert len(plan.cells) == 8
    assert {cell.arms for cell in plan.cells} == {("off", "chain-3", "tree-6")}
    assert {(cell.context, cell.batch) for cell in plan.cells} == set(
        itertools.product((1024, 8192), (1, 64))
    )
    assert {(cell.temperature, cell.top_p) for cell in plan.cells} == {(0.0, 1.0), (0.8, 0.9)}


class FixedJudge:
    """Finds every divergence the same distance from a tie."""

    def __init__(self, distance: float) -> None:
        self.distance = distance

    def gap(self, tokens: tuple[int, ...], left: int, right: int) -> float:
        assert (tokens, left, right) == ((7, 8), 1, 2)
        return self.distance


@pytest.mark.parametrize(
    ("dtype", "distance", "is_fault"),
    [
        ("bfloat16", 0.3, False),
        ("bfloat16", 0.6, True),
        ("float32", 0.3, True),
        ("float32", 1e-5, False),
    ],
)
def test_answers_may_differ_only_where_the_logits_nearly_tie(
    dtype: str, distance: float, is_fault: bool
) -> None:
    cells = [make_cell("off", 4, 4), make_cell("tree-8", 4, 3)]
    identity = judge(cells, dataclasses.replace(make_facts(), dtype=dtype), lambda: FixedJudge(distance))
    assert (identity.rows, identity.identical_rows) == (4, 3)
    if is_fault:
        with pytest.raises(StepError, match="1 of 4 answers differ"):
            identity.check()
    else:
        identity.check()


def test_of_many_divergences_some_are_judged() -> None:
    cells = [make_cell("off", 1000, 1000), make_cell("tree-8", 1000, 400)]
    identity = judge(cells, make_facts(), lambda: FixedJudge(1e-5))
    assert (identity.rows, identity.identical_rows, len(identity.gaps)) == (1000, 400, 200)


def test_answers_that_all_agree_need_no_judge() -> None:
    cells = [make_cell("off", 4, 4), make_cell("tree-8", 4, 4)]
    identity = judge(cells, make_facts(), lambda: pytest.fail("nothing to judge"))
    identity.check()


def test_eval_reports_every_tree_on_the_answers_of_the_engine(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"turns": ["one", "two"], "category": "counting"}\n{"prompt": "three"}\n{"prompt": "four"}\n'
    )
    flags = ["--prompts", str(prompts), "--tree", "chain-3", "--trees", "chain-3,chain-5,tree-8"]
    arguments = ["eval", *model, *flags, "--max-tokens", "30", "--temperatures", "0,1"]
    profile = tmp_path / "profile.json"
    status, out, err = run([*arguments, "--json", "--limit", "2", "--profile", str(profile)], capsys)
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["num_prompts"] == 2
    for evaluation in report["evaluations"]:
        own, trees = evaluation["engine"], {row["tree"]: row for row in evaluation["trees"]}
        assert own["num_answers"] == 3
        assert (own["num_tokens"], own["num_calls"]) == (
            trees["chain-3"]["num_tokens"],
            trees["chain-3"]["num_calls"],
        )
        assert trees["chain-5"]["num_calls"] <= trees["chain-3"]["num_calls"]
        assert [name for name, _ in evaluation["categories"]] == ["counting"]
        assert all(row["low"] <= row["tokens_per_call"] <= row["high"] for row in evaluation["trees"])
    greedy, sampled = report["evaluations"]
    assert greedy["engine"]["tokens_per_call"] > 1.01, "the draft is never right: the test shows nothing"
    ceilings = [row["tokens_per_call"] for row in greedy["ceiling"]]
    assert ceilings[0] > 3.5, "a draft that ranks as the model does is always right at temperature 0"
    assert sampled["ceiling"][0]["tokens_per_call"] < ceilings[0]
    searched = json.loads(profile.read_text())
    assert MeasuredProfile.load(profile).probabilities[0][0] == searched["probabilities"][0][0]
    assert searched["counts"][0][0] == greedy["depths"][0]["accepted"][0]
    assert [part["temperature"] for part in searched["by_temperature"]] == [0.0, 1.0]
    text = run(arguments, capsys)[1]
    assert "temperature 1" in text
    assert "tree-8" in text


def test_pull_prints_the_folder(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", model[1]], capsys) == (0, f"{model[1]}\n", "")


def test_errors_are_one_line_each(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*arguments: str) -> tuple[int, str, str]:
        return run(list(arguments), capsys)

    expect_line(failed("generate", "x", "--model", str(tmp_path)), "config.json")
    expect_line(failed("generate", "x", *model, "--temperature", "-1"), "temperature")
    expect_line(failed("generate", "x", *model, "--speculation", "oak"), "oak", "tree-8")
    expect_line(failed("generate", "x" * 2000, *model), "context")
    expect_line(failed("generate", "x", *model[:2], "--draft", str(tmp_path / "no")), "draft")
    expect_line(failed("bench", *model[:2], "--draft", "none"), "no draft is loaded")
    expect_line(failed("bench", *model, "--tree", "off"), "baseline")
    expect_line(failed("bench", *model, "--tree", "tree-8,oak"), "'oak'", "tree-8")
    expect_line(failed("bench", *model, "--context", "1k,2k"), "--context")
    expect_line(failed("bench", *model, "--prompts", str(tmp_path / "no")), "cannot read")
    expect_line(failed("bench", "--synthetic", "gpt"), "llama-3.1-8b")
    expect_line(failed("bench", "--synthetic", "llama-3.1-8b", "--tokens-per-call", "9"), "chain-3")
    expect_line(failed("eval", *model, "--prompts", str(tmp_path / "no")), "cannot read")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}')
    expect_line(failed("eval", *model, "--prompts", str(prompts), "--trees", "oak"), "oak")
    expect_line(failed("eval", *model[:2], "--draft", "none", "--prompts", str(prompts)), "--draft")
    expect_line(failed("eval", *model, "--prompts", str(prompts), "--max-tokens", "2000"), "context")
    expect_line(failed("serve", "--config", str(tmp_path / "no")), "cannot read")
    expect_line(
        failed("serve", *model, "--speculation", "auto", "--max-num-seqs", "4", "--port", "0"), "port"
    )
    expect_line(failed("pull", "no-such-model"), "no-such-model")


def test_taken_port_is_told_before_ray_starts(
    model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("app.cli_serve._ray")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = run(["serve", *model, "--port", str(port)], capsys)
    expect_line(result, str(port), "taken", "--port")


@pytest.mark.parametrize(
    "arguments", [[], ["bench", "--batch", "0"], ["bench", "--rounds", "x"], ["eval"], ["nonsense"]]
)
def test_wrong_usage_is_status_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("damaged", ("model.safetensors has sha256", "fetch the draft again")),
        ("cut", ("model.safetensors has sha256",)),
        ("no-manifest", ("manifest.json",)),
        ("other-target", ("the draft was made for a target with vocabulary size 300, this target has 258",)),
    ],
)
def test_bad_draft_is_told_before_ray_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    parts: tuple[str],
) -> None:
    monkeypatch.delattr("app.cli_serve._ray")
    write_random_model(tmp_path)
    draft = tmp_path / "draft"
    write_random_draft(draft)
    weights = draft / "model.safetensors"
    if fault == "damaged":
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    elif fault == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif fault == "no-manifest":
        (draft / "manifest.json").unlink()
    else:
        loaded = load_draft(draft)
        config = dataclasses.replace(loaded.config, target_vocab_size=300)
        write_draft(config, {"fc.weight": torch.zeros(1)}, draft, {}, None)
    expect_line(
        run(["serve", "--model", str(tmp_path), "--draft", str(draft), "--port", str(free_port())], capsys),
        *parts,
    )


@pytest.mark.parametrize("table", [None, "[[1, oak-8]]"])
def test_unknown_tree_is_told_before_ray_starts(
    model: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    table: str | None,
) -> None:
    monkeypatch.delattr("app.cli_serve._ray")
    config = tmp_path / "server.yaml"
    config.write_text(
        f"port: {free_port()}\n" + (f"engine: {{speculation: {{table: {table}}}}}\n" if table else "")
    )
    arguments = ["serve", *model, "--config", str(config)]
    result = run([*arguments, *([] if table else ["--speculation", "oak-8"])], capsys)
    expect_line(result, "no tree is called 'oak-8': there are off, tree-8", "chain-1 to chain-15")


def test_help_and_generate_do_not_load_ray(model: list[str]) -> None:
    script = (
        "import sys; from app.cli import main\n"
        f"main({['generate', 'x', *model, '--max-tokens', '1']!r})\n"
        "assert 'ray' not in sys.modules and 'fastapi' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_reader_that_leaves_ends_the_command_quietly(model: list[str]) -> None:
    command = [sys.executable, "-m", "app.cli", "generate", "x", *model, "--max-tokens", "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""


def test_interrupt_ends_the_command_quietly(model: list[str]) -> None:
    command = [sys.executable, "-m", "app.cli", "generate", "x", *model, "--max-tokens", "900"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == 130


def test_reason_of_a_failed_start_is_the_engines_own() -> None:
    report = io.StringIO(
        "Traceback (most recent call last):\n  ...\n"
        "ray.exceptions.RayTaskError(ModelLoadError): ray::Replica\n"
        "engine.errors.ModelLoadError: model.safetensors must hold 10 bytes, found 3: is it truncated?\n"
    ).getvalue()
    assert str(failure_reason(report)) == "model.safetensors must hold 10 bytes, found 3: is it truncated?"
    assert "it burnt" in str(failure_reason("Traceback\nOSError: it burnt\n"))
