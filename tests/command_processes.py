"""Commands in processes of their own, forked from a server that has imported everything already."""

import os
import signal
import sys
import time

from causal_qwen.cli import main
from forking import child_process

SLOW = 30.0


def run(arguments, directory, stderr, environment, slow):
    """What a child does: the command, with standard error in a file or on a terminal."""
    # In the background of a shell, or under nohup, they would be ignored, as whoever started the tests said.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.update(environment)
    os.chdir(directory)
    descriptor = os.open(stderr, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["causal-qwen", *arguments]
    if slow:  # so that a signal can come in the middle of writing
        from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

        def save(self, directory, **options):
            time.sleep(SLOW)

        CausalQwen2Processor.save_pretrained = save
    main()


def start(arguments, *, directory, stderr, slow=False, **environment):
    return child_process(run, ([*map(str, arguments)], str(directory), str(stderr), environment, slow))


def wait_for(condition, child, seconds=60.0):
    """Until ``condition()`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert child.is_alive(), f"the command ended with {child.exitcode}"
        assert time.monotonic() < end
        time.sleep(0.01)
