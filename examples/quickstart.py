"""Convert a base, look at the cause behind a word, and let the law and an individual each continue a text."""

from __future__ import annotations

import argparse

import torch

from causal_qwen import Cauchy, Individual, convert


@torch.no_grad()
def main() -> None:
    """Print the same facts that the README speaks of."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="smollm2", help="smollm2, a directory, a .gguf file or a hub id")
    parser.add_argument("--prompt", default="My favourite season is")
    options = parser.parse_args()
    conversion = convert(options.base)
    model, processor = conversion.model, conversion.processor

    inputs = processor(options.prompt, return_tensors="pt")
    outputs = model(**inputs, output_scores=True)
    print(f"U: {model.config.causal_size} causes, median scale {outputs.scale_U[0, -1].median():.2g}")

    S = Cauchy(outputs.loc_S[0, -1], outputs.scale_S[0, -1])  # (V,): one law per token
    prob = S.sf(model.action.threshold)  # P_k, each token on its own
    print(f"the probabilities of all tokens add up to {prob.sum():.2f}; the likeliest:")
    for value, token in zip(*prob.topk(3), strict=True):
        print(f"  {processor.tokenizer.decode([token])!r:12} {value:.3f}")

    def show(name: str, ids: torch.Tensor) -> None:
        new = ids[0, inputs["input_ids"].shape[1] :]
        print(f"{name:14} {processor.decode(new, skip_special_tokens=True)!r}")

    show("the law:", model.generate(**inputs, max_new_tokens=12, do_sample=False))
    for seed in (7, 7, 8):
        causal = {"inference_mode": "causal", "individual": Individual(seed)}
        show(f"individual {seed}:", model.generate(**inputs, max_new_tokens=12, **causal))


if __name__ == "__main__":
    main()
