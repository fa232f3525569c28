"""The command convert: each form into each other, with classes and preprocessing, and messages for what can't be."""

import itertools
import json

import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file, save_file

from vit_scratch import cli, create_vit
from vit_scratch.config import ConvertConfig
from vit_scratch.data.loaders import ImageFormat
from vit_scratch.tasks.classification import load_classifier
from vit_scratch.tasks.convert import Classifier, convert, write_ours
from vit_scratch.vision import pretrained

pytestmark = pytest.mark.usefixtures("without_curves")
SMALL = dict(dim=24, depth=2, heads=3, image_size=16, patch_size=4, num_classes=3)
CLASSES, MEAN, STD = ["cat", "dog", "owl"], [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
FORMS = ("vit_scratch", "timm", "torchvision", "transformers")


def run(*arguments):
    try:
        return cli.main(["convert", *[str(a) for a in arguments]])
    except SystemExit as stop:
        return int(stop.code or 0)


def checkpoint(path, **changes):
    """One of our checkpoints with random weights."""
    torch.manual_seed(0)
    model = create_vit(**SMALL | changes).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    size = model.patch_embedding.image_size
    mode = {1: "L", 3: "RGB"}[model.patch_embedding.in_channels]
    channels = slice(0, model.patch_embedding.in_channels)
    form = ImageFormat(mode, size, "bilinear")
    write_ours(Classifier(model, CLASSES[: model.num_classes], form, MEAN[channels], STD[channels]), path)
    return model


def destination(folder, form):
    return folder / (f"{form}.safetensors" if form in ("vit_scratch", "torchvision") else form)


def load(path, form):
    """What the library itself makes of it."""
    if form == "vit_scratch":
        return load_classifier(path)[0]
    if form == "timm":
        return timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    if form == "torchvision":
        model = torchvision.models.VisionTransformer(16, 4, 2, 3, 24, 96, num_classes=3)
        model.load_state_dict(load_file(path))
        return model.eval()
    transformers = pytest.importorskip("transformers")
    return transformers.ViTForImageClassification.from_pretrained(path)


def logits(model, images):
    with torch.no_grad():
        output = model(images)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize(("first", "second"), list(itertools.product(FORMS, FORMS)))
def test_every_form_becomes_every_other_with_equal_logits_and_what_it_knows(
    tmp_path, capsys, monkeypatch, first, second
):
    if "transformers" in (first, second):
        pytest.importorskip("transformers")
    model = checkpoint(tmp_path / "start.safetensors")
    images = torch.randn(2, 3, 16, 16)
    assert run(tmp_path / "start.safetensors", destination(tmp_path, first), "--to", first) == 0
    source, extra = destination(tmp_path, first), []
    if first == "torchvision":  # whose files do not say what they are
        small = torchvision.models.VisionTransformer(16, 4, 2, 3, 24, 96, num_classes=3)
        monkeypatch.setattr(pretrained, "build_theirs", lambda *_, **__: small)
        extra = ["--architecture", "torchvision:vit_b_16"]
    (tmp_path / "then").mkdir()
    target = destination(tmp_path / "then", second)
    assert run(source, target, "--to", second, *extra) == 0
    printed = capsys.readouterr().out
    assert printed.count("largest difference of the logits on random images, as written: ") == 2
    assert (
        f"{source}: {sum(p.numel() for p in model.parameters()):,} parameters, images of 16 x 16, 3 classes" in printed
    )
    torch.testing.assert_close(logits(load(target, second), images), logits(model, images), atol=1e-5, rtol=1e-5)
    (tmp_path / "ordinary").write_text("")
    assert len({path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}) == 1  # all may read all

    knows = first != "torchvision"
    if second == "vit_scratch":
        description = load_classifier(target)[1]
        look = description["preprocessing"]
        assert (look["mode"], look["image_size"]) == ("RGB", [16, 16])
        if knows:
            assert description["classes"] == CLASSES
            assert (look["mean"], look["std"], look["interpolation"]) == (MEAN, STD, "bilinear")
        else:
            assert description["classes"] == ["0", "1", "2"]
    if second == "timm" and knows:
        written = json.loads((target / "config.json").read_text())
        assert written["label_names"] == CLASSES
        assert written["pretrained_cfg"]["mean"] == MEAN
        assert written["pretrained_cfg"]["interpolation"] == "bilinear"
        assert written["pretrained_cfg"]["input_size"] == [3, 16, 16]
    if second == "transformers" and knows:
        assert json.loads((target / "config.json").read_text())["id2label"] == dict(zip("012", CLASSES, strict=True))
        look = json.loads((target / "preprocessor_config.json").read_text())
        assert (look["image_mean"], look["image_std"], look["size"]) == (MEAN, STD, {"height": 16, "width": 16})


@pytest.mark.parametrize(
    "changes",
    [
        dict(registers=2, layer_scale=0.1, qk_norm=True, pooling="mean"),
        dict(embedding_norm=True, norm_eps=1e-5, activation="quick_gelu", in_channels=1, hidden_dim=31),
        dict(
            final_norm=False,
            pooled_norm=True,
            class_token=True,
            pooling="mean",
            prefix_positions="none",
            qkv_bias=False,
        ),
        dict(image_size=[8, 20], activation="gelu_tanh", num_classes=0, any_size=True),
    ],
)
def test_models_of_many_kinds_go_to_timms_folders_and_back(tmp_path, changes):
    model = checkpoint(tmp_path / "start.safetensors", **changes)
    assert run(tmp_path / "start.safetensors", tmp_path / "timm", "--to", "timm") == 0
    assert run(tmp_path / "timm", tmp_path / "back.safetensors") == 0
    back, description = load_classifier(tmp_path / "back.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name])
    images = torch.randn(2, back.patch_embedding.in_channels, *back.patch_embedding.image_size)
    assert torch.equal(logits(back, images), logits(model, images))
    assert description["classes"] == CLASSES[: model.num_classes]


def test_a_new_image_size_resizes_the_positions_and_the_preprocessing(tmp_path, capsys):
    model = checkpoint(tmp_path / "start.safetensors")
    assert run(tmp_path / "start.safetensors", tmp_path / "large.safetensors", "--image_size", "[24, 8]") == 0
    assert "resized for images of 24 x 8" in capsys.readouterr().out
    large, description = load_classifier(tmp_path / "large.safetensors")
    model.set_input_size((24, 8))
    assert torch.equal(logits(large, torch.ones(1, 3, 24, 8)), logits(model, torch.ones(1, 3, 24, 8)))
    assert description["preprocessing"]["image_size"] == [24, 8]
    assert run(tmp_path / "start.safetensors", tmp_path / "odd.safetensors", "--image_size", "10") == 2
    assert "the height 10 is not a multiple of the patch height 4" in capsys.readouterr().err
    assert not (tmp_path / "odd.safetensors").exists()


def test_a_converted_model_is_evaluated_on_a_folder_of_images(tmp_path, capsys):
    checkpoint(tmp_path / "start.safetensors")
    for name in CLASSES:
        (tmp_path / "images" / "test" / name).mkdir(parents=True)
        Image.new("RGB", (20, 20), "red").save(tmp_path / "images" / "test" / name / "a.png")
    assert run(tmp_path / "start.safetensors", tmp_path / "timm", "--to", "timm") == 0
    assert run(tmp_path / "timm", tmp_path / "ours.safetensors") == 0
    assert cli.main(["evaluate", str(tmp_path / "ours.safetensors"), "--data.root", str(tmp_path / "images")]) == 0
    assert "test accuracy 33.33 % (1/3)" in capsys.readouterr().out


def test_saved_folders_and_weights_of_the_package_are_evaluated_like_checkpoints(tmp_path, capsys, monkeypatch):
    from vit_scratch.tasks import classifier
    from vit_scratch.tasks import run as run_module
    from vit_scratch.vision import hub

    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "start.safetensors")
    for i, name in enumerate(CLASSES):
        (tmp_path / "images" / "test" / name).mkdir(parents=True)
        Image.new("RGB", (20, 20), ["red", "green", "blue"][i]).save(tmp_path / "images" / "test" / name / "a.png")
    assert run(tmp_path / "start.safetensors", tmp_path / "weights" / "mine") == 0
    monkeypatch.setattr(hub, "WEIGHTS", tmp_path / "weights")
    for module in (hub, classifier, run_module):
        monkeypatch.setattr(module, "PACKAGED", ["mine"])
    capsys.readouterr()
    results = []
    for source in ("start.safetensors", "weights/mine", "mine"):
        assert cli.main(["evaluate", source, "--data.root", "images", "--json", "result.json"]) == 0
        results.append(json.loads((tmp_path / "result.json").read_text()))
        assert results[-1].pop("checkpoint") == source
    assert results[0] == results[1] == results[2]
    for folder in ("evaluation_start_images", "weights/mine/evaluation_images", "evaluation_mine_images"):
        assert (tmp_path / folder / "confusion_matrix.png").is_file()


def test_a_model_without_a_classifier_is_not_evaluated(tmp_path, capsys):
    checkpoint(tmp_path / "features.safetensors", num_classes=0)
    assert cli.main(["evaluate", str(tmp_path / "features.safetensors"), "--data.root", str(tmp_path)]) == 2
    assert "has no classifier, so there is no accuracy to measure" in capsys.readouterr().err


def test_weights_of_a_part_are_counted_in_a_note(tmp_path, capsys, monkeypatch):
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=1, num_classes=3)
    weights = {n: t for n, t in theirs.state_dict().items() if "mlp" not in n}
    save_file(weights, tmp_path / "part.safetensors")
    monkeypatch.setattr(pretrained, "build_theirs", lambda *_, **__: theirs)
    arguments = [
        tmp_path / "part.safetensors",
        tmp_path / "ours.safetensors",
        "--architecture",
        "timm:vit_tiny_patch16_224",
    ]
    assert run(*arguments) == 2
    assert "of 20 weights, 4 missing (blocks.0.mlp.fc1.weight, blocks.0.mlp.fc1.bias, " in capsys.readouterr().err
    assert run(*arguments, "--incomplete", "true") == 0
    assert "note: loaded 16 of 20 weights; as they were at first: blocks.0.mlp.fc1.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["start.safetensors", "out", "--to", "torchvision"], "--to torchvision writes a .safetensors file"),
        (["start.safetensors", "out.safetensors", "--to", "timm"], "--to timm writes a folder"),
        (["start.safetensors", "start.safetensors"], "is there already; choose another, or remove it first"),
        (["start.safetensors", "images", "--to", "timm"], "is there already"),
        (["nothing.safetensors", "out.safetensors"], "nothing.safetensors does not exist"),
        (["images", "out.safetensors"], "images holds no last.safetensors"),
        (["start.safetensors", "out", "--to", "keras"], "Got value: keras"),
        (["start.safetensors"], "destination"),
        (
            ["rotary.safetensors", "out", "--to", "timm"],
            "for timm's class, this model can't be converted: it has rotary",
        ),
        (["other.safetensors", "out.safetensors"], "say with --architecture of what model they are"),
        (["start.safetensors", "out", "--to", "timm", "--architecture", "timm:vit_tiny_patch16_224"], "unexpected"),
        (
            ["eps.safetensors", "out", "--to", "timm"],
            "the epsilon of the norms is 0.01, only 1e-06 or 1e-05; in Python",
        ),
    ],
)
def test_what_can_not_be_converted_ends_with_one_sentence_and_nothing_written(
    tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "start.safetensors")
    checkpoint(tmp_path / "rotary.safetensors", positions="rotary", heads=2)
    checkpoint(tmp_path / "eps.safetensors", norm_eps=0.01)
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "images").mkdir()
    before = (tmp_path / "start.safetensors").read_bytes()
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.safetensors").exists()
    assert (tmp_path / "start.safetensors").read_bytes() == before


def test_logits_that_differ_stop_a_conversion(tmp_path, monkeypatch):
    from vit_scratch.tasks import convert as module
    from vit_scratch.vision.conversion import ConversionError

    checkpoint(tmp_path / "start.safetensors")
    monkeypatch.setattr(module, "largest_difference", lambda *_: float("nan"))
    with pytest.raises(ConversionError, match=r"as written differ by nan, more than 0.0001"):
        convert(ConvertConfig(), str(tmp_path / "start.safetensors"), tmp_path / "out.safetensors")
