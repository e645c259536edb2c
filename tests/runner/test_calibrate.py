"""What the machine answers: device, threads and dtype, unless the operator asked."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.runner import calibrate
from tests.model.paged_model import CPU, TINY

MODEL = ModelConfig.from_hf(TINY | {"architectures": ["LlamaForCausalLM"]})


def make_config(**changes):
    return EngineConfig(model=Path("unread"), **changes)


@pytest.mark.parametrize(
    ("device", "has_cuda", "expected"),
    [("auto", False, "cpu"), ("auto", True, "cuda"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_auto_takes_cuda_where_there_is_one(monkeypatch, device, has_cuda, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert calibrate.choose_device(make_config(device=device)).type == expected


def test_cuda_without_a_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cuda"):
        calibrate.choose_device(make_config(device="cuda"))


@pytest.mark.parametrize(
    ("asked", "cores", "expected"), [(None, 8, 7), (None, 1, 1), (None, None, 1), (8, 2, 8)]
)
def test_one_core_is_left_free_unless_threads_are_asked_for(monkeypatch, asked, cores, expected):
    monkeypatch.setattr(calibrate.os, "cpu_count", lambda: cores)
    assert calibrate.choose_num_threads(make_config(num_threads=asked)) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_dtype_asked_for_is_taken(name, device):
    chosen = calibrate.choose_dtype(make_config(dtype=name), MODEL, torch.device(device))
    assert chosen == getattr(torch, name)


def test_cuda_runs_in_bfloat16():
    assert calibrate.choose_dtype(make_config(), MODEL, torch.device("cuda")) is torch.bfloat16


@pytest.mark.parametrize("fastest", [torch.float32, torch.bfloat16], ids=str)
def test_a_cpu_runs_in_what_multiplies_faster_there(monkeypatch, fastest):
    monkeypatch.setattr(calibrate, "_time_matmul", lambda model, dtype: 1.0 + (dtype is not fastest))
    assert calibrate.choose_dtype(make_config(), MODEL, CPU) is fastest


def test_the_timing_itself_runs_on_this_machine():
    for dtype in (torch.float32, torch.bfloat16):
        assert 0 < calibrate._time_matmul(MODEL, dtype) < 10
