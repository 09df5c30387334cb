"""Out again: the softmax view of a causal model, for programs that know only its base's family.

What cannot be kept is refused unless the caller says that it may go; what has gone is told by a card. This
module does not know how a GGUF file is laid out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion.assembly import quiet_transformers
from causal_qwen.conversion.checkpoints import WEIGHTS
from causal_qwen.conversion.files import atomic_directory, disk_errors, write_file
from causal_qwen.conversion.gguf_writing import BIASED, Kind, splitting, write_gguf
from causal_qwen.conversion.headers import ConversionError
from causal_qwen.conversion.softmax_view import SoftmaxView, as_llama, softmax_view
from causal_qwen.conversion.weights import parts_of, write_weights
from causal_qwen.directories import check_output_directory, check_output_file
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.progress import Watch, unwatched

__all__ = ["Export", "ExportFormat", "export"]

ExportFormat = Literal["hf", "gguf"]


@dataclass(frozen=True)
class Export:
    """What was written, and what it no longer has.

    Args:
        output: Directory or file.
        format: "hf" or "gguf".
        kind: Of the matrices of a GGUF file.
        architecture: Of the plain model.
        vocab_size: Rows of its vocabulary.
        dropped: One sentence for each thing that the causal model had.
    """

    output: str
    format: ExportFormat
    kind: Kind | None
    architecture: str
    vocab_size: int
    dropped: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def export(
    model: CausalLM,
    processor: CausalQwen2Processor,
    output: str | Path,
    *,
    to: ExportFormat = "hf",
    kind: Kind = "f16",
    drop_numbers: bool = False,
    drop_biases: bool = False,
    overwrite: bool = False,
    watch: Watch = unwatched,
) -> Export:
    """Write softmax(W'z + b') as a plain Qwen2 or Qwen3 model; one whose tokenizer is not Qwen's as Llama in
    "hf", whose tokenizers transformers leaves as they are.

    Args:
        model: Converted or trained.
        processor: Its processor.
        output: A directory for "hf", a .gguf file for "gguf"; it appears only when it is complete.
        to: "hf", a directory of transformers, or "gguf", a file of llama.cpp.
        kind: Of the matrices of a GGUF file: "f32", "f16" or "q8_0".
        drop_numbers: Whether a model that has learned to write numbers may lose them.
        drop_biases: Whether learned biases of tokens may be lost where the format has no place for them.
        overwrite: Whether ``output`` may be replaced.
        watch: Told of writing.

    Raises:
        ConversionError: If something would be lost that was not allowed to go, or the format cannot hold the
            tokenizer.
        FileExistsError: If ``output`` exists and ``overwrite`` is False.
    """
    target = Path(output)
    _check_request(target, to, kind, overwrite=overwrite)
    if model.writes_numbers and not drop_numbers:
        raise ConversionError(
            "this model has learned to write numbers as values, which a plain model cannot; "
            "drop_numbers=True (--drop-numbers) exports its words alone"
        )
    view = softmax_view(model, processor.tokenizer)
    if to == "hf" and view.config.model_type == "qwen2" and not _splits_as_qwen(view):
        view = as_llama(view)
    keeps_bias = to == "gguf" and view.config.model_type in BIASED
    if view.bias is not None and not keeps_bias and not drop_biases:
        place = "GGUF's qwen3" if to == "gguf" else "transformers' plain model"
        raise ConversionError(
            f"{int(view.bias.count_nonzero())} tokens have a learned bias of up to "
            f"{float(view.bias.abs().max()):.3g} nats, and {place} has no place for it; "
            f"{'' if to == 'gguf' else 'export to gguf, or '}drop_biases=True (--drop-biases) leaves them out"
        )
    dropped = _dropped(model, view, keeps_bias=keeps_bias)
    architecture = view.family.__name__
    report = Export(
        str(target), to, kind if to == "gguf" else None, architecture, view.config.vocab_size, dropped
    )
    if to == "hf":
        _write_directory(target, view, report, overwrite=overwrite, watch=watch)
    else:
        _write_file(target, view, report, kind, watch=watch)
    return report


def _check_request(target: Path, to: str, kind: str, *, overwrite: bool) -> None:
    """Refuse what could not be written, before anything is computed."""
    if to not in get_args(ExportFormat):
        raise ConversionError(f"to is {to!r}; choose one of {', '.join(get_args(ExportFormat))}")
    if kind not in get_args(Kind):
        raise ConversionError(f"kind is {kind!r}; choose one of {', '.join(get_args(Kind))}")
    if to == "hf":
        check_output_directory(target, overwrite=overwrite)
        return
    if target.suffix != ".gguf":
        raise ConversionError(f"{target}: name a file that ends in .gguf")
    check_output_file(target, overwrite=overwrite)


def _splits_as_qwen(view: SoftmaxView) -> bool:
    return splitting(json.loads(view.tokenizer.backend_tokenizer.to_str())) == "qwen2"


def _dropped(model: CausalLM, view: SoftmaxView, *, keeps_bias: bool) -> tuple[str, ...]:
    config: Any = model.config
    gone = [
        "Causes: individuals, the modes standard and causal, counterfactuals and One-vs-Rest probabilities.",
    ]
    if model.writes_numbers:
        gone.append("Numbers: it writes no <NUM>, has no values and no intervals.")
    elif config.num_token_id is not None:
        gone.append("The number channel, which had not been trained.")
    if view.bias is not None and not keeps_bias:
        gone.append(
            f"Biases of {int(view.bias.count_nonzero())} tokens, up to {view.bias.abs().max():.3g} nats."
        )
    return tuple(gone)


def _write_directory(
    target: Path, view: SoftmaxView, report: Export, *, overwrite: bool, watch: Watch
) -> None:
    with atomic_directory(target, overwrite=overwrite) as temporary:
        with quiet_transformers():
            view.config.save_pretrained(temporary)
            view.generation_config.save_pretrained(temporary)
            view.tokenizer.save_pretrained(temporary)
        tensors = {name: parts_of(tensor) for name, tensor in view.tensors.items()}
        write_weights(temporary / WEIGHTS, tensors, watch=watch, phase="writing")
        (temporary / "README.md").write_text(_card(report), encoding="utf-8")


def _write_file(target: Path, view: SoftmaxView, report: Export, kind: Kind, *, watch: Watch) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial.gguf")
    try:
        with disk_errors(target):
            write_gguf(partial, view, kind=kind, description=" ".join(report.dropped), watch=watch)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    write_file(target.with_suffix(".md"), _card(report))


def _card(report: Export) -> str:
    """What the files are, and what they no longer have."""
    gone = "\n".join(f"- {sentence}" for sentence in report.dropped)
    use = (
        'AutoModelForCausalLM.from_pretrained("DIRECTORY")'
        if report.format == "hf"
        else f"llama-cli -m {Path(report.output).name}"
    )
    return f"""---
library_name: {"transformers" if report.format == "hf" else "gguf"}
pipeline_tag: text-generation
---

# The softmax view of a CausalQwen model

A plain `{report.architecture}` with {report.vocab_size} rows of vocabulary, written by `causal-qwen export`.
Its logits are those of the causal model in the mode `compatible`. Use it as any other: `{use}`.

It no longer has:

{gone}
"""
