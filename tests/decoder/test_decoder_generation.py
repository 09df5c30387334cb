"""Generation: the tokens of transformers, and every way in which a row can end."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from causal_qwen.decoder import CausalLM, DecoderConfig, JsonComplete, Repetition, from_hf, generate, pad_left
from causal_qwen.decoder.generation import prefill, step

FAMILIES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


pytestmark = pytest.mark.usefixtures("one_thread")


def reference(family):
    torch.manual_seed(0)
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
    return model


def counter(vocab_size=32, **changes):
    """A decoder that says t + 1 after t: blocks that add nothing, one-hot embedding, shifted head."""
    config = DecoderConfig.tiny(vocab_size=vocab_size, hidden_size=vocab_size, num_hidden_layers=1, **changes)
    model = CausalLM(config)
    with torch.no_grad():
        model.layers[0].self_attn.o_proj.weight.zero_()
        model.layers[0].mlp.down_proj.weight.zero_()
        model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        model.lm_head.weight.copy_(torch.eye(vocab_size).roll(1, dims=0))
    return model


def prompt(*tokens):
    return torch.tensor([tokens])


# Against transformers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_200_greedy_tokens_are_those_of_transformers(family):
    theirs = reference(family)
    ids = torch.randint(97, (1, 10), generator=torch.Generator().manual_seed(1))
    expected = theirs.generate(ids, max_new_tokens=200, do_sample=False, pad_token_id=0)
    ours = from_hf(theirs).generate(ids, 200)
    assert ours.sequences.tolist() == expected.tolist()
    assert len(set(ours.new_tokens(0))) > 10, "a constant text would prove nothing"
    assert ours.stop_reasons == ["length"]


def test_uneven_rows_are_those_of_transformers_and_of_each_row_alone():
    theirs = reference("qwen2")
    model = from_hf(theirs)
    rows = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8]]
    ids, mask = pad_left(rows, pad_token_id=0)
    expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False, pad_token_id=0)
    ours = generate(model, ids, 40, attention_mask=mask)
    assert ours.sequences.tolist() == expected.tolist()
    for row, alone in enumerate(rows):
        assert generate(model, prompt(*alone), 40).new_tokens(0) == ours.new_tokens(row)


def test_eos_and_padding_are_those_of_transformers():
    theirs = reference("llama")
    model = from_hf(theirs)
    rows = [[3, 1, 4], [2, 6, 6], [5, 3, 5]]
    ids, _ = pad_left(rows)
    free = generate(model, ids, 30)
    eos = free.new_tokens(0)[7]  # ends row 0 after 8 tokens at the latest
    expected = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=1,
    )
    ours = generate(model, ids, 30, eos_token_id=eos, pad_token_id=1)
    assert ours.sequences.tolist() == expected.tolist()
    assert ours.stop_reasons[0] == "eos"
    assert ours.lengths[0] <= 8


def test_sampled_tokens_are_those_of_transformers_for_the_same_seed():
    theirs = reference("qwen2")
    model = from_hf(theirs)
    ids = torch.randint(97, (3, 5), generator=torch.Generator().manual_seed(1))
    options = {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.2}
    torch.manual_seed(7)
    mask = torch.ones_like(ids)
    expected = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=50, do_sample=True, pad_token_id=0, **options
    )
    torch.manual_seed(7)
    assert model.generate(ids, 50, **options).sequences.tolist() == expected.tolist()
    seeded = [
        generate(model, ids, 50, generator=torch.Generator().manual_seed(7), **options).sequences.tolist()
        for _ in "ab"
    ]
    assert seeded[0] == seeded[1] == expected.tolist()


# Stop reasons -----------------------------------------------------------------------------------------------


def test_length():
    out = generate(counter(), prompt(3), 4, eos_token_id=20)
    assert out.sequences.tolist() == [[3, 4, 5, 6, 7]]
    assert (out.stop_reasons, out.lengths, out.prompt_length) == (["length"], [4], 1)


def test_eos_is_kept_counted_and_padded_after():
    ids, mask = pad_left([[3], [10, 11, 12], [18]], pad_token_id=0)
    out = generate(counter(), ids, 6, attention_mask=mask, eos_token_id=[15, 20], pad_token_id=31)
    assert out.stop_reasons == ["length", "eos", "eos"]
    assert out.lengths == [6, 3, 2]
    assert [out.new_tokens(row) for row in range(3)] == [[4, 5, 6, 7, 8, 9], [13, 14, 15], [19, 20]]
    assert out.sequences[1, 3:].tolist() == [13, 14, 15, 31, 31, 31]


def test_eos_as_first_token():
    out = generate(counter(), prompt(14), 9, eos_token_id=15)
    assert out.sequences.tolist() == [[14, 15]]
    assert (out.stop_reasons, out.lengths) == (["eos"], [1])


def test_eos_on_the_last_allowed_token_is_eos():
    assert generate(counter(), prompt(13), 2, eos_token_id=15).stop_reasons == ["eos"]


def test_generation_ends_with_the_last_row_and_padding_defaults_to_eos():
    ids = torch.tensor([[3], [13]])
    out = generate(counter(), ids, 50, eos_token_id=15)
    assert out.sequences.shape == (2, 1 + 12)
    assert out.sequences[1, 1:].tolist() == [14, 15] + [15] * 10


def test_stop_string_across_tokens_in_the_new_text_only():
    letters = "abcdefghijklmnopqrstuvwxyz......"

    def decode(tokens):
        return "".join(letters[token] for token in tokens)

    ids = torch.tensor([[8, 9, 10], [5, 6, 7]])  # the prompts say ijk and fgh
    out = generate(counter(), ids, 9, stop=["ijk", "zzz"], decode=decode, pad_token_id=0)
    assert out.stop_reasons == ["length", "stop_string"]
    assert [decode(out.new_tokens(row)) for row in (0, 1)] == ["lmnopqrst", "ijk"]


def test_json_complete():
    pieces = ["", '{"a"', ": [1, ", '"}]"', ", 2]", "}\n", "more", *[""] * 25]

    def decode(tokens):
        return "".join(pieces[token] for token in tokens)

    out = generate(counter(), prompt(0), 9, stop=JsonComplete(), decode=decode)
    assert (out.stop_reasons, out.lengths) == (["json_complete"], [5])
    assert decode(out.new_tokens(0)) == '{"a": [1, "}]", 2]}\n'
    begun = generate(counter(), prompt(1), 9, stop=JsonComplete(prefix='{"a"'), decode=decode)
    assert (begun.stop_reasons, begun.lengths) == (["json_complete"], [4])


def test_repetition():
    # The counter over 8 tokens goes round: 3 4 5 6 7 0 1 2 | 3 4 ... and repeats with period 8.
    out = generate(
        counter(8), torch.tensor([[2], [5]]), 60, stop=Repetition(times=3, max_period=16), pad_token_id=0
    )
    assert (out.stop_reasons, out.lengths) == (["repetition"] * 2, [24, 24])
    free = generate(counter(8), prompt(2), 60, stop=Repetition(times=3, max_period=7))
    assert free.stop_reasons == ["length"], "a period beyond max_period is not looked for"


def test_eos_comes_before_every_other_reason():
    out = generate(
        counter(), prompt(3), 9, eos_token_id=5, stop="e", decode=lambda tokens: "e" * (tokens[-1] == 5)
    )
    assert out.stop_reasons == ["eos"]


# Limits -----------------------------------------------------------------------------------------------------


def test_a_prompt_as_long_as_the_context_can_be_continued_by_one_token():
    model = counter(max_position_embeddings=8)
    full = torch.arange(8)[None]
    out = generate(model, full, 1)
    assert (out.sequences[0, -1], out.stop_reasons) == (8, ["length"])
    assert generate(model, full[:, :3], 6).sequences[0].tolist() == list(range(9))
    with pytest.raises(
        ValueError, match="8 tokens and 2 new do not fit the context of 8: lower max_new_tokens to 1"
    ):
        generate(model, full, 2)
    with pytest.raises(ValueError, match="9 tokens do not fit the context of 8 positions"):
        generate(model, torch.arange(9)[None], 1)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), {}, "the prompt is empty"),
        (torch.zeros(0, 2, dtype=torch.long), {}, "the prompt is empty"),
        (torch.zeros(3, dtype=torch.long), {}, r"it must be \(batch, tokens\)"),
        (torch.tensor([[1, 32]]), {}, "token id 32 is outside the vocabulary of 32"),
        (torch.tensor([[-1, 3]]), {}, "token id -1 is outside"),
        (torch.tensor([[1, 2]]), {"attention_mask": torch.ones(1, 3)}, r"it must cover .*: \(1, 2\)"),
        (
            torch.tensor([[1, 2], [3, 0]]),
            {"attention_mask": torch.tensor([[1, 1], [1, 0]])},
            r"rows \[1\] end in padding",
        ),
        (
            torch.tensor([[1, 2], [0, 0]]),
            {"attention_mask": torch.tensor([[1, 1], [0, 0]])},
            r"rows \[1\] .* empty",
        ),
        (torch.tensor([[1]]), {"max_new_tokens": 0}, "max_new_tokens is 0"),
        (torch.tensor([[1]]), {"temperature": -1.0}, "temperature is -1"),
        (torch.tensor([[1]]), {"stop": "x"}, r"give decode=tokenizer\.decode"),
        (torch.tensor([[1], [2]]), {"stop": Repetition()}, "give pad_token_id"),
        (torch.tensor([[1]]), {"pad_token_id": 32}, "pad_token_id is 32"),
    ],
)
def test_what_cannot_be_continued_is_said(ids, options, message):
    with pytest.raises(ValueError, match=message):
        counter().generate(ids, **({"max_new_tokens": 3} | options))


def test_uneven_prompts_are_padded_on_the_left():
    ids, mask = pad_left([[1, 2, 3], [4]], pad_token_id=9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    with pytest.raises(ValueError, match=r"empty in rows \[1\] of 2"):
        pad_left([[1], []])
    with pytest.raises(ValueError, match="empty in rows"):
        pad_left([])


def test_after_the_prompt_each_step_feeds_one_token():
    model = counter()
    widths = []
    hook = model.embed_tokens.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
    generate(model, prompt(1, 2, 3), 5)
    hook.remove()
    assert widths == [3, 1, 1, 1, 1]


@torch.no_grad()
def test_prefill_and_steps_are_the_uncached_logits():
    model = from_hf(reference("llama"))
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(3))
    expected = model(ids).logits
    cache = model.new_cache(2, 12)
    logits = [prefill(model, ids[:, :4], torch.ones(2, 4), cache)]
    logits += [step(model, ids[:, position], cache) for position in range(4, 12)]
    torch.testing.assert_close(torch.stack(logits, dim=1), expected[:, 3:], rtol=1e-5, atol=1e-5)


def test_padding_does_not_change_the_repetition_penalty():
    model = from_hf(reference("qwen2"))
    rows = [[3, 1, 4, 1, 5, 9], [2, 6]]
    ids, mask = pad_left(rows, pad_token_id=11)
    together = generate(model, ids, 20, attention_mask=mask, repetition_penalty=1.5)
    for row, alone in enumerate(rows):
        assert generate(model, prompt(*alone), 20, repetition_penalty=1.5).new_tokens(
            0
        ) == together.new_tokens(row)
