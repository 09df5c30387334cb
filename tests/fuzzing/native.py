"""Native code: every product, score, cause and step is torch's, for sizes and values of every kind.

In a worker it is built for AddressSanitizer, which ends the process at the first byte that is not its own.
"""

import json

import torch
from hypothesis import strategies as st
from torch import Tensor

from causal_qwen.decoder import CausalLM, DecoderConfig, Engine
from causal_qwen.decoder.packed import quantise
from causal_qwen.kernels.decision import TokenScorer
from causal_qwen.kernels.library import library
from causal_qwen.kernels.native import NativeAbduction
from causal_qwen.kernels.products import Linear, Matrix
from fuzzing.inputs import Drawn
from fuzzing.target import Target

__all__ = ["TARGETS", "check_causes", "check_products", "check_scores", "check_step"]


def tensor(seed: int, *shape: int, kind: str = "normal", layout: str = "whole") -> Tensor:
    """Random values of a kind, lying in memory in some way, with nothing behind the last one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    match kind:
        case "zeros":
            values.zero_()
        case "large":
            values *= 1e18
        case "small":
            values *= 1e-38
        case "whole":
            values = (values * 40).round().clamp(-127, 127)
        case "odd" if values.numel():
            values.view(-1)[seed % values.numel()] = (float("nan"), float("inf"), -float("inf"))[seed % 3]
    match layout:
        case "transposed" if values.ndim == 2:
            return values.T.contiguous().T
        case "strided":
            return torch.stack((values, values), -1)[..., 0]
        case "offset":
            return torch.cat((values.new_zeros(3), values.flatten()))[3:].view(shape)
    return values.clone()


def matrix(weight: Tensor, form: str) -> Matrix:
    """W in floats, or in integers of 8 or 4 bits."""
    return (
        quantise(weight, int(form[3:])) if form.startswith("int") else Matrix(weight.to(getattr(torch, form)))
    )


def assert_near(ours: Tensor, expected: Tensor, size: Tensor, form: str) -> None:
    """To rounding of sums whose terms are together ``size``; integers take vectors to 16 bits."""
    finite = expected.isfinite() & size.isfinite() & (size < 1e37)
    error = (ours.double() - expected)[finite].abs()
    bound = size[finite] * (2e-3 if form.startswith("int") else 1e-4) + 1e-30
    assert (error <= bound).all(), (error / bound).max()


def check_products(data: bytes) -> None:
    """W x + b and its argmax; and W itself, widened."""
    assert library() is not None
    form, rows, columns, count, seed, kind, layout, bias = json.loads(data)
    W = matrix(tensor(seed, rows, columns, kind=kind, layout=layout), form)
    x = tensor(seed + 1, count, columns, kind=kind, layout=layout)
    b = tensor(seed + 2, rows) if bias else None
    y, best = Linear(W, b).best(x)
    dense = W.dense().double()
    assert dense.shape == (rows, columns)
    expected = x.double() @ dense.T + (0 if b is None else b)
    size = x.double().abs() @ dense.abs().T + (0 if b is None else b.abs())
    # What integers lose is measured by the largest value of a vector.
    spread = size + x.double().abs().amax(-1, keepdim=True) * dense.abs().sum(-1) if count else size
    assert_near(y, expected, spread, form)
    assert y.shape == (count, rows)
    for row in range(count):
        if y[row].isfinite().all():
            assert y[row, best[row]] == y[row].max()


def check_scores(data: bytes) -> None:
    """loc_S, scale_S, z-scores and the choice among the k largest."""
    assert library() is not None
    form, rows, columns, count, seed, kind, layout, (bias, balance, threshold, common), k = json.loads(data)
    W = matrix(tensor(seed, rows, columns, kind=kind, layout=layout), form)
    loc_U = tensor(seed + 1, count, columns, kind=kind, layout=layout)
    scale_U = tensor(seed + 2, count, columns, layout=layout).abs()
    terms = [
        tensor(seed + n, rows).abs() if given else None for n, given in enumerate((bias, balance, threshold))
    ]
    loc_U0, scale_U0 = [tensor(seed + n, count).abs() if common else None for n in (8, 9)]
    scorer = TokenScorer(W, bias=terms[0], balance=terms[1], threshold=terms[2])
    loc_S, scale_S = scorer.scores(loc_U, scale_U, loc_U0, scale_U0)
    dense = W.dense().double()
    expected, widths = loc_U.double() @ dense.T, scale_U.double() @ dense.abs().T
    largest = loc_U.double().abs().amax(-1, keepdim=True) if count else loc_U.new_zeros(count, 1)
    size = largest * dense.abs().sum(-1) + 1
    if terms[0] is not None:
        expected, size = expected + terms[0], size + terms[0]
    if terms[1] is not None:
        widths = widths + terms[1] * scale_U.mean(-1, keepdim=True)
    if common:
        expected, widths, size = (
            expected + loc_U0[:, None],
            widths + scale_U0[:, None],
            size + loc_U0[:, None],
        )
    assert_near(loc_S, expected, size, form)
    assert_near(scale_S, widths, widths + scale_U.double().abs().sum(-1, keepdim=True), form)
    z_scores, best = scorer.z_scores(loc_U, scale_U, loc_U0, scale_U0)
    for row in range(count):
        if z_scores[row].isfinite().all():
            assert z_scores[row, best[row]] == z_scores[row].max()
    if scorer.reads_few(loc_U, k) and k:
        logits = tensor(seed + 3, count, rows)
        chosen, best = scorer.among(logits, k, loc_U, scale_U, loc_U0, scale_U0)
        kth = logits.topk(k).values[:, -1:]
        assert torch.equal(chosen > -torch.inf, (logits >= kth) & (z_scores > -torch.inf)) or kind == "odd"
        assert (best >= 0).all()
        assert (best < rows).all()


def check_causes(data: bytes) -> None:
    """loc_U, scale_U and loc_U0 of features."""
    assert library() is not None
    size, hidden, count, seed, kind, layout, activation = json.loads(data)
    weight, bias = tensor(seed, 2 * size + 1, hidden), tensor(seed + 1, 2 * size + 1)
    features = tensor(seed + 2, count, hidden, kind=kind, layout=layout)
    loc_U, scale_U, loc_U0 = NativeAbduction(weight, bias, activation, 40.0)(features)
    maps = features.double() @ weight.double().T + bias
    bound = features.double().abs() @ weight.double().abs().T + bias.abs()
    assert_near(loc_U, maps[:, :size], bound[:, :size], "float32")
    assert_near(loc_U0, -maps[:, -1], bound[:, -1], "float32")
    if kind != "odd":
        assert (scale_U > 0).all()
        assert scale_U.isfinite().all()


def check_step(data: bytes) -> None:
    """A decoding step is the decoder's own, in float32, for rows of any length."""
    assert library() is not None
    heads, groups, width, hidden, inner, layers, batch, length, flags, seed = json.loads(data)
    qkv_bias, o_bias, mlp_bias, qk_norm, layernorm = flags
    config = DecoderConfig(
        vocab_size=17,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
        intermediate_size=inner,
        max_position_embeddings=32,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        norm="layernorm" if layernorm else "rmsnorm",
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    model = CausalLM(config).eval()
    engine = Engine.from_model(model)
    assert engine.step is not None
    ids = torch.randint(0, 17, (batch, length + 2), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, : length - 1] = 0  # padded on the left
    cache = engine.new_cache(batch, length + 2)
    engine.hidden(ids[:, :length], mask, cache)
    stepped = [engine.head(engine.hidden(ids[:, at : at + 1], None, cache)) for at in (length, length + 1)]
    whole_mask = torch.cat((mask, torch.ones(batch, 2, dtype=torch.int64)), 1)
    with torch.no_grad():
        expected = model(ids, whole_mask).logits[:, -2:]
    torch.testing.assert_close(torch.cat(stepped, 1), expected, rtol=1e-3, atol=1e-3)


SEED = st.integers(0, 2**20)
FORMS = st.sampled_from(["float32", "bfloat16", "float16", "int8", "int4"])
ROWS = st.integers(1, 40) | st.sampled_from([63, 64, 65, 257])
COLUMNS = st.sampled_from([1, 2, 7, 31, 32, 33, 40, 63, 64, 65, 96, 128, 160, 192])
COUNT = st.integers(0, 9) | st.sampled_from([47, 48, 49])
KIND = st.sampled_from(["normal", "normal", "zeros", "large", "small", "whole", "odd"])
LAYOUT = st.sampled_from(["whole", "whole", "transposed", "strided", "offset"])
FLAG = st.booleans()
TARGETS = (
    Target(
        name="native-products",
        source=Drawn(st.tuples(FORMS, ROWS, COLUMNS, COUNT, SEED, KIND, LAYOUT, FLAG)),
        check=check_products,
        share=20,
        sanitised=True,
        seconds=20,
    ),
    Target(
        name="native-scores",
        source=Drawn(
            st.tuples(
                FORMS,
                ROWS,
                COLUMNS,
                COUNT,
                SEED,
                KIND,
                LAYOUT,
                st.tuples(FLAG, FLAG, FLAG, FLAG),
                st.integers(0, 9),
            )
        ),
        check=check_scores,
        share=20,
        sanitised=True,
        seconds=20,
    ),
    Target(
        name="native-causes",
        source=Drawn(
            st.tuples(
                st.integers(1, 40),
                COLUMNS,
                COUNT,
                SEED,
                KIND,
                LAYOUT,
                st.sampled_from(["exp", "softplus", "abs"]),
            )
        ),
        check=check_causes,
        share=10,
        sanitised=True,
        seconds=20,
    ),
    Target(
        name="native-steps",
        source=Drawn(
            st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]).flatmap(
                lambda heads: st.tuples(
                    st.just(heads[0]),
                    st.just(heads[1]),
                    st.sampled_from([2, 4, 6, 8, 16, 34, 72]),
                    st.integers(1, 40),
                    st.integers(1, 40),
                    st.integers(1, 2),
                    st.integers(1, 5),
                    st.integers(1, 12),
                    st.tuples(FLAG, FLAG, FLAG, FLAG, FLAG),
                    SEED,
                )
            )
        ),
        check=check_step,
        share=10,
        sanitised=True,
        seconds=20,
    ),
)
