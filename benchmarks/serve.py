"""How much do many clients get out of one server, and do they get what they would get alone?

A server runs in a process of its own, and clients on the same machine stream from it over loopback: one,
then sixteen at once, each with prompts and individuals of its own. Every text is compared with generate()'s
for the same individual alone. Then many clients ask for minutes, of whom some go away in the middle of a
text, some send bodies that are no requests, and all together are more than the queue takes.

    python benchmarks/serve.py                 # every figure, in about six minutes
    python benchmarks/serve.py --quick --json  # the same with a shorter siege, in about three minutes
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from causal_qwen.conversion import load_model
from causal_qwen.decoder import Engine
from causal_qwen.individual import Individual
from causal_qwen.prompting import Settings, Speaker
from measure import BASE, PAGE_BYTES, Option, Record, Table, python_manual, run_benchmark, watched

OPTIONS = {
    "base": BASE,
    "dtype": Option("precision of the weights", "float32", smoke="float32"),
    "clients": Option("that stream at once", 16, smoke=3),
    "requests": Option("of each of them", 3, smoke=1),
    "tokens": Option("new tokens of a text", 64, smoke=6),
    "siege_clients": Option("of the siege", 64, smoke=8),
    "siege_seconds": Option("that it lasts", 180, smoke=3, quick=60),
    "siege_texts": Option("different texts that it asks for", 32, smoke=4),
}
QUEUE = 32  # so that the siege finds it full
START_SECONDS = 300
BAD_BODIES = (b"{", b"[1]", b'{"prompt": 5}', b'{"prompt": "a", "colour": 1}', b'{"prompt": "a", "n": 99}')
# Of a client of the siege: how often it goes away, or sends what is no request.
LEAVES, BAD = 0.15, 0.15
PROMPT_CHARACTERS = (40, 240)


class Ask(NamedTuple):
    """One request."""

    prompt: str
    seed: int
    tokens: int


@dataclass
class Told:
    """What came back of it."""

    status: int
    text: str = ""
    done: bool = False
    times: list[float] = field(default_factory=list)  # of the events with text, since the request
    retry_after: float = 1.0


async def ask(port: int, body: bytes, *, leave_after: int | None = None) -> Told:
    """POST /v1/completions over a plain socket: parsing costs the server's cores as little as can be."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        start = time.perf_counter()
        writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
        told = Told(int((await reader.readline()).split()[1]))
        while line := await reader.readline():
            if line.lower().startswith(b"retry-after:"):
                told.retry_after = float(line.partition(b":")[2])
            if line.startswith(b"data: [DONE]"):
                told.done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                piece = "".join(choice["text"] for choice in event.get("choices", ()))
                told.text += piece
                if piece:
                    told.times.append(time.perf_counter() - start)
                if leave_after is not None and len(told.times) >= leave_after:
                    break
        return told
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def body_of(one: Ask) -> bytes:
    """Causal, as the server does by default; nothing ends a text early but its end."""
    return json.dumps(
        {"prompt": one.prompt, "seed": one.seed, "max_tokens": one.tokens, "stream": True}
    ).encode()


def asks(count: int, tokens: int, *, seed: int) -> list[Ask]:
    """Prompts of different lengths out of Python's manual, each for somebody else."""
    draw, text = random.Random(seed), python_manual()
    prompts = []
    for index in range(count):
        start = draw.randrange(len(text) - PROMPT_CHARACTERS[1])
        prompt = text[start : start + draw.randint(*PROMPT_CHARACTERS)].strip() or "The"
        prompts.append(Ask(prompt, 1000 * seed + index, tokens))
    return prompts


@contextlib.contextmanager
def server(directory: Path, dtype: str) -> Iterator[tuple[int, int]]:
    """Port and process id of `causal-qwen serve` in a process of its own."""
    words = ["serve", str(directory), "--port", "0", "--engine", "native", "--dtype", dtype]
    words += ["--max-queue", str(QUEUE), "--max-batch", "16"]
    command = [sys.executable, "-c", "from causal_qwen_command import main; main()", *words]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL)
        try:
            yield _port(process, log), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(process: subprocess.Popen[bytes], log: Any) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        log.seek(0)
        said = log.read()
        if "http://127.0.0.1:" in said:
            return int(said.rpartition("http://127.0.0.1:")[2].split()[0])
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended: {said.strip()[-300:]}")
        time.sleep(0.2)
    raise RuntimeError("the server did not start in time")


async def streaming(port: int, groups: Sequence[Sequence[Ask]]) -> tuple[list[list[Told]], float]:
    """Each client asks one thing after the other, all clients at once; and how long all of it took."""

    async def client(own: Sequence[Ask]) -> list[Told]:
        return [await ask(port, body_of(one)) for one in own]

    start = time.perf_counter()
    told = await asyncio.gather(*(client(own) for own in groups))
    return list(told), time.perf_counter() - start


class Siege:
    """Many clients for some time.

    Args:
        port: Of the server.
        texts: Requests, with what must come back.
        seconds: That it lasts.
    """

    def __init__(self, port: int, texts: Sequence[tuple[Ask, str]], seconds: float) -> None:
        self.port, self.texts = port, texts
        self.end = time.monotonic() + seconds
        self.counts: Counter[str] = Counter(good=0, busy=0, left=0, bad=0, failed=0, mismatched=0)

    async def run(self, clients: int) -> None:
        """All clients, each in its own order."""
        await asyncio.gather(*(self._client(random.Random(index)) for index in range(clients)))

    async def _client(self, draw: random.Random) -> None:
        while time.monotonic() < self.end:
            one, expected = draw.choice(self.texts)
            kind = draw.random()
            try:
                if kind < BAD:
                    told = await ask(self.port, draw.choice(BAD_BODIES))
                    self.counts["bad" if told.status == 400 else "failed"] += 1
                elif kind < BAD + LEAVES:
                    await ask(self.port, body_of(one), leave_after=draw.randint(1, 4))
                    self.counts["left"] += 1
                else:
                    await self._good(one, expected, draw)
            except (OSError, asyncio.IncompleteReadError, IndexError):
                self.counts["failed"] += 1

    async def _good(self, one: Ask, expected: str, draw: random.Random) -> None:
        """Asks until there is room, as a client should."""
        while (told := await ask(self.port, body_of(one))).status == 429:
            self.counts["busy"] += 1
            await asyncio.sleep(told.retry_after * draw.uniform(0.5, 1.0))
            if time.monotonic() > self.end:
                return
        self.counts["good" if told.status == 200 and told.done else "failed"] += 1
        self.counts["mismatched"] += told.text != expected


async def besieged(siege: Siege, clients: int, process: int) -> list[float]:
    """Resident megabytes of the server, second by second, while the siege lasts."""
    running, memory = asyncio.create_task(siege.run(clients)), []
    while not running.done():
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        memory.append(pages * PAGE_BYTES / 1e6)
        await asyncio.wait([running], timeout=1.0)
    await running
    return memory


def growth(memory: Sequence[float]) -> float:
    """Megabytes from the first minute (or third) to the end, by medians over ten seconds."""
    first = min(60, len(memory) // 3)
    window = max(1, min(10, len(memory) // 6))
    return statistics.median(memory[-window:]) - statistics.median(memory[first : first + window])


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve, stream, lay siege, and compare."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "model"
        for part in load_model(arguments.base):
            part.save_pretrained(directory)
        count, requests = arguments.clients, arguments.requests
        many = [asks(requests, arguments.tokens, seed=client + 1) for client in range(count)]
        single = [asks(max(requests, 2), arguments.tokens, seed=count + 1)]
        besieging = asks(arguments.siege_texts, max(arguments.tokens // 3, 2), seed=count + 2)
        expected = _alone(directory, arguments.dtype, [*itertools.chain(*many), *single[0], *besieging])
        with server(directory, arguments.dtype) as (port, process):
            asyncio.run(streaming(port, [asks(1, 4, seed=0)]))  # the first one warms up
            one, one_seconds = asyncio.run(streaming(port, single))
            told, seconds = asyncio.run(streaming(port, many))
            texts = [(ask_, expected[ask_]) for ask_ in besieging]
            siege = Siege(port, texts, arguments.siege_seconds)
            memory = asyncio.run(besieged(siege, arguments.siege_clients, process))
    pairs = [*zip(single[0], one[0], strict=True)]
    for own, answers in zip(many, told, strict=True):
        pairs += zip(own, answers, strict=True)
    answers = [answer for own in told for answer in own]
    rate = len(single[0]) * arguments.tokens / one_seconds
    rate_many = count * requests * arguments.tokens / seconds
    first = sorted(answer.times[0] for answer in answers if answer.times)
    failed = sum(not answer.done for _, answer in pairs) + siege.counts["failed"]
    mismatched = sum(answer.text != expected[ask_] for ask_, answer in pairs) + siege.counts["mismatched"]
    return {
        "throughput_ratio_16": rate_many / rate,
        "ttft_p95_s": first[min(len(first) - 1, int(0.95 * len(first)))],
        "ttft_median_s": statistics.median(first),
        "failed": failed,
        "mismatched": mismatched,
        "rss_growth_mb": growth(memory),
        "rss_mb": memory[-1],
        "tokens_per_second_1": rate,
        "tokens_per_second_16": rate_many,
        "ttft_1_s": statistics.median(answer.times[0] for answer in one[0]),
        "siege": dict(siege.counts) | {"per_second": siege.counts["good"] / arguments.siege_seconds},
    }


def _alone(directory: Path, dtype: str, everything: Sequence[Ask]) -> dict[Ask, str]:
    """What generate() says to each alone, on the same engine."""
    model, processor = load_model(str(directory), dtype="float32" if dtype.startswith("int") else dtype)
    speaker = Speaker(model, processor, Engine.from_model(model, precision=dtype))
    texts = {}
    for one in watched(everything, "texts alone"):
        settings = Settings(mode="causal", max_new_tokens=one.tokens)
        (answer,) = speaker.answer([one.prompt], settings, [Individual(one.seed)])
        texts[one] = answer.text
    return texts


def headlines(record: Record) -> list[tuple[str, str]]:
    """What a reader wants to know first."""
    found = record.figures
    return [
        (
            f"{record.options['clients']} clients streaming at once, tokens per second against one client",
            f"{found['throughput_ratio_16']:.1f}×",
        )
    ]


def tables(record: Record) -> list[Table]:
    """Speed, and the siege."""
    found, options = record.figures, record.options
    siege = found["siege"]
    speed = Table(
        f"Streaming {options['tokens']} tokens per text, {options['dtype']}",
        ("clients", "tokens per second", "first token, median", "first token, 95th percentile"),
        [
            ("1", f"{found['tokens_per_second_1']:.0f}", f"{found['ttft_1_s']:.2f} s", ""),
            (
                str(options["clients"]),
                f"{found['tokens_per_second_16']:.0f} ({found['throughput_ratio_16']:.1f}×)",
                f"{found['ttft_median_s']:.2f} s",
                f"{found['ttft_p95_s']:.2f} s",
            ),
        ],
    )
    endurance = Table(
        f"{options['siege_clients']} clients for {options['siege_seconds']} seconds",
        ("what", "count"),
        [
            ("texts that were asked for and came whole", str(siege["good"])),
            ("answers that the queue was full (429), after which the client asked again", str(siege["busy"])),
            ("clients that went away in the middle of a text", str(siege["left"])),
            ("bodies that were no requests (400)", str(siege["bad"])),
            ("good requests that failed, streaming and siege", str(found["failed"])),
            ("texts that differ from generate() alone, streaming and siege", str(found["mismatched"])),
            ("growth of memory after the first minute, MB", f"{found['rss_growth_mb']:.1f}"),
        ],
    )
    return [speed, endurance]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="a siege of one minute", argv=argv)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
