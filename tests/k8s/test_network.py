"""The network policies: what a pod is told to ask it may ask, and what it has no need of it may not.

A cluster's network plugin decides at last; here policies of one namespace are read as Kubernetes defines
them.
"""

import pytest

from tests.k8s.rendered import Object, of_kind, pods

DNS = {
    "namespaceSelector": {"kubernetes.io/metadata.name": "kube-system"},
    "podSelector": {"k8s-app": "kube-dns"},
}
ANYWHERE: Object = {}
Place = dict  # the labels of a pod of the namespace, or what is asked of a pod elsewhere


def policies(serving: str, *beside: str) -> list[Object]:
    return [found["spec"] for overlay in (serving, *beside) for found in of_kind(overlay, "NetworkPolicy")]


def labels_of(overlay: str, name: str) -> Place:
    (pod,) = [pod for pod in pods(overlay) if pod.name == name]
    return pod.labels


def selects(selector: Object, labels: Place) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items()


def is_met(peer: Object, place: Place) -> bool:
    """Whether a peer of a rule is the place: a pod of this namespace by its labels, else one elsewhere."""
    wanted = {name: selector.get("matchLabels", {}) for name, selector in peer.items()}
    if "namespaceSelector" in place or "namespaceSelector" in peer:
        return all(place.get(name) == labels for name, labels in wanted.items())
    return bool(place) and selects(peer["podSelector"], place)


def lets(rules: list[Object], side: str, place: Place, port: int) -> bool:
    """Whether one of the rules allows the port; a rule without peers allows every place."""
    return any(
        (side not in rule or any(is_met(peer, place) for peer in rule[side]))
        and ("ports" not in rule or port in [one["port"] for one in rule["ports"]])
        for rule in rules
    )


def may_send(found: list[Object], source: Place, target: Place, port: int) -> bool:
    rules = [one for one in found if selects(one["podSelector"], source) and "Egress" in one["policyTypes"]]
    return not rules or any(lets(one.get("egress", []), "to", target, port) for one in rules)


def may_receive(found: list[Object], source: Place, target: Place, port: int) -> bool:
    rules = [one for one in found if selects(one["podSelector"], target) and "Ingress" in one["policyTypes"]]
    return not rules or any(lets(one.get("ingress", []), "from", source, port) for one in rules)


def may_ask(found: list[Object], source: Place, target: Place, port: int) -> bool:
    return may_send(found, source, target, port) and may_receive(found, source, target, port)


ASKING = [
    ("smoke", "eyas-smoke"),
    ("loadtest", "eyas-locust-master"),
    ("loadtest", "eyas-locust-worker"),
    ("ops", "eyas-ops"),
]


@pytest.mark.parametrize("serving", ["dev", "h100"])
@pytest.mark.parametrize(("overlay", "name"), ASKING)
def test_who_is_told_the_servers_address_reaches_it_and_names(overlay, name, serving):
    found, source = policies(serving, overlay), labels_of(overlay, name)
    assert may_ask(found, source, labels_of(serving, "server"), 8000)
    assert may_send(found, source, DNS | {"podSelector": {"k8s-app": "kube-dns"}}, 53)


@pytest.mark.parametrize("serving", ["dev", "h100"])
def test_a_rollout_reaches_the_api_server_and_a_server_does_not(serving):
    found = policies(serving, "ops")
    assert may_send(found, labels_of("ops", "eyas-ops"), ANYWHERE, 6443)
    assert not may_send(found, labels_of(serving, "server"), ANYWHERE, 6443)


def test_what_runs_beside_reaches_nothing_but_the_servers_port():
    found = policies("h100", "loadtest", "ops")
    redis, head = labels_of("h100", "eyas-redis"), labels_of("h100", "head")
    for overlay, name in ASKING[1:]:
        source = labels_of(overlay, name)
        assert not may_ask(found, source, redis, 6379)
        assert not may_ask(found, source, head, 8265)
    worker, master = (labels_of("loadtest", f"eyas-locust-{part}") for part in ("worker", "master"))
    assert may_ask(found, worker, master, 5557)
    assert not may_ask(found, labels_of("h100", "server"), master, 5557)


def test_prometheus_reaches_every_port_that_it_is_told_to_scrape():
    found = policies("h100")
    prometheus = {"namespaceSelector": {"kubernetes.io/metadata.name": "monitoring"}}
    scraped = 0
    for monitor in of_kind("h100", "PodMonitor"):
        wanted = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        for pod in [pod for pod in pods("h100") if selects(monitor["spec"]["selector"], pod.labels)]:
            ports = {port["name"]: port["containerPort"] for one in pod.containers for port in one["ports"]}
            scraped += len(wanted)
            for name in wanted:
                assert may_receive(found, prometheus, pod.labels, ports[name]), (pod.name, name)
    assert scraped == 4
    (target,) = of_kind("h100", "ScrapeConfig")[0]["spec"]["staticConfigs"][0]["targets"]
    assert may_receive(found, prometheus, labels_of("h100", "server"), int(target.rpartition(":")[2]))


@pytest.mark.parametrize("serving", ["dev", "h100"])
def test_a_stranger_in_the_namespace_reaches_nobody(serving):
    found, stranger = policies(serving, "loadtest", "ops"), {"app": "stranger"}
    for port in (8000, 8265, 6379, 443, 53):
        assert not may_send(found, stranger, labels_of(serving, "server"), port)
        assert not may_receive(found, stranger, labels_of(serving, "server"), port)
        assert not may_send(found, stranger, ANYWHERE, port)


def test_only_who_fetches_models_or_scales_leaves_the_cluster():
    found = policies("h100")
    open_ports = {
        pod.name: {port for port in (443, 6443) if may_send(found, pod.labels, ANYWHERE, port)}
        for pod in pods("h100")
    }
    assert open_ports == {"server": {443}, "head": {443, 6443}, "eyas-redis": set()}
