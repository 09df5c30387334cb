"""The shared library of cpp/: built at its first use, kept for later processes, absent without a compiler.

It is plain C++ without torch's headers: built in seconds, once per source, compiler and processor, in the
package's cache directory. ``CAUSAL_QWEN_COMPILE=0`` leaves it out; CXX names another compiler, and CXXFLAGS
are added to its flags, such as a sanitiser's. This module does not know what the library computes.
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

from causal_qwen.directories import cache_directory
from causal_qwen.kernels.compiled import compilation_enabled
from causal_qwen.kernels.interface import declare

__all__ = ["build", "library", "loaded"]

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpp"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
# Without OpenMP (Apple's compiler) the same code runs in one thread.
THREADING = ("-fopenmp", None)

_loaded: list[ctypes.CDLL | None] = []  # empty until somebody needs it


def library(tell: Callable[[str], None] | None = None) -> ctypes.CDLL | None:
    """The loaded library; None where it is switched off or cannot be built, which the log says once.

    Args:
        tell: Called with one line before a build, which takes a few seconds; the log when None.

    Raises:
        RuntimeError: If its structures are not those of ``interface.py``.
    """
    if not compilation_enabled():
        return None
    if not _loaded:
        _loaded.append(_load(tell or logger.info))
    return _loaded[0]


def loaded() -> ctypes.CDLL:
    """The library, where there is one.

    Raises:
        RuntimeError: If there is none.
    """
    native = library()
    if native is None:
        raise RuntimeError("native code is switched off or cannot be built here: ask runs_native() first")
    return native


def _load(tell: Callable[[str], None]) -> ctypes.CDLL | None:
    try:
        native = ctypes.CDLL(str(build(tell)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "native code cannot be built here (%s); a slower form with the same results is used", error
        )
        return None
    return declare(native)


def build(tell: Callable[[str], None], *, extra: Sequence[str] | None = None) -> Path:
    """The shared library, built unless the cache has it for this source, compiler and processor.

    Args:
        tell: Called with one line before a build.
        extra: Flags for the compiler besides its own; those of CXXFLAGS when None.

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
    extra = shlex.split(os.environ.get("CXXFLAGS", "")) if extra is None else extra
    sources = [file.read_text(encoding="utf-8") for file in sorted(SOURCES.iterdir())]
    identity = [*sources, *FLAGS, *extra, *compiler, _version(*compiler), _processor()]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    target = cache_directory() / "compiled" / f"native-{key}.so"
    if not target.exists():
        tell("building native code (once; kept for later processes) …")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            built = Path(directory) / target.name
            _compile(compiler, built, extra)
            built.replace(target)
    return target


def _compile(compiler: Sequence[str], output: Path, extra: Sequence[str]) -> None:
    for threading in THREADING:
        flags = FLAGS if threading is None else (*FLAGS, threading)
        command = [*compiler, *flags, *extra, str(SOURCES / "native.cpp"), "-o", str(output)]
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
