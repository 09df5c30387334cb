"""One vLLM engine in a process of its own: reads tasks, a line of JSON each, and answers each by a line.

    python engine_process.py MODEL ENGINE

ENGINE has arguments of LLM. A task has ``calls``, lists of requests that are asked together, or
``comparisons``, options of `compared`. A request has ``prompt`` (ids) and ``params`` (of SamplingParams).
"""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
ANSWER = "answer "  # marks our lines among those of libraries


def main(model: str, engine: str) -> None:
    from comparing import compared
    from vllm import LLM

    from causal_qwen.serving.vllm.offline import VllmSpeaker

    llm = LLM(
        model, dtype="float32", max_model_len=512, max_num_seqs=16, enforce_eager=True, **json.loads(engine)
    )
    speaker = VllmSpeaker(model, llm)
    for line in sys.stdin:
        task = json.loads(line)
        if "calls" in task:
            answer = [called(llm, requests) for requests in task["calls"]]
        else:
            answer = [compared(speaker, **options) for options in task["comparisons"]]
        sys.stdout.write(f"{ANSWER}{json.dumps(answer)}\n")
        sys.stdout.flush()


def called(llm, requests: list) -> list:
    from vllm import SamplingParams

    from causal_qwen.serving.vllm.records import numbers_of

    outputs = llm.generate(
        [{"prompt_token_ids": request["prompt"]} for request in requests],
        [SamplingParams(**request["params"]) for request in requests],
        use_tqdm=False,
    )
    recorded = [request["params"].get("extra_args", {}).get("record") for request in requests]
    numbers = numbers_of(llm, [name for name in recorded if name])
    return [
        {"tokens": list(output.outputs[0].token_ids), "numbers": numbers.get(name, [])}
        for output, name in zip(outputs, recorded, strict=True)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
