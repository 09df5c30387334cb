"""What those who know the first CausalQwen expect: W copied from Qwen, and noise with all of its tails."""

import pytest
import torch

from causal_qwen import convert
from causal_qwen_mvp import (
    ActionNetwork,
    CausalInferenceEngine,
    CausalQwen2Config,
    CausalQwenMVPForCausalLM,
    create_mvp_model,
)
from causal_qwen_mvp.config import CausalQwen2Config as ConfigOfTheModule
from conftest import TINY, tiny_base


def test_the_module_config_has_the_configuration():
    assert ConfigOfTheModule is CausalQwen2Config


def test_the_action_network_takes_w_from_qwen(ids):
    base = tiny_base()
    network = ActionNetwork(CausalQwen2Config(**TINY))
    network.copy_weights_from_qwen(base)
    with torch.no_grad():
        z = base.model(ids).last_hidden_state
        loc_S, _ = network(z, torch.zeros_like(z))
        torch.testing.assert_close(loc_S, base(ids).logits)
    base.lm_head.weight.data.zero_()
    assert network.lm_head.weight.abs().sum() > 0, "it is a copy"
    small = ActionNetwork(CausalQwen2Config(**(TINY | {"vocab_size": 200})))
    with pytest.raises(ValueError, match=r"\(300, 32\) there and \(200, 32\) here"):
        small.copy_weights_from_qwen(base)


def test_noise_is_untruncated_unless_asked(base_directory):
    assert CausalQwen2Config(**TINY).density_floor == 0
    assert create_mvp_model(base_directory).config.density_floor == 0
    assert create_mvp_model(base_directory, density_floor=0.01).config.density_floor == 0.01
    assert convert(base_directory, calibration="none").model.config.density_floor == 0.01


@pytest.mark.parametrize(("options", "texts"), [({}, 5), ({"density_floor": 0.01}, 1)])
def test_five_seeds_say_five_things(ids, options, texts):
    """At T = 1 with γ = 10. Next to the logits of a model this small, b_noise has to be small as well."""
    base = tiny_base()
    fields = base.config.to_dict() | {"gamma_init": 10.0, "b_noise_init": 0.01}
    model = CausalQwenMVPForCausalLM(CausalQwen2Config(**fields, **options)).eval()
    model.copy_pretrained_weights(base)
    model.generation_config.eos_token_id = None
    said = set()
    for seed in range(5):
        torch.manual_seed(seed)
        tokens = CausalInferenceEngine(model).generate(ids[:1], max_new_tokens=12, temperature=1.0)
        said.add(tuple(tokens[0].tolist()))
    assert len(said) == texts
