"""What all tests share: where the project is, and short configurations that train in a second."""

import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
# Threads of small products cost more than they save, and other processes may share the cores.
torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
