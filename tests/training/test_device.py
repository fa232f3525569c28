"""Checks which device and which arithmetic are picked, and what is refused."""

import os

import pytest
import torch

from vit_scratch.training.device import device_name, pick_device, pick_precision, use_deterministic_algorithms


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_takes_the_first_of_cuda_mps_and_cpu_that_is_there(monkeypatch, cuda, mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(1))
    assert pick_device("auto").type == expected


def test_a_named_device_is_taken_even_where_a_better_one_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["tpu", "", "cuda:x", "meta", "cuda:99", "mps:5"])
def test_a_device_that_is_not_there_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"device='{name}' can't be used here .*use auto or cpu"):
        pick_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="device='cuda' can't be used here"):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("name", "device", "bf16", "expected"),
    [
        ("auto", "cuda", True, torch.bfloat16),
        ("auto", "cuda", False, torch.float16),
        ("auto", "cpu", True, torch.float32),
        ("auto", "mps", True, torch.float32),
        ("fp32", "cuda", True, torch.float32),
        ("bf16", "cpu", False, torch.bfloat16),
        ("bf16", "cuda", True, torch.bfloat16),
        ("fp16", "cuda", True, torch.float16),
    ],
)
def test_the_arithmetic_follows_from_name_and_device(monkeypatch, name, device, bf16, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bf16)
    assert pick_precision(name, torch.device(device)) is expected


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_fp16_needs_cuda(device):
    with pytest.raises(ValueError, match=f"train.precision=fp16 needs cuda, and the device is {device}"):
        pick_precision("fp16", torch.device(device))


def test_the_cpu_says_how_many_threads_it_uses():
    assert device_name(torch.device("cpu")) == f"cpu, {torch.get_num_threads()} threads"


def test_deterministic_algorithms_are_switched_on(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        use_deterministic_algorithms()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(before)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
