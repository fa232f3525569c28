"""Imports go one way: scripts and cli -> tasks -> vision, data, evaluation, training -> transformer, files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "transformer": set(),
    "files": set(),
    "vision": {"transformer", "files"},
    "data": set(),
    "evaluation": {"transformer"},
    "training": {"files"},
    "config": set(),
    "tasks": {"config", "vision", "data", "evaluation", "training", "transformer", "files"},
    "cli": {"config", "tasks"},
    "__init__": {"transformer", "vision"},
}
PACKAGES_OF_TRANSFORMER = {"torch", "einops", "math", "collections", "typing", "dataclasses"}


def imported(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names.add(node.module or "")
            if node.module == "vit_scratch":
                names |= {f"vit_scratch.{alias.name}" for alias in node.names}
    return names


def rooms(path: Path) -> set[str]:
    """Rooms of the package that a file imports from."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("vit_scratch.")}


FILES = sorted((ROOT / "vit_scratch").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_import_against_the_direction(path: Path) -> None:
    room = path.relative_to(ROOT / "vit_scratch").parts[0].removesuffix(".py")
    assert rooms(path) - {room} <= ALLOWED[room]


@pytest.mark.parametrize("path", sorted((ROOT / "vit_scratch" / "transformer").glob("*.py")), ids=lambda p: p.name)
def test_the_transformer_needs_torch_and_einops_only(path: Path) -> None:
    outside = {name.split(".")[0] for name in imported(path)} - {"vit_scratch"}
    assert outside <= PACKAGES_OF_TRANSFORMER


@pytest.mark.parametrize("script", ["train.py", "evaluate.py"])
def test_scripts_are_thin_doors(script: str) -> None:
    assert rooms(ROOT / script) == {"cli"}


def test_importing_the_package_loads_no_data_or_plotting_library() -> None:
    libraries = "('torchvision', 'sklearn', 'matplotlib', 'timm', 'tokenizers', 'sacrebleu')"
    code = f"import sys, vit_scratch; print([m for m in {libraries} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_test_sees_a_forbidden_import(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "def f():\n    from vit_scratch.data.images import read\n    import vit_scratch.tasks.classification\n"
    )
    assert rooms(file) == {"data", "tasks"}


def test_every_public_name_is_there() -> None:
    import vit_scratch

    for name in vit_scratch.__all__:
        assert getattr(vit_scratch, name) is not None
    from vit_scratch import Decoder, Encoder, MultiHeadAttention, Transformer, VisionTransformer

    assert len({Decoder, Encoder, MultiHeadAttention, Transformer, VisionTransformer}) == 5
