"""Child processes of tests, forked from a server that has imported whatever training and commands import.

One server serves a whole worker: what the first test wants imported is what all get.
"""

import multiprocessing

# Without modules of the tests: the server does not look in this directory.
PRELOADED = [
    "causal_qwen.cli", "causal_qwen.conversion.loading", "causal_qwen.training", "fastapi",
    "matplotlib.backends.backend_agg", "matplotlib.figure", "peft", "sklearn", "uvicorn",
]  # fmt: skip


def child_process(target, arguments):
    """A child that calls ``target(*arguments)``, started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    child = context.Process(target=target, args=arguments)
    child.start()
    return child
