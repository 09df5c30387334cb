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
import shlex
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
    "LARGEST_NATIVE",
    "NativeAbduction",
    "NativeMatrix",
    "NativeScorer",
    "build",
    "library",
    "native_best",
    "native_dense",
    "native_matrix",
    "native_product",
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
# What the functions take: pointers and integers.
SIGNATURES = {
    "matrix_product": "ppppii",
    "matrix_widened": "ppi",
    "causes": "ppppii",
    "token_scores": "ppppii",
    "token_scores_among": "ppipppi",
    "decoder_step": "pp",
}
ACTIVATIONS = ("exp", "softplus", "abs")
GROUP = 32  # columns of integers that share a scale
# Vectors beyond which matrix products may win: at 48 native code still takes two thirds of their time.
LARGEST_NATIVE = 48


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
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("loc_S", "scale_S", "standing", "best", "balance", "threshold", "loc_U0", "scale_U0")
    ]


class _Abduction(ctypes.Structure):
    _fields_ = [("maps", NativeMatrix), ("activation", ctypes.c_int64), ("bound", ctypes.c_double)]


def pointer(
    tensor: Tensor | None, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
) -> int | None:
    """Where a tensor's values lie; null for None. Native code trusts what it is given, so this does not.

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
        wanted = "" if shape is None else f" of shape {shape}"
        raise ValueError(f"expected {dtype}{wanted}; got {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor.data_ptr()


def native_matrix(
    weight: Tensor, scale: Tensor | None, shift: Tensor | None, bias: Tensor | None = None
) -> NativeMatrix:
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
    return NativeMatrix(pointer(weight, dtype=weight.dtype), *parts, rows, columns, kind)


def runs_native(weight: Tensor, scale: Tensor | None) -> bool:
    """Whether the library can read such a matrix, and is there."""
    known = scale is not None or weight.dtype in KINDS
    return known and weight.device.type == "cpu" and weight.is_contiguous() and library() is not None


def native_product(x: Tensor, matrix: NativeMatrix) -> Tensor:
    """W x + b, (N, D) → (N, V), float32; `library` must have given one."""
    return _product(x, matrix, None)


def native_best(x: Tensor, matrix: NativeMatrix) -> tuple[Tensor, Tensor]:
    """`native_product` and its argmax, (N,)."""
    best = torch.empty(x.shape[0], dtype=torch.int64)
    return _product(x, matrix, best.data_ptr()), best


def _product(x: Tensor, matrix: NativeMatrix, best: int | None) -> Tensor:
    x, count = x.contiguous(), x.shape[0]
    y = torch.empty(count, matrix.rows)
    given = pointer(x, (count, matrix.columns))
    _found().matrix_product(ctypes.byref(matrix), given, pointer(y), best, count, torch.get_num_threads())
    return y


def native_dense(matrix: NativeMatrix) -> Tensor:
    """W of integers in float32, (V, D); `library` must have given one."""
    y = torch.empty(matrix.rows, matrix.columns)
    _found().matrix_widened(ctypes.byref(matrix), pointer(y), torch.get_num_threads())
    return y


class NativeAbduction:
    """loc_U, scale_U and loc_U0 of features; `library` must have given one.

    Args:
        weight: (2D + 1, H) float32: the maps to loc_U, to what scale_U is the activation of, and to −loc_U0.
        bias: (2D + 1,) float32.
        activation: "exp", "softplus" or "abs".
        bound: scale_U stays within e^±bound.
    """

    def __init__(self, weight: Tensor, bias: Tensor, activation: str, bound: float) -> None:
        self._kept = (weight, bias)
        maps = native_matrix(weight, None, None, bias)
        self._abduction = _Abduction(maps, ACTIVATIONS.index(activation), bound)

    def __call__(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H) float32 → (B, D), (B, D) and (B,)."""
        maps, batch = self._abduction.maps, features.shape[0]
        features = features.contiguous()
        U, loc_U0 = torch.empty(2, batch, maps.rows // 2), torch.empty(batch)
        _found().causes(
            ctypes.byref(self._abduction),
            pointer(features, (batch, maps.columns)),
            pointer(U),
            pointer(loc_U0),
            batch,
            torch.get_num_threads(),
        )
        loc_U, scale_U = U.unbind()
        return loc_U, scale_U, loc_U0


class NativeScorer:
    """loc_S and scale_S of all tokens, or their standing; `library` must have given one.

    Args:
        matrix: W, with b as its bias; the caller keeps its tensors.
        balance: (V,) float32, or None for 0.
        threshold: (V,) float32, or None for 0.
    """

    def __init__(self, matrix: NativeMatrix, balance: Tensor | None, threshold: Tensor | None) -> None:
        self._matrix = matrix
        self._kept = (balance, threshold)
        self._pointers = tuple(pointer(part, (matrix.rows,)) for part in self._kept)

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
        standing, best = torch.empty(count, self._matrix.rows), torch.empty(count, dtype=torch.int64)
        self._fill((loc_U, scale_U), (loc_U0, scale_U0), None, None, pointer(standing), best.data_ptr())
        return standing, best

    def among(
        self,
        logits: Tensor,
        k: int,
        loc_U: Tensor,
        scale_U: Tensor | None,
        loc_U0: Tensor | None,
        scale_U0: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`standing` where ``logits`` (N, V) are among the k largest of their row, −inf elsewhere; without
        ``scale_U`` W loc_U + b.
        """
        count, matrix = logits.shape[0], self._matrix
        scores, best = torch.empty(count, matrix.rows), torch.empty(count, dtype=torch.int64)
        outputs = self._scores(count, (loc_U0, scale_U0), None, None, pointer(scores), best.data_ptr())
        given = [
            (logits.contiguous(), matrix.rows),
            (loc_U.contiguous(), matrix.columns),
            (None if scale_U is None else scale_U.contiguous(), matrix.columns),
        ]
        of_logits, loc, scale = (pointer(part, (count, size)) for part, size in given)
        _found().token_scores_among(
            ctypes.byref(matrix), of_logits, min(k, matrix.rows), loc, scale, ctypes.byref(outputs), count
        )
        return scores, best

    def _fill(
        self, U: tuple[Tensor, Tensor], U0: tuple[Tensor | None, Tensor | None], *outputs: int | None
    ) -> None:
        matrix, count = self._matrix, U[0].shape[0]
        U = (U[0].contiguous(), U[1].contiguous())
        causes = [pointer(part, (count, matrix.columns)) for part in U]
        scores = self._scores(count, U0, *outputs)
        _found().token_scores(
            ctypes.byref(matrix), *causes, ctypes.byref(scores), count, torch.get_num_threads()
        )

    def _scores(self, count: int, U0: tuple[Tensor | None, Tensor | None], *outputs: int | None) -> _Scores:
        common = [None if part is None else part.float().contiguous() for part in U0]
        scores = _Scores(*outputs, *self._pointers, *(pointer(part, (count,)) for part in common))
        scores.kept = common  # it points into them
        return scores


def library(tell: Callable[[str], None] | None = None) -> ctypes.CDLL | None:
    """The loaded library; None where it is switched off or cannot be built, which the log says once.

    Args:
        tell: Called with one line before a build, which takes a few seconds; the log when None.
    """
    return _load(tell or logger.info) if compilation_enabled() else None


_loaded: list[ctypes.CDLL | None] = []


def _found() -> ctypes.CDLL:
    """The library, where it is known to be there: its users ask at every token."""
    found = _loaded[0]
    assert found is not None
    return found


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
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64}
    for name, taken in SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = [kinds[kind] for kind in taken], None
    return found


def build(tell: Callable[[str], None]) -> Path:
    """The shared library, built unless the cache has it for this source, compiler and processor.

    Raises:
        OSError: If there is no compiler, or the cache cannot be written.
        subprocess.SubprocessError: If the compiler refuses the source.
    """
    named = os.environ.get("CXX")
    commands = [shlex.split(named)] if named else [[name] for name in COMPILERS]
    compiler = next((command for command in commands if shutil.which(command[0])), None)
    if compiler is None:
        names = ", ".join(command[0] for command in commands)
        raise FileNotFoundError(f"no C++ compiler among {names}: install one or set CXX")
    sources = [file.read_text(encoding="utf-8") for file in sorted(SOURCES.iterdir())]
    identity = [*sources, *FLAGS, *compiler, _version(*compiler), _processor()]
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


def _compile(compiler: Sequence[str], output: Path) -> None:
    for threading in THREADING:
        flags = FLAGS if threading is None else (*FLAGS, threading)
        command = [*compiler, *flags, str(SOURCES / "native.cpp"), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return
    reason = " ".join(result.stderr.split("\n")[:2])
    raise subprocess.SubprocessError(f"{' '.join(compiler)} failed: {reason}")


@functools.cache
def _version(*compiler: str) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout


def _processor() -> str:
    """What -march=native depends on: a cache may be shared between machines."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.exists() else []
    named = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(named))])
