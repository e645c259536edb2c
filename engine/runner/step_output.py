"""What the parts of a step hand to its end: of decoded rows and of prefilled chunks.

Computing them is left to `decode_step` and `prefill_step`.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.speculation import Verification


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """What came of the rows of a step, behind which there may be padding: the answer for the host as
    `CommittedRows` has it, the target's raw logits [B, N, V] at every node, and how they were walked.
    """

    answer: Tensor
    logits: Tensor
    verification: Verification


@dataclass(frozen=True, slots=True)
class PrefilledChunks:
    """What came of C chunks of T tokens: is_finite [C] bool, and hidden [T, H], the input of the head."""

    is_finite: Tensor
    hidden: Tensor
