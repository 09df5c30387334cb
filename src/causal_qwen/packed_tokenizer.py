"""A tokenizer as the tokenizers library has it, with what transformers had added: all that texts need.

It is made from a tokenizer of transformers, once, and gives the same ids and the same texts. Only chats need
transformers again, for its templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

__all__ = ["PackedTokenizer", "tokenizer_state"]

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def tokenizer_state(tokenizer: Any) -> dict[str, Any]:
    """What a `PackedTokenizer` is made from, as JSON has it, but for the tokenizer's own file.

    Args:
        tokenizer: A fast one of transformers.
    """
    return {
        "special": {name: getattr(tokenizer, name) for name in SPECIAL},
        "ids": {name: getattr(tokenizer, f"{name}_id") for name in SPECIAL},
        "chat_template": tokenizer.chat_template,
        "special_tokens_map": {
            name: token if isinstance(token, list) else str(token)
            for name, token in tokenizer.special_tokens_map.items()
        },
        "padding_side": tokenizer.padding_side,
        "model_max_length": tokenizer.model_max_length,
        "clean_up": bool(tokenizer.clean_up_tokenization_spaces),
    }


class PackedTokenizer:
    """What `NumberProcessor` asks of a tokenizer.

    Args:
        backend: Of the tokenizers library.
        state: As `tokenizer_state` gives it.
    """

    def __init__(self, backend: Tokenizer, state: Mapping[str, Any]) -> None:
        self.backend_tokenizer, self._state = backend, state
        backend.no_padding()
        backend.no_truncation()
        self.chat_template: str | dict[str, str] | None = state["chat_template"]
        self.padding_side: str = state["padding_side"]
        self.model_max_length: int = state["model_max_length"]
        self.bos_token_id, self.eos_token_id, self.pad_token_id, self.unk_token_id = (
            state["ids"][name] for name in SPECIAL
        )

    @classmethod
    def of(cls, text: str, state: Mapping[str, Any]) -> PackedTokenizer:
        """From the text of a tokenizer.json and a state."""
        return cls(Tokenizer.from_str(text), state)

    def with_backend(self, backend: Tokenizer) -> PackedTokenizer:
        """The same over another one."""
        return PackedTokenizer(backend, self._state)

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        return_special_tokens_mask: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Ids and masks, of one text or of a list.

        Raises:
            ValueError: If texts are to be padded or cut, which `causal_qwen.data` does itself.
        """
        if padding or truncation:
            raise ValueError("a packed tokenizer neither pads nor cuts; load the model with transformers")
        single = isinstance(texts, str)
        encodings = self.backend_tokenizer.encode_batch(
            [texts] if isinstance(texts, str) else list(texts), add_special_tokens=add_special_tokens
        )
        names = {"input_ids": "ids", "attention_mask": "attention_mask"}
        if return_special_tokens_mask:
            names["special_tokens_mask"] = "special_tokens_mask"
        rows = {name: [getattr(one, field) for one in encodings] for name, field in names.items()}
        return {name: one[0] if single else one for name, one in rows.items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of one text."""
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def tokenize(self, text: str) -> list[str]:
        """Tokens of one text."""
        tokens: list[str] = self.backend_tokenizer.encode(text, add_special_tokens=False).tokens
        return tokens

    def decode(
        self,
        token_ids: int | Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Text of ids.

        Raises:
            ValueError: If spaces are to be cleaned up, which only transformers does.
        """
        clean = (
            self._state["clean_up"] if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        )
        if clean:
            raise ValueError("a packed tokenizer leaves spaces alone; load the model with transformers")
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def get_vocab(self) -> dict[str, int]:
        """The id of each token."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by their ids."""
        tokens: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return tokens

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        tokenize: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The text of one chat.

        Raises:
            ValueError: If there is no template.
        """
        template = chat_template or self.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if template is None:
            raise ValueError("the tokenizer has no chat template; give plain text")
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            [conversation],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **self._state["special_tokens_map"],
            **options,
        )
        text: str = rendered[0]
        return text
