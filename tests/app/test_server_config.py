"""A server's configuration: what a file may say, what wins, and how a mistake is named."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from app.cli_serve import effective_configuration
from app.config import EngineSection, ServerConfig, SpeculationSection, load_config
from app.drafts import SHIPPED_DRAFTS
from engine import ConfigError, EngineConfig, SpeculationConfig


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    return path


def test_no_file_means_the_defaults() -> None:
    config = load_config(None, {})
    assert (config.model, config.port, config.host) == ("smollm2", 8000, "127.0.0.1")
    assert config.name == "smollm2"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "port: 9000\nmodel: models/a\nengine:\n  max_num_seqs: 4\n  dtype: float32\n")
    config = load_config(path, {"port": 9001, "engine.max_num_seqs": 8, "engine.speculation.mode": "off"})
    assert (config.port, config.model) == (9001, "models/a")
    assert (config.engine.max_num_seqs, config.engine.dtype) == (8, "float32")
    assert config.engine.speculation.mode == "off"


def test_the_precision_of_the_file_reaches_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = write(tmp_path, f"model: {tmp_path}\nengine:\n  precision:\n    cache: fp8\n    draft: int4-ffn\n")
    found = load_config(path, {}).engine_config().precision
    assert (found.target, found.draft, found.cache) == ("model", "int4-ffn", "fp8")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 9000\n", "prot: unknown key"),
        ("engine:\n  dtyp: float32\n", "engine.dtyp: unknown key"),
        ("engine:\n  speculation:\n    trees: []\n", "engine.speculation.trees: unknown key"),
        ("port: many\n", "port"),
        ("port: 70000\n", "port"),
        ("max_body_bytes: 0\n", "max_body_bytes"),
        ("engine:\n  dtype: float8\n", "engine.dtype"),
        ("engine:\n  max_num_seqs: 0\n", "max_num_seqs"),
        ("engine:\n  memory_gib: .nan\n", "engine.memory_gib"),
        ("engine:\n  speculation:\n    table: [[8, tree-8], [4, chain-3]]\n", "speculation.table"),
        ("engine: 5\n", "engine"),
        ("- a\n", "mapping"),
        ("a: [\n", "YAML"),
    ],
)
def test_mistake_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace("[", r"\[")):
        load_config(write(tmp_path, text), {})


def test_flag_below_a_key_that_is_no_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine must be a section"):
        load_config(write(tmp_path, "engine: 5\n"), {"engine.dtype": "float32"})


def test_sections_mirror_the_engines_dataclasses() -> None:
    engine_fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(EngineSection.model_fields) == engine_fields - {"model", "draft"}
    assert set(SpeculationSection.model_fields) == {f.name for f in dataclasses.fields(SpeculationConfig)}


@pytest.mark.parametrize(
    ("model", "name"),
    [("smollm2", "smollm2"), ("models/tiny/", "tiny"), ("hf://org/Big-Model", "Big-Model")],
)
def test_served_name_is_the_last_part_of_the_model(model: str, name: str) -> None:
    assert ServerConfig(model=model).name == name
    assert ServerConfig(model=model, served_model_name="other").name == "other"


def test_draft_is_the_shipped_one_for_its_alias_only(tmp_path: Path) -> None:
    assert ServerConfig().draft_folder() == SHIPPED_DRAFTS / "smollm2"
    assert ServerConfig(draft="none").draft_folder() is None
    (tmp_path / "config.json").write_text("{}")
    assert ServerConfig(model=str(tmp_path)).draft_folder() is None
    assert ServerConfig(draft=str(tmp_path)).draft_folder() == tmp_path
    with pytest.raises(ConfigError, match="draft must be a folder"):
        ServerConfig(draft="no-such-folder").draft_folder()


def test_effective_configuration_names_what_really_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = ServerConfig(model=str(tmp_path), draft="none", port=9000)
    values = yaml.safe_load(effective_configuration(config, config.engine_config()))
    assert (values["port"], values["engine"]["model"], values["engine"]["draft"]) == (
        9000,
        str(tmp_path),
        None,
    )
    assert values["engine"]["max_num_seqs"] == EngineConfig(model=tmp_path).max_num_seqs
