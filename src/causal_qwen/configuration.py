"""What a causal configuration adds to the configuration of its base, whatever family that is of."""

import difflib
import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from causal_qwen.auto_module import SavedWithModule, auto_map

__all__ = ["CausalFields"]

CHOICES = {
    "abduction_init_strategy": ("identity", "xavier", "normal"),
    "scale_activation": ("exp", "softplus", "abs"),
    "numeric_encoding": ("log", "sigmoid"),
    "value_space": ("log", "linear"),
    "inference_mode": ("standard", "causal", "compatible"),
    "loss_impl": ("fused", "sampled", "reference"),
}
# field: (smallest, largest), bounds included
RANGES = {
    "gate_alpha": (0.0, 1.0),
    "persistence": (0.0, 1.0),
    "density_floor": (0.0, 1.0 - 1e-9),
    "gamma_init": (math.exp(-40), math.exp(40)),
    "value_spread": (1e-300, math.inf),
    "noise_gain": (0.0, math.inf),
    "reg_loss_weight": (0.0, math.inf),
    "classification_loss_weight": (0.0, math.inf),
    "softmax_loss_weight": (0.0, math.inf),
    "ovr_threshold_jitter": (0.0, math.inf),
    "num_negatives": (1, math.inf),
    "number_folds": (0, 1000),
    "number_support": (0, 1_000_000),
}


@dataclass(kw_only=True)
class CausalFields(SavedWithModule):
    """The fields that a causal configuration adds to its base's.

    Args:
        causal_size: D, the size of U; None means hidden_size. Any other size needs a vocabulary matrix of its
            own, so the embedding is then not tied to it.
        abduction_init_strategy: How W_loc starts: "identity", "xavier" or "normal".
        scale_activation: What makes scale_U positive: "exp", "softplus" or "abs".
        gamma_init: scale_U at the start.
        b_noise_init: |b_noise| at the start.
        ovr_threshold_init: C at the start.
        ovr_threshold_jitter: Half-width of a uniform spread around it.
        learn_threshold: Whether C is trained.
        numeric_encoding: How values enter the embedding: "log" or "sigmoid".
        learn_numeric_direction: Whether ê is trained.
        value_space: Where numbers are regressed: "log" or "linear".
        value_center: Median of the training numbers in value space.
        value_spread: Half their interquartile range.
        conformal_scores: Sorted |g(v) − loc_Y|/scale_Y of numbers set aside in training, from which intervals
            are made; None for the Cauchy quantiles themselves.
        conformal_folds: The fold that each of these scores was left out with, where the number head was
            solved with folds (CV+); None for numbers set aside (split conformal).
        conformal_edges: Sorted loc_Y that divide numbers into groups, each with intervals of its own scores
            (Mondrian); None for one group.
        conformal_groups: The group that each score belongs to, 0 below the first edge.
        number_folds: K, how many heads were solved without a fold.
        number_support: Directions of the features that the number head was solved on; 0 for none.
        number_leverage: Largest leverage of a training row left out, to which the support is relative; None
            where nobody knows.
        value_range: Smallest and largest training number; None before training.
        wrong_labels: Share of training labels that are more probably wrong than right, and center and scale
            of their law in value space; None where there are none.
        precision_shifts: By how much a number moves in other precisions, in widths of its 90% interval, the
            median of up to 32 training rows that the head was not told of; None where it was not measured.
        num_token_id: The id of <NUM>; None for a model without a number channel.
        number_spelling: The token of each character that numbers are written with, so that generated ids can
            hold them in digits; None leaves <NUM> there.
        gate_alpha: α of the number gate.
        gate_gradient: Whether the number loss may move P_<NUM>.
        number_token_gradient: Whether the word loss moves the features before a number. Where a number always
            follows, all that it teaches them is to be alike; without it b, C and W learn to expect one.
        reg_loss_weight: λ, the weight of the number loss.
        classification_loss_weight: Weight of the One-vs-Rest loss.
        softmax_loss_weight: Weight of an extra cross-entropy on ``logits``.
        ovr_gradient_bound: What |∂L_cls/∂loc_S| of each score is cut off at; None leaves the derivative as it
            is, up to 1/scale_S.
        ovr_rivals: How many words stand against a label in the One-vs-Rest loss, the highest, under a law of
            ``ovr_rival_scale`` of its own; None is all of them, under scale_S.
        ovr_rival_scale: The scale of every score among rivals, in nats.
        loss_impl: "fused" (exact, one pass over the vocabulary), "sampled" (negatives drawn) or "reference"
            (dense); a loss among rivals has one way.
        num_negatives: Negatives drawn by the sampled loss.
        inference_mode: "standard", "causal" or "compatible".
        noise_gain: κ, set by calibration.
        density_floor: Truncation of sampled causes, relative to the peak density.
        persistence: ρ, the share of noise that an individual keeps from token to token.
    """

    # Evaluation must not gather the causes and scores of every batch: only logits are predictions.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "cls_loss",
        "reg_loss",
        *(f"{part}_{name}" for name in ("U", "U0", "S", "Y") for part in ("loc", "scale")),
        "past_key_values",
    ]

    causal_size: int | None = None
    abduction_init_strategy: str = "identity"
    scale_activation: str = "exp"
    gamma_init: float | int = 10.0
    b_noise_init: float | int = 0.1
    ovr_threshold_init: float | int = 0.0
    ovr_threshold_jitter: float | int = 0.0
    learn_threshold: bool = True
    numeric_encoding: str = "log"
    learn_numeric_direction: bool = False
    value_space: str = "log"
    value_center: float | int = 0.0
    value_spread: float | int = 1.0
    conformal_scores: list[float | int] | None = None
    conformal_folds: list[int] | None = None
    conformal_edges: list[float | int] | None = None
    conformal_groups: list[int] | None = None
    number_folds: int = 0
    number_support: int = 0
    number_leverage: float | int | None = None
    value_range: list[float | int] | None = None
    wrong_labels: list[float | int] | None = None
    precision_shifts: dict[str, float | int] | None = None
    num_token_id: int | None = None
    number_spelling: dict[str, int] | None = None
    gate_alpha: float | int = 0.0
    gate_gradient: bool = False
    number_token_gradient: bool = True
    reg_loss_weight: float | int = 1.0
    classification_loss_weight: float | int = 1.0
    softmax_loss_weight: float | int = 0.0
    ovr_gradient_bound: float | int | None = None
    ovr_rivals: int | None = None
    ovr_rival_scale: float | int = 0.05
    loss_impl: str = "fused"
    num_negatives: int = 4096
    inference_mode: str = "standard"
    noise_gain: float | int = 1.0
    density_floor: float | int = 0.01
    persistence: float | int = 0.2

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the causal fields, then let the base derive its own."""
        own = [field.name for field in fields(CausalFields)]
        for name in kwargs:
            near = difflib.get_close_matches(name, own, n=1, cutoff=0.8)
            if near:
                raise ValueError(f"unknown configuration field {name!r}; did you mean {near[0]!r}?")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} is {value!r:.80}; choose one of {', '.join(map(repr, choices))}")
        for name, (smallest, largest) in RANGES.items():
            value = getattr(self, name)
            if not smallest <= value <= largest:
                raise ValueError(f"{name} is {value!r:.80}; it must lie between {smallest:g} and {largest:g}")
        bound = self.ovr_gradient_bound
        if bound is not None and not 0 < bound < math.inf:
            raise ValueError(f"ovr_gradient_bound is {bound!r}; it must be above 0, or None for no bound")
        if self.ovr_rivals is not None and self.ovr_rivals < 1:
            raise ValueError(f"ovr_rivals is {self.ovr_rivals!r}; at least 1, or None for all words")
        if not 0 < self.ovr_rival_scale < math.inf:
            raise ValueError(f"ovr_rival_scale is {self.ovr_rival_scale!r}; it must be above 0")
        scores = self.conformal_scores
        folds = self.conformal_folds
        if folds is not None and (scores is None or not _are_folds(folds, len(scores), self.number_folds)):
            raise ValueError(
                f"conformal_folds begin {folds[:3]}; one fold below number_folds ({self.number_folds}) "
                "belongs to each of the conformal_scores"
            )
        edges, groups = self.conformal_edges, self.conformal_groups
        if edges is not None and not _are_edges(edges, groups, len(scores or ())):
            raise ValueError(
                f"conformal_edges are {edges!r:.40} and conformal_groups begin {(groups or [])[:3]}; edges "
                "are sorted, one group belongs to each of the conformal_scores, and every group has one"
            )
        limits = self.value_range
        if limits is not None and not (len(limits) == 2 and -math.inf < limits[0] <= limits[1] < math.inf):
            raise ValueError(f"value_range is {limits!r:.80}; it is [smallest, largest], finite, or None")
        wrong = self.wrong_labels
        if wrong is not None and not (
            len(wrong) == 3 and 0 < wrong[0] < 1 and math.isfinite(wrong[1]) and 0 < wrong[2] < math.inf
        ):
            raise ValueError(
                f"wrong_labels is {wrong!r:.80}; it is [share, center, scale], a share between 0 and 1 and a "
                "scale above 0, or None"
            )
        if scores is not None and not _are_scores(scores):
            raise ValueError(
                f"conformal_scores begin {scores[:3]}; they must be sorted finite numbers ≥ 0, or None"
            )
        if self.causal_size is None:
            self.causal_size = self.hidden_size
        if self.causal_size < 1:
            raise ValueError(
                f"causal_size is {self.causal_size!r}; it must be at least 1, or None for hidden_size"
            )
        if self.causal_size != self.hidden_size:
            self.tie_word_embeddings = False
        if self.num_token_id is not None and not 0 <= self.num_token_id < self.vocab_size:
            raise ValueError(
                f"num_token_id is {self.num_token_id!r}, outside the vocabulary of {self.vocab_size}; "
                "resize the embeddings first, or let `convert` choose the row"
            )
        super().__post_init__(**kwargs)
        names = {"AutoConfig": type(self).__name__, "AutoModelForCausalLM": self._model_name}
        self.auto_map = auto_map(**names, AutoProcessor="CausalQwen2Processor")

    @property
    def _model_name(self) -> str:
        return type(self).__name__.replace("Config", "ForCausalLM")

    def to_dict(self) -> dict[str, Any]:
        """As transformers'; of a saved model, ``architectures`` begin with a name that transformers knows.

        `transformers serve` looks the first one up among transformers' own classes, and an Auto class loads
        what is registered or in ``auto_map``.
        """
        fields_of_base: dict[str, Any] = super().to_dict()
        if fields_of_base.get("architectures"):
            fields_of_base["architectures"] = ["AutoModelForCausalLM", self._model_name]
        return fields_of_base


def _are_scores(scores: list[float | int]) -> bool:
    return bool(scores) and scores[0] >= 0 and scores == sorted(scores) and all(map(math.isfinite, scores))


def _are_folds(folds: list[int], count: int, number: int) -> bool:
    return len(folds) == count and all(isinstance(fold, int) and 0 <= fold < number for fold in folds)


def _are_edges(edges: list[float | int], groups: list[int] | None, count: int) -> bool:
    """Sorted, with a group for each of ``count`` scores and no group without one."""
    sorted_edges = bool(edges) and all(map(math.isfinite, edges)) and edges == sorted(edges)
    return (
        sorted_edges
        and groups is not None
        and len(groups) == count
        and set(groups) == set(range(len(edges) + 1))
    )
