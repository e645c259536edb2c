"""Acceptance profiles as files, and scaled to a stated acceptance length.

Measuring one is left to `training/evaluate`, searching a tree for it to `search`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engine.errors import ConfigError
from engine.tree.search import Profile, acceptance_length, check_profile
from engine.tree.topology import TreeTopology

_MOST_ODDS = 1e6
_NUM_HALVINGS = 200


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """Acceptance by depth and rank, and where it was measured.

    `probabilities[d][r]`: how often the token after an accepted node of depth d had rank r among the draft's.
    """

    source: str
    probabilities: Profile

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a profile, or the manifest of a draft folder that states one as `acceptance_profile`.

        Raises `ConfigError` naming the file.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            raw = raw.get("acceptance_profile", raw)
            profile = tuple(tuple(float(p) for p in row) for row in raw["probabilities"])
            source = str(raw["source"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no acceptance profile: {error!r}") from error
        check_profile(profile)
        return cls(source, profile)

    def save(self, path: Path, counts: dict[str, Any]) -> None:
        """Write the profile as JSON beside the `counts` that it follows from."""
        entries = {"source": self.source, "probabilities": self.probabilities, **counts}
        path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def scale_profile(profile: Profile, topology: TreeTopology, tokens_per_call: float) -> Profile:
    """Return the profile of a better or worse draft, with which `topology` emits `tokens_per_call`.

    The odds of every first rank are multiplied by one factor; the other ranks keep their probability given
    that the first was wrong. Raises `ConfigError` where no factor gives that length.
    """
    low, high = 1 / _MOST_ODDS, _MOST_ODDS
    lengths = [acceptance_length(topology, _multiply_odds(profile, factor)) for factor in (low, high)]
    if not lengths[0] < tokens_per_call < lengths[1]:
        raise ConfigError(
            f"{topology.name} emits between {lengths[0]:.2f} and {lengths[1]:.2f} tokens per call with this "
            f"profile, {tokens_per_call} were asked"
        )
    for _ in range(_NUM_HALVINGS):
        factor = (low * high) ** 0.5
        if acceptance_length(topology, _multiply_odds(profile, factor)) < tokens_per_call:
            low = factor
        else:
            high = factor
    scaled = _multiply_odds(profile, high)
    check_profile(scaled)
    return scaled


def _multiply_odds(profile: Profile, factor: float) -> Profile:
    rows = []
    for first, *others in profile:
        better = factor * first / (1 - first + factor * first)
        rest = (1 - better) / (1 - first) if first < 1 else 0.0
        rows.append((better, *(p * rest for p in others)))
    return tuple(rows)
