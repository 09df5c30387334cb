"""The known training names: a small loop, the loss on given scores, and what to look at while it runs.

For data, mixed precision, evaluation and checkpoints use transformers' Trainer: the model is one of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from causal_qwen.cauchy import Cauchy
from causal_qwen.conversion.files import atomic_directory
from causal_qwen.heads import exact
from causal_qwen.losses import IGNORE_INDEX, ovr_terms
from causal_qwen_mvp.models import CausalQwen2Config, CausalQwenMVPForCausalLM

__all__ = ["CausalTrainer", "LossComputer", "TrainingValidator"]

Batch = Mapping[str, Tensor]
LEARNING_RATE = 1e-4
PENALTY = 1e-5
STATE_FILE = "training_state.pt"


class CausalTrainer:
    """A plain training loop. Modern: transformers' ``Trainer``.

    Args:
        model: Trained in place.
        optimizer: AdamW at 1e-4 over everything trainable by default.
        scheduler: Stepped after each batch.
        device: Where to train; where the model is by default.
        gradient_clip_val: Largest norm of a gradient; 0 clips nothing.
        tokenizer: Saved beside the model by `fit`.
    """

    def __init__(
        self,
        model: CausalQwenMVPForCausalLM,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        device: str | torch.device | None = None,
        gradient_clip_val: float = 1.0,
        *,
        tokenizer: Any = None,
    ) -> None:
        self.model = model if device is None else model.to(device)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE) if optimizer is None else optimizer
        self.scheduler = scheduler
        self.gradient_clip_val = gradient_clip_val
        self.tokenizer = tokenizer
        self.global_step = 0
        self.loss_history: list[float] = []

    def training_step(self, batch: Batch) -> dict[str, float]:
        """One step of the optimizer; ``loss``, ``lr`` and ``grad_norm`` (before clipping) of it.

        Args:
            batch: ``input_ids`` and, where there are any, ``labels``, ``attention_mask``, ``numeric_values``.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model.training_step(self._here(batch))
        loss.backward()
        largest = self.gradient_clip_val or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        self.optimizer.step()
        rate = self.optimizer.param_groups[0]["lr"]
        if self.scheduler is not None:
            self.scheduler.step()
        self.global_step += 1
        self.loss_history.append(loss.item())
        return {"loss": loss.item(), "lr": rate, "grad_norm": norm.item()}

    @torch.no_grad()
    def validation_step(self, batch: Batch) -> dict[str, float]:
        """``val_loss``, and ``val_perplexity``, exp of the cross-entropy of the softmax view."""
        self.model.eval()
        batch = {"labels": batch["input_ids"]} | dict(self._here(batch))
        outputs = self.model(**batch, output_logits=True)
        labels = batch["labels"][:, 1:].flatten().to(outputs.logits.device)
        logits = exact(outputs.logits[:, :-1].flatten(0, 1))  # (N, V)
        nats = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
        return {"val_loss": outputs.loss.item(), "val_perplexity": math.exp(nats.item())}

    def train_epoch(self, batches: Iterable[Batch]) -> dict[str, float]:
        """A step per batch; the median of each figure."""
        return _medians([self.training_step(batch) for batch in batches])

    def validate_epoch(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The median of each figure of `validation_step`."""
        return _medians([self.validation_step(batch) for batch in batches])

    def fit(
        self,
        train_dataloader: Iterable[Batch],
        val_dataloader: Iterable[Batch] | None = None,
        num_epochs: int = 3,
        save_path: str | Path | None = None,
    ) -> list[dict[str, float]]:
        """Train, and return the figures of each epoch.

        Args:
            train_dataloader: Batches, walked through once per epoch.
            val_dataloader: Batches to validate on after each epoch.
            num_epochs: How often.
            save_path: Directory for the model: the best by ``val_loss``, or the last without validation.
        """
        history: list[dict[str, float]] = []
        best = math.inf
        for _ in range(num_epochs):
            figures = self.train_epoch(train_dataloader)
            if val_dataloader is not None:
                figures |= self.validate_epoch(val_dataloader)
            history.append(figures)
            reached = figures["val_loss"] if val_dataloader is not None else -len(history)
            if reached < best:
                best = reached
                if save_path is not None:
                    self.model.save_pretrained(save_path)
                    if self.tokenizer is not None:
                        self.tokenizer.save_pretrained(save_path)
        return history

    def save_checkpoint(
        self, save_path: str | Path, epoch: int = 0, metrics: Mapping[str, float] | None = None
    ) -> Path:
        """Everything that training needs to go on exactly; the directory is whole or absent.

        It is also a directory of the model, with which ``from_pretrained`` and the commands work. Modern:
        `causal_qwen.training.train`, whose checkpoints also hold the place in the data.

        Args:
            save_path: Directory; an earlier checkpoint there is replaced, anything else is refused.
            epoch: Returned by `load_checkpoint`, as are the metrics.
            metrics: Of the model as it is.

        Raises:
            FileExistsError: If there is a directory that is no checkpoint.
        """
        target = Path(save_path)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "global_step": self.global_step,
            "loss_history": list(self.loss_history),
            "epoch": epoch,
            "metrics": dict(metrics or {}),
            "rng": torch.get_rng_state(),
            "rng_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        with atomic_directory(target, overwrite=(target / STATE_FILE).is_file()) as temporary:
            self.model.save_pretrained(temporary)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(temporary)
            torch.save(state, temporary / STATE_FILE)
        return target

    def load_checkpoint(self, checkpoint_path: str | Path) -> dict[str, Any]:
        """Put model, optimizer, scheduler, counters and torch's generator where `save_checkpoint` left them.

        Only tensors and plain values are read: nothing is unpickled.

        Returns:
            ``epoch``, ``global_step`` and ``metrics``.

        Raises:
            ValueError: If it is no checkpoint, damaged, or of another model, optimizer or scheduler.
        """
        directory = Path(checkpoint_path)
        if not (directory / STATE_FILE).is_file():
            raise ValueError(f"{directory}: no {STATE_FILE} there; name a directory of save_checkpoint")
        tensors: dict[str, Tensor] = {}
        try:
            state = torch.load(directory / STATE_FILE, map_location="cpu", weights_only=True)
            for file in directory.glob("*.safetensors"):
                tensors |= load_file(file)
        except (UnpicklingError, SafetensorError, RuntimeError, EOFError, OSError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(f"{directory}: this checkpoint is damaged ({reason}); take another") from error
        if (state["scheduler"] is None) != (self.scheduler is None):
            was = "without" if state["scheduler"] is None else "with"
            raise ValueError(f"{directory}: saved {was} a scheduler; make the trainer {was} one")
        tied = self.model.all_tied_weights_keys
        missing = [name for name in self.model.state_dict() if name not in tensors and name not in tied]
        if missing:
            raise ValueError(f"{directory}: of another model, without {missing[0]}")
        try:
            self.model.load_state_dict(tensors, strict=False)
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{directory}: of another model or optimizer ({reason})") from error
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.global_step, self.loss_history = state["global_step"], list(state["loss_history"])
        torch.set_rng_state(state["rng"])
        if torch.cuda.is_available() and state["rng_cuda"]:
            torch.cuda.set_rng_state_all(state["rng_cuda"])
        return {name: state[name] for name in ("epoch", "global_step", "metrics")}

    def _here(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.model.device) for name, tensor in batch.items()}


class LossComputer:
    """The One-vs-Rest loss on scores that exist already. Modern: `causal_qwen.losses.ovr_loss`, from U and W
    without any (B, T, V) tensor.

    Args:
        config: Its ``ovr_threshold_init`` is C, unless thresholds are given.
    """

    def __init__(self, config: CausalQwen2Config) -> None:
        self.config = config

    def compute_causal_loss(
        self,
        loc_S: Tensor,
        scale_S: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        *,
        thresholds: Tensor | None = None,
    ) -> Tensor:
        """−Σ_k [ y_k log P_k + (1 − y_k) log(1 − P_k) ], averaged over the valid positions.

        Args:
            loc_S: (B, T, V).
            scale_S: (B, T, V).
            labels: (B, T), the token that each position should say: already shifted; −100 is ignored.
            mask: (B, T), 0 where a position does not count.
            thresholds: (V,) C.
        """
        valid = labels != IGNORE_INDEX
        if mask is not None:
            valid = valid & mask.bool()
        S = Cauchy(exact(loc_S[valid]), exact(scale_S[valid]))  # (N, V)
        C = torch.as_tensor(
            self.config.ovr_threshold_init if thresholds is None else thresholds,
            dtype=S.loc.dtype,
            device=S.loc.device,
        )
        return ovr_terms(S, C, labels[valid]).sum() / valid.sum().clamp(min=1)

    def compute_regularization_loss(self, model: CausalQwenMVPForCausalLM) -> Tensor:
        """1e-5·Σ‖θ‖₂ over the parameters of the causal heads. Modern: the optimizer's weight_decay."""
        norms = [p.norm() for head in (model.abduction, model.action) for p in head.parameters()]
        return PENALTY * torch.stack(norms).sum()


class TrainingValidator:
    """What moves and what does not. Modern: any Trainer callback.

    Args:
        model: Whose parameters are remembered as they are now.
    """

    def __init__(self, model: CausalQwenMVPForCausalLM) -> None:
        self.model = model
        self._start = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def validate_gradient_flow(self) -> dict[str, float]:
        """The norm of each gradient that there is, by parameter."""
        parameters = self.model.named_parameters()
        return {name: p.grad.norm().item() for name, p in parameters if p.grad is not None}

    def validate_weight_updates(self) -> dict[str, float]:
        """How far each trainable parameter has moved since this validator was made, ‖Δθ‖₂."""
        parameters = dict(self.model.named_parameters())
        return {
            name: (parameters[name].detach() - start).norm().item() for name, start in self._start.items()
        }

    def check_training_stability(self, loss_history: Sequence[float], window: int = 100) -> dict[str, Any]:
        """Whether the last ``window`` losses are finite and moving.

        Returns:
            ``stable``; ``reason``: "insufficient_data" (too few losses; taken as stable), "loss_diverged",
            "loss_stagnated" or "ok"; and ``loss_iqr``, the interquartile range of the window, where there is
            one.
        """
        recent = torch.tensor(list(loss_history[-window:]), dtype=torch.float64)
        if not torch.isfinite(recent).all():
            return {"stable": False, "reason": "loss_diverged"}
        if len(recent) < window:
            return {"stable": True, "reason": "insufficient_data"}
        low, high = torch.quantile(recent, torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
        first, last = recent[: window // 2].median().item(), recent[-(window // 2) :].median().item()
        if high == low:
            return {"stable": False, "reason": "loss_stagnated", "loss_iqr": 0.0}
        diverged = last > 10 * abs(first)
        return {
            "stable": not diverged,
            "reason": "loss_diverged" if diverged else "ok",
            "loss_iqr": high - low,
        }


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if not rows:
        raise ValueError("no batches; an epoch needs at least one")
    return {name: torch.tensor([row[name] for row in rows]).median().item() for name in rows[0]}
