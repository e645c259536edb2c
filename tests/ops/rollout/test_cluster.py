"""A rollout on Kubernetes through the real client, against an API server that keeps resource versions.

What the operator makes of a changed RayService is left to a real cluster.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from kubernetes import client

from ops.rollout.cluster import ConfigMapStore, RayService, connect
from ops.rollout.serve_target import ServeConfig, ServeTarget, with_drafts
from ops.rollout.state import DraftRef, Phase, RolloutError
from ops.rollout.state_store import ConflictError
from ops.rollout.target import Desired
from tests.k8s.rendered import K8S
from tests.ops.rollout.fleet import LIMITS, PACE, World
from tests.ops.rollout.http_server import Answer, Asked, served
from tests.ops.rollout.test_serve_target import NEW, VALUES, page
from tests.ops.rollout.test_state_store import STATE

SERVICE = "/apis/ray.io/v1/namespaces/eyas/rayservices/eyas"
MAPS = "/api/v1/namespaces/eyas/configmaps"


class ApiServer:
    """Objects by path, with optimistic concurrency and merge patches."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.asked: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        spec = {"serveConfigV2": yaml.safe_dump(VALUES), "rayClusterConfig": {"rayVersion": "2.60.0"}}
        self._keep(SERVICE, {"metadata": {"name": "eyas"}, "spec": spec})

    def _keep(self, path: str, found: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        self.objects[path] = found
        return copy.deepcopy(found)

    def answer(self, asked: Asked) -> Answer:
        with self._lock:
            self.asked.append((asked.method, asked.path))
            if asked.method == "POST":
                return self._create(f"{asked.path}/{asked.body['metadata']['name']}", asked.body)
            if asked.path not in self.objects:
                return 404, {"kind": "Status", "code": 404, "reason": "NotFound"}
            if asked.method == "GET":
                return 200, self.objects[asked.path]
            return self._change(asked)

    def _create(self, path: str, body: dict[str, Any]) -> Answer:
        if path in self.objects:
            return 409, {"kind": "Status", "code": 409, "reason": "AlreadyExists"}
        return 201, self._keep(path, body)

    def _change(self, asked: Asked) -> Answer:
        found = self.objects[asked.path]
        named = asked.body["metadata"].get("resourceVersion", found["metadata"]["resourceVersion"])
        if named != found["metadata"]["resourceVersion"]:
            return 409, {"kind": "Status", "code": 409, "reason": "Conflict"}
        if asked.method == "PUT":
            return 200, self._keep(asked.path, asked.body)
        assert asked.content_type == "application/merge-patch+json"
        return 200, self._keep(asked.path, merged(found, asked.body))


def merged(old: Any, new: Any) -> Any:
    if not isinstance(new, dict):
        return new
    kept = dict(old) if isinstance(old, dict) else {}
    return kept | {key: merged(kept.get(key), value) for key, value in new.items() if value is not None}


@contextmanager
def cluster() -> Iterator[tuple[ApiServer, client.ApiClient]]:
    server = ApiServer()
    with served(server.answer) as url:
        configuration = client.Configuration(host=url)
        configuration.retries = False
        with client.ApiClient(configuration) as api:
            yield server, api


def test_a_draft_changes_the_serve_config_and_nothing_else_of_the_service():
    with cluster() as (server, api):
        before = copy.deepcopy(server.objects[SERVICE])
        target = ServeTarget(RayService(api, "eyas", "eyas"), page)
        target.apply(Desired(NEW))
        target.apply(Desired(NEW))
        after = copy.deepcopy(server.objects[SERVICE])
        assert yaml.safe_load(after["spec"].pop("serveConfigV2")) == with_drafts(VALUES, Desired(NEW))
        before["spec"].pop("serveConfigV2")
        assert after["spec"] == before["spec"]
        assert [method for method, _ in server.asked].count("PATCH") == 1
        assert target.stable() == NEW.folder


def test_a_change_of_the_service_in_between_is_not_overwritten():
    with cluster() as (server, api):
        source = RayService(api, "eyas", "eyas")
        read = source.read()
        server._keep(SERVICE, copy.deepcopy(server.objects[SERVICE]))
        assert source.write(ServeConfig({"applications": []}, read.version)) is False
        assert source.read().values == VALUES


def test_a_config_map_keeps_a_state_by_compare_and_swap():
    with cluster() as (server, api):
        store = ConfigMapStore(api, "eyas")
        assert store.load() is None
        first = store.replace(STATE, None)
        assert store.load() == first
        with pytest.raises(ConflictError):
            store.replace(STATE, None)
        second = store.replace(STATE.to(Phase.PAUSED, "x"), first.version)
        with pytest.raises(ConflictError):
            store.replace(STATE, first.version)
        assert store.load() == second
        assert list(server.objects) == [SERVICE, f"{MAPS}/eyas-rollout"]


@pytest.mark.parametrize(
    ("draft", "phase"), [("id-better", Phase.SUCCEEDED), ("id-worse", Phase.ROLLED_BACK)]
)
def test_a_rollout_keeps_its_state_in_the_cluster(draft, phase):
    with cluster() as (_, api):
        world = World(ConfigMapStore(api, "eyas"))
        world.controller(LIMITS, PACE).start(draft)
        assert world.controller(LIMITS, PACE).run().phase is phase
        assert ConfigMapStore(api, "eyas").load().state.phase is phase


def test_what_is_missing_or_out_of_reach_is_told_in_one_line(tmp_path):
    with cluster() as (_, api), pytest.raises(RolloutError, match="RayService eyas/other: 404"):
        RayService(api, "eyas", "other").read()
    with pytest.raises(RolloutError, match="cannot reach Kubernetes"):
        RayService(api, "eyas", "eyas").read()
    with pytest.raises(RolloutError, match="cannot reach Kubernetes"):
        ConfigMapStore(api, "eyas").load()
    with pytest.raises(RolloutError, match="cannot connect"):
        connect(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "abc", "current-context: x\ncontexts: 3\n"])
def test_a_file_that_is_no_kubeconfig_is_told(text, tmp_path):
    (tmp_path / "config").write_text(text)
    with pytest.raises(RolloutError, match="cannot connect"):
        connect(str(tmp_path / "config"))


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "abc", "applications: 3", "applications: [eyas]", "{}"])
def test_a_service_without_a_serve_configuration_is_told(text):
    with cluster() as (server, api):
        server.objects[SERVICE]["spec"]["serveConfigV2"] = text
        with pytest.raises(RolloutError, match="has no Serve configuration"):
            RayService(api, "eyas", "eyas").read()


def test_the_rights_of_the_operations_account_are_those_that_are_used():
    role = yaml.safe_load_all((K8S / "base" / "access.yaml").read_text())
    (rules,) = [found["rules"] for found in role if found["kind"] == "Role"]
    granted = {(name, verb) for rule in rules for name in rule["resources"] for verb in rule["verbs"]}
    verbs = {"GET": "get", "PATCH": "patch", "POST": "create", "PUT": "update"}
    with cluster() as (server, api):
        ServeTarget(RayService(api, "eyas", "eyas"), page).apply(Desired(DraftRef("/d", None)))
        store = ConfigMapStore(api, "eyas")
        store.replace(STATE, None)
        store.replace(STATE, store.load().version)
        used = {
            ("rayservices" if "rayservices" in path else "configmaps", verbs[method])
            for method, path in server.asked
        }
    assert used == granted
