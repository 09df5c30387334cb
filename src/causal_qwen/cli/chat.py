"""causal-qwen chat MODEL: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from causal_qwen.cli.console import note
from causal_qwen.cli.convert import Dtype
from causal_qwen.cli.generate import Mode
from causal_qwen.cli.models import MODEL_HELP, load

HELP = "/mode standard|causal|compatible · /individual SEED|random · /reset · /quit"


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    mode: Annotated[Mode, typer.Option(help="Mode of inference.")] = Mode.causal,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer at most.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="Scales the noise.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Who answers; drawn and printed if not given.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cuda; the CPU if not given.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Precision of the weights.")] = Dtype.auto,
) -> None:
    """Talk with a model; the same individual answers throughout."""
    loaded, processor = load(model, device=device, dtype=dtype.value)
    if processor.chat_template is None:
        raise ValueError(f"{model} has no chat template; use `causal-qwen generate` for plain text")
    from causal_qwen.individual import Individual

    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    person = Individual.random() if seed is None else Individual(seed)
    chosen = mode.value
    note(f"{HELP}\nmode {chosen}, seed {person.seed}")
    while (line := _ask()) is not None:
        words = line.split()
        if not words:
            continue
        if words[0] == "/quit":
            break
        if words[0] == "/reset":
            messages, person = list(opening), replace(person, start=0)
            note("a new conversation")
        elif words[0] == "/mode" and len(words) == 2 and words[1] in Mode.__members__:
            chosen = words[1]
            note(f"mode {chosen}")
        elif words[0] == "/individual" and len(words) == 2 and (words[1] == "random" or words[1].isdigit()):
            person = Individual.random() if words[1] == "random" else Individual(int(words[1]))
            note(f"seed {person.seed}")
        elif words[0].startswith("/"):
            note(HELP)
        else:
            messages.append({"role": "user", "content": line})
            answer, length = _answer(loaded, processor, messages, chosen, person, max_new_tokens, temperature)
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
