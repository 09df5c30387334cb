"""Announces our classes to transformers' Auto classes without importing them before they are needed.

The Auto classes want class objects, and ours subclass transformers': registering at once would import torch
and the whole of Qwen2 with ``import causal_qwen``. Each of our files registers its class when it is imported,
as usual; this module only sees to it that they are imported in time. The configuration and the processor
follow transformers' Auto modules, once the outermost of them has run (inside one of them, Qwen2 cannot be
imported yet). The model follows the first configuration: AutoModelForCausalLM looks for a model only after it
has made one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["follow_auto_classes", "import_model"]

AUTO_MODEL = "transformers.models.auto.modeling_auto"
# Auto module: the module of ours that follows it
FOLLOWERS = {
    "transformers.models.auto.configuration_auto": "causal_qwen.configuration_causal_qwen2",
    AUTO_MODEL: "causal_qwen.configuration_causal_qwen2",
    "transformers.models.auto.processing_auto": "causal_qwen.processing_causal_qwen2",
}


def follow_auto_classes() -> None:
    """Import our configuration and processor now if their Auto classes are there, else when they come."""
    for auto, ours in FOLLOWERS.items():
        if auto in sys.modules:
            importlib.import_module(ours)
    if not any(isinstance(finder, _Follower) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Follower())


def import_model() -> None:
    """Import our model if the Auto models are in use."""
    if AUTO_MODEL in sys.modules:
        importlib.import_module("causal_qwen.modeling_causal_qwen2")


class _Follower(importlib.abc.MetaPathFinder):
    """Finds the Auto modules as Python would, and imports what follows them once the outermost has run."""

    def __init__(self) -> None:
        self.depth = 0
        self.pending: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in FOLLOWERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _FollowingLoader(spec.loader, self, FOLLOWERS[fullname])
        return spec


class _FollowingLoader(importlib.abc.Loader):
    """The module's own loader, then ours."""

    def __init__(self, loader: importlib.abc.Loader, follower: _Follower, ours: str) -> None:
        self.loader = loader
        self.follower = follower
        self.ours = ours

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        follower = self.follower
        follower.depth += 1
        try:
            self.loader.exec_module(module)
        finally:
            follower.depth -= 1
        follower.pending.add(self.ours)
        if follower.depth == 0:
            while follower.pending:
                importlib.import_module(follower.pending.pop())
