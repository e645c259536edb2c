"""Ray Train: two workers give the loss curve of one process."""

from pathlib import Path

import pytest

from engine.training.train_log import read_log
from tests.app.test_cli import run
from tests.app.test_cli_training import train, write_chats
from tests.app.tiny_model import write_random_model

# Ray Data warns about itself at import.
IGNORED = pytest.mark.filterwarnings("ignore::DeprecationWarning")
pytestmark = [pytest.mark.slow, pytest.mark.e2e, IGNORED]


def test_two_workers_train_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow", reason="needs the train extra", exc_type=ImportError)
    model, chats = tmp_path / "model", tmp_path / "chats.jsonl"
    model.mkdir()
    write_random_model(model)
    write_chats(chats, 24)
    outputs = []
    for num_workers in (1, 2):
        arguments = train(model, chats, tmp_path / str(num_workers), "--workers", str(num_workers))
        status, out, _ = run([*arguments, "--log-every", "1"], capsys)
        assert status == 0
        outputs.append(out.replace(str(tmp_path / str(num_workers)), ""))
    assert outputs[0] == outputs[1]
    for alone, shared in zip(read_log(tmp_path / "1"), read_log(tmp_path / "2"), strict=True):
        assert shared["step"] == alone["step"]
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_the_error_of_a_worker_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow", reason="needs the train extra", exc_type=ImportError)
    model, chats = tmp_path / "model", tmp_path / "chats.jsonl"
    model.mkdir()
    write_random_model(model)
    write_chats(chats, 2)
    status, _, err = run(
        train(model, chats, tmp_path / "run", "--workers", "2", "--row-length", "200"), capsys
    )
    assert status == 1
    assert "do not fill a batch" in err.splitlines()[-1]
