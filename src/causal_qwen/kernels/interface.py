"""The C interface of the native code in cpp/: its structures and its functions, declared once.

A structure has the fields of its namesake in cpp/, in their order; the library says how many bytes each
takes there, and `declare` refuses one that disagrees. This module knows neither tensors nor how the library
is built.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p

__all__ = ["CAbduction", "CBlock", "CDecoder", "CMatrix", "CScores", "CStep", "declare"]


class CMatrix(ctypes.Structure):
    """struct Matrix of matrices.h."""

    _fields_ = [
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("shift", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("kind", c_int64),
    ]


class CScores(ctypes.Structure):
    """struct Scores of scores.h."""

    _fields_ = [
        ("loc_S", c_void_p),
        ("scale_S", c_void_p),
        ("z_scores", c_void_p),
        ("best", c_void_p),
        ("balance", c_void_p),
        ("threshold", c_void_p),
        ("loc_U0", c_void_p),
        ("scale_U0", c_void_p),
    ]


class CAbduction(ctypes.Structure):
    """struct Abduction of causes.h."""

    _fields_ = [("maps", CMatrix), ("activation", c_int64), ("bound", c_double)]


class CBlock(ctypes.Structure):
    """struct Block of blocks.h."""

    _fields_ = [
        ("attention_gain", c_void_p),
        ("attention_shift", c_void_p),
        ("query_gain", c_void_p),
        ("key_gain", c_void_p),
        ("mlp_gain", c_void_p),
        ("mlp_shift", c_void_p),
        ("qkv", CMatrix),
        ("output", CMatrix),
        ("gate_up", CMatrix),
        ("down", CMatrix),
    ]


class CDecoder(ctypes.Structure):
    """struct Decoder of blocks.h."""

    _fields_ = [
        ("blocks", POINTER(CBlock)),
        ("gain", c_void_p),
        ("shift", c_void_p),
        ("frequencies", c_void_p),
        ("layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("groups", c_int64),
        ("width", c_int64),
        ("inner", c_int64),
        ("eps", c_double),
    ]


class CStep(ctypes.Structure):
    """struct Step of blocks.h."""

    _fields_ = [
        ("x", c_void_p),
        ("valid", c_void_p),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("batch", c_int64),
        ("slots", c_int64),
        ("capacity", c_int64),
        ("threads", c_int64),
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
