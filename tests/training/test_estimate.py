"""What is foretold is what real tensors take: weights and moments to the byte, activations as autograd keeps
them.
"""

import dataclasses

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from causal_qwen import CausalQwen2Config, CausalQwen2ForCausalLM, CausalQwen3ForCausalLM
from causal_qwen.conversion.skeleton import SHAPES, skeleton, skeleton_of
from causal_qwen.modeling_causal_qwen3 import CausalQwen3Config
from causal_qwen.training import TrainingRecipe
from causal_qwen.training.duration import estimate_arithmetic, measured_rate
from causal_qwen.training.estimate import PARTS, Batch, estimate_memory, prepare
from causal_qwen.training.methods import LORA_TARGETS
from causal_qwen.training.trainer import parameter_groups
from causal_qwen.training.workload import assumed_workload
from conftest import TINY

SIZES = TINY | {
    "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2,
    "num_token_id": 258, "number_token_gradient": False, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES = {
    "qwen2": (CausalQwen2ForCausalLM, CausalQwen2Config),
    "qwen3": (CausalQwen3ForCausalLM, CausalQwen3Config),
}


def config_of(family="qwen2", **changes):
    return FAMILIES[family][1](**(SIZES | changes))


def make_recipe(**changes):
    return TrainingRecipe(**({"output": "unused", "method": "full"} | changes))


def real(config, recipe, dtype=torch.float32):
    """A model with memory, and what is trained of it."""
    torch.manual_seed(0)
    family = CausalQwen3ForCausalLM if "qwen3" in config.model_type else CausalQwen2ForCausalLM
    model = family(config)
    model.model.to(dtype)
    model.lm_head.to(dtype)
    for name in ("softmax_loss_weight", "loss_impl", "ovr_rivals", "num_negatives"):
        setattr(model.config, name, getattr(recipe, name))
    return model, prepare(model, recipe)


def bare(config, recipe, dtype="float32"):
    family = CausalQwen3ForCausalLM if "qwen3" in config.model_type else CausalQwen2ForCausalLM
    model = skeleton_of(family, config, dtype=dtype)
    return model, prepare(model, recipe)


def foretell(config, recipe, batch, dtype="float32", **options):
    model, module = bare(config, recipe, dtype)
    return estimate_memory(model, module, recipe, batch, **options)


def inputs_of(batch):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 250, (batch.rows, batch.length), generator=generator)
    mask = torch.ones_like(ids)
    if batch.padded:
        mask[0, -3:] = 0
    values = torch.zeros(ids.shape, dtype=torch.float64)
    return {
        "input_ids": ids, "labels": ids, "attention_mask": mask, "numeric_values": values, "use_cache": False,
    }  # fmt: skip


# --- weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hold": ["embed_tokens", "layers.0."]},
        {"method": "lora", "lora_rank": 4},
        {"method": "heads"},
    ],
    ids=["full", "hold", "lora", "heads"],
)
def test_weights_and_moments_are_those_of_a_real_run_to_the_byte(changes, dtype):
    recipe, batch = make_recipe(**changes), Batch(2, 8, 16)
    model, module = real(config_of(), recipe, getattr(torch, dtype))
    optimizer = torch.optim.AdamW(parameter_groups(module, recipe))
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = sum(
        state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    )
    whole = sum(parameter.nbytes for parameter in {*model.parameters(), *module.parameters()})

    estimate = foretell(config_of(), recipe, batch, dtype)
    step = estimate.moments["backward"]
    assert step["parameters"] == whole
    assert step["optimizer"] == moments
    second = model.get_input_embeddings().weight
    gradients = sum(parameter.grad.nbytes for parameter in learned)
    gradients += 2 * second.nbytes if second.requires_grad else 0  # W is the embedding: two, and their sum
    assert estimate.moments["last gradient"]["gradients"] == gradients


def test_a_sharded_model_is_cut_by_rows_and_its_ends_are_gathered():
    recipe, batch = make_recipe(fsdp=True, save_steps=0), Batch(2, 8, 16)
    alone, shared = (foretell(config_of(), recipe, batch, processes=count) for count in (1, 3))
    model, _ = bare(config_of(), recipe)
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
    root = sum(p.nbytes for p in model.parameters()) - sum(layers)
    cut = shared.moments["backward"]["parameters"] - root - 2 * max(layers)
    whole = alone.moments["backward"]["parameters"]
    assert whole / 3 < cut < 1.05 * whole / 3  # a row more of each where three do not divide them
    assert shared.moments["backward"]["optimizer"] < 1.05 * alone.moments["backward"]["optimizer"] / 3
    assert shared.moments["loading"] == alone.moments["loading"]
    assert "gathering" in shared.moments
    assert "gathering" not in foretell(config_of(), recipe, batch, processes=3, device="cuda").moments


def test_copies_have_buckets_for_their_gradients():
    batch = Batch(2, 8, 16)
    alone, copies = (foretell(config_of(), make_recipe(), batch, processes=count) for count in (1, 2))
    one = alone.moments["backward"]
    assert copies.moments["backward"]["gradients"] == one["optimizer"] // 2
    assert copies.moments["backward"]["parameters"] == one["parameters"]


# --- activations


def kept_by_autograd(config, recipe, batch, dtype, autocast):
    """Bytes of the distinct storages that are saved for the backward pass, without parameters."""
    _, module = real(config, recipe, dtype)
    module.train()
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # kept, so that no address is used twice
        return tensor

    with (
        saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        outputs = module(**inputs_of(batch))
    del outputs
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("family", "changes", "dtype", "padded", "attention"),
    [
        ("qwen2", {}, "float32", False, "sdpa"),
        ("qwen2", {}, "float32", True, "sdpa"),
        ("qwen2", {"bf16": True}, "float32", False, "sdpa"),
        ("qwen2", {"bf16": True}, "float32", True, "sdpa"),
        ("qwen2", {}, "bfloat16", False, "sdpa"),
        ("qwen2", {}, "float32", False, "eager"),
        ("qwen2", {"bf16": True}, "float32", False, "eager"),
        ("qwen2", {"method": "lora", "lora_rank": 4}, "float32", False, "sdpa"),
        ("qwen3", {}, "float32", False, "sdpa"),
        ("qwen3", {"bf16": True}, "float32", False, "sdpa"),
    ],
)
def test_a_layer_keeps_what_autograd_keeps_of_it(family, changes, dtype, padded, attention):
    """Of three layers against two: what the rest of the model keeps cancels. Within one percent."""
    recipe, batch = make_recipe(**changes), Batch(2, 16, 30, padded=padded)
    kept, foretold = [], []
    for layers in (2, 3):
        config = config_of(family, num_hidden_layers=layers, attn_implementation=attention)
        kept.append(kept_by_autograd(config, recipe, batch, getattr(torch, dtype), recipe.bf16))
        config = config_of(family, num_hidden_layers=layers, attn_implementation=attention)
        foretold.append(foretell(config, recipe, batch, dtype).moments["forward"]["activations"])
    assert foretold[1] - foretold[0] == pytest.approx(kept[1] - kept[0], rel=0.01)


def test_checkpointing_keeps_the_inputs_of_layers():
    batch = Batch(2, 16, 30)
    plain, checkpointed = (
        [
            foretell(config_of(num_hidden_layers=layers), make_recipe(gradient_checkpointing=flag), batch)
            for layers in (2, 3)
        ]
        for flag in (False, True)
    )
    grown = [pair[1].moments["backward"]["activations"] - pair[0].moments["backward"]["activations"]
             for pair in (plain, checkpointed)]  # fmt: skip
    assert grown[1] == 2 * 16 * 48 * 4
    assert grown[0] > 10 * grown[1]


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that exist, and the most there ever were."""

    def __init__(self, without=()):
        super().__init__()
        self.known, self.now, self.most = WeakIdKeyDictionary(), 0, 0
        for tensor in without:
            self.known[tensor.untyped_storage()] = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.known[storage] = Tally(self, storage.nbytes())
        return result


class Tally:
    """Counts a storage for as long as the storage lives."""

    def __init__(self, mode, size):
        self.mode, self.size = mode, size
        mode.now += size
        mode.most = max(mode.most, mode.now)

    def __del__(self):
        self.mode.now -= self.size


@pytest.mark.parametrize(
    "changes",
    [
        {"ovr_rivals": 16},
        {"ovr_rivals": 16, "bf16": True},
        {"ovr_rivals": 16, "gradient_checkpointing": True},
        {"ovr_rivals": 16, "method": "lora", "lora_rank": 4},
        {"ovr_rivals": 16, "softmax_loss_weight": 0},
        {"loss_impl": "reference", "softmax_loss_weight": 0},
    ],
    ids=["cross-entropy", "bfloat16", "checkpointing", "lora", "rivals", "reference"],
)
def test_a_step_takes_what_was_foretold(changes):
    """The most that lives at once in a forward and a backward pass, within a tenth of it."""
    recipe, batch = make_recipe(**changes), Batch(4, 64, 4 * 63)
    sizes = {"num_hidden_layers": 6, "vocab_size": 1200}
    model, module = real(config_of(**sizes), recipe)
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    module.train()
    inputs = inputs_of(batch)
    with LiveBytes(without=module.parameters()) as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bf16):
            loss = module(**inputs).loss
        loss.backward()
    estimate = foretell(config_of(**sizes), recipe, batch)
    assert highest_step(estimate) == pytest.approx(live.most, rel=0.1)


def test_the_gradients_of_a_tied_matrix_are_three_at_the_end():
    """Of a few positions and many words, where the last gradient is the highest moment. Within a tenth."""
    recipe = make_recipe(loss_impl="sampled", num_negatives=50, softmax_loss_weight=0)
    batch, sizes = Batch(1, 8, 7), {"vocab_size": 4000}
    model, module = real(config_of(**sizes), recipe)
    module.train()
    inputs = inputs_of(batch)
    with LiveBytes(without=model.parameters()) as live:
        module(**inputs).loss.backward()
    estimate = foretell(config_of(**sizes), recipe, batch)
    assert highest_step(estimate) == estimate.moments["last gradient"]["gradients"]
    assert highest_step(estimate) == pytest.approx(live.most, rel=0.1)


def highest_step(estimate):
    steps = [moment for moment in estimate.moments if moment not in ("loading", "solving")]
    parts = ("gradients", "activations", "vocabulary loss")
    return max(sum(estimate.moments[moment][part] for part in parts) for moment in steps)


def test_malloc_keeps_small_blocks_and_maps_large_ones():
    """On a CPU what small gradients took stays with the process while the loss maps its large tensors."""
    recipe, batch = make_recipe(ovr_rivals=4), Batch(8, 512, 8 * 512)
    config = {"vocab_size": 4000, "num_hidden_layers": 1}  # scores of 65 MB
    backward = foretell(config_of(**config), recipe, batch).moments
    assert backward["last gradient"]["kept by malloc"] > 0
    elsewhere = foretell(config_of(**config), recipe, batch, device="cuda").moments
    assert all(parts["kept by malloc"] == 0 for parts in elsewhere.values())


def test_the_loss_of_numbers_alone_has_no_vocabulary():
    """With heads that are solved for no step is taken: weights, and a copy to round."""
    estimate = foretell(config_of(), make_recipe(method="heads"), Batch(2, 16, 0))
    assert list(estimate.moments) == ["loading", "solving"]
    quiet = foretell(config_of(), make_recipe(method="heads"), Batch(2, 16, 0, numbers=False))
    assert list(quiet.moments) == ["loading"]


def test_parts_add_up_to_the_peak():
    estimate = foretell(config_of(), make_recipe(), Batch(2, 16, 30), framework=10**9)
    assert tuple(estimate.parts) == PARTS
    assert estimate.total == max(sum(parts.values()) for parts in estimate.moments.values())
    assert estimate.parts["framework"] == 10**9


# --- shapes


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-0.5B", 0.49),
        ("Qwen2.5-1.5B", 1.54),
        ("Qwen2.5-3B", 3.09),
        ("Qwen2.5-7B", 7.61),
        ("Qwen2.5-14B", 14.7),
        ("Qwen2.5-32B", 32.5),
        ("Qwen2.5-72B", 72.7),
    ],
)
def test_shapes_have_as_many_parameters_as_was_published(name, billions):
    """The heads, two matrices of H × D beside vectors, are ours."""
    model = skeleton(name)
    heads = sum(p.numel() for part in (model.abduction, model.action) for p in part.parameters())
    count = sum(p.numel() for p in model.parameters()) - heads
    assert count / 1e9 == pytest.approx(billions, rel=0.01)
    assert model.dtype == torch.bfloat16
    assert model.abduction.loc.weight.dtype == torch.float32
    assert all(parameter.is_meta for parameter in model.parameters())


def test_every_shape_is_tested():
    assert len(SHAPES) == 7


def test_a_skeleton_of_a_base_is_what_its_conversion_will_be(base_directory, conversion):
    shapes = {name: tuple(p.shape) for name, p in conversion.model.named_parameters()}
    model = skeleton(str(base_directory), num_token_id=conversion.model.config.num_token_id)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes


# --- time


def test_arithmetic_is_six_operations_per_weight_and_token():
    recipe = make_recipe(batch_size=2, max_length=16, max_steps=10)
    model, _ = bare(config_of(), recipe)
    workload = assumed_workload(recipe)
    arithmetic = estimate_arithmetic(model, recipe, workload)
    tokens, V, D = 32, 300, 48
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    weights = sum(p.numel() for p in matrices) - model.action.number.weight.numel()
    attention = 3 * 4 * 2 * 2 * 16**2 * 48  # three passes, two layers, two rows
    assert arithmetic.per_step == 6 * weights * tokens + attention + 9 * 2 * tokens * V * D
    assert arithmetic.total == 10 * arithmetic.per_step
    again = estimate_arithmetic(model, dataclasses.replace(recipe, gradient_checkpointing=True), workload)
    assert again.per_step > arithmetic.per_step


def test_steps_are_those_of_the_trainer():
    recipe = make_recipe(batch_size=4, epochs=2, accumulation=2)
    assert assumed_workload(recipe, 33).steps(recipe, 1) == 2 * 5  # 9 batches, two to a step
    assert assumed_workload(recipe, 33).steps(recipe, 2) == 2 * 3  # 5 batches on each
    assert assumed_workload(recipe).steps(recipe, 1) is None


def test_a_rate_is_positive(one_thread):
    assert measured_rate("cpu") > 1e8


def test_adapters_are_on_every_matrix_of_a_layer():
    """The activations of adapters are counted by the list of their targets."""
    model, _ = bare(config_of(), make_recipe(method="lora"))
    linear = {
        name.split(".")[1]
        for name, module in model.model.layers[0].named_modules()
        if isinstance(module, nn.Linear) and "lora" not in name
    }
    assert linear == set(LORA_TARGETS)
