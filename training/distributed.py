"""Ranks. Today a training is one process; a launcher that starts several is refused rather than half obeyed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from spotheal.agent.errors import ConfigError


@dataclass(frozen=True)
class World:
    rank: int
    size: int


def world(environment: Mapping[str, str] | None = None) -> World:
    """Rank and world size as torchrun names them in the environment; 0 of 1 without it."""
    environment = os.environ if environment is None else environment
    try:
        rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    except ValueError as fault:
        raise ConfigError(f"RANK and WORLD_SIZE are numbers: {fault}") from fault
    return World(rank, size)


def refuse_several(world: World) -> None:
    if world.size > 1:
        raise ConfigError(
            f"the example trainer runs as one process, it was started as {world.size}",
            next_step="start it without torchrun (nproc_per_node = 1)",
        )
