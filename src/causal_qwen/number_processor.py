"""Text ⇄ (input_ids, attention_mask, numeric_values), over any tokenizer of the tokenizers library.

Numbers in the text become <NUM> tokens with aligned values, and come back as text. The tokenizer does
everything else: padding, truncation and special tokens are its own. Neither a model nor transformers is known
here; `CausalQwen2Processor` is this and a processor of transformers.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from causal_qwen.numbered_ids import NumberedIds
from causal_qwen.numbers import Number, scan, spread_of, write
from causal_qwen.processor_input import check_ids, check_spans, check_text
from causal_qwen.tokenizer_face import TokenizerFace

__all__ = ["NUM_TOKEN", "NumberProcessor"]

NUM_TOKEN = "<NUM>"
NUMBERS = ("value", "text", "written")
# What numbers are written with, and what stands around them where that matters.
SPELLED_WITH = "0123456789-.e, "
# Stands for <NUM> in texts where somebody has typed "<NUM>": a code point that Unicode reserves for internal
# use.
PRIVATE_TOKEN = "\ufdd0"
# What `__call__` takes beside the text, when a chat is encoded.
ENCODING_OPTIONS = (
    "numbers", "padding", "truncation", "max_length", "padding_side", "stride", "return_overflowing_tokens",
)  # fmt: skip


class NumberProcessor(TokenizerFace):
    """A tokenizer that reads and writes numbers as numbers; arguments as for `CausalQwen2Processor`."""

    def __init__(self, tokenizer: Any, numbers: str = "value", chat_template: str | None = None):
        self.tokenizer = tokenizer
        self.chat_template = chat_template or tokenizer.chat_template
        self.attach(tokenizer, numbers)

    def attach(self, tokenizer: Any, numbers: str) -> None:
        """Look <NUM> up in the tokenizer, and keep how numbers are read.

        Raises:
            ValueError: If there is no such token, or no such way to read numbers.
        """
        self.numbers = _checked(numbers)
        self.num_token_id = tokenizer.get_vocab().get(NUM_TOKEN)
        if self.num_token_id is None:
            raise ValueError(
                f"the tokenizer has no {NUM_TOKEN} token; take it from a directory that `convert` wrote"
            )

    def batch(self, data: dict) -> Any:
        """What `__call__` returns, from its entries."""
        return data

    def __call__(
        self,
        text: str | Sequence | None = None,
        *,
        numbers: str | None = None,
        spans: Sequence[Sequence[Number]] | None = None,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        add_special_tokens: bool = True,
        stride: int = 0,
        return_overflowing_tokens: bool = False,
    ) -> Any:
        """Encode one text, a list of texts, or one or several chats.

        Args:
            text: A string, a list of strings, a chat (list of messages with "role" and "content"), or a list
                of chats.
            numbers: "value", "text" or "written", for this call.
            spans: The numbers of each text, where they are known and not to be looked for.
            padding: As for a tokenizer, as are truncation, max_length, padding_side and stride.
            return_tensors: "pt" or "np"; lists by default.
            add_special_tokens: As for a tokenizer; a chat carries its own.
            return_overflowing_tokens: Whether truncated texts go on in further rows;
                ``overflow_to_sample_mapping`` then says which text each row is from.

        Returns:
            input_ids, attention_mask and numeric_values (float64; 0 where there is no number), aligned.

        Raises:
            ValueError: If ``spans`` do not fit the texts, or a value of theirs is NaN or infinite.
        """
        texts, single, has_special_tokens = self._texts(text)
        mode = self.numbers if numbers is None else _checked(numbers)
        if mode == "written" and not has_special_tokens:
            texts = [one.rstrip() for one in texts]
        tokenizer, token = self._reader(texts)
        if mode != "value":
            spans = [[] for _ in texts]
        elif spans is None:
            spans = [scan(one) for one in texts]
        else:
            check_spans(texts, spans)
        encoded = tokenizer(
            [_render(*pair, token) for pair in zip(texts, spans, strict=True)],
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            padding_side=padding_side,
            add_special_tokens=add_special_tokens and not has_special_tokens,
            stride=stride,
            return_overflowing_tokens=return_overflowing_tokens,
            return_attention_mask=True,
            return_token_type_ids=False,
            verbose=False,
        )
        samples = encoded.get("overflow_to_sample_mapping", range(len(texts)))
        values = []
        for row, (ids, sample) in enumerate(zip(encoded["input_ids"], samples, strict=True)):
            offsets = encoded.encodings[row].offsets if truncation and spans[sample] else None
            values.append(self._align(ids, spans[sample], offsets, len(token)))
        batch = {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "numeric_values": values,
        }
        if return_overflowing_tokens:
            batch["overflow_to_sample_mapping"] = list(samples)
        unwrap = single and not return_overflowing_tokens
        return self.batch(_arrays(batch, return_tensors, unwrap=unwrap, numbered=any(spans)))

    def apply_chat_template(
        self,
        conversation,
        *,
        tokenize: bool | None = None,
        return_dict: bool | None = None,
        return_tensors: str | None = None,
        **kwargs,
    ):
        """The text of one chat or several, or its encoding.

        Args:
            conversation: Messages with "role" and "content", or a list of such chats.
            tokenize: Whether to encode; by default where tensors or a dict are asked for.
            return_dict: Whether the encoding is what `__call__` returns, and not its ids alone; True by
                default.
            return_tensors: "pt" or "np"; lists by default.
            **kwargs: What `__call__` takes goes there; the rest is the tokenizer's (add_generation_prompt,
                continue_final_message, tools, documents) and the template's.

        Raises:
            ValueError: If the template is broken or refuses the messages, or there is none.
        """
        if kwargs.pop("return_assistant_tokens_mask", False):
            raise ValueError(
                "return_assistant_tokens_mask is for training on chats; `causal_qwen.data` makes their labels"
            )
        options = {name: kwargs.pop(name) for name in ENCODING_OPTIONS if name in kwargs}
        kwargs.setdefault("chat_template", self.chat_template)
        try:
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False, **kwargs)
        except _template_errors() as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(f"the chat template refuses these messages: {reason:.300}") from error
        if not (return_tensors is not None or return_dict if tokenize is None else tokenize):
            return text
        if options.setdefault("numbers", self.numbers) == "written":
            options["numbers"] = "text"  # a chat ends as its template does
        encoded = self(text, add_special_tokens=False, return_tensors=return_tensors, **options)
        return encoded if return_dict is None or return_dict else encoded["input_ids"]

    def decode(
        self,
        token_ids,
        numeric_values=None,
        *,
        numeric_lower=None,
        numeric_upper=None,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ):
        """Text of one row of ids; each <NUM> is written as its value.

        Args:
            token_ids: (T,) ids; (B, T) gives a list, as `batch_decode` does.
            numeric_values: (T,) values; required where an id is <NUM>, unless the ids know them, as those do
                that this processor and generate() return.
            numeric_lower: (T,) lower end of each value's interval, which rounds it; None writes every digit.
            numeric_upper: (T,) upper end.
            skip_special_tokens: As for a tokenizer; numbers are always written.
            clean_up_tokenization_spaces: As for a tokenizer.

        Raises:
            ValueError: If a <NUM> has no value, a value is NaN or infinite, or an id is no token; the
                position is named.
        """
        if numeric_values is None and isinstance(token_ids, NumberedIds):
            numeric_values = token_ids.numeric_values
        options = {
            "skip_special_tokens": skip_special_tokens,
            "clean_up_tokenization_spaces": clean_up_tokenization_spaces,
        }
        ids = np.asarray(token_ids)
        if ids.ndim == 2:
            ends = {"numeric_lower": numeric_lower, "numeric_upper": numeric_upper}
            return self.batch_decode(token_ids, numeric_values, **ends, **options)
        ids = ids.reshape(-1)
        check_ids(ids)
        positions = np.flatnonzero(ids == self.num_token_id)
        if len(positions) == 0:
            return self.tokenizer.decode(ids.tolist(), **options)
        if numeric_values is None:
            raise ValueError(
                f"{NUM_TOKEN} at position {positions[0]}, but no numeric_values to write there; "
                "generate(..., return_dict_in_generate=True) returns them with the ids"
            )
        values = np.asarray(numeric_values, dtype=np.float64).reshape(-1)
        if len(values) != len(ids):
            raise ValueError(
                f"{len(values)} numeric_values for {len(ids)} ids; they are aligned, one per token"
            )
        wrong = positions[~np.isfinite(values[positions])]
        if len(wrong):
            raise ValueError(
                f"the value at position {wrong[0]} is {values[wrong[0]]}; only finite numbers can be written"
            )
        pieces = [part[part != self.num_token_id].tolist() for part in np.split(ids, positions)]
        gaps = [self.tokenizer.decode(piece, **options) for piece in pieces]
        spreads = None
        if numeric_lower is not None and numeric_upper is not None:
            ends = (np.asarray(end, dtype=np.float64).reshape(-1) for end in (numeric_lower, numeric_upper))
            spreads = [spread_of(*pair) for pair in zip(*(end[positions] for end in ends), strict=True)]
        return write(gaps, values[positions].tolist(), spreads)

    def batch_decode(
        self,
        sequences,
        numeric_values=None,
        *,
        numeric_lower=None,
        numeric_upper=None,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[str]:
        """`decode` for each row of (B, T) ids and values, or of an output of generate() as it is."""
        columns = (numeric_values, numeric_lower, numeric_upper)
        if isinstance(sequences, Mapping):
            columns = tuple(sequences.get(f"numeric_{name}") for name in ("values", "lower", "upper"))
            sequences = sequences["sequences"]
        rows = zip(*([None] * len(sequences) if rows is None else rows for rows in columns), strict=True)
        return [
            self.decode(
                ids,
                values,
                numeric_lower=lower,
                numeric_upper=upper,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            )
            for ids, (values, lower, upper) in zip(sequences, rows, strict=True)
        ]

    @property
    def read_as(self) -> str:
        """How the numbers of a prompt are read, "value" or "text"."""
        return "value" if self.numbers == "value" else "text"

    @property
    def written_as(self) -> str:
        """How the numbers of what the model says are read back, "value" or "text"."""
        return "text" if self.numbers == "text" else "value"

    @cached_property
    def spelling(self) -> dict[str, int] | None:
        """The token of each character that numbers are written with; None where a character has none."""
        return self.spell(SPELLED_WITH)

    @property
    def model_input_names(self) -> list[str]:
        """What the model takes from a batch."""
        return ["input_ids", "attention_mask", "numeric_values"]

    @cached_property
    def _private_tokenizer(self):
        """The tokenizer with <NUM> under another name, so that a typed "<NUM>" is ordinary text."""
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        for token in state["added_tokens"]:
            if token["id"] == self.num_token_id:
                token["content"] = PRIVATE_TOKEN
        return self.with_backend(type(self.tokenizer.backend_tokenizer).from_str(json.dumps(state)))

    def with_backend(self, backend: Any) -> Any:
        """The tokenizer, over another one of the tokenizers library."""
        return self.tokenizer.with_backend(backend)

    def _reader(self, texts: list[str]) -> tuple[Any, str]:
        """The tokenizer for these texts, and how <NUM> is spelled for it."""
        for text in texts:
            check_text(text)
        if not any(NUM_TOKEN in text for text in texts):
            return self.tokenizer, NUM_TOKEN
        if any(PRIVATE_TOKEN in text for text in texts):
            raise ValueError(
                f"a text holds both {NUM_TOKEN!r} and the noncharacter U+FDD0; remove one of them"
            )
        return self._private_tokenizer, PRIVATE_TOKEN

    def _texts(self, text) -> tuple[list[str], bool, bool]:
        """The texts to encode, whether one was given alone, and whether they are chats."""
        if isinstance(text, str):
            return [text], True, False
        if _is_chat(text):
            return [self.apply_chat_template(text)], True, True
        if isinstance(text, list | tuple):
            if len(text) > 0 and _is_chat(text[0]):
                return [self.apply_chat_template(chat) for chat in text], False, True
            if all(isinstance(one, str) for one in text):
                return list(text), False, False
        raise TypeError(f"text is {text!r:.80}; give a string, a list of strings, or chat messages")

    def _align(self, ids: list[int], numbers: Sequence[Number], offsets, width: int) -> np.ndarray:
        """Values of one row; after truncation by the offset at which each <NUM> was written."""
        values = np.zeros(len(ids))
        if not numbers:
            return values
        positions = np.flatnonzero(np.asarray(ids) == self.num_token_id)
        if offsets is None:
            values[positions] = [number.value for number in numbers]
            return values
        starts, shift = {}, 0
        for number in numbers:
            starts[number.start + shift] = number.value
            shift += width - (number.end - number.start)
        values[positions] = [starts[offsets[position][0]] for position in positions]
        return values


def _checked(numbers: str) -> str:
    if numbers not in NUMBERS:
        raise ValueError(f"numbers is {numbers!r}; choose 'value', 'text' or 'written'")
    return numbers


def _is_chat(text) -> bool:
    return isinstance(text, list | tuple) and len(text) > 0 and isinstance(text[0], dict)


def _render(text: str, numbers: Sequence[Number], token: str) -> str:
    """The text with ``token`` in place of each number."""
    parts, end = [], 0
    for number in numbers:
        parts += (text[end : number.start], token)
        end = number.end
    parts.append(text[end:])
    return "".join(parts)


def _arrays(data: dict, return_tensors: str | None, *, unwrap: bool, numbered: bool) -> dict:
    """As lists (of one text alone, its rows), or as int64 and float64 arrays; values keep their 64 bits, and
    the ids of a text with numbers know them.
    """
    if return_tensors is None:
        data["numeric_values"] = [row.tolist() for row in data["numeric_values"]]
        return {name: rows[0] for name, rows in data.items()} if unwrap else data
    try:
        arrays = {
            name: np.asarray(rows, dtype=np.float64 if name == "numeric_values" else np.int64)
            for name, rows in data.items()
        }
    except ValueError:
        raise ValueError("rows of different lengths cannot be one tensor; pass padding=True") from None
    if return_tensors == "np":
        return arrays
    if return_tensors != "pt":
        raise ValueError(f"return_tensors is {return_tensors!r}; choose 'pt', 'np' or None")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if numbered:
        tensors["input_ids"] = NumberedIds.of(tensors["input_ids"], tensors["numeric_values"])
    return tensors


def _template_errors() -> tuple[type[Exception], ...]:
    """What a program in a model's directory may do wrong."""
    from jinja2 import TemplateError

    usual = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
    return (TemplateError, *usual)
