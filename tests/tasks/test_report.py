"""The report on a classifier: figures, tables and pictures, other seeds, flips, robustness, and a browser's view."""

import csv
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import precision_recall_fscore_support

from vit_scratch import cli
from vit_scratch.evaluation import plots
from vit_scratch.evaluation.calibration import negative_log_likelihood, reliability, scaled
from vit_scratch.tasks.classifier import read_classifier

SMALL = [
    *(
        "--data.kind",
        "digits",
        "--model.dim",
        "16",
        "--model.depth",
        "2",
        "--model.heads",
        "2",
        "--augment.flip",
        "false",
    ),
    *("--train.epochs", "4", "--train.warmup_epochs", "1", "--train.lr", "5e-3", "--device", "cpu"),
]
PICTURES = {"confusion_matrix", "reliability", "mistakes", "attention", "curves", "robustness"}
TABLES = {"classes", "confusion_matrix", "calibration", "mistakes", "robustness"}


def run(*arguments):
    try:
        return cli.main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two trainings of one recipe, and another of two classes."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        assert run("train", *SMALL, "--seed", seed, "--out", folder / f"seed_{seed}") == 0
    return folder


@pytest.fixture(scope="module")
def report(runs):
    """The folder of a report with everything in it; captions.json beside it has the captions of attention.png."""
    folder = runs / "report"

    def plot_seen(pixels, maps, titles, path):
        (runs / "captions.json").write_text(json.dumps(titles))
        plots.plot_seen(pixels, maps, titles, path)

    arguments = ["--report", folder, "--flips", "true", "--robustness", "true", "--seeds", f"[{runs / 'seed_1'}]"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vit_scratch.tasks.report.plot_seen", plot_seen)
        assert run("evaluate", runs / "seed_0", *arguments, "--json", runs / "result.json") == 0
    return folder


@pytest.fixture(scope="module")
def values(report):
    return json.loads((report / "report.json").read_text())


def table(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_it_is_one_page_with_all_pictures_in_it_and_leaves_them_beside_it(report):
    page = (report / "report.html").read_text(encoding="utf-8")
    assert {p.stem for p in report.glob("*.png")} == PICTURES
    assert {p.stem for p in report.glob("*.csv")} == TABLES
    assert page.count('<img src="data:image/png;base64,') == len(PICTURES)
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing is fetched
    for path in report.glob("*.png"):
        assert np.asarray(Image.open(path).convert("L")).std() > 5, path


def test_counts_of_classes_sum_to_the_total(report, values):
    rows = table(report / "classes.csv")
    assert sum(int(r["images"]) for r in rows) == values["count"] == 360
    assert sum(int(r["right"]) for r in rows) == values["correct"]
    confusion = np.array(values["confusion"])
    assert confusion.sum() == 360
    true = np.repeat(np.arange(10), confusion.sum(1))
    predicted = np.concatenate([np.repeat(np.arange(10), row) for row in confusion])
    precision, recall, f1, _ = precision_recall_fscore_support(true, predicted, zero_division=0)
    for name, expected in (("precision", precision), ("accuracy", recall), ("f1", f1)):
        np.testing.assert_allclose([float(r[name]) for r in rows], expected)
    for i, row in enumerate(rows):
        others = confusion[i] * (np.arange(10) != i)
        assert row["mostly_taken_for"] == (f"{others.argmax()} ({others.max()})" if others.any() else "")


def test_the_page_says_what_the_evaluation_found(report, values):
    page = (report / "report.html").read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.replace("&nbsp;", " ")))
    assert f"{100 * values['accuracy']:.2f} %" in text
    assert f"{values['correct']} of 360" in text
    assert f"{100 * values['flips']['accuracy']:.2f} %" in text
    assert f"{100 * values['seeds']['mean']:.2f} %" in text
    for kind in values["robustness"]["kinds"]:
        assert all(f"{100 * a:.2f} %" in text for a in kind["accuracy"]["single view"])
    assert "commit" in text
    assert "torch" in text


def test_calibration_is_fitted_to_the_held_out_images(runs, values):
    rows = {(r["images"], r["scaling"]): r for r in values["calibration"]["rows"]}
    assert list(rows) == [("test", "before"), ("test", "after"), ("held out", "before"), ("held out", "after")]
    assert rows["held out", "after"]["nll"] < rows["held out", "before"]["nll"]
    temperature = values["calibration"]["temperature"]
    assert rows["test", "after"]["temperature"] == temperature
    summary = json.loads((runs / "seed_0" / "summary.json").read_text())
    assert summary["temperature"] == pytest.approx(temperature, rel=1e-4)
    assert read_classifier(str(runs / "seed_0"))[1].temperature == summary["temperature"]
    assert rows["test", "before"]["nll"] == pytest.approx(values["loss"], rel=1e-5)


def test_figures_of_calibration_mistakes_and_flips_are_those_of_the_model(runs, report, values):
    from vit_scratch.data.sources import load

    classifier = read_classifier(str(runs / "seed_0"))[1]
    source = load("digits", "").test
    pixels = [np.asarray(source.images[i])[..., None] for i in range(360)]
    inputs = classifier.normalised(pixels)
    with torch.inference_mode():
        logits = classifier.model(inputs).numpy()
        mirrored = classifier.model(inputs.flip(3)).numpy()
    labels = source.labels
    rows = {(r["images"], r["scaling"]): r for r in values["calibration"]["rows"]}
    temperature = values["calibration"]["temperature"]
    for when, scale in (("before", 1.0), ("after", temperature)):
        row = rows["test", when]
        assert row["nll"] == pytest.approx(negative_log_likelihood(logits, labels, scale), abs=1e-5)
        assert row["ece"] == pytest.approx(reliability(scaled(logits, scale), labels).error, abs=1e-5)
    assert values["flips"]["correct"] == ((logits + mirrored).argmax(1) == labels).sum()
    wrong = np.flatnonzero(logits.argmax(1) != labels)
    confidence = scaled(logits, temperature).max(1)
    listed = table(report / "mistakes.csv")
    assert [int(r["number"]) for r in listed] == list(wrong[np.argsort(-confidence[wrong])][: len(listed)])
    assert len(listed) == min(len(wrong), 24)
    for row in listed:
        number = int(row["number"])
        assert row["true"] == str(labels[number])
        assert row["predicted"] == str(logits[number].argmax())
        assert float(row["confidence"]) == pytest.approx(confidence[number], abs=1e-5)
    captions = json.loads((runs / "captions.json").read_text())
    first = sorted(np.unique(labels, return_index=True)[1][:6])  # one image of each of six classes
    calibrated = scaled(logits[first], temperature)
    assert [c[0] for c in captions] == [f"is {labels[i]}" for i in first]
    assert [c[1] for c in captions] == [f"rollout:\n{p.argmax()} {100 * p.max():.0f} %" for p in calibrated]


def test_seeds_are_averaged(runs, values):
    accuracies = [json.loads((runs / f"seed_{s}" / "summary.json").read_text())["test"]["accuracy"] for s in (0, 1)]
    assert list(values["seeds"]["accuracies"].values()) == accuracies
    assert values["seeds"]["mean"] == pytest.approx(np.mean(accuracies))
    assert values["seeds"]["std"] == pytest.approx(np.std(accuracies, ddof=1))


def test_robustness_is_written_as_a_table(report, values):
    rows = table(report / "robustness.csv")
    assert [r["images"] for r in rows] == ["clean"] + [
        k["name"] for k in values["robustness"]["kinds"] for _ in range(5)
    ]
    assert float(rows[0]["single view"]) == values["accuracy"]
    assert float(rows[0]["with flips"]) == values["flips"]["accuracy"]
    found = [float(r["single view"]) for r in rows[1:]]
    assert values["robustness"]["means"]["corrupted images"]["single view"] == pytest.approx(np.mean(found))
    noise = values["robustness"]["kinds"][0]
    assert noise["name"] == "noise"


def test_published_images_are_evaluated(runs, tmp_path, capsys, monkeypatch):
    """Files that hold the test images themselves give the accuracy on the test images."""
    from vit_scratch.data.sources import load
    from vit_scratch.evaluation import robustness

    monkeypatch.setattr(robustness, "PUBLISHED", 360)
    source = load("digits", "").test
    images = np.stack([np.array(Image.fromarray(i).resize((32, 32), 0).convert("RGB")) for i in source.images])
    np.save(tmp_path / "fog.npy", images)
    np.save(tmp_path / "labels.npy", source.labels.astype(np.uint8))
    assert run("evaluate", runs / "seed_0", "--cifar10_c", tmp_path, "--json", tmp_path / "r.json") == 0
    values = json.loads((tmp_path / "r.json").read_text())
    [kind] = values["robustness"]["kinds"]
    assert kind["name"] == "CIFAR-10-C fog"
    assert len(kind["accuracy"]["single view"]) == 5
    assert np.mean(kind["accuracy"]["single view"]) == pytest.approx(values["accuracy"], abs=0.03)  # resized again
    assert values["robustness"]["means"] == {"CIFAR-10-C": {"single view": np.mean(kind["accuracy"]["single view"])}}


def test_other_order_of_the_classes_permutes_the_confusion_matrix(tmp_path):
    """A folder of images, and the same with other names for its classes."""
    random = np.random.default_rng(0)
    names = {"first": ["a", "b", "c"], "second": ["z", "a", "m"]}
    for i in range(3):
        for part, count in (("train", 30), ("test", 20)):
            for j in range(count):
                image = Image.fromarray(random.integers(60 * i, 60 * i + 120, (8, 8, 3)).astype(np.uint8))
                for root, classes in names.items():
                    (tmp_path / root / part / classes[i]).mkdir(parents=True, exist_ok=True)
                    image.save(tmp_path / root / part / classes[i] / f"{j}.png")
    base = [*SMALL[2:], "--data.kind", "imagefolder", "--data.image_size", "8", "--train.epochs", "2"]
    assert run("train", *base, "--data.root", tmp_path / "first", "--out", tmp_path / "run") == 0
    assert run("evaluate", tmp_path / "run", "--json", tmp_path / "1.json") == 0
    classifier = read_classifier(str(tmp_path / "run"))[1]
    order = np.argsort(names["second"])  # where each class of the second folder stands among those of the first
    model = classifier.model
    model.head.weight.data, model.head.bias.data = model.head.weight.data[order], model.head.bias.data[order]
    look = {
        "mode": "RGB",
        "image_size": [8, 8],
        "interpolation": "bicubic",
        "mean": classifier.mean,
        "std": classifier.std,
    }
    model.metadata = {"classes": sorted(names["second"]), "preprocessing": look}
    model.save_pretrained(tmp_path / "permuted")
    arguments = ["--data.root", tmp_path / "second", "--out", tmp_path / "out", "--json", tmp_path / "2.json"]
    assert run("evaluate", tmp_path / "permuted", *arguments) == 0
    first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2))
    assert np.array(second["confusion"]).tolist() == np.array(first["confusion"])[np.ix_(order, order)].tolist()
    assert [c["class"] for c in second["classes"]] == ["a", "m", "z"]


def test_a_report_without_held_out_images_or_curves(runs, tmp_path, capsys):
    shutil.copy(runs / "seed_0" / "last.safetensors", tmp_path / "w.safetensors")
    assert run("evaluate", tmp_path / "w.safetensors", "--split", "val", "--report", tmp_path / "r") == 0
    page = (tmp_path / "r" / "report.html").read_text()
    assert "no held-out images here to fit a temperature" in page
    assert "Learning curves" not in page
    assert f"report: {tmp_path / 'r' / 'report.html'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "{runs}/result.json"], "is a file; choose a folder"),
        (["--seeds", "[{runs}/none]"], "none"),
        (["--seeds", "[cifar10-tiny]"], "has other classes or takes other images"),
        (["--cifar10_c", "{runs}"], "zenodo.org"),
        (["--cifar10_1", "{runs}"], "github.com"),
        (["--probe", "true", "--flips", "true"], "flips=True is for the model's head"),
    ],
)
def test_what_can_not_work_is_refused(runs, report, arguments, message, capsys):
    assert run("evaluate", runs / "seed_0", *[a.format(runs=runs) for a in arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "accuracy" not in output.out


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MEASURE = """<script>addEventListener("load", () => {
  const broken = [...document.images].filter((i) => !i.naturalWidth).length;
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.title = `broken ${broken}, too wide by ${wide}, images ${document.images.length}`;
})</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium")
@pytest.mark.parametrize("width", [500, 1400])  # no window of Chromium is narrower than 500
def test_a_browser_shows_all_of_it_without_anything_wider_than_the_page(report, tmp_path, width):
    page = (report / "report.html").read_text().replace("</head>", MEASURE + "</head>")
    (tmp_path / "page.html").write_text(page)
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    arguments = [CHROMIUM, *options, "--virtual-time-budget=5000", f"file://{tmp_path / 'page.html'}"]
    shown = subprocess.run(arguments, capture_output=True, text=True, timeout=120).stdout
    assert re.search("<title>(.*)</title>", shown)[1] == f"broken 0, too wide by 0, images {len(PICTURES)}"
