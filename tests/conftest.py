"""What all tests share."""

import torch

# One thread: products this small gain nothing from two, which wait for each other where other processes share the cores.
torch.set_num_threads(1)
