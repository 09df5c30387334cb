"""Our decoder against transformers: tiny configs, copied weights, the same logits."""

import ast
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from causal_qwen import decoder
from causal_qwen.decoder import (
    CausalLM,
    DecoderConfig,
    Engine,
    RopeScaling,
    from_hf,
    kv_cache_bytes,
    pad_left,
)
from causal_qwen.decoder.block import rope_frequencies
from decoder_references import FAMILIES, reference

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def tokens(*shape, seed=1):
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["MQA", "GQA", "MHA"])
def test_logits_equal_those_of_transformers(family, tied, kv_heads):
    theirs = reference(family, tie_word_embeddings=tied, num_key_value_heads=kv_heads)
    ours = from_hf(theirs)
    ids = tokens(3, 40)
    expected = theirs(ids).logits
    assert expected.std() > 0.5, "the comparison would say nothing about a flat model"
    torch.testing.assert_close(ours(ids).logits, expected, **CLOSE)

    cache = ours.new_cache(3, 40)  # cached: a prompt, a piece of several tokens, then one by one
    pieces = [ours(part, None, cache).logits for part in ids.split([20, 10, *[1] * 10], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, **CLOSE)
    assert cache.length == 40


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_qwen3_writes_the_tokens_of_transformers(tied):
    """The readable model and the engine, natively and in torch: left-padded rows, 48 tokens."""
    theirs = reference("qwen3", tie_word_embeddings=tied)
    ids, mask = pad_left([tokens(1, length, seed=length)[0].tolist() for length in (3, 11, 7)], 5)
    options = {"do_sample": False, "max_new_tokens": 48, "eos_token_id": None, "pad_token_id": 5}
    expected = theirs.generate(ids, attention_mask=mask, **options)
    assert len(expected[:, 11:].unique()) > 10, "one token over and over would say nothing"
    engines = [Engine.from_model(theirs, native=native) for native in (True, False)]
    assert [engine.step is None for engine in engines] == [False, True]
    logits = theirs(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    for ours in (from_hf(theirs), *engines):
        assert torch.equal(ours.generate(ids, 48, attention_mask=mask).sequences, expected)
        ours_logits = ours.head(ours.hidden(ids, mask))
        torch.testing.assert_close(ours_logits[mask.bool()], logits[mask.bool()], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("part", ["q_norm", "k_norm"])
def test_norms_of_queries_and_keys_matter(part):
    """Each of them, in every pass: the comparisons above would not notice a norm that all leave out."""
    theirs = reference("qwen3")
    ids = tokens(2, 9)
    before = [model.hidden(ids) for model in (from_hf(theirs), Engine.from_model(theirs))]
    for layer in theirs.model.layers:
        getattr(layer.self_attn, part).weight.mul_(torch.linspace(0.2, 3, 16))
    for model, old in zip((from_hf(theirs), Engine.from_model(theirs)), before, strict=True):
        assert (model.hidden(ids) - old).abs().max() > 0.05


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_rows_have_the_logits_of_the_rows_alone(family):
    theirs = reference(family)
    ours = from_hf(theirs)
    rows = [tokens(1, length, seed=length)[0].tolist() for length in (3, 11, 7)]
    ids, mask = pad_left(rows, pad_token_id=5)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = theirs(ids, attention_mask=mask, position_ids=positions).logits
    logits = ours(ids, mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **CLOSE)
    for row, alone in enumerate(rows):
        own = ours(torch.tensor([alone])).logits[0]
        torch.testing.assert_close(logits[row, -len(alone) :], own, **CLOSE)

    out = ours(ids, mask, use_cache=True)  # the cache remembers the padding
    following = tokens(3, 1)
    stepped = ours(following, None, out.past_key_values).logits
    full_mask = torch.cat((mask, torch.ones(3, 1, dtype=mask.dtype)), dim=1)
    torch.testing.assert_close(
        stepped, ours(torch.cat((ids, following), 1), full_mask).logits[:, -1:], **CLOSE
    )
    again = ours(ids, mask, use_cache=True).past_key_values
    torch.testing.assert_close(stepped, ours(following, full_mask, again).logits, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0},
        {
            "rope_theta": 5e5,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "llama3"],
)
def test_stretched_rotary_positions_equal_those_of_transformers(rope):
    theirs = reference("llama", rope_parameters=rope, head_dim=32)
    ours = from_hf(theirs)
    torch.testing.assert_close(ours.frequencies, theirs.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    plain = rope_frequencies(DecoderConfig.tiny(rope_theta=5e5))
    assert not torch.allclose(ours.frequencies, plain), (
        "the stretch must matter for this test to mean anything"
    )
    ids = tokens(2, 60)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"head_dim": 6}),
    ],
)
def test_biases_and_head_widths_are_those_of_the_config(family, changes):
    theirs = reference(family, **changes)
    ids = tokens(2, 9)
    torch.testing.assert_close(from_hf(theirs)(ids).logits, theirs(ids).logits, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_bfloat16_agrees_with_transformers_in_bfloat16(family):
    theirs = reference(family).to(torch.bfloat16)
    ours = from_hf(theirs)
    ids = tokens(2, 30)
    out = ours(ids, use_cache=True)
    assert out.logits.dtype == torch.bfloat16
    assert out.past_key_values.layers[0].keys.dtype == torch.bfloat16
    exact = from_hf(theirs, dtype=torch.float32)
    torch.testing.assert_close(exact.to(torch.bfloat16)(ids).logits, out.logits, rtol=0, atol=0)
    assert exact.frequencies.dtype == torch.float32, "angles in half precision are wrong by whole turns"
    exact = from_hf(theirs, dtype=torch.float32)(ids).logits
    ours_error = (out.logits.float() - exact).abs().mean()
    theirs_error = (theirs(ids).logits.float() - exact).abs().mean()
    assert ours_error < 1.2 * theirs_error


@torch.no_grad()
def test_last_only_is_the_last_position_and_the_head_is_separable():
    model = from_hf(reference("qwen2"))
    ids = tokens(2, 8)
    full, last = model(ids), model(ids, last_only=True)
    assert last.logits.shape == (2, 1, 97)
    assert last.hidden_states.shape == (2, 1, 32)
    torch.testing.assert_close(last.logits, full.logits[:, -1:], **CLOSE)
    torch.testing.assert_close(model.head(model.hidden(ids)), full.logits, rtol=0, atol=0)
    assert full.past_key_values is None


@torch.no_grad()
def test_layernorm_block_is_its_equation():
    torch.manual_seed(0)
    config = DecoderConfig.tiny(
        vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, norm="layernorm"
    )
    model = CausalLM(config)
    ids = torch.tensor([[7]])  # one position attends to itself only, so attention is o(v(x))
    block = model.layers[0]
    x = model.embed_tokens.weight[ids]
    x = x + block.self_attn.o_proj(block.self_attn.v_proj(F.layer_norm(x, (16,), eps=config.norm_eps)))
    inner = F.layer_norm(x, (16,), eps=config.norm_eps)
    x = x + block.mlp.down_proj(F.silu(block.mlp.gate_proj(inner)) * block.mlp.up_proj(inner))
    expected = F.layer_norm(x, (16,), eps=config.norm_eps) @ model.lm_head.weight.T
    torch.testing.assert_close(model(ids).logits, expected, **CLOSE)


def test_a_fresh_model_predicts_uniformly_and_learns():
    # With weights of N(0, 0.02²) all logits are near 0, so the loss starts at ln V.
    torch.manual_seed(0)
    model = CausalLM(DecoderConfig.tiny(vocab_size=64, num_hidden_layers=2, qkv_bias=True))
    ids = torch.randint(64, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(64), abs=0.1)
    assert losses[-1] < losses[0] / 2


def test_initialisation_has_the_documented_spread():
    torch.manual_seed(0)
    model = CausalLM(DecoderConfig.tiny(vocab_size=512, qkv_bias=True))
    block = model.layers[0]
    assert block.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert block.self_attn.q_proj.bias.eq(0).all()
    assert block.input_layernorm.weight.eq(1).all()


def test_cache_bytes_are_the_formula_and_the_memory():
    # 2 · 32 layers · 32 kv heads · 4096 tokens · 128 wide · 2 bytes = 2³¹; a quarter of it with 8 kv heads.
    assert kv_cache_bytes(DecoderConfig.llama_7b(), 1, 4096, torch.float16) == 2 * 2**30
    assert (
        kv_cache_bytes(DecoderConfig.llama_7b(num_key_value_heads=8), 1, 4096, torch.float16) == 512 * 2**20
    )
    config = DecoderConfig.tiny(num_key_value_heads=2, vocab_size=8)
    for dtype in (torch.float32, torch.bfloat16):
        cache = CausalLM(config).to(dtype).new_cache(3, 17)
        assert cache.nbytes == kv_cache_bytes(config, 3, 17, dtype)
    with pytest.raises(ValueError, match="seq_len is 0"):
        kv_cache_bytes(config, 1, 0)


@torch.no_grad()
def test_reset_empties_the_cache():
    model = from_hf(reference("qwen2"))
    cache = model.new_cache(1, 10)
    first = model(tokens(1, 6), None, cache).logits
    cache.reset()
    assert not any(layer.keys.any() or layer.values.any() for layer in cache.layers)
    assert not cache.valid.any()
    torch.testing.assert_close(model(tokens(1, 6), None, cache).logits, first, rtol=0, atol=0)


def test_what_does_not_fit_is_said():
    model = CausalLM(DecoderConfig.tiny(vocab_size=16, max_position_embeddings=8, num_hidden_layers=1))
    with torch.no_grad():
        assert model(torch.zeros(1, 8, dtype=torch.long)).logits.shape == (1, 8, 16), (
            "a full context is allowed"
        )
        cases = [
            (torch.zeros(1, 0, dtype=torch.long), None, None, "prompt is empty"),
            (torch.zeros(0, 3, dtype=torch.long), None, None, "prompt is empty"),
            (torch.zeros(3, dtype=torch.long), None, None, r"shape \(3,\); it must be \(batch, tokens\)"),
            (torch.zeros(1, 9, dtype=torch.long), None, None, "9 tokens do not fit the context of 8"),
            (
                torch.zeros(1, 3, dtype=torch.long),
                None,
                model.new_cache(1, 2),
                "do not fit the cache of 2 slots",
            ),
            (torch.zeros(1, 3, dtype=torch.long), None, model.new_cache(2, 8), "1 rows, the cache 2"),
            (
                torch.zeros(1, 3, dtype=torch.long),
                torch.ones(1, 2),
                None,
                r"attention_mask has shape \(1, 2\)",
            ),
        ]
        for ids, mask, cache, message in cases:
            with pytest.raises(ValueError, match=message):
                model(ids, mask, cache)
        full = model(torch.zeros(1, 8, dtype=torch.long), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="9 tokens do not fit the context of 8"):
            model(torch.zeros(1, 1, dtype=torch.long), None, full)
    with pytest.raises(ValueError, match="capacity is 0"):
        model.new_cache(1, 0)


@torch.no_grad()
def test_one_graph_serves_every_length():
    """A static step (mask over the whole capacity, slot and position as tensors) traces once and agrees."""
    model = from_hf(reference("qwen2"))
    ids = tokens(2, 12)
    expected = model(ids).logits
    cache = model.new_cache(2, 16)
    cache.reset()
    model(ids[:, :4], None, cache)
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count, fullgraph=True, dynamic=False)
    def step(new, slot, keys):
        mask = (keys <= slot).expand(2, 1, 1, 16)
        hidden = model.blocks(
            model.embed_tokens(new), positions=slot.expand(2, 1), mask=mask, cache=cache, slots=slot
        )
        return model.head(hidden)

    for position in range(4, 12):
        logits = step(ids[:, position : position + 1].clone(), torch.tensor([position]), torch.arange(16))
        torch.testing.assert_close(logits, expected[:, position : position + 1], **CLOSE)
    assert len(graphs) == 1


def test_the_decoder_is_short_and_knows_no_transformers():
    directory = Path(decoder.__file__).parent
    assert len((directory / "model.py").read_text(encoding="utf-8").splitlines()) < 400
    for path in directory.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.split(".")[0]
                assert root != "transformers", f"{path.name} imports {name}"
                known = ("causal_qwen.decoder", "causal_qwen.kernels", "causal_qwen.context")
                assert root != "causal_qwen" or name.startswith(known), f"{path.name} imports {name}"
    for name in ("config", "cache", "block", "placement", "model"):  # the lesson stands alone
        assert "kernels" not in (directory / f"{name}.py").read_text(encoding="utf-8")


def test_public_names_are_complete():
    assert sorted(decoder.__all__) == decoder.__all__
    for name in decoder.__all__:
        assert getattr(decoder, name) is not None
    assert RopeScaling(kind="linear", factor=2.0).factor == 2.0
