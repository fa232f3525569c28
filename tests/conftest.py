"""What all tests share."""

import torch

# One thread: products this small gain nothing from two, and two wait for each other where the cores are shared.
torch.set_num_threads(1)
