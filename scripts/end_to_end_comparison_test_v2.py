"""A converted model against its base, end to end: logits, choices, texts, sampling, saving, counterfactuals.

Rates have error bars: 4.5 standard errors of a proportion.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import checks
import torch
from torch import Tensor

from causal_qwen import CausalQwen2ForCausalLM, counterfactual
from causal_qwen.cauchy import Cauchy, standard_draw
from causal_qwen.conversion import Base, Conversion, bundled_text, measure_parity

ERRORS = 4.5
PROMPTS = ("The old lighthouse", "1 2 3 4", "def add(a, b):")
NEW = 8
POSITIONS = 192  # of text on which sampling is compared
DRAWS = 8  # causes per position
# Beyond chance: κ was matched on other text.
RATE_TOLERANCE = 0.05


def parity(found: checks.Checks, base: Base, model: CausalQwen2ForCausalLM) -> None:
    """Logits and deterministic choices on held-out text."""
    measured = measure_parity(model, base, bundled_text("heldout")[:2000])
    found.add(
        "largest logit difference", measured.max_abs_logit_diff == 0.0, measured.max_abs_logit_diff, 0.0
    )
    agreement, n = measured.argmax_agreement, measured.positions
    # By the rule of three, no disagreement in n positions bounds the rate by 3/n at 95%.
    found.add(
        "deterministic choices that are the base's",
        agreement > 0.9999,
        f"{agreement:.2%} of {n}, ± {3 / n:.2%}",
        "100%",
    )
    total = measured.ovr_prob_sum_median
    found.add("median of ΣP", 0.5 <= total <= 2.0, f"{total:.3f}", "near 1: 0.5 to 2")
    guess = math.log(model.config.vocab_size) + 1  # P_k = 1/V for all: −log(1/V) − V·log(1 − 1/V)
    loss = measured.ovr_loss
    found.add(
        "One-vs-Rest loss per token", loss < 2 * guess, f"{loss:.2f}", f"< {2 * guess:.1f}, two blind guesses"
    )
    added, nats = measured.added_parameters_fraction, measured.softmax_nll
    print(f"  {added:.2%} parameters added, {nats:.3f} nats per token")


def texts(found: checks.Checks, base: Base, model: CausalQwen2ForCausalLM, seed: int) -> None:
    """Whole generations: standard against greedy, compatible against sampling, with and without a cache."""
    encoded = base.tokenizer(list(PROMPTS), return_tensors="pt", padding=True, padding_side="left")
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    greedy = base.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    for name, options in {"standard": {}, "standard without cache": {"use_cache": False}}.items():
        given = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)
        same = torch.equal(given, greedy)
        found.add(
            f"{name}: the base's greedy text", same, "identical" if same else "other tokens", "identical"
        )
    sampling = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "top_p": 0.95}
    torch.manual_seed(seed)
    expected = base.model.generate(**inputs, **sampling)
    torch.manual_seed(seed)
    given = model.generate(**inputs, **sampling, inference_mode="compatible")
    same = torch.equal(given, expected)
    found.add(
        "compatible: the base's sampled text", same, "identical" if same else "other tokens", "identical"
    )
    alone = {name: tensor[-1:] for name, tensor in inputs.items()}
    together = model.generate(**inputs, max_new_tokens=NEW, inference_mode="causal", individual=7)
    single = model.generate(**alone, max_new_tokens=NEW, inference_mode="causal", individual=7)
    same = torch.equal(together[-1:], single)
    found.add("causal: an individual says the same alone and in a batch", same, same, True)


def sampling_rates(found: checks.Checks, model: CausalQwen2ForCausalLM, ids: Tensor, seed: int) -> None:
    """How often sampling picks the favourite: drawn causes against softmax, on text κ was not matched on."""
    generator = torch.Generator().manual_seed(seed)
    outputs = model(ids, output_logits=False)
    loc, scale = outputs.loc_U[0], outputs.scale_U[0] + model.action.b_noise.abs()  # (N, D)
    logits = model.token_logits(loc).float()  # (N, V)
    favourite = logits.argmax(-1)
    softmax = logits.softmax(-1).amax(-1)  # (N,)
    hits, floor = [], model.config.density_floor
    for _ in range(DRAWS):
        epsilon = standard_draw(torch.rand(loc.shape, generator=generator), density_floor=floor)
        u = Cauchy(loc, model.config.noise_gain * scale)
        hits.append(model.token_logits(u.loc + u.scale * epsilon).argmax(-1) == favourite)
    causal = torch.stack(hits).double().mean(0)  # (N,)
    difference = causal - softmax.double()
    error = difference.std().item() / math.sqrt(len(difference))
    found.add(
        "causal sampling picks the favourite as often as softmax",
        abs(difference.mean().item()) < RATE_TOLERANCE + ERRORS * error,
        f"{causal.mean():.3f} against {softmax.mean():.3f} ± {error:.3f}",
        f"within {RATE_TOLERANCE} and {ERRORS} errors",
    )


def saving(found: checks.Checks, conversion: Conversion, ids: Tensor) -> None:
    """What is written is what is read."""
    with tempfile.TemporaryDirectory() as directory:
        conversion.save(Path(directory) / "model")
        loaded = CausalQwen2ForCausalLM.from_pretrained(Path(directory) / "model").eval()
        outputs, again = conversion.model(ids, output_scores=True), loaded(ids, output_scores=True)
    for name in ("logits", "loc_S", "scale_S", "loc_Y", "scale_Y"):
        same = torch.equal(outputs[name], again[name])
        found.add(f"saved and loaded: {name}", same, "identical" if same else "other", "identical")


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; 0 if all checks pass."""
    options = checks.arguments(__doc__).parse_args(argv)
    base, conversion = checks.load(options.base, options.seed)
    found = checks.Checks(f"{options.base}, converted, against itself")
    model = conversion.model
    heldout = base.tokenizer(bundled_text("heldout"), return_tensors="pt", verbose=False)["input_ids"]
    parity(found, base, model)
    texts(found, base, model, options.seed)
    sampling_rates(found, model, heldout[:, :POSITIONS], options.seed)
    saving(found, conversion, heldout[:, :16])
    result = counterfactual(
        model,
        conversion.processor,
        PROMPTS[0],
        [PROMPTS[0], "The new lighthouse"],
        options.seed,
        max_new_tokens=NEW,
    )
    null = result.interventions[0].identical_to_factual
    found.add("the null intervention reproduces the factual text", null, null, True)
    return found.finish()


if __name__ == "__main__":
    raise SystemExit(main())
