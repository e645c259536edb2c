"""The images: pinned, built in stages, not root, and with what `pyproject.toml` asks for.

Building them needs Docker and a registry, and is left to docs/deploy.md.
"""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from tests.k8s.rendered import K8S, ROOT, SERVING, ray_service

IMAGES = K8S / "images"
LOCKS = ("cpu.lock", "cuda.lock")


def stages() -> dict[str, list[str]]:
    """The instructions of each stage by its name, continued lines joined."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in re.sub(r"\\\n", "", (IMAGES / "Dockerfile").read_text()).splitlines():
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            name = match[2]
            found[name] = [line]
        elif line and not line.startswith("#"):
            found.setdefault(name, []).append(line)
    return found


def locked(name: str) -> dict[str, str]:
    text = (IMAGES / name).read_text()
    entries = re.findall(r"^(\S+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert len(entries) * 2 == len(text.splitlines()), "a line is no pinned package"
    return dict(entries)


def test_stages_begin_at_a_digest_or_at_another_stage():
    arguments = dict(line.removeprefix("ARG ").split("=", 1) for line in stages()[""])
    assert re.fullmatch(r"[a-z0-9.:-]+@sha256:[0-9a-f]{64}", arguments["PYTHON"])
    bases = {name: lines[0].split()[1] for name, lines in stages().items() if name}
    assert bases.pop("base") == "${PYTHON}"
    assert set(bases.values()) <= {"base", *bases}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_without_root_and_holds_no_build(target):
    lines = stages()[target]
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000:1000"]
    assert not any("pip install" in line for line in lines)
    assert f"COPY --from=build-{target} /opt/venv /opt/venv" in lines


def test_what_is_copied_exists_and_is_not_ignored():
    kept = (IMAGES / "Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line.removeprefix("!") for line in kept if line.startswith("!")]
    for line in [line for lines in stages().values() for line in lines]:
        if line.startswith("COPY") and "--from" not in line:
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists(), name
                assert any(Path(name).match(pattern) for pattern in patterns), name


def test_python_packages_are_installed_by_hash_only():
    commands = [line for lines in stages().values() for line in lines if "pip install" in line]
    assert len(commands) == 4
    for command in commands:
        assert "--no-deps" in command
        assert "--require-hashes" in command or "--no-build-isolation" in command


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_satisfies_the_project(lock):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = locked(lock)
    environment = default_environment() | {"sys_platform": "linux", "platform_machine": "x86_64"}
    for text in project["dependencies"]:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate(environment):
            assert versions[wanted.name] in wanted.specifier, text
    assert "setuptools" in versions, "the project is built with what is locked"


def test_the_locks_differ_in_torch_alone():
    cpu, cuda = (locked(name) for name in LOCKS)
    differing = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert differing == {"torch", "triton"}
    assert cpu.keys() <= cuda.keys()
    assert all(name.startswith(("nvidia-", "cuda-")) for name in cuda.keys() - cpu.keys())


@pytest.mark.parametrize("overlay", SERVING)
def test_the_cluster_names_the_ray_of_the_image(overlay):
    assert ray_service(overlay)["spec"]["rayClusterConfig"]["rayVersion"] == locked("cpu.lock")["ray"]
