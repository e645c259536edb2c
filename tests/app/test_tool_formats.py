"""Tool calls in model text: every split of a text gives the same, and text without calls is untouched."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tool_calls import CallArguments, CallStart, Piece
from app.tool_formats import ToolFormat, make_parser

NAMES = frozenset({"get_weather", "add"})
Result = tuple[str, list[tuple[str, str]]]

WEATHER = '{"name": "get_weather", "arguments": {"city": "Köln \\"Süd\\"", "days": [1, {"a": "}"}]}}'
WEATHER_CALL = ("get_weather", '{"city": "Köln \\"Süd\\"", "days": [1, {"a": "}"}]}')
ADD = '{"name": "add", "arguments": {"a": 1}}'
ADD_CALL = ("add", '{"a": 1}')

# format, text, content, calls
TRANSCRIPTS: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [WEATHER_CALL]),
    ("hermes", f"<tool_call>[{ADD},\n{WEATHER}]</tool_call>", "", [ADD_CALL, WEATHER_CALL]),
    ("hermes", f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>\n", "", [ADD_CALL, ADD_CALL]),
    ("hermes", f"Let me see.\n\n<tool_call>{ADD}</tool_call>", "Let me see.", [ADD_CALL]),
    ("hermes", f"<tool_call>{ADD}</tool_call>\nDone. ", "Done.", [ADD_CALL]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [ADD_CALL]),
    ("hermes", '<tool_call>{"arguments": 5, "name": "add"}</tool_call>', "", [("add", "5")]),
    ("hermes", '<tool_call>{"id": [{}], "name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD_CALL]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "", [ADD_CALL]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": "</tool_call>"}}</tool_call>', "",
     [("add", '{"x": "</tool_call>"}')]),
    ("hermes", f"<tool_call>{ADD}", "", [ADD_CALL]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a"', "", [("add", '{"a"')]),
    ("hermes", "<tool_call>[]</tool_call>", "", []),
    ("hermes", f"<tool_call>{ADD} oops</tool_call> x", "oops</tool_call> x", [ADD_CALL]),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}', "", [ADD_CALL]),
    ("llama3", f"<|python_tag|>{ADD}; {WEATHER}", "", [ADD_CALL, WEATHER_CALL]),
    ("llama3", f"\n {ADD}\n{ADD}", "", [ADD_CALL, ADD_CALL]),
    ("llama3", f"[{ADD}, {ADD}]", "", [ADD_CALL, ADD_CALL]),
    ("llama3", '{"type": "function", "function": "add", "parameters": {"a": 1}}', "", [ADD_CALL]),
    ("llama3", f"{ADD} and so on", "and so on", [ADD_CALL]),
    ("llama3", '{"name": "add", "parameters": {"a": 1', "", [("add", '{"a": 1')]),
]  # fmt: skip

CONTENT: list[tuple[ToolFormat, str]] = [
    ("hermes", "Plain words, a < b, <b>bold</b>, <tool_calls>, <<tool_cal> \n "),
    ("hermes", " <tool_call>no JSON</tool_call> after"),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
    ("hermes", '\n<tool_call>{"arguments": {}}</tool_call>\n'),
    ("hermes", "<tool_call>{5}</tool_call>"),
    ("hermes", "<tool_call>[]</tool_callx"),
    ("hermes", '  <tool_call>{"name": "ad'),
    ("hermes", "text <tool_c"),
    ("hermes", ADD),
    ("llama3", 'The answer is {"name": "add", "parameters": {}}'),
    ("llama3", '{"name": "Bob", "age": 3}'),
    ("llama3", '{"age": 3, "city": {"name": "add"}}'),
    ("llama3", "[1] Knuth, 1968"),
    ("llama3", " \n<|python_tag|>print(5)"),
    ("llama3", "<|python_tag"),
    ("llama3", "{ not JSON"),
    ("llama3", '{"name": '),
    ("llama3", " \n"),
    ("llama3", ""),
]


def read(tool_format: ToolFormat, parts: Sequence[str]) -> Result:
    parser = make_parser(tool_format, NAMES)
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(part)
    pieces += parser.flush()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, calls


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), TRANSCRIPTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_transcript_gives_its_calls_in_pieces_of_every_size(
    tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]], size: int
) -> None:
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    found_content, found_calls = read(tool_format, parts)
    assert found_calls == calls
    assert found_content.strip() == content.strip()
    assert found_content or not content
    assert found_content.strip() or not found_content, "whitespace alone is no content"


@pytest.mark.parametrize(("tool_format", "text"), CONTENT)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_without_calls_is_untouched(tool_format: ToolFormat, text: str, size: int) -> None:
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(tool_format, parts) == (text, [])


FRAGMENTS = ["<tool_call>", "</tool_call>", "<", "{", "}", "[", "]", ",", ";", '"', ":", "\\", " ", "\n", "x"]
FRAGMENTS += ['"name"', '"add"', '"arguments"', "<|python_tag|>", ADD, '{"a": 1}', "5", "null", "é"]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)


@given(TEXTS, st.data())
@pytest.mark.parametrize("tool_format", ["hermes", "llama3"])
def test_splits_change_nothing_and_content_is_part_of_the_text(
    tool_format: ToolFormat, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = read(tool_format, [text])
    assert read(tool_format, parts) == (content, calls)
    if not calls and "[" not in text:
        assert content == text
    assert all(name in NAMES for name, _ in calls)
    rest = iter(text)
    assert all(char in rest for char in content), "content is made of the text's characters, in order"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)
    | st.lists(inner), max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(), JSON_VALUES), st.booleans(), st.integers(1, 5))
def test_any_arguments_arrive_as_written(arguments: dict[str, object], is_ascii: bool, size: int) -> None:
    written = json.dumps(arguments, ensure_ascii=is_ascii)
    for tool_format, text in (
        ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {written}}}\n</tool_call>'),
        ("llama3", f'{{"name": "add", "parameters": {written}}}'),
    ):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(tool_format, parts) == ("", [("add", written)])


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = make_parser("hermes", NAMES)
    assert parser.feed('<tool_call>{"name": "add"') == [CallStart("add")]
    assert parser.feed(', "arguments": {"a": ') == [CallArguments('{"a": ')]
    assert parser.feed("12") == [CallArguments("12")]
    assert parser.feed("}}</tool_call>") == [CallArguments("}")]
