"""The queries of the alert rules and of the dashboard, and the metrics that they and a page of a server name.

What must hold of them is left to the tests.
"""

import json
import re

import yaml

from tests.k8s.rendered import K8S

MONITORING = K8S / "components" / "monitoring"
METRIC = re.compile(r"\b(?:eyas|vllm|ray)[_:][a-zA-Z0-9_:]+")
SUFFIXES = ("_bucket", "_sum", "_count")


def rules() -> dict:
    return yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"]


def recorded() -> set[str]:
    return {rule["record"] for group in rules()["groups"] for rule in group["rules"] if "record" in rule}


def rule_queries() -> list[str]:
    return [rule["expr"] for group in rules()["groups"] for rule in group["rules"]]


def dashboard() -> dict:
    return json.loads((MONITORING / "eyas.json").read_text())


def dashboard_queries() -> list[str]:
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    variables = [one["query"]["query"] for one in dashboard()["templating"]["list"] if one["type"] == "query"]
    return queries + variables


def exported(page: str) -> set[str]:
    """The names of the families of a page, as PromQL writes them."""
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE):
        names |= {name + suffix for suffix in SUFFIXES} if kind == "histogram" else {name}
    return names


def unknown_metrics(queries: list[str], known: set[str]) -> set[str]:
    return {name for query in queries for name in METRIC.findall(query)} - known
