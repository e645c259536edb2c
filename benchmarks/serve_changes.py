"""Checks a deployment under load while it changes: a replica process killed, a draft replaced, replicas
scaled.

Prints one JSON object per scene: what was asked, what came back, and how long the change took. Timing tokens
is left to `eyas bench` and the load test. Run it alone on a machine: it starts a Ray of its own.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from app.proxy import QUICK_HOPS

APPLICATION = "eyas"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Plan:
    """What every scene serves and asks."""

    model: str
    draft: str
    other_draft: str
    num_streams: int
    num_tokens: int
    engine: dict[str, Any]


@dataclass
class Site:
    """A running deployment and how to change it."""

    plan: Plan
    port: int
    args: dict[str, Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(self, user_config: dict[str, Any], **args: Any) -> None:
        """Apply a configuration as a cluster does; what only `user_config` changes happens in place."""
        self.args |= args
        application = {
            "name": APPLICATION,
            "route_prefix": "/",
            "import_path": "app.main:build",
            "args": self.args,
            "deployments": [{"name": "llm-server", "user_config": user_config}],
        }
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(ServeDeploySchema(applications=[application]))

    async def status(self) -> dict[str, Any]:
        """Return the body of `/admin/status`, without any replica where none answers."""
        try:
            async with httpx.AsyncClient(timeout=30) as client:
                answer = await client.get(f"{self.url}/admin/status")
        except httpx.TransportError:
            return {"replicas": []}
        return dict(answer.json()) if answer.status_code == 200 else {"replicas": []}

    async def until(self, is_true: Callable[[dict[str, Any]], bool], seconds: float) -> float:
        """Wait for a status; return how long it took. Raises `TimeoutError`."""
        started = time.monotonic()
        while not is_true(await self.status()):
            if time.monotonic() - started > seconds:
                raise TimeoutError(f"the status did not come in {seconds:g} s: {await self.status()}")
            await asyncio.sleep(POLL_SECONDS)
        return time.monotonic() - started


@dataclass
class Load:
    """Streams that begin anew as soon as they end; what became of each, and of its text by seed."""

    site: Site
    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    texts: dict[int, set[str]] = field(default_factory=dict)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, change: Callable[[], Awaitable[None]]) -> None:
        """Keep all streams busy until the change is made, then let them end."""
        limits = httpx.Limits(max_connections=self.site.plan.num_streams)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            tasks = [
                asyncio.create_task(self._repeat(client, seed)) for seed in range(self.site.plan.num_streams)
            ]
            try:
                await asyncio.sleep(1.0)
                await change()
            finally:
                self.is_over.set()
                await asyncio.gather(*tasks)

    async def _repeat(self, client: httpx.AsyncClient, seed: int) -> None:
        while not self.is_over.is_set():
            await self._ask(client, seed)

    async def _ask(self, client: httpx.AsyncClient, seed: int) -> None:
        body = {
            "model": "served",
            "prompt": [10, 20, 30, seed % 200 + 40],
            "max_tokens": self.site.plan.num_tokens,
            "ignore_eos": True,
            "temperature": 0.8 * (seed % 2),
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with client.stream("POST", f"{self.site.url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode()
                    self._note(f"status {response.status_code}", text)
                    return
                lines = [line async for line in response.aiter_lines()]
                data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        except httpx.HTTPError as error:
            self._note("connection", repr(error))
            return
        self._judge(seed, data)

    def _judge(self, seed: int, data: list[str]) -> None:
        chunks = [json.loads(item) for item in data[:-1]] if data[-1:] == ["[DONE]"] else []
        errors = [chunk for chunk in chunks if "error" in chunk]
        if errors:
            is_clear = len(errors) == 1 and chunks[-1] is errors[0]
            self._note("one error event" if is_clear else "several errors", json.dumps(errors))
        elif not chunks or chunks[-1]["usage"]["completion_tokens"] != self.site.plan.num_tokens:
            self._note("cut", "".join(data[-2:]))
        else:
            self.ends["whole"] += 1
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
            self.texts.setdefault(seed, set()).add(text)

    def _note(self, end: str, text: str) -> None:
        self.ends[end] += 1
        self.errors.append(text[:300])

    def report(self) -> dict[str, Any]:
        changed = sum(len(texts) > 1 for texts in self.texts.values())
        return {"ends": dict(self.ends), "errors": self.errors[:3], "seeds_with_two_texts": changed}


async def check_kill(site: Site) -> dict[str, Any]:
    """Kill one of two replicas while both stream."""
    load, seconds = Load(site), 0.0

    async def kill() -> None:
        nonlocal seconds
        await site.until(all_stream, 60)
        os.kill(replica_pids()[0], signal.SIGKILL)
        killed = time.monotonic()
        async with httpx.AsyncClient(timeout=30) as client:
            # Before those that wait: their queue is not what is measured.
            body = {"model": "served", "prompt": [1, 2, 3], "max_tokens": 4, "priority": -1}
            while (await client.post(f"{site.url}/v1/completions", json=body)).status_code != 200:
                await asyncio.sleep(0.05)
        seconds = time.monotonic() - killed

    await load.run(kill)
    restored = await site.until(lambda status: len(status["replicas"]) == 2, 120)
    return load.report() | {
        "seconds_to_next_answer": round(seconds, 2),
        "seconds_to_two_replicas": round(restored, 2),
        "blocks_conserved": blocks_are_free(await site.status()),
    }


async def check_redeploy(site: Site) -> dict[str, Any]:
    """Replace the draft of every replica, then go back to the first, while they stream."""
    load, seconds = Load(site), []
    digests = [site_digest(site.plan.other_draft), site_digest(site.plan.draft)]

    async def redeploy() -> None:
        for folder, digest in zip((site.plan.other_draft, site.plan.draft), digests, strict=True):
            site.deploy({"draft": folder, "draft_digest": digest})
            seconds.append(await site.until(lambda status, digest=digest: all_serve(status, digest), 120))
            await asyncio.sleep(1.0)

    await load.run(redeploy)
    status = await site.status()
    swaps = [replica["draft"]["num_swaps"] for replica in status["replicas"]]
    return load.report() | {
        "seconds_to_swap": [round(value, 2) for value in seconds],
        "swaps": swaps,
        "blocks_conserved": blocks_are_free(status),
    }


async def check_scale(site: Site) -> dict[str, Any]:
    """Let the load ask for as many replicas as there may be, then take the load away."""
    load, seconds = Load(site), []
    most = int(site.args["autoscaling"]["max_replicas"])
    await site.until(lambda status: len(status["replicas"]) == 1, 60)

    async def wait_for_all() -> None:
        seconds.append(await site.until(lambda status: len(status["replicas"]) == most, 180))
        await asyncio.sleep(2.0)

    async def wait_for_one() -> None:
        seconds.append(await site.until(lambda status: len(status["replicas"]) == 1, 240))

    await load.run(wait_for_all)
    # A single stream goes on: the replica that ends may have it.
    calm = Load(dataclasses.replace(site, plan=dataclasses.replace(site.plan, num_streams=1)))
    await calm.run(wait_for_one)
    load.ends.update(calm.ends)
    load.errors += calm.errors
    return load.report() | {
        "seconds_up": round(seconds[0], 2),
        "seconds_down": round(seconds[1], 2),
        "blocks_conserved": blocks_are_free(await site.status()),
    }


SCENES: dict[str, tuple[Callable[[Site], Awaitable[dict[str, Any]]], dict[str, Any]]] = {
    "kill": (check_kill, {"num_replicas": 2}),
    "redeploy": (check_redeploy, {"num_replicas": 2}),
    "scale": (check_scale, {"autoscaling": {"max_replicas": 3, "downscale_after_s": 2.0}}),
}


def all_serve(status: dict[str, Any], digest: str) -> bool:
    drafts = [replica["draft"] for replica in status["replicas"]]
    return len(drafts) == 2 and all(
        draft["digest"] == digest and draft["state"] == "serving" for draft in drafts
    )


def all_stream(status: dict[str, Any]) -> bool:
    """Return whether both replicas are amid streams, so that killing either breaks some."""
    replicas = status["replicas"]
    return len(replicas) == 2 and all(replica["requests"]["running"] >= 2 for replica in replicas)


def blocks_are_free(status: dict[str, Any]) -> bool:
    """Whether no replica holds or lost a block."""
    memories = [replica["memory"] for replica in status["replicas"]]
    return all(m["num_free"] + m["num_cached"] == m["num_blocks"] for m in memories)


def site_digest(folder: str) -> str:
    manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    return str(manifest["files"]["model.safetensors"])


def replica_pids() -> list[int]:
    """Return the processes of server replicas that belong to our Ray."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                is_replica = b"ServeReplica:eyas:llm-server" in (folder / "cmdline").read_bytes()
                environment = (folder / "environ").read_bytes()
            except OSError:  # it ended while we looked
                continue
            if is_replica and f"EYAS_CHANGES={os.getpid()}".encode() in environment:
                found.append(int(folder.name))
    return sorted(found)


@contextmanager
def running(plan: Plan, args: dict[str, Any]) -> Iterator[Site]:
    """Run a deployment on a Ray of its own."""
    os.environ["EYAS_CHANGES"] = str(os.getpid())
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name, value in QUICK_HOPS.items():  # as `eyas serve` does
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        base = {"model": plan.model, "served_model_name": "served", "draft": plan.draft}
        site = Site(plan, port, base | {"engine": plan.engine} | args)
        site.deploy({})
        yield site
    finally:
        serve.shutdown()
        ray.shutdown()


async def play(site: Site, scene: str) -> dict[str, Any]:
    """Wait for the deployment, then run one scene."""
    num_replicas = site.args.get("num_replicas", 1)
    ready = await site.until(lambda status: len(status["replicas"]) == num_replicas, 180)
    return {"scene": scene, "seconds_to_ready": round(ready, 2)} | await SCENES[scene][0](site)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenes", nargs="*", help=f"of {', '.join(SCENES)}; all by default")
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True, help="a folder")
    parser.add_argument("--other-draft", required=True, help="a folder")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--memory-gib", type=float, default=0.05, help="of cache, per replica")
    options = parser.parse_args(arguments)
    # Not `choices`: argparse of Python 3.11 holds no name at all against them, too.
    if unknown := set(options.scenes) - set(SCENES):
        parser.error(f"no scene is called {', '.join(sorted(unknown))}: there are {', '.join(SCENES)}")
    options.scenes = options.scenes or list(SCENES)
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    engine = {
        "max_num_seqs": options.max_num_seqs,
        "memory_gib": options.memory_gib,
        "num_threads": 1,
        "dtype": "float32",
    }
    plan = Plan(options.model, options.draft, options.other_draft, options.streams, options.tokens, engine)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["EYAS_CACHE"] = os.environ.get("EYAS_CACHE", cache)
        # Scenes of the same deployment share one.
        for _, scenes in itertools.groupby(options.scenes, key=lambda scene: json.dumps(SCENES[scene][1])):
            names = list(scenes)
            with running(plan, SCENES[names[0]][1]) as site:
                for name in names:
                    sys.stdout.write(json.dumps(asyncio.run(play(site, name))) + "\n")
                    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
