"""The order of the rows: a function of seed and epoch alone, so that a run can be resumed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from causal_qwen.data import Encoded

__all__ = ["EpochSampler", "FilledRows", "StreamedRows"]

GROUP_BATCHES = 50  # batches whose rows are sorted by length among themselves


class EpochSampler(Sampler[int]):
    """A permutation of the rows for each epoch.

    Args:
        lengths: Tokens of each row.
        seed: With the epoch, all that the order depends on.
        group: Rows per step to hold together rows of similar length; 0 does not group.
        multiple: What the number of places in an epoch is a multiple of: the rows of a batch on all
            processes. The last places are filled with the first rows, by indices of `FilledRows`.
    """

    def __init__(self, lengths: Sequence[int], *, seed: int, group: int = 0, multiple: int = 1) -> None:
        self.lengths, self.seed, self.group, self.multiple, self.epoch = lengths, seed, group, multiple, 0

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.multiple) * self.multiple

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        again = itertools.islice(itertools.cycle(order), len(self) - len(order))
        return itertools.chain(order, (len(order) + row for row in again))

    def _order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        if not self.group:
            return order
        size = self.group * GROUP_BATCHES
        batches: list[list[int]] = []
        for start in range(0, len(order), size):
            block = sorted(order[start : start + size], key=self.lengths.__getitem__, reverse=True)
            batches += [block[i : i + self.group] for i in range(0, len(block), self.group)]
        # The short last batch stays last, and the batches come in random order: length must not tell time.
        whole = len(order) // self.group
        shuffled = [batches[i] for i in torch.randperm(whole, generator=generator).tolist()]
        return list(itertools.chain.from_iterable(shuffled + batches[whole:]))


class FilledRows(Dataset[Any]):
    """Rows, and behind them the same rows once more, of which nothing is learned.

    Processes that train together take the same number of batches. Where the rows do not suffice for the last
    ones, a row that counted twice would make a run depend on the number of its processes.

    Args:
        rows: N of them; index N + i is row i again.
        unlearned: Takes the labels of a row away.
    """

    def __init__(self, rows: Any, unlearned: Callable[[Any], Any]) -> None:
        self.rows, self.unlearned = rows, unlearned

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        count = len(self.rows)
        return self.rows[index] if index < count else self.unlearned(self.rows[index - count])


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
