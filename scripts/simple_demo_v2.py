"""What CausalQwen does, in the names that its users know: a short demonstration that checks itself."""

from __future__ import annotations

from collections.abc import Sequence

import checks
import torch

from causal_qwen import CausalQwen2Processor, Individual
from causal_qwen.conversion import Base
from causal_qwen_mvp import (
    CausalInferenceEngine,
    CausalQwenMVPForCausalLM,
    CausalTrainer,
    InferenceValidator,
)

PROMPT = "The reason why the sea is salty is that"
NEW = 8


def texts(
    found: checks.Checks, base: Base, model: CausalQwenMVPForCausalLM, processor: CausalQwen2Processor
) -> None:
    """What the law says, what individuals say, and what the temperature changes."""
    ids = processor(PROMPT, return_tensors="pt")["input_ids"]

    def text(row: torch.Tensor) -> str:
        return repr(processor.decode(row[0, ids.shape[1] :], skip_special_tokens=True))

    still = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    greedy = base.model.generate(ids, max_new_tokens=NEW, do_sample=False)
    print(f"\n{PROMPT} …\n  the law        {text(still)}")
    found.add("deterministic text is the base's", torch.equal(still, greedy), text(still), text(greedy))
    hot = model.generate(ids, max_new_tokens=NEW, do_sample=False, temperature=5.0)
    same = torch.equal(hot, still)
    found.add("temperature 5 changes nothing without sampling", same, text(hot), "the same")
    cold = model.generate(ids, max_new_tokens=NEW, do_sample=True, temperature=0.0)
    found.add("temperature 0 samples nothing", torch.equal(cold, still), text(cold), "the same")

    seeds = (7, 7, 8, 9)
    sampling = {"max_new_tokens": NEW, "inference_mode": "causal"}
    people = [model.generate(ids, individual=Individual(seed), **sampling) for seed in seeds]
    for seed, row in zip(seeds, people, strict=True):
        print(f"  individual {seed}   {text(row)}")
    same = torch.equal(people[0], people[1])
    found.add("the same individual says the same", same, text(people[1]), "the same")
    different = len({tuple(row[0].tolist()) for row in people})
    found.add("three individuals say three things", different == 3, different, 3)


def methods(found: checks.Checks, base: Base, model: CausalQwenMVPForCausalLM, ids: torch.Tensor) -> None:
    """Engine, modes and validators."""
    start = ids.shape[1]
    engine = CausalInferenceEngine(model)
    rows = engine.generate(ids.repeat(3, 1), NEW, do_sample=True, temperature=0.8, top_k=50, top_p=0.9)
    found.add("a batch of three", rows.shape == (3, start + NEW), tuple(rows.shape), (3, start + NEW))
    token, wanted = engine.generate_next_token(ids), base.model(ids).logits[:, -1].argmax(-1)
    found.add("the next token", token.item() == wanted.item(), token.item(), wanted.item())
    for mode in ("standard", "causal", "compatible"):
        shape = tuple(model.inference(ids, mode=mode).loc_S.shape)
        expected = (1, start, model.config.vocab_size)
        found.add(f"inference in {mode} mode", shape == expected, shape, expected)
    validator = InferenceValidator(model)
    for name, holds in validator.validate_v2_principles(ids)["principles"].items():
        found.add(name, holds, holds, True)
    parity = validator.compare_with_qwen(ids, base.model) or {}
    exact = parity["logits_difference"] == 0.0 and parity["prediction_match_rate"] == 1.0
    found.add("logits and prediction are the base's", exact, parity["logits_difference"], 0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 if everything is as it should be."""
    options = checks.arguments(__doc__).parse_args(argv)
    base, conversion = checks.load(options.base, options.seed)
    found = checks.Checks(f"A short demonstration on {options.base}")
    torch.manual_seed(options.seed)
    model, processor = CausalQwenMVPForCausalLM.from_modern(conversion.model), conversion.processor
    ids = processor(PROMPT, return_tensors="pt")["input_ids"]
    texts(found, base, model, processor)
    methods(found, base, model, ids)

    model.model.requires_grad_(False)
    # Steps well below scale_S, about 1e-3: beyond it the loss is not linear in a score.
    trainer = CausalTrainer(model, torch.optim.Adam([model.action.bias], lr=1e-4))
    losses = [trainer.training_step({"input_ids": ids})["loss"] for _ in range(3)]
    falling = losses[-1] < losses[0]
    found.add("training steps lower the loss", falling, [f"{loss:.4f}" for loss in losses], "falling")
    return found.finish()


if __name__ == "__main__":
    raise SystemExit(main())
