"""What train, eval and predict call their rows: the help texts of data, template and bad rows."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["DATA_HELP", "TARGET_HELP", "TEMPLATE_HELP", "OnBadRow"]

DATA_HELP = "JSONL, JSON, CSV, TSV, Parquet or text."
TEMPLATE_HELP = (
    'Sentence of a table\'s row, "A {cut} diamond costs {price}."; the one that the model was trained with '
    "if not given."
)
TARGET_HELP = "Field of the template that is to be predicted."


class OnBadRow(StrEnum):
    """What a row that cannot be used does."""

    error = "error"
    skip = "skip"
