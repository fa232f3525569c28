"""The device, its arithmetic and its memory."""

import ctypes
import os

import torch

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device of that name, or for "auto" the first of cuda, mps and cpu that is there, made ready for work.

    Raises:
        ValueError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun's number of the process on this machine
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"device={name!r} can't be used here ({reason}); use auto or cpu") from error
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    keep_freed_memory(device)
    return device


def device_name(device: torch.device) -> str:
    """What the hardware calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """The type of the forward pass: for "auto" bf16 or else fp16 on cuda, and fp32 elsewhere, where it is fastest.

    Raises:
        ValueError: fp16 elsewhere than on cuda, where nothing scales its gradients.
    """
    if name == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if name == "fp16" and device.type != "cuda":
        raise ValueError(f"train.precision=fp16 needs cuda, and the device is {device.type}; use auto, fp32 or bf16")
    return PRECISIONS[name]


def use_deterministic_algorithms() -> None:
    """Make torch refuse operations that don't give the same bits each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU with glibc, let the allocator keep what tensors free, so that the next ones find it mapped already.

    By default glibc gives large blocks back to the system at once and gets them anew, page by page, which takes longer
    than most element-wise operations on them (LOG.md). For the whole process, and harmless where there is no glibc.
    """
    if device.type != "cpu":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    mallopt(m_mmap_threshold, 2**30)
    mallopt(m_trim_threshold, 2**31 - 1)
