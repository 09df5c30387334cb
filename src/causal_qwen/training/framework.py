"""What a process holds without a model: Python, its libraries, a tokenizer, rows."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

__all__ = ["framework_bytes"]

# What torch's compiler and the kernels that it builds hold once the loss has been compiled, beyond imports.
COMPILER_BYTES = 100 << 20


def framework_bytes() -> int:
    """What this process holds now, and what compiling will add: a run imports the same libraries."""
    return _resident() + COMPILER_BYTES


def _resident() -> int:
    statistics = Path("/proc/self/statm")
    if statistics.is_file():
        return int(statistics.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, kilobytes elsewhere
    return peak if sys.platform == "darwin" else peak * 1024
