"""Windows of counters: what replicas did between two looks at them, by draft.

Whether that is good is left to `analysis`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ops.rollout.analysis import Window
from ops.rollout.target import Replica


@dataclass(frozen=True, slots=True)
class Windows:
    """All windows so far of both drafts."""

    candidate: tuple[Window, ...] = ()
    stable: tuple[Window, ...] = ()

    def extend(self, before: Sequence[Replica], after: Sequence[Replica], canary: Sequence[str]) -> "Windows":
        """Add one window per replica that worked all the time between, with one draft."""
        old = {replica.name: replica for replica in before}
        found: tuple[list[Window], list[Window]] = ([], [])
        for replica in after:
            start = old.get(replica.name)
            if start is not None and start.digest == replica.digest:
                window = _difference(start, replica)
                if window is not None:
                    found[replica.name not in canary].append(window)
        return Windows((*self.candidate, *found[0]), (*self.stable, *found[1]))


def canary_problems(
    replicas: Sequence[Replica], canary: Sequence[str], digest: str | None
) -> tuple[str, ...]:
    """Say which canary replicas are gone, have other weights than the candidate's, or gave them up."""
    found = {replica.name: replica for replica in replicas}
    problems = []
    for name in canary:
        replica = found.get(name)
        if replica is None:
            problems.append(f"canary replica {name} is gone")
        elif replica.digest != digest:
            problems.append(f"canary replica {name} serves {replica.digest}")
        elif replica.is_off:
            problems.append(f"canary replica {name} gave the draft up and decodes plainly")
    return tuple(problems)


def new_refusals(before: Sequence[Replica], after: Sequence[Replica]) -> tuple[str, ...]:
    """Say which replicas could not load a draft between two looks at them."""
    counts = {replica.name: replica.num_refusals for replica in before}
    refusing = (one.name for one in after if one.num_refusals > counts.get(one.name, one.num_refusals))
    return tuple(f"replica {name} could not load the draft: see its log" for name in refusing)


def _difference(start: Replica, end: Replica) -> Window | None:
    """Return what a replica did, None for one that was idle or has started anew."""
    window = Window(
        end.seconds - start.seconds,
        end.steps - start.steps,
        end.calls - start.calls,
        end.tokens - start.tokens,
    )
    is_whole = min(window.seconds, window.steps, window.calls, window.tokens) > 0
    return window if is_whole else None
