"""What the four scripts share: a base with its conversion, and a list of checks that ends in a table."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field

import torch
from transformers.utils import logging

from causal_qwen.cli.console import print_table
from causal_qwen.conversion import EMBEDDED, Base, Conversion, convert, load_base
from causal_qwen.conversion.transfer import CalibrationMode


@dataclass
class Checks:
    """The checks of one script, in order."""

    title: str
    rows: list[tuple[str, str, str, bool]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, name: str, passed: bool, measured: object, wanted: object) -> None:
        """Note one check: what was measured, and what would have been right."""
        self.rows.append((name, str(measured), str(wanted), bool(passed)))
        print(f"  {'ok  ' if passed else 'FAIL'}  {name}", file=sys.stderr)

    def finish(self) -> int:
        """Print the table; 0 if every check passed, else 1."""
        failed = sum(not passed for *_, passed in self.rows)
        table = [(*texts, "ok" if passed else "FAIL") for *texts, passed in self.rows]
        print_table(self.title, table, header=("check", "measured", "wanted", ""))
        seconds = time.monotonic() - self.started
        print(f"{len(self.rows) - failed} of {len(self.rows)} checks passed in {seconds:.0f} s")
        return 1 if failed or not self.rows else 0


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every script has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--base",
        default=EMBEDDED,
        help="smollm2 (embedded, the default), a directory, a .gguf file or a hub id; Qwen2, Qwen3 or Llama",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    return parser


def load(name: str, seed: int, calibration: CalibrationMode = "default") -> tuple[Base, Conversion]:
    """The base in float32, and its conversion."""
    print(f"converting {name} …", file=sys.stderr)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    base = load_base(name, dtype=torch.float32)
    return base, convert(base, seed=seed, calibration=calibration)
