"""Published figures come from files: every page shows what benchmarks/results holds, and nothing else."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
REGION = re.compile(r"<!-- (figures|headlines): (.*?) -->\n(.*?)<!-- end -->", re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
REGIONS = [
    pytest.param(region, id=f"{page.relative_to(ROOT)}: {region[2]}")
    for page in PAGES
    for region in REGION.finditer(page.read_text(encoding="utf-8"))
]
# What a result looks like: a ratio, a share, or a time or rate.
FIGURE = re.compile(r"\d\s?(×|%|ms\b|seconds|minutes|GB|MB|MiB|tokens per second)")


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("render")


HELPERS = {
    "effect_data", "effect_learners", "frozen", "measure", "peers", "render", "replay", "structural",
    "table_data", "worlds", "writers",
}  # fmt: skip


@pytest.mark.parametrize("region", REGIONS)
def test_region_shows_its_files(region, render):
    """If this fails, run `make results`; if a file is missing, the message names the benchmark."""
    text, errors = render.rendered(region[0])
    assert not errors
    assert text == region[0]


def test_every_region_is_rendered_by_make_results(render):
    marked = {page for page in PAGES if "<!-- end -->" in page.read_text(encoding="utf-8")}
    assert marked == set(render.PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_mark_belongs_to_a_region(page):
    text = page.read_text(encoding="utf-8")
    outside = REGION.sub("", text)
    assert not re.search(r"<!-- (figures|headlines|end)", outside)


def test_every_file_is_published_and_every_benchmark_has_one():
    published = {name for region in REGIONS for name in region.values[0][2].split()}
    files = {file.stem for file in (BENCHMARKS / "results").glob("*.json")}
    assert files <= published, "a file that no page shows"
    scripts = {file.stem for file in BENCHMARKS.glob("*.py")} - HELPERS
    assert {name.partition(".")[0] for name in published} == scripts


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda file: file.stem)
def test_file_is_of_a_run_that_a_reader_can_repeat(file):
    command = json.loads(file.read_text(encoding="utf-8"))["command"].split()
    assert command[:2] == ["python", f"benchmarks/{file.name.partition('.')[0]}.py"]
    assert ("--quick" in command) == file.stem.endswith(".quick")
    assert "--smoke" not in command
    assert not any(word.startswith("/") for word in command)


def test_results_have_no_figure_that_is_typed_in():
    prose = REGION.sub("", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    assert not FIGURE.findall(prose)


@pytest.fixture
def speed(render, monkeypatch, tmp_path):
    """A record of scan_numbers on disk, and how to change it."""
    measure = importlib.import_module("measure")
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    script = importlib.import_module("scan_numbers")

    def save(growth):
        case = {"seconds": [0.1, 0.2], "mb_per_second": 10.0, "growth": growth, "numbers": 3}
        figures = {"sizes_mb": [1.0, 2.0], "cases": dict.fromkeys(script.texts(), case)}
        machine = measure.machine()
        measure.Record("scan_numbers", "python benchmarks/scan_numbers.py", machine, {}, figures).save()

    return save


def test_a_page_follows_its_file(render, speed):
    page = "before\n\n<!-- figures: scan_numbers -->\nold\n<!-- end -->\n\nafter\n"
    speed(growth=1.25)
    first, errors = render.rendered(page)
    assert not errors
    assert "old" not in first
    assert "| prose | 0.1000 s | 0.2000 s | 10.0 | 1.25 | 3 |" in first
    assert "`python benchmarks/scan_numbers.py`" in first
    assert first.startswith("before\n\n<!-- figures: scan_numbers -->\n\n")
    assert first.endswith("\n\n<!-- end -->\n\nafter\n")
    assert render.rendered(first) == (first, [])
    speed(growth=1.75)
    assert render.rendered(first)[0] == first.replace("1.25", "1.75")


def test_a_region_without_its_file_stays_and_is_named(render, speed):
    page = "<!-- figures: decode -->\nold\n<!-- end -->\n"
    text, errors = render.rendered(page)
    assert text == page
    assert "python benchmarks/decode.py --save" in errors[0]


def test_headlines_name_a_command_once(render):
    measure = importlib.import_module("measure")
    parity = {"max_abs_logit_diff": 0.0, "argmax_agreement": 1.0, "added_parameters_fraction": 0.01}
    figures = {"default": parity, "published": parity}
    record = measure.Record("transfer", "python benchmarks/transfer.py", {}, {}, figures)
    rows = list(render.headline_rows([record, record]))
    assert [row[2] for row in rows] == ["`python benchmarks/transfer.py`", "the same", "the same"] * 2
    table = measure.Table("", ("a|b", "c"), [("d", "e")])
    assert render.markdown(table) == "| a\\|b | c |\n| --- | --- |\n| d | e |"
