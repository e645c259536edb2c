"""Products of cuBLASLt by an algorithm of the caller's choice.

torch takes the first algorithm that the library's heuristic names; the others are in the library as well, and
some are faster. Which one is used is left to `layers/tuned_linear`. Constants and structures are those of
`cublasLt.h`, CUDA 12 and 13.
"""

import ctypes
import functools
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 16 << 20
ALIGNMENT = 256  # bytes at whose multiples the heuristic takes every matrix to begin
_NUM_ALGORITHMS = 8  # as many as the heuristic names for these shapes
_DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_FLOAT32 = 68
_TRANSPOSE_A = 3  # attribute of a product
_MAX_WORKSPACE, _REDUCTION_SCHEMES = 1, 3  # attributes of what an algorithm may do
_SUM_IN_FLOAT32 = 2  # the one scheme that does not round partial sums to 16 bits

_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class Algorithm(ctypes.Structure):
    """An algorithm as the heuristic answers it, `cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("num_waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class ProductError(RuntimeError):
    """The library does not do this product."""


class Product:
    """x [M, K] times W [N, K] transposed, in one pair of types, on the current device. What it sets up is
    kept as long as the process runs: some hundred bytes.

    Raises `OSError` where torch came without the library, and `ProductError` for what it does not do.
    """

    def __init__(
        self, num_tokens: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, out_dtype: torch.dtype
    ) -> None:
        self._library, self._handle = _open(torch.cuda.current_device())
        self._sizes, self._out_dtype = (num_tokens, num_outputs, num_inputs), out_dtype
        kind, out_kind = _DATA_TYPES[dtype], _DATA_TYPES[out_dtype]
        # The library thinks in columns: there W is [K, N], to be transposed, x [K, M], and the answer [N, M].
        self._product = self._make("MatmulDesc", _COMPUTE_FLOAT32, _DATA_TYPES[torch.float32])
        self._set("MatmulDesc", self._product, _TRANSPOSE_A, ctypes.c_int(1))
        self._weight = self._layout(kind, num_inputs, num_outputs)
        self._tokens = self._layout(kind, num_inputs, num_tokens)
        self._answer = self._layout(out_kind, num_outputs, num_tokens)

    def algorithms(self) -> list[Algorithm]:
        """Return what the heuristic names, its favourite first, of which none rounds partial sums."""
        limits = self._make("MatmulPreference")
        self._set("MatmulPreference", limits, _MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
        self._set("MatmulPreference", limits, _REDUCTION_SCHEMES, ctypes.c_uint32(_SUM_IN_FLOAT32))
        found, num_found = (Algorithm * _NUM_ALGORITHMS)(), ctypes.c_int()
        layouts = (self._weight, self._tokens, self._answer, self._answer)
        self._call(
            "MatmulAlgoGetHeuristic",
            *(self._handle, self._product, *layouts, limits, _NUM_ALGORITHMS, found, byref(num_found)),
        )
        self._call("MatmulPreferenceDestroy", limits)
        return [each for each in found[: num_found.value] if each.status == 0]

    def multiply(self, x: Tensor, weight: Tensor, algorithm: Algorithm, workspace: Tensor) -> Tensor:
        """Return x W^T [M, N] of contiguous x and W; `workspace` of `WORKSPACE_BYTES` is for this product
        alone until it is done.
        """
        num_tokens, num_outputs, num_inputs = self._sizes
        assert x.data_ptr() % ALIGNMENT == weight.data_ptr() % ALIGNMENT == 0, "a matrix begins in between"
        assert x.shape == (num_tokens, num_inputs), f"{tuple(x.shape)} is not of {self._sizes}"
        assert weight.shape == (num_outputs, num_inputs), f"{tuple(weight.shape)} is not of {self._sizes}"
        assert x.is_contiguous(), f"rows must be contiguous, found strides {x.stride()}"
        assert weight.is_contiguous(), f"rows must be contiguous, found strides {weight.stride()}"
        out = torch.empty(num_tokens, num_outputs, dtype=self._out_dtype, device=x.device)
        answer = (_address(out), self._answer)
        self._call(
            "Matmul",
            *(self._handle, self._product, byref(_ONE)),
            *(_address(weight), self._weight, _address(x), self._tokens),
            *(byref(_ZERO), *answer, *answer, byref(algorithm)),
            *(_address(workspace), ctypes.c_size_t(WORKSPACE_BYTES)),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        return out

    def _layout(self, kind: int, num_rows: int, num_columns: int) -> ctypes.c_void_p:
        sizes = (ctypes.c_uint64(num_rows), ctypes.c_uint64(num_columns), ctypes.c_int64(num_rows))
        return self._make("MatrixLayout", kind, *sizes)

    def _make(self, what: str, *values: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(f"{what}Create", byref(made), *values)
        return made

    def _set(self, what: str, made: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._call(
            f"{what}SetAttribute", made, attribute, byref(value), ctypes.c_size_t(ctypes.sizeof(value))
        )

    def _call(self, name: str, *values: Any) -> None:
        status = getattr(self._library, f"cublasLt{name}")(*values)
        if status:
            raise ProductError(f"cublasLt{name} answered {status} for sizes {self._sizes}")


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache  # one handle of a device serves all products, from any thread
def _open(device: int) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Return the library that torch has loaded, found by its name, and a handle for the current `device`."""
    if torch.version.cuda is None:
        raise ProductError("this torch was built without CUDA")
    library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    handle = ctypes.c_void_p()
    status = library.cublasLtCreate(byref(handle))
    if status:
        raise ProductError(f"cublasLtCreate answered {status} on device {device}")
    return library, handle
