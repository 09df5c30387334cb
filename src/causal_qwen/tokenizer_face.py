"""What programs ask of a tokenizer, answered by a processor, as in ``pipeline(..., tokenizer=processor)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TokenizerFace"]


class TokenizerFace:
    """Goes before ProcessorMixin in a class with a ``tokenizer``, whose settings these are."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def padding_side(self) -> str:
        """Where shorter texts are padded: "left" in a converted model, whose texts are to be continued."""
        return self.tokenizer.padding_side

    @padding_side.setter
    def padding_side(self, side: str) -> None:
        self.tokenizer.padding_side = side

    @property
    def pad_token_id(self) -> int | None:
        """What fills a shorter text."""
        return self.tokenizer.pad_token_id

    @property
    def bos_token_id(self) -> int | None:
        """What begins a text."""
        return self.tokenizer.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """What ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def model_max_length(self) -> int:
        """Most tokens that the model was made for."""
        return self.tokenizer.model_max_length

    def get_vocab(self) -> dict[str, int]:
        """The id of each token."""
        return self.tokenizer.get_vocab()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids alone, in which numbers stay digits: there is no place for their values."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def spell(self, characters: Sequence[str]) -> dict[str, int] | None:
        """The token of each character, where together they decode to the same text; None otherwise."""
        vocabulary = self.tokenizer.get_vocab()
        space = "".join(self.tokenizer.tokenize(" "))
        names = {character: space if character == " " else character for character in characters}
        if not all(name in vocabulary for name in names.values()):
            return None
        spelling = {character: vocabulary[name] for character, name in names.items()}
        text = "".join(characters) + "".join(reversed(characters)).strip()
        decoded = self.tokenizer.decode([spelling[character] for character in text])
        return spelling if decoded == text else None
