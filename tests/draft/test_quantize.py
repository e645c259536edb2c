import pytest
import torch

from engine.draft.exchange import import_draft, quantize_draft
from engine.draft.loader import load_draft
from engine.draft.quantize import (
    DequantizedSource,
    dequantize_fp8,
    dequantize_int4,
    quantize_fp8,
    quantize_int4,
)
from engine.errors import ConfigError, ModelLoadError
from engine.weights.safetensors import SafetensorsFile, write_safetensors
from tests.draft.checkpoints import write_eagle1, write_eagle3
from tests.draft.test_formats import built, model  # noqa: F401 - the fixture

GROUP = 8


def test_nibbles_lie_low_first_and_count_from_minus_eight():
    packed = torch.tensor([[0x1F, 0x98]], dtype=torch.uint8)
    scale = torch.tensor([[0.5]])
    assert dequantize_int4(packed, scale).tolist() == [[3.5, -3.5, 0.0, 0.5]]


@pytest.mark.parametrize("group_size", [2, 4, 12])
def test_weights_on_the_grid_of_their_group_come_back_exactly(group_size):
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(-7, 8, (5, 24), generator=generator)
    levels[:, ::group_size] = 7  # so that each group's grid is known by its largest weight
    scale = 2.0 ** torch.randint(-4, 4, (5, 24 // group_size), generator=generator)
    weight = levels * scale.repeat_interleave(group_size, 1)
    packed, found = quantize_int4(weight, group_size)
    assert packed.shape == (5, 12)
    assert torch.equal(dequantize_int4(packed, found), weight)


def test_no_scale_among_those_tried_has_a_smaller_error():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 32, generator=generator) ** 3
    packed, scale = quantize_int4(weight, GROUP)
    error = (dequantize_int4(packed, scale) - weight).view(64, -1, GROUP).square().sum(-1)
    largest = weight.view(64, -1, GROUP).abs().amax(-1)
    plain = (largest / 7).bfloat16().float()[..., None]
    rounded = (weight.view(64, -1, GROUP) / plain).round().clamp(-7, 7) * plain
    unclipped = (rounded - weight.view(64, -1, GROUP)).square().sum(-1)
    assert (error <= unclipped * (1 + 1e-5) + 1e-9).all()
    assert error.sum() < 0.99 * unclipped.sum()


def test_zero_groups_and_rows_stay_zero():
    weight = torch.zeros(3, 16)
    assert torch.equal(dequantize_int4(*quantize_int4(weight, GROUP)), weight)
    assert torch.equal(dequantize_fp8(*quantize_fp8(weight)), weight)


def test_fp8_is_off_by_at_most_a_sixteenth_of_each_weight():
    weight = torch.randn(20, 30, generator=torch.Generator().manual_seed(2))
    read = dequantize_fp8(*quantize_fp8(weight))
    assert ((read - weight).abs() <= weight.abs() / 16 + 1e-3 * weight.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("group_size", [5, 7, 32])
def test_a_group_size_that_does_not_fit_is_refused(group_size):
    with pytest.raises(ConfigError, match="group size"):
        quantize_int4(torch.zeros(2, 48), group_size)


@pytest.mark.parametrize("precision", ["int4", "fp8"])
@pytest.mark.parametrize("has_head", [False, True])
def test_a_quantized_draft_is_near_its_source(model, tmp_path, precision, has_head):  # noqa: F811
    write_eagle3(tmp_path / "in")
    import_draft(tmp_path / "in", model, tmp_path / "draft", "inputs")
    errors = quantize_draft(tmp_path / "draft", model, tmp_path / "small", precision, GROUP, has_head)
    expected = {"layers.0.gate_up_proj.weight", "layers.0.down_proj.weight"}
    assert errors.keys() == expected | ({"head_rows"} if has_head else set())
    limit = 0.15 if precision == "int4" else 0.04
    assert all(0.0 < error < limit for error in errors.values())
    left, right = (built(model, tmp_path / name)[0].state_dict() for name in ("draft", "small"))
    assert torch.equal(left.pop("target_ids"), right["target_ids"])
    for name, value in left.items():
        assert (right[name] - value.bfloat16().float()).norm() <= limit * value.norm() + 1e-6, name
        if name not in errors:
            assert torch.equal(right[name], value.to(torch.bfloat16).to(value.dtype)), name
    names = SafetensorsFile(tmp_path / "small" / "model.safetensors").names()
    assert {f"{name}.{precision}" for name in errors} <= names
    assert not set(errors) & names


def test_output_rows_of_the_target_become_the_drafts_own(model, tmp_path):  # noqa: F811
    write_eagle3(tmp_path / "in")
    import_draft(tmp_path / "in", model, tmp_path / "draft", "inputs")
    quantize_draft(tmp_path / "draft", model, tmp_path / "small", "int4", GROUP, has_head=True)
    assert load_draft(tmp_path / "small").config.has_own_head


def test_an_eagle1_head_keeps_the_output_rows_of_its_target(model, tmp_path):  # noqa: F811
    write_eagle1(tmp_path / "in")
    import_draft(tmp_path / "in", model, tmp_path / "draft", "inputs")
    quantize_draft(tmp_path / "draft", model, tmp_path / "small", "int4", GROUP, has_head=False)
    with pytest.raises(ModelLoadError, match="eagle1"):
        quantize_draft(tmp_path / "draft", model, tmp_path / "smaller", "int4", GROUP, has_head=True)
    with pytest.raises(ConfigError, match="folder of its own"):
        quantize_draft(tmp_path / "draft", model, tmp_path / "draft", "int4", GROUP, has_head=False)


@pytest.mark.parametrize(
    ("scale", "packed"),
    [
        (torch.ones(3, 2), torch.zeros(4, 24, dtype=torch.uint8)),
        (torch.ones(4, 7), torch.zeros(4, 24, dtype=torch.uint8)),
        (torch.ones(4, 2), torch.zeros(4, 24)),
        (None, torch.zeros(4, 24, dtype=torch.uint8)),
    ],
)
def test_parts_that_do_not_fit_are_a_clear_error(tmp_path, scale, packed):
    parts = {"w.int4": packed} | ({} if scale is None else {"w.scale": scale})
    write_safetensors(tmp_path / "weights.safetensors", parts)
    with pytest.raises(ModelLoadError, match="w"):
        DequantizedSource(SafetensorsFile(tmp_path / "weights.safetensors")).read("w")
