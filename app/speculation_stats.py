"""How speculation went in one call, in the shape that vLLM gives and load testers read.

Counters over all calls are left to the engine and `metrics`.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationStats:
    """Counts the steps of a call that drafted. `accepted_counts[k]` steps kept k drafts."""

    num_drafted: int = 0
    num_accepted: int = 0
    most_drafted: int = 0
    accepted_counts: list[int] = field(default_factory=list)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count one step of one choice; a step that drafted nothing is plain decoding and not counted."""
        if num_drafted == 0:
            return
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.most_drafted = max(self.most_drafted, num_drafted)
        self.accepted_counts += [0] * (num_accepted + 1 - len(self.accepted_counts))
        self.accepted_counts[num_accepted] += 1

    def body(self) -> dict[str, object]:
        """Return the object `speculative_decoding`; lengths count the token that each step adds itself."""
        num_steps = sum(self.accepted_counts)
        return {
            "mean_acceptance_length": 1 + self.num_accepted / num_steps if num_steps else None,
            "draft_acceptance_rate": self.num_accepted / self.num_drafted if num_steps else None,
            "acceptance_histogram": self.accepted_counts,
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_drafted,
            "num_spec_tokens": self.most_drafted,
        }
