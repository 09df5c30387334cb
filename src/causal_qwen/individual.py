"""Who is sampled: an individual is a seed and a persistence, and its noise path follows from them alone.

Noise is counter-based: the draw for a position depends on (seed, position) and on nothing that came before,
so the same individual says the same in another process, at another batch size, with or without a cache. It is
made on the CPU in float32, and only then moved to where the model is. What belongs to the world and not to
the individual can be drawn anew (``world``). This module knows no model and no tokens.
"""

from __future__ import annotations

import base64
import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from causal_qwen.cauchy import standard_draw

__all__ = ["Individual", "Individuals", "one_per_row"]

SHARED, OWN = 0, 1  # the two streams of a seed: one vector for the whole text, one per position
STREAMS = 2  # behind them come those of world 0, of world 1, …
SEEDS = 2**64
WORLDS = 2**48
POSITIONS = 2**48  # far beyond any text, and well inside a counter
AHEAD = 16  # positions whose draws are made at one time


@dataclass(frozen=True, eq=False)
class Individual:
    """ε_i = ρ·ε_shared + (1 − ρ)·ε_i,own: standard Cauchy for every ρ, both parts keyed by (seed, i).

    Args:
        seed: In [0, 2⁶⁴).
        persistence: ρ in [0, 1]: 1 is one noise vector for the whole text, 0 a fresh one per token; None
            leaves it to the model's configuration.
        start: Position of the first token that this individual decides; a later turn of a chat goes on where
            the last one ended.
        path: (n, D + 1) noise of the first n positions, given instead of drawn (the last column is the
            number's): an individual that was abducted from a text. Later positions are drawn.
        mirrored: Whether all noise has the other sign: the `antithetic` individual.
        world: Whose exogenous noise the individual meets. None: its own ε stands for that, too. An index:
            ε' of the same law, independent of ε and of every other world of this individual.
        world_path: (n, D + 1) as ``path``, of the noise of the world.
    """

    seed: int
    persistence: float | None = None
    start: int = 0
    path: Tensor | None = field(default=None, repr=False)
    mirrored: bool = False
    world: int | None = None
    world_path: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not _is_integer(self.seed) or not 0 <= self.seed < SEEDS:
            raise ValueError(
                f"seed is {self.seed!r:.80}; an individual's seed is an integer from 0 to 2**64 - 1"
            )
        if self.persistence is not None and not (
            isinstance(self.persistence, int | float) and 0.0 <= self.persistence <= 1.0
        ):
            raise ValueError(f"persistence is {self.persistence!r:.80}; it must lie between 0 and 1")
        if not _is_integer(self.start) or not 0 <= self.start < POSITIONS:
            raise ValueError(f"start is {self.start!r:.80}; positions are integers from 0 to 2**48 - 1")
        for name, path in (("path", self.path), ("world_path", self.world_path)):
            if path is not None and (path.ndim != 2 or path.dtype != torch.float32):
                raise ValueError(
                    f"{name} is {path.dtype} of shape {tuple(path.shape)}; give float32, (n, D + 1)"
                )
        if not isinstance(self.mirrored, bool):
            raise ValueError(f"mirrored is {self.mirrored!r:.80}; it is True or False")
        if self.world is not None and (not _is_integer(self.world) or not 0 <= self.world < WORLDS):
            raise ValueError(f"world is {self.world!r:.80}; worlds are integers from 0 to 2**48 - 1, or None")
        if self.world_path is not None and self.world is None:
            raise ValueError("world_path is given without a world; say which one it is, such as world=0")

    @classmethod
    def random(cls, persistence: float | None = None) -> Individual:
        """Somebody, drawn by torch's generator: torch.manual_seed repeats them, and the seed says who."""
        return cls(int(torch.randint(SEEDS // 2 - 1, ())), persistence)

    def antithetic(self) -> Individual:
        """Who has −ε wherever this one has ε, in every world: as likely, and as far on the other side."""
        return replace(self, mirrored=not self.mirrored)

    def redrawn(self, world: int | None = None) -> Individual:
        """The same individual in another world: ε stays, the exogenous ε' is drawn anew.

        Args:
            world: Which; the next one by default.
        """
        following = 0 if self.world is None else (self.world + 1) % WORLDS
        return replace(self, world=following if world is None else world, world_path=None)

    def noise(self, position: int, size: int, *, density_floor: float, persistence: float) -> Tensor:
        """ε of one position, (size + 1,) float32 on the CPU; the last is ε_Y, of the number's read-out.

        Args:
            position: Index of the generated token, from 0.
            size: D.
            density_floor: Truncation; both parts are truncated, so ε keeps the bound.
            persistence: ρ where the individual has none of its own.
        """
        return self._noise(self.path, SHARED, position, size + 1, density_floor, persistence)

    def world_noise(self, position: int, size: int, *, density_floor: float, persistence: float) -> Tensor:
        """ε' of the exogenous part, and ε_Y of the read-out: `noise` itself outside of any world.

        In a world its law is that of `noise`, with the same persistence. Arguments as for `noise`.
        """
        if self.world is None:
            return self.noise(position, size, density_floor=density_floor, persistence=persistence)
        shared = STREAMS * (1 + self.world)
        return self._noise(self.world_path, shared, position, size + 1, density_floor, persistence)

    def _noise(
        self,
        path: Tensor | None,
        shared: int,
        position: int,
        width: int,
        density_floor: float,
        persistence: float,
    ) -> Tensor:
        """From the path as far as it goes, then from the stream ``shared`` and the one behind it."""
        position += self.start
        if path is not None and position < len(path):
            if path.shape[1] != width:
                raise ValueError(
                    f"this individual was abducted for causes of size {path.shape[1] - 1}, not {width - 1}"
                )
            noise = path[position]
        else:
            rho = persistence if self.persistence is None else self.persistence
            block, row = divmod(position, AHEAD)
            noise = _drawn(self.seed, shared, rho, block, width, density_floor)[row]
        return -noise if self.mirrored else noise

    def to_json(self) -> str:
        """A small JSON object."""
        fields: dict[str, object] = {"seed": self.seed, "persistence": self.persistence, "start": self.start}
        if self.mirrored:
            fields["mirrored"] = True
        if self.world is not None:
            fields["world"] = self.world
        for name, path in (("path", self.path), ("world_path", self.world_path)):
            if path is not None:
                data = base64.b64encode(path.numpy().astype("<f4").tobytes())
                fields |= {f"{name}_shape": list(path.shape), name: data.decode("ascii")}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Individual:
        """The individual that `to_json` wrote.

        Raises:
            ValueError: If the text is not one.
        """
        try:
            fields = json.loads(text)
            path, world_path = (
                _path(fields[name], fields[f"{name}_shape"]) if name in fields else None
                for name in ("path", "world_path")
            )
            who = fields["seed"], fields["persistence"], fields["start"]
            mirrored, world = fields.get("mirrored", False), fields.get("world")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error!s:.80}"
            raise ValueError(f"not an individual ({reason}); write one with Individual.save") from error
        return cls(*who, path, mirrored, world, world_path)

    def save(self, file: str | Path) -> None:
        """Write `to_json` to a file, whole or not at all."""
        target = Path(file)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_text(self.to_json() + "\n", encoding="utf-8")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, file: str | Path) -> Individual:
        """Read what `save` wrote.

        Raises:
            ValueError: If the file holds no individual; it is named.
        """
        try:
            return cls.from_json(Path(file).read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError:
            raise ValueError(
                f"{file}: not an individual, nor a text; write one with Individual.save"
            ) from None
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error


def _path(data: str, shape: list[int]) -> Tensor:
    """The noise (n, D + 1) that `to_json` wrote."""
    values = np.frombuffer(base64.b64decode(data, validate=True), dtype="<f4").astype(np.float32)
    path = torch.from_numpy(values.reshape(shape))
    if not path.isfinite().all():
        raise ValueError("path is not finite")
    return path


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


Individuals = Individual | int | Sequence[Individual | int]


def one_per_row(who: Individuals | None, rows: int) -> list[Individual]:
    """One individual per row: the same for all, or one each; somebody new for each by default.

    Args:
        who: An `Individual` or a seed for all rows, several of them, or None.
        rows: How many.

    Raises:
        ValueError: If there are several, but not one per row, or one is neither an individual nor a seed.
    """
    if who is None:
        return [Individual.random() for _ in range(rows)]
    people = list(who) if isinstance(who, Sequence) else [who] * rows
    if len(people) != rows:
        raise ValueError(f"{len(people)} individuals for {rows} rows; give one for all, or one per row")
    of_seed = {seed: Individual(seed) for seed in people if not isinstance(seed, Individual)}
    return [person if isinstance(person, Individual) else of_seed[person] for person in people]


@functools.lru_cache(maxsize=256)
def _drawn(seed: int, shared: int, rho: float, block: int, size: int, density_floor: float) -> Tensor:
    """The noise of `AHEAD` positions, (AHEAD, size), from the stream ``shared`` and the one behind it."""
    positions = range(block * AHEAD, (block + 1) * AHEAD)
    uniform = torch.stack([_uniform(seed, shared + OWN, position, size) for position in positions])
    own = standard_draw(uniform, density_floor=density_floor)
    return rho * _shared(seed, shared, size, density_floor) + (1 - rho) * own


@functools.lru_cache(maxsize=256)
def _shared(seed: int, shared: int, size: int, density_floor: float) -> Tensor:
    return standard_draw(_uniform(seed, shared + SHARED, 0, size), density_floor=density_floor)


def _uniform(seed: int, stream: int, position: int, size: int) -> Tensor:
    """``size`` floats in (0, 1) from the Philox counter (stream, position) under the key ``seed``.

    The raw 64-bit words are used, whose order numpy guarantees across versions and platforms; 24 bits of each
    make a float32 in the middle of its cell, so that neither 0 nor 1 occurs.
    """
    key, counter = np.array([seed, stream], np.uint64), np.array([0, position, 0, 0], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(size)
    cells = (words >> np.uint64(40)).astype(np.float64)
    return torch.from_numpy(((cells + 0.5) * 2.0**-24).astype(np.float32))
