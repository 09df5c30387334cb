"""The known names: the quick start as it was written, and every adapter against what it adapts."""

import inspect
import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2ForCausalLM

import causal_qwen_mvp
from causal_qwen import Cauchy, CausalQwen2ForCausalLM, Inferencer
from causal_qwen.losses import ovr_loss
from causal_qwen_mvp import (
    AbductionNetwork,
    ActionNetwork,
    CauchyMath,
    CausalInferenceEngine,
    CausalMVPOutput,
    CausalQwen2Config,
    CausalQwenMVPForCausalLM,
    CausalTrainer,
    InferenceValidator,
    LossComputer,
    OvRClassifier,
    TrainingValidator,
    create_mvp_model,
    get_model_info,
)
from conftest import TINY, tiny_base

MODES = ("standard", "causal", "compatible")


def tiny_mvp(**overrides):
    """A tiny model in which every parameter carries signal."""
    torch.manual_seed(1)
    fields = TINY | {"gamma_init": 0.5, "num_token_id": 258} | overrides
    model = CausalQwenMVPForCausalLM(CausalQwen2Config(**fields)).eval()
    with torch.no_grad():
        for parameter in [*model.abduction.parameters(), *model.action.parameters()]:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def model():
    return tiny_mvp()


# --- the quick start


def test_the_quick_start_runs_as_it_was_written():
    config = CausalQwen2Config(vocab_size=32000, hidden_size=512)
    model = CausalQwenMVPForCausalLM(config)
    input_ids = torch.randint(0, 32000, (1, 6))
    output = model.generate(input_ids, max_new_tokens=20, do_sample=False)
    assert output.shape == (1, 26)
    assert torch.equal(output, model.generate(input_ids, max_new_tokens=20, do_sample=False))
    torch.manual_seed(0)
    sampled = model.generate(
        input_ids, max_new_tokens=20, do_sample=True, temperature=0.8, top_k=50, top_p=0.9
    )
    assert sampled.shape == (1, 26)
    assert not torch.equal(sampled, output)
    assert isinstance(model, Qwen2ForCausalLM)
    assert isinstance(model, CausalQwen2ForCausalLM)
    assert model.num_parameters() < 60e6


def test_every_name_is_in_the_package_and_says_what_is_modern():
    for name in causal_qwen_mvp.__all__:
        thing = getattr(causal_qwen_mvp, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert "odern" in thing.__doc__ or "`causal_qwen." in thing.__doc__, name
    for module in ("models", "inference", "training"):
        exported = getattr(causal_qwen_mvp, module).__all__
        assert set(exported) <= set(causal_qwen_mvp.__all__)


# --- configuration


@pytest.mark.parametrize(("hidden", "heads"), [(512, 8), (64, 1), (100, 1)])
def test_sizes_follow_from_the_hidden_size(hidden, heads):
    config = CausalQwen2Config(vocab_size=100, hidden_size=hidden)
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, heads)
    assert (config.intermediate_size, config.num_hidden_layers) == (4 * hidden, 4)
    assert config.causal_size == hidden


def test_a_qwen2_configuration_given_as_fields_is_kept():
    base = tiny_base()
    config = CausalQwen2Config(**base.config.to_dict(), causal_size=32, gamma_init=1.0)
    assert config.model_type == "causal_qwen2"
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "intermediate_size"):
        assert getattr(config, name) == getattr(base.config, name)


def test_checkpoints_are_those_of_the_modern_model(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.num_attention_heads == model.config.num_attention_heads
    modern = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(modern) is CausalQwen2ForCausalLM
    again = CausalQwenMVPForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = model(ids)
        assert torch.equal(modern(ids).logits, expected.logits)
        assert torch.equal(again(ids).loc_S, expected.loc_S)


# --- networks


def test_the_linear_law_is_the_one_of_cauchy():
    torch.manual_seed(0)
    loc, scale = torch.randn(2, 5, 16), torch.rand(2, 5, 16)
    weight, bias = torch.randn(7, 16), torch.randn(7)
    law = Cauchy(loc, scale).linear(weight, bias)
    torch.testing.assert_close(CauchyMath.cauchy_linear_stable_loc(loc, weight, bias), law.loc)
    torch.testing.assert_close(CauchyMath.cauchy_linear_stable_loc(loc, weight), law.loc - bias)
    torch.testing.assert_close(CauchyMath.cauchy_linear_stable_scale(scale, weight), law.scale)


def test_networks_stand_alone():
    config = CausalQwen2Config(**TINY, gamma_init=2.0, b_noise_init=0.25, ovr_threshold_init=1.0)
    z = torch.randn(2, 5, 32)
    loc_U, scale_U = AbductionNetwork(config)(z)
    torch.testing.assert_close(loc_U, z)  # the identity, at the start
    torch.testing.assert_close(scale_U, torch.full_like(z, 2.0))
    action = ActionNetwork(config)
    W = action.lm_head.weight
    loc_S, scale_S = action(loc_U, scale_U, do_sample=False, temperature=1.0)
    torch.testing.assert_close(loc_S, loc_U @ W.T)
    torch.testing.assert_close(scale_S, (scale_U + 0.25) @ W.abs().T)
    hot = action(loc_U, scale_U, do_sample=False, temperature=7.0)
    assert torch.equal(hot[0], loc_S)
    assert torch.equal(hot[1], scale_S)
    moved, unmoved_scale = action(loc_U, scale_U, do_sample=True, temperature=1.0)
    assert (moved - loc_S).abs().min() > 0
    torch.testing.assert_close(unmoved_scale, scale_U @ W.abs().T)
    torch.manual_seed(0)
    one = action(loc_U, scale_U, do_sample=True, temperature=1.0)[0] - loc_S
    torch.manual_seed(0)
    two = action(loc_U, scale_U, do_sample=True, temperature=2.0)[0] - loc_S
    torch.testing.assert_close(two, 2 * one, rtol=1e-3, atol=1e-5)
    prob = OvRClassifier(config)(loc_S, scale_S)
    torch.testing.assert_close(prob, Cauchy(loc_S, scale_S).sf(torch.ones(300)))
    assert action.b_noise.shape == (32,)


def test_a_models_networks_are_its_heads(model, ids):
    with torch.no_grad():
        outputs = model(ids)
        z = model.model(ids).last_hidden_state
        loc_U, scale_U = model.abduction_network(z)
        assert torch.equal(loc_U, outputs.loc_U)
        loc_S, scale_S = model.action_network(loc_U, scale_U)
        torch.testing.assert_close(loc_S + outputs.loc_U0[..., None], outputs.loc_S)
        torch.testing.assert_close(scale_S + outputs.scale_U0[..., None], outputs.scale_S)
        prob = model.ovr_classifier(outputs.loc_S, outputs.scale_S)
        assert ((prob > 0) & (prob < 1)).all()
    assert model.ovr_classifier.thresholds is model.action.threshold
    assert model.abduction_network.loc_net is model.abduction.loc
    assert model.abduction_network.scale_net is model.abduction.scale
    names = {name for name, _ in model.named_parameters()}
    assert not any("network" in name for name in names)  # the views own nothing


# --- the model's methods


def test_forward_returns_the_scores_of_the_modern_model(model, ids):
    with torch.no_grad():
        outputs = model(ids)
        modern = CausalQwen2ForCausalLM.forward(model, ids, output_scores=True)
    assert isinstance(outputs, CausalMVPOutput)
    for name in ("logits", "loc_U", "scale_U", "loc_S", "scale_S", "loc_Y", "scale_Y"):
        torch.testing.assert_close(outputs[name], modern[name])
    assert model(ids, logits_to_keep=1).loc_S is None  # as in generate(): nobody reads it there


@pytest.mark.parametrize("mode", MODES)
def test_inference_decides_as_the_engine_does(model, ids, mode):
    options = {"individual": 5} if mode == "causal" else {}
    outputs = model.inference(ids, mode=mode, **options)
    assert outputs.loc_S.shape == outputs.scale_S.shape == (3, 12, 300)
    expected = Inferencer(model, mode, **options).infer(ids).choice.tokens
    assert torch.equal(outputs.next_token_ids, expected[:, None])


@pytest.mark.parametrize("mode", MODES)
def test_step_by_step_is_generate(model, ids, mode):
    options = {"individual": 5} if mode == "causal" else {}
    text = model.generate_step_by_step(ids, max_length=18, mode=mode, **options)
    sampling = {"top_k": 0} if mode == "causal" else {"do_sample": False}
    expected = model.generate(
        ids, inference_mode=mode, max_new_tokens=6, eos_token_id=-1, pad_token_id=0, **sampling, **options
    )
    assert text.shape == (3, 18)
    assert torch.equal(text, expected)
    assert model.generate_step_by_step(ids, max_new_tokens=2, mode=mode).shape == (3, 14)


def test_step_by_step_stops_where_every_row_has_ended(ids):
    model = tiny_mvp()
    free = model.generate_step_by_step(ids[:1], max_new_tokens=5)
    model.generation_config.eos_token_id = [int(free[0, 13])]
    stopped = model.generate_step_by_step(ids[:1], max_new_tokens=5)
    assert stopped.shape[1] <= 14
    assert torch.equal(stopped, free[:, : stopped.shape[1]])


def test_training_step_is_the_loss(model, ids):
    loss = model.training_step({"input_ids": ids})
    assert torch.equal(loss, model(ids, labels=ids).loss)
    assert loss.requires_grad


def test_debug_forward_pass_shows_every_stage(model, ids, caplog):
    with caplog.at_level(logging.INFO, logger="causal_qwen_mvp.models"):
        loc_S, scale_S = model.debug_forward_pass(ids)
    assert loc_S.shape == scale_S.shape == (3, 12, 300)
    for stage in ("hidden_states", "loc_U", "scale_U", "loc_S", "scale_S"):
        assert stage in caplog.text


@pytest.mark.parametrize("tied", [True, False])
def test_weights_can_be_copied(ids, base_directory, tied):
    base = tiny_base(tie_word_embeddings=tied)
    model = CausalQwenMVPForCausalLM(CausalQwen2Config(**base.config.to_dict())).eval()
    model.copy_pretrained_weights(base)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, base(ids).logits)
    if tied:
        model.copy_pretrained_weights(str(base_directory))
    with pytest.raises(ValueError, match="make the configuration with"):
        tiny_mvp(hidden_size=64, causal_size=64).copy_pretrained_weights(base)


# --- inference


def test_the_engine_is_generate(model, ids):
    engine = CausalInferenceEngine(model)
    text = engine.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(text, model.generate(ids, max_new_tokens=4, do_sample=False))
    assert torch.equal(engine.generate_next_token(ids), text[:, 12:13])
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 5, "top_p": 0.9}
    torch.manual_seed(3)
    sampled = engine.generate(ids, max_new_tokens=4, **sampling)
    torch.manual_seed(3)
    mask = torch.ones_like(ids)
    assert torch.equal(sampled, model.generate(ids, attention_mask=mask, max_new_tokens=4, **sampling))
    assert torch.equal(engine(ids).loc_S, model(ids).loc_S)
    for mode in MODES:
        assert engine.inference(ids, mode).next_token_ids.shape == (3, 1)


def test_the_validator_finds_the_principles(model, ids):
    results = InferenceValidator(model).validate_v2_principles(ids, temperature=1.0)
    assert set(results) == {
        "base_representations",
        "deterministic_mode",
        "sampling_mode",
        "position_difference",
        "scale_difference",
        "principles",
    }
    assert results["base_representations"]["loc_U"].shape == (3, 12, 32)
    assert results["sampling_mode"]["scale_S"].shape == (3, 12, 300)
    assert results["position_difference"].item() > 0
    assert results["scale_difference"].item() > 0
    assert all(results["principles"].values()), results["principles"]


def test_the_validator_finds_a_broken_principle(ids, monkeypatch):
    model = tiny_mvp()
    lawful = model.action.exogenous

    def heated(U, *, do_sample=False, temperature=1.0, **options):
        law = lawful(U, do_sample=do_sample, temperature=temperature, **options)
        return law if do_sample else Cauchy(law.loc, temperature * law.scale)

    monkeypatch.setattr(model.action, "exogenous", heated)
    principles = InferenceValidator(model).validate_v2_principles(ids)["principles"]
    assert not principles["temperature is inert without sampling"]


def test_the_validator_compares_with_the_base(base_directory, ids):
    model = create_mvp_model(base_directory, persistence=0.5)
    base = tiny_base(tie_word_embeddings=True)
    validator = InferenceValidator(model)
    assert validator.compare_with_qwen(ids) is None
    results = validator.compare_with_qwen(ids, base)
    assert results["logits_difference"] == 0.0
    assert results["prediction_match_rate"] == 1.0
    assert results["causal_prediction"] == results["qwen_prediction"]
    assert model.config.persistence == 0.5
    assert model.config.num_hidden_layers == 2
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    assert validator.compare_with_qwen(ids, base)["logits_difference"] > 0
    with pytest.raises(ValueError, match="gamma_init cannot be changed after conversion"):
        create_mvp_model(base_directory, gamma_init=3.0)


# --- training


def test_the_trainer_trains(ids, tmp_path):
    model = tiny_mvp()
    validator = TrainingValidator(model)
    trainer = CausalTrainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    before = trainer.validation_step({"input_ids": ids})
    history = trainer.fit([{"input_ids": ids}] * 3, [{"input_ids": ids}], num_epochs=3, save_path=tmp_path)
    assert [set(row) for row in history] == [{"loss", "lr", "grad_norm", "val_loss", "val_perplexity"}] * 3
    assert history[-1]["val_loss"] < before["val_loss"]
    assert len(trainer.loss_history) == trainer.global_step == 9
    assert CausalQwenMVPForCausalLM.from_pretrained(tmp_path).config.hidden_size == 32
    flow, moved = validator.validate_gradient_flow(), validator.validate_weight_updates()
    assert flow["abduction.loc.weight"] > 0
    assert moved["abduction.loc.weight"] > 0
    frozen = TrainingValidator(model)
    assert set(frozen.validate_weight_updates().values()) == {0.0}
    with pytest.raises(ValueError, match="no batches"):
        trainer.train_epoch([])


def test_the_default_optimizer_trains_what_is_trainable(ids):
    model = tiny_mvp()
    model.model.requires_grad_(False)
    trainer = CausalTrainer(model)
    assert set(trainer.training_step({"input_ids": ids})) == {"loss", "lr", "grad_norm"}
    assert model.model.layers[0].mlp.up_proj.weight.grad is None


def test_the_loss_on_scores_is_the_loss_of_the_model(ids):
    """S from output_scores against `ovr_loss` from U and W, thresholds and all."""
    model = tiny_mvp()
    with torch.no_grad():
        outputs = model(ids)
        U = model.action.exogenous(outputs.U)
    mask_all = torch.ones_like(ids, dtype=torch.bool)  # (3, T) positions, flat
    labels = torch.cat([ids[:, 1:], ids.new_full((3, 1), -100)], dim=1)
    labels[0, :4] = -100
    computer = LossComputer(model.config)
    loss = computer.compute_causal_loss(
        outputs.loc_S, outputs.scale_S, labels, thresholds=model.action.threshold
    )
    expected = ovr_loss(
        U[mask_all],
        outputs.U0[mask_all],
        model.lm_head.weight,
        labels.flatten(),
        bias=model.action.bias,
        balance=model.action.balance,
        threshold=model.action.threshold,
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    mask = torch.ones_like(ids)
    mask[1] = 0
    labels[1] = -100
    assert torch.equal(
        computer.compute_causal_loss(outputs.loc_S, outputs.scale_S, ids, mask * (labels != -100)),
        computer.compute_causal_loss(outputs.loc_S, outputs.scale_S, torch.where(labels != -100, ids, -100)),
    )
    assert computer.compute_regularization_loss(model).item() > 0


@pytest.mark.parametrize(
    ("history", "stable", "reason"),
    [
        ([1.0] * 5, True, "insufficient_data"),
        ([1.0, float("nan")], False, "loss_diverged"),
        ([1.0] * 100, False, "loss_stagnated"),
        ([1.0 + 0.01 * i for i in range(50)] + [1e4 * i for i in range(50)], False, "loss_diverged"),
        ([5.0 - 0.01 * i for i in range(100)], True, "ok"),
    ],
)
def test_stability_has_reasons(model, history, stable, reason):
    verdict = TrainingValidator(model).check_training_stability(history)
    assert (verdict["stable"], verdict["reason"]) == (stable, reason)


def test_info_has_the_documented_keys(model):
    info = get_model_info()
    assert {"name", "version", "description", "features", "inference_modes"} == set(info)
    sizes = get_model_info(model)
    assert sizes["parameters"] == model.num_parameters()
    assert 0 < sizes["causal_parameters"] < sizes["parameters"]
    assert (sizes["hidden_size"], sizes["causal_size"], sizes["vocab_size"]) == (32, 32, 300)
