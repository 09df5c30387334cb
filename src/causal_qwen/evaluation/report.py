"""A report of an evaluation: one HTML or Markdown file with the metrics and the pictures inside."""

from __future__ import annotations

import base64
import html
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from causal_qwen.evaluation import plots
from causal_qwen.evaluation.run import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["REPORT_FORMATS", "write_report"]

REPORT_FORMATS = (".html", ".md")
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
    "eval/width_90_median": "median width of the 90% intervals",
    "eval/ovr_nll": "−log(P_y/ΣP), nats per token",
    "eval/softmax_nll": "−log softmax, nats per token",
    "eval/brier": "squared error of P/ΣP, 0 to 2",
    "eval/ece": "expected calibration error of P/ΣP",
    "dist/ovr_prob_sum_median": "ΣP; 1 when calibrated",
}
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .9em;border-bottom:1px solid #ddd;text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}"
    "figure{display:inline-block;margin:.5em;max-width:34em}img{max-width:100%}figcaption{color:#555}"
)


def write_report(
    evaluation: Evaluation, path: Path, *, title: str, facts: Mapping[str, str] | None = None
) -> None:
    """Write the report; the file appears only when it is complete.

    Args:
        evaluation: What to report.
        path: .html or .md.
        title: First line.
        facts: Shown above the metrics, such as which model and which data.

    Raises:
        ValueError: If the file is neither .html nor .md.
    """
    if path.suffix.lower() not in REPORT_FORMATS:
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; a report is .html or .md")
    facts = dict(facts or {}) | {
        "tokens": f"{len(evaluation.labels):,}",
        "numbers": f"{len(evaluation.values):,}",
    }
    facts["intervals"] = (
        "the Cauchy law's own: this model carries no conformal scores"
        if evaluation.conformal_scores is None
        else f"split conformal, from {len(evaluation.conformal_scores)} numbers set aside"
    )
    render = _html if path.suffix.lower() == ".html" else _markdown
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(
            render(title, facts, evaluation.metrics(), _pictures(evaluation)), encoding="utf-8"
        )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _pictures(evaluation: Evaluation) -> dict[str, str]:
    """Captions and data: addresses."""
    drawings: dict[str, Callable[[Axes, Evaluation], None]] = {}
    if len(evaluation.labels):
        drawings["How often the chosen token is right, by the probability it was given."] = (
            plots.draw_calibration
        )
    if len(evaluation.values):
        drawings |= {
            "Share of numbers whose error is at most so large.": plots.draw_errors,
            "Share of numbers inside their interval, by its nominal level.": plots.draw_coverage,
            "Predictions with 90% intervals against the true numbers.": plots.draw_predictions,
        }
    return {
        caption: "data:image/png;base64," + base64.b64encode(plots.picture(draw, evaluation)).decode("ascii")
        for caption, draw in drawings.items()
    }


def _shown(entry: float) -> str:
    return "–" if math.isnan(entry) else f"{entry:.4g}"


def _html(
    title: str, facts: Mapping[str, str], measured: Mapping[str, float], pictures: Mapping[str, str]
) -> str:
    lines = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        "<table>",
        *(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(fact)}</td></tr>"
            for name, fact in facts.items()
        ),
        "</table>",
        *(
            f'<figure><img alt="{html.escape(caption)}" src="{source}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
            for caption, source in pictures.items()
        ),
        "<h2>Metrics</h2>",
        "<table>",
        *(
            f'<tr><td>{name}</td><td class="n">{_shown(entry)}</td><td>{MEANINGS.get(name, "")}</td></tr>'
            for name, entry in measured.items()
        ),
        "</table></body></html>",
    ]
    return "\n".join(lines) + "\n"


def _markdown(
    title: str, facts: Mapping[str, str], measured: Mapping[str, float], pictures: Mapping[str, str]
) -> str:
    lines = [
        f"# {title}",
        "",
        *(f"- **{name}**: {fact}" for name, fact in facts.items()),
        "",
        *(f"![{caption}]({source})\n" for caption, source in pictures.items()),
        "| metric | value | meaning |",
        "| --- | ---: | --- |",
        *(f"| {name} | {_shown(entry)} | {MEANINGS.get(name, '')} |" for name, entry in measured.items()),
    ]
    return "\n".join(lines) + "\n"
