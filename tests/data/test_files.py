"""Files become text: in any encoding that is named, compressed or not, and inside a package only there."""

import gzip
import importlib
import sys

import pytest

from causal_qwen.data import BadRow, BadRows, Files, Reading, read_columns, read_rows
from causal_qwen.data.files import find_files

READING = Reading("{a} is {b}", "b")


def examples(path, **options):
    return [(one.prompt, one.completion) for one in READING.examples(Files(path, **options), BadRows())]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that raises when it is imported, with a file, a way out, and a neighbour."""
    root = tmp_path / "site" / "guarded_package"
    (root / "data").mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (root / "data" / "a.csv").write_text("a,b\nx,1\n")
    (tmp_path / "site" / "secret.csv").write_text("a,b\nsecret,1\n")
    (root / "data" / "link.csv").symlink_to(tmp_path / "site" / "secret.csv")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return root


def test_files_of_a_package_are_found_without_importing_it(package):
    assert examples("package:guarded_package/data/a.csv") == [("x is ", "1")]
    assert examples("package:guarded_package/data/a*.csv") == [("x is ", "1")]
    assert "guarded_package" not in sys.modules


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ("guarded_package/../secret.csv", "without '..'"),
        ("guarded_package/data/../../../secret.csv", "without '..'"),
        ("guarded_package//etc/hostname", "without '..'"),
        ("guarded_package/data/link.csv", "leads out of the package"),
        ("guarded_package/data/*.csv", "leads out of the package"),
        ("guarded_package/data/none.csv", "no such file"),
        ("guarded_package/data", "is a directory"),
        ("guarded_package", "a path inside"),
        ("guarded_package.data/a.csv", "is no package"),
        ("../secret.csv", "is no package"),
        ("os/a.csv", "not installed"),
        ("__main__/a.csv", "not installed"),
    ],
)
def test_nothing_outside_of_a_package_is_reached(package, inside, message):
    with pytest.raises(ValueError, match=message):
        find_files(f"package:{inside}")
    assert "guarded_package" not in sys.modules


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1", "cp1252"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "a,b\ncafé,1\n"),
        ("a.jsonl", '{"a": "café", "b": 1}\n'),
        ("a.json", '[{"a": "café", "b": 1}]'),
        ("a.tsv", "a\tb\ncafé\t1\n"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_encodings_marks_and_compression(tmp_path, name, text, encoding, compressed):
    content = text.encode(encoding)
    path = tmp_path / (f"{name}.gz" if compressed else name)
    path.write_bytes(gzip.compress(content, mtime=0) if compressed else content)
    says = {"encoding": encoding} if encoding in ("latin-1", "cp1252") else {}
    assert examples(path, **says) == [("café is ", "1")]
    if says:
        with pytest.raises(
            ValueError, match=r"a\..*byte 0xe9 at offset \d+ is not utf-8; .*--encoding latin-1"
        ):
            examples(path)


def test_a_text_loses_its_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffhello".encode())
    assert [row for _, row in read_rows(tmp_path / "a.txt")] == [{"text": "hello"}]


def test_undecodable_bytes_are_named_by_line_and_offset(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = '{"a": "x", "b": 1}\n' * 3000
    path.write_bytes(good.encode() + b'{"a": "caf\xe9", "b": 1}\n')
    with pytest.raises(
        ValueError, match=rf"rows\.jsonl:3001: byte 0xe9 at offset {len(good) + 10} is not utf-8"
    ):
        examples(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"\x89PNG\r\n\x1a\n\0\0", "binary data"),
        ("a.txt", b"words\0", "binary data"),
        ("a.csv", b"", "is empty; a table begins with the names"),
        ("a.csv", b"\n\n", "is empty"),
        ("a.csv", b"a,b,b\n1,2,3\n", "2 columns are called 'b'"),
        ("a.csv", b'a,b\nx,1\n"y,2\nz,3\n', r":3: broken CSV \(a quotation mark is opened and never closed"),
        ("a.csv", b'a,b\n"x"y,1\n', ":2: broken CSV"),
        ("a.csv.gz", b"hello", "damaged gzip"),
        ("a.csv.gz", gzip.compress(b"a,b\n" + b"x,1\n" * 99, mtime=0)[:-9], "damaged gzip"),
        ("a.parquet", b"PAR1 nonsense PAR1", "broken Parquet"),
        ("a.parquet", b"", "broken Parquet"),
        ("a.parquet.gz", b"", "known are"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.jsonl", b"[" * 100_000, ":1: .*nested too deeply"),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000, ":1: .*nested too deeply"),
        ("a.jsonl", b'{"a": 1, "b": ' + b"9" * 5000 + b"}", "thousands of digits"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "line 2, column 1.*is .jsonl"),
        ("a.xlsx", b"PK", "known are"),
    ],
)
def test_what_cannot_be_read_gets_one_line_with_its_file(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        examples(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_long_cell_is_a_cell(tmp_path):
    import csv

    (tmp_path / "a.csv").write_text("a,unused,b\n" + f"x,{'y' * 150_000},1\n" + f"{'z' * 150_000},y,2\n")
    limit = csv.field_size_limit()
    assert [len(prompt) for prompt, _ in examples(tmp_path / "a.csv")] == [5, 150_004]
    assert csv.field_size_limit() == limit


def test_broken_csv_rows_are_skipped_and_the_rest_is_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\nx,1\n"y"z,2\nw,3,4\n\n"two\nlines",5\nv,NA\nu,6\n')
    bad_rows = BadRows("skip")
    rows = [(one.where, one.completion) for one in READING.examples(path, bad_rows)]
    assert rows == [(f"{path}:{line}", text) for line, text in ((2, "1"), (6, "5"), (9, "6"))]
    assert bad_rows.count == 3


@pytest.mark.parametrize("separator", [";", "\t", "|", ","])
def test_delimiters(tmp_path, separator):
    path = tmp_path / "a.csv"
    path.write_text(f"a{separator}b\nx{separator}1\n")
    assert examples(path) == examples(path, delimiter=separator) == [("x is ", "1")]
    assert read_columns(path) == ["a", "b"]


def test_delimiters_and_encodings_are_checked():
    with pytest.raises(ValueError, match="delimiter is '::'"):
        Files("a.csv", delimiter="::")
    for encoding in ("klingon", "rot13"):
        with pytest.raises(ValueError, match=f"encoding '{encoding}' is not known"):
            Files("a.csv", encoding=encoding)


def test_a_table_without_names_for_some_columns(tmp_path):
    """pandas writes its index that way."""
    (tmp_path / "a.csv").write_text(",a,b\n0,x,1\n")
    assert [row for _, row in read_rows(tmp_path / "a.csv")] == [{"column 1": "0", "a": "x", "b": "1"}]


def test_names_that_look_like_patterns(tmp_path):
    (tmp_path / "a[1].csv").write_text("a,b\nx,1\n")
    assert examples(tmp_path / "a[1].csv") == [("x is ", "1")]
    with pytest.raises(ValueError, match="is a directory; name its files"):
        examples(tmp_path)
    with pytest.raises(BadRow, match="row 0"):
        list(read_rows([1]))
