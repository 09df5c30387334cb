"""Every parameter of generate(), in compatible mode, against the base itself: the same tokens, to the last.

The table names each field of transformers' GenerationConfig: compared here, or why there is nothing to
compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import checks
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    Qwen2ForCausalLM,
    StoppingCriteriaList,
)

from causal_qwen.conversion import Base

PROMPTS = ("The old lighthouse", "1 2 3 4")
# Fields of GenerationConfig without a case of their own, and why.
NO_CASE = {
    "only adds to the output": (
        "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate"
    ),
    "of encoder-decoders": (
        "decoder_start_token_id forced_bos_token_id encoder_repetition_penalty encoder_no_repeat_ngram_size"
    ),
    "needs code from the hub": (
        "constraints force_words_ids num_beam_groups diversity_penalty penalty_alpha dola_layers low_memory"
    ),
    "of assisted decoding; prompt_lookup_num_tokens is compared": (
        "assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind "
        "target_lookbehind is_assistant num_assistant_tokens num_assistant_tokens_schedule "
        "max_matching_ngram_size speculation_type use_mtp"
    ),
    "says how to run, not what to say": (
        "_from_model_config transformers_version continuous_batching_config compile_config max_cache_len "
        "token_healing"
    ),
}
SAMPLED = {"do_sample": True, "top_k": 0}


class Raise(LogitsProcessor):
    """A user's own processor: favours one token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Add 3 to token 40."""
        scores = scores.clone()
        scores[:, 40] += 3.0
        return scores


def sampled_cases() -> dict[str, dict[str, Any]]:
    """The options of sampling, by name; its first word is the field of GenerationConfig that is tested."""
    return {
        "do_sample": {"do_sample": True},
        "do_sample=False": {"do_sample": False},
        "temperature": SAMPLED | {"temperature": 0.6},
        "top_k": {"do_sample": True, "top_k": 5},
        "top_p": SAMPLED | {"top_p": 0.7},
        "top_h": SAMPLED | {"top_h": 0.5},
        "min_p": SAMPLED | {"min_p": 0.1},
        "typical_p": SAMPLED | {"typical_p": 0.8},
        "epsilon_cutoff": SAMPLED | {"epsilon_cutoff": 0.01},
        "eta_cutoff": SAMPLED | {"eta_cutoff": 0.01},
        "temperature with top_k and top_p": {
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 50,
            "top_p": 0.9,
        },
        "num_return_sequences": {"do_sample": True, "num_return_sequences": 2},
        "renormalize_logits": SAMPLED | {"top_p": 0.9, "renormalize_logits": True},
        "remove_invalid_values": {"do_sample": True, "remove_invalid_values": True},
    }


def other_cases(base: Base) -> dict[str, dict[str, Any]]:
    """The options of everything else, by name."""
    tokenizer = base.tokenizer
    first = tokenizer(" the", add_special_tokens=False)["input_ids"][0]
    few = [first, first + 1, first + 2]
    return {
        "num_beams": {"num_beams": 3},
        "num_beams, sampled": {"num_beams": 2, "do_sample": True},
        "length_penalty": {"num_beams": 2, "length_penalty": -1.0},
        "early_stopping": {"num_beams": 2, "early_stopping": True},
        "repetition_penalty": {"repetition_penalty": 1.7},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[token] for token in few]},
        "suppress_tokens": {"suppress_tokens": few},
        "begin_suppress_tokens": {"begin_suppress_tokens": few},
        "sequence_bias": {"sequence_bias": [[[first], 8.0]]},
        "forced_eos_token_id": {"forced_eos_token_id": first},
        "exponential_decay_length_penalty": {
            "exponential_decay_length_penalty": (2, 1.5),
            "eos_token_id": first,
        },
        "min_length": {"min_length": 8, "eos_token_id": few},
        "min_new_tokens": {"min_new_tokens": 3, "eos_token_id": few},
        "max_length": {"max_length": 12, "max_new_tokens": None},
        "max_time": {"max_time": 600.0},
        "eos_token_id": {"eos_token_id": list(range(200)), "pad_token_id": 0},
        "pad_token_id": {"eos_token_id": list(range(200)), "pad_token_id": 3},
        "bos_token_id": {"bos_token_id": 1},
        "stop_strings": {"stop_strings": ["e", "o"], "tokenizer": tokenizer},
        "guidance_scale": {"guidance_scale": 1.5},
        "use_cache": {"use_cache": False},
        "cache_implementation": {"cache_implementation": "static", "disable_compile": True},
        "cache_config": {"cache_implementation": "dynamic", "cache_config": {}},
        "prefill_chunk_size": {"prefill_chunk_size": 2},
        "watermarking_config": {
            "watermarking_config": {"seeding_scheme": "lefthash", "bias": 5.0},
            "do_sample": True,
        },
        "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 2, "rows": 1},
        "logits processor of the user's": {"logits_processor": LogitsProcessorList([Raise()])},
        "stopping criterion of the user's": {
            "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(9)])
        },
    }


def generated(model: Qwen2ForCausalLM, inputs: dict[str, Tensor], options: dict[str, Any], seed: int) -> Any:
    """The ids, or the error that was raised."""
    torch.manual_seed(seed)
    try:
        return model.generate(**inputs, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"[:80]


def compare(found: checks.Checks, name: str, expected: Any, given: Any) -> None:
    """Two generations are the same tokens; what the base refuses, the converted model must refuse too."""
    if isinstance(expected, Tensor) and isinstance(given, Tensor):
        same = torch.equal(expected, given)
        found.add(name, same, "identical" if same else "other tokens", "the base's tokens")
    else:
        found.add(name, expected == given, given if isinstance(given, str) else "accepted", expected)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; 0 if all pass."""
    parser = checks.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=4, help="tokens that each case generates")
    options = parser.parse_args(argv)
    # Nothing that is calibrated takes part in compatible mode.
    base, conversion = checks.load(options.base, options.seed, "none")
    found = checks.Checks(f"generate() in compatible mode against {options.base}")
    model = conversion.model
    found.add(
        "is a Qwen2ForCausalLM", isinstance(model, Qwen2ForCausalLM), type(model).__name__, "a subclass"
    )
    encoded = base.tokenizer(list(PROMPTS), return_tensors="pt", padding=True, padding_side="left")
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}

    logits, expected = model(**inputs).logits, base.model(**inputs).logits
    shared = torch.arange(expected.shape[-1]) != model.config.num_token_id
    difference = (logits[..., : len(shared)] - expected)[..., shared].abs().max().item()
    found.add("logits", difference == 0.0, f"largest difference {difference}", "0.0")

    compared = sampled_cases() | other_cases(base)
    for name, asked in compared.items():
        rows = asked.pop("rows", len(PROMPTS))
        asked = {"max_new_tokens": options.tokens} | asked
        given = {key: tensor[-rows:] for key, tensor in inputs.items()}
        wanted = generated(base.model, given, asked, options.seed)
        compare(
            found,
            name,
            wanted,
            generated(model, given, asked | {"inference_mode": "compatible"}, options.seed),
        )
    found.add(*coverage(compared))
    return found.finish()


def coverage(compared: dict[str, Any]) -> tuple[str, bool, str, str]:
    """Which fields of GenerationConfig no case names."""
    tested = {word.strip(",=") for name in compared for word in name.split("=")[0].split()}
    tested |= {key for asked in compared.values() for key in asked}
    known = tested.union(*(names.split() for names in NO_CASE.values()), {"max_new_tokens"})
    left = sorted(set(GenerationConfig().to_dict()) - known)
    return "every field of GenerationConfig is accounted for", not left, ", ".join(left) or "all", "all"


if __name__ == "__main__":
    raise SystemExit(main())
