"""One vLLM engine in a process of its own: reads requests from a JSON file, writes the tokens of each.

    python engine_process.py MODEL TASK.json RESULT.json

A task has ``engine`` (arguments of LLM) and ``calls``: lists of requests that are asked together. A request
has ``prompt`` (ids) and ``params`` (of SamplingParams).
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def main(model: str, task_file: str, result_file: str) -> None:
    from vllm import LLM, SamplingParams

    from causal_qwen.serving.vllm.records import numbers_of

    task = json.loads(Path(task_file).read_text())
    llm = LLM(
        model, dtype="float32", max_model_len=512, max_num_seqs=16, enforce_eager=True, **task["engine"]
    )
    results = []
    for requests in task["calls"]:
        outputs = llm.generate(
            [{"prompt_token_ids": request["prompt"]} for request in requests],
            [SamplingParams(**request["params"]) for request in requests],
            use_tqdm=False,
        )
        recorded = [request["params"].get("extra_args", {}).get("record") for request in requests]
        numbers = numbers_of(llm, [name for name in recorded if name])
        results.append(
            [
                {"tokens": list(output.outputs[0].token_ids), "numbers": numbers.get(name, [])}
                for output, name in zip(outputs, recorded, strict=True)
            ]
        )
    Path(result_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
