"""Recipes: what is read, and what is refused."""

import pytest
import yaml

from causal_qwen.training import TrainingRecipe


def test_recipes_are_read_and_checked(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output: out\nlearning_rate: 1e-4\nepochs: 2\nreport_to: wandb\n")
    recipe = TrainingRecipe.from_yaml(path, batch_size=3)
    assert (recipe.learning_rate, recipe.epochs, recipe.batch_size) == (1e-4, 2, 3)
    assert recipe.report_to == ["wandb"]
    assert TrainingRecipe.from_mapping(yaml.safe_load(recipe.to_yaml())) == recipe
    for values, message in (
        ({"output": "o", "learningrate": 1}, "did you mean 'learning_rate'"),
        ({}, "output is missing"),
        ({"output": "o", "epochs": -1}, "epochs is -1"),
        ({"output": "o", "method": "half"}, "choose one of 'full'"),
        ({"output": "o", "batch_size": "many"}, "batch_size is 'many'"),
        ({"output": "o", "packing": 1}, "packing is 1"),
        ({"output": "o", "report_to": ["paper"]}, "report_to"),
        ({"output": "o", "streaming": True}, "max_steps is None"),
        ({"output": "o", "target": "x"}, "template"),
        ({"output": "o", "validation_fraction": 0.6, "calibration_fraction": 0.5}, "calibration_fraction"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingRecipe.from_mapping(values)
