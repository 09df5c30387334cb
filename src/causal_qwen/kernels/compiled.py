"""A function compiled at its first use, with a plain twin for where no compiler works.

Nothing is compiled at import. ``CAUSAL_QWEN_COMPILE=0`` and ``TORCHDYNAMO_DISABLE=1`` select the plain twin;
so does a compiler that fails, with one line in the log. What was compiled is kept for later processes, in
the library's cache directory unless ``TORCHINDUCTOR_CACHE_DIR`` names another. This module does not know what
it compiles.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

from causal_qwen.directories import cache_directory

__all__ = ["CompiledKernel", "compilation_enabled"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Variants that one kernel may have before it is given up: dtypes × layouts.
VARIANTS = 32


def compilation_enabled() -> bool:
    """Whether the environment allows torch.compile."""
    switches = {"CAUSAL_QWEN_COMPILE": "0", "TORCHDYNAMO_DISABLE": "1"}
    return not any(os.environ.get(name) == off for name, off in switches.items())


class CompiledKernel(Generic[P, R]):
    """fast(*args) = plain(*args): the first compiled, where a compiler works; the second elsewhere.

    Args:
        fast: What is compiled, on the first call.
        plain: The same result without a compiler.
    """

    def __init__(self, fast: Callable[P, R], plain: Callable[P, R]) -> None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory() / "compiled"))
        self.fast = fast
        self.plain = plain
        self.failed = False
        self._compiled: Callable[P, R] | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The result, from whichever form works here."""
        if self.failed or not compilation_enabled():
            return self.plain(*args, **kwargs)
        compiled = self._build()
        try:
            return compiled(*args, **kwargs)
        except Exception as error:  # whatever a missing or broken tool chain raises
            logger.debug("%s did not compile: %r", self.fast.__qualname__, error)
        try:
            # Once more: torch's compiler warns, and where warnings are errors that alone would stop it.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return compiled(*args, **kwargs)
        except Exception as error:
            self._give_up(error)
        return self.plain(*args, **kwargs)

    def _build(self) -> Callable[P, R]:
        with self._lock:
            if self._compiled is None:
                self._compiled = torch.compile(  # type: ignore[call-overload]
                    self.fast,
                    dynamic=True,  # one variant serves all sizes
                    fullgraph=True,
                    recompile_limit=VARIANTS,
                    isolate_recompiles=True,
                    # a·b + c in one instruction
                    options={"cpp.enable_floating_point_contract_flag": "fast"},
                )
            return self._compiled

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            if self.failed:
                return
            self.failed = True
        logger.warning(
            "torch.compile cannot build %s here (%s: %s); a slower form with the same results is used",
            self.fast.__qualname__,
            type(error).__name__,
            " ".join(str(error).split("\n")[:2]),
        )
