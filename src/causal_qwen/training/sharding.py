"""Fully sharded data parallelism: each process keeps a share of every parameter (torch's fully_shard).

Layers are gathered one at a time while they compute; embedding, norm and heads as one group. Scalars cannot
be cut: every process holds them, and their gradients are averaged by `CausalTrainer`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM

__all__ = ["gathered", "shard"]


def shard(model: CausalQwen2ForCausalLM, *, device: torch.device, processes: int) -> None:
    """Cut the parameters of ``model`` in place; every process of the run calls this.

    Args:
        model: The same on every process.
        device: Where this process computes.
        processes: How many there are.
    """
    model.to(device)
    mesh = init_device_mesh(device.type, (processes,))
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=scalars)


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """The whole state on the first process, and nothing on the others; every process calls this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state
