"""Comparison: couplings, null comparisons, files that are continued, scores and refusals."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from causal_qwen import Engine, Side, compare
from causal_qwen.counterfactual.comparison import (
    Comparison,
    Judge,
    Pair,
    PlainSpeaker,
    Said,
    Score,
    conclude,
    score_of,
    write_pairs,
)
from causal_qwen.counterfactual.comparison.gumbel import GumbelNoise, gumbel, token_bytes, token_keys
from causal_qwen.counterfactual.comparison.report import write_report
from causal_qwen.counterfactual.comparison.speakers import check_cause_space
from causal_qwen.individual import Individual
from causal_qwen.packed_tokenizer import PackedTokenizer, tokenizer_state
from causal_qwen.prompting import Answer, Settings, Speaker
from conftest import tiny_base, tiny_causal, tiny_processor, tiny_tokenizer

PROMPTS = ["Hello", "It cost 12 euros"]
SHORT = Settings(max_new_tokens=6)


@pytest.fixture(scope="module")
def speaker(one_thread):
    model = tiny_causal(noise_gain=5.0)
    return Speaker(model, tiny_processor(), Engine.from_model(model))


@pytest.fixture(scope="module")
def plain(one_thread):
    return PlainSpeaker(tiny_base(), tiny_tokenizer())


def side(talker, settings=SHORT, prompts=PROMPTS, **options):
    return Side(talker, prompts, settings, **options)


def said(text, row=None, **fields):
    return Said("prompt", Answer(text, (), None, "length", 3, **fields), "a", 7, row or {})


@pytest.mark.parametrize("coupling", ["individual", "gumbel"])
def test_a_null_comparison_has_no_difference_at_all(speaker, coupling):
    result = compare(
        side(speaker), side(speaker), individuals=6, scores=["length", "distinct"], coupling=coupling
    )
    for estimate in result.estimates.values():
        assert (estimate.difference, estimate.lower, estimate.upper, estimate.differing) == (0, 0, 0, 0)
        assert estimate.variance_ratio == 0
    assert (result.pairs, result.extremes) == (12, ())


def test_strangers_are_not_coupled(speaker):
    result = compare(side(speaker), side(speaker), individuals=8, scores=["length"], coupling="independent")
    assert result.first.differing > 4
    seeds = {(pair.a["individual"], pair.b["individual"]) for pair in result.extremes}
    assert all(other - one == 8 * len(PROMPTS) for one, other in seeds), "nobody answers twice"


def test_each_prompt_has_individuals_of_its_own_unless_crossed(speaker):
    sides = side(speaker), side(speaker, prompts=[f"{prompt}!" for prompt in PROMPTS])
    own, crossed = (
        list(Comparison(*sides, individuals=3, crossed=crossed).pairs()) for crossed in (False, True)
    )
    assert all(pair.a["individual"] == pair.b["individual"] for pair in [*own, *crossed])
    assert sorted(pair.a["individual"] for pair in own) == list(range(6))
    assert sorted(pair.a["individual"] for pair in crossed) == [0, 0, 1, 1, 2, 2]
    one, other = (Comparison(*sides, individuals=3, crossed=crossed).facts() for crossed in (False, True))
    assert one != other, "a file of one is not continued by the other"


def test_the_noise_belongs_to_the_index_of_the_token_not_to_the_prompt(speaker):
    """A prompt that is longer, but says nothing new to a model that sees one token back, changes nothing."""
    noise = GumbelNoise(token_keys(tiny_tokenizer(), 300), [Individual(3)])
    short, long = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 9, dtype=torch.long)
    first = noise(short, torch.zeros(1, 300))
    again = GumbelNoise(noise.keys, [Individual(3)])(long, torch.zeros(1, 300))
    torch.testing.assert_close(first, again)
    assert not torch.equal(noise(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 300)), first)


def test_an_individual_may_be_at_two_places_of_a_batch():
    """Where texts of a batch are not of one age, as in vLLM."""
    keys, people = token_keys(tiny_tokenizer(), 300), [Individual(3), Individual(3, start=4)]
    rows = GumbelNoise(keys, people)(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 300))
    torch.testing.assert_close(rows, torch.from_numpy(np.stack([gumbel(3, 0, keys), gumbel(3, 4, keys)])))


def test_gumbel_choices_are_draws_from_softmax():
    keys = np.arange(8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    logits = np.array([2.0, 1.5, 1.0, 0.0, 0.0, -1.0, -2.0, -3.0])
    draws = [
        int((logits + gumbel(seed, position, keys)).argmax()) for seed in range(400) for position in range(25)
    ]
    expected = np.exp(logits) / np.exp(logits).sum() * len(draws)
    assert stats.chisquare(np.bincount(draws, minlength=8), expected).pvalue > 1e-3


def test_gumbel_noise_has_its_law_for_each_seed_position_and_token():
    """And is not the same for neighbours, nor correlated with them."""
    keys = token_keys(tiny_tokenizer(), 300)
    rows = np.stack([gumbel(seed, position, keys) for seed in range(20) for position in range(10)])
    assert stats.kstest(rows.ravel()[::3], "gumbel_r").pvalue > 1e-3
    assert stats.kstest(rows[:, 5], "gumbel_r").pvalue > 1e-3
    assert abs(np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(rows[:, :-1].ravel(), rows[:, 1:].ravel())[0, 1]) < 0.02


def other_vocabulary():
    """Letters as text with ▁ for a space, and tokens of several bytes: another kind, in another order."""
    names = ["<0x0A>", "▁", *"zyxwvutsrqponmlkjihgfedcba", "the", "▁the", "<|stop|>"]
    backend = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|stop|>")


def test_tokens_with_the_same_bytes_have_the_same_noise_in_every_vocabulary():
    one, other = tiny_tokenizer(), other_vocabulary()
    keys, others = token_keys(one, 300, [257]), token_keys(other, 40, [30])
    for letter in "abcxyz":
        mine, theirs = one.get_vocab()[letter], other.get_vocab()[letter]
        assert keys[mine] == others[theirs]
    space, newline = one.get_vocab()["Ġ"], one.get_vocab()["Ċ"]
    assert (keys[space], keys[newline]) == (others[1], others[0])
    assert keys[257] == others[30], "the end of a text is the end of a text, whatever it is called"
    assert len(set(token_bytes(one, 300, [257]))) == 300, "no two rows share their noise"
    shared = set(keys.tolist()) & set(others.tolist())
    noise, theirs = gumbel(5, 2, keys), gumbel(5, 2, others)
    for key in shared:
        assert noise[keys.tolist().index(key)] == theirs[others.tolist().index(key)]


def test_a_packed_tokenizer_knows_the_same_bytes():
    """The native engine's of a directory: it must draw what transformers draws."""
    tokenizer = tiny_tokenizer()
    packed = PackedTokenizer.of(tokenizer.backend_tokenizer.to_str(), tokenizer_state(tokenizer))
    assert token_bytes(packed, 300, [257]) == token_bytes(tokenizer, 300, [257])


def test_any_causal_language_model_can_be_compared(speaker, plain):
    same = compare(side(plain), side(plain), individuals=4, scores=["tokens", "length"], coupling="gumbel")
    assert same.first.differing == 0
    result = compare(side(plain), side(speaker), individuals=4, scores=["length"], coupling="gumbel")
    assert result.pairs == 8
    with pytest.raises(ValueError, match="one of the models has none; convert it"):
        compare(side(plain), side(speaker), individuals=4)
    with pytest.raises(ValueError, match="mode 'causal' with coupling 'gumbel'"):
        compare(side(speaker, Settings(mode="causal")), side(speaker), individuals=4, coupling="gumbel")
    with pytest.raises(ValueError, match="samples tokens, not individuals"):
        compare(side(speaker, Settings(mode="compatible")), side(speaker), individuals=4)


def test_a_plain_model_draws_what_ours_draws(plain):
    """The same weights in transformers and converted choose the same tokens under the same Gumbel noise."""
    from causal_qwen import convert
    from causal_qwen.conversion import Base

    converted = convert(Base("tiny", plain.model, plain.tokenizer), calibration="none")
    ours = Speaker(converted.model, converted.processor)
    result = compare(side(plain), side(ours), individuals=5, scores=["length", "tokens"], coupling="gumbel")
    assert result.first.differing == 0


def test_individuals_need_a_common_cause_space(speaker):
    narrow = tiny_causal(hidden_size=16)
    with pytest.raises(ValueError, match="32 and 16 dimensions"):
        check_cause_space(speaker, Speaker(narrow, tiny_processor()))
    stranger = tiny_causal()
    with torch.no_grad():
        stranger.lm_head.weight.copy_(torch.randn_like(stranger.lm_head.weight))
    with pytest.raises(ValueError, match="not of one origin"):
        check_cause_space(speaker, Speaker(stranger, tiny_processor()))
    relative = tiny_causal()
    with torch.no_grad():
        relative.lm_head.weight.add_(
            0.3 * relative.lm_head.weight.std() * torch.randn_like(relative.lm_head.weight)
        )
    check_cause_space(speaker, Speaker(relative, tiny_processor()))


def test_settings_are_compared(speaker):
    colder = Settings(max_new_tokens=6, temperature=0.0)
    result = compare(side(speaker), side(speaker, colder), individuals=6, scores=["distinct"])
    assert result.first.differing > 0
    texts = {pair.b["text"] for pair in result.extremes if pair.prompt == 0}
    assert len(texts) == 1, "without noise all individuals say the same"


def test_a_comparison_that_was_cut_goes_on_where_it_was(speaker, tmp_path):
    warm = Settings(max_new_tokens=6, temperature=1.5)
    options = {"individuals": 5, "scores": ["length"], "batch_size": 3}
    whole = tmp_path / "whole.jsonl"
    expected = compare(side(speaker), side(speaker, warm), output=whole, **options)

    class Cut(Exception):
        pass

    texts = 0

    def failing(batch):
        nonlocal texts
        texts += len(batch)
        if texts > 14:
            raise Cut
        return [float(len(one.text)) for one in batch]

    cut = tmp_path / "cut.jsonl"
    with pytest.raises(Cut):
        compare(
            side(speaker), side(speaker, warm), output=cut, **options | {"scores": [Score("length", failing)]}
        )
    assert 0 < len((tmp_path / "cut.jsonl.partial").read_text().splitlines()) - 1 < 10
    with pytest.raises(ValueError, match="begun with other settings"):
        compare(side(speaker), side(speaker), output=cut, **options)
    again = compare(side(speaker), side(speaker, warm), output=cut, **options)
    assert again.to_dict() == expected.to_dict()
    assert cut.read_text() == whole.read_text()
    line = json.loads(cut.read_text().splitlines()[0])
    assert line["a"]["text"]
    assert line["scores_a"]["length"] == len(line["a"]["text"])


def test_the_sequential_mode_stops_when_it_is_clear(speaker):
    always = Score("side", lambda batch: [float(one.side == "a") + 0.01 * (one.seed % 3) for one in batch])
    varied = Score("seed", lambda batch: [(one.seed % 5) * (1 if one.side == "a" else 0.5) for one in batch])
    tiny = Settings(max_new_tokens=1)
    options = {"individuals": 24, "sequential": True, "looks": 3}
    early = compare(side(speaker, tiny), side(speaker, tiny), scores=[varied, always], **options)
    assert (early.stopped, early.pairs, early.look.individuals) == ("difference", 16, 8)
    assert early.first.lower > 0
    assert early.to_dict()["sequential"]["repeated_lower"] <= early.first.lower
    null = Score("null", lambda batch: [float((one.seed * 7 + (one.side == "a") * 3) % 5) for one in batch])
    late = compare(side(speaker, tiny), side(speaker, tiny), scores=[null], **options)
    assert late.stopped in ("all pairs", "difference")
    narrow = compare(side(speaker, tiny), side(speaker, tiny), scores=[null], width=50.0, **options)
    assert narrow.pairs == 16
    assert narrow.stopped == "width"


def test_pairs_arrive_one_by_one(speaker):
    """As a server consumes them."""
    comparison = Comparison(side(speaker), side(speaker), individuals=3, scores=["length"], batch_size=2)
    tally, pairs = comparison.tally(), comparison.pairs()
    first = next(pairs)
    assert (first.individual, first.prompt) == (0, 0)
    tally.add(first.individual, first.prompt, (1.0,), (0.0,))
    assert tally.estimate("length").pairs == 0, "one pair of a prompt has no variance"
    rest = list(pairs)
    assert len(rest) + 1 == comparison.total == 6
    assert [pair.prompt for pair in (first, *rest)] == [0, 0, 0, 1, 1, 1]


def test_pairs_that_processes_share_are_those_of_one(speaker, tmp_path):
    """Each writes every third one; dealt out again in turn they are the whole, and say the same."""
    warm = Settings(max_new_tokens=6, temperature=1.5)
    plan = {"individuals": 5, "scores": [score_of("length")], "batch_size": 2}
    expected = compare(side(speaker), side(speaker, warm), output=tmp_path / "whole.jsonl", **plan)
    parts = []
    for index in range(3):
        comparison = Comparison(side(speaker), side(speaker, warm), **plan, step=(index, 3))
        write_pairs(comparison, tmp_path / f"{index}.jsonl")
        parts.append((tmp_path / f"{index}.jsonl").read_text().splitlines())
        assert len(parts[-1]) == comparison.total
    lines = [parts[row % 3][row // 3] for row in range(10)]
    assert lines == (tmp_path / "whole.jsonl").read_text().splitlines()
    result = conclude(comparison.outline, (Pair(**json.loads(line)) for line in lines))
    assert result.to_dict() == expected.to_dict()
    with pytest.raises(ValueError, match="a look needs all pairs"):
        Comparison(side(speaker), side(speaker), individuals=16, looks=(8, 16), step=(0, 2))


def test_scores(tmp_path, monkeypatch):
    assert score_of("length")([said("abc"), said("")]) == [3, 0]
    assert score_of("distinct")([said("x", token_ids=(1, 2, 1))]) == [2]
    assert score_of(r"match:^\s*\d+$")([said(" 12"), said("12 a")]) == [1, 0]
    values = score_of("number")([said("it is 3.5 or 4"), said("none")])
    assert values[0] == 3.5
    assert math.isnan(values[1])
    row = {"answer": "42"}
    assert score_of("exact:answer")([said(" 42\n", row), said("42.0", row)]) == [1, 0]
    assert score_of("numeric:answer")([said("42.0 sheep", row), said("no", row), said("41", row)]) == [
        1,
        0,
        0,
    ]
    (tmp_path / "own_scores.py").write_text("def shout(said):\n    return said.text.count('!')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert score_of("own_scores:shout")([said("a!!")]) == [2]
    program = "import sys, json; [print(len(json.loads(line)['text'])) for line in sys.stdin]"
    assert score_of(f'command:{sys.executable} -c "{program}"')([said("four"), said("x")]) == [4, 1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", "is unknown; give length"),
        ("match:(", "not a regular expression"),
        ("match", "needs a parameter: match:REGEX"),
        ("nats", "needs a judge"),
        ("no_such_module:function", "No module named"),
        ("math:no_such", "no_such"),
    ],
)
def test_scores_that_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        score_of(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact:wrong", "has no 'wrong' among its fields: answer"),
        ("command:false", "ended with code 1"),
        ("command:no-such-program", "No such file"),
        ("command:echo a", "a number per line"),
        ("command:echo 1 2", "gave 2 numbers for 1 texts"),
        ("json:dumps", "not JSON serializable|a score is a number"),
    ],
)
def test_scores_that_fail_say_why(spec, message):
    with pytest.raises((ValueError, TypeError), match=message):
        score_of(spec)([said("text", {"answer": 1})])


def test_the_judge_reads_nats_on_either_engine(speaker, plain):
    texts = [said("abc def"), said("x"), said("")]
    ours, engine_free = Judge(speaker)(texts), Judge(Speaker(speaker.model, speaker.processor))(texts)
    assert ours[:2] == pytest.approx(engine_free[:2], rel=1e-4)
    assert math.isnan(ours[2])
    ids = plain.tokenizer("prompt")["input_ids"]
    whole = torch.tensor([ids + plain.tokenizer("abc def")["input_ids"]])
    with torch.no_grad():
        logits = plain.model(whole).logits[0, len(ids) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, whole[0, len(ids) :])
    assert Judge(plain)(texts)[0] == pytest.approx(float(expected), rel=1e-4)


def test_the_judge_gives_every_text_its_own_nats_in_whatever_company(speaker):
    texts = [said(text) for text in ("a longer text than the others", "x", "abc def", "x", "abc def", "yz")]
    together, alone = Judge(speaker)(texts), [Judge(speaker)([text])[0] for text in texts]
    assert together == pytest.approx(alone, rel=1e-4)
    assert together[1] == together[3]
    assert len(set(together)) == 4


def test_the_judge_reads_the_values_of_a_prompt(speaker):
    cheap, dear = (
        Said(prompt, Answer(" euros", (), None, "length", 3), "a", 1, {})
        for prompt in ("It cost 12", "It cost 90000")
    )
    ours = Judge(speaker)([cheap, dear])
    assert ours == pytest.approx(Judge(Speaker(speaker.model, speaker.processor))([cheap, dear]), rel=1e-4)
    assert ours[0] != ours[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"individuals": 1}, "at least 2"),
        ({"coupling": "twins"}, "choose one of individual, gumbel, independent"),
        ({"scores": []}, "at least one"),
        ({"scores": ["length", "length"]}, "each once"),
        ({"level": 1.0}, "strictly between 0 and 1"),
        ({"width": 1.0}, "needs the sequential mode"),
        ({"seed": 2**64 - 1}, "seed is"),
        ({"batch_size": 0}, "at least 1"),
        ({"individuals": 6, "sequential": True}, "too few to look"),
    ],
)
def test_bad_inputs_are_refused(speaker, options, message):
    with pytest.raises(ValueError, match=message):
        compare(side(speaker), side(speaker), **{"individuals": 4} | options)
    with pytest.raises(ValueError, match="2 prompts against 1"):
        compare(side(speaker), side(speaker, prompts=["x"]), individuals=4)


def test_the_report_shows_pairs_and_escapes_them(speaker, tmp_path):
    cold = Settings(max_new_tokens=6, temperature=0.0)
    result = compare(
        side(speaker, prompts=["<b>Hello"], name="<one>"),
        side(speaker, cold, prompts=["<b>Hello"], name="two & three"),
        individuals=16,
        scores=["distinct", "length"],
        sequential=True,
        looks=2,
    )
    write_report(result, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;one&gt;" in page
    assert "two &amp; three" in page
    assert "&lt;b&gt;Hello" in page
    assert "<b>Hello" not in page
    assert "prefers-color-scheme: dark" in page
    assert page.count('class="pair"') == len(result.extremes) > 0
    assert "http" not in page, "nothing is fetched"


def test_models_of_other_architectures_have_what_a_comparison_needs(one_thread):
    """GPT-2: other names in its configuration, learned positions, no generation config of its own."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=32, eos_token_id=257)
    other = PlainSpeaker(GPT2LMHeadModel(config).eval(), tiny_tokenizer())
    result = compare(side(other), side(other), individuals=3, scores=["length"], coupling="gumbel")
    assert result.first.differing == 0
    with pytest.raises(ValueError, match="do not fit the context of 32"):
        compare(side(other), side(other, prompts=["Hello", "long " * 9]), individuals=3, coupling="gumbel")
