"""Every overlay renders, and every object of it is valid, unknown fields refused.

What is not a matter of form is left to `test_policy`.
"""

import copy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.k8s.crd import MONITORING, RAY_SERVICE, check, ray_schema
from tests.k8s.rendered import OVERLAYS, ROOT, SERVING, pods, ray_service, render

KUBERNETES = "1.32"
# Upstream's CRDs, where somebody has put them beside the project; they are not part of it.
CRDS = ROOT.parent / "shared" / "crd"


def validate(found: dict[str, Any], crds: Path = CRDS) -> None:
    if found["kind"] == "RayService":
        check(found, ray_schema(crds))
    elif found["kind"] in MONITORING:
        check(found, MONITORING[found["kind"]])
    else:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay):
    assert len(render(overlay)) > 1
    for found in render(overlay):
        validate(found)


@pytest.mark.parametrize("overlay", SERVING)
def test_a_ray_service_is_valid_by_our_own_schema_too(overlay):
    check(ray_service(overlay), RAY_SERVICE)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_valid(overlay):
    for pod in pods(overlay):
        found = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod.spec}
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


@pytest.mark.parametrize("crds", [CRDS, Path("nowhere")])
@pytest.mark.parametrize("field", ["excludeHeadPodFromServeService", "serveConfig"])
def test_a_misspelt_field_of_a_ray_service_is_noticed(field, crds):
    found = copy.deepcopy(ray_service("dev"))
    found["spec"][field] = found["spec"]["serveConfigV2"]
    with pytest.raises(jsonschema.ValidationError, match=field):
        validate(found, crds)


def test_a_misspelt_field_of_a_built_in_kind_is_noticed():
    (found,) = [each for each in render("dev") if each["kind"] == "PodDisruptionBudget"]
    found = copy.deepcopy(found)
    found["spec"]["maxUnavailableReplicas"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="maxUnavailableReplicas"):
        validate(found)


def test_the_hashed_name_of_the_model_digests_reaches_the_pods():
    (digests,) = [each for each in render("dev") if each["metadata"]["name"].startswith("eyas-model-")]
    for pod in pods("dev"):
        names = [volume["configMap"]["name"] for volume in pod.spec["volumes"] if "configMap" in volume]
        assert names == [digests["metadata"]["name"]]
