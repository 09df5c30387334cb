"""The same individual, the same text: vLLM's tokens are generate()'s, in every mode, alone and in a batch."""

import pytest
import torch

from causal_qwen import Individual
from causal_qwen.conversion import bundled_text, load_model

PROMPTS, NEW_TOKENS = 20, 24
MODES = {
    "standard": {"inference_mode": "standard"},
    "causal": {"inference_mode": "causal"},
    "compatible": {"inference_mode": "compatible"},
}


def prompts_of(processor) -> list[list[int]]:
    """Twenty pieces of real text, of 6 to 101 tokens."""
    ids = processor(bundled_text("heldout"), numbers="text")["input_ids"]
    starts = range(0, 150 * PROMPTS, 150)
    return [ids[start : start + 6 + 5 * index] for index, start in enumerate(starts)]


def settings_of(mode: str, index: int) -> tuple[dict, dict]:
    """The same settings for generate() and for vLLM."""
    generate: dict = {"inference_mode": mode, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    params: dict = {"max_tokens": NEW_TOKENS, "extra_args": {"inference_mode": mode}}
    if mode == "compatible":
        params["temperature"] = 0.0
    if mode == "causal":
        person = Individual(1000 + index, persistence=0.1 * (index % 5))
        top_k = (0, 50)[index % 2]
        generate |= {"individual": person, "temperature": 0.8, "top_k": top_k, "do_sample": True}
        params |= {"temperature": 0.8, "top_k": top_k}
        params["extra_args"]["individual"] = person.to_json()
    return generate, params


@pytest.fixture(scope="module")
def expected(base_directory):
    """Prompts, and the tokens of generate() by mode."""
    model, processor = load_model(base_directory, device=None, dtype="float32")
    prompts = prompts_of(processor)
    tokens = {}
    for mode in MODES:
        for indices in (range(0, PROMPTS, 2), range(1, PROMPTS, 2)):  # those that have the same top_k
            settings = [settings_of(mode, index)[0] for index in indices]
            together = dict(settings[0])
            if "individual" in together:
                together["individual"] = [one["individual"] for one in settings]
            texts = generated(
                model, [prompts[index] for index in indices], processor.eos_token_id, **together
            )
            tokens |= {(mode, index): text for index, text in zip(indices, texts, strict=True)}
    return prompts, tokens


def generated(model, prompts, end: int, **settings) -> list[list[int]]:
    """What generate() says to prompts, up to the end of each text."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    rows = model.generate(ids, attention_mask=mask, **settings)[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@pytest.fixture(scope="module", params=["whole", "chunked"])
def answered(request, expected, base_directory, ask, whole_prompts):
    """Tokens of one engine, by (mode, index): each request alone, and all together, 16 at a time."""
    prompts, _ = expected
    keys = [(mode, index) for index in range(PROMPTS) for mode in MODES]
    requests = [{"prompt": prompts[index], "params": settings_of(mode, index)[1]} for mode, index in keys]
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 32}
    engine = whole_prompts | (chunked if request.param == "chunked" else {})
    *alone, together = ask(base_directory, {"calls": [*([one] for one in requests), requests]}, **engine)
    return (
        {key: one[0]["tokens"] for key, one in zip(keys, alone, strict=True)},
        {key: one["tokens"] for key, one in zip(keys, together, strict=True)},
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("company", ["alone", "together"])
def test_vllm_says_what_generate_says(expected, answered, mode, company):
    tokens = answered[company == "together"]
    different = [index for index in range(PROMPTS) if tokens[mode, index] != expected[1][mode, index]]
    assert different == []


def test_individuals_differ(expected):
    _, tokens = expected
    same = [index for index in range(PROMPTS) if tokens["causal", index] == tokens["standard", index]]
    assert len(same) < PROMPTS // 2
