"""The evaluation's arithmetic, and the forms of a prompt file."""

from pathlib import Path

import pytest

from app.call import Message
from app.evaluation import REPEAT_LEN, repeats
from app.prompt_file import Chat, read_chats
from engine import ConfigError


@pytest.mark.parametrize(
    ("token_ids", "is_loop"),
    [
        ([], False),
        (list(range(100)), False),
        ([5] * REPEAT_LEN, False),
        ([5] * (REPEAT_LEN + 1), True),
        ([*range(16), 99, *range(16)], True),
        ([*range(15), 99, *range(15)], False),
        ([*range(40), *range(20, 36)], True),
    ],
)
def test_answer_repeats_when_a_run_of_sixteen_tokens_occurs_twice(
    token_ids: list[int], is_loop: bool
) -> None:
    assert repeats(token_ids) == is_loop


def test_every_form_of_a_prompt_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"question_id": 81, "category": "writing", "turns": ["first", "second"]}\n'
        "\n"
        '{"prompt": "text"}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
    )
    assert read_chats(path) == [
        Chat((Message("user", "first"), Message("user", "second")), "writing"),
        Chat((Message("user", "text"),)),
        Chat((Message("system", "s"), Message("user", "u"))),
    ]
    assert len(read_chats(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "no prompt"),
        (b"\n \n", "no prompt"),
        (b'{"prompt": "a"}\nnonsense\n', ":2"),
        (b'{"turns": []}', ":1"),
        (b'{"turns": [5]}', ":1"),
        (b'{"messages": []}', ":1"),
        (b'{"messages": [{"role": "user"}]}', ":1"),
        (b"[1]", ":1"),
        (b'{"prompt": "\xff"}', "UTF-8"),
    ],
)
def test_bad_prompt_file_is_refused_with_its_line(tmp_path: Path, content: bytes, place: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=place):
        read_chats(path)
