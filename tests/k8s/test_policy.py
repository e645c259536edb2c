"""What every rendered object must keep to: pinned images, limits, no root, no rights, probes, no secrets.

Each rule is a function that returns its violations, and each is shown one.
"""

import copy
import re
from collections.abc import Callable, Iterator

import pytest

from tests.k8s.rendered import (
    OVERLAYS,
    SERVING,
    Object,
    Pod,
    of_kind,
    pods,
    ray_service,
    render,
    serve_config,
)

PINNED = re.compile(r"[a-z0-9./:_-]+@sha256:[0-9a-f]{64}")
SECRET_KEY = re.compile(r"pass(word)?|secret|token|credential|api_?key|private", re.IGNORECASE)
# Digests of model files, and a program that reads its key from the environment.
PUBLIC_FILES = ("model.sha256", "smoke.py")
Rule = Callable[[Pod], Iterator[str]]


def unpinned_images(pod: Pod) -> Iterator[str]:
    for container in pod.all_containers:
        if not PINNED.fullmatch(container["image"]):
            yield f"{pod.name}: {container['image']} has no digest"


def missing_limits(pod: Pod) -> Iterator[str]:
    for container in pod.all_containers:
        requests, limits = (container.get("resources", {}).get(side, {}) for side in ("requests", "limits"))
        for name in ("memory", "ephemeral-storage"):
            if name not in limits or requests.get(name) != limits[name]:
                yield f"{pod.name}/{container['name']}: {name} must be limited to what is requested"
        if "cpu" not in requests or "cpu" in limits:
            yield f"{pod.name}/{container['name']}: cpu must be requested and not limited"


def root_rights(pod: Pod) -> Iterator[str]:
    security = pod.spec.get("securityContext", {})
    if not security.get("runAsNonRoot") or not security.get("runAsUser"):
        yield f"{pod.name}: runs as root"
    if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield f"{pod.name}: has no seccomp profile"
    for container in pod.all_containers:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield f"{pod.name}/{container['name']}: may gain rights"
        if own.get("capabilities") != {"drop": ["ALL"]} or own.get("readOnlyRootFilesystem") is not True:
            yield f"{pod.name}/{container['name']}: has capabilities or a root filesystem that it may write"
        if own.get("runAsUser", 1) == 0 or own.get("runAsNonRoot") is False:
            yield f"{pod.name}/{container['name']}: runs as root"
    if pod.spec.get("hostNetwork") or pod.spec.get("hostPID") or pod.spec.get("hostIPC"):
        yield f"{pod.name}: shares a namespace of its host"
    yield from (f"{pod.name}: mounts the host" for v in pod.spec.get("volumes", []) if "hostPath" in v)


def missing_probes(pod: Pod) -> Iterator[str]:
    """Ray's containers must have none: the operator adds those of the Ray version. A job ends by itself."""
    for container in pod.containers:
        has = {"readinessProbe", "livenessProbe"} & container.keys()
        if pod.is_ray and has:
            yield f"{pod.name}/{container['name']}: hides the operator's probes"
        if not (pod.is_ray or pod.is_job) and len(has) < 2:
            yield f"{pod.name}/{container['name']}: needs a readiness and a liveness probe"


def plain_secrets(pod: Pod) -> Iterator[str]:
    for container in pod.all_containers:
        for variable in container.get("env", []):
            if SECRET_KEY.search(variable["name"]) and "value" in variable:
                yield f"{pod.name}/{container['name']}: {variable['name']} must come from a Secret"


RULES: tuple[Rule, ...] = (unpinned_images, missing_limits, root_rights, missing_probes, plain_secrets)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_keep_to(rule, overlay):
    assert [text for pod in pods(overlay) for text in rule(pod)] == []


def broken(change: Callable[[Pod], None], overlay: str = "loadtest") -> Pod:
    pod = copy.deepcopy(pods(overlay)[0])
    change(pod)
    return pod


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        (unpinned_images, lambda pod: pod.containers[0].update(image="redis:7.4-alpine")),
        (missing_limits, lambda pod: pod.containers[0]["resources"].pop("limits")),
        (missing_limits, lambda pod: pod.containers[0]["resources"]["limits"].update(cpu="1")),
        (root_rights, lambda pod: pod.spec["securityContext"].update(runAsUser=0)),
        (root_rights, lambda pod: pod.containers[0].pop("securityContext")),
        (root_rights, lambda pod: pod.spec["volumes"].append({"name": "h", "hostPath": {"path": "/"}})),
        (missing_probes, lambda pod: pod.containers[0].pop("livenessProbe")),
        (plain_secrets, lambda pod: pod.containers[0]["env"].append({"name": "HF_TOKEN", "value": "x"})),
    ],
)
def test_a_violation_is_noticed(rule, change):
    assert list(rule(broken(change)))


def config_secrets(found: Object) -> list[str]:
    """Lines of a ConfigMap that give a value to something that sounds secret."""
    return [
        line
        for name, text in found.get("data", {}).items()
        if name not in PUBLIC_FILES
        for line in text.splitlines()
        if re.search(rf"(?:{SECRET_KEY.pattern})\w*\"?\s*[:=]\s*\S", line, re.IGNORECASE)
    ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_secret_is_in_a_config_map_and_none_is_rendered(overlay):
    assert [line for found in of_kind(overlay, "ConfigMap") for line in config_secrets(found)] == []
    assert of_kind(overlay, "Secret") == []


def test_a_secret_in_a_config_map_is_noticed():
    assert config_secrets({"data": {"server.yaml": "hf_token: hf_abc"}}) == ["hf_token: hf_abc"]


@pytest.mark.parametrize("overlay", SERVING)
def test_serving_pods_have_no_token_but_for_the_autoscaler(overlay):
    has_autoscaler = ray_service(overlay)["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling", False)
    for pod in pods(overlay):
        has_token = pod.spec.get("automountServiceAccountToken", True)
        assert has_token == (has_autoscaler and pod.name == "head"), pod.name


@pytest.mark.parametrize("overlay", SERVING)
def test_roles_name_what_they_may_change_and_see_no_secret(overlay):
    assert of_kind(overlay, "ClusterRole") == []
    assert of_kind(overlay, "ClusterRoleBinding") == []
    for role in of_kind(overlay, "Role"):
        for rule in role["rules"]:
            assert "*" not in rule["verbs"] + rule["resources"]
            assert "secrets" not in rule["resources"]
            assert rule.get("resourceNames") or rule["verbs"] == ["create"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_what_must_reach_the_hub_sees_its_token(overlay):
    for pod in pods(overlay):
        seen = [c["name"] for c in pod.all_containers if "HF_TOKEN" in str(c.get("env"))]
        assert seen in ([], ["fetch-model"])


@pytest.mark.parametrize("overlay", SERVING)
def test_a_server_verifies_its_model_read_only_before_it_starts(overlay):
    (server,) = [pod for pod in pods(overlay) if pod.name == "server"]
    last = server.spec["initContainers"][-1]
    assert last["command"][:3] == ["sha256sum", "--check", "--strict"]
    assert all(mount["readOnly"] for mount in last["volumeMounts"])
    (models,) = [m for m in server.containers[0]["volumeMounts"] if m["mountPath"] == "/models"]
    assert models["readOnly"] is True


@pytest.mark.parametrize("overlay", SERVING)
def test_a_stopping_pod_outlives_its_longest_stream(overlay):
    (application,) = serve_config(overlay)["applications"]
    drain = application["args"]["drain_timeout_s"]
    service = ray_service(overlay)["spec"]
    assert service["rayClusterDeletionDelaySeconds"] >= drain + 60
    for pod in pods(overlay):
        if pod.is_ray:
            (timeout,) = [
                int(variable["value"])
                for variable in pod.containers[0]["env"]
                if variable["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
            ]
            assert timeout >= drain
            assert pod.spec["terminationGracePeriodSeconds"] >= timeout + 60
            assert "lifecycle" not in pod.containers[0], "a preStop hook defeats the drain"


@pytest.mark.parametrize("overlay", SERVING)
def test_what_the_operator_refuses_is_not_written(overlay):
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    is_scaled = cluster.get("enableInTreeAutoscaling", False)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        assert not {"labels", "resources"} & group["rayStartParams"].keys()
        assert not is_scaled or spec.get("restartPolicy") == "Never"
        names = [variable["name"] for variable in spec["containers"][0]["env"]]
        assert not {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"} & set(names)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_selector_meets_a_pod(overlay):
    """A budget, a policy or a monitor with a typing error in its labels would guard nothing."""
    labels = [pod.labels for name in OVERLAYS for pod in pods(name)]
    for found in render(overlay):
        spec = found.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector", {}))
        wanted = selector.get("matchLabels", selector).items() if isinstance(selector, dict) else []
        assert any(wanted <= one.items() for one in labels), (found["kind"], found["metadata"]["name"])


@pytest.mark.parametrize("overlay", SERVING)
def test_traffic_is_denied_unless_it_is_listed(overlay):
    policies = {found["metadata"]["name"]: found["spec"] for found in of_kind(overlay, "NetworkPolicy")}
    assert policies.pop("eyas-deny") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for policy in policies.values():
        assert policy["podSelector"]
        for side in policy.get("ingress", []):
            assert side["from"], "everybody may come in"


@pytest.mark.parametrize("overlay", SERVING)
def test_servers_have_a_disruption_budget(overlay):
    budgets = {found["metadata"]["name"]: found["spec"] for found in of_kind(overlay, "PodDisruptionBudget")}
    assert budgets["eyas-server"]["maxUnavailable"] == 1


def test_gpus_are_asked_for_and_given_once():
    (server,) = [pod for pod in pods("h100") if pod.name == "server"]
    resources = server.containers[0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in server.spec[
        "tolerations"
    ]
