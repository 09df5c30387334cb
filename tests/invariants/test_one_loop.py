"""Every consumer of the loop says the same: tokens and values, in every mode, on both steppers.

The oracle knows no loop, cache, batch or padding: it runs the model anew for each token of each row and
decides by the equations of docs/theory/inference.md.
"""

import pytest
import torch

from causal_qwen import CausalQwen2Processor, Engine, Individual, Inferencer, counterfactual
from causal_qwen.cauchy import Cauchy
from causal_qwen.conversion.vocabulary import choose_num_token
from causal_qwen.heads import NUM_BIAS
from causal_qwen_mvp import CausalInferenceEngine, CausalQwenMVPForCausalLM
from conftest import tiny_causal, tiny_tokenizer

NEW = 10
TEXTS = ["The sea 12.5 or", "a", "Once upon a time there"]
SEEDS = [3, 4, 5]
NUM = 258

MODES = {
    "standard": {"inference_mode": "standard", "do_sample": False},
    "standard, sampled": {"inference_mode": "standard", "do_sample": True},
    "causal": {"inference_mode": "causal", "do_sample": True},
    "compatible": {"inference_mode": "compatible", "do_sample": False},
    "compatible, sampled": {"inference_mode": "compatible", "do_sample": True},
}


def speaker(*, writes_numbers):
    """<NUM> is the last row, as conversion adds it to a vocabulary without spare ones."""
    model = tiny_causal(vocab_size=NUM + 1, value_center=2.0, value_spread=0.7, noise_gain=0.1)
    with torch.no_grad():
        model.action.bias[NUM] = 4.0 if writes_numbers else NUM_BIAS
        if not writes_numbers:  # as after conversion: <NUM> never wins
            model.lm_head.weight[NUM] = model.lm_head.weight[48:58].mean(0)
            model.action.threshold[NUM] = model.action.threshold.median()
        model.action.number_noise.fill_(0.3)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module", params=[True, False], ids=["numbers", "words"])
def subject(request):
    model = speaker(writes_numbers=request.param)
    processor = CausalQwen2Processor(choose_num_token(tiny_tokenizer(), NUM).tokenizer, numbers="value")
    batch = processor(TEXTS, padding=True, padding_side="left", return_tensors="pt")
    rows = [processor(text, return_tensors="pt") for text in TEXTS]
    return (
        model,
        CausalQwenMVPForCausalLM.from_modern(model),
        Engine.from_model(model),
        processor,
        batch,
        rows,
    )


# The equations ----------------------------------------------------------------------------------------------


@torch.no_grad()
def decided_by_the_equations(model, row, individual, inference_mode, do_sample):
    """One row: [(token, value)], from a whole forward pass for every token."""
    ids, values, said = row["input_ids"], row["numeric_values"], []
    action, config = model.action, model.config
    for position in range(NEW):
        outputs = model(input_ids=ids, numeric_values=values, output_scores=True)
        U, U0 = outputs.U[0, -1], outputs.U0[0, -1]
        noise = individual.noise(position, config.causal_size, density_floor=0.01, persistence=0.2)
        epsilon, epsilon_Y = noise[:-1], noise[-1]
        loc_Y = outputs.Y.loc[0, -1]
        if inference_mode == "compatible":
            logits = outputs.logits[0, -1]
            token = int((logits if model.writes_numbers else logits[:-1]).argmax())
        elif inference_mode == "standard":
            S = outputs.S[0, -1]
            if do_sample:
                moved = U.loc + config.noise_gain * action.b_noise.abs() * epsilon
                S = action.scores(Cauchy(moved, U.scale), U0, model.lm_head.weight)
                loc_Y = action.numbers(Cauchy(U.loc + action.b_noise.abs() * epsilon, U.scale)).loc
            token = int(((S.loc - action.threshold) / S.scale).argmax())
        else:
            reach = U.scale + action.b_noise.abs()
            u = U.loc + config.noise_gain * reach * epsilon
            token = int((model.lm_head.weight @ u + action.bias).argmax())
            u1 = U.loc + reach * epsilon
            loc_Y = action.number.weight[0] @ u1 + action.number.bias[0]
            loc_Y = loc_Y + action.number_noise.abs() * epsilon_Y
        value = model.value_space.decode(loc_Y).item() if token == NUM else 0.0
        said.append((token, value))
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        values = torch.cat([values, torch.tensor([[value]], dtype=values.dtype)], dim=1)
    return said


# The consumers: each gives, for every row, [(token, value)] ------------------------------------------------


def who(options):
    return {"individual": SEEDS} if options["do_sample"] and options["inference_mode"] != "compatible" else {}


def mode_of(options):
    return {"mode": options["inference_mode"], "do_sample": options["do_sample"]}


def from_output(output, start):
    said = output.after(start)
    values = torch.zeros(said.sequences.shape) if said.numeric_values is None else said.numeric_values
    pairs = zip(said.sequences.tolist(), values.tolist(), strict=True)
    return [list(zip(tokens, row, strict=True)) for tokens, row in pairs]


def by_generate(model, mvp, engine, processor, batch, rows, options):
    output = model.generate(
        **batch, **options, **who(options), max_new_tokens=NEW, top_k=0, return_dict_in_generate=True
    )
    return from_output(output, batch["input_ids"].shape[1])


def by_generate_natively(model, mvp, engine, processor, batch, rows, options):
    return by_generate(model, mvp, engine, processor, batch, rows, options | {"engine": engine})


def by_generate_without_a_cache(model, mvp, engine, processor, batch, rows, options):
    return by_generate(model, mvp, engine, processor, batch, rows, options | {"use_cache": False})


def by_inferencer(model, mvp, engine, processor, batch, rows, options, runner=None):
    inferencer = Inferencer(model, **mode_of(options), **who(options), engine=runner)
    steps = [
        [(int(t), v if t == NUM else 0.0) for t, v in zip(i.tokens, i.choice.values.tolist(), strict=True)]
        for i in inferencer.steps(max_new_tokens=NEW, **batch)
    ]
    return [list(row) for row in zip(*steps, strict=True)]


def by_inferencer_natively(model, mvp, engine, processor, batch, rows, options):
    return by_inferencer(model, mvp, engine, processor, batch, rows, options, runner=engine)


def by_the_known_engine(model, mvp, engine, processor, batch, rows, options):
    ids = CausalInferenceEngine(mvp).generate(
        **batch, max_new_tokens=NEW, top_k=0, top_p=1.0, **options, **who(options)
    )
    return [[(int(token), None) for token in row[batch["input_ids"].shape[1] :]] for row in ids]


def by_the_known_steps(model, mvp, engine, processor, batch, rows, options):
    """Row by row: the known method takes no padding."""
    said = []
    for index, row in enumerate(rows):
        if NUM in row["input_ids"]:
            row = processor(TEXTS[index], numbers="text", return_tensors="pt")
        person = {"individual": SEEDS[index]} if who(options) else {}
        mode = mode_of(options)
        ids = mvp.generate_step_by_step(row["input_ids"], max_new_tokens=NEW, **mode, **person)
        first = mvp.inference(row["input_ids"], **mode, **person).next_token_ids
        start = row["input_ids"].shape[1]
        assert first[0, 0] == ids[0, start]
        expected = decided_by_the_equations(model, row, Individual(SEEDS[index]), **options)
        assert [int(token) for token in ids[0, start:]] == [token for token, _ in expected]
        said.append(None)
    return said


def by_counterfactual(model, mvp, engine, processor, batch, rows, options):
    said = []
    for text, seed in zip(TEXTS, SEEDS, strict=True):
        result = counterfactual(model, processor, text, [text], seed, max_new_tokens=NEW, top_k=0)
        assert result.interventions[0].identical_to_factual
        values = {number.position: number.value for number in result.factual.numbers}
        tokens = result.factual.token_ids
        said.append([(token, values.get(index, 0.0)) for index, token in enumerate(tokens)])
    return said


CONSUMERS = [
    by_generate,
    by_generate_natively,
    by_generate_without_a_cache,
    by_inferencer,
    by_inferencer_natively,
    by_the_known_engine,
    by_the_known_steps,
    by_counterfactual,
]


def applies(consumer, mode):
    """A counterfactual has a concrete individual; the draws of a batch are not those of its rows alone."""
    if consumer is by_counterfactual:
        return mode == "causal"
    return not (consumer is by_the_known_steps and mode == "compatible, sampled")


@pytest.mark.parametrize(
    ("consumer", "mode"),
    [(consumer, mode) for consumer in CONSUMERS for mode in MODES if applies(consumer, mode)],
)
def test_every_consumer_says_what_the_equations_say(subject, consumer, mode):
    model, mvp, engine, processor, batch, rows = subject
    options = MODES[mode]
    torch.manual_seed(0)
    said = consumer(model, mvp, engine, processor, batch, rows, options)
    if mode == "compatible, sampled":  # drawn by torch: the loop of transformers itself is the oracle
        torch.manual_seed(0)
        expected = drawn_by_transformers(model, batch)
    else:
        people = map(Individual, SEEDS)
        expected = [
            decided_by_the_equations(model, row, person, **options)
            for row, person in zip(rows, people, strict=True)
        ]
    for row, wanted in zip(said, expected, strict=True):
        if row is None:
            continue
        assert [token for token, _ in row] == [token for token, _ in wanted]
        for (_, value), (_, exact) in zip(row, wanted, strict=True):
            assert value is None or exact is None or value == pytest.approx(exact, rel=1e-3, abs=1e-3)


@torch.no_grad()
def drawn_by_transformers(model, batch):
    """softmax(logits) sampled with torch's generator, by forward passes over the whole padded batch."""
    ids, mask, values = batch["input_ids"], batch["attention_mask"], batch["numeric_values"]
    said = []
    for _ in range(NEW):
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        outputs = model(input_ids=ids, attention_mask=mask, position_ids=position_ids, numeric_values=values)
        logits = outputs.logits[:, -1] if model.writes_numbers else outputs.logits[:, -1, :-1]
        tokens = torch.multinomial(logits.float().softmax(-1), 1)
        number = model.value_space.decode(outputs.Y.loc[:, -1:])
        value = torch.where(tokens == NUM, number, 0.0)
        said.append(list(zip(tokens[:, 0].tolist(), value[:, 0].tolist(), strict=True)))
        ids, values = torch.cat([ids, tokens], 1), torch.cat([values, value.to(values)], 1)
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
    return [list(row) for row in zip(*said, strict=True)]


@pytest.mark.parametrize("mode", ["standard", "causal", "compatible"])
def test_words_and_numbers_are_both_said(mode):
    """Otherwise the table above would compare less than it claims."""
    model = speaker(writes_numbers=True)
    processor = CausalQwen2Processor(choose_num_token(tiny_tokenizer(), NUM).tokenizer, numbers="value")
    said = [
        token
        for text, seed in zip(TEXTS, SEEDS, strict=True)
        for token, _ in decided_by_the_equations(
            model, processor(text, return_tensors="pt"), Individual(seed), mode, do_sample=mode == "causal"
        )
    ]
    assert said.count(NUM) >= 3
    assert len(set(said)) >= 10
