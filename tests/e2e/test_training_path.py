"""The first lines of docs/training.md do what they say: a draft is trained, measured and served."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.app.harness import free_port

pytestmark = pytest.mark.e2e

LIMIT_SECONDS = 300


def commands(root: Path) -> list[str]:
    """Return the lines that a reader types, of the first console block."""
    text = (root / "docs" / "training.md").read_text(encoding="utf-8")
    block = text.partition("```console\n")[2].partition("```")[0]
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture
def shell(tmp_path: Path, pytestconfig: pytest.Config) -> dict[str, str]:
    """The environment of a shell in which `eyas` and `python` are this checkout's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, arguments in (("eyas", "-m app.cli "), ("python", "")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        script.chmod(0o755)
    (tmp_path / "benchmarks").symlink_to(pytestconfig.rootpath / "benchmarks")
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(pytestconfig.rootpath)}


def test_the_path_of_a_user_works(tmp_path: Path, shell: dict[str, str], pytestconfig: pytest.Config) -> None:
    begin = time.monotonic()
    *before, serve = commands(pytestconfig.rootpath)
    assert [re.split(r"\s", line)[1] for line in before if line.startswith("eyas")] == ["train", "eval"]
    outputs = []
    for line in before:
        ended = subprocess.run(
            line, shell=True, cwd=tmp_path, env=shell, text=True, capture_output=True, check=False
        )
        assert ended.returncode == 0, (line, ended.stderr)
        outputs.append(ended.stdout)
    assert "tokens per call" in outputs[-2]
    found = re.search(r"chain-3 +([\d.]+)", outputs[-1])
    assert found is not None
    assert float(found[1]) > 1.1
    check_server(serve, tmp_path, shell)
    assert time.monotonic() - begin < LIMIT_SECONDS


def check_server(serve: str, folder: Path, shell: dict[str, str]) -> None:
    """The served draft is used, and an answer is the same with and without it."""
    port = free_port()
    with (folder / "serve.log").open("w") as log:
        line = f"exec {serve} --port {port} --dtype float32"
        process = subprocess.Popen(line, shell=True, cwd=folder, env=shell, stdout=log, stderr=log)
        try:
            while "serving" not in (folder / "serve.log").read_text():
                assert process.poll() is None, (folder / "serve.log").read_text()
                time.sleep(0.2)
            url = f"http://127.0.0.1:{port}"
            body = {"model": "tiny", "prompt": "What is 7 plus 7?", "max_tokens": 40, "temperature": 0}
            texts = set()
            for tree in ("off", "tree-8"):
                reply = httpx.post(f"{url}/v1/completions", json=body | {"speculation": tree}, timeout=60)
                texts.add(json.dumps(reply.json()["choices"][0]["text"]))
            assert len(texts) == 1
            assert "eyas_accepted_draft_tokens_total" in httpx.get(f"{url}/metrics", timeout=20).text
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                process.kill()
