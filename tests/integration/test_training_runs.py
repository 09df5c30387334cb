"""train(): exact accumulation, exact resumption, adapters, heads, guards, records."""

import json
from functools import partial

import pytest
import torch

from causal_qwen import CausalQwen2ForCausalLM, CausalQwen2Processor, convert
from causal_qwen.conversion import load_model, load_processor
from causal_qwen.evaluation import predict
from causal_qwen.training import train
from causal_qwen.training.checkpoints import last_checkpoint
from causal_qwen.training.records import read_records
from causal_qwen.training.trainer import TrainingDiverged
from training_runs import assert_same_weights, converted, recipe, weights


@pytest.fixture(scope="module")
def model(base_directory, tmp_path_factory):
    return converted(base_directory, tmp_path_factory.mktemp("converted") / "model")


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def losses(path, name="train/total_loss"):
    return [record[name] for record in read_records(path) if name in record]


class PowerCut(Exception):
    """Stands for the end of a process."""


def cut(monkeypatch, step):
    """Let the process end in the middle of writing the checkpoint of ``step``."""
    from causal_qwen.training import trainer

    publish = trainer.publish

    def torn(staged, target):
        if target.name == f"checkpoint-{step}":
            next(staged.glob("*.safetensors")).write_bytes(b"half")
            raise PowerCut
        publish(staged, target)

    monkeypatch.setattr(trainer, "publish", torn)


def test_a_trained_model_is_saved_whole(model, tmp_path):
    parts = {"classification_loss_weight": 1.0, "softmax_loss_weight": 0.0}
    result = train(recipe(tmp_path, model, eval_steps=3, max_steps=6, **parts))
    assert result.metrics["train/steps"] == 6
    assert {"eval/num_f1", "eval/reg_mdae", "dist/mode_agreement"} <= result.metrics.keys()
    loaded = CausalQwen2ForCausalLM.from_pretrained(result.output)
    assert loaded.writes_numbers
    assert loaded.config.value_center != 0
    assert CausalQwen2Processor.from_pretrained(result.output).numbers == "written"
    names = {path.name for path in result.output.iterdir()}
    assert {"README.md", "curves.png", "metrics.jsonl", "recipe.yaml", "evaluation.json"} <= names
    assert not (tmp_path / "out.run").exists()
    records = read_records(result.output / "metrics.jsonl")
    recorded = {name for record in records for name in record}
    for name in ("total_loss", "cls_loss_mean", "reg_loss_effective", "grad_norm"):
        assert f"train/{name}" in recorded
    assert {
        "eval/ovr_nll",
        "dist/ovr_prob_sum_median",
        "diag/act_rms/layer_0",
        "diag/grad_norm/action",
    } <= recorded
    for record in records:
        if "train/cls_loss_mean" in record:
            total = record["train/cls_loss_mean"] + record["train/reg_loss_effective"]
            assert record["train/total_loss"] == pytest.approx(total, rel=1e-5)
    with pytest.raises(FileExistsError, match="exists"):
        train(recipe(tmp_path, model))


def test_a_model_reads_numbers_as_it_was_trained(model, tmp_path):
    """Digits in prompts by default; a model with a reading of its own keeps it, unless told otherwise."""
    options = {"method": "heads", "max_steps": 1}
    first, value, kept, told = (str(tmp_path / name) for name in ("first", "value", "kept", "told"))
    train(recipe(tmp_path, model, output=first, **options))
    train(recipe(tmp_path, model, output=value, numbers="value", **options))
    train(recipe(tmp_path, value, output=kept, **options))
    train(recipe(tmp_path, value, output=told, numbers="written", **options))
    settings = [load_processor(name).numbers for name in (first, value, kept, told)]
    assert settings == ["written", "value", "value", "written"]
    trained, processor = load_model(first)
    prompts = [{"prompt": f"abc: 7 makes{end}"} for end in ("", " ", "  ", "\n")]
    medians = {one.median for one in predict(trained, processor, prompts, batch_size=1)}
    assert len(medians) == 1, "white space at the end of a prompt changes no prediction"
    cards = [(tmp_path / name / "README.md").read_text(encoding="utf-8") for name in ("first", "kept")]
    assert ['numbers="written"' in card for card in cards] == [True, False]


def test_eight_batches_of_one_equal_one_of_eight(model, tmp_path):
    """The rows hold different numbers of tokens and of numbers, so both divisors matter."""
    table = tmp_path / "table.jsonl"
    lines = [{"text": " ".join(["ab"] * (i % 5)) + f" {i}.5 x" * (i % 3) + " end"} for i in range(24)]
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"template": None, "target": None, "max_steps": 3, "validation_fraction": 0.0}
    options |= {"calibration_fraction": 0.0}
    whole = recipe(tmp_path, model, output=str(tmp_path / "a"), batch_size=8, **options)
    pieces = recipe(tmp_path, model, output=str(tmp_path / "b"), batch_size=1, accumulation=8, **options)
    train(whole)
    train(pieces)
    one, other = (losses(tmp_path / name / "metrics.jsonl") for name in "ab")
    assert other == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"loss_impl": "sampled", "num_negatives": 20},
        {"method": "lora", "lora_dropout": 0.1},
        {"method": "heads", "completion_only": False},
        {
            "packing": True,
            "group_by_length": True,
            "batch_size": 1,
            "accumulation": 2,
            "max_steps": None,
            "epochs": 3.0,
        },
    ],
    ids=["sampled", "lora", "heads", "packed"],
)
def test_a_resumed_run_equals_the_uninterrupted_one(model, tmp_path, monkeypatch, options):
    options = {"save_steps": 2, "max_steps": 6, "logging_steps": 3} | options
    train(recipe(tmp_path, model, output=str(tmp_path / "whole"), **options))
    broken = recipe(tmp_path, model, output=str(tmp_path / "broken"), **options)
    with monkeypatch.context() as patch:
        cut(patch, 4)
        with pytest.raises(PowerCut):
            train(broken)
    workspace = tmp_path / "broken.run"
    assert last_checkpoint(workspace / "checkpoints").name == "checkpoint-2"
    with pytest.raises(FileExistsError, match="interrupted run"):
        train(broken)
    other = recipe(tmp_path, model, output=broken.output, **(options | {"learning_rate": 0.5}))
    with pytest.raises(ValueError, match="begun with learning_rate"):
        train(other, resume=True)
    train(broken, resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "broken")
    assert losses(tmp_path / "broken/metrics.jsonl") == losses(tmp_path / "whole/metrics.jsonl")


@pytest.mark.slow
def test_a_resumed_stream_equals_the_uninterrupted_one(model, tmp_path, monkeypatch):
    table = recipe(tmp_path, model).data
    options = {"streaming": True, "validation": table, "shuffle_buffer": 7, "save_steps": 2, "max_steps": 16}
    train(recipe(tmp_path, model, output=str(tmp_path / "whole"), **options))
    broken = recipe(tmp_path, model, output=str(tmp_path / "broken"), **options)
    with monkeypatch.context() as patch:
        cut(patch, 14)
        with pytest.raises(PowerCut):
            train(broken)
    train(broken, resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "broken")


def test_merged_adapters_equal_unmerged_ones(model, tmp_path, ids):
    """Also in W, of which the row that ends a text has moved."""
    peft = pytest.importorskip("peft")
    result = train(recipe(tmp_path, model, method="lora", learning_rate=1e-2))
    merged = CausalQwen2ForCausalLM.from_pretrained(result.output).eval()
    base = CausalQwen2ForCausalLM.from_pretrained(model)
    untouched = base(ids).logits
    adapted = peft.PeftModel.from_pretrained(base, result.output / "adapter").eval()
    assert not torch.allclose(adapted(ids).logits, untouched, atol=1e-3)
    assert torch.equal(adapted.base_model.model.lm_head.weight, merged.lm_head.weight)
    for name in ("logits", "loc_S", "scale_S", "loc_Y", "scale_Y"):
        expected = getattr(adapted(ids, output_scores=True), name)
        torch.testing.assert_close(
            getattr(merged(ids, output_scores=True), name), expected, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("method", ["full", "lora", "heads"])
def test_numbers_are_written_where_they_come_in_running_text(base_directory, tmp_path, method):
    """Behind one sign, one word of ten; a few steps of gradients would not teach it."""
    model = tmp_path / "model"
    convert(base_directory, model)
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(0))
    names = ["ab", "ac", "ad", "ba", "bc", "bd", "ca", "cb", "cd"]
    lines = []
    for _ in range(60):
        sizes = [f"x={size}" for size in draw(1, 90, (12,)).tolist()]
        words = [(*names, size)[index] for index, size in zip(draw(0, 10, (12,)), sizes, strict=True)]
        lines.append({"text": " ".join(words) + "."})
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"data": str(texts), "template": None, "target": None, "validation_fraction": 0.3}
    result = train(recipe(tmp_path, model, method=method, max_steps=2, precision_proof=False, **options))
    assert result.metrics["eval/num_f1"] > 0.6


@pytest.mark.parametrize("method", ["full", "lora"])
def test_numbers_of_a_table_are_written_after_few_steps(base_directory, tmp_path, method):
    """And texts end behind them; two steps of gradients teach neither."""
    model = tmp_path / "model"
    convert(base_directory, model)
    options = {"max_steps": 2, "validation_fraction": 0.3, "calibration_fraction": 0.0}
    result = train(recipe(tmp_path, model, method=method, precision_proof=False, **options))
    assert result.metrics["eval/num_f1"] > 0.9
    assert result.metrics["eval/accuracy"] > 0.9


@pytest.mark.parametrize("words", [False, True], ids=["table", "text"])
def test_rows_that_are_held_are_not_moved(model, tmp_path, words, caplog):
    options = {
        "hold": ["embed_tokens"],
        "completion_only": not words,
        "max_steps": 2,
        "precision_proof": False,
    }
    result = train(recipe(tmp_path, model, **options))
    assert torch.equal(weights(model)[EMBEDDING], weights(result.output)[EMBEDDING])
    assert ("<NUM> is not placed" in caplog.text) == words


def test_heads_only_leaves_the_backbone_alone(model, tmp_path):
    """Of a table's rows <NUM> and the end are solved for; of words, where there are any, biases and the row
    of <NUM> move.
    """
    solved = train(recipe(tmp_path, model, method="heads", output=str(tmp_path / "solved")))
    assert solved.metrics["train/steps"] == 0
    before, after, config = weights(model), weights(solved.output), load_model(solved.output)[0].config
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.startswith("action") or name in (EMBEDDING, HEAD) for name in changed)
    rows = (before[EMBEDDING] != after[EMBEDDING]).any(1).nonzero().flatten().tolist()
    assert config.num_token_id in rows
    assert len(rows) <= 2

    words = {"method": "heads", "completion_only": False}
    trained = train(recipe(tmp_path, model, output=str(tmp_path / "trained"), **words))
    assert trained.metrics["train/steps"] == 6
    after = weights(trained.output)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.startswith("action") or name in (EMBEDDING, HEAD) for name in changed)
    assert (before[EMBEDDING] != after[EMBEDDING]).any(1).nonzero().flatten().tolist() == [
        config.num_token_id
    ]
    full = recipe(tmp_path, model, output=str(tmp_path / "full"), completion_only=False)
    train(full)
    losses_of_words = [
        losses(tmp_path / name / "metrics.jsonl", "train/cls_loss_mean") for name in ("trained", "full")
    ]
    assert losses_of_words[0][0] == pytest.approx(losses_of_words[1][0], rel=1e-3)


def test_a_loss_that_is_no_number_stops_with_its_batch(model, tmp_path, monkeypatch):
    causal_loss = CausalQwen2ForCausalLM.causal_loss
    calls = []

    def broken(self, *args, **options):
        loss, cls_loss, reg_loss = causal_loss(self, *args, **options)
        calls.append(loss)
        return (loss * float("nan") if len(calls) == 3 else loss), cls_loss, reg_loss

    monkeypatch.setattr(CausalQwen2ForCausalLM, "causal_loss", broken)
    with pytest.raises(TrainingDiverged, match="the loss is nan at step 2") as error:
        train(recipe(tmp_path, model))
    saved = list((tmp_path / "out.run").rglob("bad-batch-*.pt"))
    assert str(saved[0]) in str(error.value)
    assert torch.load(saved[0])["input_ids"].shape[0] == 4
    assert not (tmp_path / "out").exists()


def test_trackers_get_the_same_names_offline(model, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = train(recipe(tmp_path, model, report_to=["wandb", "tensorboard"], max_steps=2))
    events = EventAccumulator(str(result.output / "tensorboard"))
    events.Reload()
    assert {"train/total_loss", "train/cls_loss_mean", "train/grad_norm"} <= set(events.Tags()["scalars"])
    written = [path.read_bytes() for path in (result.output / "wandb").rglob("*.wandb")]
    assert any(b"train/total_loss" in content for content in written)


@pytest.fixture
def as_trained(monkeypatch):
    """Nothing is solved for, placed or calibrated when training ends."""
    monkeypatch.setattr("causal_qwen.training.run.calibrate", lambda *parts: False)


def test_early_stopping_returns_the_best_weights(model, tmp_path, as_trained):
    options = {"early_stopping": 1, "eval_steps": 1, "save_steps": 1, "max_steps": 30}
    result = train(recipe(tmp_path, model, learning_rate=0.3, heads_learning_rate=0.5, **options))
    assert result.metrics["train/steps"] < 30
    records = read_records(result.output / "metrics.jsonl")
    evaluated = {
        record["step"]: record["eval/total_loss"] for record in records if "eval/total_loss" in record
    }
    best = min(evaluated, key=evaluated.get)
    assert best < max(evaluated)
    (at_best,) = [record for record in records if record["step"] == best and "eval/softmax_nll" in record]
    for name in ("eval/softmax_nll", "eval/reg_mdae"):
        assert result.metrics[name] == pytest.approx(at_best[name], rel=1e-5)


def test_checkpointed_and_bfloat16_activations_train_as_well(model, tmp_path):
    options = {"max_steps": 4, "validation_fraction": 0.0, "calibration_fraction": 0.0}
    for name, extra in (
        ("plain", {}),
        ("checkpointed", {"gradient_checkpointing": True}),
        ("bf16", {"bf16": True}),
    ):
        train(recipe(tmp_path, model, output=str(tmp_path / name), **options, **extra))
    plain, checkpointed, bf16 = (
        losses(tmp_path / name / "metrics.jsonl") for name in ("plain", "checkpointed", "bf16")
    )
    assert checkpointed == pytest.approx(plain, rel=1e-4)
    assert bf16 == pytest.approx(plain, rel=0.1)


def test_parameters_learn_at_their_own_rates(model, tmp_path, as_trained):
    """The first step of AdamW moves what has a gradient by the learning rate, whatever the gradient is."""
    options = {"max_steps": 1, "warmup": 0.0, "weight_decay": 0.0, "dtype": "float32"}
    rates = {"learning_rate": 1e-3, "heads_learning_rate": 0.25}
    train(recipe(tmp_path, model, output=str(tmp_path / "plain"), **options, **rates))
    before, after = weights(model), weights(tmp_path / "plain")
    moved = {name: (after[name] - tensor).abs().max().item() for name, tensor in before.items()}
    backbone = {name for name in before if name.startswith(("model.", "lm_head."))}
    for name in backbone:
        assert moved[name] == pytest.approx(1e-3, rel=0.01), name
    for name in ("action.threshold", "abduction.scale.bias"):
        assert moved[name] == pytest.approx(0.25, rel=0.01), name
    for name in ("abduction.loc.weight", "abduction.scale.weight", "abduction.common.weight"):
        assert moved[name] == pytest.approx(2e-5, rel=0.01), name
    assert moved["action.b_noise"] == moved["numeric_embedding.direction"] == 0

    options |= {"weight_decay": 0.5}
    train(recipe(tmp_path, model, output=str(tmp_path / "decayed"), **options, **rates))
    for name, tensor in weights(tmp_path / "decayed").items():
        if name not in before or name.startswith("action.number"):  # solved for
            continue
        shrunk = before[name].ndim == 2 and name in backbone
        expected = after[name] - 1e-3 * 0.5 * before[name] if shrunk else after[name]
        if shrunk or before[name].ndim < 2:
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7, msg=name)
