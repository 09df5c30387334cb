"""What is fuzzed: a name, where inputs come from, and a check of one."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from fuzzing.inputs import Source

__all__ = ["Target"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something that takes input.

    Args:
        name: What is fuzzed; also its directory in tests/corpus.
        source: Makes inputs.
        check: Takes one; returns where the laws hold, raises an error of ours where the input is refused, and
            anything else (an AssertionError, above all) where something is wrong.
        share: How many of each thousand inputs are this target's.
        seconds: The longest that one input may take.
        sanitised: Whether it runs with native code built for AddressSanitizer.
    """

    name: str
    source: Source
    check: Callable[[bytes], None]
    share: int
    seconds: float = 5.0
    sanitised: bool = False

    def seed_of(self, seed: int, batch: int) -> int:
        """The seed of one batch; no other batch or target has it."""
        digest = hashlib.sha256(f"{seed} {self.name} {batch}".encode()).digest()
        return int.from_bytes(digest[:8], "big")
