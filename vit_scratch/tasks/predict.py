"""The command predict: what a trained classifier says about image files, and what it looks at."""

import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vit_scratch.config import PredictConfig
from vit_scratch.data.images import ImageError, fit, open_file, read
from vit_scratch.data.sources import image_files
from vit_scratch.evaluation.calibration import scaled
from vit_scratch.evaluation.plots import plot_seen, short
from vit_scratch.tasks.classifier import Classifier, attention_of, read_classifier
from vit_scratch.tasks.run import refuse_file
from vit_scratch.training.device import pick_device

BATCH = 32
"""Images per forward pass."""


def predict(config: PredictConfig, images: Iterable[str], *, as_json: bool = False) -> int:
    """Print the likeliest classes of each image, and draw what the model looks at where that is asked for.

    Args:
        config: with which model, and where pictures go.
        images: paths of files and folders; empty lines are left out.
        as_json: print an object of JSON for each image instead of a few lines.

    Returns:
        The exit status: 1 where images can't be read, each of which is named on the standard error, else 0.

    Raises:
        ValueError: a model that is not there or has no classes, a folder without images, or no image at all.
    """
    refuse_file("attention", config.attention)
    folder = None if config.attention is None else Path(config.attention)
    device = pick_device(config.device)
    classifier = read_classifier(config.checkpoint)[1]
    if not classifier.classes:
        raise ValueError(f"the model in {config.checkpoint} has no classes to name; choose another --checkpoint")
    classifier.model.to(device).eval()
    if classifier.temperature is None:
        print(f"note: {config.checkpoint} has no temperature; probabilities are as they are", file=sys.stderr)
    names = Names(folder)
    seen = faults = 0
    for paths, pixels, broken in batches(find(images), classifier):
        for message in broken:
            print(f"error: {message}", file=sys.stderr)
        seen, faults = seen + len(paths) + len(broken), faults + len(broken)
        if paths:
            show(config, classifier, paths, pixels, device, names, as_json)
    if not seen:
        raise ValueError("there are no images to predict; name files or folders, or give paths as lines of the input")
    return int(faults > 0)


def find(images: Iterable[str]) -> Iterator[str]:
    """Paths of files, and of the images in folders. Raises ValueError for a folder without any."""
    for entry in images:
        path = entry.rstrip("\r\n")
        if not path.strip():
            continue
        if Path(path).is_dir():
            found = image_files(Path(path))
            if not found:
                raise ValueError(f"{path} is a folder without images")
            yield from found
        else:
            yield path


def batches(paths: Iterable[str], classifier: Classifier) -> Iterator[tuple[list[str], list[np.ndarray], list[str]]]:
    """Read images in batches: their paths, their pixels (height, width, C), and what is wrong with others."""
    form = classifier.form
    names: list[str] = []
    pixels: list[np.ndarray] = []
    broken: list[str] = []
    for path in paths:
        try:
            image = fit(read(path, partial(open_file, path), form.mode), form.image_size, form.interpolation)
            names.append(path)
            pixels.append(np.atleast_3d(np.asarray(image)))
        except ImageError as error:
            broken.append(str(error))
        if len(names) + len(broken) == BATCH:
            yield names, pixels, broken
            names, pixels, broken = [], [], []
    yield names, pixels, broken


class Names:
    """Names of pictures in a folder, of which no two are the same.

    Args:
        folder: where they go; None for no pictures.
    """

    def __init__(self, folder: Path | None):
        self.folder, self.taken = folder, set[str]()

    def path(self, image: str) -> Path:
        """Where the picture of an image goes."""
        assert self.folder is not None
        name, number = Path(image).stem, 1
        while name.lower() in self.taken:
            number += 1
            name = f"{Path(image).stem}_{number}"
        self.taken.add(name.lower())
        return self.folder / f"{name}.png"


def show(
    config: PredictConfig,
    classifier: Classifier,
    paths: list[str],
    pixels: list[np.ndarray],
    device: torch.device,
    names: Names,
    as_json: bool,
) -> None:
    """Print what the model says about a batch of images, and draw what it looks at."""
    inputs = classifier.normalised(pixels).to(device)
    with torch.inference_mode():
        logits = classifier.model(inputs).float().cpu().numpy()
    probabilities = scaled(logits, classifier.temperature or 1.0)
    maps = attention_of(classifier.model, inputs) if names.folder is not None else None
    for i, path in enumerate(paths):
        best = np.argsort(-probabilities[i], kind="stable")[: config.top]
        top = [{"class": classifier.classes[c], "probability": float(probabilities[i, c])} for c in best]
        entry: dict[str, Any] = {"image": path, "predictions": top}
        if maps is not None and names.folder is not None:
            flow, heads = maps[0][i], maps[1][i]
            picture = names.path(path)
            names.folder.mkdir(parents=True, exist_ok=True)
            first = f"{short(top[0]['class'])} {100 * top[0]['probability']:.0f} %"
            titles = [first, "rollout", *[f"head {h + 1}" for h in range(len(heads))]]
            plot_seen([pixels[i]], [np.concatenate([flow[None], heads])], [titles], picture)
            entry["attention"] = str(picture)
        if as_json:
            print(json.dumps(entry, ensure_ascii=False), flush=True)
        else:
            print(path)
            for prediction in top:
                print(f"  {100 * prediction['probability']:6.2f} %  {prediction['class']}", flush=True)
