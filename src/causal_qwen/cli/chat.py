"""causal-qwen chat MODEL: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import complain, note, quiet_libraries
from causal_qwen.cli.models import load_speaker

if TYPE_CHECKING:
    from causal_qwen.individual import Individual
    from causal_qwen.prompting import Conversation, Speaker

HELP = """/mode standard|causal|compatible   who decides
/individual SEED|random            who answers
/save FILE    /load FILE           the conversation with its settings and its individual, as JSON
/reset                             a new conversation
/help    /quit
A line that ends in a backslash goes on in the next; lines between \"\"\" and \"\"\" are one message."""
QUOTES = '"""'


def command(
    model: shared.Model,
    mode: Annotated[shared.Mode, typer.Option(help="Mode of inference.")] = "causal",
    system: shared.System = None,
    max_new_tokens: shared.NewTokens = 256,
    stop: shared.Stop = None,
    temperature: shared.Temperature = None,
    top_k: shared.TopK = None,
    top_p: shared.TopP = None,
    repetition_penalty: shared.RepetitionPenalty = None,
    persistence: shared.Persistence = None,
    density_floor: shared.DensityFloor = None,
    seed: shared.Seed = None,
    device: shared.Device = None,
    dtype: shared.Precision = "auto",
    engine: shared.Engine = "auto",
) -> None:
    """Talk with a model; the same individual answers throughout."""
    quiet_libraries()
    from causal_qwen.prompting import Conversation, Settings

    settings = Settings(
        mode=mode,
        sample=mode == "compatible",
        seed=seed,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        persistence=persistence,
        density_floor=density_floor,
        stop=tuple(stop or ()),
    )
    speaker = load_speaker(model, device=device, dtype=dtype, engine=engine)
    if speaker.processor.chat_template is None:
        raise ValueError(f"{model} has no chat template; use `causal-qwen generate` for plain text")
    shared.note_inert(settings)
    (person,) = settings.people(1)
    conversation = Conversation(replace(settings, seed=None), person, system)
    note(f"mode {mode}, seed {person.seed}; /help lists the commands")
    while (message := _ask()) is not None:
        line, is_text = message
        if not line.strip():
            continue
        if line.startswith("/") and not is_text:
            if line.split()[0] == "/quit":
                break
            # Whatever is wrong with a command or an answer, the conversation goes on.
            try:
                conversation = _obey(conversation, line)
            except (ValueError, OSError) as error:
                complain(error)
            continue
        _answer(conversation, speaker, line)


def _ask() -> tuple[str, bool] | None:
    """What is said next, and whether it is text even if it looks like a command; None at the end."""
    line = _line("you> ")
    if line is None:
        return None
    if line.startswith(QUOTES):
        lines, rest = [], line.removeprefix(QUOTES)
        while not rest.rstrip().endswith(QUOTES):
            lines.append(rest)
            following = _line("...> ")
            if following is None:
                return "\n".join(lines).strip("\n"), True
            rest = following
        return "\n".join([*lines, rest.rstrip().removesuffix(QUOTES)]).strip("\n"), True
    several = False
    while line.endswith("\\"):
        following = _line("...> ")
        line, several = line[:-1] + ("" if following is None else "\n" + following), True
        if following is None:
            break
    return line, several


def _line(prompt: str) -> str | None:
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _obey(conversation: Conversation, line: str) -> Conversation:
    """The conversation after a command.

    Raises:
        ValueError: If the command is unknown or what it is given is wrong; OSError if a file is.
    """
    from causal_qwen.individual import Individual
    from causal_qwen.prompting import Conversation

    verb, argument = [*line.split(maxsplit=1), ""][:2]
    argument = argument.strip()
    match verb:
        case "/help":
            note(HELP)
        case "/reset":
            conversation.restart()
            note("a new conversation")
        case "/mode":
            if argument not in get_args(shared.Mode):
                raise ValueError(f"/mode {argument}: choose one of {', '.join(get_args(shared.Mode))}")
            conversation.settings = replace(
                conversation.settings, mode=argument, sample=argument == "compatible"
            )
            note(f"mode {argument}")
        case "/individual":
            conversation.individual = Individual.random() if argument == "random" else _individual(argument)
            note(f"seed {conversation.individual.seed}")
        case "/save" | "/load" if not argument:
            raise ValueError(f"{verb} needs a file: {verb} chat.json")
        case "/save":
            conversation.save(argument)
            note(f"{len(conversation.messages)} messages in {argument}")
        case "/load":
            conversation = Conversation.load(argument)
            note(
                f"{len(conversation.messages)} messages from {argument}; mode {conversation.settings.mode}, "
                f"seed {conversation.individual.seed}"
            )
        case _:
            raise ValueError(f"{verb} is no command; /help lists them")
    return conversation


def _individual(seed: str) -> Individual:
    from causal_qwen.individual import SEEDS, Individual

    if not (seed.isascii() and seed.isdigit() and len(seed) <= len(str(SEEDS))):
        raise ValueError(f"/individual {seed:.40}: give a seed, an integer from 0 to 2**64 - 1, or random")
    return Individual(int(seed))


def _answer(conversation: Conversation, speaker: Speaker, question: str) -> None:
    """Stream one answer; what cannot be answered is said, and not kept."""
    try:
        _, left_out = conversation.ask(speaker, question, tell=lambda piece: print(piece, end="", flush=True))
    except ValueError as error:
        complain(error)
        return
    print()
    if left_out:
        note(f"the first {left_out} messages no longer fit the context; the model does not see them")
