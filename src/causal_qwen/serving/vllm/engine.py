"""What our models ask of vLLM's engine; what cannot be right is refused before weights are read."""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

__all__ = ["CausalEngineConfig"]

logger = logging.getLogger(__name__)

# The runner that has per-request logits processors on every platform; the other one needs Triton.
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
REQUESTS = "causal_qwen.serving.vllm.requests:CausalRequests"


class CausalEngineConfig(VerifyAndUpdateConfig):
    """Hooks that vLLM calls for the architectures that `register` names."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Have requests read by `CausalRequests`, in the model runner that knows them.

        Raises:
            ValueError: If another runner was asked for.
        """
        if os.environ.setdefault(RUNNER, "0") not in ("0", "false", "False"):
            raise ValueError(
                f"{RUNNER} is {os.environ[RUNNER]!r}; CausalQwen runs in vLLM's V1 runner, give 0"
            )
        # Not an entry point of vllm.logits_processors: that would be loaded for every model.
        processors = model_config.logits_processors or []
        if REQUESTS not in processors:
            model_config.logits_processors = [*processors, REQUESTS]

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Leave out what cannot carry causes, and caches that cannot tell one number from another.

        Raises:
            ValueError: If something was asked for that our models do not do in vLLM; it is named.
        """
        parallel, config = vllm_config.parallel_config, vllm_config.model_config.hf_config
        if vllm_config.model_config.runner_type != "generate":
            raise ValueError(
                "CausalQwen in vLLM generates; for features use the base, --runner generate here"
            )
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "speculative decoding verifies softmax probabilities, which causes do not have; leave it out"
            )
        if vllm_config.lora_config is not None:
            raise ValueError("LoRA adapters are not applied to the causal heads; merge the adapter first")
        if parallel.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: what the last stage decides, "
                "the first would have to know; use tensor_parallel_size"
            )
        vllm_config.scheduler_config.async_scheduling = False  # a token is known before the next is asked for
        if config.value_range is not None and vllm_config.cache_config.enable_prefix_caching:
            logger.info("prefix caching is off: this model writes numbers, and blocks are known by ids alone")
            vllm_config.cache_config.enable_prefix_caching = False
