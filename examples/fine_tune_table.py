"""Teach a model a table: cars as sentences, their fuel economy as the number that follows.

python examples/fine_tune_table.py --steps 40
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
parser.add_argument("--steps", type=int, default=40)
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
        max_steps=arguments.steps,
        batch_size=8,
        learning_rate=3e-5,
        heads_learning_rate=1e-2,
        softmax_loss_weight=1.0,
        classification_loss_weight=0.01,
        gate_alpha=1.0,
        loss_impl="sampled",
        save_steps=0,
    ),
    rows=learned,
    overwrite=True,
)
print(f"median absolute error on held-out cars: {result.metrics['eval/reg_mdae']:.2f} miles per gallon")

model = CausalQwen2ForCausalLM.from_pretrained(result.output).eval()
processor = CausalQwen2Processor.from_pretrained(result.output)
questions = [TEMPLATE.format(**row | {"Miles_per_Gallon": ""}) for row in asked]
answers = model.predict_number(processor(questions, padding=True, return_tensors="pt"), level=0.9)
for row, median, lower, upper in zip(asked, answers.median, answers.lower, answers.upper, strict=True):
    print(f"{row['Name']:28} {median:5.1f}  ({lower:.1f} to {upper:.1f}), in truth {row['Miles_per_Gallon']}")
