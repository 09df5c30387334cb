"""One-vs-Rest problems of any size, and how an implementation is held against another."""

import torch

from causal_qwen.cauchy import Cauchy
from causal_qwen.losses import ovr_loss

NAMES = ("loc_U", "scale_U", "weight", "bias", "balance", "threshold", "loc_U0", "scale_U0")


def problem(tokens=12, vocab=50, width=6, *, seed=0, sharp=1.0):
    """Inputs in float64 with nothing at zero; ``sharp`` divides every scale."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    inputs = {
        "loc_U": normal(tokens, width),
        "scale_U": (normal(tokens, width).exp() * 0.2 + 0.01) / sharp,
        "weight": normal(vocab, width) * 0.4,
        "bias": normal(vocab) * 0.3,
        "balance": normal(vocab),
        "threshold": normal(vocab) * 0.3,
        "loc_U0": normal(tokens) - 2,
        "scale_U0": normal(tokens).exp() * 0.1 / sharp,
    }
    return inputs, torch.randint(0, vocab, (tokens,), generator=g)


def evaluate(inputs, labels, impl, *, dtype=torch.float32, frozen=(), **options):
    """(loss, {name: gradient}) in float64."""
    leaves = {k: v.detach().to(dtype).requires_grad_(k not in frozen) for k, v in inputs.items()}
    loss = call(leaves, labels, impl, **options)
    loss.backward()
    return loss.detach().double(), {k: v.grad.double() for k, v in leaves.items() if k not in frozen}


def call(inputs, labels, impl, **options):
    U, U0 = (Cauchy(inputs[f"loc_{name}"], inputs[f"scale_{name}"]) for name in ("U", "U0"))
    rest = {name: inputs[name] for name in ("bias", "balance", "threshold")}
    return ovr_loss(U, U0, inputs["weight"], labels, impl=impl, **rest, **options)


def relative(ours, exact):
    return ((ours - exact).norm() / exact.norm().clamp(min=1e-300)).item()


def assert_same(ours, exact, tolerance=1e-5):
    assert relative(ours[0], exact[0]) <= tolerance
    assert ours[1].keys() == exact[1].keys()
    for name, gradient in exact[1].items():
        assert relative(ours[1][name], gradient) <= tolerance, name
