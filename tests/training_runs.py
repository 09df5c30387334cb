"""Small tables and models for the tests of training."""

import dataclasses
import json
import os
import signal
import socket

import torch

from causal_qwen import CausalQwen2Config, CausalQwen2ForCausalLM, convert
from causal_qwen.training import TrainingRecipe, train
from forking import child_process

TEMPLATE = "{name}: {size} makes {price}"
SOLVED = ("action.number", "action.support", "action.fold")
OF_TOKENS = ("model.embed_tokens.weight", "lm_head.weight", "action.bias", "action.threshold")


def converted(base_directory, directory):
    """A converted tiny model, saved."""
    convert(base_directory, directory, calibration="none")
    return directory


def write_table(path, rows=40):
    """A JSONL table with a price that grows with the size."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(1, 90, (rows,), generator=generator).tolist()
    lines = [
        {"name": "abcdefgh"[index % 8] * (1 + index % 5), "size": size, "price": round(2.5 * size + 1, 1)}
        for index, size in enumerate(sizes)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def recipe(tmp_path, model, **overrides):
    """A recipe for a few quick steps."""
    table = tmp_path / "table.jsonl"
    if not table.exists():
        write_table(table)
    fields = {
        "data": str(table), "model": str(model), "output": str(tmp_path / "out"), "template": TEMPLATE,
        "target": "price", "method": "full", "max_steps": 6, "batch_size": 4, "learning_rate": 1e-3,
        "save_steps": 0, "logging_steps": 1, "max_length": 64,
    }  # fmt: skip
    return TrainingRecipe.from_mapping(fields | overrides)


def weights(directory):
    return CausalQwen2ForCausalLM.from_pretrained(directory).state_dict()


def assert_same_weights(first, second, **tolerance):
    """Bit for bit; with a tolerance, but for what is solved for on features whose last digits may differ.

    There the ridge may be another one, and <NUM> and the end of the text are placed by other positions.
    """
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    config = CausalQwen2Config.from_pretrained(first)
    placed = [config.num_token_id, config.eos_token_id]
    for name, tensor in one.items():
        if not tolerance:
            assert torch.equal(other[name], tensor), name
        elif not name.startswith(SOLVED):
            if name in OF_TOKENS:
                for entries in (tensor, other[name]):
                    entries[placed] = 0.0
            torch.testing.assert_close(other[name], tensor, msg=name, **tolerance)


def die_while_writing(step):
    """Let this process, if it names checkpoints, be killed before that of ``step`` is whole."""
    from causal_qwen.training import trainer

    publish = trainer.publish

    def torn(staged, target):
        if target.name == f"checkpoint-{step}":
            next(staged.rglob("*.safetensors")).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        publish(staged, target)

    trainer.publish = torn


def run_in_child(fields, environment, resume, killed_at):
    """What a child process does: train, on one thread, so that every run computes the same bits."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    if killed_at is not None:
        die_while_writing(killed_at)
    train(TrainingRecipe.from_mapping(fields), resume=resume)


def start(recipe, *, resume=False, killed_at=None, **environment):
    """A child process that trains, forked from a server that has imported everything already."""
    return child_process(run_in_child, (dataclasses.asdict(recipe), environment, resume, killed_at))


def finish(*children):
    assert ended(*children) == [0] * len(children)


def ended(*children):
    """The exit codes of children, which all end by themselves."""
    for child in children:
        child.join(timeout=600)  # of a machine that is busy otherwise
    return [child.exitcode for child in children]


def processes(recipe, count, **options):
    """``count`` children that train together, as under torchrun, to the end."""
    finish(*start_together(recipe, count, **options))


def start_together(recipe, count, **options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [start(recipe, RANK=str(rank), LOCAL_RANK=str(rank), **shared, **options) for rank in range(count)]
