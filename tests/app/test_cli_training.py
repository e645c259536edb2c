"""The commands that make a draft, from a user's files to a folder that `--draft` loads."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.training.checkpoint import checkpoint_paths
from engine.training.dataset import shard_paths
from engine.training.online import OnlineDistillation
from engine.training.train_log import read_log
from tests.app.test_cli import expect_line, run
from tests.app.tiny_model import write_random_model

SMALL = ["--layers", "1", "--unroll-steps", "2", "--batch-rows", "2", "--row-length", "64"]
FLOAT32 = ["--dtype", "float32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_random_model(folder)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write_chats(path, 24)
    return path


def write_chats(path: Path, num_chats: int) -> None:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{idx}?"},
                {"role": "assistant", "content": f"{idx} it is."},
            ]
        }
        for idx in range(num_chats)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def train(model: Path, data: Path, out: Path, *extra: str, steps: int = 6) -> list[str]:
    target = ["train", "--model", str(model), "--data", str(data), "--out", str(out)]
    return [*target, "--steps", str(steps), *SMALL, *FLOAT32, *extra]


def test_a_trained_draft_serves_its_model(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(train(model, chats, tmp_path / "run", "--regenerate", steps=12), capsys)
    assert (status, err) == (0, "")
    assert "tokens per call" in out
    draft = tmp_path / "run" / "draft"
    common = ["--model", str(model), "--draft", str(draft), "--dtype", "float32"]
    status, out, _ = run(["eval", *common, "--prompts", str(chats), "--limit", "2", "--json"], capsys)
    assert status == 0
    assert json.loads(out)["num_prompts"] == 2
    answers = {
        run(["generate", "3?", *common, "--speculation", tree, "--max-tokens", "20"], capsys)[1].rpartition(
            "\n\n"
        )[0]
        for tree in ("off", "tree-8", "tree-64")
    }
    assert len(answers) == 1
    manifest = json.loads((draft / "manifest.json").read_text())
    assert manifest["training"]["num_steps"] == 12
    assert set(manifest["measured"]) == {"chain-3", "chain-5", "chain-7"}


@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
def test_a_run_that_is_stopped_goes_on_to_the_end_of_an_unstopped_one(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], head: str
) -> None:
    flags = ("--head", head, "--log-every", "1", "--checkpoint-every", "2")
    run(train(model, chats, tmp_path / "whole", *flags), capsys)
    assert train_until_killed(train(model, chats, tmp_path / "cut", *flags), tmp_path / "cut", num_steps=3)
    assert run(train(model, chats, tmp_path / "cut", *flags), capsys)[0] == 0
    whole, cut = (
        [(entry["step"], entry["loss"]) for entry in read_log(tmp_path / name)] for name in ("whole", "cut")
    )
    assert whole == cut


def train_until_killed(arguments: list[str], folder: Path, num_steps: int) -> bool:
    """Start a run and kill it without warning after `num_steps` steps; return whether it had more to do."""
    script = (
        "import time, engine.training.trainer as t; from app.cli import main\n"
        "step = t.Trainer.train_step\n"
        "def slow(self):\n    time.sleep(0.3 * (self.step >= 3))\n    return step(self)\n"
        f"t.Trainer.train_step = slow\nmain({arguments!r})\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], env=os.environ) as process:
        deadline = time.monotonic() + 60
        while len(read_log(folder)) < num_steps and time.monotonic() < deadline:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    return process.returncode == -signal.SIGKILL and not (folder / "draft").exists()


def test_a_run_out_of_time_saves_and_says_how_to_go_on(
    model: Path,
    chats: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = train(model, chats, tmp_path, "--log-every", "2", steps=8)
    monkeypatch.setattr("engine.training.trainer.time.perf_counter", iter(range(0, 10**6, 100)).__next__)
    status, out, _ = run([*arguments, "--max-seconds", "1"], capsys)
    assert status == 0
    assert "stopped after step 2 of 8; run again to go on" in out
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["checkpoint-0000002.safetensors"]
    assert "tokens per call" in run(arguments, capsys)[1]


def test_bad_data_is_told_in_one_line(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(data: Path, *extra: str) -> tuple[int, str, str]:
        return run(train(model, data, tmp_path / "run", *extra), capsys)

    empty, mixed, few = (tmp_path / name for name in ("empty.jsonl", "mixed.jsonl", "few.jsonl"))
    empty.write_text("\n")
    mixed.write_text(chats.read_text() + '{"prompt": "and this?"}\n')
    write_chats(few, 1)
    expect_line(failed(tmp_path / "no"), "JSONL file or a folder of shards")
    expect_line(failed(empty), "holds no prompt")
    expect_line(failed(mixed), "--regenerate")
    expect_line(failed(few), "do not fill a batch")
    expect_line(failed(tmp_path), "data.json")
    expect_line(failed(chats), "holds data of another file")
    expect_line(failed(chats, "--learning-rate", "nan"), "learning_rate")
    arguments = train(model, chats, tmp_path / "other", "--draft-vocab", "999")
    expect_line(run(arguments, capsys), "vocabulary")
    assert checkpoint_paths(tmp_path / "run") == []


@pytest.mark.parametrize("damage", ["truncated", "foreign token", "no card", "other tokenizer"])
def test_damaged_data_is_told_in_one_line(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    out = tmp_path / "run"
    assert run(train(model, chats, out), capsys)[0] == 0
    (shard,) = shard_paths(out / "data")
    content = shard.read_bytes()
    match damage:
        case "truncated":
            shard.write_bytes(content[:-3])
        case "foreign token":
            header = int.from_bytes(content[:8], "little")
            place = content.index(b'"token_ids"')
            start = json.loads(content[8 : 8 + header])["token_ids"]["data_offsets"][0]
            assert place < header
            byte = 8 + header + start + 2
            shard.write_bytes(content[:byte] + b"\x7f" + content[byte + 1 :])
        case "no card":
            (out / "data" / "data.json").unlink()
        case _:
            card = out / "data" / "data.json"
            card.write_text(card.read_text().replace('"tokenizer_digest": "', '"tokenizer_digest": "0'))
    expected = {
        "truncated": "shard-00000000",
        "foreign token": "corrupt",
        "no card": "data.json",
        "other tokenizer": "tokenizer",
    }
    expect_line(run(train(model, out / "data", tmp_path / "again"), capsys), expected[damage])


def test_a_loss_that_is_not_finite_keeps_the_checkpoints_before_it(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = train(model, chats, tmp_path, "--checkpoint-every", "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnlineDistillation, "loss", spoil_after(3))
        expect_line(run(arguments, capsys), "not finite at step 3", "last checkpoint")
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["checkpoint-0000002.safetensors"]
    assert run(arguments, capsys)[0] == 0


def spoil_after(num_steps: int) -> Callable[..., object]:
    """Return the loss of a distillation that is infinite from a step on."""
    plain, steps = OnlineDistillation.loss, itertools.count()

    def loss(self: OnlineDistillation, *arguments: object) -> object:
        value, survivors = plain(self, *arguments)
        return (value if next(steps) < num_steps else value * torch.inf), survivors

    return loss


def test_other_settings_do_not_go_on_from_a_checkpoint(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(train(model, chats, tmp_path), capsys)
    expect_line(
        run(train(model, chats, tmp_path, "--learning-rate", "0.1"), capsys), "learning_rate was 0.003"
    )
    expect_line(run(train(model, chats, tmp_path, "--layers", "2"), capsys), "head")


def test_synth_writes_what_train_reads(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(model), "--dtype", "float32", "--batch", "8", "--max-length", "150"]
    arguments = ["synth", *flags, "--out", str(tmp_path / "data"), "--dialogues", "30", "--wave", "15"]
    status, out, err = run(arguments, capsys)
    assert (status, err) == (0, "")
    assert "dialogues of" in out
    assert run(train(model, tmp_path / "data", tmp_path / "run"), capsys)[0] == 0
    expect_line(run([*arguments, "--seed", "7"], capsys), "fresh folder")


def test_synth_answers_the_chats_of_a_file(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "synth",
        "--model",
        str(model),
        "--out",
        str(tmp_path),
        "--prompts",
        str(chats),
        "--max-length",
        "60",
    ]
    assert "24 dialogues" in run(arguments, capsys)[1]


def test_quantize_prints_what_it_costs(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(train(model, chats, tmp_path / "run"), capsys)
    source = str(tmp_path / "run" / "draft")
    arguments = ["draft", "quantize", source, "--model", str(model), "--out", str(tmp_path / "small")]
    measured = ["--prompts", str(chats), "--limit", "2", "--max-tokens", "20", *FLOAT32]
    status, out, err = run([*arguments, "--group-size", "16", "--head", *measured], capsys)
    assert (status, err) == (0, "")
    assert "head_rows: relative error 0.0" in out
    assert "chain-3" in out
    refused = run([*arguments, "--group-size", "17", *measured], capsys)
    assert refused[0] == 1
    assert "group size" in refused[2]


def test_a_head_goes_out_and_in_by_the_command_line(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(train(model, chats, tmp_path / "run"), capsys)
    for action, source, out, extra in (
        ("export", tmp_path / "run" / "draft", tmp_path / "out", ["--format", "speculators"]),
        ("import", tmp_path / "out", tmp_path / "in", []),
    ):
        arguments = ["draft", action, str(source), "--model", str(model), "--out", str(out), *extra]
        assert run(arguments, capsys)[0] == 0
    generate = ["generate", "3?", "--model", str(model), "--draft", str(tmp_path / "in"), *FLOAT32]
    assert run([*generate, "--max-tokens", "5"], capsys)[0] == 0
    arguments = ["draft", "export", str(tmp_path / "in"), "--model", str(model), "--out", str(tmp_path / "x")]
    expect_line(run([*arguments, "--format", "eagle1"], capsys), "eagle1")
