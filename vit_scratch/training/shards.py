"""The training state of a sharded model: each process writes and reads its own part, as safetensors.

By torch.distributed.checkpoint, whose files fit any number of processes. Its other format is read by unpickling, which
executes what is in a file; this one is not.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def tensors_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the weights and the states of the optimizers are called, and this process's part of each by name."""
    yield "model", get_model_state_dict(model)
    for number, optimizer in enumerate(optimizers):
        yield f"optimizer{number}", get_optimizer_state_dict(model, optimizer, options=FLAT)


def flat(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """All these tensors in one dictionary; plain values, such as learning rates, are set anew in each update."""
    return {
        f"{part}.{name}": value
        for part, values in tensors_of(model, optimizers)
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def save(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Write the weights and the states of optimizers, each process its part; all processes have to call this."""
    dcp.save(flat(model, optimizers), storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Read what `save` wrote, with any number of processes; all of them have to call this.

    Raises:
        ValueError: files that are missing, damaged, or of another model.
    """
    stored = flat(model, optimizers)
    try:
        dcp.load(stored, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except (dcp.api.CheckpointException, SafetensorError, OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{folder} can't be read: it is damaged, or of another model ({type(error).__name__}: {first}). Remove "
            f"{folder.with_suffix('.pt')} to go on from the state before it"
        ) from error
    for (part, values), owner in zip(tensors_of(model, optimizers), [None, *optimizers], strict=True):
        loaded = {n: stored.get(f"{part}.{n}", value) for n, value in values.items()}
        if owner is None:
            set_model_state_dict(model, loaded)
        else:
            set_optimizer_state_dict(model, owner, loaded, options=FLAT)
