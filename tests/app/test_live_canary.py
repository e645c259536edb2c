"""The canary keys of `user_config`: the replicas that are named load the canary's draft, the others do not.

What else a running server changes is left to the tests of `live`.
"""

from pathlib import Path

import pytest

from app.choices import Limits
from app.config import ServerConfig
from app.live import LiveControl
from app.live_config import LiveConfig
from engine import ConfigError
from ops.rollout.serve_target import with_drafts
from ops.rollout.state import DraftRef
from ops.rollout.target import Desired

OLD, NEW = DraftRef("/drafts/old", "0" * 64), DraftRef("/drafts/new", "1" * 64)


class FakeEngine:
    def __init__(self) -> None:
        self.loaded: list[tuple[Path, str | None]] = []

    def load_draft(self, folder: Path, digest: str | None = None) -> None:
        self.loaded.append((folder, digest))

    def switch_speculation(self, mode: str) -> None:
        raise AssertionError(mode)


def user_config(desired: Desired) -> dict[str, str]:
    """What a rollout writes."""
    values = with_drafts({"applications": [{"name": "eyas"}]}, desired)
    return values["applications"][0]["deployments"][0]["user_config"]


async def loads(replica: str, *configs: dict[str, str]) -> list[tuple[Path, str | None]]:
    engine = FakeEngine()
    live = LiveControl(
        engine,
        ServerConfig(draft="/drafts/start"),
        Limits(10, None, None),
        lambda limits: None,
        lambda model, draft, digest: Path(str(draft)),
        replica,
    )
    for config in configs:
        live.apply(config)
        if live._loading is not None:
            await live._loading
    assert live.status().refusals == ()
    return engine.loaded


@pytest.mark.parametrize("replica", ["r1", "r2"])
async def test_a_named_replica_loads_the_canary_and_goes_back(replica):
    configs = [
        user_config(Desired(OLD)),
        user_config(Desired(OLD, NEW, ("r1", "r2"))),
        user_config(Desired(OLD)),
    ]
    assert await loads(replica, *configs) == [
        (Path("/drafts/old"), "0" * 64),
        (Path("/drafts/new"), "1" * 64),
        (Path("/drafts/old"), "0" * 64),
    ]


@pytest.mark.parametrize("replica", ["r", "r12", "r3", ""])
async def test_no_other_replica_loads_it(replica):
    configs = [user_config(Desired(OLD)), user_config(Desired(OLD, NEW, ("r1", "r2")))]
    assert await loads(replica, *configs) == [(Path("/drafts/old"), "0" * 64)]


async def test_promoting_loads_it_everywhere_but_where_it_is():
    canary, promoted = user_config(Desired(OLD, NEW, ("r1",))), user_config(Desired(NEW))
    assert await loads("r1", canary, promoted) == [(Path("/drafts/new"), "1" * 64)]
    assert (await loads("r2", canary, promoted))[-1] == (Path("/drafts/new"), "1" * 64)


async def test_going_back_to_the_draft_of_the_start_loads_that():
    start = DraftRef(None, "2" * 64)
    configs = [user_config(Desired(start, NEW, ("r1",))), user_config(Desired(start))]
    assert await loads("r1", *configs) == [(Path("/drafts/new"), "1" * 64), (Path("/drafts/start"), None)]


@pytest.mark.parametrize(
    "values", [{"canary_draft": "none", "canary_replicas": "r1"}, {"canary_draft_digest": "1" * 64}]
)
def test_a_canary_without_a_draft_is_refused(values):
    with pytest.raises(ConfigError, match="user_config: draft"):
        LiveConfig.parse(values)
