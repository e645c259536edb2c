"""`GrammarBackend` by the library xgrammar: a byte-level pushdown automaton with precomputed token masks.

Limits of time and memory are left to `compiler`.
"""

import json
from typing import Any

import xgrammar
from torch import Tensor

from engine.errors import RequestError
from engine.grammar.json_schema import check_schema
from engine.grammar.matcher import CompiledGrammar, Matcher
from engine.grammar.token_mask import pack
from engine.grammar.vocabulary import Vocabulary
from engine.guidance import Grammar

# One line of JSON, so that no answer runs away in whitespace.
_SEPARATORS = (", ", ": ")
_JSON_KINDS = ("json", "json_schema")
_ANY_OBJECT = '{"type": "object", "additionalProperties": true}'
_MAX_CHOICES = 10_000


# After these first bytes of a character UTF-8 allows fewer second bytes than the library does.
_SECOND_BYTES = {
    0xE0: range(0xA0, 0xC0),
    0xED: range(0x80, 0xA0),
    0xF0: range(0x90, 0xC0),
    0xF4: range(0x80, 0x90),
}


class XGrammarBackend:
    """Compiles and loads grammars over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._infos = {
            # A line of JSON holds no control character, also where the library lets one into a string.
            is_json: _tokenizer_info(vocabulary, without_controls=is_json)
            for is_json in (False, True)
        }
        self._digest = vocabulary.digest
        self._characters = _Characters(vocabulary)

    def compile(self, grammar: Grammar) -> bytes:
        """See `GrammarBackend`."""
        source = _source(grammar)
        is_json = grammar.kind in _JSON_KINDS
        compiler = xgrammar.GrammarCompiler(self._infos[is_json], max_threads=1, cache_enabled=False)
        try:
            compiled = compiler.compile_grammar(_parse(grammar, source))
        except (RuntimeError, ValueError, TypeError) as error:
            raise RequestError(
                f"{grammar.parameter} is not valid: {_reason(error)}", grammar.parameter
            ) from error
        head = json.dumps({"digest": self._digest, "is_json": is_json})
        return f"{head}\n{compiled.serialize_json()}".encode()

    def load(self, compiled: bytes) -> CompiledGrammar:
        """See `GrammarBackend`."""
        head, _, body = compiled.partition(b"\n")
        facts = json.loads(head)
        assert facts["digest"] == self._digest, "a grammar compiled for another tokenizer"
        info = self._infos[facts["is_json"]]
        return _Compiled(xgrammar.CompiledGrammar.deserialize_json(body.decode(), info), self._characters)


class _Characters:
    """What keeps answers in UTF-8. `after` maps a first byte of a character to the mask of the tokens that
    may follow; `last_bytes` holds the byte that each token ends with, -1 where it has none.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.tokens
        self.last_bytes = [token[-1] if token else -1 for token in tokens]
        self.after = {
            first: pack(
                (idx for idx, token in enumerate(tokens) if token and token[0] in second), len(tokens)
            )
            for first, second in _SECOND_BYTES.items()
        }


class _Compiled:
    def __init__(self, compiled: xgrammar.CompiledGrammar, characters: _Characters) -> None:
        self._compiled, self._characters = compiled, characters

    def matcher(self) -> Matcher:
        return _Matcher(xgrammar.GrammarMatcher(self._compiled), self._characters)


class _Matcher:
    def __init__(self, inner: xgrammar.GrammarMatcher, characters: _Characters) -> None:
        self._inner, self._characters = inner, characters
        self._last_bytes = [-1]

    @property
    def is_finished(self) -> bool:
        return bool(self._inner.is_terminated())

    def fill(self, mask: Tensor) -> None:
        # The answer False says that all is allowed, and that the mask says so too.
        self._inner.fill_next_token_bitmask(mask[None])
        within = self._characters.after.get(self._last_bytes[-1])
        if within is not None:
            mask &= within

    def advance(self, token_id: int) -> bool:
        is_taken = bool(self._inner.accept_token(token_id))
        if is_taken:
            self._last_bytes.append(self._characters.last_bytes[token_id])
        return is_taken

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        del self._last_bytes[len(self._last_bytes) - num_tokens :]


def _tokenizer_info(vocabulary: Vocabulary, without_controls: bool) -> xgrammar.TokenizerInfo:
    tokens = list(vocabulary.tokens)
    if without_controls:
        tokens = [b"" if any(byte < 0x20 for byte in token) else token for token in tokens]
    return xgrammar.TokenizerInfo(
        tokens,
        xgrammar.VocabType.RAW,
        vocab_size=len(tokens),
        stop_token_ids=list(vocabulary.eos_token_ids),
    )


def _source(grammar: Grammar) -> str:
    """Return the text for the library, once all that it would pass over in silence is refused."""
    match grammar.kind:
        case "json":
            return _ANY_OBJECT
        case "json_schema":
            check_schema(grammar.text, grammar.parameter)
        case "choice":
            return _choices(grammar)
        case _:
            pass
    return grammar.text


def _parse(grammar: Grammar, source: str) -> xgrammar.Grammar:
    match grammar.kind:
        case "json" | "json_schema":
            return xgrammar.Grammar.from_json_schema(
                source, any_whitespace=False, separators=_SEPARATORS, strict_mode=True
            )
        case "regex":
            return xgrammar.Grammar.from_regex(source)
        case _:
            return xgrammar.Grammar.from_ebnf(source)


def _choices(grammar: Grammar) -> str:
    """Return the rule of a JSON list of texts."""
    choices: Any = json.loads(grammar.text)
    is_valid = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
    if not is_valid or not 1 <= len(choices) <= _MAX_CHOICES:
        raise RequestError(
            f"{grammar.parameter} must be a list of 1 to {_MAX_CHOICES} texts, none empty", grammar.parameter
        )
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _reason(error: Exception) -> str:
    """Return the library's words without its time stamp and source line, and not all of a long quotation."""
    text = " ".join(str(error).split())
    _, mark, reason = text.partition(": ")
    reason = reason if mark and text.startswith("[") else text
    reason = reason.removeprefix("Check failed: ").removeprefix("(error.empty()) is false: ")
    return reason[:300]
