"""What all tests share."""

import functools
import gc
import inspect
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

# One thread: products this small gain nothing from two, and two wait for each other where the cores are shared.
torch.set_num_threads(1)

# The command line finds the help of its options in their source, which Python would parse for every command anew.
inspect.findsource = functools.cache(inspect.findsource)


def pytest_collection_finish():
    """Spares the collector of garbage what imports and collection made, through which it went again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def without_curves():
    """Leaves the pictures of a training empty, which take as long as a small one; other tests look at them."""
    draw = Figure.savefig

    def save(figure, path, **options):
        if Path(path).stem in ("curves", "confusion_matrix"):
            Path(path).write_bytes(b"")
        else:
            draw(figure, path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        yield
