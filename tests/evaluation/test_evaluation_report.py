"""Reports show what was measured, whatever it was; pictures are inside."""

import pytest
import torch

from causal_qwen import Cauchy, CausalQwen2Config, ValueSpace
from causal_qwen.evaluation import Evaluation
from causal_qwen.evaluation.report import write_report


def evaluation(values, loc, scale, *, space=None, scores=None):
    """Three tokens, and numbers with the given laws in value space."""
    columns = (torch.tensor(column, dtype=torch.float64) for column in (loc, scale, values))
    loc, scale, values = columns
    return Evaluation(
        labels=torch.tensor([1, 2, 3]),
        chosen=torch.tensor([1, 2, 4]),
        confidence=torch.tensor([0.9, 0.5, 0.2]),
        prob_sum=torch.tensor([1.0, 1.1, 0.9]),
        token_means={"eval/ovr_nll": 1.0},
        U={"dist/U_loc_mean": 0.25},
        Y=Cauchy(loc, scale),
        values=values,
        fold_locs=torch.empty(len(values), 0),
        leverage=None,
        prob_num=torch.tensor([0.1, 0.2, 0.9]),
        config=configuration(space or ValueSpace("log"), scores),
    )


def configuration(space, scores):
    return CausalQwen2Config(
        value_space=space.kind,
        value_center=space.center,
        value_spread=space.spread,
        conformal_scores=scores,
        num_token_id=3,
    )


CASES = {
    "plain": evaluation([1.0, 20.0, 3.0], [0.5, 3.0, 1.2], [0.1, 0.2, 0.1], scores=[0.5, 1.0, 3.0]),
    "wide": evaluation([1.0, 1e6], [0.5, 3.0], [1e-3, 1e4]),
    "huge": evaluation([-1e300, 1e300], [0.0, 900.0], [1.0, 500.0]),
    "linear": evaluation([-5.0, 5.0], [-1e308, 1e308], [1.0, 1e308], space=ValueSpace("linear")),
    "constant": evaluation([7.0, 7.0, 7.0], [2.0, 2.0, 2.0], [0.1, 0.1, 0.1]),
    "one": evaluation([0.0], [0.0], [1.0]),
    "none": evaluation([], [], []),
}


def test_belief_is_that_of_training_where_it_found_wrong_labels():
    """A number at the center of their law is one of them, one as far off on the other side is not."""
    result = evaluation([3.0, 8.0, -2.0], [3.0] * 3, [1.0] * 3, space=ValueSpace("linear"))
    assert result.believed.tolist() == [True, True, True]  # within ten scale_Y
    result.config.wrong_labels = [0.3, 8.0, 0.5]
    assert result.believed.tolist() == [True, False, True]
    far = evaluation([-1e300, 1e300], [0.0, 0.0], [1e-3, 1e-3], space=ValueSpace("linear"))
    far.config.wrong_labels = [0.3, 8.0, 0.5]
    assert far.believed.tolist() == [False, False]


@pytest.mark.parametrize("wrong", [[0.3, 1.0], [0.0, 1.0, 1.0], [0.3, 1.0, 0.0], [0.3, float("nan"), 1.0]])
def test_a_law_of_wrong_labels_has_a_share_a_center_and_a_scale(wrong):
    with pytest.raises(ValueError, match="wrong_labels is"):
        CausalQwen2Config(wrong_labels=wrong)


@pytest.mark.parametrize("case", CASES)
def test_reports_of_any_numbers(case, tmp_path):
    """Warnings are errors: no overflow, no empty picture."""
    result = CASES[case]
    write_report(result, tmp_path / "report.html", title="A & B", facts={"model": "<mine>"})
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == (1 if case == "none" else 4)
    assert "A &amp; B" in page
    assert "&lt;mine&gt;" in page
    for name in result.metrics():
        assert f"<td>{name}</td>" in page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_report_says_which_intervals_it_shows(tmp_path):
    for case, words in (
        ("plain", "split conformal, from 3 numbers"),
        ("wide", "carries no conformal scores"),
    ):
        write_report(CASES[case], tmp_path / "report.md", title="Report")
        assert words in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_another_format_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"a report is \.html or \.md"):
        write_report(CASES["one"], tmp_path / "report.pdf", title="Report")


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_names_of_files_are_words_in_reports(tmp_path, suffix):
    name = "<img src=x onerror=alert(1)>|`*[a](b)\n# c.csv"
    path = tmp_path / f"report{suffix}"
    write_report(CASES["one"], path, title=f"Evaluation of {name}", facts={"data": name})
    page = path.read_text(encoding="utf-8")
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page
    if suffix == ".md":
        assert "[a](b)" not in page
        assert "\n# c" not in page
