"""Recipes are read, checked and written again."""

import dataclasses

import pytest
import yaml
from huggingface_hub.errors import StrictDataclassError

from causal_qwen.training import TrainingRecipe


def test_a_recipe_survives_its_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output: out\nlearning_rate: 1e-4\nepochs: 2\nreport_to: wandb\n")
    recipe = TrainingRecipe.from_yaml(path, batch_size=3)
    assert (recipe.learning_rate, recipe.epochs, recipe.batch_size) == (1e-4, 2, 3)
    assert recipe.report_to == ["wandb"]
    assert TrainingRecipe.from_mapping(yaml.safe_load(recipe.to_yaml())) == recipe
    assert dataclasses.replace(recipe, seed=1).batch_size == 3


def test_several_templates_survive_the_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output: out\ntemplate: ['{a} is {b}', '{b} of {a}']\ntarget: b\nnumbers: value\n")
    recipe = TrainingRecipe.from_yaml(path)
    assert (recipe.template, recipe.numbers) == (["{a} is {b}", "{b} of {a}"], "value")
    assert TrainingRecipe.from_mapping(yaml.safe_load(recipe.to_yaml())) == recipe


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learningrate": 1}, "unknown key 'learningrate'; did you mean 'learning_rate'"),
        ({"epochs": -1}, "'epochs': -1 does not serve; it must be above 0"),
        ({"epochs": float("nan")}, "'epochs': nan does not serve"),
        ({"epochs": "many"}, "'epochs' with value 'many'"),
        ({"method": "half"}, r"'method' expected one of \('full', 'lora', 'heads'\), got half"),
        ({"batch_size": "many"}, r"'batch_size' expected int, got str \(value: 'many'\)"),
        ({"batch_size": True}, "'batch_size' expected int, got bool"),
        ({"batch_size": 2.5}, "'batch_size' expected int, got float"),
        ({"max_steps": 0}, "'max_steps': 0 does not serve; it must be at least 1"),
        ({"packing": 1}, r"'packing' expected bool, got int \(value: 1\)"),
        ({"warmup": 1.0}, "'warmup': 1.0 does not serve; it must be at least 0 and below 1"),
        ({"report_to": ["paper"]}, r"\['paper'\] does not serve; it must be a list of wandb, tensorboard"),
        ({"early_stopping": 2}, "early_stopping is 2; it needs eval_steps"),
        ({"streaming": True}, "max_steps is None; with streaming"),
        ({"streaming": True, "max_steps": 3}, "validation is None; with streaming"),
        ({"fsdp": True, "method": "heads"}, "method is 'heads'; with fsdp"),
        ({"target": "x"}, "target is 'x'; it is a field of a template"),
        ({"template": []}, r"'template': \[\] does not serve; it must be a sentence with fields, or a list"),
        ({"template": ["{a}", 5]}, "'template'"),
        ({"numbers": "text"}, "'numbers' with value 'text'"),
        ({"epochs": float("inf")}, "'epochs': inf does not serve"),
        ({"ovr_rivals": 0}, "'ovr_rivals': 0 does not serve; it must be at least 1"),
        ({"ovr_rival_scale": 0}, "'ovr_rival_scale': 0 does not serve; it must be above 0"),
        ({"ovr_gradient_bound": 0}, "'ovr_gradient_bound': 0 does not serve; it must be above 0"),
        (
            {"hold": ["embed_tokens", ""]},
            r"\['embed_tokens', ''\] does not serve; it must be a list of parts",
        ),
        ({"gate_alpha": float("nan")}, "'gate_alpha': nan does not serve; it must be a finite number"),
        ({"seed": -1}, "'seed': -1 does not serve"),
        ({"output": " "}, "'output': ' ' does not serve; it must be a name"),
        ({"lora_rank": 0}, "'lora_rank': 0 does not serve; it must be at least 1"),
        ({"model": ["a"] * 1000}, "'model'"),
        ({"delimiter": 5}, "'delimiter' with value 5"),
        ({"validation_fraction": 0.6, "calibration_fraction": 0.5}, "calibration_fraction is 0.5; with"),
    ],
    ids=lambda entry: ",".join(entry) if isinstance(entry, dict) else "",
)
def test_a_value_without_meaning_is_named_with_its_remedy(values, message):
    with pytest.raises(ValueError, match=message) as error:
        TrainingRecipe.from_mapping({"output": "o"} | values, source="mine.yaml")
    assert str(error.value).startswith("mine.yaml: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 450


def test_the_output_is_not_optional():
    with pytest.raises(ValueError, match="output is missing"):
        TrainingRecipe.from_mapping({})


def test_python_is_checked_as_files_are():
    with pytest.raises(StrictDataclassError, match="batch_size"):
        TrainingRecipe(output="o", batch_size=0)
    recipe = TrainingRecipe(output="o")
    with pytest.raises(StrictDataclassError, match="batch_size"):
        recipe.batch_size = 0


def test_words_are_not_refitted_under_solved_intervals():
    """It moves scale_U, in which the residuals of method "heads" were measured."""
    fields = {"output": "o", "template": "{a} {b}", "target": "b", "refit_words": True}
    with pytest.raises(ValueError, match="refit_words is True; with heads it must be false"):
        TrainingRecipe.from_mapping(fields)
    assert TrainingRecipe.from_mapping(fields | {"method": "full"}).refit_words
