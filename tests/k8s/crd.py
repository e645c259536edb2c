"""Strict validation of custom resources: by a CRD where one is at hand, else by the least that we use.

A structural schema drops what it does not know; here an unknown field is an error.
"""

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
ANY: Schema = {"x-kubernetes-preserve-unknown-fields": True}
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def shaped(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def resource(spec: Schema) -> Schema:
    return shaped(
        ("apiVersion", "kind", "metadata", "spec"), apiVersion=STRING, kind=STRING, metadata=ANY, spec=spec
    )


TEMPLATE = shaped(("metadata", "spec"), metadata=ANY, spec=ANY)  # its spec is validated as that of a Pod
GROUP = {"rayStartParams": STRINGS, "template": TEMPLATE}
# The fields of KubeRay 1.7 that the manifests use.
RAY_SERVICE = resource(
    shaped(
        ("serveConfigV2", "rayClusterConfig"),
        excludeHeadPodFromServeSvc=BOOLEAN,
        upgradeStrategy=shaped(("type",), type={"enum": ["NewCluster", "None"]}),
        rayClusterDeletionDelaySeconds=INTEGER,
        serveConfigV2=STRING,
        rayClusterConfig=shaped(
            ("rayVersion", "headGroupSpec", "workerGroupSpecs"),
            rayVersion=STRING,
            authOptions=shaped(("mode",), mode={"enum": ["token", "disabled"]}),
            enableInTreeAutoscaling=BOOLEAN,
            autoscalerOptions=shaped(
                version={"enum": ["v1", "v2"]},
                idleTimeoutSeconds=INTEGER,
                resources=ANY,
                securityContext=ANY,
            ),
            gcsFaultToleranceOptions=shaped(
                backend={"enum": ["redis", "rocksdb"]}, redisAddress=STRING, redisPassword=ANY
            ),
            headGroupSpec=shaped(("rayStartParams", "template"), serviceType=STRING, **GROUP),
            workerGroupSpecs=listed(
                shaped(
                    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
                    groupName=STRING,
                    replicas=INTEGER,
                    minReplicas=INTEGER,
                    maxReplicas=INTEGER,
                    **GROUP,
                )
            ),
        ),
    )
)
# The fields of the Prometheus operator that the manifests use.
MONITORING = {
    "ScrapeConfig": resource(
        shaped(
            ("staticConfigs",),
            staticConfigs=listed(shaped(("targets",), targets=listed(STRING), labels=STRINGS)),
            metricsPath=STRING,
            scrapeInterval=STRING,
        )
    ),
    "PodMonitor": resource(
        shaped(
            ("selector", "podMetricsEndpoints"),
            selector=shaped(("matchLabels",), matchLabels=STRINGS),
            podMetricsEndpoints=listed(shaped(("port",), port=STRING, interval=STRING)),
        )
    ),
    "PrometheusRule": resource(
        shaped(
            ("groups",),
            groups=listed(
                shaped(
                    ("name", "rules"),
                    name=STRING,
                    interval=STRING,
                    rules=listed(
                        {
                            **shaped(
                                ("expr",),
                                alert=STRING,
                                record=STRING,
                                expr=STRING,
                                **{"for": STRING},
                                labels=STRINGS,
                                annotations=STRINGS,
                            ),
                            "oneOf": [{"required": ["alert"]}, {"required": ["record"]}],
                        }
                    ),
                )
            ),
        )
    ),
}


@cache
def ray_schema(folder: Path) -> Schema:
    """The schema of RayService in the CRDs of `folder`, or our own where there is none."""
    path = folder / "ray.io_rayservices.yaml"
    if not path.is_file():
        return RAY_SERVICE
    crd = yaml.safe_load(path.read_text(encoding="utf-8"))
    (version,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = ANY
    return schema


def check(found: dict[str, Any], schema: Schema) -> None:
    """Raise `jsonschema.ValidationError` where `found`, with the schema's defaults, is not of the schema."""
    jsonschema.validate(filled(found, schema), strict(schema))


def filled(value: Any, schema: Schema) -> Any:
    """Return `value` with the defaults of a structural schema, as an API server stores it."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        value = {name: part["default"] for name, part in properties.items() if "default" in part} | value
        rest = schema.get("additionalProperties", {})
        return {name: filled(part, properties.get(name, rest or {})) for name, part in value.items()}
    if isinstance(value, list):
        return [filled(item, schema.get("items", {})) for item in value]
    return value


def strict(schema: Schema) -> Schema:
    """Return `schema` as JSON schema that refuses the fields it does not name."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return {}
    kept = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if "properties" in kept:
        kept["properties"] = {name: strict(part) for name, part in kept["properties"].items()}
        kept["additionalProperties"] = False
    elif isinstance(kept.get("additionalProperties"), dict):
        kept["additionalProperties"] = strict(kept["additionalProperties"])
    if "items" in kept:
        kept["items"] = strict(kept["items"])
    return kept
