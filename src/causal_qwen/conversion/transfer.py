"""convert(): a base checkpoint becomes a causal model that behaves exactly like it."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from causal_qwen.calibration import calibrate, text_features
from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion.assembly import EMBEDDING, HEAD, Weights, assemble, quiet_transformers, weights_of
from causal_qwen.conversion.card import conversion_card
from causal_qwen.conversion.checkpoints import FAMILIES, WEIGHTS, read_checkpoint
from causal_qwen.conversion.files import atomic_directory
from causal_qwen.conversion.headers import ConversionError
from causal_qwen.conversion.sources import Base, BaseFiles, open_base
from causal_qwen.conversion.vocabulary import NumToken, choose_num_token, with_num_row
from causal_qwen.conversion.weights import parts_of, write_weights
from causal_qwen.directories import check_output_directory, check_space
from causal_qwen.heads import NUM_BIAS
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.progress import Watch, unwatched

__all__ = ["REPORT_FILE", "CalibrationMode", "Conversion", "bundled_text", "causal_config", "convert"]

CalibrationMode = Literal["default", "published", "none"]
REPORT_FILE = "conversion.json"
HEADS = ("numeric_embedding.", "abduction.", "action.")  # what a base has not
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

    def save(self, directory: str | Path, *, overwrite: bool = False, watch: Watch = unwatched) -> Path:
        """Write model, processor and report; the directory appears only when it is complete.

        Args:
            directory: To write.
            overwrite: Whether it may be replaced.
            watch: Told of writing.

        Raises:
            FileExistsError: If it exists already and ``overwrite`` is False.
        """
        target = Path(directory)
        with atomic_directory(target, overwrite=overwrite) as temporary:
            with quiet_transformers():
                self.model.save_pretrained(temporary, state_dict={})  # all but the weights
            tensors = {name: parts_of(tensor) for name, tensor in _distinct(self.model).items()}
            write_weights(temporary / WEIGHTS, tensors, watch=watch, phase="writing")
            self.processor.save_pretrained(temporary)
            report = json.dumps(self.report, indent=2, ensure_ascii=False, sort_keys=True)
            (temporary / REPORT_FILE).write_text(report + "\n", encoding="utf-8")
            (temporary / "README.md").write_text(conversion_card(self.report), encoding="utf-8")
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
    watch: Watch = unwatched,
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
        dtype: Of the weights; "auto" keeps the base's, as `BaseFiles.read` says. The heads are float32
            always.
        seed: Of everything that is drawn.
        overwrite: Whether ``output`` may be replaced.
        watch: Told of dequantising, reading, calibrating and writing.

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
    base = source if isinstance(source, Base) else open_base(source)
    # Before any weight is read: a tokenizer that does not fit should not cost minutes.
    num_token = choose_num_token(base.tokenizer, _config(base).vocab_size)
    weights = weights_of(base.model) if isinstance(base, Base) else base.read(dtype=dtype, watch=watch)
    name, base_rows, base_parameters = base.name, weights.config.vocab_size, weights.parameters
    del base  # with its tokenizer: a vocabulary is large
    constants = PUBLISHED if calibration == "published" else {}
    model = _transfer(name, weights, num_token, causal_size, constants, seed)
    report: dict[str, Any] = {
        "source": name,
        "seed": seed,
        "num_token_id": num_token.id,
        "replaced_token": num_token.replaced,
        "rows_added": model.config.vocab_size - base_rows,
        "added_parameters_fraction": added_fraction(model, base_parameters),
        "calibration": {"mode": calibration},
    }
    if calibration == "default":
        text = bundled_text("calibration") if calibration_text is None else calibration_text
        features = text_features(model, num_token.tokenizer, text, watch=watch)
        fitted = calibrate(model, features, seed=seed, watch=watch)
        report["calibration"] |= asdict(fitted) | {"text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    processor = CausalQwen2Processor(num_token.tokenizer, numbers="text")
    model.config.number_spelling = processor.spelling
    conversion = Conversion(model, processor, report)
    if output is not None:
        conversion.save(output, overwrite=overwrite, watch=watch)
    return conversion


def bundled_text(name: Literal["calibration", "heldout"]) -> str:
    """A text that comes with the package: "calibration" to fit on, "heldout" to measure on."""
    return (
        importlib.resources.files("causal_qwen.conversion")
        .joinpath(f"{name}.txt")
        .read_text(encoding="utf-8")
    )


def added_fraction(model: CausalLM, base_parameters: int) -> float:
    """Parameters that the causal model has and its base has not, relative to the base's."""
    return float(model.num_parameters() / base_parameters - 1)


def _config(base: Base | BaseFiles) -> PreTrainedConfig:
    return base.model.config if isinstance(base, Base) else base.config


def _distinct(model: CausalLM) -> dict[str, Tensor]:
    """The tensors of a model, one that goes by several names under the first of them."""
    tensors: dict[str, Tensor] = {}
    known = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in known:
            known.add(tensor.data_ptr())
            tensors[name] = tensor
    return tensors


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
    check_space(output, round(1.05 * checkpoint.bytes(dtype)))  # the heads are a few percent more


def causal_config(family: Any, base: PreTrainedConfig, *, num_token_id: int, **fields: Any) -> Any:
    """The configuration of the causal class ``family`` over a base of its kind.

    Args:
        family: A class that `FAMILIES` leads to.
        base: Of the class that leads to it; left unchanged.
        num_token_id: The row of <NUM>.
        **fields: Whatever differs from the base's, or is the causal configuration's own.
    """
    own = base.to_dict() | fields | {"num_token_id": num_token_id}
    for field in ("model_type", "architectures", "transformers_version", "_name_or_path"):
        own.pop(field, None)
    config = family.config_class(**own)
    config.dtype = base.dtype
    return config


def _transfer(
    name: str,
    weights: Weights,
    num_token: NumToken,
    causal_size: int | None,
    constants: dict[str, float],
    seed: int,
) -> CausalLM:
    """The causal model of the base's very tensors; <NUM> is set in place where there is a row for it."""
    tensors = weights.tensors
    for vocabulary in (EMBEDDING, HEAD):
        if vocabulary in tensors:
            tensors[vocabulary] = with_num_row(tensors.pop(vocabulary), num_token)
    family: Any = FAMILIES[weights.family]
    fields = constants | {"vocab_size": len(tensors[EMBEDDING]), "causal_size": causal_size}
    config = causal_config(family, weights.config, num_token_id=num_token.id, **fields)
    if config.causal_size is not None and config.causal_size != config.hidden_size:
        W = tensors[HEAD] if HEAD in tensors else tensors[EMBEDDING]
        tensors["abduction.loc.weight"], tensors[HEAD] = _rank(W, config.causal_size, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = assemble(name, family, config, tensors, new=HEADS)
    with torch.no_grad():
        model.action.bias[num_token.id] = NUM_BIAS
    model.generation_config = weights.generation_config
    model.to(tensors[EMBEDDING].device).eval()
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
    weight = head.new_zeros(len(head), causal_size)  # (V, D)
    for rows, block in zip(weight.split(8192), head.split(8192), strict=True):
        rows[:, : basis.shape[1]] = block.double() @ basis
    extra = causal_size - basis.shape[1]
    if extra > 0:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(hidden_size, extra, generator=generator, dtype=torch.float64) / hidden_size**0.5
        basis = torch.cat([basis, noise.to(basis.device)], dim=1)
    return basis.T.float().contiguous(), weight
