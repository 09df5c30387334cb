"""Calls of the native code: products, causes and token scores of a few vectors, from tensors.

Native code trusts its arguments, so tensors are checked here; where `runs_native` is False, nothing else here
runs. This module knows neither layers nor tokens, nor how the library is built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from causal_qwen.kernels.interface import CAbduction, CMatrix, CScores
from causal_qwen.kernels.library import library, loaded

__all__ = [
    "GROUP",
    "LARGEST_NATIVE",
    "NativeAbduction",
    "NativeLinear",
    "NativeScorer",
    "native_dense",
    "native_matrix",
    "pointer",
    "runs_native",
]

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


def native_dense(matrix: CMatrix) -> Tensor:
    """W of integers in float32, (V, D)."""
    y = torch.empty(matrix.rows, matrix.columns)
    loaded().matrix_widened(matrix, pointer(y), torch.get_num_threads())
    return y


class NativeLinear:
    """W x + b of a few vectors.

    Args:
        matrix: W, with b as its bias; the caller keeps its tensors.
    """

    def __init__(self, matrix: CMatrix) -> None:
        self._matrix = matrix
        self._library = loaded()

    def __call__(self, x: Tensor) -> Tensor:
        """(N, D) → (N, V), float32."""
        return self._product(x, None)

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The product and its argmax, (N,)."""
        best = torch.empty(x.shape[0], dtype=torch.int64)
        return self._product(x, best.data_ptr()), best

    def _product(self, x: Tensor, best: int | None) -> Tensor:
        matrix, x, count = self._matrix, x.contiguous(), x.shape[0]
        y = torch.empty(count, matrix.rows)
        vectors = pointer(x, (count, matrix.columns))
        self._library.matrix_product(matrix, vectors, pointer(y), best, count, torch.get_num_threads())
        return y


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


class NativeScorer:
    """loc_S and scale_S of all tokens, or their z-scores.

    Args:
        matrix: W, with b as its bias; the caller keeps its tensors.
        balance: (V,) float32, or None for 0.
        threshold: (V,) float32, or None for 0.
    """

    def __init__(self, matrix: CMatrix, balance: Tensor | None, threshold: Tensor | None) -> None:
        self._matrix = matrix
        self._tensors = (balance, threshold)  # the structures point into them
        self._pointers = tuple(pointer(part, (matrix.rows,)) for part in self._tensors)
        self._library = loaded()

    def scores(
        self, loc_U: Tensor, scale_U: Tensor, loc_U0: Tensor | None, scale_U0: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """loc_S and scale_S, (N, V) each, of causes (N, D) and common causes (N,), or None for 0."""
        loc_S, scale_S = (torch.empty(loc_U.shape[0], self._matrix.rows) for _ in range(2))
        self._fill((loc_U, scale_U), (loc_U0, scale_U0), pointer(loc_S), pointer(scale_S), None, None)
        return loc_S, scale_S

    def z_scores(
        self, loc_U: Tensor, scale_U: Tensor, loc_U0: Tensor | None, scale_U0: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(loc_S − C)/scale_S, (N, V), and its argmax, (N,); arguments as for `scores`."""
        count = loc_U.shape[0]
        z_scores, best = torch.empty(count, self._matrix.rows), torch.empty(count, dtype=torch.int64)
        self._fill((loc_U, scale_U), (loc_U0, scale_U0), None, None, pointer(z_scores), best.data_ptr())
        return z_scores, best

    def among(
        self,
        logits: Tensor,
        k: int,
        loc_U: Tensor,
        scale_U: Tensor | None,
        loc_U0: Tensor | None,
        scale_U0: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`z_scores` where ``logits`` (N, V) are among the k largest of their row, −inf elsewhere; without
        ``scale_U`` W loc_U + b.
        """
        count, matrix = logits.shape[0], self._matrix
        scores, best = torch.empty(count, matrix.rows), torch.empty(count, dtype=torch.int64)
        outputs = self._scores(count, (loc_U0, scale_U0), None, None, pointer(scores), best.data_ptr())
        logits, loc_U = logits.contiguous(), loc_U.contiguous()
        scale_U = None if scale_U is None else scale_U.contiguous()
        self._library.token_scores_among(
            matrix,
            pointer(logits, (count, matrix.rows)),
            min(k, matrix.rows),
            pointer(loc_U, (count, matrix.columns)),
            pointer(scale_U, (count, matrix.columns)),
            outputs,
            count,
        )
        return scores, best

    def _fill(
        self, U: tuple[Tensor, Tensor], U0: tuple[Tensor | None, Tensor | None], *outputs: int | None
    ) -> None:
        matrix, count = self._matrix, U[0].shape[0]
        U = (U[0].contiguous(), U[1].contiguous())
        causes = [pointer(part, (count, matrix.columns)) for part in U]
        scores = self._scores(count, U0, *outputs)
        self._library.token_scores(matrix, *causes, scores, count, torch.get_num_threads())

    def _scores(self, count: int, U0: tuple[Tensor | None, Tensor | None], *outputs: int | None) -> CScores:
        common = [None if part is None else part.float().contiguous() for part in U0]
        scores = CScores(*outputs, *self._pointers, *(pointer(part, (count,)) for part in common))
        scores.tensors = common  # it points into them
        return scores
