"""What the engine asks of a grammar library: compile a grammar, and follow one answer through it.

Masks are host tensors of packed bits; what they forbid on the device is left to `token_mask`.
"""

from typing import Protocol

from torch import Tensor

from engine.guidance import Grammar


class Matcher(Protocol):
    """One answer's place in its grammar."""

    @property
    def is_finished(self) -> bool:
        """True once an end-of-text token was taken: nothing may follow."""
        ...

    def fill(self, mask: Tensor) -> None:
        """Write which tokens may come next into mask [W] int32 on the host, bit t % 32 of word t // 32.

        End-of-text tokens are among them only where the answer may end. Never asked once it is finished.
        """
        ...

    def advance(self, token_id: int) -> bool:
        """Take a token; False, and no change, where the grammar does not allow it."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens taken."""
        ...


class CompiledGrammar(Protocol):
    """A grammar ready for use, shared by the answers that follow it."""

    def matcher(self) -> Matcher:
        """Return a matcher at the grammar's beginning."""
        ...


class GrammarBackend(Protocol):
    """A grammar library with the vocabulary of one model."""

    def compile(self, grammar: Grammar) -> bytes:
        """Return `grammar` in a form that `load` reads, in another process too.

        Raises `RequestError` with the reason for a grammar that is malformed or asks for what cannot be kept.
        """
        ...

    def load(self, compiled: bytes) -> CompiledGrammar:
        """Return what `compile` made."""
        ...
