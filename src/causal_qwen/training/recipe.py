"""The recipe of a run: one flat record, read from YAML, checked before anything is loaded.

The annotations are evaluated (no `from __future__ import annotations`): `strict` checks values against them.
"""

import dataclasses
import difflib
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from huggingface_hub.dataclasses import strict, validated_field
from huggingface_hub.errors import StrictDataclassError

from causal_qwen.data.settings import read_settings

__all__ = ["TrainingRecipe"]


def _rule(holds: Callable[[Any], bool], remedy: str) -> Callable[[Any], None]:
    """A validator of one field, which names the value and what would be right."""

    def check(value: Any) -> None:
        if value is not None and not holds(value):
            raise ValueError(f"{value!r} does not serve; it must be {remedy}")

    return check


COUNT = _rule(lambda value: value >= 1, "at least 1")
POSITIVE = _rule(lambda value: 0 < value < math.inf, "above 0")
NOT_NEGATIVE = _rule(lambda value: 0 <= value < math.inf, "at least 0")
FINITE = _rule(math.isfinite, "a finite number")
SEED = _rule(lambda value: 0 <= value < 2**32, "at least 0 and below 2³²")
NOT_BLANK = _rule(lambda value: bool(value.strip()), "a name")
SHARE_OR_NONE = _rule(lambda value: value is None or 0 <= value < 1, "at least 0 and below 1, or None")
SHARE = _rule(lambda value: 0 <= value < 1, "at least 0 and below 1")
SENTENCES = _rule(lambda value: value not in ("", []), "a sentence with fields, or a list of them")
PARTS = _rule(all, "a list of parts of parameters' names")
LONGEST_MESSAGE = 400  # characters; a value may be a page long
TRACKERS = ("wandb", "tensorboard", "trackio")
TRACKED = _rule(lambda names: set(names) <= set(TRACKERS), f"a list of {', '.join(TRACKERS)}")


@strict
@dataclass(kw_only=True)
class TrainingRecipe:
    """What to train, on what, and how.

    Args:
        data: Files to train on: JSONL, JSON, CSV, TSV, Parquet or text; "package:NAME/PATH" is a file of an
            installed package. A suffix .gz is decompressed. None when rows are handed to `train`.
        output: Directory of the trained model; it appears only when it is complete. The run itself lives
            beside it, in OUTPUT.run, until then.
        model: A converted directory, or a source such as smollm2, which is converted first.
        template: Makes a sentence of each row of a table. Of several, one is drawn for each row, by ``seed``,
            so that no single wording is learned; predictions are made with the first.
        target: Field of the template with which the completion begins: a number in every row, unless the
            template writes it as text, {target!s}.
        numbers: How numbers are read: "written" leaves the digits of prompts to the base and makes values of
            what is learned, completions and the assistant's turns; "value" makes values of all. None keeps
            the reading of a model that was trained before, and is "written" for one that was not.
        delimiter: Between the cells of CSV files; None takes a tab in .tsv, else a comma, or what separates a
            header that has no comma.
        encoding: Of the data's text, such as latin-1; None is UTF-8.
        validation: File to evaluate on; None takes ``validation_fraction`` of the data.
        validation_fraction: Share of the rows kept to evaluate on.
        calibration_fraction: Share of the rows kept to calibrate the intervals on. None keeps a tenth where a
            backbone is trained, and none with method "heads", whose left-out residuals calibrate.
        on_bad_row: "error" or "skip".
        streaming: Whether rows are read while training, for data larger than memory; needs ``max_steps`` and
            ``validation``.
        shuffle_buffer: Rows kept in memory to shuffle a stream.
        max_length: Tokens per row.
        packing: Whether several sequences share a row, without seeing one another.
        group_by_length: Whether batches hold rows of similar length.
        completion_only: Whether only completions are learned.
        append_eos: Whether each example ends with the end-of-text token.
        method: "full", "lora" or "heads" (only the causal heads, on features computed once: seconds, and on
            small tables no worse). None is "heads" for a table with a target, else "full".
        lora_rank: Rank of the adapters.
        lora_alpha: Their scale is alpha/rank.
        lora_dropout: Dropout on their input.
        hold: Parameters that stay as they are: those whose name contains one of these, such as embed_tokens.
            What is solved for when training ends is set all the same, but for rows of W.
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
        fsdp: Whether several processes share parameters (fully sharded) instead of holding copies, and write
            checkpoints together, which any number of processes can go on from; methods "full" and "lora".
        loss_impl: "fused" (exact), "sampled" (negatives drawn) or "reference" (dense).
        num_negatives: Tokens that "sampled" draws.
        reg_loss_weight: λ, the weight of the number loss.
        gate_alpha: α of the number gate. 1 trains numbers from the first step on; with 0 a number counts as
            much as it is expected, and loc_Y drifts away while <NUM> is still learned.
        classification_loss_weight: Weight of the One-vs-Rest loss, whose gradient is up to 1/scale_S.
        softmax_loss_weight: Weight of cross-entropy on the logits.
        ovr_gradient_bound: What the One-vs-Rest gradient of each score is cut off at; None leaves it, up to
            1/scale_S.
        ovr_rivals: How many words stand against a label in the One-vs-Rest loss, the highest, under a law
            of one scale for all; None is all words, under scale_S.
        ovr_rival_scale: That scale, in nats.
        value_space: "log" or "linear".
        solve_steps: Steps between two solutions of the number head, which with a backbone that learns is not
            trained but solved for on the latest features (methods "full" and "lora").
        precision_proof: Whether the number head leaves alone what bfloat16 and int8 change in the features,
            which is measured on 32 rows.
        interval_groups: Groups of numbers, divided by what is predicted, that have calibrated intervals of
            their own; as many as have 20 numbers each.
        refit_words: Whether the width of scale_S and a common shift of C are solved for once more when
            training ends, for running text: rows whose every label is certain would make scales vanish.
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

    Raises:
        StrictDataclassError: If a value has no meaning; it names the field, the value and the remedy.
    """

    data: str | list[str] | None = None
    output: str = validated_field(NOT_BLANK)
    model: str = validated_field(NOT_BLANK, default="smollm2")
    template: str | list[str] | None = validated_field(SENTENCES, default=None)
    target: str | None = None
    numbers: Literal["written", "value"] | None = None
    delimiter: str | None = None
    encoding: str | None = None
    validation: str | None = None
    validation_fraction: float | int = validated_field(SHARE, default=0.1)
    calibration_fraction: float | int | None = validated_field(SHARE_OR_NONE, default=None)
    on_bad_row: Literal["error", "skip"] = "error"
    streaming: bool = False
    shuffle_buffer: int = validated_field(COUNT, default=1000)
    max_length: int = validated_field(COUNT, default=512)
    packing: bool = False
    group_by_length: bool = False
    completion_only: bool = True
    append_eos: bool = True
    method: Literal["full", "lora", "heads"] | None = None
    lora_rank: int = validated_field(COUNT, default=16)
    lora_alpha: float | int = validated_field(POSITIVE, default=32.0)
    lora_dropout: float | int = validated_field(SHARE, default=0.0)
    hold: list[str] = validated_field(PARTS, default_factory=list)
    learning_rate: float | int = validated_field(POSITIVE, default=3e-5)
    heads_learning_rate: float | int = validated_field(POSITIVE, default=1e-3)
    weight_decay: float | int = validated_field(NOT_NEGATIVE, default=0.01)
    warmup: float | int = validated_field(SHARE, default=0.05)
    max_grad_norm: float | int = validated_field(NOT_NEGATIVE, default=1.0)
    epochs: float | int = validated_field(POSITIVE, default=3.0)
    max_steps: int | None = validated_field(COUNT, default=None)
    batch_size: int = validated_field(COUNT, default=8)
    accumulation: int = validated_field(COUNT, default=1)
    bf16: bool = False
    gradient_checkpointing: bool = False
    fsdp: bool = False
    loss_impl: Literal["fused", "sampled", "reference"] = "fused"
    num_negatives: int = validated_field(COUNT, default=4096)
    reg_loss_weight: float | int = validated_field(NOT_NEGATIVE, default=1.0)
    gate_alpha: float | int = validated_field(FINITE, default=1.0)
    classification_loss_weight: float | int = validated_field(NOT_NEGATIVE, default=0.01)
    softmax_loss_weight: float | int = validated_field(NOT_NEGATIVE, default=1.0)
    ovr_gradient_bound: float | int | None = validated_field(POSITIVE, default=None)
    ovr_rivals: int | None = validated_field(COUNT, default=None)
    ovr_rival_scale: float | int = validated_field(POSITIVE, default=0.05)
    value_space: Literal["log", "linear"] = "log"
    solve_steps: int = validated_field(COUNT, default=2)
    precision_proof: bool = True
    interval_groups: int = validated_field(COUNT, default=1)
    refit_words: bool = False
    early_stopping: int = validated_field(NOT_NEGATIVE, default=0)
    eval_steps: int = validated_field(NOT_NEGATIVE, default=0)
    save_steps: int = validated_field(NOT_NEGATIVE, default=500)
    save_total_limit: int = validated_field(COUNT, default=2)
    logging_steps: int = validated_field(COUNT, default=10)
    diagnostics: bool = True
    report_to: list[str] = validated_field(TRACKED, default_factory=list)
    run_name: str | None = None
    seed: int = validated_field(SEED, default=0)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self) -> None:
        """Defaults that depend on what is learned."""
        if self.method is None:
            self.method = "heads" if self.target and not (self.streaming or self.fsdp) else "full"
        if self.calibration_fraction is None:
            self.calibration_fraction = 0.0 if self.method == "heads" else 0.1

    @property
    def share_to_calibrate(self) -> float:
        """``calibration_fraction``, which is known once a recipe is made."""
        return self.calibration_fraction or 0.0

    def validate_combinations(self) -> None:
        """Rules about several fields, which `strict` checks after those about one."""
        if self.validation_fraction + self.share_to_calibrate >= 1:
            raise ValueError(
                f"calibration_fraction is {self.calibration_fraction}; with validation_fraction "
                f"{self.validation_fraction} no rows are left to train on: lower one of them"
            )
        if self.early_stopping and not self.eval_steps:
            raise ValueError(f"early_stopping is {self.early_stopping}; it needs eval_steps above 0")
        if self.target and not self.template:
            raise ValueError(f"target is {self.target!r}; it is a field of a template: give one")
        if self.fsdp and self.method == "heads":
            remedy = "with fsdp it must be full or lora: the heads are too small to shard"
            raise ValueError(f"method is {self.method!r}; {remedy}")
        if self.refit_words and self.method == "heads":
            remedy = (
                "with heads it must be false: it moves scale_U, which the solved intervals are measured in"
            )
            raise ValueError(f"refit_words is {self.refit_words}; {remedy}")
        if self.streaming and self.max_steps is None:
            remedy = "with streaming it must be set, because a stream has no known length"
            raise ValueError(f"max_steps is None; {remedy}")
        if self.streaming and self.validation is None:
            remedy = "with streaming it must be a file: a stream cannot be split at random"
            raise ValueError(f"validation is None; {remedy}")
        if self.streaming and self.method == "heads":
            remedy = "with streaming it must be full or lora: a stream's features are not kept"
            raise ValueError(f"method is 'heads'; {remedy}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str = "recipe") -> Self:
        """A recipe from names and values.

        Raises:
            ValueError: If a name is not known (the nearest is named) or a value has no meaning.
        """
        types = {entry.name: entry.type for entry in dataclasses.fields(cls)}
        for name in values:
            if name not in types:
                near = difflib.get_close_matches(str(name), types, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{source}: unknown key {name!r}{hint}")
        if "output" not in values:
            raise ValueError(f"{source}: output is missing; name the directory of the trained model")
        try:
            return cls(**{name: _from_yaml(value, types[name]) for name, value in values.items()})
        except StrictDataclassError as error:
            heading = str(error).partition("\n")[0]  # names the field
            reason = " ".join(f"{heading} {error.__cause__}".split())
            raise ValueError(f"{source}: {textwrap.shorten(reason, LONGEST_MESSAGE)}") from None

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> Self:
        """A recipe from a file, with ``overrides`` above it.

        Raises:
            ValueError: If the file is missing, is no mapping, or holds an unknown key or a bad value.
        """
        values = read_settings(path)
        return cls.from_mapping(values | overrides, source=str(path))

    def to_yaml(self) -> str:
        """The whole recipe, defaults included."""
        return str(yaml.safe_dump(dataclasses.asdict(self), sort_keys=False, allow_unicode=True))


def _from_yaml(value: Any, annotation: Any) -> Any:
    """YAML reads 1e-4 as a text (it wants 1.0e-4); where a number is expected, the text is taken as one."""
    if isinstance(value, str) and float in get_args(annotation):
        try:
            return float(value)
        except ValueError:
            return value
    return [value] if annotation == list[str] and isinstance(value, str) else value
