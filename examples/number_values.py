"""Numbers in a text become values, and the number head learns to continue a sequence of them.

Only the head for numbers is trained (a few seconds); the words stay those of the base.
"""

from __future__ import annotations

import argparse

import torch

from causal_qwen import Cauchy, convert, scan
from causal_qwen.value_space import ValueSpace

TEXT = "Room A4 costs 1,234.50 dollars, -3.5% since 2026-11-15"


def main() -> None:
    """Scan a text, then learn y = 3x and predict with intervals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="smollm2", help="smollm2, a directory, a .gguf file or a hub id")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    print(f"{TEXT!r} holds", [(number.text, number.value) for number in scan(TEXT)])

    conversion = convert(options.base)
    model, processor = conversion.model, conversion.processor
    x = torch.linspace(1, 60, 40).round()
    batch = processor(
        [f"x is {value:g} and y is" for value in x.tolist()],
        numbers="value",
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    space = ValueSpace.fit("log", 3 * x.double())  # where the numbers of this task live
    model.config.value_center, model.config.value_spread = space.center, space.spread
    with torch.no_grad():
        outputs = model(**batch, logits_to_keep=1, output_logits=False)
        U = model.action.exogenous(Cauchy(outputs.loc_U[:, -1], outputs.scale_U[:, -1]))
    head = [*model.action.number.parameters(), model.action.number_noise]
    optimizer = torch.optim.Adam(head, lr=0.02)
    for step in range(options.steps):
        loss = -model.action.numbers(U).log_prob(space.encode(3 * x)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    asked = processor(["x is 20 and y is"], numbers="value", return_tensors="pt")
    found = model.predict_number(asked, level=0.9)
    print(
        f"y at x = 20: {found.median.item():.1f}, 90% in {found.lower.item():.1f} to {found.upper.item():.1f}"
    )


if __name__ == "__main__":
    main()
