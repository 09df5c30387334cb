"""Token ids that keep the values of their numbers where only ids are handed on.

transformers' pipelines and many programs pass `input_ids` on and leave out what else a processor returned,
and decode what generate() returned without asking for more. A <NUM> without its value would be lost there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["NumberedIds"]


class NumberedIds(Tensor):
    """Ids (B, T) with `numeric_values` (B, T), kept by indexing and by moves to another device.

    Whatever else is computed from them is a plain tensor without values; whoever needs a value then says so.
    """

    numeric_values: Tensor

    @classmethod
    def of(cls, ids: Tensor, numeric_values: Tensor) -> NumberedIds:
        """The same ids, with values."""
        numbered = ids.as_subclass(cls)
        numbered.numeric_values = numeric_values
        return numbered

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __getitem__(self, index: Any) -> Tensor:
        return NumberedIds.of(super().__getitem__(index), self.numeric_values[index])

    def __iter__(self) -> Iterator[Tensor]:
        return (self[row] for row in range(len(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> NumberedIds:
        return NumberedIds.of(
            copy.deepcopy(self.as_subclass(Tensor), memo), copy.deepcopy(self.numeric_values, memo)
        )

    def to(self, *args: Any, **kwargs: Any) -> NumberedIds:
        """As a tensor's; the values move to the same device and stay float64."""
        moved = super().to(*args, **kwargs)
        return NumberedIds.of(moved, self.numeric_values.to(moved.device))

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> NumberedIds:
        """As a tensor's."""
        return self.to("cpu", memory_format=memory_format)
