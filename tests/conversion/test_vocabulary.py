"""A home for <NUM>: a spare row or a new one, that starts as a digit and is never chosen."""

import pytest
import torch

from causal_qwen import convert
from causal_qwen.cauchy import Cauchy
from causal_qwen.conversion import ConversionError
from causal_qwen.conversion.vocabulary import choose_num_token, with_num_row
from conftest import tiny_source, tiny_tokenizer


def test_num_takes_the_first_spare_row(base, conversion, ids):
    model = conversion.model
    assert model.config.num_token_id == 258
    assert model.config.vocab_size == 300
    assert conversion.report["rows_added"] == 0
    W = model.lm_head.weight
    digits = base.tokenizer.convert_tokens_to_ids(list("0123456789"))
    torch.testing.assert_close(W[258], W[digits].mean(0))
    others = torch.arange(300) != 258
    assert torch.equal(W[others], base.model.lm_head.weight[others])
    assert torch.equal(model(ids).logits[..., others], base.model(ids).logits[..., others])


def test_num_is_added_where_no_row_is_spare(ids):
    base = tiny_source(rows=258)
    conversion = convert(base, calibration="none")
    model = conversion.model
    assert model.config.num_token_id == 258
    for rows in (
        model.lm_head.weight,
        model.model.embed_tokens.weight,
        model.action.bias,
        model.action.balance,
        model.action.threshold,
    ):
        assert len(rows) == 259
    assert base.model.config.vocab_size == 258, "the base is left alone"
    assert torch.equal(model(ids).logits[..., :258], base.model(ids).logits)


def test_gguf_placeholders_count_as_spare_rows():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"[PAD{index}]" for index in range(258, 300)])
    chosen = choose_num_token(tokenizer, 300)
    assert chosen.id == 258
    assert chosen.tokenizer.convert_ids_to_tokens(258) == "<NUM>"
    assert chosen.tokenizer.convert_ids_to_tokens(259) == "[PAD259]"


def test_num_is_never_chosen_before_training(conversion):
    """Its score is a mean of digit scores plus a negative bias, so some digit always beats it, in any
    cause.
    """
    W, bias = conversion.model.lm_head.weight, conversion.model.action.bias
    causes = Cauchy(torch.zeros(2000, 32), torch.ones(2000, 32)).rsample(
        generator=torch.Generator().manual_seed(0)
    )
    assert not (causes @ W.T + bias).argmax(-1).eq(258).any()


def test_vocabularies_that_do_not_fit_are_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<NUM>"])
    with pytest.raises(ConversionError, match="<NUM> of its own"):
        choose_num_token(tokenizer, 300)
    with pytest.raises(ConversionError, match="258 tokens, but the embedding only 200 rows"):
        choose_num_token(tiny_tokenizer(), 200)


def test_mean_of_digits_survives_bfloat16():
    chosen = choose_num_token(tiny_tokenizer(), 300)
    weight = torch.randn(300, 8, dtype=torch.bfloat16)
    row = with_num_row(weight, chosen)[258]
    assert torch.equal(row, weight[chosen.digits].double().mean(0).bfloat16())
