"""The demonstration: every step runs on a small base, and the report holds what it promises."""

import dataclasses
import html.parser
import json

import pytest
import torch
from typer.testing import CliRunner

from causal_qwen.cli import app
from causal_qwen.demo import pictures, story
from causal_qwen.evaluation import page
from causal_qwen.evaluation.predict import Prediction

PNG = b"\x89PNG\r\n\x1a\n"


def test_texts_are_escaped():
    assert page.table([("<b>", "a & b")], header=("x", "y")) == (
        "<table><tr><th>x</th><th>y</th></tr><tr><td>&lt;b&gt;</td><td>a &amp; b</td></tr></table>"
    )


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "deep" / "report.html"
    page.write_page(file, title="T & T", lead="lead", sections=[page.Section("S", "text", "", ["a < b"])])
    text = file.read_text(encoding="utf-8")
    assert "T &amp; T" in text
    assert "<pre>a &lt; b</pre>" in text
    assert [path.name for path in file.parent.iterdir()] == ["report.html"]


def test_pictures_are_drawn():
    assert pictures.loss_curve([(1, 2.0), (2, 1.5), (3, 1.0)]).startswith(PNG)
    truth = torch.tensor([10.0, 20.0, 30.0])
    predictions = {"one": (truth, truth + 1), "another": (truth, truth + 40)}
    assert pictures.broken_labels(truth, predictions, unit="miles").startswith(PNG)


def test_a_fifth_of_the_labels_is_broken_and_nothing_else(tmp_path):
    story.write_table(tmp_path)
    clean, broken, test = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("cars", "broken", "test")
    )
    changed = [row for row, other in zip(clean, broken, strict=True) if row != other]
    assert len(changed) == pytest.approx(len(clean) / 5, abs=1)
    assert [row | {story.TARGET: 0} for row in clean] == [row | {story.TARGET: 0} for row in broken]
    names = {json.dumps(row) for row in clean}
    assert len(test) == 48
    assert not names & {json.dumps(row) for row in test}


def test_least_squares_follow_broken_labels(tmp_path):
    story.write_table(tmp_path)
    rows = (tmp_path / "test.jsonl").read_text().splitlines()
    truth = torch.tensor([json.loads(row)[story.TARGET] for row in rows])
    clean, broken = (
        float((story.least_squares(tmp_path, name) - truth).abs().median()) for name in ("cars", "broken")
    )
    assert clean < 3 < 20 < broken


def test_shifts_are_in_interval_widths_and_cells_name_what_they_show():
    truth = torch.tensor([10.0, 20.0], dtype=torch.float64)
    exact = story.Forecast(["a", "b"], truth, truth, truth - 2, truth + 2, 15.0, 0.9)
    rounded = dataclasses.replace(exact, median=truth + torch.tensor([0.0, 1.0]))
    assert exact.shift(rounded) == 0.25
    assert exact.width == 4
    assert exact.coverage == 1
    assert story.side_by_side(exact, rounded, 8)[1] == (
        "b", "20.0", "20.00  (18.0 – 22.0)", "21.00  (18.0 – 22.0)",
    )  # fmt: skip
    far = [Prediction("0", "x:", 1.0, 0.0, 9.0, 0.9, True), Prediction("1", "y:", 1.0, 0.0, 2.0, 0.9, False)]
    assert [row[-1] for row in story.far_rows(far)] == ["YES", "no"]


class Images(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.sources = []

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.sources.append(dict(attributes)["src"])


@pytest.mark.slow
def test_the_whole_demonstration_runs_on_a_small_base(base_directory, tmp_path):
    out = tmp_path / "demo"
    options = ["--base", str(base_directory), "--out", str(out), "--tokens", "3", "--steps", "2"]
    result = CliRunner().invoke(app, ["demo", *options], catch_exceptions=False)
    assert result.exit_code == 0
    assert "standard says what the base says: yes" in result.stdout
    assert "the same individual repeats itself: yes" in result.stdout
    images = Images()
    images.feed((out / "report.html").read_text(encoding="utf-8"))
    assert len(images.sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in images.sources)
    for name in ("cars", "broken", "products"):
        assert (out / name / "model.safetensors").is_file()
    assert "over 2 steps" in result.stdout
    assert result.stdout.rstrip().endswith(f"serve {tmp_path}/demo/cars")
    recipe = (out / "broken.yaml").read_text()
    assert "method: heads" in recipe
    assert "broken.jsonl" in recipe
