"""The demonstration: every step runs on a small base, and the report holds what it promises."""

import html.parser
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from causal_qwen.cli import app
from causal_qwen.demo import pictures
from causal_qwen.evaluation import page

PNG = b"\x89PNG\r\n\x1a\n"


def test_texts_are_escaped_and_probabilities_coloured():
    assert page.table([("<b>", "a & b")], header=("x", "y")) == (
        "<table><tr><th>x</th><th>y</th></tr><tr><td>&lt;b&gt;</td><td>a &amp; b</td></tr></table>"
    )
    spans = page.coloured(["<s>", "a", "b"], [None, 0.0, 1.0])
    assert "<span>&lt;s&gt;</span>" in spans
    assert spans.index("hsl(0 ") < spans.index("hsl(120 ")


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "deep" / "report.html"
    page.write_page(file, title="T & T", lead="lead", sections=[page.Section("S", "text", "", ["a < b"])])
    text = file.read_text(encoding="utf-8")
    assert "T &amp; T" in text
    assert "<pre>a &lt; b</pre>" in text
    assert [path.name for path in file.parent.iterdir()] == ["report.html"]


def test_pictures_are_drawn():
    records = [{"step": i, "train/cls_loss_mean": 9.0 - i, "train/reg_loss_effective": 2.0} for i in range(3)]
    assert pictures.loss_curve(records).startswith(PNG)
    U = np.random.default_rng(0).normal(size=(4, 5))
    assert pictures.cause_along_text(["a", " b", " ", "c"], U, np.ones((4, 5))).startswith(PNG)


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
    tested = [json.loads(line)["Name"] for line in (out / "cars.test.jsonl").read_text().splitlines()]
    assert len(tested) == 48
    assert (out / "cars" / "model.safetensors").is_file()
    assert "max_steps: 2" in (out / "cars.yaml").read_text()
