"""The engine: its steps are the decoder's, its decisions generate()'s, in every precision and mode."""

import dataclasses
import json

import pytest
import torch

from causal_qwen import CausalQwen2ForCausalLM
from causal_qwen.decoder import CausalLM, DecoderConfig, Engine, StopReason, from_hf, pad_left
from causal_qwen.decoder.packed import quantise
from causal_qwen.heads import NUM_BIAS
from causal_qwen.kernels import library
from conftest import tiny_base, tiny_causal

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [40]]
MODES = {
    "standard": {"inference_mode": "standard", "do_sample": False},
    "standard at temperature 0": {"inference_mode": "standard", "do_sample": False, "temperature": 0.0},
    "standard sampled": {"inference_mode": "standard", "do_sample": True, "individual": [3, 4, 5]},
    "causal": {"inference_mode": "causal", "individual": [3, 4, 5], "top_k": 0},
    "causal, top k": {"inference_mode": "causal", "individual": [3, 4, 5], "top_k": 9},
    "causal, half of all": {"inference_mode": "causal", "individual": [3, 4, 5], "top_k": 130},
    "standard sampled, top k": {
        "inference_mode": "standard",
        "do_sample": True,
        "individual": [3, 4, 5],
        "top_k": 9,
    },
    "compatible": {"inference_mode": "compatible", "do_sample": False},
    "compatible sampled": {"inference_mode": "compatible", "do_sample": True, "top_k": 0},
    "compatible, ovr": {"inference_mode": "compatible", "do_sample": True, "normalisation": "ovr"},
    "repetition penalty": {"inference_mode": "standard", "do_sample": False, "repetition_penalty": 1.5},
}


def decoder(**changes):
    torch.manual_seed(0)
    fields = {"vocab_size": 200, "num_hidden_layers": 3, "initializer_range": 0.2} | changes
    return CausalLM(DecoderConfig.tiny(**fields)).eval()


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine without one, and a process that has not looked for it yet."""
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setenv("CXX", "no-such-compiler")


# Steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "num_key_value_heads": 2},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"norm": "layernorm", "num_key_value_heads": 1},
        {"qk_norm": True, "num_key_value_heads": 2, "head_dim": 48},
        {"qk_norm": True, "norm": "layernorm", "head_dim": 6, "qkv_bias": True},
    ],
)
def test_float32_is_the_decoder(changes):
    model = decoder(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    engine = Engine.from_model(model)
    ids, mask = pad_left(PROMPTS)
    with torch.no_grad():
        expected = model(ids, mask).logits
    shown = mask.bool()
    torch.testing.assert_close(
        engine.head(engine.hidden(ids, mask))[shown], expected[shown], rtol=0, atol=1e-4
    )
    options = {"attention_mask": mask, "eos_token_id": 7, "repetition_penalty": 1.2}
    ours, theirs = (made.generate(ids, 40, **options) for made in (engine, model))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.stop_reasons == theirs.stop_reasons


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_models_of_transformers_are_read_without_a_copy_of_the_vocabulary(architecture, tied):
    base = tiny_base(architecture, tie_word_embeddings=tied)
    engine = Engine.from_model(base)
    assert engine.weights.embedding.weight.data_ptr() == base.get_input_embeddings().weight.data_ptr()
    assert engine.weights.head.weight.data_ptr() == base.lm_head.weight.data_ptr()
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(engine.generate(ids, 30).sequences, from_hf(base).generate(ids, 30).sequences)


@pytest.mark.parametrize(("precision", "share"), [("bfloat16", 0.02), ("int8", 0.04), ("int4", 0.5)])
def test_fewer_bits_stay_near_and_take_their_bytes(precision, share):
    model = decoder(hidden_size=64, intermediate_size=128, num_attention_heads=4)
    full, engine = Engine.from_model(model), Engine.from_model(model, precision=precision)
    ids, mask = pad_left(PROMPTS)
    exact, near = (made.head(made.hidden(ids, mask))[mask.bool()] for made in (full, engine))
    assert (near - exact).abs().median() < share * exact.abs().median()
    bytes_per_weight = {"bfloat16": 2, "int8": 1, "int4": 0.5}[precision]
    groups = 0 if precision == "bfloat16" else 8 / 32
    vocabulary = 200 * 64 * 0.5 if precision == "int4" else 0  # stays in 8 bits
    assert engine.weights.step_bytes <= full.weights.step_bytes / 4 * (bytes_per_weight + groups) + vocabulary


def test_the_precision_is_the_models_own_unless_one_is_named():
    model = decoder()
    assert Engine.from_model(model).weights.head.weight.dtype == torch.float32
    assert Engine.from_model(model.half()).weights.head.weight.dtype == torch.float32
    assert Engine.from_model(model.bfloat16()).weights.head.weight.dtype == torch.bfloat16
    assert Engine.from_model(model, precision="float32").weights.head.weight.dtype == torch.float32
    causal = tiny_causal().to(torch.bfloat16)
    assert Engine.from_model(causal).weights.head.weight.dtype == torch.bfloat16


def test_a_model_elsewhere_is_refused():
    for model in (decoder(), tiny_causal()):
        with pytest.raises(ValueError, match="the model is on meta; the engine runs on the CPU"):
            Engine.from_model(model.to("meta"))


def test_steps_are_the_uncached_features():
    engine = Engine.from_model(decoder(num_key_value_heads=2))
    ids = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(1))
    cache = engine.new_cache(2, 9)
    parts = [engine.hidden(ids[:, :4], None, cache)]
    parts += [engine.hidden(ids[:, t : t + 1], None, cache) for t in range(4, 9)]
    torch.testing.assert_close(torch.cat(parts, 1), engine.hidden(ids), rtol=0, atol=1e-5)
    assert cache.length == 9


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_texts_that_are_extended_together_are_those_alone(precision, qk_norm):
    """However they are cut into pieces, and whoever else is there: bit for bit."""
    engine = Engine.from_model(decoder(qk_norm=qk_norm), precision=precision)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 90, (1, length), generator=generator) for length in (1, 5, 23, 60)]
    alone = [engine.hidden(text)[0] for text in texts]
    caches, parts = [engine.new_cache(1, 60) for _ in texts], [[] for _ in texts]
    while any(cache.length < text.shape[1] for cache, text in zip(caches, texts, strict=True)):
        draws = torch.randint(0, 8, (len(texts),), generator=generator).tolist()
        counts = [
            min(draw, text.shape[1] - cache.length)
            for draw, text, cache in zip(draws, texts, caches, strict=True)
        ]
        chosen = [index for index, count in enumerate(counts) if count]
        if not chosen:
            continue
        new = [texts[i][0, caches[i].length : caches[i].length + counts[i]] for i in chosen]
        features = engine.extend(
            engine.embed(torch.cat(new)[None])[0], [caches[i] for i in chosen], [counts[i] for i in chosen]
        )
        for index, part in zip(chosen, features.split([counts[i] for i in chosen]), strict=True):
            parts[index].append(part)
    for own, expected in zip(parts, alone, strict=True):
        assert torch.equal(torch.cat(own), expected)
    with pytest.raises(ValueError, match="with room"):
        engine.extend(engine.embed(texts[0])[0], caches[-1:], [1])


def test_a_cache_or_features_of_another_model_are_refused():
    """Native code would read past their end."""
    model = decoder(num_key_value_heads=2)
    engine = Engine.from_model(model)
    token = torch.tensor([[1]])
    others = {
        "layers": Engine.from_model(decoder(num_hidden_layers=2, num_key_value_heads=2)).new_cache(1, 4),
        "of shape": Engine.from_model(decoder(num_key_value_heads=1)).new_cache(1, 4),
        "bfloat16": decoder(num_key_value_heads=2).bfloat16().new_cache(1, 4),
    }
    for message, cache in others.items():
        with pytest.raises(ValueError, match=message):
            engine.hidden(token, None, cache)
        assert cache.length == 0
    with pytest.raises(ValueError, match="of shape"):
        engine.hidden(token, None, engine.new_cache(1, 4), embeddings=torch.zeros(1, 1, 7))


def test_limits_are_the_decoders():
    engine = Engine.from_model(decoder(max_position_embeddings=8))
    full = torch.ones(1, 8, dtype=torch.long)
    assert engine.generate(full, 1).stop_reasons == [StopReason.LENGTH]
    with pytest.raises(ValueError, match="the context of 8"):
        engine.generate(full, 2)
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.generate(full[:, :0], 2)
    with pytest.raises(ValueError, match="precision is 'int3'"):
        Engine.from_model(decoder(), precision="int3")


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_native_steps_are_those_in_torch(precision, threads, qk_norm):
    """Uneven rows, more of them than one pass over a row of W carries, and more threads than key heads."""
    model = decoder(
        num_key_value_heads=2, qkv_bias=True, hidden_size=64, intermediate_size=128, qk_norm=qk_norm
    )
    plain, engine = (Engine.from_model(model, precision=precision, native=native) for native in (False, True))
    ids, mask = pad_left(PROMPTS * 4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours, theirs = (made.generate(ids, 40, attention_mask=mask).sequences for made in (engine, plain))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("count", [48, 49])
def test_batches_of_any_size(count):
    model = decoder()
    ids = torch.randint(0, 200, (count, 3), generator=torch.Generator().manual_seed(1))
    assert torch.equal(Engine.from_model(model).generate(ids, 5).sequences, model.generate(ids, 5).sequences)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_where_no_compiler_works_the_results_are_the_same(no_compiler, caplog, precision):
    model = decoder()
    ids = torch.tensor([[1, 2, 3]])
    engine = Engine.from_model(model, precision=precision)
    assert engine.step is None
    assert engine.weights.head.scale is None, "eight bits without native code would crawl"
    again = Engine.from_model(model, precision=precision, native=False)
    assert torch.equal(engine.generate(ids, 10).sequences, again.generate(ids, 10).sequences)
    warnings = [record.message for record in caplog.records if "cannot be built" in record.message]
    assert len(warnings) == 1
    assert "no-such-compiler" in warnings[0]


def test_native_code_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("CAUSAL_QWEN_COMPILE", "0")
    assert Engine.from_model(decoder()).step is None


# Decisions --------------------------------------------------------------------------------------------------


def prompts(model):
    """Uneven rows, one with a number."""
    ids, mask = pad_left([*PROMPTS[:2], [30, model.config.num_token_id, 31]], pad_token_id=257)
    values = torch.where(ids == model.config.num_token_id, 42.5, 0.0)
    return {"input_ids": ids, "attention_mask": mask, "numeric_values": values}


def generated(model, engine, options):
    torch.manual_seed(0)
    return model.generate(
        **prompts(model), **options, max_new_tokens=24, return_dict_in_generate=True, engine=engine
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_tokens_and_numbers_are_those_of_generate(mode, tied):
    model = tiny_causal(tie_word_embeddings=tied)
    with torch.no_grad():
        model.action.bias[model.config.num_token_id] += 1.0  # numbers are said often, and fed back
    engine = Engine.from_model(model)
    ours, theirs = (generated(model, made, MODES[mode]) for made in (engine, None))
    assert torch.equal(ours.sequences, theirs.sequences)
    new = slice(5, None)
    for name in ("numeric_values", "numeric_lower", "numeric_upper"):
        torch.testing.assert_close(
            getattr(ours, name)[:, new], getattr(theirs, name)[:, new], rtol=1e-3, atol=1e-3
        )


def test_numbers_are_among_what_is_compared():
    model = tiny_causal()
    with torch.no_grad():
        model.action.bias[model.config.num_token_id] += 1.0
    said = [generated(model, None, options).sequences[:, 5:] for options in MODES.values()]
    assert sum((tokens == model.config.num_token_id).sum().item() for tokens in said) >= 5


def test_causes_of_another_size_and_sigmoid_numbers():
    model = tiny_causal(causal_size=24, numeric_encoding="sigmoid")
    options = MODES["causal"]
    ours, theirs = (generated(model, made, options).sequences for made in (Engine.from_model(model), None))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mode", ["standard", "standard sampled", "causal, top k", "compatible"])
def test_a_model_all_in_bfloat16_runs(mode):
    """Its heads are bfloat16 too, which native code must not read as they lie."""
    model = tiny_causal().to(torch.bfloat16)
    wide = tiny_causal()
    wide.load_state_dict(model.state_dict())  # the same values in float32: what the engine computes in
    ours = generated(model, Engine.from_model(model), MODES[mode]).sequences
    assert torch.equal(ours, generated(wide, None, MODES[mode]).sequences)


def test_stops_streams_and_lengths_are_generates_own():
    model = tiny_causal()
    engine = Engine.from_model(model)
    ids = torch.tensor([[1, 2, 3]])
    first = int(model.generate(ids, max_new_tokens=1, inference_mode="standard", engine=engine)[0, -1])
    out = model.generate(ids, max_new_tokens=9, inference_mode="standard", eos_token_id=first, engine=engine)
    assert out.shape == (1, 4), "EOS as the first token ends the text"
    two = model.generate(
        ids, max_new_tokens=4, inference_mode="causal", num_return_sequences=2, engine=engine
    )
    assert two.shape == (2, 7)


def test_what_the_engine_cannot_do_is_said():
    model = tiny_causal()
    engine = Engine.from_model(model)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        model.action.bias[model.config.num_token_id] = NUM_BIAS  # beams cannot carry numbers anyway
    with pytest.raises(ValueError, match="leave out engine="):
        model.generate(ids, max_new_tokens=2, inference_mode="compatible", num_beams=2, engine=engine)
    with pytest.raises(ValueError, match="neither hidden states nor attentions"):
        model.generate(
            ids,
            max_new_tokens=2,
            engine=engine,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
    with pytest.raises(ValueError, match="do not fit the context of 512"):
        model.generate(ids, max_new_tokens=600, eos_token_id=None, engine=engine)
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(ids[:, :0], max_new_tokens=2, engine=engine)


def test_eight_bits_decide_as_the_model_of_their_weights():
    """The heads read the engine's own vocabulary matrix: with its values in the model, tokens are equal."""
    model = tiny_causal()
    engine = Engine.from_model(model, precision="int8")
    twin = CausalQwen2ForCausalLM(model.config).eval()
    state = {
        name: quantise(value).dense()
        if value.dim() == 2 and not name.startswith(("abduction", "action"))
        else value
        for name, value in model.state_dict().items()
    }
    state |= _fused(model)
    twin.load_state_dict(state)
    for name in ("standard", "causal", "compatible"):
        ours = generated(model, engine, MODES[name]).sequences
        assert torch.equal(ours, generated(twin, None, MODES[name]).sequences)


def _fused(model):
    """Query, key and value are quantised together, and gate and up: so the twin's are."""
    state, tensors = {}, model.state_dict()
    for index in range(model.config.num_hidden_layers):
        for names in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ):
            full = [f"model.layers.{index}.{name}.weight" for name in names]
            parts = [tensors[name] for name in full]
            dense = quantise(torch.cat(parts)).dense().split([len(part) for part in parts])
            state |= dict(zip(full, dense, strict=True))
    return state


@pytest.mark.slow
def test_embedded_base_in_the_engine():
    """The embedded base: plain greedy, and each mode for one individual, has the tokens of the slow path."""
    from causal_qwen import convert
    from causal_qwen.conversion import load_base

    base = load_base("smollm2")
    ids = base.tokenizer("The history of the bicycle begins with", return_tensors="pt").input_ids
    plain = from_hf(base.model).generate(ids, 48).sequences
    assert torch.equal(Engine.from_model(base.model).generate(ids, 48).sequences, plain)
    model = convert(base, calibration="none").model
    model.generation_config.eos_token_id = None
    engine = Engine.from_model(model)
    person = {"individual": 7}
    for name in ("standard", "causal", "causal, top k", "compatible"):
        options = MODES[name] | (person if "individual" in MODES[name] else {})
        ours, theirs = (
            model.generate(ids, max_new_tokens=24, pad_token_id=0, engine=made, **options)
            for made in (engine, None)
        )
        assert torch.equal(ours, theirs), name


# The command line -------------------------------------------------------------------------------------------


def test_kv_memory_is_the_formula(tmp_path):
    from typer.testing import CliRunner

    from causal_qwen.cli import app
    from causal_qwen.decoder import kv_cache_bytes

    tiny_base(num_key_value_heads=2).save_pretrained(tmp_path)
    arguments = ["kv-memory", str(tmp_path), "--length", "100", "--kv-heads", "2", "--batch", "3", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--dtype", "float32"], catch_exceptions=False)
    config = dataclasses.replace(DecoderConfig.from_hf_config(tiny_base().config), num_key_value_heads=2)
    expected = kv_cache_bytes(config, 3, 100, torch.float32)
    assert json.loads(result.stdout)["rows"] == [{"kv_heads": 2, "tokens": 100, "bytes": expected}]
    table = CliRunner().invoke(app, ["kv-memory", "llama_7b", "--length", "4096"], catch_exceptions=False)
    assert "2.00 GiB" in table.stdout
    assert "512.0 MiB" in table.stdout
    with pytest.raises(ValueError, match="no such directory, and not on the hub"):
        CliRunner().invoke(app, ["kv-memory", "nowhere"], catch_exceptions=False)


def test_generate_with_the_native_engine_prints_the_same(tmp_path, base_directory):
    from typer.testing import CliRunner

    from causal_qwen import convert
    from causal_qwen.cli import app

    convert(str(base_directory), tmp_path / "model", calibration="none")
    arguments = ["generate", str(tmp_path / "model"), "Hello", "--max-new-tokens", "6", "--seed", "1"]

    def printed(*options):
        options = ("--json", "--mode", "causal", *options)
        result = CliRunner().invoke(app, [*arguments, *options], catch_exceptions=False)
        return json.loads(result.stdout)

    assert printed("--engine", "native") == printed()
    assert printed("--engine", "native", "--dtype", "int8")["seed"] == 1
    with pytest.raises(ValueError, match="--dtype int4 needs --engine native"):
        printed("--dtype", "int4", "--engine", "transformers")
