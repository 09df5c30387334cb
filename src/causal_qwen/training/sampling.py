"""The order of the rows: a function of seed and epoch alone, so that a run can be resumed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.utils.data import IterableDataset, Sampler

from causal_qwen.data import Encoded

__all__ = ["EpochSampler", "StreamedRows"]

GROUP_BATCHES = 50  # batches whose rows are sorted by length among themselves


class EpochSampler(Sampler[int]):
    """A permutation of the rows for each epoch.

    Args:
        lengths: Tokens of each row.
        seed: With the epoch, all that the order depends on.
        group: Rows per batch to hold together rows of similar length; 0 does not group.
    """

    def __init__(self, lengths: Sequence[int], *, seed: int, group: int = 0) -> None:
        self.lengths, self.seed, self.group, self.epoch = lengths, seed, group, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        if not self.group:
            return iter(order)
        size = self.group * GROUP_BATCHES
        batches: list[list[int]] = []
        for start in range(0, len(order), size):
            block = sorted(order[start : start + size], key=self.lengths.__getitem__, reverse=True)
            batches += [block[i : i + self.group] for i in range(0, len(block), self.group)]
        # The short last batch stays last, and the batches come in random order: length must not tell time.
        whole = len(order) // self.group
        shuffled = [batches[i] for i in torch.randperm(whole, generator=generator).tolist()]
        return itertools.chain.from_iterable(shuffled + batches[whole:])


class StreamedRows(IterableDataset[Encoded]):
    """Rows read while training, shuffled within a buffer, over and over.

    Args:
        read: Opens the stream from its beginning.
        buffer: Rows in memory to draw from.
        seed: Of the draws; each pass over the data draws anew.

    Raises:
        ValueError: While iterating, if the stream holds no row.
    """

    def __init__(self, read: Callable[[], Iterable[Encoded]], *, buffer: int, seed: int) -> None:
        self.read, self.buffer, self.seed = read, buffer, seed

    def __iter__(self) -> Iterator[Encoded]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            pool: list[Encoded] = []
            empty = True
            for row in self.read():
                empty = False
                if len(pool) < self.buffer:
                    pool.append(row)
                    continue
                index = int(torch.randint(len(pool), (), generator=generator))
                yield pool[index]
                pool[index] = row
            if empty:
                raise ValueError("the data hold no row to train on")
            yield from (pool[i] for i in torch.randperm(len(pool), generator=generator).tolist())
