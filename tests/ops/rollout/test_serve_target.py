"""Drafts in a Serve configuration and replicas on a metrics page; the dashboard that holds the one.

That a rollout of the whole works over Serve is left to `tests/e2e`.
"""

import copy

import pytest

from ops.rollout.dashboard import APPLICATIONS, Dashboard, fetch
from ops.rollout.serve_target import ServeConfig, ServeTarget, parse_replicas, with_drafts
from ops.rollout.state import DraftRef, RolloutError
from ops.rollout.target import Desired, Replica
from tests.loadtest.scripted_server import scripted_server
from tests.ops.rollout.http_server import Answer, Asked, served

OLD, NEW = DraftRef("/drafts/old", "0" * 64), DraftRef("/drafts/new", "1" * 64)
VALUES = {
    "applications": [
        {
            "name": "eyas",
            "import_path": "app.main:build",
            "args": {"model": "smollm2"},
            "deployments": [{"name": "llm-server", "user_config": {"speculation": "auto"}}],
        }
    ]
}


def user_config(values: dict) -> dict:
    return values["applications"][0]["deployments"][0]["user_config"]


def test_a_canary_is_named_beside_the_stable_draft():
    values = with_drafts(VALUES, Desired(OLD, NEW, ("r2", "r1")))
    assert user_config(values) == {
        "canary_draft": "/drafts/new",
        "canary_draft_digest": "1" * 64,
        "canary_replicas": "r1,r2",
        "draft": "/drafts/old",
        "draft_digest": "0" * 64,
        "speculation": "auto",
    }
    assert list(user_config(values)) == sorted(user_config(values))


def test_nothing_else_changes_and_asking_again_changes_nothing():
    before = copy.deepcopy(VALUES)
    values = with_drafts(VALUES, Desired(OLD, NEW, ("r1",)))
    assert before == VALUES
    assert with_drafts(values, Desired(OLD, NEW, ("r1",))) == values
    user_config(values).clear()
    user_config(before).clear()
    assert values == before


def test_going_back_to_the_draft_of_the_start_leaves_no_key():
    values = with_drafts(VALUES, Desired(NEW))
    assert user_config(with_drafts(values, Desired(DraftRef(None, "0" * 64)))) == {"speculation": "auto"}


@pytest.mark.parametrize("deployments", [None, [], [{"name": "ingress"}]])
def test_a_server_that_is_not_listed_is_added(deployments):
    values = copy.deepcopy(VALUES)
    values["applications"][0]["deployments"] = deployments
    found = with_drafts(values, Desired(OLD))["applications"][0]["deployments"]
    assert found == [
        *(deployments or []),
        {"name": "llm-server", "user_config": {"draft": "/drafts/old", "draft_digest": "0" * 64}},
    ]


@pytest.mark.parametrize("count", [0, 2])
def test_a_configuration_without_our_server_is_told(count):
    with pytest.raises(RolloutError, match=f"found {count}"):
        with_drafts({"applications": [{"name": str(idx)} for idx in range(count)]}, Desired(OLD))


def page(*digests: str | None) -> str:
    """A page of replicas r0, r1 and so on, with what a rollout does not read."""
    lines = ["# TYPE eyas_engine_info gauge", "# TYPE eyas_steps_total counter"]
    for idx, digest in enumerate(digests):
        labels = f'model="tiny",replica="r{idx}"'
        lines += [
            f'eyas_engine_info{{{labels},draft_digest="of the start",version="1"}} 1.0',
            *([] if digest is None else [f'eyas_draft_trees_total{{{labels},draft_digest="{digest}"}} 7.0']),
            f"eyas_draft_off{{{labels}}} {float(idx == 2)}",
            f"eyas_step_seconds_total{{{labels}}} 1.5",
            f"eyas_steps_total{{{labels}}} 10.0",
            f"eyas_verification_calls_total{{{labels}}} 40.0",
            f"eyas_generation_tokens_total{{{labels}}} {90 + idx}",
            f"eyas_draft_refusals_total{{{labels}}} {idx}",
            f"eyas_requests_running{{{labels}}} 3.0",
        ]
    return "\n".join([*lines, ""])


def test_replicas_are_read_from_a_page():
    assert parse_replicas(page("0" * 64, None, "1" * 64)) == [
        Replica("r0", "0" * 64, False, 1.5, 10, 40, 90, 0),
        Replica("r1", None, False, 1.5, 10, 40, 91, 1),
        Replica("r2", "1" * 64, True, 1.5, 10, 40, 92, 2),
    ]


def test_a_replica_of_an_older_image_has_refused_nothing():
    text = "\n".join(line for line in page("0" * 64, None).splitlines() if "refusals" not in line)
    assert [replica.num_refusals for replica in parse_replicas(text + "\n")] == [0, 0]


@pytest.mark.parametrize("text", ["<html><body>", 'eyas_engine_info{replica="r0",draft_digest=""} 1'])
def test_a_page_that_is_not_ours_is_told(text):
    with pytest.raises(RolloutError, match="not that of Eyas"):
        parse_replicas(text)


class Contested:
    """A source that others change `num_conflicts` times."""

    def __init__(self, num_conflicts: int) -> None:
        self.values, self.num_conflicts, self.num_writes = VALUES, num_conflicts, 0

    def read(self) -> ServeConfig:
        return ServeConfig(self.values, "1")

    def write(self, config: ServeConfig) -> bool:
        self.num_writes += 1
        if self.num_writes <= self.num_conflicts:
            return False
        self.values = config.values
        return True


def test_a_change_by_others_in_between_is_tried_again_and_a_done_one_is_not_written():
    source = Contested(3)
    target = ServeTarget(source, page)
    target.apply(Desired(NEW))
    target.apply(Desired(NEW))
    assert source.num_writes == 4
    assert target.stable() == "/drafts/new"
    with pytest.raises(RolloutError, match="changed by others 5 times"):
        ServeTarget(Contested(5), page).apply(Desired(NEW))


def test_a_dashboard_gets_back_what_it_had_with_the_draft_changed():
    http = {"host": "0.0.0.0", "port": 8000}
    puts = []

    def answer(asked: Asked) -> Answer:
        assert (asked.path, asked.token) == (APPLICATIONS, "Bearer t0")
        if asked.method == "PUT":
            puts.append(asked.body)
            return 200, ""
        application = {"status": "RUNNING", "deployed_app_config": VALUES["applications"][0]}
        return 200, {
            "http_options": http,
            "proxy_location": "EveryNode",
            "applications": {"eyas": application},
        }

    with served(answer) as url:
        ServeTarget(Dashboard(url, "t0"), page).apply(Desired(NEW))
    assert puts == [
        {"proxy_location": "EveryNode", "http_options": http, **with_drafts(VALUES, Desired(NEW))}
    ]


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (401, "who are you?", "answered 401: who are you"),
        (200, "<html>", "no dashboard of Ray"),
        (200, {"applications": {"eyas": {"deployed_app_config": None}}}, "deployed by a program"),
    ],
)
def test_a_dashboard_that_does_not_help_is_told_in_one_line(status, body, text):
    with served(lambda asked: (status, body)) as url, pytest.raises(RolloutError, match=text):
        Dashboard(url).read()


def test_nobody_there_and_other_schemes_are_told():
    with pytest.raises(RolloutError, match="cannot reach"):
        fetch("http://127.0.0.1:9/metrics")
    for answer in (b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"):
        with scripted_server(answer) as server, pytest.raises(RolloutError, match="cannot reach"):
            fetch(server.url)
    with pytest.raises(RolloutError, match="http or https"):
        fetch("file:///etc/passwd")
