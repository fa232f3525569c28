"""The guided tour runs, prints what it says, and draws its pictures."""

import re
from pathlib import Path

import examples
import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs" / "tour.md"
TEXT = TOUR.read_text(encoding="utf-8")
PICTURES = re.findall(r"^!\[.+\]\((.+)\)$", TEXT, re.MULTILINE)


def picture_faults(kept: Path, new: Path) -> list[str]:
    """What is wrong with a picture of the tour, beside the one that the blocks have just drawn."""
    if not kept.is_file() or not new.is_file():
        return [f"{kept.name} is not {'there' if new.is_file() else 'drawn'}"]
    pixels = [np.asarray(Image.open(path).convert("RGB")) for path in (kept, new)]
    found = [] if pixels[0].shape == pixels[1].shape else [f"{kept.name} has another size than what the blocks draw"]
    if any(p.std() < 20 or len(np.unique(p @ [65536, 256, 1])) < 50 for p in pixels):
        found.append(f"{kept.name} is blank")
    if kept.stat().st_size > 60_000:
        found.append(f"{kept.name} is a large file")
    return found


def test_the_tour_prints_what_it_states_and_draws_its_pictures(tmp_path: Path) -> None:
    try:  # all in one test: several processes would each have to train its models
        found = examples.faults(TOUR, tmp_path)
    finally:
        torch.set_printoptions(profile="default")  # which the tour has changed
    for name in PICTURES:
        found += picture_faults(TOUR.parent / name, tmp_path / name)
    assert not found, "\n\n".join(found)


def picture(path: Path, side: int = 60) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, 60, 3), dtype=np.uint8)).save(path)
    return path


def test_a_picture_that_is_missing_blank_large_or_of_another_size_is_found(tmp_path: Path) -> None:
    good, other, large = (picture(tmp_path / f"{side}.png", side) for side in (60, 61, 600))
    Image.new("RGB", (60, 60), "white").save(blank := tmp_path / "blank.png")
    assert picture_faults(good, good) == []
    assert picture_faults(tmp_path / "none.png", good) == ["none.png is not there"]
    assert picture_faults(good, tmp_path / "none.png") == ["60.png is not drawn"]
    assert picture_faults(good, other) == ["60.png has another size than what the blocks draw"]
    assert picture_faults(blank, good) == ["blank.png is blank"]
    assert picture_faults(good, blank) == ["60.png is blank"]
    assert picture_faults(large, large) == ["600.png is a large file"]


def test_every_picture_that_is_there_is_shown() -> None:
    assert PICTURES
    assert sorted(PICTURES) == sorted(f"tour/{path.name}" for path in (TOUR.parent / "tour").iterdir())


def test_every_link_leads_somewhere() -> None:
    headings = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^##+ (.*)$", TEXT, re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("https://"):
            assert (TOUR.parent / target).exists(), target


GOOD = """
```python
a = 2
print(a)  # 2
```

```python
for i in range(a):
    print(i)
```

```text
0
1
```
"""


def faults(text: str, folder: Path) -> list[str]:
    (folder / "example.md").write_text(text)
    return examples.faults(folder / "example.md", folder)


def test_blocks_share_a_namespace_and_may_state_their_output_either_way(tmp_path: Path) -> None:
    assert faults(GOOD, tmp_path) == []


@pytest.mark.parametrize(
    ("good", "bad", "line"),
    [
        ("# 2", "# 3", 3),
        ("0\n1\n", "0\n2\n", 8),
        ("0\n1\n", "0\n", 8),
        ("0\n1\n", "0\n1\n2\n", 8),
        ("print(a)  # 2", "print(a)", 3),
        ("\n```text\n0\n1\n```\n", "", 8),
        ("a = 2", "a = 1", 3),
    ],
)
def test_a_wrong_or_missing_output_is_found(good: str, bad: str, line: int, tmp_path: Path) -> None:
    assert GOOD.count(good) == 1
    found = faults(GOOD.replace(good, bad), tmp_path)
    assert found
    assert f"line {line}" in found[0]


def test_a_block_that_states_its_output_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 8"):
        faults(GOOD.replace("print(i)", "print(i)  # 0"), tmp_path)


def test_an_error_names_the_line_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as error:
        faults(GOOD.replace("print(a)", "print(a / 0)"), tmp_path)
    assert error.traceback[-1].lineno + 1 == 4
