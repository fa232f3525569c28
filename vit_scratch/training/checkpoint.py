"""Weights and training state on disk: written whole or not at all, read without executing anything.

Weights are safetensors with everything needed to use them in the header. The training state holds tensors and plain
Python values, and is read with torch's `weights_only`.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vit_scratch.files import check_archive, let_others_read

FORMAT = 2
"""Version of what the description of weights holds; 1 had no checksum."""
STATE_FORMAT = 3
"""Version of what a training state holds."""
KEY = "vit_scratch"
"""Where our description stands in the header of a safetensors file."""
CHECKSUM = "vit_scratch_sha256"
"""Where the checksum of description and weights stands there."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file beside its final place, make its folder if need be, and move it there when it is complete.

    Yields:
        The path to write to. After an error, a full disk among them, it is removed, and `path` is as it was.

    Raises:
        SaveError: the file could not be written.
    """
    temporary = path.with_name(f".{path.name}.part")  # always the same name: what a killed run left is written over
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        let_others_read(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # torch raises a RuntimeError of its own while it handles the system's error, which says more.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        if isinstance(cause, (OSError, RuntimeError, SafetensorError)):
            raise SaveError(f"could not write {path}: {cause}; what was saved before is intact") from error
        raise


class SaveError(OSError):
    """A file that could not be written; the message says which and why."""


def save_weights(path: Path, weights: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write weights and their description as a safetensors file; a matrix with several names is written once.

    Raises:
        SaveError: it could not be written; a file that was there before is intact.
    """
    tensors, tied = {}, {}
    first: dict[tuple, str] = {}
    memory: set[int] = set()
    for name, tensor in weights.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(place, name) != name:
            tied[name] = first[place]
        else:
            whole = tensor.detach().cpu().contiguous()
            start = whole.untyped_storage().data_ptr()
            # Different parts of one memory are written apart: the format has no overlaps.
            tensors[name] = whole.clone() if start in memory else whole
            memory.add(start)
    text = json.dumps({"format": FORMAT, "tied": tied} | description)
    with replacing(path) as temporary:
        save_file(tensors, temporary, {KEY: text, CHECKSUM: checksum(text, tensors)})


def checksum(text: str, tensors: dict[str, Tensor]) -> str:
    """The SHA-256 of a text and of tensors: their names, types, shapes and bytes."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_header(path: Path) -> tuple[str, str | None]:
    """The description in a file of weights as it stands there, and the checksum, if there is one.

    Raises:
        ValueError: no such file, a damaged one, or one that has no description of ours.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        with safe_open(path, "pt") as file:
            header, names = file.metadata() or {}, list(file.keys())
            description = json.loads(header.get(KEY, "null"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error})") from error
    form = description.get("format") if isinstance(description, dict) else None
    if form not in (1, FORMAT):
        raise ValueError(
            f"{path} was not written by vit_scratch: its header does not describe its {len(names)} tensors "
            f"({', '.join(names[:3])}, ...)"
        )
    if form == FORMAT and CHECKSUM not in header:
        raise ValueError(f"{path} is damaged: it has no checksum")
    return header[KEY], header[CHECKSUM] if form == FORMAT else None


def read_description(path: Path) -> dict[str, Any]:
    """What `save_weights` wrote about the weights in a file, without reading them, and therefore unchecked.

    Raises:
        ValueError: as `read_header`.
    """
    description: dict[str, Any] = json.loads(read_header(path)[0])
    del description["format"]
    return description


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of `save_weights`: the weights, on the CPU, under all their names, and their description.

    Raises:
        ValueError: as `read_header`, and where not every bit is as it was written.
    """
    text, expected = read_header(path)
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error})") from error
    if expected is not None and checksum(text, weights) != expected:
        raise ValueError(f"{path} is damaged: weights or description are not those that were written (checksum)")
    description = json.loads(text)
    del description["format"]
    tied = description.pop("tied", {})
    if not isinstance(tied, dict) or not all(isinstance(n, str) and n in weights for n in tied.values()):
        raise ValueError(f"{path} is damaged: it names weights that it does not hold")
    return weights | {name: weights[n] for name, n in tied.items()}, description


def number(path: Path) -> int:
    """The update in the name of a training state."""
    return int(path.stem.removeprefix("update_"))


class TrainingStates:
    """The training states of a run, one file each, the newest two of them kept.

    Args:
        folder: where they are; made on the first save.

    Attributes:
        identity: plain values that a run which goes on must find again, such as what its data are; stored in every
            state, and compared on loading.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.identity: dict[str, Any] = {}

    def paths(self) -> list[Path]:
        """All states, the newest first."""
        found = [p for p in self.folder.glob("update_*.pt") if re.fullmatch(r"update_\d+\.pt", p.name)]
        return sorted(found, key=number, reverse=True)

    def shards(self, update: int) -> Path:
        """The folder for what a sharded model has beside a state; it is complete once that state is there."""
        return self.folder / f"update_{update:08d}"

    def save(self, update: int, state: dict[str, Any]) -> None:
        """Write the state after an update, then remove all but the newest two.

        Raises:
            SaveError: it could not be written; the states that were there are intact.
        """
        path = self.shards(update).with_suffix(".pt")
        with replacing(path) as temporary, open(temporary, "wb") as file:
            torch.save({"format": STATE_FORMAT, "identity": self.identity, "state": state}, file)
        # A state of a later update is one that could not be read when the run went on.
        later = [p for p in self.paths() if number(p) > update]
        for old in [*later, *[p for p in self.paths() if p not in later][2:]]:
            old.unlink(missing_ok=True)
            shutil.rmtree(self.shards(number(old)), ignore_errors=True)

    def load(self) -> tuple[dict[str, Any] | None, list[str]]:
        """The newest state that can be read, None where there is none, and what is wrong with newer ones.

        Raises:
            ValueError: there are states, but none can be read, or it is of another identity.
        """
        faults: list[str] = []
        for path in self.paths():
            try:
                check_archive(path)
            except (ValueError, OSError) as error:
                faults.append(f"{path} can't be read: {error}")
                continue
            try:
                content = torch.load(path, map_location="cpu", weights_only=True)
                form, identity, state = content["format"], content["identity"], content["state"]
            # torch raises many kinds for a damaged file, and its messages advise to switch the safety off.
            except Exception as error:
                faults.append(f"{path} can't be read: it is damaged or not ours ({type(error).__name__})")
                continue
            if form != STATE_FORMAT:
                faults.append(f"{path} can't be read: its format is {form}, and this version reads {STATE_FORMAT}")
            elif identity != self.identity:
                raise ValueError(f"{path} is of a run on other data: {identity} then, {self.identity} now")
            else:
                return state, faults
        if faults:
            raise ValueError("\n".join([*faults, "No other state is left; start anew with another --out"]))
        return None, faults
