"""`eyas rollout` over real Serve: two replicas of a tiny model, eight streams, and no request may fail.

How a rollout decides and what it keeps is left to `tests/ops/rollout`.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from ops.registry.entry import stored_file
from ops.rollout.dashboard import APPLICATIONS
from ops.rollout.serve_target import parse_replicas
from ops.rollout.state import Phase
from ops.rollout.state_store import FileStore
from tests.app.harness import free_port
from tests.app.tiny_model import write_random_draft, write_random_model
from tests.k8s.queries import dashboard_queries, exported, recorded, rule_queries, unknown_metrics

pytestmark = pytest.mark.e2e

NUM_STREAMS = 8
CLUSTER = """
import signal, sys, ray
from ray import serve
ray.init(address="local", num_cpus=4, include_dashboard=True, dashboard_port=int(sys.argv[1]),
    object_store_memory=80 * 2**20, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])}, proxy_location="HeadOnly")
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
ray.shutdown()
"""


def damage(draft: Path, copy: Path, factor: float) -> Path:
    """Write a head whose fused features point elsewhere, so that it is hardly ever right."""
    shutil.copytree(draft, copy)
    weights = load_file(copy / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"].flip(0) * factor
    save_file(weights, copy / "model.safetensors")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = stored_file(copy / "model.safetensors").sha256
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


@dataclass
class Site:
    """A cluster, the folders around it, and the command line that works on them."""

    folder: Path
    dashboard: str
    server: str
    registry: Path
    state: Path
    environment: dict[str, str]
    ids: dict[str, str] = field(default_factory=dict)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "app.cli", *arguments]

    def rollout(self, action: str, *arguments: str) -> list[str]:
        where = ["--dashboard", self.dashboard, "--server", self.server, "--state", str(self.state)]
        drafts = ["--model", str(self.folder / "tiny"), "--registry", str(self.registry)]
        pace = ["--window", "0.7", "--windows", "6", "--looks", "8", "--follow", "60", "--margin", "0.1"]
        pace += ["--time-margin", "9"]  # other tests share the machine: acceptance alone is steady here
        return self.command("rollout", action, *arguments, *where, *drafts, *pace)

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=200, check=False
        )

    def digests(self) -> list[str | None]:
        return [replica.digest for replica in parse_replicas(httpx.get(f"{self.server}/metrics").text)]


@dataclass
class Streams:
    """Clients that stream one answer after the other until told to stop."""

    url: str
    is_over: threading.Event = field(default_factory=threading.Event)
    answers: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def stream(self, number: int) -> None:
        for round_idx in itertools.count():
            if self.is_over.is_set():
                return
            body = {
                "model": "tiny",
                "prompt": [10 + number, 20, 30 + round_idx % 100],
                "max_tokens": 150,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            try:
                with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as answer:
                    lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
                usage = json.loads(lines[-1].removeprefix("data: "))["usage"]["completion_tokens"]
                self.answers.append(usage)
                if usage != 150:
                    self.faults.append(lines[-1])
            except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
                self.faults.append(repr(error))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("rollout")
    (folder / "tiny").mkdir()
    write_random_model(folder / "tiny")
    write_random_draft(folder / "good")
    for name, factor in (("poor", 1.0), ("worse", -1.0)):
        damage(folder / "good", folder / name, factor)
    ports = free_port(), free_port()
    environment = os.environ | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "EYAS_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    site = Site(folder, *urls, folder / "registry", folder / "rollout.json", environment)
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, *map(str, ports)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            deploy(site)
            for name in ("poor", "good", "worse"):
                added = site.run(
                    site.command(
                        *("draft", "add", str(folder / name), "--model", str(folder / "tiny")),
                        *("--registry", str(site.registry)),
                    )
                )
                assert added.returncode == 0, added.stderr
                site.ids[name] = added.stdout.strip()
            yield site
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def deploy(site: Site) -> None:
    """Ask for two replicas with the poor draft, as `serve deploy` does, and wait for them."""
    arguments = {
        "model": str(site.folder / "tiny"),
        "draft": str(site.folder / "poor"),
        "served_model_name": "tiny",
        "num_replicas": 2,
        "routing": "queue",
        "engine": {"dtype": "float32", "num_threads": 1, "speculation": {"mode": "chain-3"}},
    }
    application = {"name": "eyas", "import_path": "app.main:build", "args": arguments}
    port = int(site.server.rpartition(":")[2])
    body = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    deadline = time.monotonic() + 120
    answer = httpx.put(f"{site.dashboard}{APPLICATIONS}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    while httpx.get(f"{site.server}/metrics", timeout=30).status_code != 200 or len(site.digests()) != 2:
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.fixture
def streams(site: Site) -> Iterator[Streams]:
    """Eight streams that run all the time; none may fail."""
    streams = Streams(site.server)
    threads = [threading.Thread(target=streams.stream, args=(number,)) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    yield streams
    streams.is_over.set()
    for thread in threads:
        thread.join()
    assert streams.faults == []
    assert len(streams.answers) > 2 * NUM_STREAMS


def weights(site: Site, name: str) -> str:
    return stored_file(site.folder / name / "model.safetensors").sha256


def test_drafts_are_promoted_rolled_back_and_refused_while_streams_run(site, streams):
    assert site.digests() == [weights(site, "poor")] * 2
    good = site.run(site.rollout("start", site.ids["good"][:12]))
    assert good.returncode == 0, good.stderr + good.stdout
    assert site.digests() == [weights(site, "good")] * 2
    worse = site.run(site.rollout("start", site.ids["worse"][:12]))
    assert worse.returncode == 3, worse.stderr + worse.stdout
    assert worse.stdout.startswith("rolled-back: ")
    assert site.digests() == [weights(site, "good")] * 2
    refused_before_any_replica_sees_it(site)
    known = exported(httpx.get(f"{site.server}/metrics").text) | recorded()
    assert unknown_metrics(rule_queries() + dashboard_queries(), known) == set()


def refused_before_any_replica_sees_it(site: Site) -> None:
    before = httpx.get(f"{site.dashboard}{APPLICATIONS}").json()["applications"]["eyas"][
        "deployed_app_config"
    ]
    path = site.registry / site.ids["poor"] / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    corrupt = site.run(site.rollout("start", site.ids["poor"][:12]))
    path.write_bytes(data)
    assert corrupt.returncode == 3
    assert corrupt.stdout.startswith(f"failed: draft {site.ids['poor']} is corrupt")
    other = site.folder / "other"
    shutil.copytree(site.folder / "tiny", other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    command = site.rollout("start", site.ids["poor"][:12])
    command[command.index("--model") + 1] = str(other)
    foreign = site.run(command)
    assert foreign.returncode == 3
    assert "was added for another model" in foreign.stdout
    after = httpx.get(f"{site.dashboard}{APPLICATIONS}").json()["applications"]["eyas"]["deployed_app_config"]
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "name", "end"), [("good", "worse", Phase.ROLLED_BACK), ("poor", "good", Phase.SUCCEEDED)]
)
def test_a_killed_rollout_is_taken_up_after_every_phase(before, name, end, site, streams):
    store = FileStore(site.state)
    bring(site, store, before)
    killed: list[Phase] = []
    while True:
        process = subprocess.Popen(
            site.rollout("start", site.ids[name]), env=site.environment, stdout=subprocess.DEVNULL
        )
        phase = next_phase(store, process, site.ids[name], killed)
        if phase is None:
            break
        process.kill()
        process.wait()
        killed.append(phase)
    state = store.load().state
    assert state.phase is end, state
    assert len(killed) >= 4
    serving = name if end is Phase.SUCCEEDED else before
    assert site.digests() == [weights(site, serving)] * 2


@pytest.mark.slow
def test_a_canary_that_is_killed_leads_back(site):
    """While it is replaced the metrics page of all replicas fails; its streams may, so there are none."""
    before, draft = site.digests(), site.ids["worse"]
    with subprocess.Popen(
        site.rollout("start", draft), env=site.environment, stdout=subprocess.PIPE, text=True
    ) as process:
        while next_phase(FileStore(site.state), process, draft, []) is not Phase.WATCHING:
            assert process.poll() is None
        state = FileStore(site.state).load().state
        server = httpx.get(f"{site.dashboard}{APPLICATIONS}").json()["applications"]["eyas"]["deployments"][
            "llm-server"
        ]
        (pid,) = [one["pid"] for one in server["replicas"] if one["replica_id"].endswith(state.canary[0])]
        os.kill(pid, signal.SIGKILL)
        told = process.stdout.read()
    assert process.returncode == 3, told
    assert told.startswith(f"rolled-back: error: canary replica {state.canary[0]} is gone")
    config = httpx.get(f"{site.dashboard}{APPLICATIONS}").json()["applications"]["eyas"][
        "deployed_app_config"
    ]
    (deployment,) = config["deployments"]
    assert not [key for key in deployment["user_config"] if key.startswith("canary")]
    deadline = time.monotonic() + 60
    while httpx.get(f"{site.server}/metrics", timeout=30).status_code != 200 or site.digests() != before:
        assert time.monotonic() < deadline, "the replica that takes its place drafts as before"
        time.sleep(0.5)


def bring(site: Site, store: FileStore, name: str) -> None:
    """Have all replicas serve a draft, whatever a verdict would be: by promoting it while it is watched."""
    if site.digests() == [weights(site, name)] * 2:
        return
    process = subprocess.Popen(
        site.rollout("start", site.ids[name]), env=site.environment, stdout=subprocess.DEVNULL
    )
    while (kept := store.load()) is None or kept.state.draft != site.ids[name] or not kept.state.is_over:
        if kept is not None and kept.state.draft == site.ids[name] and kept.state.phase is Phase.WATCHING:
            process.kill()
            assert site.run(site.rollout("promote")).returncode == 0
        time.sleep(0.1)
    process.wait()
    assert site.digests() == [weights(site, name)] * 2


def next_phase(store: FileStore, process: subprocess.Popen, draft: str, killed: list[Phase]) -> Phase | None:
    """Wait for a phase that no process was killed in; None where the rollout is over."""
    while process.poll() is None:
        kept = store.load()
        is_ours = kept is not None and kept.state.draft == draft and not kept.state.is_over
        if is_ours and kept.state.phase not in killed:
            return kept.state.phase
        time.sleep(0.005)
    return None
