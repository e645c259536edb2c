"""A grammar as a request asks for it, and as a compiler gave it back.

Compiling and matching are left to `grammar`; this is plain data that every process may hold.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from engine.errors import RequestError

GrammarKind = Literal["json", "json_schema", "regex", "ebnf", "choice"]
MAX_GRAMMAR_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match as a whole. Two of one kind and text are equal.

    text: a JSON schema, a regular expression, a grammar in EBNF whose first rule is `root`, or a JSON list of
    choices; "json" is any JSON object and has none. `parameter` names the client's field in errors.
    `compiled` is what a compiler made of it, empty until then.
    """

    kind: GrammarKind
    text: str = ""
    parameter: str = field(default="grammar", compare=False)
    compiled: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise RequestError(f"a grammar is one of {get_args(GrammarKind)}, found {self.kind!r}")
        num_bytes = len(self.text.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"{self.parameter} may have {MAX_GRAMMAR_BYTES} bytes, found {num_bytes}: simplify it",
                self.parameter,
            )
