"""What launching a step asks of its decode rows: most often they are those of the launch before.

Planning rows is left to the scheduler, running them to `decode_step` and `graphs`.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import DecodeRow
from engine.speculation import SamplingFlags, TreeShape
from engine.tree.topology import TreeTopology


@dataclass(frozen=True, slots=True)
class LaunchRows:
    """At least one row. `shape` covers all trees, `flags` is what some row needs."""

    rows: tuple[DecodeRow, ...]
    slots: tuple[int, ...]
    topologies: tuple[TreeTopology, ...]
    shape: TreeShape
    flags: SamplingFlags

    @staticmethod
    def of(rows: tuple[DecodeRow, ...], flags: Sequence[SamplingFlags]) -> "LaunchRows":
        """Collect it from the rows of a step and the `flags` of every slot."""
        slots = tuple([row.slot for row in rows])
        topologies = tuple([row.topology for row in rows])
        needed = functools.reduce(operator.or_, {flags[slot] for slot in slots})
        return LaunchRows(rows, slots, topologies, TreeShape.of(topologies), needed)
