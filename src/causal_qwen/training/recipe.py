"""The recipe of a run: one flat record, read from YAML, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

__all__ = ["TRACKERS", "TrainingRecipe"]

TRACKERS = ("wandb", "tensorboard", "trackio")


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """What to train, on what, and how.

    Args:
        data: Files to train on: JSONL, JSON, CSV, TSV, Parquet or text; "package:NAME/PATH" is a file of an
            installed package. None when rows are handed to `train`.
        output: Directory of the trained model; it appears only when it is complete. The run itself lives
            beside it, in OUTPUT.run, until then.
        model: A converted directory, or a source such as smollm2, which is converted first.
        template: Makes a sentence of each row of a table.
        target: Field of the template with which the completion begins.
        validation: File to evaluate on; None takes ``validation_fraction`` of the data.
        validation_fraction: Share of the rows kept to evaluate on.
        calibration_fraction: Share of the rows kept to calibrate the intervals on.
        on_bad_row: "error" or "skip".
        streaming: Whether rows are read while training, for data larger than memory; needs ``max_steps`` and
            ``validation``.
        shuffle_buffer: Rows held to shuffle a stream.
        max_length: Tokens per row.
        packing: Whether several sequences share a row, without seeing one another.
        group_by_length: Whether batches hold rows of similar length.
        completion_only: Whether only completions are learned.
        append_eos: Whether each example ends with the end-of-text token.
        method: "full", "lora" or "heads" (only the causal heads, on features computed once).
        lora_rank: Rank of the adapters.
        lora_alpha: Their scale is alpha/rank.
        lora_dropout: Dropout on their input.
        learning_rate: Of backbone or adapters. The heads' matrices learn by a fiftieth of it, since they read
            features whose entries all move at once.
        heads_learning_rate: Of the heads' biases, thresholds and scales.
        weight_decay: Of matrices; vectors and norms have none.
        warmup: Share of the steps in which the learning rate rises; then it falls as a cosine.
        max_grad_norm: Longest gradient; longer ones are shortened to it. 0 shortens none.
        epochs: Passes over the data.
        max_steps: Steps instead of epochs.
        batch_size: Rows per step and process.
        accumulation: Batches per optimizer step.
        bf16: Whether the backbone computes in bfloat16; the heads never do.
        gradient_checkpointing: Whether activations are computed twice instead of kept.
        fsdp: Whether several processes share parameters (fully sharded) instead of holding copies; a method
            "full" without checkpoints.
        loss_impl: "fused" (exact), "sampled" (negatives drawn) or "reference" (dense).
        num_negatives: Tokens that "sampled" draws.
        reg_loss_weight: λ, the weight of the number loss.
        gate_alpha: α of the number gate. 1 trains numbers from the first step on; with 0 a number counts as
            much as it is expected, and loc_Y drifts away while <NUM> is still learned.
        classification_loss_weight: Weight of the One-vs-Rest loss, whose gradient is up to 1/scale_S.
        softmax_loss_weight: Weight of cross-entropy on the logits.
        value_space: "log" or "linear".
        number_start: How <NUM> and the number head start in a model that has never written numbers: "plain"
            sets loc_Y and the bias of <NUM> to 0 and scale_Y to 1; "fit" solves for them on features of the
            data, for a backbone that stays as it is (method "heads"): its slope does not survive moving ones.
        refit_numbers: Whether the number head is solved for once more when training ends, and kept if its
            leave-one-out error is the smaller one.
        early_stopping: Evaluations without improvement after which to stop; 0 never stops.
        eval_steps: Steps between evaluations; 0 evaluates at the end only.
        save_steps: Steps between checkpoints; 0 saves none.
        save_total_limit: Checkpoints kept.
        logging_steps: Steps between records.
        diagnostics: Whether statistics of activations and gradients are recorded.
        report_to: Trackers besides the local files: "wandb", "tensorboard", "trackio".
        run_name: Name of the run at the trackers.
        seed: Of everything that is drawn.
        dtype: Of the weights; "auto" keeps the model's own.
    """

    data: str | list[str] | None = None
    output: str
    model: str = "smollm2"
    template: str | None = None
    target: str | None = None
    validation: str | None = None
    validation_fraction: float = 0.1
    calibration_fraction: float = 0.1
    on_bad_row: Literal["error", "skip"] = "error"
    streaming: bool = False
    shuffle_buffer: int = 1000
    max_length: int = 512
    packing: bool = False
    group_by_length: bool = False
    completion_only: bool = True
    append_eos: bool = True
    method: Literal["full", "lora", "heads"] = "full"
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    learning_rate: float = 3e-5
    heads_learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.05
    max_grad_norm: float = 1.0
    epochs: float = 3.0
    max_steps: int | None = None
    batch_size: int = 8
    accumulation: int = 1
    bf16: bool = False
    gradient_checkpointing: bool = False
    fsdp: bool = False
    loss_impl: Literal["fused", "sampled", "reference"] = "fused"
    num_negatives: int = 4096
    reg_loss_weight: float = 1.0
    gate_alpha: float = 1.0
    classification_loss_weight: float = 0.01
    softmax_loss_weight: float = 1.0
    value_space: Literal["log", "linear"] = "log"
    number_start: Literal["fit", "plain"] = "plain"
    refit_numbers: bool = True
    early_stopping: int = 0
    eval_steps: int = 0
    save_steps: int = 500
    save_total_limit: int = 2
    logging_steps: int = 10
    diagnostics: bool = True
    report_to: list[str] = dataclasses.field(default_factory=list)
    run_name: str | None = None
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if not _fits(value, hints[one.name]):
                raise ValueError(f"{one.name} is {value!r}; {_expected(hints[one.name])}")
        for name in ("max_length", "batch_size", "accumulation", "logging_steps", "num_negatives"):
            _need(getattr(self, name) >= 1, self, name, "at least 1")
        for name in ("learning_rate", "heads_learning_rate", "epochs"):
            _need(getattr(self, name) > 0, self, name, "above 0")
        for name in ("validation_fraction", "calibration_fraction", "warmup"):
            _need(0 <= getattr(self, name) < 1, self, name, "at least 0 and below 1")
        for name in ("eval_steps", "save_steps", "early_stopping", "weight_decay", "max_grad_norm"):
            _need(getattr(self, name) >= 0, self, name, "at least 0")
        _need(self.max_steps is None or self.max_steps >= 1, self, "max_steps", "at least 1")
        _need(
            self.validation_fraction + self.calibration_fraction < 1, self, "calibration_fraction",
            f"such that with validation_fraction {self.validation_fraction} rows are left to train on",
        )  # fmt: skip
        _need(not self.early_stopping or self.eval_steps > 0, self, "early_stopping", "0 without eval_steps")
        _need(not self.target or bool(self.template), self, "target", "a field of a template; give one")
        unknown = [name for name in self.report_to if name not in TRACKERS]
        _need(not unknown, self, "report_to", f"of {', '.join(TRACKERS)}")
        if self.fsdp:
            _need(self.method == "full", self, "method", "full: adapters and heads are too small to shard")
            _need(self.save_steps == 0, self, "save_steps", "0: a sharded run keeps no checkpoints")
        if self.streaming:
            _need(self.max_steps is not None, self, "max_steps", "set, because a stream has no known length")
            _need(
                self.validation is not None, self, "validation", "a file: a stream cannot be split at random"
            )
            _need(self.method != "heads", self, "method", "full or lora: a stream's features are not kept")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str = "recipe") -> TrainingRecipe:
        """A recipe from names and values.

        Raises:
            ValueError: If a name is not known (the nearest is named) or a value has no meaning.
        """
        names = [one.name for one in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{source}: unknown key {name!r}{hint}")
        if "output" not in values:
            raise ValueError(f"{source}: output is missing; name the directory of the trained model")
        hints = typing.get_type_hints(cls)
        return cls(**{name: _number(value, hints[name]) for name, value in values.items()})

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> TrainingRecipe:
        """A recipe from a file, with ``overrides`` above it.

        Raises:
            ValueError: If the file is missing, is no mapping, or holds an unknown key or a bad value.
        """
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError:
            raise ValueError(f"{path}: no such file") from None
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: broken YAML: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path}: a recipe is a mapping of names to values")
        return cls.from_mapping(values | overrides, source=str(path))

    def to_yaml(self) -> str:
        """The whole recipe, defaults included."""
        return str(yaml.safe_dump(dataclasses.asdict(self), sort_keys=False, allow_unicode=True))


def _need(holds: bool, recipe: TrainingRecipe, name: str, what: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {getattr(recipe, name)!r}; it must be {what}")


def _number(value: Any, hint: Any) -> Any:
    """YAML reads 1e-4 as a text (it wants 1.0e-4); where a number is expected, the text is taken as one."""
    if isinstance(value, str) and float in (hint, *typing.get_args(hint)):
        try:
            return float(value)
        except ValueError:
            return value
    return [value] if hint == list[str] and isinstance(value, str) else value


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


def _expected(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return f"choose one of {', '.join(map(repr, typing.get_args(hint)))}"
    return f"expected is {getattr(hint, '__name__', None) or hint}"
