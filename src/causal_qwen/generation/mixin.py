"""generate(), deciding by causes: what a causal model adds to transformers' GenerationMixin."""

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import EosTokenCriteria, GenerationConfig, GenerationMixin, TopKLogitsWarper
from transformers.generation.logits_process import (
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)

from causal_qwen.configuration import CausalFields
from causal_qwen.decoder.engine import Engine
from causal_qwen.generation.decoding import decode
from causal_qwen.generation.inferencer import Inferencer
from causal_qwen.generation.loop import Inference
from causal_qwen.generation.outputs import CausalGenerateOutput
from causal_qwen.generation.processors import TopK
from causal_qwen.generation.settings import plan, take_values, with_prompt_values
from causal_qwen.individual import Individuals

__all__ = ["CausalGenerationMixin"]


class CausalGenerationMixin(GenerationMixin):
    """Goes before a model of transformers in a class with the heads of a `CausalModel`."""

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        inference_mode: str | None = None,
        individual: Individuals | None = None,
        noise_gain: float | None = None,
        density_floor: float | None = None,
        persistence: float | None = None,
        interval_level: float = 0.9,
        raw_intervals: bool = False,
        normalisation: str = "softmax",
        suppress_unused: bool = False,
        engine: Engine | None = None,
        loop: Callable = decode,
        **kwargs,
    ):
        """transformers' generate(), deciding by causes.

        Everything that generate() takes works in every mode, but for beams and assistants, which need
        ``inference_mode="compatible"``. The temperature scales noise, except in "compatible".

        Args:
            inputs: Token ids (B, T).
            generation_config: May also carry the settings below.
            inference_mode: "standard" (do_sample=False: the law of U decides; True: noise moves the cause),
                "causal" (one concrete individual decides) or "compatible" (what Qwen does). The
                configuration's by default.
            individual: Who is sampled: an `Individual`, a seed, or one per row. New ones by default; the
                output with ``return_dict_in_generate=True`` says who.
            noise_gain: κ.
            density_floor: Truncation of the noise.
            persistence: ρ for individuals that have none of their own.
            interval_level: Probability of the interval of each number.
            raw_intervals: Whether intervals are the Cauchy law's own, as in `predict_number`.
            normalisation: In "compatible", "softmax" or "ovr": draw from P_k/ΣP.
            suppress_unused: Whether vocabulary rows that no token uses are excluded.
            engine: Made by ``Engine.from_model(model)``; runs the forward passes on the CPU, fast.
            loop: Takes what is prepared here in the place of `decode`, and makes the result of it.
            **kwargs: As for transformers.

        Returns:
            Ids (B, T') that begin with the prompts; a number that was generated stands there in digits, so
            that any tokenizer can decode it. With ``return_dict_in_generate=True`` a `CausalGenerateOutput`,
            which has <NUM>, its value and its interval instead.
        """
        if kwargs.get("custom_generate") is not None:  # somebody's own loop decides by its own rules
            return super().generate(inputs, generation_config, **kwargs)
        inputs, values = take_values(self.config.num_token_id, inputs, kwargs)
        decision = plan(
            self,
            inputs,
            generation_config,
            kwargs,
            inference_mode=inference_mode,
            noise_gain=noise_gain,
            density_floor=density_floor,
            persistence=persistence,
            individual=individual,
            interval_level=interval_level,
            raw_intervals=raw_intervals,
            normalisation=normalisation,
            suppress_unused=suppress_unused,
            own_loop=engine is not None or loop is not decode,
        )
        if decision is not None:
            # transformers hands neither to a loop that is not its own, and would put a prompt without values.
            kwargs["custom_generate"] = functools.partial(
                _looped,
                loop=loop,
                decision=decision,
                engine=engine,
                streamer=kwargs.pop("streamer", None),
                synced_gpus=bool(kwargs.get("synced_gpus")),
            )
        elif engine is not None:
            raise ValueError("beams and assistants run in transformers' own loops: leave out engine=")
        outputs = super().generate(inputs, generation_config, **kwargs)
        return outputs if values is None else with_prompt_values(outputs, values)

    def inference(self, input_ids: Tensor, mode: str | None = None, **options) -> Inference:
        """The laws and the decision for the token after ``input_ids``; options as for `Inferencer`."""
        return Inferencer(self, mode, **options).infer(input_ids)

    def generate_step_by_step(
        self, input_ids: Tensor, max_new_tokens: int = 20, mode: str | None = None, **options
    ) -> Iterator[Inference]:
        """Token after token, each with its laws; options as for `Inferencer`."""
        return Inferencer(self, mode, **options).steps(input_ids, max_new_tokens)

    def compute_transition_scores(self, sequences, scores, *args, **kwargs):
        """As the base's; scores may lack the <NUM> row that "compatible" hides."""
        rows = self.config.vocab_size
        padded = tuple(F.pad(step, (0, rows - step.shape[-1]), value=-math.inf) for step in scores)
        return super().compute_transition_scores(sequences, padded, *args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids, *args, inputs_embeds=None, numeric_values=None, **kwargs
    ):
        """As the base's, with the values of the tokens that are fed; tokens beyond the values have none.

        ``inputs_embeds`` stands here by name because generate() looks for it to know that it is understood.
        """
        model_inputs = super().prepare_inputs_for_generation(
            input_ids, *args, inputs_embeds=inputs_embeds, **kwargs
        )
        fed = model_inputs.get("input_ids")
        if numeric_values is not None and fed is not None:
            values = F.pad(numeric_values, (0, input_ids.shape[1] - numeric_values.shape[1]))
            model_inputs["numeric_values"] = values[:, values.shape[1] - fed.shape[1] :]
        return model_inputs

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        """As the base's; a <NUM> row that conversion added behind the base's vocabulary does not make another
        tokenizer.
        """
        checked = dict(generation_mode_kwargs)
        assistant = checked.get("assistant_model")
        if assistant is not None and "assistant_tokenizer" not in checked and _share_rows(self, assistant):
            del checked["assistant_model"]
        super()._validate_generation_mode(generation_mode, generation_config, checked)

    def _get_candidate_generator(
        self, generation_config, *args, model_kwargs, assistant_model=None, **kwargs
    ):
        """As the base's; an assistant is not told what only we understand, and one of ours proposes as Qwen
        would.
        """
        proposer = assistant_model if generation_config.assistant_early_exit is None else self
        options = {name: value for name, value in model_kwargs.items() if name != "hide_num_token"}
        if isinstance(proposer, CausalGenerationMixin):
            options["inference_mode"] = "compatible"
        else:
            options.pop("numeric_values", None)
        return super()._get_candidate_generator(
            generation_config, *args, model_kwargs=options, assistant_model=assistant_model, **kwargs
        )

    def _get_logits_processor(self, generation_config, *args, model_kwargs=None, **kwargs):
        """As the base's; where an added <NUM> is hidden, a processor that calls the model or knows V sees the
        base's vocabulary.
        """
        processors = super()._get_logits_processor(
            generation_config, *args, model_kwargs=model_kwargs, **kwargs
        )
        num_token_id, watermark = self.config.num_token_id, generation_config.watermarking_config
        if not (model_kwargs or {}).get("hide_num_token") or num_token_id != self.config.vocab_size - 1:
            return processors
        for index, processor in enumerate(processors):
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                processor.model = functools.partial(self.__call__, hide_num_token=True)
            elif isinstance(processor, WatermarkLogitsProcessor) and watermark is not None:
                processors[index] = watermark.construct_processor(num_token_id, self.device)
        return processors


def _looped(model, input_ids, logits_processor, stopping_criteria, generation_config, *, loop, **options):
    """A loop such as `decode`, with the arguments that transformers hands to its own."""
    top_k = [
        TopK(one.top_k) if type(one) is TopKLogitsWarper and one.filter_value == -math.inf else one
        for one in logits_processor
    ]
    return loop(
        model,
        input_ids,
        top_k,
        stopping_criteria,
        generation_config,
        may_pad=any(isinstance(criterion, EosTokenCriteria) for criterion in stopping_criteria),
        output=CausalGenerateOutput,
        **options,
    )


def _share_rows(model, assistant) -> bool:
    """Whether both may have the vocabulary of one base."""
    return not _possible_sizes(model.config).isdisjoint(_possible_sizes(assistant.config))


def _possible_sizes(config) -> set[int]:
    """How many rows the vocabulary has, and how many the base's may have had."""
    rows = config.vocab_size
    added = isinstance(config, CausalFields) and config.num_token_id == rows - 1
    return {rows, rows - 1} if added else {rows}
