"""Many inputs in processes of their own, and the corpus of those that failed."""

import base64
import contextlib
import hashlib
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from causal_qwen.kernels.library import build
from fuzzing.judging import Counts
from fuzzing.target import Target
from fuzzing.worker import CURRENT, run_batch

__all__ = ["CORPUS", "Batch", "batches", "keep", "run"]

TESTS = Path(__file__).parents[1]
CORPUS = TESTS / "corpus"
# Failing inputs that are kept of those that say the same.
MOST_ALIKE = 3
# Without optimisation the templates take a minute to build and seconds to run; with all of it, a minute too.
SANITISERS = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"


class Batch(NamedTuple):
    """Inputs of one target that one process runs in one go."""

    target: Target
    seed: int
    count: int


def batches(targets: Sequence[Target], *, inputs: int, seed: int, size: int = 200) -> list[Batch]:
    """All batches of a run, the targets in turn: a share of ``inputs`` each, at least one."""
    whole, rounds = sum(target.share for target in targets), []
    for target in targets:
        count = max(1, round(inputs * target.share / whole))
        for index, start in enumerate(range(0, count, size)):
            part = Batch(target, target.seed_of(seed, index), min(size, count - start))
            # Those of native code come last, so that a process changes its kind once.
            rounds.append((target.sanitised, start / count, part))
    return [part for *_, part in sorted(rounds, key=lambda entry: entry[:2])]


def run(
    parts: Sequence[Batch], *, jobs: int, module: str = "fuzzing.targets"
) -> Iterator[tuple[Batch, Counts]]:
    """The counts of each batch, in order.

    Args:
        parts: What to run.
        jobs: Processes at a time; 0 runs all in this one, where a crash is the end and nothing is sanitised.
        module: Whose TARGETS they are.
    """
    if jobs == 0:
        for part in parts:
            yield part, run_batch(*part)
        return
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        workers = queue.SimpleQueue[_Worker]()
        for index in range(jobs):
            place = Path(directory) / str(index)
            place.mkdir()
            workers.put(_Worker(place, module))

        def one(part: Batch) -> Counts:
            worker = workers.get()
            try:
                return worker.run(part)
            finally:
                workers.put(worker)

        with ThreadPoolExecutor(jobs) as pool:
            try:
                yield from zip(parts, pool.map(one, parts), strict=True)
            finally:
                pool.shutdown(cancel_futures=True)
                for _ in range(jobs):
                    workers.get().close()


@dataclass
class _Worker:
    """A `fuzzing.worker` process; another one when it dies."""

    directory: Path
    module: str
    sanitised: bool = False
    process: "subprocess.Popen[str] | None" = None

    def run(self, part: Batch) -> Counts:
        counts, seed = Counts(), part.seed
        while counts.inputs < part.count:
            answer = self._ask(part.target, seed, part.count - counts.inputs)
            counts += answer
            seed += 1  # after a death: the rest is drawn anew
        return counts

    def _ask(self, target: Target, seed: int, count: int) -> Counts:
        process, started = self._ready(target), time.perf_counter()
        assert process.stdin is not None
        assert process.stdout is not None
        task = {"target": target.name, "seed": seed, "count": count}
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(task), file=process.stdin, flush=True)
            line = process.stdout.readline()
        if line:
            answer = json.loads(line)
            answer["failures"] = [(base64.b64decode(data), said) for data, said in answer["failures"]]
            return Counts(**answer)
        self.close()
        counts = Counts(seconds=time.perf_counter() - started)
        counts.add(
            "failure", self._current.read_bytes() if self._current.is_file() else b"", self._death(process)
        )
        return counts

    def _ready(self, target: Target) -> "subprocess.Popen[str]":
        if self.process is None or self.sanitised != target.sanitised:
            self.close()
            self.sanitised = target.sanitised
            self._current.unlink(missing_ok=True)
            with self._log.open("w") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "fuzzing.worker", str(self.directory), self.module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment(sanitised=target.sanitised),
                )
        return self.process

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.communicate()
            self.process = None

    def _death(self, process: "subprocess.Popen[str]") -> str:
        """Why a process ended: what a sanitiser or the watchdog wrote, or its exit code."""
        lines = self._log.read_text(errors="replace").splitlines()
        told = [
            line for line in lines if any(word in line for word in ("ERROR:", "runtime error:", "Timeout ("))
        ]
        return f"the process ended with {process.returncode}: {' '.join((told or lines[-3:])[:2])}"

    @property
    def _current(self) -> Path:
        return self.directory / CURRENT

    @property
    def _log(self) -> Path:
        return self.directory / "log.txt"


def environment(*, sanitised: bool) -> dict[str, str]:
    """Of a worker: one thread, no network, and where asked native code under AddressSanitizer.

    Raises:
        FileNotFoundError: If a sanitiser is asked for and the compiler has none.
    """
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if sanitised:
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        asked = [*compiler, "-print-file-name=libasan.so"]
        sanitiser = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(sanitiser).is_file():
            raise FileNotFoundError(f"{compiler[0]} has no AddressSanitizer: install libasan")
        # Here and not in the worker: the compiler itself would run under the sanitiser.
        build(lambda line: None, extra=shlex.split(SANITISERS))
        variables |= {
            "CXX": shlex.join(compiler),
            "CXXFLAGS": SANITISERS,
            "LD_PRELOAD": sanitiser,
            # Python itself keeps memory until it ends.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        }
    return variables


def keep(
    target: Target, seed: int, failures: Sequence[tuple[bytes, str]], corpus: Path = CORPUS
) -> list[tuple[Path, str]]:
    """Write failing inputs into the corpus, a few of those that fail alike, and say of each what it said.

    Args:
        target: Whose they are.
        seed: Of the run.
        failures: (input, what was said).
        corpus: Where to.
    """
    alike: dict[str, int] = {}
    kept = []
    for data, said in sorted(failures, key=lambda failure: len(failure[0])):
        kind = said.partition(":")[0]
        alike[kind] = alike.get(kind, 0) + 1
        if alike[kind] > MOST_ALIKE:
            continue
        file = corpus / target.name / f"{hashlib.sha256(data).hexdigest()[:12]}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        about = {"target": target.name, "seed": seed, "failure": said}
        file.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        kept.append((file, said))
    return kept
