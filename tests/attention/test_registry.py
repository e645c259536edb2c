"""Which backend a name and a device give."""

import pytest
import torch

from engine.attention.registry import create_backend
from engine.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [("auto", CPU, "cpu"), ("auto", CUDA, "reference"), ("cpu", CPU, "cpu"), ("reference", CPU, "reference")],
)
def test_a_name_gives_the_backend_that_bears_it(name, device, expected):
    assert create_backend(name, device).name == expected


@pytest.mark.parametrize(("name", "device"), [("flash", CPU), ("", CPU), ("cpu", CUDA)])
def test_what_cannot_run_is_refused_by_name(name, device):
    with pytest.raises(ConfigError, match=name or "auto or one of"):
        create_backend(name, device)
