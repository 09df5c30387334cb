"""All that is fuzzed."""

from fuzzing import (
    chats,
    checkpoints,
    configs,
    individuals,
    native,
    processing,
    prompts,
    recipes,
    rows,
    scanning,
    settings,
    stopping,
    templates,
    weights,
)
from fuzzing.target import Target

__all__ = ["TARGETS"]

TARGETS: tuple[Target, ...] = (
    *scanning.TARGETS,
    *processing.TARGETS,
    *individuals.TARGETS,
    *recipes.TARGETS,
    *rows.TARGETS,
    *templates.TARGETS,
    *chats.TARGETS,
    *prompts.TARGETS,
    *configs.TARGETS,
    *weights.TARGETS,
    *checkpoints.TARGETS,
    *native.TARGETS,
    *stopping.TARGETS,
    *settings.TARGETS,
)
