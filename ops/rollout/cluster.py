"""Kubernetes: the Serve configuration inside a RayService, and the state of a rollout in a ConfigMap.

The versions of both are their resourceVersion, so that a change between reading and writing is refused by the
API server. Rolling the change out is left to the operator of the RayService.
"""

from typing import Any

import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from ops.rollout.serve_target import ServeConfig
from ops.rollout.state import RolloutError, RolloutState, parse_state
from ops.rollout.state_store import ConflictError, Kept

GROUP, VERSION, PLURAL = "ray.io", "v1", "rayservices"
CONFIG_MAP = "eyas-rollout"
KEY = "state.json"
NOT_FOUND, CONFLICT = 404, 409
GARBAGE = (ValueError, TypeError, AttributeError, KeyError)  # of a kubeconfig that is YAML of something else


def connect(kubeconfig: str | None) -> client.ApiClient:
    """Return a client by a kubeconfig file, else by the pod's own account. Raises `RolloutError`."""
    try:
        if kubeconfig is None:
            try:
                config.load_incluster_config()
                return client.ApiClient()
            except ConfigException:
                pass
        return config.new_client_from_config(kubeconfig)
    except (ConfigException, OSError, yaml.YAMLError, *GARBAGE) as error:
        raise RolloutError(f"cannot connect to Kubernetes: {error}") from error


class RayService:
    """See `ConfigSource`."""

    def __init__(self, api: client.ApiClient, namespace: str, name: str) -> None:
        self._objects = client.CustomObjectsApi(api)
        self._place = (GROUP, VERSION, namespace, PLURAL, name)

    def read(self) -> ServeConfig:
        found = self._call(self._objects.get_namespaced_custom_object)
        try:
            values = yaml.safe_load(found["spec"]["serveConfigV2"])
            if not all(isinstance(one, dict) for one in values["applications"]):
                raise TypeError("an application is no mapping")
        except (KeyError, TypeError, yaml.YAMLError) as error:
            raise RolloutError(f"the RayService has no Serve configuration: {error!r}") from error
        return ServeConfig(values, found["metadata"]["resourceVersion"])

    def write(self, config: ServeConfig) -> bool:
        text = yaml.safe_dump(config.values, sort_keys=False)
        patch = {"metadata": {"resourceVersion": config.version}, "spec": {"serveConfigV2": text}}
        return self._call(self._objects.patch_namespaced_custom_object, patch) is not None

    def _call(self, method: Any, *arguments: Any) -> Any:
        """Return the answer, None for a conflict."""
        try:
            return method(*self._place, *arguments)
        except ApiException as error:
            if error.status == CONFLICT and arguments:
                return None
            raise RolloutError(
                f"RayService {self._place[2]}/{self._place[4]}: {error.status} {error.reason}"
            ) from error
        except (HTTPError, OSError) as error:
            raise RolloutError(f"cannot reach Kubernetes: {error}") from error


class ConfigMapStore:
    """See `StateStore`."""

    def __init__(self, api: client.ApiClient, namespace: str, name: str = CONFIG_MAP) -> None:
        self._api = client.CoreV1Api(api)
        self._namespace, self._name = namespace, name

    def load(self) -> Kept | None:
        try:
            found = self._api.read_namespaced_config_map(self._name, self._namespace)
        except ApiException as error:
            if error.status == NOT_FOUND:
                return None
            raise self._refusal(error) from error
        except (HTTPError, OSError) as error:
            raise RolloutError(f"cannot reach Kubernetes: {error}") from error
        return Kept(parse_state((found.data or {}).get(KEY, "")), found.metadata.resource_version)

    def replace(self, state: RolloutState, version: str | None) -> Kept:
        metadata = client.V1ObjectMeta(name=self._name, resource_version=version)
        body = client.V1ConfigMap(metadata=metadata, data={KEY: state.to_json()})
        try:
            if version is None:
                found = self._api.create_namespaced_config_map(self._namespace, body)
            else:
                found = self._api.replace_namespaced_config_map(self._name, self._namespace, body)
        except ApiException as error:
            if error.status == CONFLICT:
                raise ConflictError(
                    f"the rollout in ConfigMap {self._name} was changed by another process"
                ) from error
            raise self._refusal(error) from error
        except (HTTPError, OSError) as error:
            raise RolloutError(f"cannot reach Kubernetes: {error}") from error
        return Kept(state, found.metadata.resource_version)

    def _refusal(self, error: ApiException) -> RolloutError:
        return RolloutError(f"ConfigMap {self._namespace}/{self._name}: {error.status} {error.reason}")
