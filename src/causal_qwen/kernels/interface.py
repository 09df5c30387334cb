"""The C interface of the native code in cpp/: its structures and its functions, declared once.

A structure has the fields of its namesake in cpp/, in their order; the library says how many bytes each
takes there, and `declare` refuses one that disagrees. This module knows neither tensors nor how the library
is built.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p
from typing import Any

__all__ = ["CAbduction", "CBlock", "CDecoder", "CMatrix", "CScores", "CStep", "CText", "declare"]


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class CMatrix(ctypes.Structure):
    """struct Matrix of matrices.h."""

    _fields_ = _fields("weight scale shift bias", c_void_p) + _fields("rows columns kind", c_int64)


class CScores(ctypes.Structure):
    """struct Scores of scores.h."""

    _fields_ = _fields("loc_S scale_S z_scores best balance threshold loc_U0 scale_U0", c_void_p)


class CAbduction(ctypes.Structure):
    """struct Abduction of causes.h."""

    _fields_ = [("maps", CMatrix), ("activation", c_int64), ("bound", c_double)]


class CBlock(ctypes.Structure):
    """struct Block of blocks.h."""

    _fields_ = [
        *_fields("attention_gain attention_shift query_gain key_gain mlp_gain mlp_shift", c_void_p),
        *_fields("qkv output gate_up down", CMatrix),
    ]


class CDecoder(ctypes.Structure):
    """struct Decoder of blocks.h."""

    _fields_ = [
        ("blocks", POINTER(CBlock)),
        *_fields("gain shift frequencies", c_void_p),
        *_fields("layers hidden heads groups width inner", c_int64),
        ("eps", c_double),
    ]


class CText(ctypes.Structure):
    """struct Text of blocks.h."""

    _fields_ = [
        *_fields("keys values", POINTER(c_void_p)),
        ("valid", c_void_p),
        *_fields("first stride", c_int64),
    ]


class CStep(ctypes.Structure):
    """struct Step of blocks.h."""

    _fields_ = [
        ("x", c_void_p),
        ("texts", POINTER(CText)),
        *_fields("owner slot", POINTER(c_int64)),
        *_fields("batch threads", c_int64),
    ]


# In the order of structure_sizes in native.cpp.
STRUCTURES = (CMatrix, CScores, CAbduction, CBlock, CDecoder, CText, CStep)
MATRIX, SCORES = POINTER(CMatrix), POINTER(CScores)
# What the functions of native.cpp take; they return nothing.
SIGNATURES = {
    "structure_sizes": (POINTER(c_int64), c_int64),
    "matrix_product": (MATRIX, c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "matrix_widened": (MATRIX, c_void_p, c_int64),
    "causes": (POINTER(CAbduction), c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "token_scores": (MATRIX, c_void_p, c_void_p, SCORES, c_int64, c_int64),
    "token_scores_among": (MATRIX, c_void_p, c_int64, c_void_p, c_void_p, SCORES, c_int64),
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
