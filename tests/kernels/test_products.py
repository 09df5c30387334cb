"""Products of a few vectors from one read of W, in every form of W, and the native code that makes them."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from causal_qwen.decoder.packed import quantise
from causal_qwen.kernels import interface, library, native
from causal_qwen.kernels.decision import TokenScorer
from causal_qwen.kernels.products import Linear, Matrix, dense_products

SIZES = [(203, 64, 1), (1, 32, 1), (204, 96, 2), (204, 64, 3), (8, 160, 8), (999, 32, 5), (31, 45, 7)]
# Integers come in whole groups: 32 columns of 8 bits, 64 of 4.
FORMS = [
    (kind, *size)
    for kind in ("float32", "bfloat16", "float16", 8, 4)
    for size in SIZES
    if isinstance(kind, str) or size[1] % (256 // kind) == 0
]


@pytest.mark.parametrize("shift", [0.0, 3.0])
@pytest.mark.parametrize(("kind", "vocab", "columns", "count"), FORMS)
def test_every_form_of_a_product_is_the_product(kind, shift, vocab, columns, count):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, columns, generator=generator) + shift
    matrix = quantise(weight, kind) if isinstance(kind, int) else Matrix(weight.to(getattr(torch, kind)))
    x = torch.randn(count, columns, generator=generator)
    expected = x.double() @ matrix.dense().double().T
    torch.testing.assert_close(dense_products(x, matrix).double(), expected, rtol=1e-4, atol=1e-4)
    # Vectors are taken to 16 bits by groups: half a level of their largest value, for each column of W.
    half = x.abs().max().item() / 32767 / 2
    error = half * matrix.dense().abs().sum(-1).max().item() if isinstance(kind, int) else 1e-4
    torch.testing.assert_close(Linear(matrix)(x).double(), expected, rtol=1e-5, atol=error)


@pytest.mark.parametrize(("kind", "vocab", "columns", "count"), [form for form in FORMS if form[3] > 1])
def test_a_product_does_not_depend_on_its_neighbours(kind, vocab, columns, count):
    """Bit for bit: so a text is the same alone and in a batch."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, columns, generator=generator)
    matrix = quantise(weight, kind) if isinstance(kind, int) else Matrix(weight.to(getattr(torch, kind)))
    x = torch.randn(count, columns, generator=generator)
    scorer, scale = TokenScorer(matrix, bias=torch.randn(vocab), balance=torch.rand(vocab)), x.abs() + 0.1
    together = (scorer(x), *scorer.scores(x, scale), scorer.z_scores(x, scale)[0])
    for row in range(count):
        own = slice(row, row + 1)
        alone = scorer(x[own]), *scorer.scores(x[own], scale[own]), scorer.z_scores(x[own], scale[own])[0]
        assert all(torch.equal(one[own], other) for one, other in zip(together, alone, strict=True))


def test_native_code_is_here_and_serves_many_vectors():
    """Tests run where there is a compiler: without it the others would prove nothing of cpp/."""
    assert library.library() is not None
    weight, x = torch.randn(50, 64), torch.randn(19, 64)
    for matrix in (Matrix(weight), Matrix(weight.half()), quantise(weight + 3), quantise(weight, 4)):
        linear = Linear(matrix)
        assert linear.native_for(x) is not None
        y = linear(x)
        torch.testing.assert_close(y, x @ matrix.dense().T, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_widen_natively_as_in_torch(bits, monkeypatch):
    matrix = quantise(torch.randn(37, 192) + 1, bits)
    widened = matrix.dense()
    monkeypatch.setenv("CAUSAL_QWEN_COMPILE", "0")
    torch.testing.assert_close(widened, matrix.dense(), rtol=1e-6, atol=1e-6)


def test_native_code_is_never_given_less_than_it_reads():
    """It would read whatever lies behind."""
    matrix, x = Matrix(torch.randn(8, 64)), torch.randn(2, 64)
    with pytest.raises(ValueError, match=r"of shape \(2, 64\); got torch.float32 of shape \(2, 40\)"):
        Linear(matrix)(x[:, :40])
    with pytest.raises(ValueError, match=r"of shape \(8,\)"):
        Linear(matrix, torch.zeros(7))(x)
    wrong = {"bias": torch.zeros(9)}, {"balance": torch.zeros(7)}
    for terms, common in (*((vector, None) for vector in wrong), ({}, torch.zeros(3))):
        with pytest.raises(ValueError, match=r"expected torch\.float32 of shape"):
            TokenScorer(matrix, **terms).scores(x, x.abs(), common)
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        native.native_matrix(matrix.weight, None, None, torch.zeros(8, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_bias_of_another_type_is_the_same_bias(dtype):
    matrix, x, bias = Matrix(torch.randn(8, 64)), torch.randn(2, 64), torch.randn(8).bfloat16()
    expected = Linear(matrix)(x) + bias.float()
    torch.testing.assert_close(Linear(matrix, bias.to(dtype))(x), expected)
    scorer = TokenScorer(matrix, bias=bias.to(dtype), balance=bias.abs().to(dtype))
    loc, _ = scorer.scores(x, x.abs())
    torch.testing.assert_close(loc, expected)


def test_a_compiler_may_be_named_with_its_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "c++ -DNOTHING")
    commands = []
    monkeypatch.setattr(library, "_compile", lambda *words: commands.append(words) or words[1].touch())
    library.build(lambda line: None)
    monkeypatch.setenv("CXXFLAGS", "-O1 -fsanitize=address")
    library.build(lambda line: None)
    assert [command for command, _, _ in commands] == [["c++", "-DNOTHING"]] * 2
    assert [extra for _, _, extra in commands] == [[], ["-O1", "-fsanitize=address"]]


def test_what_does_not_lie_side_by_side_is_multiplied_in_torch():
    weight, x = torch.randn(64, 50).T, torch.randn(2, 64)
    torch.testing.assert_close(Linear(Matrix(weight))(x), x @ weight.T)
    with pytest.raises(ValueError, match="contiguous tensors on the CPU"):
        native.native_matrix(weight, None, None)


@pytest.fixture(scope="module")
def built_for_any(tmp_path_factory):
    """The cache of native code without -march=native and OpenMP; it is built once."""
    return tmp_path_factory.mktemp("any-processor")


@pytest.fixture
def any_processor(built_for_any, monkeypatch):
    """The plain twins run: what an unknown processor would do."""
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(built_for_any))
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(library, "FLAGS", tuple(flag for flag in library.FLAGS if flag != "-march=native"))
    monkeypatch.setattr(library, "THREADING", (None,))
    return built_for_any


@pytest.mark.slow
def test_native_code_of_any_processor_and_one_thread(any_processor):
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(20, 128, generator=generator), torch.randn(3, 128, generator=generator)
    whole = quantise((weight * 40).round().clamp(-127, 127) / 100)
    for matrix in (
        Matrix(weight),
        Matrix(weight.bfloat16()),
        Matrix(weight.half()),
        quantise(weight + 1),
        whole,
        quantise(weight, 4),
    ):
        W = matrix.dense()
        y, best = Linear(matrix).best(x)
        torch.testing.assert_close(y, x @ W.T, rtol=1e-3, atol=1e-3)
        assert torch.equal(best, y.argmax(-1))
        z_scores, best = TokenScorer(matrix).z_scores(x, x.abs())
        torch.testing.assert_close(z_scores, (x @ W.T) / (x.abs() @ W.abs().T), rtol=1e-3, atol=1e-3)
        assert torch.equal(best, z_scores.argmax(-1))
        assert torch.equal(TokenScorer(matrix).among(y, 1, x, x.abs())[1], y.argmax(-1))
    assert list((any_processor / "compiled").glob("native-*.so"))


@pytest.mark.parametrize("processor", ["this one", "any"])
def test_every_float16_widens_to_itself(processor, request):
    """All 65,536 of them: subnormal, infinite and not numbers too."""
    if processor == "any":
        request.getfixturevalue("any_processor")
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    columns = torch.zeros(2**16, 33, dtype=torch.float16)
    columns[:, 0] = columns[:, -1] = halves  # one in a whole group, one that is left over
    for column in (0, -1):
        x = torch.zeros(1, 33)
        x[0, column] = 1
        own = halves.float()
        other = own * 0  # what is not finite makes the sum no number
        torch.testing.assert_close(Linear(Matrix(columns))(x)[0], own + other, rtol=0, atol=0, equal_nan=True)


def test_what_is_no_number_stays_none():
    x = torch.randn(2, 64)
    x[1, 5] = float("nan")
    for matrix in (Matrix(torch.randn(9, 64)), quantise(torch.randn(9, 64)), quantise(torch.randn(9, 64), 4)):
        y = Linear(matrix)(x)
        assert y[0].isfinite().all()
        assert y[1].isnan().all()


def test_native_code_is_built_once_and_a_broken_compiler_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    lines = []
    monkeypatch.setattr(library, "_compile", lambda compiler, output, extra: output.write_bytes(b"built"))
    first, second = library.build(lines.append), library.build(lines.append)
    assert first == second
    assert first.read_bytes() == b"built"
    assert len(lines) == 1
    monkeypatch.undo()
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(library, "FLAGS", ("-no-such-flag",))
    with pytest.raises(library.subprocess.SubprocessError, match="no-such-flag"):
        library.build(lines.append)
    assert not [path for path in (tmp_path / "other").rglob("*") if path.is_file()]


def test_a_structure_of_another_size_is_an_error_and_no_silent_detour(monkeypatch):
    class CStep(ctypes.Structure):
        _fields_ = [*interface.CStep._fields_, ("forgotten", ctypes.c_int64)]

    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(interface, "STRUCTURES", (*interface.STRUCTURES[:-1], CStep))
    ours = ctypes.sizeof(interface.CStep)
    message = rf"CStep takes {ours + 8} bytes in kernels/interface\.py and {ours} in"
    with pytest.raises(RuntimeError, match=message):
        library.library()
    monkeypatch.setattr(interface, "STRUCTURES", (*interface.STRUCTURES[:-1], interface.CStep, CStep))
    with pytest.raises(RuntimeError, match=rf"CStep takes {ours + 8} bytes .* and 0 in"):
        library.library()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    columns=st.sampled_from([64, 192]),
    gain=st.sampled_from([1e-6, 1.0, 1e4]),
    bits=st.sampled_from([8, 4]),
)
def test_integers_err_by_half_a_level_at_most(seed, columns, gain, bits):
    weight = torch.randn(6, columns, generator=torch.Generator().manual_seed(seed)) * gain
    matrix = quantise(weight, bits)
    groups = weight.unflatten(-1, (matrix.scale.shape[1], -1))
    error = (matrix.dense() - weight).unflatten(-1, groups.shape[1:]).abs().amax(-1)
    assert (error <= 0.5001 * matrix.scale).all()
    assert (matrix.scale <= groups.abs().amax(-1) / (2 ** (bits - 1) - 1) * 1.0001).all()


def test_weights_that_came_from_few_bits_return_to_where_they_were():
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(4, 4, 1, generator=generator) + 0.1
    four = torch.randint(0, 16, (4, 4, 32), generator=generator)
    four[..., 0], four[..., 1] = 0, 15
    minimum = -torch.rand(4, 4, 1, generator=generator)
    eight = torch.randint(-127, 128, (4, 4, 32), generator=generator)
    eight[..., 0] = 127
    for weight in ((scale * four + minimum).flatten(1), (scale * eight).flatten(1)):
        torch.testing.assert_close(quantise(weight).dense(), weight, rtol=1e-5, atol=1e-5)
    assert quantise((scale * eight).flatten(1)).shift is None
    weight = (scale * four + minimum).flatten(1)
    torch.testing.assert_close(quantise(weight, 4).dense(), weight, rtol=1e-5, atol=1e-5)


def test_a_matrix_of_zeros_stays_zero_and_groups_must_be_whole():
    for bits in (8, 4):
        assert not quantise(torch.zeros(4, 64), bits).dense().any()
    with pytest.raises(ValueError, match="a matrix has 40: use bfloat16"):
        quantise(torch.zeros(4, 40))
    with pytest.raises(ValueError, match="64 columns at a time, and a matrix has 96: use int8"):
        quantise(torch.zeros(4, 96), 4)
