"""A report of an evaluation: one HTML or Markdown file with the metrics and the pictures inside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from causal_qwen.conversion.files import write_file
from causal_qwen.evaluation import page, plots
from causal_qwen.evaluation.markdown import words
from causal_qwen.evaluation.run import Evaluation
from causal_qwen.intervals import interval_kind

__all__ = ["REPORT_FORMATS", "write_report"]

REPORT_FORMATS = (".html", ".md")
HEADER = ("metric", "value", "meaning")
MEANINGS = {
    "eval/accuracy": "share of next tokens that are right",
    "eval/num_precision": "of the numbers announced, share that come",
    "eval/num_recall": "of the numbers that come, share announced",
    "eval/num_f1": "both",
    "eval/reg_mae": "mean absolute error of the numbers",
    "eval/reg_mdae": "median absolute error of the numbers",
    "eval/reg_crps": "score of the law of the numbers, in value space; lower is better",
    "eval/coverage_50": "share of numbers inside their 50% interval",
    "eval/coverage_90": "share of numbers inside their 90% interval",
    "eval/coverage_50_raw": "the same, of the Cauchy law itself",
    "eval/coverage_90_raw": "the same, of the Cauchy law itself",
    "eval/coverage_90_believed": "the same, of the labels that the likelihood believes",
    "eval/believed": "share of these labels: more probably right than wrong",
    "eval/extrapolates": "share of numbers beyond what training has seen",
    "eval/num_ece": "expected calibration error of P_<NUM>",
    "eval/width_90_median": "median width of the 90% intervals",
    "eval/ovr_nll": "−log(P_y/ΣP), nats per token",
    "eval/softmax_nll": "−log softmax, nats per token",
    "eval/brier": "squared error of P/ΣP, 0 to 2",
    "eval/ece": "expected calibration error of P/ΣP",
    "dist/ovr_prob_sum_median": "ΣP; 1 when calibrated",
    "dist/mode_agreement": "share of tokens that standard and compatible choose alike",
}


def write_report(
    result: Evaluation, path: Path, *, title: str, facts: Mapping[str, str] | None = None
) -> None:
    """Write the report; the file appears only when it is complete.

    Args:
        result: What to report.
        path: .html or .md.
        title: First line.
        facts: Shown above the metrics, such as which model and which data.

    Raises:
        ValueError: If the file is neither .html nor .md.
    """
    if path.suffix.lower() not in REPORT_FORMATS:
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; a report is .html or .md")
    intervals = (
        "the Cauchy law's own: this model carries no conformal scores"
        if result.config.conformal_scores is None
        else f"{interval_kind(result.config)}. They cover labels as they are given, wrong ones too"
    )
    counts = {"tokens": f"{len(result.labels):,}", "numbers": f"{len(result.values):,}"}
    facts = dict(facts or {}) | counts | {"intervals": intervals}
    rows = [
        (name, "–" if math.isnan(entry) else f"{entry:.4g}", MEANINGS.get(name, ""))
        for name, entry in result.metrics().items()
    ]
    pictures = _pictures(result)
    if path.suffix.lower() == ".html":
        sections = [
            page.Section("Run", body=page.table(list(facts.items()))),
            *(
                page.Section(caption, body=page.picture(png, alt=caption))
                for caption, png in pictures.items()
            ),
            page.Section("Metrics", body=page.table(rows, header=HEADER)),
        ]
        page.write_page(path, title=title, lead="", sections=sections)
        return
    lines = [
        f"# {words(title)}",
        "",
        *(f"- **{words(name)}**: {words(fact)}" for name, fact in facts.items()),
        "",
        *(f"![{caption}]({page.data_address(png)})\n" for caption, png in pictures.items()),
        f"| {' | '.join(HEADER)} |",
        "| --- | ---: | --- |",
        *(f"| {' | '.join(map(words, row))} |" for row in rows),
    ]
    write_file(path, "\n".join(lines) + "\n")


def _pictures(result: Evaluation) -> dict[str, bytes]:
    """Captions and images."""
    pictures = {}
    if len(result.labels):
        caption = "How often the chosen token is right, by its probability"
        pictures[caption] = plots.picture(plots.draw_calibration, result)
    if len(result.values):
        level = 0.9
        pictures |= {
            "Share of numbers whose error is at most so large": plots.picture(plots.draw_errors, result),
            "Share of numbers inside their interval, by its nominal level": plots.picture(
                plots.draw_coverage, result
            ),
            f"Predictions with {level:.0%} intervals against the true numbers": plots.picture(
                plots.draw_predictions, result.values, *result.numbers(level)[:3], level
            ),
        }
    return pictures
