"""Recipes: a file is a recipe that says the same when it is written, or an error that names file and key."""

import dataclasses

from causal_qwen.training import TrainingRecipe
from fuzzing.inputs import Mutated
from fuzzing.places import written
from fuzzing.target import Target

__all__ = ["TARGETS", "check"]

SHORT = b"""# a table
data: [cars.csv, more.jsonl]
output: out/model
template: "A {Origin} car makes {mpg} miles."
target: mpg
method: lora
learning_rate: 1e-4
max_steps: 100
report_to: tensorboard
seed: 3
"""

SEVERAL = SHORT.replace(b"template: ", b'numbers: value\ntemplate:\n- "{mpg} miles: {Origin}"\n- ')


def files() -> list[bytes]:
    """A short recipe, as people write them, and a whole one."""
    return [SHORT, SEVERAL, TrainingRecipe(output="out", data="a.csv").to_yaml().encode()]


def check(data: bytes) -> None:
    """from_yaml → to_yaml → from_yaml is the same recipe."""
    recipe = TrainingRecipe.from_yaml(written(data, ".yaml"))
    again = TrainingRecipe.from_yaml(written(recipe.to_yaml().encode(), ".yaml"))
    assert dataclasses.asdict(again) == dataclasses.asdict(recipe)


TARGETS = (Target(name="recipes", source=Mutated(files), check=check, share=40, seconds=10),)
