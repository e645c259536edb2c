"""Grammars as tables of tokens, without any library: state -> {token: next state}; state 0 begins.

A state whose table holds the end-of-text token may end. What is asked of them is left to the tests.
"""

import json
import random
from dataclasses import dataclass, field

from torch import Tensor

from engine.grammar.token_mask import pack
from engine.guidance import Grammar

END = -1  # the state behind the end of the text
Table = list[dict[int, int]]


def grammar_of(table: Table) -> Grammar:
    return Grammar("ebnf", json.dumps([{str(t): s for t, s in state.items()} for state in table]))


def table_of(grammar: Grammar) -> Table:
    return [{int(t): s for t, s in state.items()} for state in json.loads(grammar.text)]


def random_table(seed: int, vocab: int, eos: int, num_states: int = 6, num_tokens: int = 12) -> Table:
    """Return a table where some tokens lead anywhere, and some states may end."""
    rng = random.Random(seed)
    table: Table = []
    for _ in range(num_states):
        tokens = rng.sample(range(6, vocab), num_tokens)
        table.append({token: rng.randrange(num_states) for token in tokens})
        if rng.random() < 0.3:
            table[-1][eos] = END
    return table


def follow(table: Table, tokens: tuple[int, ...]) -> int:
    """Return the state behind `tokens`; a token that is not allowed is a `KeyError`."""
    state = 0
    for token in tokens:
        state = table[state][token]
    return state


@dataclass
class AutomatonMatcher:
    table: Table
    states: list[int] = field(default_factory=lambda: [0])

    @property
    def is_finished(self) -> bool:
        return self.states[-1] == END

    def fill(self, mask: Tensor) -> None:
        mask.copy_(pack(self.table[self.states[-1]], 32 * len(mask)))

    def advance(self, token_id: int) -> bool:
        state = self.table[self.states[-1]].get(token_id)
        if state is not None:
            self.states.append(state)
        return state is not None

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens < len(self.states)
        del self.states[len(self.states) - num_tokens :]


@dataclass
class Automaton:
    table: Table
    matcher_type: type[AutomatonMatcher] = AutomatonMatcher

    def matcher(self) -> AutomatonMatcher:
        return self.matcher_type(self.table)


@dataclass
class AutomatonBackend:
    """`matcher_types` replaces the matchers of single grammars, to break them."""

    matcher_types: dict[Grammar, type[AutomatonMatcher]] = field(default_factory=dict)

    def compile(self, grammar: Grammar) -> bytes:
        return grammar.text.encode()

    def load(self, compiled: bytes) -> Automaton:
        grammar = Grammar("ebnf", compiled.decode())
        return Automaton(table_of(grammar), self.matcher_types.get(grammar, AutomatonMatcher))
