"""Which backend a name and a device give."""

import importlib.util

import pytest
import torch

from engine.attention.registry import create_backend
from engine.errors import ConfigError

CPU, CUDA, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))
HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", CPU, "cpu"),
        ("auto", META, "reference"),
        ("cpu", CPU, "cpu"),
        ("reference", CPU, "reference"),
        ("reference", CUDA, "reference"),
    ],
)
def test_a_name_gives_the_backend_that_bears_it(name, device, expected):
    assert create_backend(name, device).name == expected


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_cuda_gets_triton_or_hears_that_it_is_missing(name):
    if HAS_TRITON:
        assert create_backend(name, CUDA).name == "triton"
    else:
        with pytest.raises(ConfigError, match="needs the triton package"):
            create_backend(name, CUDA)


@pytest.mark.skipif(importlib.util.find_spec("xformers") is not None, reason="xformers is installed")
def test_xformers_is_named_where_it_is_missing():
    with pytest.raises(ConfigError, match="needs xformers"):
        create_backend("xformers", CUDA)


@pytest.mark.parametrize(
    ("name", "device"),
    [("flash", CPU), ("", CPU), ("cpu", CUDA), ("triton", CPU), ("xformers", CPU)],
)
def test_what_cannot_run_is_refused_by_name(name, device):
    with pytest.raises(ConfigError, match=name or "auto or one of"):
        create_backend(name, device)
