"""What a checkpoint is, in words: where it comes from, how precise it is, and what its constants mean.

Read from JSON and the headers of its weights, and from the few small tensors that hold the constants.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from torch import Tensor

from causal_qwen.cauchy import magnitude
from causal_qwen.conversion.checkpoints import Checkpoint, read_checkpoint
from causal_qwen.conversion.headers import ConversionError, TensorHeader, read_gguf_header, read_json_object
from causal_qwen.conversion.loading import load_processor
from causal_qwen.conversion.sources import load_tokenizer
from causal_qwen.conversion.transfer import REPORT_FILE
from causal_qwen.heads import AbductionNetwork, exact

__all__ = ["describe"]

HEADS = ("abduction.", "action.", "numeric_embedding.")
CONSTANTS = {"scale": "abduction.scale.bias", "threshold": "action.threshold", "b_noise": "action.b_noise"}
EVALUATION_FILE, RECIPE_FILE = "evaluation.json", "recipe.yaml"
NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MEANINGS = {
    "inference_mode": "how words are chosen where nothing else is asked for",
    "gamma (γ)": "width of the cause: how unsure the model is, after the text so far, of what speaks next; "
    "small makes decisions sharp. The median over its dimensions",
    "noise_gain (κ)": "how far sampling moves the cause, in units of its width; calibrated so that at "
    "temperature 1 the favourite word comes as often as in softmax sampling",
    "threshold (C)": "what a word's score has to exceed: P(word) is the probability that it does. The median "
    "over the vocabulary",
    "b_noise": "width of the noise from outside, which widens the cause or, sampled, moves it; "
    "calibration splits the width evenly between γ and this. The median over its dimensions",
    "persistence (ρ)": "share of an individual's noise that stays from word to word: 0 is new for each "
    "word, 1 the same throughout",
    "density_floor": "noise less dense than this share of its peak is never drawn; 0 draws every tail",
}

READINGS = {
    "text": "digits, as the base reads and writes them",
    "value": "values, in prompts and in what is written",
    "written": "digits in prompts, values in what is written",
}


def describe(source: str | Path) -> dict[str, dict[str, Any]]:
    """Sections of facts on any source that `convert` takes, or on a converted model.

    Raises:
        ConversionError: If it is missing, damaged or incomplete: its weights are checked by their headers.
    """
    checkpoint = read_checkpoint(source)
    if checkpoint.is_causal:
        return _describe_causal(checkpoint)
    provenance: dict[str, Any] = {"source": checkpoint.source, "kind": "a base, not converted yet"}
    if checkpoint.path.is_file():
        metadata = read_gguf_header(checkpoint.path, checkpoint.source).metadata
        provenance |= {"name": metadata.get("general.name"), "file": checkpoint.path.name}
        tokens, template = metadata.get("tokenizer.ggml.tokens"), "tokenizer.chat_template" in metadata
    else:
        tokenizer = load_tokenizer(checkpoint.source, checkpoint.path)
        tokens, template = len(tokenizer), tokenizer.chat_template is not None
    provenance |= {"files written": _date(checkpoint.path), "next": f"causal-qwen convert {source} OUT"}
    return {
        "provenance": provenance,
        "architecture": _architecture(checkpoint),
        "precision": {"weights": _precision(checkpoint.tensors.values())},
        "parameters": {"total": checkpoint.parameters},
        "tokenizer": {"tokens": tokens, "chat template": template},
    }


def _describe_causal(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    config, directory = checkpoint.config, checkpoint.path
    processor = load_processor(checkpoint.source)
    report = _optional(directory / REPORT_FILE, checkpoint.source)
    heads = {name: header for name, header in checkpoint.tensors.items() if name.startswith(HEADS)}
    backbone = [header for name, header in checkpoint.tensors.items() if name not in heads]
    added = sum(header.numel for header in heads.values())
    return {
        "provenance": _provenance(checkpoint, report),
        "architecture": _architecture(checkpoint) | {"causal_size (D)": config["causal_size"]},
        "precision": {"backbone": _precision(backbone), "causal heads": _precision(heads.values())},
        "parameters": {
            "total": checkpoint.parameters,
            "causal heads": added,
            "added fraction": report.get("added_parameters_fraction", added / checkpoint.parameters),
        },
        "tokenizer": {
            "tokens": len(processor.tokenizer),
            "chat template": processor.chat_template is not None,
        },
        "law": _law(checkpoint),
        "calibration": report.get("calibration", {"mode": "unknown: no conversion.json there"}),
        "numbers": {"read as": processor.numbers, "that is": READINGS[processor.numbers]}
        | {
            name: config[name]
            for name in ("num_token_id", "numeric_encoding", "value_space", "value_center", "value_spread")
        },
        "intervals": _intervals(config),
    }


def _provenance(checkpoint: Checkpoint, report: dict[str, Any]) -> dict[str, Any]:
    """Converted from what, trained on what, as far as the directory says."""
    directory = checkpoint.path
    facts: dict[str, Any] = {"source": checkpoint.source}
    metrics = _optional(directory / EVALUATION_FILE, checkpoint.source)
    recipe = _recipe(directory / RECIPE_FILE, checkpoint.source)
    if recipe or metrics:
        facts |= {
            "kind": "a trained model",
            "trained from": recipe.get("model", "unknown"),
            "trained on": recipe.get("data", "unknown"),
            "method": recipe.get("method", "full"),
        }
        facts |= {name: metrics[name] for name in ("train/steps", "train/rows") if name in metrics}
    else:
        facts |= {"kind": "a converted model", "converted from": report.get("source", "unknown")}
    present = [name for name in (REPORT_FILE, RECIPE_FILE, EVALUATION_FILE) if (directory / name).is_file()]
    return facts | {"reports": ", ".join(present) or "none", "files written": _date(directory)}


def _architecture(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    heads = config["num_attention_heads"]
    return {
        "model_type": config["model_type"],
        "layers": config["num_hidden_layers"],
        "hidden_size (H)": config["hidden_size"],
        "vocab_size (V)": config["vocab_size"],
        "heads / kv heads": f"{heads} / {config.get('num_key_value_heads', heads)}",
        "context": config.get("max_position_embeddings"),
        "W tied to the embedding": config.get("tie_word_embeddings", False),
    }


def _law(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Each constant of the law, as it is in the weights, and what it means."""
    config, constants = checkpoint.config, _constants(checkpoint)
    network = AbductionNetwork(1, 1, scale_activation=config["scale_activation"])
    with torch.no_grad():
        values = {
            "inference_mode": config["inference_mode"],
            "gamma (γ)": network.activation(exact(constants["scale"])).median().item(),
            "noise_gain (κ)": config["noise_gain"],
            "threshold (C)": constants["threshold"].median().item(),
            "b_noise": magnitude(constants["b_noise"]).median().item(),
            "persistence (ρ)": config["persistence"],
            "density_floor": config["density_floor"],
        }
    return {name: {"value": value, "meaning": MEANINGS[name]} for name, value in values.items()}


def _constants(checkpoint: Checkpoint) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in checkpoint.path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            here = set(tensors.keys())
            found |= {name: tensors.get_tensor(full) for name, full in CONSTANTS.items() if full in here}
    return found


def _intervals(config: dict[str, Any]) -> dict[str, Any]:
    """How intervals of numbers are made, and up to which level they are calibrated."""
    scores, folds = config["conformal_scores"], config.get("conformal_folds")
    groups = config.get("conformal_groups")
    if not scores:
        return {
            "calibrated": False,
            "method": "quantiles of the Cauchy law, not calibrated on data; training calibrates them",
        }
    count = len(scores)
    return {
        "calibrated": True,
        "method": f"{'split conformal' if folds is None else 'CV+'}: they cover what they say, on data like "
        "that of training",
        "numbers set aside" if folds is None else "numbers left out in turn": count,
        **({"groups by what is predicted": max(groups) + 1} if groups else {}),
        "covers levels up to": _highest(min(Counter(groups).values()) if groups else count),
    }


def _highest(count: int) -> float:
    return count / (count + 1)


def _precision(headers: Iterable[TensorHeader]) -> str:
    """The types of the weights, the commonest first: "float32", or "Q4_1 75%, Q8_0 25%"."""
    counts: Counter[str] = Counter()
    for header in headers:
        counts[NAMES.get(header.dtype, header.dtype)] += header.numel
    total = counts.total()
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} {count / total:.2%}" for name, count in counts.most_common())


def _optional(file: Path, source: str) -> dict[str, Any]:
    return read_json_object(file, source) if file.is_file() else {}


def _recipe(file: Path, source: str) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).split("\n")[0]
        raise ConversionError(
            f"{source}: {file.name} is damaged ({reason}); delete it or fetch it"
        ) from error
    return recipe if isinstance(recipe, dict) else {}


def _date(path: Path) -> str:
    file = path / "config.json" if path.is_dir() else path
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime))
