"""One-vs-Rest as the only loss of words, by the example's recipe, on a tiny base."""

from pathlib import Path

import pytest
import torch

from causal_qwen import CausalQwen2ForCausalLM
from causal_qwen.training import TrainingRecipe, train
from training_runs import converted

RECIPE = Path(__file__).parents[2] / "examples" / "configs" / "words.yaml"


@pytest.fixture(scope="module")
def start(base_directory, tmp_path_factory):
    return converted(base_directory, tmp_path_factory.mktemp("words") / "start")


def trained(start, directory, **overrides):
    """The recipe with another base, a text of its own and few steps."""
    text = directory / "text.txt"
    text.write_text("the cat sat on the mat and the dog lay by the door\n" * 40, encoding="utf-8")
    small = {"model": str(start), "data": str(text), "output": str(directory / "out"), "max_steps": 3}
    result = train(TrainingRecipe.from_yaml(RECIPE, **(small | overrides)), progress=None)
    return result, CausalQwen2ForCausalLM.from_pretrained(result.output)


def test_words_learned_by_one_vs_rest_alone(start, tmp_path):
    result, model = trained(start, tmp_path)
    recipe = TrainingRecipe.from_yaml(RECIPE)
    for name in ("ovr_rivals", "ovr_rival_scale", "ovr_gradient_bound"):
        assert getattr(model.config, name) == getattr(recipe, name) is not None
    assert (model.config.classification_loss_weight, model.config.softmax_loss_weight) == (1.0, 0.0)
    assert result.metrics["train/steps"] == 3
    (tmp_path / "plain").mkdir()
    plain, as_trained = trained(start, tmp_path / "plain", refit_words=False)
    # The refit is all that differs: two numbers.
    shift = model.action.threshold - as_trained.action.threshold
    torch.testing.assert_close(shift, shift[:1].expand_as(shift))
    widening = model.abduction.scale.bias - as_trained.abduction.scale.bias
    torch.testing.assert_close(widening, widening[:1].expand_as(widening))
    assert widening[0] != 0
    assert torch.equal(model.lm_head.weight, as_trained.lm_head.weight)
    # A law with a scale of its own leaves the scales where conversion put them, and the backbone moves.
    before = dict(CausalQwen2ForCausalLM.from_pretrained(start).named_parameters())
    moved = {
        name
        for name, after in as_trained.named_parameters()
        if not torch.equal(after.detach(), before[name].detach())
    }
    scales = {"abduction.scale.weight", "abduction.scale.bias", "abduction.common_scale", "action.balance"}
    assert scales <= before.keys()
    assert not scales & moved
    learned = {"model.layers.0.mlp.up_proj.weight", "abduction.loc.weight", "abduction.common.weight"}
    assert learned | {"action.bias", "action.threshold"} <= moved
    # An uncalibrated start expects half the vocabulary at once.
    name = "dist/ovr_prob_sum_median"
    assert result.metrics[name] < 0.1 * plain.metrics[name]


def test_what_is_held_must_have_a_name(start, tmp_path):
    with pytest.raises(
        ValueError, match="hold names 'embeddings'; it must be part of a parameter's name, such as "
    ):
        trained(start, tmp_path, hold=["embed_tokens", "embeddings"])
