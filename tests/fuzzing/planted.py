"""Faults that must be found, and errors that must be told apart."""

import json

import torch

from causal_qwen import Individual
from causal_qwen.decoder.stopping import StopString
from causal_qwen.kernels.library import loaded
from causal_qwen.kernels.native import native_matrix
from fuzzing.inputs import Take
from fuzzing.target import Target

__all__ = ["ERRORS", "TARGETS"]


class Marked:
    """Inputs of which the first one is bad."""

    def feed(self, seed: int, count: int, take: Take) -> None:
        """A bad one, then good ones."""
        for index in range(count):
            take(f"{seed} {index}{'' if index else '!'}".encode())


def _refused() -> None:
    StopString("")


def _from_a_library() -> None:
    json.loads("{")


def _from_below() -> None:
    Individual(0).noise("position", 3, density_floor=0.0, persistence=0.0)  # type: ignore[arg-type]


def _nothing_to_read() -> None:
    raise ValueError


ERRORS = ((_refused, True), (_from_a_library, False), (_from_below, False), (_nothing_to_read, False))


def _is_bad(data: bytes) -> bool:
    return data.endswith(b"!")


def _hang(data: bytes) -> None:
    while _is_bad(data):
        pass


def _hang_below(data: bytes) -> None:
    """No signal is seen in there."""
    if _is_bad(data):
        sum(range(10**12))


def _stray(data: bytes) -> None:
    """Reads one vector more than there is."""
    weight, x, y = torch.zeros(4, 32), torch.zeros(1, 32), torch.zeros(2, 4)
    count = 2 if _is_bad(data) else 1
    loaded().matrix_product(native_matrix(weight, None, None), x.data_ptr(), y.data_ptr(), None, count, 1)


TARGETS = (
    Target(name="hang", source=Marked(), check=_hang, share=2, seconds=0.2, sanitised=True),
    Target(name="hang below", source=Marked(), check=_hang_below, share=1, seconds=0.2, sanitised=True),
    Target(name="strayed read", source=Marked(), check=_stray, share=1, sanitised=True),
)
