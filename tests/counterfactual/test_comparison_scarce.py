"""Comparisons that see little: few pairs, pairs that agree, scores that are missing, texts that loop."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from causal_qwen import Engine, Side, compare
from causal_qwen.counterfactual.comparison import PlainSpeaker, Said, Score, rank, score_of
from causal_qwen.counterfactual.comparison.pairing import worth
from causal_qwen.counterfactual.comparison.plan import Outline, Pair
from causal_qwen.counterfactual.comparison.report import MOST_COMPARED, _blocks, write_report
from causal_qwen.counterfactual.comparison.run import conclude
from causal_qwen.counterfactual.comparison.sequential import Design, planned_looks
from causal_qwen.counterfactual.comparison.statistics import estimate, mean_difference
from causal_qwen.generation.decoding import GeneratedNumber
from causal_qwen.individual import Individual
from causal_qwen.prompting import Answer, Settings, Speaker
from conftest import tiny_base, tiny_causal, tiny_processor, tiny_tokenizer


@pytest.fixture(scope="module")
def speaker(one_thread):
    model = tiny_causal(noise_gain=5.0)
    return Speaker(model, tiny_processor(), Engine.from_model(model))


SHORT = Settings(max_new_tokens=6)


def side(talker, settings=SHORT, prompts=("Hello",), **options):
    return Side(talker, list(prompts), settings, **options)


def said(text, row=None, numbers=()):
    return Said("prompt", Answer(text, numbers, None, "length", 3), "a", 7, row or {})


def pairs_of(scores_a, scores_b, name="s"):
    """Of one prompt, without texts."""
    for index, (one, other) in enumerate(zip(scores_a, scores_b, strict=True)):
        text = {"prompt": "p", "individual": index, "text": "t"}
        yield Pair(index, 0, text, text, {name: one}, {name: other})


@pytest.mark.parametrize(("rate", "count"), [(0.02, 40), (0.05, 40), (0.02, 100)])
def test_pairs_that_all_agree_are_no_proof(rate, count):
    """One side is right a little more often, and often no pair shows it."""
    draw, hits, runs = np.random.default_rng(1), 0, 400
    for _ in range(runs):
        right = draw.binomial(1, rate, (count, 1)).astype(float)
        found = estimate(right, np.zeros_like(right), seen=count, level=0.95, span=1.0)
        hits += found.lower <= rate <= found.upper
    assert hits / runs >= 0.93


@pytest.mark.parametrize("width", [0.1, 0.2])
def test_pairs_that_all_agree_are_not_narrow(width):
    draw, hits, runs = np.random.default_rng(2), 0, 200
    design = Design(planned_looks(40, 5))
    for _ in range(runs):
        values = draw.choice([1.0, 0.0, -1.0], (40, 1), p=[0.07, 0.9, 0.03])
        for index, count in enumerate(design.looks):
            look = design.look(index, mean_difference(values[:count], crossed=False, span=1.0))
            if look.significant or look.repeated.upper - look.repeated.lower <= width:
                break
        hits += look.interval.lower <= 0.04 <= look.interval.upper
    assert hits / runs >= 0.92


@pytest.mark.parametrize("crossed", [False, True])
def test_scores_that_never_vary_say_nothing_of_others(crossed):
    found = estimate(np.zeros((9, 2)), np.zeros((9, 2)), seen=18, level=0.95, crossed=crossed)
    assert (found.difference, found.lower, found.upper) == (0, None, None)
    assert (found.variance_ratio, found.samples_saved, found.samples_saved_share) == (None, None, None)


def test_one_and_the_same_side_never_differs(speaker):
    """Whatever its scores are; of strangers that is not known."""
    same = compare(side(speaker), side(speaker), individuals=16, scores=["match:no"], sequential=True).first
    assert (same.difference, same.lower, same.upper) == (0, 0, 0)
    other = compare(side(speaker), side(speaker, Settings(max_new_tokens=6, temperature=1.01)), individuals=8)
    apart = compare(side(speaker), side(speaker), individuals=8, scores=["match:no"], coupling="independent")
    assert other.first.lower < 0 < other.first.upper
    assert apart.first.lower < 0 < apart.first.upper


@pytest.mark.parametrize("crossed", [False, True])
def test_the_jackknife_leaves_out_one_at_a_time(crossed):
    draw = np.random.default_rng(3)
    one = draw.normal(size=(7, 3))
    other = one + draw.normal(size=(7, 3))
    one[2, 1] = other[2, 1] = np.nan

    def ratio(left):
        a, b = (np.where(left, np.nan, scores) for scores in (one, other))
        of_one, of_other, of_difference = (np.nanvar(s, 0, ddof=1).sum() for s in (a, b, a - b))
        return math.log(of_difference / (of_one + of_other))

    found = worth(one, other, level=0.95, crossed=crossed)
    variance, freedom = 0.0, 0
    groups = [None] if crossed else range(3)
    for prompt in groups:
        values = []
        for row in range(7):
            left = np.zeros((7, 3), dtype=bool)
            left[row, slice(None) if crossed else prompt] = True
            if np.isfinite(one[left]).any():
                values.append(ratio(left))
        variance += (len(values) - 1) / len(values) * np.square(np.array(values) - np.mean(values)).sum()
        freedom += len(values) - 1
    reach = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    assert math.log(found.ratio) == pytest.approx(ratio(np.zeros((7, 3), dtype=bool)))
    assert np.log(found.ratio_ends) == pytest.approx(
        [math.log(found.ratio) - reach, math.log(found.ratio) + reach]
    )


@pytest.mark.parametrize("shape", [(3, 16), (5, 10), (10, 5), (50, 1)])
def test_intervals_of_ratio_and_correlation_cover_with_few_of_a_prompt(shape):
    draw, ratios, correlations, runs = np.random.default_rng(4), 0, 0, 300
    for _ in range(runs):
        own = draw.normal(size=shape)
        found = worth(own + draw.normal(size=shape), own + draw.normal(size=shape), level=0.95, crossed=False)
        ratios += found.ratio_ends.lower <= 0.5 <= found.ratio_ends.upper
        correlations += found.correlation_ends.lower <= 0.5 <= found.correlation_ends.upper
    assert ratios / runs >= 0.91
    assert correlations / runs >= 0.91


def test_two_of_a_prompt_have_a_ratio_without_an_interval():
    draw = np.random.default_rng(5)
    found = estimate(draw.normal(size=(2, 9)), draw.normal(size=(2, 9)), seen=18, level=0.95)
    assert found.variance_ratio > 0
    assert (found.variance_ratio_lower, found.correlation_upper) == (None, None)
    one = draw.normal(size=(20, 1))
    other = one.copy()
    other[3] += 1.0  # one pair that differs: without it there is no spread
    found = estimate(one, other, seen=20, level=0.95)
    assert 0 == found.variance_ratio_lower < found.variance_ratio < found.variance_ratio_upper
    assert found.correlation_lower < found.correlation < found.correlation_upper <= 1


def test_a_score_that_no_text_has_ends_in_no_interval(tmp_path):
    """In the sequential mode too, and in its report."""
    outline = Outline(16, 1, ("s",), "individual", ("a", "b"), looks=(8, 16))
    result = conclude(outline, pairs_of([None] * 16, [None] * 16))
    told = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (told["lower"], told["sequential"]["repeated_upper"], told["stopped"]) == (None, None, "all pairs")
    write_report(result, tmp_path / "report.html")
    ranking = rank({"a": np.full((4, 1), np.nan), "b": np.ones((4, 1)), "c": np.zeros((4, 1))})
    assert ranking.by_mean == ("b", "c", "a")
    json.dumps(ranking.to_dict(), allow_nan=False)


def test_a_score_has_one_interval_wherever_it_is_told():
    draw = np.random.default_rng(6)
    outline = Outline(40, 1, ("s",), "individual", ("a", "b"), looks=planned_looks(40, 5))
    told = conclude(outline, pairs_of((draw.normal(size=40) + 2).tolist(), [0.0] * 40)).to_dict()
    assert told["stopped"] == "difference"
    assert (told["scores"]["s"]["lower"], told["scores"]["s"]["upper"]) == (told["lower"], told["upper"])


def test_numbers_agree_as_they_are_written():
    number = GeneratedNumber(position=0, value=4.0003, lower=3.5, upper=4.5)
    texts = [
        said("4", {"answer": 4}, (number,)),
        said("in 1999 it was 4", {"answer": 4}),
        said("", {"answer": 4}),
    ]
    assert score_of("numeric:answer")(texts) == [1, 0, 0]
    assert score_of("number")(texts[:1]) == [4.0003]


@pytest.mark.parametrize("value", [np.float32(4), np.int64(4), torch.tensor(4.0), True])
def test_numbers_of_other_libraries_are_scores(value):
    assert Score("own", lambda texts: [value])([said("x")]) == [float(value)]
    with pytest.raises(ValueError, match="a score is a number"):
        Score("own", lambda texts: ["4"])([said("x")])


def test_columns_and_commands_that_are_not_there_are_named_first(speaker):
    with pytest.raises(ValueError, match="names no command"):
        score_of("command: ")
    rows = [{"answer": 1}]
    with pytest.raises(ValueError, match="prompt 1 has no 'wrong' among its fields: answer"):
        compare(side(speaker, rows=rows), side(speaker, rows=rows), individuals=2, scores=["exact:wrong"])


def test_scores_of_another_function_are_not_mixed(speaker, tmp_path, monkeypatch):
    """A file is continued by the same score alone, not by another one of its name."""
    module, output = tmp_path / "changing_score.py", tmp_path / "pairs.jsonl"
    module.write_text("def own(said):\n    if said.side == 'b': raise ValueError('half way')\n    return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = score_of("changing_score:own").version
    module.write_text("def own(said):\n    return 1000\n")
    after = score_of("changing_score:own").version
    assert before != after
    plan = {"individuals": 4, "batch_size": 2, "output": output}
    calls = []

    def breaks(texts):
        calls.append(len(texts))
        if len(calls) > 2:
            raise ValueError("half way")
        return [0.0] * len(texts)

    with pytest.raises(ValueError, match="half way"):
        compare(side(speaker), side(speaker), scores=[Score("own", breaks, before)], **plan)
    mended = Score("own", lambda texts: [1000.0] * len(texts), after)
    with pytest.raises(ValueError, match="begun with other settings"):
        compare(side(speaker), side(speaker), scores=[mended], **plan)


def test_a_text_that_stopped_does_not_count_its_padding(one_thread):
    plain = PlainSpeaker(tiny_base(), tiny_tokenizer())
    people = [Individual(seed) for seed in range(6)]
    free = plain.draw(["Hello"] * 6, Settings(max_new_tokens=12, mode="compatible"), people)
    stop = next(answer.text[2] for answer in free if len(answer.text) > 4)
    settings = Settings(max_new_tokens=12, mode="compatible", stop=(stop,))
    together = plain.draw(["Hello"] * 6, settings, people)
    alone = [plain.draw(["Hello"], settings, [person])[0] for person in people]
    assert together == alone
    assert any(answer.finish_reason == "stop_string" for answer in alone)


def test_long_loops_are_not_aligned_word_by_word():
    """Which takes the cube of their length."""
    ours, theirs = ["the"] * 3000, ["the", "cat"] * 1500
    blocks = list(_blocks(ours, theirs))
    assert [differs for differs, *_ in blocks] == [False, True, False]
    few = list(_blocks(["a", "b", "c", "d"], ["a", "x", "c", "d", "e"]))
    for places, words in ((slice(1, 3), ["a", "b", "c", "d"]), (slice(3, 5), ["a", "x", "c", "d", "e"])):
        told = [word for block in few for word in words[slice(*block[places])]]
        assert told == words
    assert [few[0][0], few[1][0]] == [False, True]
    assert MOST_COMPARED < 1000
