"""The alert rules and the dashboard: promtool accepts and unit-tests the rules, and every query names a
metric that the application exports.

What the metrics count is left to the tests of `app`.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.app.conftest import *  # noqa: F403 - its fixtures: an application without an engine
from tests.k8s.queries import (
    METRIC,
    MONITORING,
    dashboard,
    dashboard_queries,
    exported,
    recorded,
    rule_queries,
    rules,
    unknown_metrics,
)
from tests.k8s.rendered import of_kind


async def test_every_query_names_a_metric_that_is_exported(client):
    known = exported((await client.get("/metrics")).text) | recorded()
    queries = rule_queries() + dashboard_queries()
    assert len(queries) > 35
    assert all(METRIC.search(query) for query in queries)
    assert unknown_metrics(queries, known) == set()


def test_a_misspelt_metric_is_noticed():
    queries = ["rate(eyas_drafts_totals[5m]) / rate(eyas_drafts_total[5m])"]
    assert unknown_metrics(queries, {"eyas_drafts_total"}) == {"eyas_drafts_totals"}


def test_every_alert_says_whom_it_concerns_and_is_tested():
    tested = {
        case["alertname"]
        for test in yaml.safe_load((MONITORING / "rules_test.yaml").read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    alerts = [rule for group in rules()["groups"] for rule in group["rules"] if "alert" in rule]
    assert {alert["alert"] for alert in alerts} == tested
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["annotations"]["summary"]


def test_panels_do_not_overlap_and_have_a_title_and_a_query():
    cells: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
        assert panel["title"]
        assert panel["type"] == "row" or panel["targets"]


def test_the_dashboard_is_shipped_where_grafana_looks():
    (found,) = [one for one in of_kind("h100", "ConfigMap") if one["metadata"]["name"] == "eyas-dashboard"]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["eyas.json"]) == dashboard()


@pytest.fixture
def promtool(tmp_path: Path) -> list[str]:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: the rules cannot be run")
    (tmp_path / "rules.json").write_text(json.dumps(rules()))
    shutil.copy(MONITORING / "rules_test.yaml", tmp_path)
    return [found]


@pytest.mark.parametrize(
    "arguments", [["check", "rules", "rules.json"], ["test", "rules", "rules_test.yaml"]]
)
def test_promtool_accepts_and_tests_the_rules(arguments, promtool, tmp_path):
    ended = subprocess.run(
        [*promtool, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_promtool_notices_a_changed_threshold(promtool, tmp_path):
    """Else the tests of the rules could pass whatever the rules say."""
    text = json.dumps(rules())
    assert "rate10m < 0.97" in text
    (tmp_path / "rules.json").write_text(text.replace("rate10m < 0.97", "rate10m < 0.5"))
    ended = subprocess.run(
        [*promtool, "test", "rules", "rules_test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
