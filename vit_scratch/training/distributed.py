"""Several processes that train one model together, started by torchrun: one for each device, on one machine or many.

Each works on its part of each batch; gradients, losses and counts are added up. Each holds the whole model, or its part
of one that is sharded. All functions work where there is only one process, and then do nothing.
Where a function imports something of torch it is because that takes a second, which other trainings need not wait for.
Shapes: B batch, C channels.
"""

import atexit
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit_scratch.training.device import pick_device

TIMEOUT = timedelta(minutes=10)
"""How long a process waits for the others before it gives up."""


def join(device_name: str) -> torch.device:
    """Join the other processes that torchrun has started, if it has, and pick this one's device, as `pick_device`."""
    device = pick_device(device_name)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        atexit.register(leave)
    return device


def leave() -> None:
    """Leave the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def process() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_first() -> bool:
    """Whether this is the process that writes files."""
    return process()[0] == 0


def wait() -> None:
    """Wait until all processes are here."""
    if process()[1] > 1:
        dist.barrier()


@contextmanager
def first_here_first() -> Iterator[None]:
    """Let one process of each machine go through the block before the others, such as to download what all need."""
    others = int(os.environ.get("LOCAL_RANK", 0)) > 0
    if others:
        wait()
    yield
    if not others:
        wait()


def seed_apart(seed: int) -> None:
    """Let all processes but the first, which is left alone, draw other random numbers, such as for dropout."""
    if not is_first():
        torch.manual_seed(int(np.random.SeedSequence([seed, process()[0]]).generate_state(1, np.uint64)[0] >> 1))


def total(values: Tensor) -> Tensor:
    """The sum of tensors of equal shape over all processes."""
    if process()[1] > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def differentiable_total(values: Tensor) -> Tensor:
    """As `total`, with a gradient: that of the sum of what all processes make of the result."""
    from torch.distributed._functional_collectives import all_reduce

    assert dist.group.WORLD is not None
    return all_reduce(values, "sum", dist.group.WORLD)


def highest(value: int) -> int:
    """The highest of the numbers of all processes."""
    if process()[1] == 1:
        return value
    shared = torch.tensor(value)  # on the CPU, so that no device is waited for
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return int(shared)


def gather(value: Any) -> list[Any]:
    """The values of all processes in their order, which are plain values or tensors on the CPU."""
    values = [value] * process()[1]
    if process()[1] > 1:
        dist.all_gather_object(values, value)
    return values


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """The model as it is called in training, where its gradients become the mean of those of all processes.

    Weights and buffers become those of the first process; batch norms use the statistics of the whole batch. A model
    that is sharded stays as it is.
    """
    if process()[1] == 1 or is_sharded(model):
        return model
    use_whole_batches(model)
    # Kernels of convolutions have gradients with other strides. Other strides for the kernels would be those of their
    # optimizer's state, too, which fused optimizers take for those of kernels that are read back with the usual ones.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    devices = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, devices, forward_sync_buffers=False, gradient_as_bucket_view=True)


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Divide a model's weights among all processes, layer by layer; each layer is put together while it computes.

    Args:
        model: on the CPU, so that it need not fit the device; changed in place.
        device: where it goes.
    """
    from torch.distributed.fsdp import fully_shard

    use_whole_batches(model)
    mesh = dist.init_device_mesh(device.type, (process()[1],))
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to(device)  # buffers


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has divided a model."""
    if process()[1] == 1:
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def own_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor of a sharded model; any other tensor as it is."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def put_together(tensor: Tensor) -> Tensor:
    """A tensor of a sharded model from the parts of all processes; any other tensor as it is."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model; of a sharded one they come together in the first process, and the others get none."""
    if not is_sharded(model):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options: Any = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    return weights


def use_whole_batches(model: nn.Module) -> None:
    """Let the batch norms of a model use the statistics of the whole batch."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = WholeBatchNorm2d


@contextmanager
def add_gradients(network: nn.Module, now: bool) -> Iterator[None]:
    """Around a backward pass: add up gradients over all processes now, or with those of a later pass."""
    if is_sharded(network):
        network.set_requires_gradient_sync(now)  # type: ignore[operator]
        yield
    elif now or process()[1] == 1:
        yield
    else:
        with network.no_sync():  # type: ignore[operator]
            yield


class WholeBatchNorm2d(nn.BatchNorm2d):
    """A batch norm over the parts of a batch that all processes have; torch's SyncBatchNorm does not take a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, C, height, width); B may be 0 in some of the processes."""
        if not self.training:
            return super().forward(x)
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        number = values.new_tensor([x.numel() / x.shape[1]])
        sums = differentiable_total(torch.cat([values.sum((0, 2, 3)), number]))
        mean, count = sums[:-1] / sums[-1], sums[-1].detach()
        centred = values - mean[:, None, None]
        variance = differentiable_total(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            tracked: Any = self  # torch lets these be None for other settings than the ones that we use
            tracked.num_batches_tracked += 1
            tracked.running_mean.lerp_(mean, tracked.momentum)
            tracked.running_var.lerp_(variance * count / (count - 1).clamp(min=1), tracked.momentum)
        factor = self.weight * (variance + self.eps).rsqrt()
        return (centred * factor[:, None, None] + self.bias[:, None, None]).to(x.dtype)
