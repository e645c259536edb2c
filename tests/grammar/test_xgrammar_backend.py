"""The library's grammars against other readers of the same languages: `json`, `jsonschema` and `re`.

Answers are drawn at random from what the masks allow, so that every corner is met, not only what a model
would say.
"""

import json
import random
import re

import jsonschema
import pytest
import torch

from engine.errors import RequestError
from engine.grammar.backend import open_backend
from engine.grammar.token_mask import TokenBits, mask_width
from engine.grammar.vocabulary import ModelTokens, Vocabulary
from engine.guidance import MAX_GRAMMAR_BYTES, Grammar
from tests.app.harness import write_model

pytest.importorskip("xgrammar")

VOCAB, EOS = 258, 1
BITS = TokenBits(VOCAB, torch.device("cpu"))
SCHEMAS = {
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "address": {
                "type": "object",
                "properties": {
                    "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                    "city": {"enum": ["Köln", "Ürü"]},
                },
                "required": ["zip", "city"],
            },
        },
        "required": ["name", "address"],
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
    },
    "numbers": {
        "type": "array",
        "items": {"type": "integer", "minimum": -3, "maximum": 17},
        "minItems": 1,
        "maxItems": 4,
    },
    "real": {"type": "number", "minimum": 0, "maximum": 10},
    "multiple": {"type": "integer", "multipleOf": 7},
    "recursive": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
            }
        },
    },
    "const": {"const": {"a": [1, "x"]}},
    "text": {"type": "string", "minLength": 2, "maxLength": 5},
    "any string": {"type": "string"},
    "dot": {"type": "string", "pattern": "^.{3}$"},
    "class": {"type": "string", "pattern": "^[^a-z]{2,4}$"},
    "date": {"type": "string", "format": "date"},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": [1, 2]}],
        "items": False,
        "minItems": 2,
    },
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "keys": {"type": "object", "patternProperties": {"^x[0-9]$": {"enum": [1]}}, "maxProperties": 2},
    "types": {"type": ["boolean", "null"]},
    "one of": {
        "oneOf": [
            {"$ref": "#/$defs/yes"},
            {
                "type": "object",
                "properties": {"kind": {"const": "no"}, "x": {"type": "null"}},
                "required": ["kind"],
            },
            {"enum": [7, "seven"]},
        ],
        "$defs": {"yes": {"type": "object", "properties": {"kind": {"const": "yes"}}, "required": ["kind"]}},
    },
    "true": {"type": "object", "properties": {"a": True}, "required": ["a"]},
}
REGEXES = ["[a-z]+@[a-z]+\\.(com|org)", "(yes|no){2}", "\\d{3}-\\d{4}", "a?b*c+", "[^a]{1,3}", "", "ü|ö{2}"]


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return open_backend(ModelTokens(folder, VOCAB, (EOS,)))


@pytest.fixture(scope="module")
def texts(backend, tmp_path_factory):
    """Return the bytes of each token: the tokenizer of the tests has one for every byte."""
    folder = tmp_path_factory.mktemp("texts")
    write_model(folder)
    return Vocabulary.load(ModelTokens(folder, VOCAB, (EOS,))).tokens


def allowed(matcher) -> list[int]:
    mask = torch.zeros(mask_width(VOCAB), dtype=torch.int32)
    matcher.fill(mask)
    return BITS.unpack(mask[None])[0].nonzero().flatten().tolist()


def answers(backend, texts, grammar: Grammar, num: int, seed: int = 0):
    """Yield whole answers, drawn from what is allowed; those that grow long are left out."""
    compiled = backend.load(backend.compile(grammar))
    rng = random.Random(seed)
    for _ in range(num):
        matcher, answer = compiled.matcher(), b""
        while len(answer) < 200:
            legal = allowed(matcher)
            token = EOS if EOS in legal and rng.random() < 0.3 else rng.choice(legal)
            assert matcher.advance(token)
            if matcher.is_finished:
                yield answer.decode()
                break
            answer += texts[token]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_to_a_schema_parses_and_validates(backend, texts, name):
    grammar = Grammar("json_schema", json.dumps(SCHEMAS[name]))
    found = [*answers(backend, texts, grammar, 200)]
    assert len(found) >= 5
    for answer in found:
        jsonschema.validate(json.loads(answer), SCHEMAS[name])
    assert len(set(found)) > 1 or name == "const"


def test_every_answer_of_kind_json_is_an_object_on_one_line(backend, texts):
    found = [*answers(backend, texts, Grammar("json"), 60)]
    assert len(found) >= 5
    for answer in found:
        assert isinstance(json.loads(answer), dict)
        assert answer.isprintable() or not any(ord(char) < 0x20 for char in answer)


@pytest.mark.parametrize("pattern", REGEXES)
def test_every_answer_to_a_regular_expression_matches_it(backend, texts, pattern):
    found = [*answers(backend, texts, Grammar("regex", pattern), 40)]
    assert found
    for answer in found:
        assert re.fullmatch(pattern, answer, re.DOTALL), answer


def test_every_choice_is_met_and_nothing_else(backend, texts):
    choices = ["yes", "no", 'a "quoted" one', "back\\slash", "two\nlines", "ünï", "yes and no", "]"]
    found = {*answers(backend, texts, Grammar("choice", json.dumps(choices)), 300)}
    assert found == set(choices)


def test_a_grammar_in_ebnf_is_kept(backend, texts):
    text = 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]+ | root'
    for answer in answers(backend, texts, Grammar("ebnf", text), 60):
        assert isinstance(json.loads(re.sub(r"\b0+(?=\d)", "", answer)), list)


def test_the_end_is_allowed_only_where_the_answer_is_whole(backend, texts):
    matcher = backend.load(backend.compile(Grammar("regex", "ab?"))).matcher()
    token = {text: idx for idx, text in enumerate(texts) if text}
    assert allowed(matcher) == [token[b"a"]]
    assert not matcher.advance(token[b"b"])
    assert matcher.advance(token[b"a"])
    assert set(allowed(matcher)) == {token[b"b"], EOS}
    assert matcher.advance(token[b"b"])
    assert allowed(matcher) == [EOS]
    assert matcher.advance(EOS)
    assert matcher.is_finished
    matcher.rollback(2)
    assert set(allowed(matcher)) == {token[b"b"], EOS}


@pytest.mark.parametrize("num_taken", range(12))
def test_tokens_taken_back_leave_no_trace(backend, texts, num_taken):
    compiled = backend.load(backend.compile(Grammar("json_schema", json.dumps(SCHEMAS["nested"]))))
    token = {text: idx for idx, text in enumerate(texts) if text}
    answer = [token[bytes([byte])] for byte in b'{"name": "Ann", "address": {"zip": "01234"']
    straight, back_and_forth = compiled.matcher(), compiled.matcher()
    for idx, token_id in enumerate(answer):
        ahead = answer[idx : idx + num_taken]
        assert all(back_and_forth.advance(each) for each in ahead)
        if ahead:
            back_and_forth.rollback(len(ahead))
        assert allowed(straight) == allowed(back_and_forth)
        assert straight.advance(token_id)
        assert back_and_forth.advance(token_id)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", "{", "must be a JSON schema"),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 1}', "minimum greater than maximum"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "Cannot find field"),
        ("json_schema", '{"not": {}}', "'not'"),
        ("json_schema", "false", "cannot accept any value"),
        ("regex", "(a", "parenthesis is not closed"),
        ("regex", "(?=a)b", "Lookahead"),
        ("regex", "(a)\\1", "Backreference"),
        ("ebnf", "root ::= b", "not defined"),
        ("ebnf", 'start ::= "a"', "root rule"),
        ("choice", "[]", "1 to"),
        ("choice", '["a", ""]', "none empty"),
        ("choice", '["a", 3]', "list of"),
    ],
)
def test_a_grammar_that_is_not_valid_is_refused_with_the_reason(backend, kind, text, reason):
    with pytest.raises(RequestError, match=reason) as refusal:
        backend.compile(Grammar(kind, text, parameter="guided_grammar"))
    assert refusal.value.parameter == "guided_grammar"
    assert str(refusal.value).startswith("guided_grammar")
    assert ".cc:" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_a_grammar_is_bounded_in_size():
    Grammar("regex", "a" * MAX_GRAMMAR_BYTES)
    with pytest.raises(RequestError, match="bytes"):
        Grammar("regex", "a" * MAX_GRAMMAR_BYTES + "a")
    with pytest.raises(RequestError, match="one of"):
        Grammar("lark", "a")


def test_a_model_that_cannot_end_an_answer_is_refused(tmp_path):
    write_model(tmp_path)
    with pytest.raises(RequestError, match="end-of-text"):
        open_backend(ModelTokens(tmp_path, VOCAB, ()))
