"""Whether a place can be written to, asked before anything is loaded."""

import re
import shutil
from collections import namedtuple

import pytest

from causal_qwen.directories import check_output_directory, check_output_file, check_space

Usage = namedtuple("Usage", "total used free")


def test_what_can_be_written_is_let_through_and_nothing_is_made(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "old.csv").write_text("old")
    check_output_directory(tmp_path / "empty")
    check_output_directory(tmp_path / "new" / "deeper")
    check_output_directory(tmp_path, overwrite=True)
    check_output_file(tmp_path / "new" / "table.csv")
    check_output_file(tmp_path / "old.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "old.csv"]


@pytest.mark.parametrize("check", [check_output_directory, check_output_file])
def test_what_cannot_is_named_with_the_reason(tmp_path, monkeypatch, check):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(NotADirectoryError, match=f"{re.escape(str(file))} is a file, not a directory"):
        check(file / "deeper" / "out")
    with monkeypatch.context() as patch:  # root may write anywhere
        patch.setattr("causal_qwen.directories.os.access", lambda path, mode: False)
        with pytest.raises(PermissionError, match=f"no permission to write into {re.escape(str(tmp_path))}"):
            check(tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**10, 10**10 - 3_000_000, 3_000_000))
    check(tmp_path / "out")
    with pytest.raises(OSError, match=r"space, 3\.0 MB are free and about 1\.2 GB are needed"):
        check_space(tmp_path / "out", 1_200_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**10, 10**10, 0))
    with pytest.raises(OSError, match="out: not enough space"):
        check(tmp_path / "out")


def test_what_is_there_is_kept(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(FileExistsError, match="exists; choose another place"):
        check_output_directory(tmp_path)
    with pytest.raises(FileExistsError, match="is a file; name a directory"):
        check_output_directory(file, overwrite=True)
    with pytest.raises(FileExistsError, match="exists; choose another file"):
        check_output_file(file, overwrite=False)
    with pytest.raises(IsADirectoryError, match="is a directory; name a file"):
        check_output_file(tmp_path)
