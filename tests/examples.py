"""Runs the Python blocks of a Markdown file and compares what they print with what the file says.

    python tests/examples.py docs/tour.md    # the pictures that the blocks draw land beside the file

A file says what a block prints in a comment behind each print, or in a text block that follows the Python block.
"""

import argparse
import contextlib
import difflib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Example(NamedTuple):
    """A Python block.

    Attributes:
        line: where its code begins in the file.
        code: the block.
        stated: the lines that it prints, as the file has them.
    """

    line: int
    code: str
    stated: list[str]


def blocks(text: str, language: str) -> list[str]:
    """The blocks of a language in a Markdown text."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def examples(text: str) -> list[Example]:
    """The Python blocks of a Markdown text, in order.

    Raises:
        ValueError: a block that states its output both ways.
    """
    found = []
    for match in re.finditer(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.MULTILINE | re.DOTALL):
        code, block = match.groups()
        line = text.count("\n", 0, match.start(1)) + 1
        stated = re.findall(r"^ *print\(.*  # (.*)$", code, re.MULTILINE)
        if stated and block is not None:
            raise ValueError(f"line {line}: the output stands both in comments and in a text block")
        found.append(Example(line, code, stated if block is None else block.splitlines()))
    return found


def run(example: Example, name: str, namespace: dict[str, Any]) -> list[str]:
    """Run a block of the file `name`; returns the lines it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile("\n" * (example.line - 1) + example.code, name, "exec"), namespace)  # tracebacks have its lines
    return [line.rstrip() for line in output.getvalue().splitlines()]


def faults(path: Path, folder: Path) -> list[str]:
    """Run all blocks of a file, in order, in one namespace, in a folder; returns what is printed but not so stated."""
    namespace: dict[str, Any] = {}
    found = []
    before = os.getcwd()
    os.chdir(folder)
    try:
        for example in examples(path.read_text(encoding="utf-8")):
            printed = run(example, str(path), namespace)
            if printed != example.stated:
                lines = difflib.unified_diff(example.stated, printed, "stated", "printed", lineterm="")
                found.append("\n".join([f"{path.name}, block at line {example.line}:", *lines]))
    finally:
        os.chdir(before)
    return found


def main() -> int:
    """The command; exit status 1 where a block prints something else."""
    parser = argparse.ArgumentParser(description="Run the Python blocks of a Markdown file and check what they print.")
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path.resolve()
    found = faults(path, path.parent)
    print(*found or [f"{path.name}: every block prints what is stated"], sep="\n\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
