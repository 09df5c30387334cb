"""The tools that users already have: Trainer, pipeline, PEFT."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, pipeline

from causal_qwen import convert
from causal_qwen.conversion import bundled_text
from conftest import tiny_causal


class Copies(torch.utils.data.Dataset):
    """The same short sequence, so that a few steps can learn it."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.arange(10) + 40 + index % 2
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def train(model, directory, **options):
    arguments = TrainingArguments(
        output_dir=str(directory), report_to=[], use_cpu=True, logging_steps=1, save_strategy="no",
        disable_tqdm=True, lr_scheduler_type="constant", seed=0, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Copies(), eval_dataset=Copies())
    trainer.train()
    return trainer


def test_trainer_lowers_the_loss_and_evaluates(tmp_path):
    trainer = train(tiny_causal(), tmp_path, max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    predictions = trainer.predict(Copies())
    assert predictions.predictions.shape == (16, 10, 300), "only logits are gathered"
    assert predictions.metrics["test_loss"] > 0


def test_trainer_accumulation_equals_one_large_batch(tmp_path):
    options = {"max_steps": 3, "learning_rate": 1e-3, "optim": "sgd"}
    whole = train(tiny_causal(), tmp_path / "a", per_device_train_batch_size=8, **options)
    pieces = train(
        tiny_causal(), tmp_path / "b", per_device_train_batch_size=1, gradient_accumulation_steps=8, **options
    )
    for name, parameter in whole.model.named_parameters():
        torch.testing.assert_close(
            pieces.model.get_parameter(name), parameter, rtol=1e-4, atol=1e-5, msg=name
        )


def test_pipeline_generates_as_the_model_does(base_directory, tmp_path):
    convert(base_directory, tmp_path / "model", calibration_text=bundled_text("heldout"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    generate = pipeline("text-generation", model=str(tmp_path / "model"))
    text = generate("Hello", max_new_tokens=6, do_sample=False, return_full_text=True)[0]["generated_text"]
    ids = model.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=6, do_sample=False)
    assert text == tokenizer.decode(ids[0], skip_special_tokens=True)


def test_peft_wraps_trains_saves_and_merges(tmp_path, ids):
    peft = pytest.importorskip("peft")
    model = tiny_causal()
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["abduction", "action"]),
    )
    wrapped(ids, labels=ids).loss.backward()
    trained = {
        name for name, p in wrapped.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0
    }
    assert any("lora_B" in name for name in trained)
    assert any("abduction.modules_to_save" in name for name in trained)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "threshold" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.01)
    wrapped.eval().save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny_causal(), tmp_path).eval()
    expected = wrapped(ids, output_scores=True)
    for name in ("logits", "loc_U", "scale_U", "loc_S", "scale_S", "loc_Y"):
        torch.testing.assert_close(getattr(loaded(ids, output_scores=True), name), getattr(expected, name))
    merged = loaded.merge_and_unload()(ids, output_scores=True)
    torch.testing.assert_close(merged.loc_S, expected.loc_S, rtol=1e-4, atol=1e-4)
