"""What do causes cost in vLLM? Tokens per second of 16 requests, against plain Qwen2 in vLLM.

    .venv-vllm/bin/python benchmarks/vllm.py [--quick] [--json]

Two engines, one process each: a plain Qwen2 that is the base, and the converted model. While one answers the
other waits, and rounds alternate between them, so that both see the same machine. Plain is asked greedily,
which is the least that vLLM can do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import BASE, Option, Record, Table, interleaved, python_manual, ratio, run_benchmark, watched

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {"temperature": 0.0}),
    "plain, sampled": ("plain", {"temperature": 1.0}),
    "standard": ("causal", {"extra_args": {"inference_mode": "standard"}}),
    "standard, sampled": ("causal", {"extra_args": {"inference_mode": "standard", "do_sample": True}}),
    "causal": ("causal", {"extra_args": {"inference_mode": "causal"}}),
    "compatible": ("causal", {"temperature": 0.0, "extra_args": {"inference_mode": "compatible"}}),
}
QUICK = ("plain", "standard", "causal")
OPTIONS = {
    "base": BASE,
    "requests": Option("requests at a time", 16, smoke=2),
    "prompt": Option("tokens of each prompt", 32, smoke=8),
    "tokens": Option("tokens of each answer", 64, smoke=2, quick=32),
    "rounds": Option("rounds", 7, smoke=1, quick=5),
    "dtype": Option("precision of the weights", "float32", smoke="float32"),
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
ANSWER = "answer "  # marks our lines among those of libraries


def engine(model: str, requests: int, prompt: int, tokens: int, dtype: str) -> dict[str, Any]:
    """Answer calls on standard input, each the sampling parameters of all requests, until it ends."""
    # This file is called like the package that it measures, and must not be found in its place.
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).parent.resolve()]
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        max_num_seqs=requests,
        max_model_len=prompt + tokens,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(python_manual()[: 40 * requests * prompt])["input_ids"]
    prompts = [{"prompt_token_ids": ids[row * prompt : (row + 1) * prompt]} for row in range(requests)]
    print(f"{ANSWER}ready", flush=True)
    for line in sys.stdin:
        params = [
            SamplingParams(**json.loads(line), max_tokens=tokens, ignore_eos=True, seed=row)
            for row in range(requests)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        print(f"{ANSWER}{sum(len(output.outputs[0].token_ids) for output in outputs)}", flush=True)
    return {}


class Running:
    """An engine in a process of its own, which works only while it is asked."""

    def __init__(self, directory: Path, options: Mapping[str, Any]) -> None:
        task = json.dumps({"model": str(directory), **options})
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        self._answer()

    def ask(self, settings: Mapping[str, Any]) -> int:
        """Tokens that were generated."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(settings) + "\n")
        self.process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER).strip()
        raise RuntimeError(f"the engine ended with exit code {self.process.wait()}; its errors are above")

    def end(self) -> None:
        """Let it go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)


def plain_directory(source: Path, target: Path) -> None:
    """The backbone and W of a converted model as a Qwen2 that knows nothing of causes."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, Qwen2Config

    import causal_qwen  # noqa: F401  registers the configuration

    target.mkdir()
    known = Qwen2Config().to_dict().keys() - {"architectures", "model_type"}
    fields = AutoConfig.from_pretrained(source).to_dict()
    config = Qwen2Config(**{name: fields[name] for name in known if name in fields})
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(target)
    weights = {
        name: tensor
        for file in sorted(source.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if name.startswith(("model.", "lm_head."))
    }
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, target / name)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    sizes = {name: getattr(arguments, name) for name in ("requests", "prompt", "tokens", "dtype")}
    names = QUICK if arguments.quick else tuple(SETTINGS)
    with tempfile.TemporaryDirectory() as place:
        causal, plain = Path(arguments.base), Path(place) / "plain"
        if not (causal / "config.json").is_file():
            causal = Path(place) / "causal"
            command = Path(sys.executable).with_name("causal-qwen")
            subprocess.run([command, "convert", arguments.base, causal], check=True, stdout=sys.stderr)
        plain_directory(causal, plain)
        engines: dict[str, Running] = {}
        try:
            for name, directory in watched([("plain", plain), ("causal", causal)], "starting engines"):
                engines[name] = Running(directory, sizes)
            times = interleaved({name: _call(engines, name) for name in names}, repeats=arguments.rounds)
        finally:
            for running in engines.values():
                running.end()
    count = arguments.requests * arguments.tokens
    rates = {name: [count / one for one in of_name] for name, of_name in times.items()}
    measured: dict[str, Any] = {
        f"{name}_vs_plain".replace(", ", "_"): ratio(rates, name, "plain")
        for name in names
        if name != "plain"
    }
    return measured | {"tokens_per_second": {name: _median(rates[name]) for name in names}}


def _call(engines: Mapping[str, Running], name: str) -> Callable[[], object]:
    engine_name, settings = SETTINGS[name]
    return lambda: engines[engine_name].ask(settings)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def tables(record: Record) -> list[Table]:
    """What was measured."""
    rates = record.figures["tokens_per_second"]
    rows = []
    for name, rate in rates.items():
        share = record.figures.get(f"{name}_vs_plain".replace(", ", "_"))
        rows.append([name, f"{rate:.0f}", "1" if share is None else f"{share:.2f}"])
    title = f"{record.options['requests']} requests at a time in vLLM, {record.options['dtype']}"
    return [Table(title, ["", "tokens per second", "of plain Qwen2"], rows)]


def headlines(record: Record) -> list[tuple[str, str]]:
    """The two modes that plain Qwen2 does not have."""
    found, requests = record.figures, record.options["requests"]
    return [
        (
            f"{requests} requests in vLLM, tokens per second against plain Qwen2 there: `standard`; `causal`",
            f"{found['standard_vs_plain']:.2f}×; {found['causal_vs_plain']:.2f}×",
        )
    ]


if __name__ == "__main__":
    run_benchmark(
        __file__,
        __doc__,
        OPTIONS,
        figures,
        tables,
        quick="plain, standard and causal alone, half as many tokens",
        child=engine,
    )
