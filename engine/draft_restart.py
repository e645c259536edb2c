"""Where the draft K/V of a running sequence begins anew once all that was written is worth nothing.

Which sequences run is the scheduler's to say, the device's state the runner's.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftRestart:
    """The sequence in `slot` may write draft K/V from position `start` on: what lies before is shared with
    others, or its features are gone. `is_prefilling` says that chunks of its prompt are still to come.
    """

    slot: int
    start: int
    is_prefilling: bool
