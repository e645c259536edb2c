"""What the documents state about the code is true: configuration keys, import floors, files linked and named.

What they explain is left to their readers.
"""

import re
from pathlib import Path

import pytest

from app.config import ServerConfig
from tests.architecture import rules
from tests.architecture.sources import read_sources

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/architecture.md",
    "docs/dispatcher.md",
    "docs/lab-notes.md",
    "docs/metrics.md",
    "docs/training.md",
    "docs/deploy.md",
)


def flat_keys(values: dict, prefix: str = "") -> set[str]:
    keys = set()
    for key, value in values.items():
        keys |= flat_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
    return keys


def named_files(text: str) -> list[str]:
    """Links without a scheme, and paths in code spans that end in `.py`; `cli_NAME.py` is a pattern."""
    links = re.findall(r"\]\(([^):#]+)\)", text)
    return links + re.findall(r"`((?:app|engine|ops|tests|loadtest)/[a-z0-9_/]+\.py)`", text)


def missing_files(document: Path, root: Path) -> list[str]:
    return [
        name
        for name in named_files(document.read_text(encoding="utf-8"))
        if not (document.parent / name).exists() and not (root / name).exists()
    ]


def test_readme_lists_every_configuration_key_and_no_other(pytestconfig):
    readme = (pytestconfig.rootpath / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| key | default |")[2].partition("\n\n")[0]
    listed = {key for row in table.splitlines()[2:] for key in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    assert listed == flat_keys(ServerConfig().model_dump())


def standing_floors(root: Path) -> list[tuple[str, ...]]:
    """The floors that are enforced, without the packages that do not exist yet."""
    modules = read_sources(root, ("engine",)).modules
    floors = []
    for floor in rules.FLOORS:
        chains = [[unit for unit in chain.split(" < ") if f"engine.{unit}" in modules] for chain in floor]
        floors.append(tuple(" < ".join(units) for units in chains if units))
    return floors


def test_architecture_lists_the_floors_that_are_enforced(pytestconfig):
    text = (pytestconfig.rootpath / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.partition("## Import floors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| (.+) \|$", section, re.MULTILINE)
    assert [tuple(re.findall(r"`([^`]+)`", row)) for row in rows] == standing_floors(pytestconfig.rootpath)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_a_document_names_exist(name, pytestconfig):
    assert missing_files(pytestconfig.rootpath / name, pytestconfig.rootpath) == []


def test_a_missing_file_is_noticed(tmp_path):
    document = tmp_path / "a.md"
    document.write_text("[here](b.md), `engine/nowhere.py`, [there](https://example.org/c.md)")
    assert missing_files(document, tmp_path) == ["b.md", "engine/nowhere.py"]
