"""generate --prompts: batches of prompts to lines of JSON, in order, continued after a stop.

Batches are cut from the file in its order and never depend on where a run began: a text that is computed
again is the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from causal_qwen.cli.console import note
from causal_qwen.cli.interruption import on_interruption
from causal_qwen.cli.predict import state
from causal_qwen.cli.progress import counted
from causal_qwen.cli.shards import Shard, gathered
from causal_qwen.directories import check_output_file

if TYPE_CHECKING:
    from causal_qwen.data import BadRows
    from causal_qwen.individual import Individual
    from causal_qwen.prompting import Request, Settings, Speaker
    from causal_qwen.serving.vllm.offline import VllmSpeaker

    AnySpeaker = Speaker | VllmSpeaker

__all__ = ["check_output", "gather", "run"]


class Text(NamedTuple):
    """One text that is to be made: a prompt, who speaks, and which of the prompt's texts it is."""

    request: Request
    person: Individual
    sample: int


def check_output(output: Path | None, *, overwrite: bool) -> None:
    """Refuse an output that is not JSONL, or that cannot be written.

    Raises:
        ValueError: If it is not JSONL.
        OSError: If it cannot be written.
    """
    if output is None:
        return
    if output.suffix.lower() != ".jsonl":
        raise ValueError(f"{output} ends in {output.suffix or 'nothing'!r}; texts are written as .jsonl")
    check_output_file(output, overwrite=overwrite)


def run(
    speaker: AnySpeaker,
    requests: Sequence[Request],
    settings: Settings,
    *,
    model: str,
    person: Individual | None,
    count: int,
    batch_size: int,
    shard: Shard,
    output: Path | None,
    bad_rows: BadRows,
) -> dict[str, Any]:
    """Answer all requests, and sum up; every prompt is checked before the first token.

    Args:
        speaker: Who is asked.
        requests: Of the file.
        settings: The file's, with a mode.
        model: Its name, for the partial file.
        person: Of --individual.
        count: Texts per prompt.
        batch_size: Texts at a time.
        shard: Which of the texts are made here.
        output: JSONL file; None prints the lines.
        bad_rows: Told of prompts that do not fit.
    """
    from causal_qwen.evaluation.tables import GrowingTable

    if settings.samples and settings.seed is None and person is None:
        earlier = _earlier_seed(output)
        settings = replace(settings, seed=settings.people(1)[0].seed if earlier is None else earlier)
    if settings.samples:
        note(f"seed {settings.seed if person is None else person.seed}")
    usable = list(_usable(speaker, requests, settings, bad_rows))
    texts = [
        Text(request, who, sample)
        for request in usable
        for sample, who in enumerate(request.settings.people(count) if person is None else [person])
    ]
    texts = list(shard.of(texts))
    if output is None:
        for line in _lines(speaker, texts, batch_size, 0):
            print(json.dumps(line, ensure_ascii=False), flush=True)
        return {"texts": len(texts), "bad_rows": bad_rows.count}
    facts = {
        "model": state(model),
        "engine": speaker.engine_name,
        "settings": settings.to_dict(),
        "individual": None if person is None else json.loads(person.to_json()),
        "count": count,
        "batch_size": batch_size,
        "shard": list(shard),
        "prompts": _digest(usable),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    with GrowingTable(output, facts) as table:
        on_interruption(table.kept)
        if table.done:
            note(f"continuing behind text {table.done} of {len(texts)}")
        for line in _lines(speaker, texts, batch_size, table.done):
            table.write(line)
        table.finish()
    note(f"{len(texts)} texts in {output}")
    return {
        "output": str(output),
        "texts": len(texts),
        "continued_from": table.done,
        "bad_rows": bad_rows.count,
    }


def gather(output: Path, processes: int, settings: Settings | None) -> dict[str, Any]:
    """Have processes answer the file, and sum up; the settings' seed is for all of them, unless somebody is
    named.
    """
    seed = None if settings is None else settings.people(1)[0].seed
    count = sum(1 for _ in gathered(output, processes, seed=seed))
    note(f"{count} texts in {output}")
    return {"output": str(output), "texts": count, "processes": processes}


def _usable(
    speaker: AnySpeaker, requests: Sequence[Request], settings: Settings, bad_rows: BadRows
) -> Iterator[Request]:
    """The requests with the run's mode and seed, without what cannot be answered."""
    for request in requests:
        own = request.settings
        whole = replace(own, mode=settings.mode, seed=settings.seed if own.seed is None else own.seed)
        try:
            speaker.check(request.prompt, whole)
        except ValueError as error:
            bad_rows.add(request.where, str(error))
            continue
        yield replace(request, settings=whole)
    if bad_rows.count:
        note(f"{bad_rows.count} prompts are skipped")


def _batches(texts: Sequence[Text], batch_size: int) -> Iterator[list[int]]:
    """Indices of texts in their order, those of a batch with the same settings but for the seed."""
    batch: list[int] = []
    for index, text in enumerate(texts):
        if batch and (len(batch) == batch_size or _rules(texts[batch[0]]) != _rules(text)):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _rules(text: Text) -> Settings:
    return replace(text.request.settings, seed=None)


def _lines(
    speaker: AnySpeaker, texts: Sequence[Text], batch_size: int, done: int
) -> Iterator[dict[str, Any]]:
    """The lines behind the first ``done``, with a count for whoever waits; a batch that was cut is computed
    again.
    """
    return counted(
        _answers(speaker, texts, batch_size, done), "generating", "texts", total=len(texts), done=done
    )


def _answers(
    speaker: AnySpeaker, texts: Sequence[Text], batch_size: int, done: int
) -> Iterator[dict[str, Any]]:
    for batch in _batches(texts, batch_size):
        if batch[-1] < done:
            continue
        asked = [texts[index] for index in batch]
        answers = speaker.answer(
            [text.request.prompt for text in asked], _rules(asked[0]), [text.person for text in asked]
        )
        for index, text, answer in zip(batch, asked, answers, strict=True):
            if index >= done:
                yield _line(text, answer.to_dict())


def _line(text: Text, answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": text.request.id,
        "sample": text.sample,
        "prompt": text.request.prompt,
        "mode": text.request.settings.mode,
    } | answer


def _digest(requests: Sequence[Request]) -> str:
    content = [[request.id, request.prompt, request.settings.to_dict()] for request in requests]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _earlier_seed(output: Path | None) -> int | None:
    """The seed that a run drew which was cut, so that it goes on with the same individuals."""
    partial = None if output is None else output.with_name(f"{output.name}.partial")
    if partial is None or not partial.is_file():
        return None
    with partial.open(encoding="utf-8", errors="replace") as stream:
        first = stream.readline()
    try:
        seed = json.loads(first)["settings"]["settings"]["seed"]
    except (ValueError, KeyError, TypeError):
        return None
    return seed if isinstance(seed, int) else None
