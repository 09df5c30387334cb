"""The principles of the second generation, tested on a converted model by statistics with error bars.

Position against scale: without sampling noise widens the scale of the cause, with sampling it moves its
location. Temperature is selective: it scales noise that is drawn, and nothing else. Linear stability: what
follows from concrete causes has exactly the law that is computed in closed form. Medians and quartiles are
compared within 4.5 standard errors, and whole distributions by Kolmogorov-Smirnov.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import checks
import numpy as np
import scipy.stats
import torch
from torch import Tensor

from causal_qwen import CausalQwen2ForCausalLM, Individual, Inferencer
from causal_qwen.cauchy import Cauchy, standard_draw, truncation_bound

ERRORS = 4.5  # standard errors: 7 in a million by chance
P_VALUE = 1e-5
TOKENS = 8  # rows of W that are sampled
BLOCK = 8192  # causes drawn at a time
# The standard error of a median is π·scale/(2√n), that of a quartile 2π·scale·√(3/16n).
MEDIAN_ERROR, QUARTILE_ERROR = math.pi / 2, 2 * math.pi * math.sqrt(3 / 16)


def cauchy_check(found: checks.Checks, name: str, draws: Tensor, law: Cauchy) -> None:
    """Compare draws (n, K) with their law (K,): median, quartiles and the whole distribution, worst of K."""
    z = ((draws - law.loc) / law.scale).double()  # (n, K), standard Cauchy if the law is right
    root = math.sqrt(len(z))
    quartiles = z.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=z.dtype), dim=0)  # (3, K)
    wanted = torch.tensor([-1.0, 0.0, 1.0], dtype=z.dtype)[:, None]
    error = torch.tensor([QUARTILE_ERROR, MEDIAN_ERROR, QUARTILE_ERROR], dtype=z.dtype)[:, None] / root
    worst = ((quartiles - wanted).abs() / error).max().item()
    p_value = min(scipy.stats.kstest(column.numpy(), "cauchy").pvalue for column in z.T)
    measured = f"{worst:.1f} errors, p = {p_value:.2g}"
    passed = worst < ERRORS and p_value > P_VALUE / z.shape[1]
    found.add(name, passed, measured, f"< {ERRORS} errors, p > {P_VALUE / z.shape[1]:.1g}")


def relative(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, in units of the largest magnitude wanted."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


class Laws:
    """A cause that the model infers from text, some rows of W, and noise to draw."""

    def __init__(self, model: CausalQwen2ForCausalLM, ids: Tensor, seed: int, draws: int) -> None:
        self.model, self.ids, self.draws, self.seed = model, ids, draws, seed
        self.generator = torch.Generator().manual_seed(seed)
        outputs = model(ids, logits_to_keep=1, output_logits=False)
        self.U = Cauchy(outputs.loc_U[0, -1], outputs.scale_U[0, -1])  # (D,)
        self.U0 = Cauchy(outputs.loc_U0[0, -1], outputs.scale_U0[0, -1])
        self.rows = torch.randperm(model.config.vocab_size, generator=self.generator)[:TOKENS]
        self.W = model.lm_head.weight[self.rows].float()  # (K, D)
        self.noise = model.action.b_noise.abs()  # (D,)

    def epsilon(self, size: int) -> Tensor:
        """Untruncated standard Cauchy noise, (n, size), block by block."""
        return standard_draw(torch.rand(BLOCK, size, generator=self.generator))

    def scores(self, U: Cauchy) -> Cauchy:
        """S of the chosen rows."""
        U0 = Cauchy(self.U0.loc.expand(U.loc.shape[:-1]), self.U0.scale.expand(U.loc.shape[:-1]))
        return self.model.action.scores(U, U0, self.model.lm_head.weight, self.rows)

    def sampled(self, temperature: float) -> Tensor:
        """Locations of S (n, K) after noise has moved the cause."""
        blocks = []
        for _ in range(-(-self.draws // BLOCK)):
            moved = self.model.action.exogenous(
                Cauchy(self.U.loc, self.U.scale),
                do_sample=True,
                temperature=temperature,
                noise_gain=self.model.config.noise_gain,
                epsilon=self.epsilon(len(self.U.loc)),
            )
            blocks.append(self.scores(Cauchy(moved.loc, moved.scale.expand_as(moved.loc))).loc)
        return torch.cat(blocks)


def position_against_scale(found: checks.Checks, laws: Laws) -> None:
    """Where noise goes, with and without sampling."""
    action, U = laws.model.action, laws.U
    free, widened = laws.scores(U), laws.scores(action.exogenous(U))
    balance = action.balance[laws.rows].abs()
    by_hand = laws.W.abs() @ laws.noise + balance * laws.noise.mean()
    error = relative(widened.scale - free.scale, by_hand)
    found.add(
        "without sampling the scale grows by |W||b_noise|", error < 1e-3, f"off by {error:.1g}", "< 1e-3"
    )
    same = torch.equal(widened.loc, free.loc)
    found.add("without sampling the location stays", same, same, True)

    epsilon = laws.epsilon(len(U.loc))[0]
    gain = laws.model.config.noise_gain
    moved = action.exogenous(U, do_sample=True, noise_gain=gain, epsilon=epsilon)
    error = relative(moved.loc - U.loc, gain * laws.noise * epsilon)
    found.add(
        "with sampling the location moves by +κ|b_noise|ε", error < 1e-3, f"off by {error:.1g}", "< 1e-3"
    )
    same = torch.equal(moved.scale, U.scale)
    found.add("with sampling the scale stays", same, same, True)
    shift = Cauchy(free.loc, gain * (laws.W.abs() @ laws.noise))
    cauchy_check(found, "sampled locations of S ~ Cauchy(loc_S, κ|W||b_noise|)", laws.sampled(1.0), shift)


def individuals(found: checks.Checks, laws: Laws) -> None:
    """generate() and the engine decide by the individual's own noise; its law is the one that is promised."""
    model, U = laws.model, laws.U
    config, size = model.config, len(laws.U.loc)
    settings = {"density_floor": config.density_floor, "persistence": config.persistence}
    person = Individual(laws.seed + 1)
    epsilon = person.noise(0, size, **settings)[:-1]
    choice = Inferencer(model, "causal", individual=person).infer(laws.ids).choice
    u = U.loc + config.noise_gain * (U.scale + laws.noise) * epsilon
    wanted = laws.W @ u + model.action.bias[laws.rows]
    error = relative(choice.scores[0, laws.rows], wanted)
    found.add(
        "an individual's scores are W(loc_U + κ·scale·ε) + b", error < 1e-3, f"off by {error:.1g}", "< 1e-3"
    )
    count = -(-laws.draws // size)
    for persistence in (0.0, 0.2, 1.0):
        people = [Individual(seed, persistence) for seed in range(count)]
        noise = [one.noise(3, size, density_floor=0.0, persistence=0.0) for one in people]
        law = Cauchy(torch.zeros(1), torch.ones(1))
        cauchy_check(found, f"noise of individuals, ρ = {persistence}", torch.cat(noise)[:, None], law)
    bound = truncation_bound(config.density_floor)
    truncated = torch.cat([Individual(s, 0.0).noise(3, size, **settings) for s in range(count)]).double()
    edge = math.atan(bound)
    p_value = scipy.stats.kstest(truncated.numpy(), lambda x: 0.5 + np.arctan(x) / (2 * edge)).pvalue
    passed = truncated.abs().max().item() <= bound and p_value > P_VALUE
    found.add(
        f"truncated noise keeps |ε| ≤ {bound:.2f} and its law", passed, f"p = {p_value:.2g}", f"> {P_VALUE}"
    )


def temperature(found: checks.Checks, laws: Laws) -> None:
    """What the temperature touches, and what it does not."""
    model, ids = laws.model, laws.ids
    still = [Inferencer(model, "standard", temperature=t).infer(ids).choice for t in (0.1, 1.0, 10.0)]
    same = all(torch.equal(choice.scores, still[1].scores) for choice in still)
    found.add("inert without sampling: T = 0.1, 1, 10 decide alike", same, same, True)
    free = model.action.scores(laws.U, laws.U0, model.lm_head.weight)
    wanted = model.action.z_scores(free)
    engines = {
        "standard": Inferencer(model, "standard", temperature=0.0),
        "standard, sampled": Inferencer(model, "standard", do_sample=True, temperature=0.0),
    }
    for name, engine in engines.items():
        error = relative(engine.infer(ids).choice.scores[0], wanted)
        found.add(f"T = 0 is the noise-free law ({name})", error < 1e-4, f"off by {error:.1g}", "< 1e-4")
    u = Inferencer(model, "causal", temperature=0.0).infer(ids).choice.scores[0]
    error = relative(u, model.token_logits(laws.U.loc).float())
    found.add("T = 0 is the noise-free law (causal)", error < 1e-4, f"off by {error:.1g}", "< 1e-4")
    one, two = (
        (draws.quantile(0.75, dim=0) - draws.quantile(0.25, dim=0)) / 2
        for draws in (laws.sampled(1.0).double(), laws.sampled(2.0).double())
    )
    # log of a ratio of half interquartile ranges; each has the standard error (π/2)/√n.
    errors = ((two / one).log() - math.log(2)).abs() / (math.pi / 2 * math.sqrt(2 / laws.draws))
    worst = errors.max().item()
    found.add(
        "with sampling the spread is proportional to T", worst < ERRORS, f"{worst:.1f} errors", f"< {ERRORS}"
    )


def linear_stability(found: checks.Checks, laws: Laws) -> None:
    """Concrete causes, acted on one by one, against the law in closed form."""
    action = laws.model.action
    U = action.exogenous(laws.U)
    scores, numbers = [], []
    for _ in range(-(-laws.draws // BLOCK)):
        u = U.loc + U.scale * laws.epsilon(len(U.loc))  # (BLOCK, D), causes
        read_out = action.balance[laws.rows].abs() * U.scale.mean() * laws.epsilon(TOKENS)
        scores.append(u @ laws.W.T + action.bias[laws.rows] + laws.U0.loc + read_out)
        read_out = action.number_noise.abs() * laws.epsilon(1)
        numbers.append(u @ action.number.weight.T + action.number.bias + read_out)
    cauchy_check(found, "S of drawn causes ~ Cauchy(loc_S, scale_S)", torch.cat(scores), laws.scores(U))
    Y = action.numbers(U)
    cauchy_check(
        found,
        "Y of drawn causes ~ Cauchy(loc_Y, scale_Y)",
        torch.cat(numbers),
        Cauchy(Y.loc[None], Y.scale[None]),
    )
    every = action.scores(U, laws.U0, laws.model.lm_head.weight).scale
    spread = (every.max() / every.min() - 1).item()
    found.add("balance: scale_S is the same for every token", spread < 1e-3, f"spread {spread:.1g}", "< 1e-3")


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; 0 if all pass."""
    parser = checks.arguments(__doc__)
    parser.add_argument("--draws", type=int, default=32768, help="causes drawn for each statistic")
    options = parser.parse_args(argv)
    base, conversion = checks.load(options.base, options.seed)
    found = checks.Checks(f"V2 principles on {options.base}, {options.draws} draws")
    ids = base.tokenizer("The reason why the sea is salty is that", return_tensors="pt")["input_ids"]
    laws = Laws(conversion.model, ids, options.seed, options.draws)
    for part in (position_against_scale, individuals, temperature, linear_stability):
        part(found, laws)
    return found.finish()


if __name__ == "__main__":
    raise SystemExit(main())
