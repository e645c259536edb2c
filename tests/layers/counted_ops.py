"""Ops that count their calls. What they answer is left to torch."""

from collections import Counter

from engine.layers.ops import TorchOps


class CountedOps:
    """`TorchOps` with a count per name."""

    def __init__(self):
        self.counts = Counter()

    def __getattr__(self, name):
        self.counts[name] += 1
        return getattr(TorchOps(), name)
