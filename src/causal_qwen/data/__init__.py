"""Data: one way from a file or a row to a batch, for training, evaluation and prediction.

`files` and `rows` read files, `fields`, `templates`, `reading` and `chats` make texts of rows, `encoding`
makes ids and values of texts, `batches` makes tensors; `settings` reads recipes. The package knows the
processor, and no model.
"""

from typing import TYPE_CHECKING

from causal_qwen.lazy import lazy_names

if TYPE_CHECKING:
    from causal_qwen.data.batches import (
        Collator,
        Prompt,
        batches_of,
        labelled_batches,
        prompt_batch,
        prompt_row,
        windows_by_length,
    )
    from causal_qwen.data.encoding import Encoded, Encoder, encode_prompt, encode_text
    from causal_qwen.data.files import Files
    from causal_qwen.data.reading import Example, Reading
    from causal_qwen.data.rows import BadRow, BadRows, Source, read_columns, read_rows
    from causal_qwen.data.templates import Passage, Template

__all__ = [
    "BadRow",
    "BadRows",
    "Collator",
    "Encoded",
    "Encoder",
    "Example",
    "Files",
    "Passage",
    "Prompt",
    "Reading",
    "Source",
    "Template",
    "batches_of",
    "encode_prompt",
    "encode_text",
    "labelled_batches",
    "prompt_batch",
    "prompt_row",
    "read_columns",
    "read_rows",
    "windows_by_length",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "causal_qwen.data.batches": (
            "Collator",
            "Prompt",
            "batches_of",
            "labelled_batches",
            "prompt_batch",
            "prompt_row",
            "windows_by_length",
        ),
        "causal_qwen.data.encoding": (
            "Encoded",
            "Encoder",
            "encode_prompt",
            "encode_text",
        ),
        "causal_qwen.data.files": ("Files",),
        "causal_qwen.data.reading": (
            "Example",
            "Reading",
        ),
        "causal_qwen.data.rows": (
            "BadRow",
            "BadRows",
            "Source",
            "read_columns",
            "read_rows",
        ),
        "causal_qwen.data.templates": (
            "Passage",
            "Template",
        ),
    },
)
