"""A process that runs batches: one JSON line in, one out. What it works on lies in a file, should it die.

python -m fuzzing.worker DIRECTORY MODULE
"""

import base64
import faulthandler
import importlib
import json
import logging
import os
import resource
import sys
import time
from pathlib import Path

from fuzzing.judging import Counts, judge
from fuzzing.target import Target

CURRENT = "current.bin"
MOST_MEMORY = 6 * 2**30
# A hang in compiled code takes no signal: then the process ends itself.
PATIENCE = 4.0


def run_batch(target: Target, seed: int, count: int, current: Path | None = None) -> Counts:
    """Judge ``count`` inputs of a target, in this process.

    Args:
        target: What is fuzzed.
        seed: Of the batch.
        count: Inputs.
        current: File that holds the input at work; None where nobody would look.
    """
    counts, started = Counts(), time.perf_counter()

    def take(data: bytes) -> None:
        if current is not None:
            current.write_bytes(data)
            faulthandler.dump_traceback_later(PATIENCE * target.seconds, exit=True)
        counts.add(*_judged(target, data))

    target.source.feed(seed, count, take)
    faulthandler.cancel_dump_traceback_later()
    counts.seconds = time.perf_counter() - started
    return counts


def _judged(target: Target, data: bytes) -> tuple[str, bytes, str]:
    verdict, said = judge(target, data)
    return verdict, data, said


def main() -> None:
    """Serve batches until standard input ends."""
    logging.disable(logging.CRITICAL)  # thousands of skipped rows
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if "LD_PRELOAD" not in os.environ:  # AddressSanitizer maps terabytes that it does not use
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    directory, module = Path(sys.argv[1]), importlib.import_module(sys.argv[2])
    targets = {target.name: target for target in module.TARGETS}
    for line in sys.stdin:
        task = json.loads(line)
        counts = run_batch(targets[task["target"]], task["seed"], task["count"], directory / CURRENT)
        failures = [(base64.b64encode(data).decode(), said) for data, said in counts.failures]
        print(json.dumps(vars(counts) | {"failures": failures}), file=answers, flush=True)


if __name__ == "__main__":
    main()
