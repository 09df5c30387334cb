"""Recipes and what models carry are read as flat YAML; whatever else they are gets one line."""

import pytest

from causal_qwen.data import Reading
from causal_qwen.data.settings import read_settings
from causal_qwen.training import TrainingRecipe

BOMB = "a: &a [x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "a list; a recipe is a mapping"),
        ("", "empty; a recipe is a mapping"),
        ("word", "a str; a recipe is a mapping"),
        ("a: " + "[" * 5_000, ":1: nested too deeply"),
        ("a:\n" + "".join(" " * depth + "- \n" for depth in range(1, 200)), "nested too deeply"),
        (BOMB, r":2: \*a; a recipe has no aliases"),
        ("output: o\nx: [\n", ":3: broken YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", ":1: broken YAML"),
        ("output: a\nmodel: b\noutput: c\n", ":3: output is set twice"),
        ("output: a\n---\noutput: b\n", "broken YAML"),
        ("1: 2\n", "the key 1 is no name"),
        ("a: 2026-99-99\n", "broken YAML"),
        ("a: " + "9" * 5000, "broken YAML"),
        ("a:\n\t- b\n", ":2: broken YAML"),
        (b"\x89PNG\0", "binary data"),
        (b"output: caf\xe9\n", ":1: byte 0xe9 at offset 11 is not utf-8; save it as UTF-8"),
        ("x: '" + "y" * 1_000_001 + "'", "more than 1,000,000 characters"),
    ],
    ids=lambda entry: None if isinstance(entry, bytes) else entry[:12],
)
def test_a_file_that_is_no_recipe_gets_one_line(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (TrainingRecipe.from_yaml, read_settings, lambda file: Reading.of(file.parent)):
        with pytest.raises(ValueError, match=message) as error:
            read(path)
        assert str(error.value).startswith(str(path))
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400


def test_a_mark_is_no_part_of_a_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_bytes("\ufeffoutput: o\n".encode())
    assert TrainingRecipe.from_yaml(tmp_path / "recipe.yaml").output == "o"
    with pytest.raises(ValueError, match="is a directory"):
        TrainingRecipe.from_yaml(tmp_path)


@pytest.mark.parametrize("line", ["template: 5", "target: [a]", "completion_only: maybe", "append_eos: 1"])
def test_what_a_model_carries_is_checked(tmp_path, line):
    (tmp_path / "recipe.yaml").write_text(line + "\n")
    with pytest.raises(ValueError, match="it must be a"):
        Reading.of(tmp_path)
