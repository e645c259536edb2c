"""The kept state: changed by one of several processes at a time, whole after a kill, refused when corrupt."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ops.rollout.state import DraftRef, Phase, RolloutError, RolloutState, parse_state
from ops.rollout.state_store import ConflictError, FileStore

STATE = RolloutState(
    "d" * 64,
    Phase.WATCHING,
    DraftRef(None, "old"),
    DraftRef("/drafts/new", "new"),
    ("r1",),
    3,
    "because",
    ("a -> b: c",),
)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "deep" / "rollout.json")


def test_a_state_comes_back_as_it_was_kept(store):
    assert store.load() is None
    kept = store.replace(STATE, None)
    assert store.load() == kept
    assert parse_state(STATE.to_json()) == kept.state == STATE


def test_a_change_that_does_not_name_the_kept_version_is_refused(store):
    first = store.replace(STATE, None)
    with pytest.raises(ConflictError):
        store.replace(STATE, None)
    second = store.replace(STATE.to(Phase.PROMOTING, "x"), first.version)
    with pytest.raises(ConflictError):
        store.replace(STATE, first.version)
    assert store.load() == second


def test_one_of_many_writers_wins_each_round(store):
    kept = store.replace(STATE, None)
    for _ in range(5):
        outcomes: list[bool] = []

        def write(name: str, version: str = kept.version, outcomes: list[bool] = outcomes) -> None:
            try:
                store.replace(STATE.to(Phase.PAUSED, name), version)
                outcomes.append(True)
            except ConflictError:
                outcomes.append(False)

        writers = [threading.Thread(target=write, args=(f"writer {idx}",)) for idx in range(8)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert sorted(outcomes) == [False] * 7 + [True]
        kept = store.load()


WRITER = """
import sys
from pathlib import Path
from ops.rollout.state import DraftRef, Phase, RolloutState
from ops.rollout.state_store import FileStore
store = FileStore(Path(sys.argv[1]))
state = RolloutState("d", Phase.WATCHING, DraftRef(None, None), DraftRef(None, None), reason="x" * 100_000)
kept = store.replace(state, None)
print("ready", flush=True)
while True:
    kept = store.replace(state.to(Phase.WATCHING, "y" * 100_000), kept.version)
"""


def test_a_kill_while_writing_leaves_a_whole_state_and_no_lock(tmp_path, pytestconfig):
    path = tmp_path / "rollout.json"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        cwd=pytestconfig.rootpath,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGKILL)
    kept = FileStore(path).load()
    assert set(kept.state.reason) in ({"x"}, {"y"})
    assert FileStore(path).replace(STATE, kept.version).state == STATE


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '{"version": "1", "state": {"phase": "flying"}}', b"\xff\xfe\x00".decode("latin-1")],
)
def test_a_corrupt_file_is_told(text, tmp_path):
    (tmp_path / "rollout.json").write_text(text, encoding="latin-1")
    with pytest.raises(RolloutError):
        FileStore(tmp_path / "rollout.json").load()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_looks", "3"), ("num_looks", True), ("canary", ["r1", 2]), ("canary", "r1")),
        *(("history", None), ("reason", None), ("draft", 7), ("candidate", [])),
        ("stable", {"folder": 1, "digest": None}),
    ],
)
def test_a_state_of_other_types_is_told_at_once(key, value):
    values = json.loads(STATE.to_json())
    with pytest.raises(RolloutError, match="is corrupt"):
        parse_state(json.dumps(values | {key: value}))


def test_a_version_that_is_no_number_is_told_before_anything_is_kept(store):
    store.replace(STATE, None)
    store._path.write_text(store._path.read_text().replace('"version": "1"', '"version": "v1"'))
    with pytest.raises(RolloutError, match="no state of a rollout"):
        store.replace(STATE, "v1")


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RolloutError, match="cannot"):
        FileStore(tmp_path / "file" / "rollout.json").replace(STATE, None)
