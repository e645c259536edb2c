"""The strict weight loader: every stored tensor has its place, and every place gets its tensor.

Where tensors come from is left to `shards`, which place each takes to `mapping`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from engine.errors import ModelLoadError
from engine.weights.mapping import Placement, WeightMapping
from engine.weights.shards import TensorSource, list_names

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_into(module: nn.Module, tensors: TensorSource, mapping: WeightMapping) -> None:
    """Fill the parameters and persistent buffers of `module` in place, each on its device, in its dtype.

    Streams: one stored tensor is in flight at a time. Names and shapes are checked before the first copy.
    Raises `ModelLoadError` for a missing, surplus or misshapen tensor, for a dtype other than float32,
    bfloat16 and float16 (integers must match exactly), and for a value that overflows a float16 parameter.
    """
    _check_names(tensors.names(), mapping)
    state = module.state_dict()  # detached views: a copy into them fills the module
    _assert_covered(state, mapping)
    places = {name: _place(state, placement) for name, placement in mapping.placements.items()}
    for name, place in places.items():
        if tensors.shape(name) != tuple(place.shape):
            raise ModelLoadError(
                f"tensor {name} must have shape {list(place.shape)}, found {list(tensors.shape(name))}: "
                "the config and the weights do not belong together"
            )
    for name, place in places.items():
        _copy(name, tensors.read(name), place)


def _check_names(names: frozenset[str], mapping: WeightMapping) -> None:
    missing = mapping.placements.keys() - names
    if missing:
        raise ModelLoadError(f"the weights lack {len(missing)} tensors: {list_names(missing)}")
    surplus = [name for name in names - mapping.placements.keys() if not name.endswith(mapping.ignored)]
    if surplus:
        raise ModelLoadError(f"the weights hold {len(surplus)} unknown tensors: {list_names(surplus)}")


def _assert_covered(state: Mapping[str, Tensor], mapping: WeightMapping) -> None:
    """Assert that the placements fill every row of every parameter once: only our own code can break it."""
    rows: dict[str, list[tuple[int, int]]] = {name: [] for name in state}
    for placement in mapping.placements.values():
        assert placement.parameter in rows, f"the module has no parameter {placement.parameter}"
        num_rows = _num_rows(state, placement)
        rows[placement.parameter].append((placement.start, placement.start + num_rows))
    for name, tensor in state.items():
        position = 0
        for start, end in sorted(rows[name]):
            assert start == position, f"{name}: rows {position} to {start} are filled twice or never"
            position = end
        length = tensor.shape[0] if tensor.dim() > 0 else 1
        assert position == length, f"{name}: {position} of {length} rows are filled"


def _num_rows(state: Mapping[str, Tensor], placement: Placement) -> int:
    tensor = state[placement.parameter]
    if placement.num_rows is not None:
        return placement.num_rows
    return tensor.shape[0] if tensor.dim() > 0 else 1


def _place(state: Mapping[str, Tensor], placement: Placement) -> Tensor:
    tensor = state[placement.parameter]
    return tensor if placement.num_rows is None else tensor.narrow(0, placement.start, placement.num_rows)


def _copy(name: str, stored: Tensor, place: Tensor) -> None:
    is_float = place.dtype in _FLOAT_DTYPES
    if stored.dtype != place.dtype and not (is_float and stored.dtype in _FLOAT_DTYPES):
        expected = "float32, bfloat16 or float16" if is_float else str(place.dtype)
        raise ModelLoadError(f"tensor {name} must be stored as {expected}, found {stored.dtype}")
    place.copy_(stored)
    if place.dtype is torch.float16 and stored.dtype is not torch.float16 and not place.isfinite().all():
        raise ModelLoadError(f"tensor {name} overflows float16: load the model in bfloat16 or float32")
