"""What does each loss of words teach: One-vs-Rest among rivals, of all words, cross-entropy?

Fine-tunes the converted base on the same batches of the manual that ships with Python, in the same order, and
measures held-out pages: as training left the model, and after `refit_words`, which solves for the width of
scale_S and a shift of all thresholds on pages of the training text. One-vs-Rest among rivals is the loss of
examples/configs/words.yaml. Before training it compares directions: how far does the gradient of One-vs-Rest
in loc_U point where cross-entropy's does?

    python benchmarks/words.py                  # 200 steps each: about 30 minutes on two cores
    python benchmarks/words.py --quick --json   # a few steps, to see that it runs
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from causal_qwen.calibration import refit_words
from causal_qwen.calibration.positions import Positions, labelled_positions
from causal_qwen.cauchy import Cauchy
from causal_qwen.conversion import convert
from causal_qwen.losses import ovr_loss, ovr_terms
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.run import LOSS_FIELDS
from causal_qwen.training.trainer import hold_constants, parameter_groups
from measure import BASE, Option, Record, Table, python_manual, run_benchmark, watched

SEEN = 16  # batches at the beginning of the order, by which losses were chosen: in neither part
FIT = 8  # batches of the training text that `refit_words` reads, and on which directions are compared
BOUND = 0.2  # of the gradient of all words
# Under scale_S all rows of W drift, and scales ask for a thousand times what everything else asks for.
HELD = ("embed_tokens", "abduction.scale", "abduction.common_scale", "action.balance")
RECIPE = Path(__file__).parents[1] / "examples" / "configs" / "words.yaml"
# The bound of the gradient, and among how many rivals, under which scale.
LAWS = (
    (None, None, None),
    (1.0, None, None),
    (0.2, None, None),
    (0.1, None, None),
    (0.05, None, None),
    (None, 32, 0.05),
    (0.1, 8, 0.05),
    (0.1, 32, 0.05),
    (0.1, 128, 0.05),
    (0.1, 32, 0.005),
    (0.1, 32, 0.5),
)
NAMES = {
    "start": "before training",
    "rivals": "One-vs-Rest among rivals",
    "bounded": "One-vs-Rest of all words, bounded",
    "unbounded": "One-vs-Rest of all words",
    "cross_entropy": "cross-entropy",
}
OPTIONS = {
    "base": BASE,
    "steps": Option("steps of training", 200, smoke=2, quick=4),
    "rows": Option("sequences per step", 2, smoke=2, quick=1),
    "length": Option("tokens per sequence", 96, smoke=20, quick=32),
    "held_out": Option("batches that are measured", 48, smoke=2, quick=2),
    "learning_rate": Option("of the backbone", 1e-4, smoke=1e-4),
    "heads_learning_rate": Option("of biases, thresholds and scales", 1e-3, smoke=1e-3),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Train with each loss, and print what each has learned."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="a few short steps", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """The measurements of the start and of each loss, before and after the refit."""
    conversion = convert(arguments.base, calibration="none" if arguments.quick else "default")
    model: Any = conversion.model
    pages = batches(conversion.tokenizer, arguments)
    # From the end of the order: the pages at its beginning have been looked at while the losses were made.
    held_out, training = pages[-arguments.held_out :], pages[SEEN:][: arguments.steps]
    with tempfile.TemporaryDirectory() as directory:
        start = Path(directory) / "start.pt"
        torch.save(model.state_dict(), start)
        results: dict[str, Any] = {"agreement": agreement(model, training[:FIT])}
        results["start"] = measured(model, held_out, training)
        for name in ("rivals", "bounded", "cross_entropy", "unbounded"):
            # A refit has moved the model: each loss begins where conversion ended.
            model.load_state_dict(torch.load(start))
            train(model, name, training, arguments)
            results[name] = measured(model, held_out, training)
    pages_right = {name: results[name].pop("right") for name in NAMES}
    for name in NAMES:
        results[name]["beyond_cross_entropy"] = paired(pages_right[name], pages_right["cross_entropy"])
    return results


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Mean difference of two accuracies on the same pages, and its standard error."""
    differences = [own - other for own, other in zip(ours, theirs, strict=True)]
    return {
        "difference": statistics.fmean(differences),
        "standard_error": statistics.stdev(differences) / math.sqrt(len(differences)),
    }


def recipe_of(name: str, arguments: argparse.Namespace) -> TrainingRecipe:
    """The example's recipe; of all words, held where they would drift; or cross-entropy."""
    all_words = {"ovr_rivals": None, "hold": list(HELD), "max_grad_norm": 0}
    changes: dict[str, Any] = {
        "rivals": {},
        "bounded": all_words | {"ovr_gradient_bound": BOUND},
        "unbounded": all_words | {"ovr_gradient_bound": None},
        # It has no use for the other loss: one rival costs nothing.
        "cross_entropy": {
            "ovr_rivals": 1,
            "classification_loss_weight": 0.0,
            "softmax_loss_weight": 1.0,
        },
    }
    rates = {"learning_rate": arguments.learning_rate, "heads_learning_rate": arguments.heads_learning_rate}
    return TrainingRecipe.from_yaml(RECIPE, **(rates | changes[name]))


def train(model: Any, name: str, training: list[Tensor], arguments: argparse.Namespace) -> None:
    """One step per batch, as `CausalTrainer` takes them."""
    recipe = recipe_of(name, arguments)
    for field in LOSS_FIELDS:
        setattr(model.config, field, getattr(recipe, field))
    model.requires_grad_(True)  # the loss before held some
    hold_constants(model, model.config, recipe.hold, following=False)
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe), fused=True)
    warm_up = max(round(recipe.warmup * len(training)), 1)

    def share(step: int) -> float:
        done = max(step - warm_up, 0) / max(len(training) - warm_up, 1)
        return min((step + 1) / warm_up, (1 + math.cos(math.pi * done)) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    torch.manual_seed(0)
    model.train()
    for ids in watched(training, name):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm or math.inf)
        optimizer.step()
        schedule.step()


def agreement(model: Any, pages: list[Tensor]) -> dict[str, dict[str, float]]:
    """For each law, the cosine between ∂L/∂loc_U by One-vs-Rest and by cross-entropy: of all positions side
    by side, and of their sum, which is what many steps add up to.
    """
    W = model.lm_head.weight.detach()
    heads = {name: getattr(model.action, name).detach() for name in ("bias", "balance", "threshold")}
    slopes: dict[str, list[Tensor]] = {}
    for part in labelled_positions(model, labelled(pages)):
        loc_U = part.U_noisy.loc.requires_grad_()
        U = Cauchy(loc_U, part.U_noisy.scale)
        losses = {
            _law_name(bound, rivals, scale): ovr_loss(
                U,
                part.U0,
                W,
                part.labels,
                **heads,
                gradient_bound=bound,
                rivals=rivals,
                rival_scale=scale or 1.0,
                impl="fused",
            )
            for bound, rivals, scale in LAWS
        }
        logits = torch.nn.functional.linear(loc_U, W.float(), heads["bias"])
        losses["softmax"] = torch.nn.functional.cross_entropy(logits, part.labels)
        for name, loss in losses.items():
            slopes.setdefault(name, []).append(torch.autograd.grad(loss, loc_U)[0].double())
    whole = {name: torch.cat(parts) for name, parts in slopes.items()}  # (N, D)
    softmax = whole.pop("softmax")
    cosine = torch.nn.CosineSimilarity(dim=0)
    return {
        name: {
            "positions": cosine(ours.flatten(), softmax.flatten()).item(),
            "sum": cosine(ours.sum(0), softmax.sum(0)).item(),
        }
        for name, ours in whole.items()
    }


@torch.no_grad()
def measured(model: Any, held_out: list[Tensor], training: list[Tensor]) -> dict[str, Any]:
    """What held-out pages say of a model as it is, and refitted."""
    as_it_is, _ = held_out_figures(model, held_out)
    refit_words(model, labelled(training[:FIT]), seed=0)
    refitted, right = held_out_figures(model, held_out)
    return {"trained": as_it_is, "refitted": refitted, "right": right}


def held_out_figures(model: Any, held_out: list[Tensor]) -> tuple[dict[str, float], list[float]]:
    """Means over positions, and the median of ΣP; and the accuracy of each batch of pages."""
    columns = [_facts(model, part) for part in labelled_positions(model, labelled(held_out))]
    correct, nats, loss, total = (torch.cat(column) for column in zip(*columns, strict=True))
    right = [part.double().mean().item() for part in correct.chunk(len(held_out))]
    return {
        "accuracy": correct.double().mean().item(),
        "softmax_nats": nats.double().mean().item(),
        "ovr_loss": loss.double().mean().item(),
        "prob_sum_median": total.median().item(),
    }, right


def _facts(model: Any, part: Positions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each position: is the choice right, softmax nats, One-vs-Rest loss, ΣP."""
    S = model.action.scores(part.U_noisy, part.U0, model.lm_head.weight, impl="fused")
    C, label = model.action.threshold, S.loc.gather(-1, part.labels[:, None]).squeeze(-1)
    correct = model.action.z_scores(S).argmax(-1) == part.labels
    return correct, S.loc.logsumexp(-1) - label, ovr_terms(S, C, part.labels), S.sf(C).sum(-1)


def labelled(pages: list[Tensor]) -> list[dict[str, Tensor]]:
    """Every token of the pages is a label."""
    return [{"input_ids": ids, "labels": ids} for ids in pages]


def batches(tokenizer: Any, arguments: argparse.Namespace) -> list[Tensor]:
    """Batches (rows, length) of Python's manual, in an order that is always the same."""
    ids = tokenizer(python_manual(), return_tensors="pt", verbose=False).input_ids[0]
    size = arguments.rows * arguments.length
    order = torch.randperm(len(ids) // size, generator=torch.Generator().manual_seed(0)).tolist()
    if len(order) < SEEN + arguments.steps + arguments.held_out:
        raise SystemExit(f"the text has {len(order)} batches of {size} tokens; ask for fewer steps")
    return [ids[i * size : (i + 1) * size].view(arguments.rows, arguments.length) for i in order]


def tables(record: Record) -> list[Table]:
    """One row per loss, as trained and refitted; and one per bound."""
    rows = []
    for name, title in NAMES.items():
        for state in ("trained", "refitted"):
            entry, beyond = record.figures[name][state], record.figures[name]["beyond_cross_entropy"]
            rows.append(
                (
                    title if state == "trained" else "… refitted",
                    f"{100 * entry['accuracy']:.1f}%",
                    "{:+.1f} ± {:.1f}".format(*(100 * beyond[of] for of in ("difference", "standard_error")))
                    if state == "refitted" and name != "cross_entropy"
                    else "",
                    f"{entry['softmax_nats']:.2f}",
                    f"{entry['ovr_loss']:.2f}",
                    f"{entry['prob_sum_median']:.2f}",
                )
            )
    heading = "Held-out pages after {steps} steps of {rows} × {length} tokens".format(**record.options)
    return [
        Table(
            heading,
            (
                "",
                "accuracy",
                "points beyond cross-entropy",
                "softmax nats",
                "One-vs-Rest loss",
                "median of ΣP",
            ),
            rows,
        ),
        Table(
            "Before training: cosine between the gradients in loc_U of One-vs-Rest and of cross-entropy",
            ("law, and bound of the gradient", "of each position", "of their sum"),
            [
                (name, *(f"{record.figures['agreement'][name][of]:.2f}" for of in ("positions", "sum")))
                for name in (_law_name(*law) for law in LAWS)
            ],
        ),
    ]


def _law_name(bound: float | None, rivals: int | None, scale: float | None) -> str:
    law = "all words, scale_S" if rivals is None else f"{rivals} rivals, scale {scale}"
    return f"{law}, {'no bound' if bound is None else bound}"


if __name__ == "__main__":
    main()
