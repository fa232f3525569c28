"""Whether weights belong to a model, and if not, in one sentence for all who load some: how many differ, and which."""

from collections.abc import Mapping, Sequence

from torch import Tensor


def weight_differences(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """How weights differ from those of a model in names and shapes; an empty string where they don't."""
    missing = [name for name in wanted if name not in weights]
    unexpected = [name for name in weights if name not in wanted]
    reshaped = [
        f"{name} {tuple(tensor.shape)} instead of {tuple(wanted[name].shape)}"
        for name, tensor in weights.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    return counted(len(wanted), missing=missing, unexpected=unexpected, of_another_shape=reshaped)


def counted(total: int, **faults: Sequence[str]) -> str:
    """Counts and first names for each kind of fault among `total` weights; an empty string where there is none."""
    parts = [
        f"{len(names)} {kind.replace('_', ' ')} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in faults.items()
        if names
    ]
    if not parts:
        return ""
    return f"of {total} weights, {' and '.join([', '.join(parts[:-1]), parts[-1]] if parts[1:] else parts)}"
