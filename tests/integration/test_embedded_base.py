"""The promise itself, on real pretrained weights: a converted model is its base on day one."""

import pytest
import torch

from causal_qwen import CausalQwen2ForCausalLM, convert
from causal_qwen.conversion import bundled_text, load_base, measure_parity

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base():
    return load_base("smollm2")


@pytest.fixture(scope="module")
def conversion(base, calibrated_once):
    return convert(base)


def test_parity_on_heldout_text(base, conversion):
    parity = measure_parity(conversion.model, base, bundled_text("heldout"))
    assert parity.positions >= 1000
    assert parity.max_abs_logit_diff == 0.0
    assert parity.argmax_agreement >= 0.9999
    assert 0.5 <= parity.ovr_prob_sum_median <= 2
    assert parity.ovr_loss < 12
    assert parity.added_parameters_fraction < 0.01


PROMPTS = (
    "The old lighthouse",
    "1 2 3 4",
    "def add(a, b):",
    "My favourite season is winter, because",
    "Water boils at 100 degrees, but",
    "Dear neighbours,",
    "The three most common mistakes in a first garden are",
    "Once upon a time there was a bridge that",
    "Q: What is the capital of France? A:",
    "In 1969,",
)
# Whatever ends a text early would leave the rest of it uncompared.
ENDLESS = {"eos_token_id": None, "pad_token_id": 2}


def encode(base, prompts):
    return base.tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")


def test_greedy_text_is_the_bases(base, conversion):
    inputs = encode(base, PROMPTS)
    said = conversion.model.generate(**inputs, **ENDLESS, max_new_tokens=100, do_sample=False)
    start = inputs["input_ids"].shape[1]
    assert said.shape == (len(PROMPTS), start + 100)
    # A text is greedy if each token is the choice after all before it: one pass instead of 100.
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(said), 99, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        choices = base.model(
            input_ids=said[:, :-1], attention_mask=mask, position_ids=positions, logits_to_keep=100
        ).logits.argmax(-1)
    assert torch.equal(choices, said[:, start:])


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": False, "stop_strings": ["the", "."]},
    ],
    ids=["seeded sampling", "beams", "repetition penalty", "stop strings"],
)
def test_compatible_mode_generates_what_the_base_does(base, conversion, options):
    """Five uneven prompts; qwen_compatibility_test tries every option of transformers, greedily too."""
    inputs = encode(base, PROMPTS[2:7])
    if "stop_strings" in options:
        options = options | {"tokenizer": base.tokenizer}
    texts = []
    for model, mode in ((base.model, {}), (conversion.model, {"inference_mode": "compatible"})):
        torch.manual_seed(0)
        texts.append(model.generate(**inputs, **ENDLESS, **options, **mode, max_new_tokens=10))
    assert torch.equal(*texts)


def test_published_constants_do_not_transfer(base):
    """The baseline of docs/theory/initialisation.md: no choice agrees, and probabilities sum to half the
    vocabulary.
    """
    published = measure_parity(
        convert(base, calibration="published").model, base, bundled_text("heldout")[:1500]
    )
    assert published.argmax_agreement < 0.02
    assert 20_000 < published.ovr_prob_sum_median < 24_000
    assert 27_000 < published.ovr_loss < 32_000


def test_bfloat16_keeps_the_heads_exact(base, conversion, tmp_path):
    conversion.save(tmp_path / "model")
    half = CausalQwen2ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert {p.dtype for p in [*half.abduction.parameters(), *half.action.parameters()]} == {torch.float32}
    half_base = type(base)(
        base.name,
        type(base.model)
        .from_pretrained(
            None, config=base.model.config, state_dict=base.model.state_dict(), dtype=torch.bfloat16
        )
        .eval(),
        base.tokenizer,
    )
    parity = measure_parity(half.eval(), half_base, bundled_text("heldout")[:1500])
    assert parity.max_abs_logit_diff == 0.0
    assert parity.argmax_agreement > 0.97
    ids = base.tokenizer("Numbers come in, causes are inferred.", return_tensors="pt").input_ids
    half.train()(ids, labels=ids).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in half.parameters() if p.grad is not None)
