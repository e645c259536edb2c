"""Opens the grammar library of this installation for one model.

Which libraries exist is known here alone; all others hold a `GrammarBackend`.
"""

from collections.abc import Callable

from engine.errors import RequestError
from engine.grammar.matcher import GrammarBackend
from engine.grammar.vocabulary import ModelTokens, Vocabulary

OpenBackend = Callable[[], GrammarBackend]


def no_backend() -> GrammarBackend:
    """Refuse: an engine without a model folder knows no tokens."""
    raise RequestError("this engine has no tokenizer, so it cannot follow a grammar")


def open_backend(model: ModelTokens) -> GrammarBackend:
    """Return the backend for the tokens of `model`. Takes a second or two: libraries are imported.

    Raises `RequestError` where no library is installed, or the model cannot end an answer, and
    `ModelLoadError` for a tokenizer that is not understood.
    """
    try:
        from engine.grammar.xgrammar_backend import XGrammarBackend
    except ImportError as error:
        raise RequestError(
            "this server cannot follow a grammar: the library xgrammar is missing, install eyas[guided]"
        ) from error
    if not model.eos_token_ids:
        raise RequestError("this model has no end-of-text token, so an answer could not end with its grammar")
    return XGrammarBackend(Vocabulary.load(model))
