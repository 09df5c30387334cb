"""The same individual under another prompt, beside another individual under the same prompt."""

from __future__ import annotations

import argparse

from causal_qwen import abduct, convert, counterfactual


def main() -> None:
    """Print who says what, and where the texts part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="smollm2", help="smollm2, a directory, a .gguf file or a hub id")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    conversion = convert(options.base)
    model, processor = conversion.model, conversion.processor

    factual = "I grew up by the sea, so"
    other = "I grew up in the desert, so"
    result = counterfactual(
        model, processor, factual, [factual, other], options.seed, max_new_tokens=options.tokens
    )
    null, intervention = result.interventions
    for name, branch in {
        "factual": result.factual,
        "the same prompt again": null,
        "do(another prompt)": intervention,
        "another individual": result.control,
    }.items():
        where = "identical" if branch.divergence is None else f"differs from token {branch.divergence}"
        print(f"{name}: {branch.prompt}{branch.text!r}\n    {where}, {branch.edit_distance} edits")
    assert null.identical_to_factual  # the individual decides the text, and nothing else does

    # The other way round: who would have said this?
    observed = result.control.text[:12]
    found = abduct(model, processor, factual, observed, seed=options.seed)
    said = counterfactual(model, processor, factual, [other], found, max_new_tokens=options.tokens)
    print(f"observed {observed!r}: an individual was found who says {said.factual.text!r}")
    print(f"under the other prompt the same one says {said.interventions[0].text!r}")


if __name__ == "__main__":
    main()
