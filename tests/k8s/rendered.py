"""The overlays as kubectl renders them, and the pods inside what it renders.

What must hold of them is left to the tests beside this file.
"""

import functools
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("dev", "h100", "loadtest", "ops", "smoke")
SERVING = ("dev", "h100")

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod template and where it stands; `is_ray` where the operator adds the probes, `is_job` where it
    ends.
    """

    name: str
    labels: dict[str, str]
    spec: Object
    is_ray: bool
    is_job: bool = False

    @property
    def containers(self) -> list[Object]:
        return self.spec["containers"]

    @property
    def all_containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.containers]


@functools.cache
def render(overlay: str) -> tuple[Object, ...]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: the overlays cannot be rendered")
    ended = subprocess.run(
        [kubectl, "kustomize", str(K8S / "overlays" / overlay)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return tuple(yaml.safe_load_all(ended.stdout))


def of_kind(overlay: str, kind: str) -> list[Object]:
    return [found for found in render(overlay) if found["kind"] == kind]


def ray_service(overlay: str) -> Object:
    (service,) = of_kind(overlay, "RayService")
    return service


def serve_config(overlay: str) -> Object:
    return yaml.safe_load(ray_service(overlay)["spec"]["serveConfigV2"])


def pods(overlay: str) -> list[Pod]:
    return [pod for found in render(overlay) for pod in pods_of(found)]


def pods_of(found: Object) -> Iterator[Pod]:
    if found["kind"] == "RayService":
        cluster = found["spec"]["rayClusterConfig"]
        for name, group in [("head", cluster["headGroupSpec"])] + [
            (group["groupName"], group) for group in cluster["workerGroupSpecs"]
        ]:
            template = group["template"]
            yield Pod(name, template["metadata"]["labels"], template["spec"], is_ray=True)
    elif "template" in found.get("spec", {}):
        template = found["spec"]["template"]
        yield Pod(
            found["metadata"]["name"],
            template["metadata"]["labels"],
            template["spec"],
            False,
            found["kind"] == "Job",
        )
