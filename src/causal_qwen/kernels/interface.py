"""The C interface of the native code in cpp/: its structures and its functions, declared once.

A structure has the fields of its namesake in cpp/, in their order; the library says how many bytes each
takes there, and `declare` refuses one that disagrees. This module knows neither tensors nor how the library
is built.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p

__all__ = ["CAbduction", "CBlock", "CDecoder", "CMatrix", "CScores", "CStep", "declare"]


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names]


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_int64) for name in names]


class CMatrix(ctypes.Structure):
    """struct Matrix of matrices.h."""

    _fields_ = [*_pointers("weight", "scale", "shift", "bias"), *_integers("rows", "columns", "kind")]


class CScores(ctypes.Structure):
    """struct Scores of scores.h."""

    _fields_ = _pointers("loc_S", "scale_S", "z_scores", "best", "balance", "threshold", "loc_U0", "scale_U0")


class CAbduction(ctypes.Structure):
    """struct Abduction of causes.h."""

    _fields_ = [("maps", CMatrix), ("activation", c_int64), ("bound", c_double)]


class CBlock(ctypes.Structure):
    """struct Block of blocks.h."""

    _fields_ = [
        *_pointers("attention_gain", "attention_shift", "query_gain", "key_gain", "mlp_gain", "mlp_shift"),
        *((name, CMatrix) for name in ("qkv", "output", "gate_up", "down")),
    ]


class CDecoder(ctypes.Structure):
    """struct Decoder of blocks.h."""

    _fields_ = [
        ("blocks", POINTER(CBlock)),
        *_pointers("gain", "shift", "frequencies"),
        *_integers("layers", "hidden", "heads", "groups", "width", "inner"),
        ("eps", c_double),
    ]


class CStep(ctypes.Structure):
    """struct Step of blocks.h."""

    _fields_ = [
        *_pointers("x", "valid"),
        *((name, POINTER(c_void_p)) for name in ("keys", "values")),
        *_integers("batch", "slots", "capacity", "threads"),
    ]


# In the order of structure_sizes in native.cpp.
STRUCTURES = (CMatrix, CScores, CAbduction, CBlock, CDecoder, CStep)
# What the functions of native.cpp take; they return nothing.
SIGNATURES = {
    "structure_sizes": (POINTER(c_int64), c_int64),
    "matrix_product": (POINTER(CMatrix), c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "matrix_widened": (POINTER(CMatrix), c_void_p, c_int64),
    "causes": (POINTER(CAbduction), c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "token_scores": (POINTER(CMatrix), c_void_p, c_void_p, POINTER(CScores), c_int64, c_int64),
    "token_scores_among": (
        POINTER(CMatrix),
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
        POINTER(CScores),
        c_int64,
    ),
    "decoder_step": (POINTER(CDecoder), POINTER(CStep)),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """``library`` with the signatures of its functions.

    Raises:
        RuntimeError: If a structure has another size in the library: every call would read the wrong memory.
    """
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    sizes = (c_int64 * len(STRUCTURES))()
    library.structure_sizes(sizes, len(STRUCTURES))
    for structure, size in zip(STRUCTURES, sizes, strict=True):
        if ctypes.sizeof(structure) != size:
            raise RuntimeError(
                f"{structure.__name__} takes {ctypes.sizeof(structure)} bytes in kernels/interface.py and "
                f"{size} in kernels/cpp: give both the same fields"
            )
    return library
