"""Numbers that models wrote in vLLM: its answers have no place for a value, so they are asked for by name.

A request with ``extra_args={"numbers": "kept", "record": NAME}`` lets the model write <NUM>; afterwards
`numbers_of(llm, [NAME])` returns the values. For the offline `LLM`; vLLM's HTTP server cannot be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

__all__ = ["numbers_of", "predictions_of"]


def numbers_of(llm: Any, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The numbers of the requests of these names, as `GeneratedNumber` has them; they are then forgotten.

    Args:
        llm: A vllm.LLM whose engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), or whose
            settings allow functions to be sent to its workers.
        names: ``record`` of requests that have been answered.
    """
    if not names:
        return {}
    of_first: dict[str, list[dict[str, Any]]] = llm.collective_rpc(_taken, args=(list(names),))[0]
    return of_first


def predictions_of(llm: Any, names: Sequence[str]) -> dict[str, list[float]]:
    """Median, lower and upper end, P_<NUM> and extrapolation (NaN where nobody knows) of the number that
    would follow the prompts of requests with ``extra_args={"predict": True, "record": NAME}``.
    """
    of_first: dict[str, list[float]] = llm.collective_rpc(_predicted, args=(list(names),))[0]
    return of_first


def _requests(worker: Any) -> Any:
    from causal_qwen.serving.vllm.requests import CausalRequests

    processors = worker.model_runner.input_batch.logitsprocs.all
    (requests,) = (one for one in processors if isinstance(one, CausalRequests))
    return requests


def _taken(worker: Any, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    taken = _requests(worker).take_records(names)
    return {name: [asdict(number) for number in row.numbers] for name, row in taken.items()}


def _predicted(worker: Any, names: list[str]) -> dict[str, list[float]]:
    return {name: list(row.prediction) for name, row in _requests(worker).take_records(names).items()}
