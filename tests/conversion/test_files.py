"""Directories that are whole or absent."""

import pytest

from causal_qwen.conversion.files import atomic_directory


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_nothing(tmp_path, error):
    def write(overwrite):
        with atomic_directory(tmp_path / "out", overwrite=overwrite) as temporary:
            (temporary / "half").write_text("half")
            raise error

    with pytest.raises(error):
        write(overwrite=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(error):
        write(overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old"]
