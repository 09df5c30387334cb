"""causal-qwen chat MODEL: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, Any, get_args

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note
from causal_qwen.cli.models import load

HELP = "/mode standard|causal|compatible · /individual SEED|random · /reset · /quit"


def command(
    model: shared.Model,
    mode: Annotated[shared.Mode, typer.Option(help="Mode of inference.")] = "causal",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: shared.NewTokens = 256,
    temperature: shared.Temperature = 1.0,
    seed: shared.Seed = None,
    device: shared.Device = None,
    dtype: shared.Dtype = "auto",
) -> None:
    """Talk with a model; the same individual answers throughout."""
    loaded, processor = load(model, device=device, dtype=dtype)
    if processor.chat_template is None:
        raise ValueError(f"{model} has no chat template; use `causal-qwen generate` for plain text")
    from causal_qwen.individual import Individual

    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    person = Individual.random() if seed is None else Individual(seed)
    decider: str = mode
    note(f"{HELP}\nmode {decider}, seed {person.seed}")
    while (line := _ask()) is not None:
        match line.split():
            case []:
                pass
            case ["/quit", *_]:
                break
            case ["/reset", *_]:
                messages, person = list(opening), replace(person, start=0)
                note("a new conversation")
            case ["/mode", name] if name in get_args(shared.Mode):
                decider = name
                note(f"mode {decider}")
            case ["/individual", name] if name == "random" or name.isdigit():
                person = Individual.random() if name == "random" else Individual(int(name))
                note(f"seed {person.seed}")
            case [word, *_] if word.startswith("/"):
                note(HELP)
            case _:
                messages.append({"role": "user", "content": line})
                answer, length = _answer(
                    loaded, processor, messages, decider, person, max_new_tokens, temperature
                )
                messages.append({"role": "assistant", "content": answer})
                # The next answer goes on along this individual's path instead of repeating its noise.
                person = replace(person, start=person.start + length)


def _ask() -> str | None:
    try:
        return input("you> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _answer(
    model: Any,
    processor: Any,
    messages: list[dict[str, str]],
    mode: str,
    person: Any,
    max_new_tokens: int,
    temperature: float,
) -> tuple[str, int]:
    """Stream one answer; its text and its length in tokens."""
    import torch

    from causal_qwen.data import prompt_batch
    from causal_qwen.generation import NumberStreamer

    options: dict[str, Any] = {
        "inference_mode": mode,
        "max_new_tokens": max_new_tokens,
        "do_sample": mode != "standard",
    }
    if mode == "causal":
        options |= {"individual": person, "temperature": temperature}
    elif mode == "compatible":
        torch.manual_seed((person.seed + person.start) % 2**63)
        options["temperature"] = temperature
    inputs = prompt_batch(processor, [messages], model.device)
    streamer = NumberStreamer(processor, skip_prompt=True, skip_special_tokens=True)
    outputs = model.generate(**inputs, **options, streamer=streamer, return_dict_in_generate=True)
    said = outputs.after(inputs["input_ids"].shape[1])
    return processor.batch_decode(said, skip_special_tokens=True)[0], said.sequences.shape[1]
