"""A fleet of Serve replicas: asked through `user_config`, seen through the metrics page.

Where the Serve configuration is kept is behind a protocol: `dashboard` and `ray_service`. Loading a draft,
and turning one off that fails, is left to the replicas.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.parser import text_string_to_metric_families

from ops.rollout.state import DraftRef, RolloutError
from ops.rollout.target import Desired, Replica

DEPLOYMENT = "llm-server"
INFO = "eyas_engine_info"  # one sample per replica; its digest is that of the start
DRAFT = "eyas_draft_trees_total"  # carries the digest of the weights in place
GIVEN_UP = "eyas_draft_off"
COUNTERS = (
    "eyas_step_seconds_total",
    "eyas_steps_total",
    "eyas_verification_calls_total",
    "eyas_generation_tokens_total",
)
REFUSALS = "eyas_draft_refusals_total"  # replicas of an older image have none
OUR_KEYS = ("draft", "draft_digest", "canary_draft", "canary_draft_digest", "canary_replicas")
NUM_ATTEMPTS = 5  # of a change that others' changes get in the way of


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What Serve was asked for: the values of its YAML, and the version that a change must name."""

    values: dict[str, Any]
    version: str


class ConfigSource(Protocol):
    """Keeps the Serve configuration."""

    def read(self) -> ServeConfig:
        """Raises `RolloutError`."""
        ...

    def write(self, config: ServeConfig) -> bool:
        """Replace the configuration, and say whether `version` was still the kept one. Raises
        `RolloutError`.
        """
        ...


class ServeTarget:
    """See `Target`. `read_metrics` returns the text of /metrics."""

    def __init__(self, source: ConfigSource, read_metrics: Callable[[], str]) -> None:
        self._source = source
        self._read_metrics = read_metrics

    def observe(self) -> Sequence[Replica]:
        return parse_replicas(self._read_metrics())

    def apply(self, desired: Desired) -> None:
        for _ in range(NUM_ATTEMPTS):
            config = self._source.read()
            values = with_drafts(config.values, desired)
            if values == config.values or self._source.write(ServeConfig(values, config.version)):
                return
        raise RolloutError(f"the Serve configuration was changed by others {NUM_ATTEMPTS} times: try again")

    def stable(self) -> str | None:
        user_config = _deployment(self._source.read().values).get("user_config") or {}
        folder: str | None = user_config.get("draft")
        return folder


def with_drafts(values: dict[str, Any], desired: Desired) -> dict[str, Any]:
    """Return the Serve configuration with a `user_config` that asks for `desired`; all else is as it was.

    It is flat and canonical: Serve compares its text.
    """
    values = copy.deepcopy(values)
    deployment = _deployment(values)
    user_config = {
        key: value for key, value in (deployment.get("user_config") or {}).items() if key not in OUR_KEYS
    }
    user_config |= _keys("draft", desired.stable)
    if desired.candidate is not None:
        user_config |= _keys("canary_draft", desired.candidate)
        user_config["canary_replicas"] = ",".join(sorted(desired.canary))
    deployment["user_config"] = dict(sorted(user_config.items()))
    return values


def parse_replicas(text: str) -> list[Replica]:
    """Return the replicas of a metrics page. Raises `RolloutError` where it is not one of ours."""
    try:
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        names = sorted(one.labels["replica"] for one in samples if one.name == INFO)
        digests = {one.labels["replica"]: one.labels["draft_digest"] for one in samples if one.name == DRAFT}
        off = {one.labels["replica"] for one in samples if one.name == GIVEN_UP and one.value}
        counts = {
            (one.labels["replica"], one.name): one.value
            for one in samples
            if one.name in (*COUNTERS, REFUSALS)
        }
        return [_replica(name, digests.get(name), name in off, counts) for name in names]
    except (KeyError, ValueError) as error:
        raise RolloutError(f"the metrics page is not that of Eyas: {error!r}") from error


def _replica(name: str, digest: str | None, is_off: bool, counts: Mapping[tuple[str, str], float]) -> Replica:
    seconds, steps, calls, tokens = (counts[name, counter] for counter in COUNTERS)
    refusals = int(counts.get((name, REFUSALS), 0))
    return Replica(name, digest, is_off, seconds, int(steps), int(calls), int(tokens), refusals)


def _keys(name: str, draft: DraftRef) -> dict[str, str]:
    """A draft without a folder is the one of the start: it has no key."""
    if draft.folder is None:
        return {}
    return {name: draft.folder} | ({} if draft.digest is None else {f"{name}_digest": draft.digest})


def _deployment(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of our server, added where it is not listed, of the one application that may have
    it.
    """
    applications = values.get("applications", [])
    for application in applications:
        for deployment in application.get("deployments") or []:
            if deployment.get("name") == DEPLOYMENT:
                found: dict[str, Any] = deployment
                return found
    if len(applications) != 1:
        raise RolloutError(
            f"expected one application with a deployment {DEPLOYMENT}, found {len(applications)}"
        )
    added: dict[str, Any] = {"name": DEPLOYMENT}
    applications[0]["deployments"] = [*(applications[0].get("deployments") or []), added]
    return added
