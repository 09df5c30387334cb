"""Early stopping on repetition: greedy text falls into loops; the loop is seen at its third round."""

from __future__ import annotations

from typing import Any

from decoder_base import arguments, load, plot

from causal_qwen.decoder import Repetition, StopReason, pad_left

PROMPTS = (
    "The history of the lighthouse begins with",
    "Once upon a time there was a",
    "The best way to learn is",
    "1, 2, 3, 1, 2, 3, 1, 2, 3,",
)


def main() -> None:
    """Print where each text was stopped and draw what was saved."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    base = load(options.model)
    pad = base.eos_token_id or 0
    ids, mask = pad_left([base.encode(prompt) for prompt in PROMPTS], pad)
    out = base.model.generate(
        ids,
        options.tokens,
        attention_mask=mask,
        eos_token_id=base.eos_token_id,
        pad_token_id=pad,
        stop=Repetition(),
    )
    for row, prompt in enumerate(PROMPTS):
        print(
            f"\n{prompt!r}: {out.lengths[row]} of {options.tokens} tokens, stopped by {out.stop_reasons[row]}"
        )
        print(f"  ends in {base.decode(out.new_tokens(row))[-120:]!r}")
    loops = out.stop_reasons.count(StopReason.REPETITION)
    saved = sum(options.tokens - length for length in out.lengths)
    print(
        f"\n{loops} of {len(PROMPTS)} texts looped; {saved} of {options.tokens * len(PROMPTS)} tokens saved"
    )

    def draw(axes: Any) -> None:
        labels = [
            f"{prompt[:24]} ({reason})" for prompt, reason in zip(PROMPTS, out.stop_reasons, strict=True)
        ]
        axes.barh(labels, [options.tokens] * len(PROMPTS), color="lightgrey", label="not written")
        axes.barh(labels, out.lengths, label="written")
        axes.set(xlabel="new tokens")
        axes.legend()

    plot("decoder_repetition.png", draw)


if __name__ == "__main__":
    main()
