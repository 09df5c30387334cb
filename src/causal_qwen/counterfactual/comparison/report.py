"""A report of a comparison: one HTML file, light and dark, with the pairs that differ most side by side."""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from causal_qwen.counterfactual.comparison.plan import Pair
from causal_qwen.counterfactual.comparison.run import ComparisonResult
from causal_qwen.counterfactual.comparison.statistics import Estimate
from causal_qwen.evaluation import page

__all__ = ["write_report"]

WORDS = re.compile(r"\s*\S+|\s+")
MOST_COMPARED = 300  # words between what two texts begin and end with alike; of more, all are marked
WIDTH, HEIGHT, MARGIN = 760, 96, 40
WHY = {
    "all pairs": "All pairs were made.",
    "difference": "Stopped early: the interval excludes 0.",
    "width": "Stopped early: the interval is narrow enough.",
}


def write_report(result: ComparisonResult, file: Path) -> None:
    """Write the report; the file appears only when it is complete."""
    name, first = next(iter(result.estimates)), result.first
    lead = f"A: {result.names[0]} — B: {result.names[1]}. {_verdict(name, first)}"
    facts = [
        ("pairs", f"{result.pairs} of {result.total} planned, {first.missing} without a score"),
        ("individuals × prompts", f"{first.individuals} × {first.prompts}"),
        ("coupling", result.coupling),
        ("end", WHY[result.stopped]),
    ]
    if result.look is not None:
        repeated = result.look.repeated
        facts += [
            ("difference, corrected for stopping", _figure(result.look.unbiased)),
            ("interval valid at every look", f"{_figure(repeated.lower)} to {_figure(repeated.upper)}"),
        ]
    header = ("score", "A", "B", "A − B", "interval", "variance ratio", "correlation", "samples saved")
    rows = [_row(score, first if score == name else found) for score, found in result.estimates.items()]
    sections = [
        page.Section(
            "Difference", f"Mean of A − B with its {first.level:.0%} interval: {name}.", _picture(first)
        ),
        page.Section(
            "Scores",
            "The variance ratio is that of paired differences over independent ones: 1 is no gain. Samples "
            "saved are pairs that strangers would have needed beyond these.",
            f'<div class="wide">{page.table(rows, header=header)}</div>',
        ),
        page.Section("Run", body=page.table(facts)),
        page.Section(
            "Pairs that differ most",
            f"By {name}; words that only one side has are marked."
            if result.extremes
            else "No pair differs in this score.",
            "".join(_side_by_side(pair, name) for pair in result.extremes),
        ),
    ]
    page.write_page(file, title="Comparison on the same individuals", lead=lead, sections=sections)


def _verdict(name: str, first: Estimate) -> str:
    if first.difference is None or first.lower is None or first.upper is None:
        return f"The pairs say nothing of {name}."
    if first.lower > 0 or first.upper < 0:
        larger = "A" if first.difference > 0 else "B"
        return f"{larger} is larger in {name}, by {_figure(abs(first.difference))}."
    if first.differing == 0:
        return f"No pair differs in {name}."
    return f"No difference in {name} is shown."


def _row(name: str, found: Estimate) -> tuple[str, ...]:
    ratio = (found.variance_ratio, found.variance_ratio_lower, found.variance_ratio_upper)
    return (
        name,
        _figure(found.mean_a),
        _figure(found.mean_b),
        _figure(found.difference),
        f"{_figure(found.lower)} to {_figure(found.upper)}",
        "{} ({} to {})".format(*map(_figure, ratio)),
        _figure(found.correlation),
        _figure(found.samples_saved),
    )


def _picture(found: Estimate) -> str:
    """The interval on a line with 0 on it, as a drawing that follows the page's colours."""
    if found.difference is None or found.lower is None or found.upper is None:
        return ""
    low, high = min(found.lower, 0.0), max(found.upper, 0.0)
    reach = (high - low) or 1.0
    low, high = low - 0.08 * reach, high + 0.08 * reach

    def x(value: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (value - low) / (high - low)

    middle, ends = HEIGHT / 2, (x(found.lower), x(found.upper))
    marks = [
        f'<line class="axis" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{middle}" y2="{middle}"/>',
        f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{middle - 10}" y2="{HEIGHT - 28}"/>',
        f'<text x="{x(0):.1f}" y="{HEIGHT - 14}" text-anchor="middle">0: no difference</text>',
        f'<line class="interval" x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{middle}" y2="{middle}"/>',
        f'<circle class="point" cx="{x(found.difference):.1f}" cy="{middle}" r="6"/>',
        f'<text class="value" x="{x(found.difference):.1f}" y="{middle - 16}" text-anchor="middle">'
        f"{_figure(found.difference)} ({_figure(found.lower)} to {_figure(found.upper)})</text>",
    ]
    return f'<svg role="img" aria-label="interval" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(marks)}</svg>'


def _side_by_side(pair: Pair, name: str) -> str:
    one, other = (WORDS.findall(str(side["text"])) for side in (pair.a, pair.b))
    ours, theirs = ([word.strip() for word in words] for words in (one, other))
    blocks = list(_blocks(ours, theirs))
    texts = (
        _marked((one[start:end], differs) for differs, start, end, _, _ in blocks),
        _marked((other[start:end], differs) for differs, _, _, start, end in blocks),
    )
    cells = []
    for letter, side, scores, text in (
        ("A", pair.a, pair.scores_a, texts[0]),
        ("B", pair.b, pair.scores_b, texts[1]),
    ):
        cells.append(
            f'<div class="side"><p class="note">{letter}: {_figure(scores[name])} · individual '
            f'{side["individual"]}</p><p class="said"><span class="asked">{_prompt(side)}</span>{text}</p>'
            "</div>"
        )
    return f'<div class="pair">{"".join(cells)}</div>'


def _blocks(ours: list[str], theirs: list[str]) -> Iterator[tuple[bool, int, int, int, int]]:
    """Whether words differ, from where to where in one text, and in the other."""
    shorter = min(len(ours), len(theirs))
    head = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    tail = next((i for i in range(shorter - head) if ours[-1 - i] != theirs[-1 - i]), shorter - head)
    ends = (len(ours) - tail, len(theirs) - tail)
    yield False, 0, head, 0, head
    middle, other = ours[head : ends[0]], theirs[head : ends[1]]
    if max(len(middle), len(other)) > MOST_COMPARED:  # the time grows with the cube of it
        yield True, head, ends[0], head, ends[1]
    else:
        for kind, *places in difflib.SequenceMatcher(None, middle, other, autojunk=False).get_opcodes():
            a, b, c, d = (place + head for place in places)
            yield kind != "equal", a, b, c, d
    yield False, ends[0], len(ours), ends[1], len(theirs)


def _marked(parts: Iterable[tuple[list[str], bool]]) -> str:
    return "".join(
        f"<mark>{html.escape(''.join(words))}</mark>" if other and words else html.escape("".join(words))
        for words, other in parts
    )


def _prompt(side: Mapping[str, Any]) -> str:
    prompt = side["prompt"]
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt) + "\n"
    return html.escape(prompt)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
