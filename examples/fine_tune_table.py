"""Teach a model a table: cars as sentences, their fuel economy as the number that follows.

The number head is solved on the features of the base: no gradient, no steps.

python examples/fine_tune_table.py
"""

import argparse
import importlib.resources
import json
from pathlib import Path

from causal_qwen import CausalQwen2ForCausalLM, CausalQwen2Processor
from causal_qwen.training import TrainingRecipe, train

TEMPLATE = "{Origin} {Year:.4}, {Cylinders} cylinders, {Weight_in_lbs} pounds: {Miles_per_Gallon}"

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--base", default="smollm2", help="a base or a converted directory")
parser.add_argument("--output", type=Path, default=Path("cars-model"))
arguments = parser.parse_args()

file = importlib.resources.files("vega_datasets") / "_data" / "cars.json"
rows = [row for row in json.loads(file.read_text(encoding="utf-8")) if None not in row.values()]
asked, learned = rows[:3], rows[3:]

result = train(
    TrainingRecipe(
        model=arguments.base,
        output=str(arguments.output),
        template=TEMPLATE,
        target="Miles_per_Gallon",
    ),
    rows=learned,
    overwrite=True,
)
print(f"median absolute error on held-out cars: {result.metrics['eval/reg_mdae']:.2f} miles per gallon")

model = CausalQwen2ForCausalLM.from_pretrained(result.output).eval()
processor = CausalQwen2Processor.from_pretrained(result.output)
questions = [TEMPLATE.format(**row | {"Miles_per_Gallon": ""}) for row in asked]
answers = model.predict_number(processor(questions, padding=True, return_tensors="pt"), level=0.9)
for index, row in enumerate(asked):
    median, lower, upper = (column[index] for column in (answers.median, answers.lower, answers.upper))
    warning = ", beyond what training has seen" if answers.extrapolates[index] else ""
    truth = f"in truth {row['Miles_per_Gallon']}"
    print(f"{row['Name']:28} {median:5.1f}  ({lower:.1f} to {upper:.1f}), {truth}{warning}")
