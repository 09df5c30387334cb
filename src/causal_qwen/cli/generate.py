"""causal-qwen generate MODEL PROMPT, or --prompts FILE."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json, quiet_libraries
from causal_qwen.cli.models import load_speaker, load_vllm_speaker
from causal_qwen.cli.shards import Shard

if TYPE_CHECKING:
    from causal_qwen.data import Prompt
    from causal_qwen.serving.vllm.offline import VllmSpeaker

MANY = 512  # texts that vLLM is given at a time: it batches them itself


def command(
    model: shared.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads standard input.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts: a line each, or JSONL with prompt or messages.", dir_okay=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="JSONL file for --prompts; a run that was cut is continued."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time, of --prompts.", min=1)] = 8,
    count: Annotated[
        int, typer.Option("--num", "-n", help="Texts per prompt, by different individuals.", min=1)
    ] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages; answer by the model's chat template.")
    ] = False,
    system: shared.System = None,
    mode: Annotated[
        shared.Mode | None, typer.Option(help="Mode of inference; the model's own if not given.")
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Sample (always, in causal mode).")] = False,
    max_new_tokens: shared.NewTokens = 64,
    stop: shared.Stop = None,
    temperature: shared.Temperature = None,
    top_k: shared.TopK = None,
    top_p: shared.TopP = None,
    repetition_penalty: shared.RepetitionPenalty = None,
    persistence: shared.Persistence = None,
    density_floor: shared.DensityFloor = None,
    seed: shared.Seed = None,
    individual: Annotated[
        Path | None, typer.Option(help="File of a saved individual, instead of a seed.", dir_okay=False)
    ] = None,
    level: shared.Level = 0.9,
    raw_intervals: Annotated[
        bool, typer.Option("--raw-intervals", help="Intervals of the Cauchy law, not the calibrated ones.")
    ] = False,
    on_bad_row: shared.BadRow = "error",
    overwrite: shared.Overwrite = False,
    device: shared.Device = None,
    dtype: shared.Precision = "auto",
    engine: shared.FileEngine = "auto",
    processes: shared.Processes = 1,
    shard: shared.ShardText = "0/1",
    as_json: shared.AsJson = False,
) -> None:
    """Continue a text, or answer a message, deciding by causes; or do so for a file of prompts."""
    text = _text(prompt, prompts)
    if prompts is None and output is not None:
        raise ValueError("--output is for --prompts; a single text goes to standard output")
    if prompts is None and (overwrite or on_bad_row == "skip"):
        note("--overwrite and --on-bad-row are for --prompts; a single text has no use for them")
    if prompts is None and engine == "vllm":
        raise ValueError("--engine vllm is for --prompts; a single text is sooner said by another engine")
    if processes > 1 and (engine != "vllm" or output is None):
        raise ValueError(f"--processes {processes} needs --engine vllm and --output")
    if seed is not None and individual is not None:
        raise ValueError("--seed and --individual both say who speaks; give one of them")
    if individual is not None and count > 1:
        raise ValueError(
            f"-n {count} needs {count} individuals, and --individual is one; give --seed instead"
        )
    quiet_libraries()
    from causal_qwen.data import BadRows
    from causal_qwen.individual import Individual
    from causal_qwen.prompting import Asking, Settings, Speaker

    settings = Settings(
        mode=mode,
        sample=sample,
        seed=seed,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        persistence=persistence,
        density_floor=density_floor,
        stop=tuple(stop or ()),
        level=level,
        raw_intervals=raw_intervals,
    )
    person = None if individual is None else Individual.load(individual)
    asking = Asking(settings, chat=chat, system=system)
    bad_rows = BadRows(on_bad_row)
    requests = [] if prompts is None else asking.file(prompts, bad_rows)
    if prompts is not None:
        from causal_qwen.cli.prompts import check_output

        check_output(output, overwrite=overwrite)
        if asking.unused:
            note(f"{prompts}: not used: {', '.join(sorted(asking.unused))}")
    if processes > 1 and output is not None:
        from causal_qwen.cli.prompts import gather

        summary = gather(output, processes, None if person is not None else settings)
        if as_json:
            print_json(summary)
        return
    part = Shard.read(shard)

    speaker: Speaker | VllmSpeaker
    if engine == "vllm":
        speaker = load_vllm_speaker(model, device=device, dtype=dtype, share=part.every)
    else:
        speaker = load_speaker(model, device=device, dtype=dtype, engine=engine)
    settings = replace(settings, mode=mode or speaker.config.inference_mode)
    if count > 1 and not settings.samples:
        raise ValueError(f"-n {count}: without sampling all {count} texts are the same; add --sample")
    if person is not None and settings.samples and not settings.draws_noise:
        raise ValueError("--individual: mode compatible samples tokens, not individuals; give --seed")
    shared.note_inert(settings, *(["individual"] if person is not None else []))
    if prompts is not None:
        from causal_qwen.cli.prompts import run

        summary = run(
            speaker,
            requests,
            settings,
            model=model,
            person=person,
            count=count,
            batch_size=batch_size if engine != "vllm" else max(batch_size, MANY),
            shard=part,
            output=output,
            bad_rows=bad_rows,
        )
        if as_json and output is not None:
            print_json(summary)
        return

    assert isinstance(speaker, Speaker)
    question = asking.prompt(text)
    speaker.check(question, settings)
    people = settings.people(count) if person is None else [person]
    results: list[dict[str, Any]] = []
    for index, who in enumerate(people):
        if index and not as_json:
            print(flush=True)
        if settings.samples:
            note(f"seed {who.seed}")
        if as_json:
            (answer,) = speaker.answer([question], settings, [who])
            facts = {"prompt": question, "mode": settings.mode, "engine": speaker.engine_name}
            results.append(facts | answer.to_dict())
            continue
        if isinstance(question, str):
            print(question, end="", flush=True)
        speaker.answer([question], settings, [who], tell=_printer(question, speaker.processor.numbers))
        print()
    if as_json:
        print_json(results[0] if count == 1 else results)


def _text(prompt: str | None, prompts: Path | None) -> str:
    """The prompt itself, of the command line or of standard input; nothing where a file has them.

    Raises:
        ValueError: If there is none, or there are two, or it is empty.
    """
    if (prompt is None) == (prompts is None):
        raise ValueError("give one of PROMPT and --prompts FILE")
    if prompt is None:
        return ""
    text = sys.stdin.read() if prompt == "-" else prompt
    shared.check_prompt(text, "standard input" if prompt == "-" else "the prompt")
    return text


def _printer(question: Prompt, numbers: str) -> Callable[[str], None]:
    """Prints a text as it grows behind its prompt.

    Prompts that are read as "written" have no white space at their end, and what follows them has none at its
    beginning: a number behind a word is shown apart from it.
    """
    behind_word = numbers == "written" and isinstance(question, str) and question[-1].isalpha()

    def tell(piece: str) -> None:
        nonlocal behind_word
        if piece:
            if behind_word and piece.removeprefix("-")[:1].isdigit():
                print(end=" ")
            behind_word = False
        print(piece, end="", flush=True)

    return tell
