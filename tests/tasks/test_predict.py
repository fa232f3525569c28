"""Predictions for files of all kinds: what is printed, drawn and refused."""

import io
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from vit_scratch import VisionTransformer, cli
from vit_scratch.data.images import convert_mode, fit

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def run(*arguments):
    try:
        return cli.main(["predict", *[str(a) for a in arguments]])
    except SystemExit as stop:
        return int(stop.code or 0)


def picture(seed, height=40, width=60):
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """20 images of all modes and sizes, and three broken files."""
    path = tmp_path_factory.mktemp("images")
    for i, mode in enumerate(("RGB", "L", "P", "1", "RGBA", "LA", "CMYK", "YCbCr", "HSV", "LAB")):
        suffix = "tiff" if mode in ("CMYK", "YCbCr", "LAB") else "png"
        image = picture(i).convert("RGB").convert(mode) if mode != "HSV" else picture(i)
        image.save(path / f"{i:02}_{mode}.{suffix}")
    Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50).save(path / "10_16bit.png")
    for i, (height, width) in enumerate(((1, 1), (1, 300), (400, 2), (32, 32), (33, 31), (500, 700), (8, 9)), 11):
        picture(i, height, width).save(path / f"{i}_{height}x{width}.png")
    picture(18).save(path / "18_é ü.jpg")
    picture(19).save(path / "19.webp")
    whole = (path / "18_é ü.jpg").read_bytes()
    (path / "a_cut.jpg").write_bytes(whole[:200])
    (path / "b_empty.png").write_bytes(b"")
    (path / "c_text.png").write_text("no image")
    return path


def test_a_folder_of_all_kinds_with_three_broken_files(folder, capsys):
    assert run(folder, "--json") == 1
    output = capsys.readouterr()
    entries = [json.loads(line) for line in output.out.splitlines()]
    names = sorted(p.name for p in folder.iterdir())
    assert [e["image"].rpartition("/")[2] for e in entries] == names[:20]
    errors = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert [name in error for name, error in zip(names[20:], errors, strict=True)] == [True] * 3
    for entry in entries:
        probabilities = [p["probability"] for p in entry["predictions"]]
        assert len(probabilities) == 5
        assert probabilities == sorted(probabilities, reverse=True)


@pytest.mark.parametrize(
    ("name", "choice"), [("cifar10-tiny", []), ("cifar10-plain", ["--checkpoint", "cifar10-plain"])]
)
def test_probabilities_are_those_of_the_model(folder, capsys, name, choice):
    path = folder / "00_RGB.png"
    model = VisionTransformer.from_pretrained(name)
    look = model.metadata["preprocessing"]
    image = fit(convert_mode(Image.open(path), "RGB"), (32, 32), look["interpolation"])
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
    mean, std = (torch.tensor(look[name]).view(3, 1, 1) for name in ("mean", "std"))
    logits = model((pixels - mean) / std) / model.metadata.get("temperature", 1.0)
    expected = dict(zip(CLASSES, logits.softmax(1)[0].tolist(), strict=True))
    assert run(path, "--json", "--top", 20, *choice) == 0
    entry = json.loads(capsys.readouterr().out)
    assert {p["class"]: p["probability"] for p in entry["predictions"]} == pytest.approx(expected, abs=1e-5)
    assert run(path, "--top", 2, *choice) == 0
    first = max(expected, key=expected.get)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(path)
    assert lines[1].split() == [f"{100 * expected[first]:.2f}", "%", first]
    assert len(lines) == 3


def test_a_temperature_is_applied(tmp_path, folder, capsys):
    model = VisionTransformer.from_pretrained("cifar10-tiny")
    found = {}
    for temperature in (1.0, 2.0):
        model.metadata["temperature"] = temperature
        model.save_pretrained(tmp_path / str(temperature))
        assert run(folder / "00_RGB.png", "--checkpoint", tmp_path / str(temperature), "--json", "--top", 10) == 0
        output = capsys.readouterr()
        assert "temperature" not in output.err
        entry = json.loads(output.out)
        found[temperature] = {p["class"]: p["probability"] for p in entry["predictions"]}
    roots = {name: value**0.5 for name, value in found[1.0].items()}
    expected = {name: value / sum(roots.values()) for name, value in roots.items()}
    assert found[2.0] == pytest.approx(expected, abs=1e-5)


def test_paths_come_from_the_input_where_none_are_given(folder, capsys, monkeypatch):
    lines = f"{folder / '00_RGB.png'}\n\n{folder / '18_é ü.jpg'}\r\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
    assert run("--top", 1) == 0
    assert capsys.readouterr().out.splitlines()[::2] == [str(folder / "00_RGB.png"), str(folder / "18_é ü.jpg")]


def test_pictures_of_what_the_model_looks_at(folder, tmp_path, capsys):
    twice = tmp_path / "00_RGB.png"
    picture(77).save(twice)
    pictures = tmp_path / "looked at"
    assert run(folder / "00_RGB.png", twice, folder / "19.webp", "--attention", pictures, "--json") == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = [pictures / name for name in ("00_RGB.png", "00_RGB_2.png", "19.png")]
    assert [e["attention"] for e in entries] == [str(p) for p in expected]
    drawn = [np.asarray(Image.open(p).convert("RGB")) for p in expected]
    assert all(d.std() > 20 for d in drawn)
    assert (drawn[0] != drawn[1]).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/empty"], "is a folder without images"),
        (["{image}", "--top", "0"], "top=0 is out of range"),
        (["{image}", "--top", "many"], "top"),
        (["{image}", "--checkpoint", "{folder}/none"], "none"),
        (["{image}", "--attention", "{image}"], "is a file; choose a folder"),
        (["{image}", "--device", "abacus"], "device='abacus'"),
    ],
)
def test_what_can_not_work_is_refused(folder, tmp_path, arguments, message, capsys):
    (tmp_path / "empty").mkdir()
    places = {"folder": tmp_path, "image": folder / "00_RGB.png"}
    assert run(*[a.format(**places) for a in arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert not output.out


def test_no_image_and_a_missing_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert run() == 2
    assert "there are no images to predict" in capsys.readouterr().err
    assert run(tmp_path / "missing.png") == 1
    assert f"{tmp_path / 'missing.png'}: [Errno 2]" in capsys.readouterr().err
