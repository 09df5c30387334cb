"""Files of rows: damaged ones are refused or skipped by name, whole ones are read as they were written."""

import csv
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from causal_qwen import CausalQwen2Processor
from causal_qwen.data import BadRows, Encoded, Encoder, Reading, read_rows
from causal_qwen.data.files import Files
from fuzzing.inputs import ODD_TEXT, Drawn, Mutated
from fuzzing.places import written
from fuzzing.processing import processor
from fuzzing.target import Target

__all__ = ["TARGETS", "check_file", "check_table"]

CARS = [
    {
        "Name": "chevrolet chevelle malibu",
        "Miles_per_Gallon": 18,
        "Weight": 3504,
        "Origin": "USA",
        "Year": "1970-01-01",
    },
    {
        "Name": "citroen ds-21 pallas",
        "Miles_per_Gallon": 13.5,
        "Weight": 3090,
        "Origin": "Europe",
        "Year": "1970-01-01",
    },
    {
        "Name": "datsun pl510, 4 doors",
        "Miles_per_Gallon": 27.25,
        "Weight": 2130,
        "Origin": "Japan",
        "Year": "1971-01-01",
    },
]
TEXTS = [
    {"text": "The price is 99.9 元."},
    {"prompt": "2 + 2 =", "completion": " 4"},
    {"messages": [{"role": "user", "content": "How tall?"}, {"role": "assistant", "content": "1.8 m"}]},
]
READING = Reading(
    ["A {Origin} car of {Weight} lbs makes {Miles_per_Gallon} mpg.", "{Name}, {Weight}: {Miles_per_Gallon}"],
    "Miles_per_Gallon",
    template_seed=0,
)


def csv_file(rows: list[dict[str, object]], delimiter: str = ",") -> bytes:
    """A table as spreadsheets save it."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def parquet_file() -> bytes:
    """The same table, by columns."""
    import pyarrow
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(CARS), sink)
    return sink.getvalue()


@functools.cache
def files(suffix: str) -> list[bytes]:
    """Whole files of a kind."""
    lines = [*map(json.dumps, CARS)], [json.dumps(row, ensure_ascii=False) for row in TEXTS]
    match suffix:
        case ".csv":
            return [csv_file(CARS), b"\xef\xbb\xbf" + csv_file(CARS).replace(b"\r\n", b"\n")]
        case ".tsv":
            return [csv_file(CARS, "\t")]
        case ".jsonl":
            return ["\n".join(rows).encode() for rows in lines]
        case ".json":
            return [json.dumps(rows, indent=1).encode() for rows in (CARS, TEXTS)]
        case ".txt":
            return ["Die 3 Äpfel wiegen 0,5 kg.\n第3章: 99.9元\n".encode()]
        case _:
            return [parquet_file()]


def check_file(suffix: str, data: bytes) -> None:
    """A file gives rows, which give examples and tokens, or an error that names it."""
    file = written(data, suffix)
    skipping = BadRows("skip")
    rows = list(read_rows(file, bad_rows=skipping))
    for _, row in rows:
        assert isinstance(row, dict)
    reading = READING if b"Origin" in data else Reading()
    for numbers in ("value", "written"):
        encoder = Encoder(reader(numbers), reading, max_length=64)
        skipped = BadRows("skip")
        encoded = list(encoder.rows(file, skipped))
        assert all(len(row.input_ids) == len(row.numeric_values) == len(row.labels) for row in encoded)
        assert len(rows) + skipping.count <= len(encoded) + skipped.count
        if numbers == "written":
            assert all(check_read(row, encoder.processor.num_token_id) for row in encoded)
    strict(encoder, file, bad=skipped.count)


@functools.cache
def reader(numbers: str) -> CausalQwen2Processor:
    """The processor that reads numbers so."""
    own = processor()
    return CausalQwen2Processor(own.tokenizer, numbers=numbers, chat_template=own.chat_template)


def check_read(row: Encoded, num_token_id: int) -> bool:
    """Values are learned, or begin a row: a prompt has none."""
    pairs = list(zip(row.input_ids, row.labels, strict=True))
    return all(label == token for token, label in pairs[1:] if token == num_token_id)


def strict(encoder: Encoder, file: Path, *, bad: int) -> None:
    """With `error`, the first bad row stops, and its error names the file."""
    try:
        for _ in encoder.rows(file, BadRows("error")):
            pass
    except ValueError as error:
        if not bad or str(file) not in str(error):
            raise AssertionError(f"{bad} bad rows, and not named: {error}") from error
        raise
    assert not bad


def check_table(data: bytes) -> None:
    """What was written to a table is read from it, character by character."""
    header, cells = json.loads(data)
    rows = [dict(zip(header, row, strict=True)) for row in cells]
    table = Files(written(csv_file([dict.fromkeys(header, ""), *rows]), ".csv"), delimiter=",")
    assert [row for _, row in read_rows(table)][1:] == rows
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    assert [row for _, row in read_rows(written(lines, ".jsonl"))] == rows


def of(suffix: str) -> Callable[[bytes], None]:
    """The check of files of a kind."""
    return functools.partial(check_file, suffix)


def kind(suffix: str, share: int) -> Target:
    """Damaged files of a kind."""
    source = Mutated(functools.partial(files, suffix))
    return Target(name=f"rows-{suffix[1:]}", source=source, check=of(suffix), share=share, seconds=10)


CELLS = ODD_TEXT.map(lambda text: text.encode("utf-8", "replace").decode())
TARGETS = (
    kind(".csv", 40),
    kind(".tsv", 5),
    kind(".jsonl", 40),
    kind(".json", 15),
    kind(".txt", 10),
    kind(".parquet", 40),
    Target(
        name="tables",
        source=Drawn(
            st.lists(CELLS.map(lambda name: f"a{name}"), min_size=1, max_size=3, unique=True).flatmap(
                lambda header: st.tuples(
                    st.just(header),
                    st.lists(st.tuples(*(CELLS for _ in header)), max_size=3),
                )
            )
        ),
        check=check_table,
        share=30,
    ),
)
