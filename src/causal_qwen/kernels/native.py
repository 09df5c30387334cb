"""The native code of cpp/: built at its first use, kept for later processes, absent where no compiler works.

The library is plain C++ without torch's headers: it is built in seconds, once per compiler and processor, in
the library's cache directory. ``CAUSAL_QWEN_COMPILE=0`` leaves it out. This module knows neither layers nor
tokens, only the memory that they lie in.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from causal_qwen.directories import cache_directory
from causal_qwen.kernels.compiled import compilation_enabled

__all__ = [
    "GROUP",
    "NativeMatrix",
    "build",
    "library",
    "native_dense",
    "native_matrix",
    "native_product",
    "native_token_scores",
    "pointer",
    "runs_native",
]

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpp"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
# Without OpenMP (Apple's compiler) the same code runs in one thread.
THREADING = ("-fopenmp", None)
KINDS = {torch.float32: 0, torch.bfloat16: 1}
INTEGER_KINDS = {8: 2, 4: 3}  # by bits
GROUP = 32  # columns of integers that share a scale


class NativeMatrix(ctypes.Structure):
    """struct Matrix; whoever holds it keeps its tensors."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    ]


class _Scores(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("loc_S", "scale_S", "balance", "loc_U0", "scale_U0")]


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor's values lie; null for None.

    Raises:
        ValueError: If they do not lie side by side, or not on the CPU.
    """
    if tensor is None:
        return None
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"native code reads contiguous tensors on the CPU, not one on {tensor.device}")
    return tensor.data_ptr()


def native_matrix(
    weight: Tensor, scale: Tensor | None, shift: Tensor | None, bias: Tensor | None = None
) -> NativeMatrix:
    """struct Matrix of the parts of a `products.Matrix`; the caller keeps them alive.

    Args:
        weight: (V, D) floats, or integers in 32-bit words.
        scale: (V, D/32) of integers, else None.
        shift: (V, D/32), or None.
        bias: (V,), or None.
    """
    columns = weight.shape[1] if scale is None else scale.shape[1] * GROUP
    bits = 32 * weight.shape[1] // columns
    kind = KINDS[weight.dtype] if scale is None else INTEGER_KINDS[bits]
    parts = (pointer(part) for part in (weight, scale, shift, bias))
    return NativeMatrix(*parts, weight.shape[0], columns, kind)


def runs_native(weight: Tensor, scale: Tensor | None) -> bool:
    """Whether the library can read such a matrix, and is there."""
    known = scale is not None or weight.dtype in KINDS
    return known and weight.device.type == "cpu" and weight.is_contiguous() and library() is not None


def native_product(x: Tensor, matrix: NativeMatrix) -> Tensor:
    """W x + b, (N, D) → (N, V), float32; `library` must have given one."""
    found = library()
    assert found is not None
    x = x.contiguous()
    y = torch.empty(x.shape[0], matrix.rows)
    threads = torch.get_num_threads()
    found.matrix_product(ctypes.byref(matrix), pointer(x), pointer(y), x.shape[0], threads)
    return y


def native_dense(matrix: NativeMatrix) -> Tensor:
    """W of integers in float32, (V, D); `library` must have given one."""
    found = library()
    assert found is not None
    y = torch.empty(matrix.rows, matrix.columns)
    found.matrix_widened(ctypes.byref(matrix), pointer(y), torch.get_num_threads())
    return y


def native_token_scores(
    loc_U: Tensor,
    scale_U: Tensor,
    matrix: NativeMatrix,
    *,
    balance: Tensor | None,
    loc_U0: Tensor | None,
    scale_U0: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """loc_S and scale_S, (N, V) each, float32; `library` must have given one.

    Args:
        loc_U: (N, D).
        scale_U: (N, D).
        matrix: W, with b as its bias.
        balance: (V,), or None for 0.
        loc_U0: (N,), or None for 0.
        scale_U0: (N,), or None for 0.
    """
    found = library()
    assert found is not None
    count = loc_U.shape[0]
    loc_U, scale_U = loc_U.contiguous(), scale_U.contiguous()
    common = [None if part is None else part.float().contiguous() for part in (loc_U0, scale_U0)]
    loc_S, scale_S = torch.empty(count, matrix.rows), torch.empty(count, matrix.rows)
    scores = _Scores(*map(pointer, (loc_S, scale_S, balance, *common)))
    pointers = (pointer(loc_U), pointer(scale_U), ctypes.byref(scores))
    found.token_scores(ctypes.byref(matrix), *pointers, count, torch.get_num_threads())
    return loc_S, scale_S


def library(tell: Callable[[str], None] | None = None) -> ctypes.CDLL | None:
    """The loaded library; None where it is switched off or cannot be built, which the log says once.

    Args:
        tell: Called with one line before a build, which takes a few seconds; the log when None.
    """
    return _load(tell or logger.info) if compilation_enabled() else None


_loaded: list[ctypes.CDLL | None] = []


def _load(tell: Callable[[str], None]) -> ctypes.CDLL | None:
    if not _loaded:
        try:
            found: ctypes.CDLL | None = _declared(ctypes.CDLL(str(build(tell))))
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning(
                "native code cannot be built here (%s); a slower form with the same results is used", error
            )
            found = None
        _loaded.append(found)
    return _loaded[0]


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    found.matrix_product.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2
    found.token_scores.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 2
    found.decoder_step.argtypes = [ctypes.c_void_p] * 2
    found.matrix_widened.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64]
    for function in (found.matrix_product, found.matrix_widened, found.token_scores, found.decoder_step):
        function.restype = None
    return found


def build(tell: Callable[[str], None]) -> Path:
    """The shared library, built unless the cache has it for this source, compiler and processor.

    Raises:
        OSError: If there is no compiler, or the cache cannot be written.
        subprocess.SubprocessError: If the compiler refuses the source.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    compiler = next((path for path in map(shutil.which, names) if path), None)
    if compiler is None:
        raise FileNotFoundError(f"no C++ compiler among {', '.join(names)}: install one or set CXX")
    sources = [file.read_text(encoding="utf-8") for file in sorted(SOURCES.iterdir())]
    identity = [*sources, *FLAGS, compiler, _version(compiler), _processor()]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    target = cache_directory() / "compiled" / f"native-{key}.so"
    if not target.exists():
        tell("building native code (once; kept for later processes) …")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            built = Path(directory) / target.name
            _compile(compiler, built)
            built.replace(target)
    return target


def _compile(compiler: str, output: Path) -> None:
    for threading in THREADING:
        flags = FLAGS if threading is None else (*FLAGS, threading)
        command = [compiler, *flags, str(SOURCES / "native.cpp"), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return
    reason = " ".join(result.stderr.split("\n")[:2])
    raise subprocess.SubprocessError(f"{compiler} failed: {reason}")


@functools.cache
def _version(compiler: str) -> str:
    asked: Sequence[str] = (compiler, "--version")
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout


def _processor() -> str:
    """What -march=native depends on: a cache may be shared between machines."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.exists() else []
    named = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(named))])
