"""The Serve config inside each RayService: accepted by Ray's schema and by ours, and it runs here.

Kubernetes' side of the object is left to `test_render`.
"""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import httpx
import pytest
import yaml

from app.config import ServerConfig
from tests.app.tiny_model import write_random_model
from tests.k8s.rendered import SERVING, pods, ray_service, serve_config
from tests.k8s.smoke import smoke

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own deprecated use of pydantic, while it is imported
    from ray.serve.schema import ServeDeploySchema

    from app.main import SERVER, build

START_SECONDS = 240  # on a machine that is busy with other tests


@pytest.mark.parametrize("overlay", SERVING)
def test_ray_accepts_the_serve_config(overlay):
    schema = ServeDeploySchema.model_validate(serve_config(overlay))
    assert [application.name for application in schema.applications] == ["eyas"]


@pytest.mark.parametrize("overlay", SERVING)
def test_the_application_exists_and_accepts_its_arguments(overlay):
    (application,) = serve_config(overlay)["applications"]
    module, _, name = application["import_path"].partition(":")
    found = getattr(importlib.import_module(module), name)
    assert found is build
    ingress = build(ServerConfig.model_validate(application["args"]))._bound_deployment
    names = {deployment["name"] for deployment in application["deployments"]}
    assert names == {ingress.name, SERVER}


@pytest.mark.parametrize("overlay", SERVING)
def test_a_replica_fits_on_a_pod_and_all_replicas_have_one(overlay):
    (application,) = serve_config(overlay)["applications"]
    (server,) = [pod for pod in pods(overlay) if pod.name == "server"]
    requests = server.containers[0]["resources"]["requests"]
    assert application["args"].get("num_gpus", 0) == int(requests.get("nvidia.com/gpu", 0))
    (group,) = ray_service(overlay)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (deployment,) = [d for d in application["deployments"] if d["name"] == "llm-server"]
    config = ServerConfig.model_validate(application["args"])
    assert deployment["max_replicas_per_node"] == 1
    assert group["maxReplicas"] == (config.autoscaling.max_replicas or config.num_replicas)
    assert group["minReplicas"] == config.autoscaling.min_replicas


@pytest.mark.parametrize("overlay", SERVING)
def test_what_always_runs_fits_on_the_fewest_pods(overlay):
    """Else another GPU is held for good, or the application is never ready where there is none."""
    (application,) = serve_config(overlay)["applications"]
    (group,) = ray_service(overlay)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    for deployment in application["deployments"]:
        least = deployment.get("num_replicas", 1)
        assert least <= group["minReplicas"] * deployment.get("max_replicas_per_node", least), deployment


def test_the_files_that_the_config_names_are_mounted():
    for overlay in SERVING:
        (application,) = serve_config(overlay)["applications"]
        for pod in pods(overlay):
            if pod.is_ray:
                folders = {mount["mountPath"] for mount in pod.containers[0]["volumeMounts"]}
                assert str(Path(application["args"]["api_key_file"]).parent) in folders


def test_digests_of_the_default_model_are_those_of_the_pulled_one(pytestconfig):
    folder = Path(os.environ.get("EYAS_CACHE", Path.home() / ".cache" / "eyas")) / "smollm2"
    if not (folder / "manifest.json").is_file():
        pytest.skip("the default model is not pulled: eyas pull smollm2")
    files = yaml.safe_load((folder / "manifest.json").read_text())["files"]
    lines = (pytestconfig.rootpath / "k8s/overlays/dev/model.sha256").read_text().splitlines()
    assert dict(reversed(line.split("  ")) for line in lines) == {
        f"smollm2/{name}": file["sha256"] for name, file in files.items()
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.e2e
def test_the_serve_config_answers_on_this_machine(tmp_path):
    """As rendered for `dev`, but for what belongs to a cluster: the model's folder, the keys, the port."""
    config = serve_config("dev")
    (tmp_path / "tiny").mkdir()
    write_random_model(tmp_path / "tiny")
    (tmp_path / "keys").write_text("sk-one\n")
    port = free_port()
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    (application,) = config["applications"]
    application["args"] |= {
        "model": str(tmp_path / "tiny"),
        "served_model_name": "tiny",
        "api_key_file": str(tmp_path / "keys"),
    }
    application["args"]["engine"]["max_model_len"] = 64
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", str(path)],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"model": "tiny", "prompt": [10, 20, 30], "max_tokens": 4, "ignore_eos": True}
        answer = wait_for_answer(process, log, url, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert httpx.post(url, json=body).status_code == 401
        assert smoke(f"http://127.0.0.1:{port}", "sk-one").returncode == 0
        assert "HTTP Error 401" in smoke(f"http://127.0.0.1:{port}", "sk-two").stderr
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def wait_for_answer(process, log: Path, url: str, body: dict) -> httpx.Response:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            answer = httpx.post(url, json=body, headers={"authorization": "Bearer sk-one"}, timeout=30)
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code not in (404, 503):
            return answer
        time.sleep(0.5)
