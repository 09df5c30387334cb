"""Tensors for native code: where their values lie, matrices as it reads them, and the causes of features.

Native code trusts what it is given, so tensors are checked here. This module knows neither layers nor tokens,
nor how the library is built; `library` must have given one before anything is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from causal_qwen.kernels.interface import CAbduction, CMatrix
from causal_qwen.kernels.library import library, loaded

__all__ = ["GROUP", "LARGEST_NATIVE", "NativeAbduction", "native_matrix", "pointer", "runs_native"]

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INTEGER_KINDS = {8: 3, 4: 4}  # by bits
ACTIVATIONS = ("exp", "softplus", "abs")
GROUP = 32  # columns of integers that share a scale
# Vectors beyond which matrix products may win: at 48 native code still takes two thirds of their time.
LARGEST_NATIVE = 48


def pointer(
    tensor: Tensor | None, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
) -> int | None:
    """Where a tensor's values lie; null for None.

    Args:
        tensor: Or None.
        shape: What native code will read; None where the tensor itself says how much that is.
        dtype: As what it will read.

    Raises:
        ValueError: If the values do not lie side by side on the CPU, or are of another shape or type.
    """
    if tensor is None:
        return None
    if not (tensor.is_contiguous() and tensor.is_cpu):
        raise ValueError(f"native code reads contiguous tensors on the CPU, not one on {tensor.device}")
    if tensor.dtype != dtype or (shape is not None and tensor.shape != shape):
        expected = "" if shape is None else f" of shape {shape}"
        raise ValueError(f"expected {dtype}{expected}; got {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor.data_ptr()


def native_matrix(
    weight: Tensor, scale: Tensor | None, shift: Tensor | None, bias: Tensor | None = None
) -> CMatrix:
    """struct Matrix of the parts of a `products.Matrix`; the caller keeps them alive.

    Args:
        weight: (V, D) floats, or integers in 32-bit words.
        scale: (V, D/32) of integers, else None.
        shift: (V, D/32), or None.
        bias: (V,) float32, or None.

    Raises:
        ValueError: If they do not belong together, or do not lie as native code reads them.
    """
    rows, words = weight.shape
    columns = words if scale is None else scale.shape[1] * GROUP
    kind = KINDS[weight.dtype] if scale is None else INTEGER_KINDS[32 * words // columns]
    groups = (rows, columns // GROUP)
    parts = (pointer(scale, groups), pointer(shift, groups), pointer(bias, (rows,)))
    return CMatrix(pointer(weight, dtype=weight.dtype), *parts, rows, columns, kind)


def runs_native(weight: Tensor, scale: Tensor | None) -> bool:
    """Whether the library can read such a matrix, and is there."""
    known = scale is not None or weight.dtype in KINDS
    return known and weight.device.type == "cpu" and weight.is_contiguous() and library() is not None


class NativeAbduction:
    """loc_U, scale_U and loc_U0 of features.

    Args:
        weight: (2D + 1, H) float32: the maps to loc_U, to what scale_U is the activation of, and to −loc_U0.
        bias: (2D + 1,) float32.
        activation: "exp", "softplus" or "abs".
        bound: scale_U stays within e^±bound.
    """

    def __init__(self, weight: Tensor, bias: Tensor, activation: str, bound: float) -> None:
        self._tensors = (weight, bias)  # the structure points into them
        maps = native_matrix(weight, None, None, bias)
        self._abduction = CAbduction(maps, ACTIVATIONS.index(activation), bound)
        self._library = loaded()

    def __call__(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H) float32 → (B, D), (B, D) and (B,)."""
        maps, batch = self._abduction.maps, features.shape[0]
        features = features.contiguous()
        U, loc_U0 = torch.empty(2, batch, maps.rows // 2), torch.empty(batch)
        self._library.causes(
            self._abduction,
            pointer(features, (batch, maps.columns)),
            pointer(U),
            pointer(loc_U0),
            batch,
            torch.get_num_threads(),
        )
        loc_U, scale_U = U.unbind()
        return loc_U, scale_U, loc_U0
