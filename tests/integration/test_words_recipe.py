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
    assert model.config.ovr_gradient_bound == 1.0
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
    # An uncalibrated start expects half the vocabulary at once.
    name = "dist/ovr_prob_sum_median"
    assert result.metrics[name] < 0.1 * plain.metrics[name]
