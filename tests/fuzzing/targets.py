"""All that is fuzzed."""

from fuzzing import individuals, scanning, stopping
from fuzzing.target import Target

__all__ = ["TARGETS"]

TARGETS: tuple[Target, ...] = (*scanning.TARGETS, *individuals.TARGETS, *stopping.TARGETS)
