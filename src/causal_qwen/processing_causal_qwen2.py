"""The processor: a `NumberProcessor` that transformers loads and saves. It knows no model."""

from transformers import AutoProcessor, BatchFeature, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.processing_utils import ProcessorMixin

from causal_qwen.auto_module import SavedWithModule, auto_map
from causal_qwen.configuration_causal_qwen2 import CausalQwen2Config
from causal_qwen.number_processor import NUM_TOKEN, NumberProcessor

__all__ = ["NUM_TOKEN", "CausalQwen2Processor"]


class CausalQwen2Processor(SavedWithModule, NumberProcessor, ProcessorMixin):
    """A tokenizer that reads and writes numbers as numbers.

    Args:
        tokenizer: The base's, with <NUM> in its vocabulary.
        numbers: "value" turns each number into <NUM> and its value; "text" leaves the digits to the
            tokenizer, and gives exactly the base's ids. "written" is for a model whose own numbers are values
            and whose prompts are not: what is read here are prompts, their digits as in "text", without white
            space at their end; what the model has written, the learned part of a training row, is encoded by
            `causal_qwen.data` as values.
        chat_template: Jinja template; the tokenizer's by default.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, numbers: str = "value", chat_template: str | None = None
    ):
        self.numbers = numbers  # what the base's repr and dictionary say of it
        ProcessorMixin.__init__(self, tokenizer, chat_template=chat_template or tokenizer.chat_template)
        self.auto_map = auto_map(AutoProcessor=type(self).__name__)
        self.attach(tokenizer, numbers)

    def batch(self, data: dict) -> BatchFeature:
        """As transformers' processors return it."""
        return BatchFeature(data)

    def with_backend(self, backend) -> PreTrainedTokenizerFast:
        """As for `NumberProcessor`."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: token for name in names if (token := getattr(self.tokenizer, name)) is not None}
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            padding_side=self.tokenizer.padding_side,
            truncation_side=self.tokenizer.truncation_side,
            model_max_length=self.tokenizer.model_max_length,
            **special,
        )


AutoProcessor.register(CausalQwen2Config, CausalQwen2Processor, exist_ok=True)
