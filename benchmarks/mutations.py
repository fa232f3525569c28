"""Changes files at random and counts what comes of each: refused with a message, accepted as it is, or a fault.

    python benchmarks/mutations.py --count 10000

Four kinds: configuration files of `train`, files of weights, training states, and images, which have no checksums, so
that changed ones may be read as other images. A fault is a traceback, a refusal that does not name the file or says
nothing, a value that is not what the file says, or weights that are not those that were written. Ends with status 1
where there is one, and prints the first of each kind.
"""

import argparse
import contextlib
import copy
import functools
import inspect
import io
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from PIL import ExifTags, Image

sys.path.insert(0, str(Path(__file__).parent.parent))

from vit_scratch import cli, create_vit
from vit_scratch.data.images import ImageError
from vit_scratch.data.sources import ImageSource
from vit_scratch.training.checkpoint import TrainingStates, load_weights, save_weights

# The command line finds the help of its options in their source, which Python would parse for every file anew.
inspect.findsource = functools.cache(inspect.findsource)  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent
Outcomes = tuple[Counter, list[str]]
"""How often what came of a file, and the faults, each with what was in the file."""

VALUES = (
    *("null", "~", "[]", "{}", "''", ".nan", ".inf", "-.inf", "-1", "0", "1", "-0.0", "1e400", "1e-400", "0x10"),
    *("true", "no", "1_000", "12:30:45", "2026-11-30", "99999999999999999999", "[1, 2]", "{a: 1}", "text", "|", ">"),
    *("!!python/object/apply:os.system ['touch /tmp/executed']", "!!binary aGk=", "&a [*a]", "*a", "${HOME}", "%TAG"),
    *("[[[[[[[[[[[[[[[[[[[[", "\\t", "digits", "muon", "../../etc/passwd", "[[16, 0.5], [24, 0.2]]", '"\\ud800"', "é"),
)
"""What a value of a configuration is replaced by."""


def change_bytes(data: bytes, random: np.random.Generator, limit: int | None = None) -> bytes:
    """Flip, replace, delete, insert or double some bytes among the first `limit`, or cut the file off."""
    changed, limit = bytearray(data), limit or len(data)
    for place in sorted(random.integers(0, limit, random.choice([1, 1, 1, 2, 8])), reverse=True):
        if place >= len(changed):
            continue
        kind = random.integers(7)
        length = int(random.integers(1, 9))
        if kind <= 1:
            changed[place] ^= 1 << random.integers(8)
        elif kind == 2:
            changed[place] = random.integers(256)
        elif kind == 3:
            del changed[place : place + length]
        elif kind == 4:
            changed[place:place] = random.bytes(length)
        elif kind == 5:
            changed[place:place] = changed[place : place + length]
        elif random.random() < 0.2:
            del changed[place:]
    return bytes(changed)


def change_text(text: str, random: np.random.Generator) -> bytes:
    """Change a configuration: a value, a line, an indentation, the name of a field, or any bytes."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for _ in range(random.choice([1, 1, 2])):
        i, kind = int(random.integers(len(lines))), random.integers(6)
        if kind <= 1 and ": " in lines[i]:
            lines[i] = lines[i].partition(": ")[0] + ": " + str(random.choice(VALUES))
        elif kind == 2:
            lines[i] = lines[i][1:] if random.random() < 0.5 else " " + lines[i]
        elif kind == 3 and len(lines) > 1:
            lines.insert(int(random.integers(len(lines))), lines[i] if random.random() < 0.5 else lines.pop(i))
        elif kind == 4 and lines[i].strip():
            place = int(random.integers(len(lines[i])))
            lines[i] = lines[i][:place] + chr(random.integers(97, 123)) + lines[i][place + 1 :]
        else:
            return change_bytes("\n".join(lines).encode(), random)
    return ("\n".join(lines) + "\n").encode()


def differing(config: Any, said: Any, where: str = "") -> str | None:
    """The first field that is not what a file says, or where it says nothing, not the default."""
    for f in fields(config):
        value, name = getattr(config, f.name), f"{where}{f.name}"
        if is_dataclass(value):
            found = differing(value, said.get(f.name, {}) if isinstance(said, dict) else said, f"{name}.")
            if found:
                return found
        elif isinstance(said, dict) and f.name in said:
            if not same(value, said[f.name]):
                return f"{name} is {value!r}, and the file says {said[f.name]!r}"
        elif value != (f.default_factory() if callable(f.default_factory) else f.default):
            return f"{name} is {value!r}, of which the file says nothing"
    unknown = set(said) - {f.name for f in fields(config)} if isinstance(said, dict) else set()
    return f"{where}{unknown} was overlooked" if unknown else None


def same(value: Any, said: Any) -> bool:
    """Whether a value is what YAML makes of it; 1e-3, which is text for YAML 1.1, is a number here."""
    if isinstance(value, (list, tuple)) and isinstance(said, (list, tuple)):
        return len(value) == len(said) and all(map(same, value, said))
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not isinstance(said, bool):
        try:
            return float(value) == float(said) or (math.isnan(value) and math.isnan(float(said)))
        except (TypeError, ValueError, OverflowError):
            return False
    if isinstance(said, date):  # text that YAML 1.1 takes for a date
        return bool(value == said.isoformat())
    return type(value) is type(said) and value == said


def configurations(count: int, seed: int, folder: Path) -> Outcomes:
    """Hand changed configurations to `train`, which here only notes what it gets."""
    random, outcomes, faults = np.random.default_rng(seed), Counter[str](), list[str]()
    texts = [path.read_text() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    received: list[Any] = []

    def note(config: Any, out: Path, *, resume: bool) -> None:
        received.append(config)

    before = cli.task_module
    cli.task_module = lambda task: SimpleNamespace(train=note)  # type: ignore[assignment,return-value]
    try:
        for number in range(count):
            content = change_text(texts[number % len(texts)], random)
            (folder / "changed.yaml").write_bytes(content)
            received.clear()
            errors = io.StringIO()
            arguments = ["train", "--config", str(folder / "changed.yaml"), "--out", str(folder / "run")]
            try:
                with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
                    status = cli.main(arguments)
            except SystemExit as end:
                status = int(end.code or 0)
            except Exception as error:
                status, fault = -1, f"{type(error).__name__}: {error}"
            message = errors.getvalue().strip()
            if status == 2 and len(message.partition("error:")[2].strip()) > 10:
                outcomes["refused"] += 1
                continue
            if status == 0 and received:
                wrong = differing(received[0], yaml.safe_load(content))
                fault = f"accepted, and {wrong}"
                if wrong is None:
                    outcomes["accepted, as the file says"] += 1
                    continue
            elif status != -1:
                fault = f"status {status}, {message!r}"
            outcomes["fault"] += 1
            faults.append(f"{fault}\n{content.decode(errors='backslashreplace')}")
    finally:
        cli.task_module = before
    return outcomes, faults


def read_again(
    count: int,
    seed: int,
    path: Path,
    read: Callable[[], Any],
    header: int,
) -> Outcomes:
    """Change a file and read it; what is accepted must be what was written."""
    data, random, expected = path.read_bytes(), np.random.default_rng(seed), copy.deepcopy(read())
    outcomes, faults = Counter[str](), list[str]()
    for _ in range(count):
        content = change_bytes(data, random, header if random.random() < 0.5 else None)
        path.write_bytes(content)
        try:
            result = read()
        except ValueError as error:
            outcomes["refused"] += 1
            if str(path) not in str(error):
                faults.append(f"refused without its name: {error}")
            continue
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}")
            continue
        if equal(result, expected):
            outcomes["accepted, as it was written"] += 1
        else:
            faults.append("accepted with another content")
    path.write_bytes(data)
    outcomes["fault"] += len(faults)
    return outcomes, faults


def equal(first: Any, second: Any) -> bool:
    """Whether plain values and tensors are the same bit by bit."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and (first.dtype, first.shape) == (second.dtype, second.shape)
            and torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))
        )
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(equal(first[k], second[k]) for k in first)
        )
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    return type(first) is type(second) and repr(first) == repr(second)


def weights(count: int, seed: int, folder: Path) -> Outcomes:
    """Change a file of weights."""
    path, model = folder / "weights.safetensors", create_vit("tiny_patch4_32", dim=16, depth=1, heads=2, image_size=8)
    save_weights(
        path, model.state_dict(), {"task": "classification", "classes": ["a", "b"], "preprocessing": {"mean": [0.5]}}
    )
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    return read_again(count, seed, path, lambda: load_weights(path), header)


def states(count: int, seed: int, folder: Path) -> Outcomes:
    """Change a training state."""
    model = create_vit("tiny_patch4_32", dim=16, depth=1, heads=2, image_size=8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    kept = TrainingStates(folder / "states")
    kept.save(7, {"progress": {"update": 7}, "model": model.state_dict(), "optimizers": [optimizer.state_dict()]})
    path = kept.paths()[0]
    return read_again(count, seed, path, lambda: kept.load()[0], 4000)


def images(count: int, seed: int, folder: Path) -> Outcomes:
    """Change image files of all formats that folders of images may hold."""
    random, outcomes, faults = np.random.default_rng(seed), Counter[str](), list[str]()
    picture = Image.fromarray(random.integers(0, 256, (12, 10, 3)).astype(np.uint8))
    exif = picture.getexif()
    exif[ExifTags.Base.Orientation] = 6
    originals = []
    for ending, options in FORMATS:
        path = folder / f"image{ending}"
        (picture.convert("P") if ending == ".png" else picture).save(path, **options | {"exif": exif.tobytes()})
        originals.append((path, path.read_bytes()))
    warnings.simplefilter("ignore")  # of Pillow, on what it mends
    for number in range(count):
        path, data = originals[number % len(originals)]
        path.write_bytes(change_bytes(data, random, min(200, len(data)) if random.random() < 0.5 else None))
        try:
            image = ImageSource([str(path)], [0]).read(0, "RGB")
        except ImageError as error:
            outcomes["refused"] += 1
            if str(path) not in str(error):
                faults.append(f"refused without its name: {error}")
        except Exception as error:
            faults.append(f"{path.name}: {type(error).__name__}: {error}")
        else:
            outcomes["read"] += 1
            if image.mode != "RGB" or np.asarray(image).shape != (image.height, image.width, 3):
                faults.append(f"{path.name}: read as {image}")
    outcomes["fault"] += len(faults)
    return outcomes, faults


FORMATS: list[tuple[str, dict[str, Any]]] = [
    *((".png", {}), (".jpg", {}), (".jpeg", {"progressive": True}), (".bmp", {}), (".ppm", {}), (".webp", {})),
    *((".tif", {}), (".tiff", {"compression": "tiff_lzw"})),
]

KINDS: dict[str, Callable[[int, int, Path], Outcomes]] = {
    "configurations": configurations,
    "weights": weights,
    "training states": states,
    "images": images,
}


def run(count: int, seed: int) -> Iterator[tuple[str, Counter, list[str]]]:
    """All kinds, so many files of each."""
    for name, kind in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            yield name, *kind(count, seed, Path(folder))


def main() -> int:
    """Print the counts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    broken = False
    for name, outcomes, faults in run(options.count, options.seed):
        print(
            f"{name}: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())), flush=True
        )
        for fault in faults[:5]:
            print(f"--- {fault}")
        broken |= bool(faults)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
