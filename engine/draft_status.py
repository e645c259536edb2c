"""How the draft of a running engine fares: which one serves, and what came of the last one asked for.

Changing it is left to `draft_swap`.
"""

import enum
from dataclasses import dataclass


class DraftState(enum.StrEnum):
    """What came of the draft that was asked for last."""

    NONE = "none"  # the engine was started without a draft
    SERVING = "serving"
    LOADING = "loading"  # another one is read beside the one that serves
    REFUSED = "refused"  # it could not be loaded; the one before it stays
    BROKEN = "broken"  # it raised in a step
    COLLAPSED = "collapsed"  # hardly any of its tokens were accepted


@dataclass(frozen=True, slots=True)
class DraftStatus:
    """`digest` names the weights in place; `is_off` says that they were given up, so that every step decodes
    plainly until others are loaded. `message` says why in the last three states. The counts of drafts, in the
    words of `EngineStats`, are those of this digest alone; `num_swaps` and `num_refused` are totals.
    """

    digest: str | None
    state: DraftState
    is_off: bool = False
    message: str = ""
    num_swaps: int = 0
    num_refused: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


NO_DRAFT = DraftStatus(None, DraftState.NONE)
