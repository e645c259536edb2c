"""A scaled profile has exactly the length that was asked for, and a file says what it does not hold."""

import json

import pytest

from engine.errors import ConfigError
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.profile import MeasuredProfile, scale_profile
from engine.tree.search import acceptance_length, search
from engine.tree.topology import chain


@pytest.mark.parametrize(
    "topology", [chain(1), chain(3), search(DEFAULT_PROFILE, 16, 5)], ids=lambda t: t.name
)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_scaled_profile_gives_the_length_asked_for(topology, share):
    wanted = 1 + share * topology.depth
    scaled = scale_profile(DEFAULT_PROFILE, topology, wanted)
    assert acceptance_length(topology, scaled) == pytest.approx(wanted, abs=1e-9)


def test_scaling_keeps_the_other_ranks_as_likely_after_a_wrong_first():
    scaled = scale_profile(DEFAULT_PROFILE, chain(3), 2.78)
    for (first, *others), (new_first, *new_others) in zip(DEFAULT_PROFILE, scaled, strict=True):
        assert new_first > first
        assert [p / (1 - new_first) for p in new_others] == pytest.approx([p / (1 - first) for p in others])


def test_scaling_multiplies_the_odds_of_every_depth_alike():
    scaled = scale_profile(DEFAULT_PROFILE, chain(3), 2.0)
    odds = [[row[0] / (1 - row[0]) for row in profile] for profile in (DEFAULT_PROFILE, scaled)]
    factors = [new / old for old, new in zip(*odds, strict=True)]
    assert factors == pytest.approx([factors[0]] * len(factors))


@pytest.mark.parametrize("wanted", [0.9, 4.0, 5.0])
def test_a_length_that_no_draft_has_is_refused(wanted):
    with pytest.raises(ConfigError, match="chain-3 emits between"):
        scale_profile(DEFAULT_PROFILE, chain(3), wanted)


def test_a_profile_survives_its_file(tmp_path):
    path = tmp_path / "profile.json"
    profile = MeasuredProfile("a test", DEFAULT_PROFILE)
    profile.save(path, {"totals": [3, 2, 1]})
    assert MeasuredProfile.load(path) == profile
    assert json.loads(path.read_text())["totals"] == [3, 2, 1]


def test_the_profile_of_a_manifest_is_found(tmp_path):
    path = tmp_path / "manifest.json"
    entries = {"name": "x", "acceptance_profile": {"source": "here", "probabilities": [[0.5, 0.25]]}}
    path.write_text(json.dumps(entries))
    assert MeasuredProfile.load(path) == MeasuredProfile("here", ((0.5, 0.25),))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"source": "x"}',
        '{"probabilities": [[0.5]]}',
        '{"source": "x", "probabilities": 3}',
        '{"source": "x", "probabilities": [["a"]]}',
        '{"source": "x", "probabilities": []}',
        '{"source": "x", "probabilities": [[0.1, 0.5]]}',
        '{"source": "x", "probabilities": [[0.9, 0.5]]}',
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="profile"):
        MeasuredProfile.load(path)
