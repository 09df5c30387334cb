"""causal-qwen compare MODEL [OTHER]... --prompts FILE."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json, print_table, quiet_libraries
from causal_qwen.cli.interruption import on_interruption
from causal_qwen.cli.models import FileEngineName, Precision, load_speaker, load_vllm_speaker
from causal_qwen.cli.progress import bar
from causal_qwen.cli.shards import Shard, gathered
from causal_qwen.directories import check_output_file

if TYPE_CHECKING:
    from causal_qwen.counterfactual.comparison import ComparisonResult, Pair, Ranking, Talker
    from causal_qwen.prompting import Request, Speaker

Against = "of the other side; the same if not given."
MANY = 512  # texts that vLLM is given at a time: it batches them itself


def command(
    model: shared.Model,
    others: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OTHER]...",
            help="The other model, or several; the same one if not given.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts: a line each, or JSONL with prompt or messages.", dir_okay=False),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt instead; may be repeated.")] = None,
    against_prompts: Annotated[
        Path | None, typer.Option(help=f"File of prompts {Against}", dir_okay=False)
    ] = None,
    against_prompt: Annotated[list[str] | None, typer.Option(help=f"A prompt {Against}")] = None,
    individuals: Annotated[
        int, typer.Option("--individuals", "-n", help="Who answer each prompt.", min=2)
    ] = 50,
    score: Annotated[
        list[str] | None,
        typer.Option(
            help="length (the default), tokens, distinct, number, match:REGEX, exact:COLUMN, numeric:COLUMN, "
            "nats, nats:JUDGE, module:function or command:COMMAND; may be repeated, the first one decides.",
            show_default=False,
        ),
    ] = None,
    coupling: Annotated[
        Literal["individual", "gumbel", "independent"] | None,
        typer.Option(help="What the sides share; individual, or gumbel where a model is not a causal one."),
    ] = None,
    noise: Annotated[
        Literal["own", "equal"],
        typer.Option(
            help="equal: the other side's temperature is set so that an individual moves its causes as far "
            "as on this side; training calibrates a gain of its own."
        ),
    ] = "own",
    crossed: Annotated[
        bool,
        typer.Option(
            "--crossed", help="The same individuals answer every prompt, instead of others for each of them."
        ),
    ] = False,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Look before the end, and stop when it is clear.")
    ] = False,
    looks: Annotated[int, typer.Option(help="How often --sequential looks.", min=2)] = 5,
    width: Annotated[
        float | None, typer.Option(help="--sequential stops, too, when the interval is no wider.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="JSONL file of all pairs; a run that was cut is continued."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="HTML report.", dir_okay=False)] = None,
    max_new_tokens: shared.NewTokens = 64,
    stop: shared.Stop = None,
    mode: Annotated[
        shared.Mode | None, typer.Option(help="Mode of inference; the coupling's if not given.")
    ] = None,
    temperature: shared.Temperature = None,
    top_k: shared.TopK = None,
    top_p: shared.TopP = None,
    persistence: shared.Persistence = None,
    density_floor: shared.DensityFloor = None,
    against_mode: Annotated[shared.Mode | None, typer.Option(help=f"Mode {Against}")] = None,
    against_temperature: Annotated[float | None, typer.Option(help=f"Temperature {Against}")] = None,
    against_top_k: Annotated[int | None, typer.Option(help=f"Top k {Against}")] = None,
    against_top_p: Annotated[float | None, typer.Option(help=f"Top p {Against}")] = None,
    against_persistence: Annotated[float | None, typer.Option(help=f"Persistence {Against}")] = None,
    against_density_floor: Annotated[float | None, typer.Option(help=f"Density floor {Against}")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are messages of a chat.")] = False,
    system: shared.System = None,
    seed: Annotated[int, typer.Option(help="Of the first individual; the others follow.", min=0)] = 0,
    level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 32,
    overwrite: shared.Overwrite = False,
    device: shared.Device = None,
    dtype: shared.Precision = "auto",
    against_dtype: Annotated[Precision | None, typer.Option(help=f"Precision {Against}")] = None,
    engine: Annotated[
        Literal["transformers", "native", "vllm"],
        typer.Option(
            help="native is our own compiled decoder, for the CPU; a model that is not ours runs in "
            "transformers; vllm, for many texts of converted models, needs an environment with vLLM."
        ),
    ] = "native",
    processes: Annotated[
        int, typer.Option(help="Of --engine vllm: processes that share the pairs of --output.", min=1)
    ] = 1,
    shard: shared.ShardText = "0/1",
    as_json: shared.AsJson = False,
) -> None:
    """Compare two prompts, two models or two settings on the same individuals."""
    if output is not None:
        if output.suffix.lower() != ".jsonl":
            raise ValueError(f"{output} ends in {output.suffix or 'nothing'!r}; pairs are written as .jsonl")
        check_output_file(output, overwrite=overwrite)
    if report is not None:
        if report.suffix.lower() != ".html":
            raise ValueError(f"{report} ends in {report.suffix or 'nothing'!r}; a report is .html")
        check_output_file(report)
    if engine == "native" and device not in (None, "cpu"):
        engine = "transformers"
    if processes > 1 and (engine != "vllm" or output is None):
        raise ValueError(f"--processes {processes} needs --engine vllm and --output")
    if processes > 1 and sequential:
        raise ValueError(
            f"--sequential looks at the pairs as they come, and --processes {processes} puts them together "
            "at the end; give one of them"
        )
    quiet_libraries()
    from causal_qwen.counterfactual.comparison import (
        Comparison,
        Judge,
        Outline,
        Side,
        compare,
        conclude,
        score_of,
        write_pairs,
    )
    from causal_qwen.counterfactual.comparison.report import write_report
    from causal_qwen.counterfactual.comparison.scores import check_references
    from causal_qwen.counterfactual.comparison.speakers import talker_of
    from causal_qwen.prompting import Asking, Settings

    if noise == "equal" and against_temperature is not None:
        raise ValueError(
            f"--noise equal sets the other side's temperature, and --against-temperature is "
            f"{against_temperature:g}; give one of them"
        )
    settings = Settings(
        mode=mode, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        persistence=persistence, density_floor=density_floor, stop=tuple(stop or ()),
    )  # fmt: skip
    changes = {
        "mode": against_mode, "temperature": against_temperature, "top_k": against_top_k,
        "top_p": against_top_p, "persistence": against_persistence, "density_floor": against_density_floor,
    }  # fmt: skip
    against = settings.updated(changes)
    asking = Asking(settings, chat=chat, system=system)
    asked = _requests(asking, prompts, prompt, "--prompts FILE, or --prompt TEXT")
    asked_against = asked
    if against_prompts is not None or against_prompt:
        asked_against = _requests(
            asking, against_prompts, against_prompt, "--against-prompts FILE, or --against-prompt TEXT"
        )
    if len(asked) != len(asked_against):
        raise ValueError(f"{len(asked)} prompts against {len(asked_against)}; give as many on both sides")
    rivals, other_dtype = others or [model], against_dtype or dtype
    if len(rivals) > 1:
        refused = {"--output": output, "--report": report, "--sequential": sequential or None}
        for option, value in refused.items():
            if value is not None:
                raise ValueError(f"{option} is for two sides; compare {len(rivals) + 1} models without it")

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where module:function may be
    specs = list(dict.fromkeys(score or ["length"]))
    # A reference belongs to both prompts of a pair.
    rows = [dict(ours.row) | dict(theirs.row) for ours, theirs in zip(asked, asked_against, strict=True)]
    check_references(specs, rows)
    for spec in specs:  # a wrong one is named before anything is loaded
        score_of(spec, judge=lambda name: lambda texts: ())
    names = [
        _names(model, other, rivals, dtype, other_dtype, changes, asked is not asked_against)
        for other in rivals
    ]
    if coupling != "independent" and any(one == two for one, two in names):
        note("both sides are the same: all differences will be 0")

    if processes > 1 and output is not None:
        coupled = coupling or "individual"
        outline = Outline(individuals, len(asked), tuple(specs), coupled, names[0], crossed=crossed)
        results = [conclude(outline, _pairs(output, processes), width=width, level=level)]
    else:
        part, many = Shard.read(shard), engine == "vllm"
        share = len({(model, dtype), *((other, other_dtype) for other in rivals)}) * part.every
        models = _Models(device, coupling, share)

        def judge(name: str | None) -> Callable[..., Sequence[float]]:
            # vLLM gives no hidden states to judge by.
            return Judge(models.opened(name or model, dtype, "auto" if many else engine))

        scores = [score_of(spec, judge=judge) for spec in specs]
        partial = None if output is None else output.with_name(f"{output.name}.partial")
        if partial is not None:
            on_interruption(lambda: f"{partial} keeps what was said; the same command goes on behind it")
        results = []
        for other, (name, rival) in zip(rivals, names, strict=True):
            one, two = models.opened(model, dtype, engine), models.opened(other, other_dtype, engine)
            causal = talker_of(one).has_causes and talker_of(two).has_causes
            a = Side(one, [request.prompt for request in asked], settings, name, rows)
            b = Side(two, [request.prompt for request in asked_against], against, rival, rows)
            plan: dict[str, Any] = {
                "individuals": individuals, "scores": scores, "seed": seed,
                "noise": noise, "crossed": crossed,
                "coupling": coupling or ("individual" if causal else "gumbel"),
                "batch_size": max(batch_size, MANY) if many else batch_size,
            }  # fmt: skip
            if part.every > 1 and output is not None:
                write_pairs(Comparison(a, b, **plan, step=part), output, watch=bar)
                return
            stopping: dict[str, Any] = {"sequential": sequential, "looks": looks, "width": width}
            results.append(compare(a, b, **plan, **stopping, level=level, output=output, watch=bar))
    if report is not None:
        write_report(results[0], report)
        note(f"report: {report}")
    ranking = _ranking(results, specs[0], level, crossed) if len(results) > 1 else None
    if as_json:
        more = {} if ranking is None else {"others": [result.to_dict() for result in results[1:]]}
        print_json(results[0].to_dict() | more | ({} if ranking is None else {"ranking": ranking.to_dict()}))
        return
    for result in results:
        _show(result)
    if ranking is not None:
        _show_ranking(ranking)


class _Models:
    """Models of a comparison, each opened once.

    Args:
        device: Of all.
        coupling: As it was asked for.
        share: How many engines of vLLM this machine runs.
    """

    def __init__(self, device: str | None, coupling: str | None, share: int) -> None:
        self.device, self.coupling, self.share = device, coupling, share
        self._talkers: dict[tuple[str, str, str], Talker | Speaker] = {}

    def opened(self, source: str, dtype: Precision, engine: FileEngineName) -> Talker | Speaker:
        """That of a name, in a precision, on an engine."""
        key = (source, dtype, engine)
        if key not in self._talkers:
            self._talkers[key] = self._open(source, dtype, engine)
        return self._talkers[key]

    def _open(self, source: str, dtype: Precision, engine: FileEngineName) -> Talker | Speaker:
        from causal_qwen.conversion.checkpoints import CAUSAL
        from causal_qwen.conversion.headers import read_json_object

        if engine == "vllm":
            return load_vllm_speaker(source, device=self.device, dtype=dtype, share=self.share)
        # Only what is converted already has causes; with coupling individual, others are converted in memory.
        config = Path(source) / "config.json"
        plain = config.is_file() and read_json_object(config, source).get("model_type") not in CAUSAL
        if plain and self.coupling != "individual":
            from causal_qwen.counterfactual.comparison import PlainSpeaker

            if dtype in ("int8", "int4"):
                raise ValueError(f"--dtype {dtype} is for models of ours; convert {source} first")
            note(f"loading {source}, by its logits …")
            return PlainSpeaker.load(source, dtype=dtype, device=self.device)
        native = "native" if dtype in ("int8", "int4") else engine
        return load_speaker(source, device=self.device, dtype=dtype, engine=native)


def _pairs(output: Path, processes: int) -> Iterator[Pair]:
    """All pairs in their order, from processes that each make a part of them."""
    from causal_qwen.counterfactual.comparison import Pair

    for line in gathered(output, processes):
        yield Pair(**line)


def _ranking(results: list[ComparisonResult], score: str, level: float, crossed: bool) -> Ranking:
    """All models by the first score; the first model's texts are the same in every comparison.

    Raises:
        ValueError: If the comparisons were coupled in different ways.
    """
    from causal_qwen.counterfactual.comparison import rank

    couplings = {result.coupling for result in results}
    if len(couplings) > 1:
        raise ValueError(
            f"models were coupled by {' and by '.join(sorted(couplings))}; give one --coupling for all"
        )
    matrices = {results[0].names[0]: results[0].matrices[score][0]}
    for result in results:
        matrices[result.names[1]] = result.matrices[score][1]
    return rank(matrices, level=level, crossed=crossed)


def _show_ranking(ranking: Ranking) -> None:
    print(f"by mean: {' > '.join(ranking.by_mean)}")
    if ranking.agree:
        print("by wins: the same order")
        return
    print(f"by wins: {' > '.join(ranking.by_wins)}: the rankings disagree")
    if ranking.cycle is not None:
        first, second, third = ranking.cycle
        print(f"in a circle: {first} beats {second}, {second} beats {third}, and {third} beats {first}")


def _requests(asking: Any, file: Path | None, texts: list[str] | None, options: str) -> list[Request]:
    """The prompts of one side, none with settings of its own.

    Raises:
        ValueError: If there are none, or two sources, or a prompt has settings.
    """
    from causal_qwen.data import BadRows

    if (file is None) == (not texts):
        raise ValueError(f"give one of {options}")
    if file is not None:
        requests: list[Request] = asking.file(file, BadRows("error"))
    else:
        for text in texts or []:
            shared.check_prompt(text, "a prompt")
        requests = [
            asking.request("--prompt", {"prompt": text}, index) for index, text in enumerate(texts or [])
        ]
    if not requests:
        raise ValueError(f"{file}: no prompts")
    own = [request.where for request in requests if request.settings != asking.settings]
    if own:
        raise ValueError(f"{own[0]}: a prompt has settings of its own; a comparison has one for each side")
    return requests


def _names(
    model: str,
    other: str,
    rivals: list[str],
    dtype: str,
    other_dtype: str,
    changes: dict[str, Any],
    prompts: bool,
) -> tuple[str, str]:
    """What tells the sides apart, and from other rivals, for whoever reads the result."""
    every = {model, *rivals}
    short = len({Path(name).name for name in every}) == len(every)
    one, two = ([Path(name).name if short else name] for name in (model, other))
    if dtype != other_dtype:
        one, two = [*one, dtype], [*two, other_dtype]
    two += [f"{name} {value}" for name, value in changes.items() if value is not None]
    if prompts:
        one, two = [*one, "prompts"], [*two, "other prompts"]
    return ", ".join(one), ", ".join(two)


def _show(result: ComparisonResult) -> None:
    """The estimates, one row per score."""
    rows = []
    for name, estimate in result.estimates.items():
        if name == next(iter(result.estimates)):
            estimate = result.first
        rows.append(
            (
                name,
                *map(_figure, (estimate.mean_a, estimate.mean_b)),
                _interval(estimate.difference, estimate.lower, estimate.upper),
                _interval(
                    estimate.variance_ratio, estimate.variance_ratio_lower, estimate.variance_ratio_upper
                ),
                _figure(estimate.correlation),
                _figure(estimate.samples_saved),
            )
        )
    header = ("score", "A", "B", "A − B", "variance ratio", "correlation", "samples saved")
    print_table(f"A: {result.names[0]}   B: {result.names[1]}", rows, header=header)
    why = {
        "all pairs": "all pairs were made",
        "difference": "stopped: the interval excludes 0",
        "width": "stopped: the interval is narrow enough",
    }
    print(f"{result.pairs} of {result.total} pairs, coupling {result.coupling}; {why[result.stopped]}")


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _interval(value: float | None, lower: float | None, upper: float | None) -> str:
    return f"{_figure(value)} ({_figure(lower)} to {_figure(upper)})"
