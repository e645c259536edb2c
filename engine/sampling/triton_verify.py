"""`Verify` on a CUDA device: deterministic drafts by the kernels of `engine/kernels`, the rest by torch.

The law is that of `verify`, which also takes what the kernels do not.
"""

import dataclasses

import torch
from torch import Tensor

from engine.kernels.sampling import verify_drafts
from engine.sampling.noise import Stream
from engine.sampling.verify import verify
from engine.sampling.warp import warp
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors, Verification


class TritonVerify:
    """Same tokens as `verify` for the same logits; fixed launches, fit for capture.

    Where the batch needs more than truncation (penalties, bias, minimum length), that part of warping stays
    in torch, level by level. `overlap` lets a launch begin before the kernel ahead of it has ended (compute
    capability 9 and up).
    """

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap

    def __call__(
        self,
        logits: Tensor,
        draft: DraftOutput,
        tree: TreeTensors,
        sampling: SamplingTensors,
        root_positions: Tensor,
    ) -> Verification:
        """See `verify`. Sampled drafts and float64 logits are its own."""
        if draft.probs is not None or logits.dtype == torch.float64:
            return verify(logits, draft, tree, sampling, root_positions)
        untruncated = dataclasses.replace(sampling, is_truncated=False)
        output_counts = sampling.output_counts.clone()

        def warp_level(node: Tensor, token: Tensor | None, level: int) -> Tensor:
            if sampling.is_penalized and token is not None:
                output_counts.scatter_add_(1, token.clamp(min=0)[:, None], (token >= 0).int()[:, None])
            rows = torch.arange(tree.num_rows, device=logits.device)
            return warp(logits[rows, node], untruncated, output_counts, root_positions + (level + 1))

        needs_warp = sampling.is_penalized or sampling.is_biased or sampling.has_min_tokens
        return verify_drafts(
            *(logits, draft, tree, sampling, root_positions),
            stream=Stream.TARGET,
            warp_level=warp_level if needs_warp else None,
            overlap=self._overlap,
        )
