"""The order of the rows: by seed and epoch, or within the buffer of a stream."""

import pytest

from causal_qwen.training.sampling import EpochSampler, FilledRows, StreamedRows


def test_the_order_depends_on_seed_and_epoch_alone():
    lengths = [5, 1, 9, 3, 7, 2, 8, 4]
    sampler = EpochSampler(lengths, seed=1)
    first = list(sampler)
    assert sorted(first) == list(range(8))
    assert first == list(EpochSampler(lengths, seed=1))
    sampler.set_epoch(1)
    assert list(sampler) != first
    grouped = list(EpochSampler(lengths, seed=1, group=2))
    assert sorted(grouped) == list(range(8))
    pairs = sorted(tuple(sorted(lengths[i] for i in grouped[k : k + 2])) for k in range(0, 8, 2))
    assert pairs == [(1, 2), (3, 4), (5, 7), (8, 9)]


def test_rows_that_fill_the_last_batches_are_not_learned():
    rows = FilledRows("abcde", str.upper)
    assert len(rows) == 5
    alone, together = (list(EpochSampler([1] * 5, seed=1, multiple=multiple)) for multiple in (1, 4))
    assert sorted(alone) == list(range(5))
    assert together[:5] == alone
    assert together[5:] == [5 + row for row in alone[:3]]
    assert "".join(rows[i] for i in together[5:]) == "".join("ABCDE"[row] for row in alone[:3])
    assert len(list(EpochSampler([1], seed=1, multiple=4))) == 4  # more places than twice the rows


def test_a_stream_is_shuffled_and_never_held_whole():
    taken = 0

    def read():
        nonlocal taken
        for index in range(1000):
            taken += 1
            yield index

    stream = StreamedRows(read, buffer=10, seed=0)
    rows = [row for row, _ in zip(stream, range(50), strict=False)]
    assert taken <= 62
    assert rows != sorted(rows)
    passes = [
        row for row, _ in zip(StreamedRows(lambda: range(7), buffer=3, seed=0), range(14), strict=False)
    ]
    assert sorted(passes[:7]) == sorted(passes[7:]) == list(range(7))
    with pytest.raises(ValueError, match="no row"):
        next(iter(StreamedRows(list, buffer=3, seed=0)))
