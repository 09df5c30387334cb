"""convert(): a base checkpoint becomes a causal model that behaves exactly like it."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from causal_qwen.calibration import calibrate, text_features
from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion.checkpoints import read_checkpoint
from causal_qwen.conversion.files import atomic_directory
from causal_qwen.conversion.sources import FAMILIES, Base, ConversionError, load_base
from causal_qwen.conversion.vocabulary import NumToken, choose_num_token, with_num_row
from causal_qwen.directories import check_output_directory
from causal_qwen.heads import NUM_BIAS
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["REPORT_FILE", "CalibrationMode", "Conversion", "bundled_text", "convert"]

CalibrationMode = Literal["default", "published", "none"]
REPORT_FILE = "conversion.json"
# The constants of the original publication; they do not transfer (docs/theory/initialisation.md), and are
# kept to show it.
PUBLISHED = {"gamma_init": 10.0, "b_noise_init": 0.1, "ovr_threshold_init": 100.0}


@dataclass(frozen=True)
class Conversion:
    """A converted model, its processor, and what was done and measured.

    Args:
        model: In evaluation mode.
        processor: Reads digits as the base does, until training teaches the model values
            (``numbers="text"``).
        report: What `save` writes to conversion.json.
    """

    model: CausalLM
    processor: CausalQwen2Processor
    report: dict[str, Any]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The base's tokenizer, with <NUM>."""
        return self.processor.tokenizer

    def save(self, directory: str | Path, *, overwrite: bool = False) -> Path:
        """Write model, processor and report; the directory appears only when it is complete.

        Raises:
            FileExistsError: If it exists already and ``overwrite`` is False.
        """
        target = Path(directory)
        with atomic_directory(target, overwrite=overwrite) as temporary:
            self.model.save_pretrained(temporary)
            self.processor.save_pretrained(temporary)
            report = json.dumps(self.report, indent=2, ensure_ascii=False, sort_keys=True)
            (temporary / REPORT_FILE).write_text(report + "\n", encoding="utf-8")
        return target


def convert(
    source: str | Path | Base,
    output: str | Path | None = None,
    *,
    calibration: CalibrationMode = "default",
    calibration_text: str | None = None,
    causal_size: int | None = None,
    dtype: torch.dtype | str = "auto",
    seed: int = 0,
    overwrite: bool = False,
) -> Conversion:
    """Convert a base checkpoint of Qwen2, Qwen3 or Llama architecture.

    Args:
        source: "smollm2" (embedded), a local directory, a .gguf file, a hub id, or a loaded `Base`, left
            unchanged.
        output: Directory to write; None only returns the model.
        calibration: "default" fits balance, common cause, scale and gain; "published" sets the original
            constants; "none" leaves the configuration's.
        calibration_text: Text to calibrate on; None takes the bundled multilingual one.
        causal_size: D; None keeps D = H and shares W. A smaller D is the best rank-D approximation of W.
        dtype: Of the weights; "auto" keeps the base's. The heads are float32 always.
        seed: Of everything that is drawn.
        overwrite: Whether ``output`` may be replaced.

    Raises:
        ConversionError: If the source cannot be converted.
        FileExistsError: If ``output`` exists and ``overwrite`` is False.
    """
    if calibration not in get_args(CalibrationMode):
        raise ConversionError(
            f"calibration is {calibration!r}; choose one of {', '.join(get_args(CalibrationMode))}"
        )
    if output is not None:
        _check_output(Path(output), source, dtype, overwrite=overwrite)
    base = source if isinstance(source, Base) else load_base(source, dtype=dtype)
    num_token = choose_num_token(base.tokenizer, base.model.config.vocab_size)
    constants = PUBLISHED if calibration == "published" else {}
    model = _transfer(base, num_token, causal_size, constants, seed)
    report: dict[str, Any] = {
        "source": base.name,
        "seed": seed,
        "num_token_id": num_token.id,
        "rows_added": model.config.vocab_size - base.model.config.vocab_size,
        "added_parameters_fraction": added_parameters(model, base) / base.model.num_parameters(),
        "calibration": {"mode": calibration},
    }
    if calibration == "default":
        text = bundled_text("calibration") if calibration_text is None else calibration_text
        fitted = calibrate(model, text_features(model, num_token.tokenizer, text), seed=seed)
        report["calibration"] |= asdict(fitted) | {"text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    conversion = Conversion(model, CausalQwen2Processor(num_token.tokenizer, numbers="text"), report)
    if output is not None:
        conversion.save(output, overwrite=overwrite)
    return conversion


def bundled_text(name: Literal["calibration", "heldout"]) -> str:
    """A text that comes with the package: "calibration" to fit on, "heldout" to measure on."""
    return (
        importlib.resources.files("causal_qwen.conversion")
        .joinpath(f"{name}.txt")
        .read_text(encoding="utf-8")
    )


def added_parameters(model: CausalLM, base: Base) -> int:
    """Parameters that the causal model has and its base has not."""
    return int(model.num_parameters() - base.model.num_parameters())


def _check_output(
    output: Path, source: str | Path | Base, dtype: torch.dtype | str, *, overwrite: bool
) -> None:
    """Refuse an output that could not be written, before anything is loaded."""
    check_output_directory(output, overwrite=overwrite)
    if isinstance(source, Base):
        return
    checkpoint = read_checkpoint(source, base=True)
    if output.resolve() in (checkpoint.path.resolve(), *checkpoint.path.resolve().parents):
        raise ValueError(f"{output} holds the base itself; choose another place")
    # The heads and the configuration are a few percent more.
    check_output_directory(output, overwrite=overwrite, needed=round(1.05 * checkpoint.bytes(dtype)))


def _transfer(
    base: Base, num_token: NumToken, causal_size: int | None, constants: dict[str, float], seed: int
) -> CausalLM:
    """The causal model with the base's tensors (shared, except the vocabulary that gained <NUM>)."""
    tensors: dict[str, Tensor] = dict(base.model.state_dict())
    embedding = with_num_row(tensors["model.embed_tokens.weight"], num_token)
    tied = base.model.config.tie_word_embeddings
    head = embedding if tied else with_num_row(tensors["lm_head.weight"], num_token)
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    fields = base.model.config.to_dict() | constants
    for name in ("model_type", "architectures", "transformers_version", "_name_or_path"):
        fields.pop(name, None)
    fields |= {"vocab_size": len(embedding), "num_token_id": num_token.id, "causal_size": causal_size}
    family = FAMILIES[type(base.model)]
    config = family.config_class(**fields)
    if config.causal_size is not None and config.causal_size != config.hidden_size:
        tensors["abduction.loc.weight"], tensors["lm_head.weight"] = _rank(head, config.causal_size, seed)
    with _quiet_loading(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, info = family.from_pretrained(
            None, config=config, state_dict=tensors, dtype=base.model.dtype, output_loading_info=True
        )
    unexpected = [*info["unexpected_keys"], *info["mismatched_keys"]]
    if unexpected:
        raise ConversionError(f"{base.name}: tensors that do not fit: {', '.join(map(str, unexpected[:3]))}")
    with torch.no_grad():
        model.action.bias[num_token.id] = NUM_BIAS
    model.generation_config = base.model.generation_config
    model.to(base.model.device).eval()
    return cast(CausalLM, model)


def _rank(head: Tensor, causal_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """W_loc (D, H) and W' (V, D) with W'·W_loc the best rank-D approximation of W (V, H), and W itself from D
    = H on.

    The right singular vectors of W are the eigenvectors of WᵀW, an H × H matrix. Dimensions beyond H start
    with random W_loc and zero W', so that they say nothing yet but can learn.
    """
    hidden_size = head.shape[1]
    gram = torch.zeros(hidden_size, hidden_size, dtype=torch.float64, device=head.device)
    for block in head.split(8192):
        gram += block.double().T @ block.double()
    vectors = torch.linalg.eigh(gram).eigenvectors.flip(-1)  # (H, H), largest first
    basis = vectors[:, :causal_size]
    weight = torch.cat([block.double() @ basis for block in head.split(8192)])  # (V, min(D, H))
    extra = causal_size - basis.shape[1]
    if extra > 0:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(hidden_size, extra, generator=generator, dtype=torch.float64) / hidden_size**0.5
        basis = torch.cat([basis, noise.to(basis.device)], dim=1)
        weight = torch.cat([weight, weight.new_zeros(len(weight), extra)], dim=1)
    return basis.T.float().contiguous(), weight.to(head.dtype)


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without transformers' report on missing keys: the heads are missing from every base, by definition."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
