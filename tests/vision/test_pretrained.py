"""Pretrained weights by name, from files and from state dicts: all of them, or a message that says what is wrong."""

import json
import pickle

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from vit_scratch.vision import pretrained
from vit_scratch.vision.conversion import ConversionError, to_timm, to_torchvision, to_transformers
from vit_scratch.vision.pretrained import build_theirs, fill, load_pretrained, read_tensors
from vit_scratch.vision.vit import create_vit

NAME = "timm:vit_tiny_patch16_224"
SMALL = dict(dim=24, depth=1, heads=3, image_size=16, patch_size=4, num_classes=7)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def tiny(monkeypatch):
    """The one architecture of these tests, smaller than it is."""
    create_model = timm.create_model

    def create(name, **options):
        if name == "vit_tiny_patch16_224":
            options = dict(img_size=16, patch_size=4, embed_dim=24, depth=2) | options
        return create_model(name, **options)

    monkeypatch.setattr(timm, "create_model", create)
    return create("vit_tiny_patch16_224", num_classes=5).eval()


def check(ours, theirs):
    images = torch.randn(2, 3, *ours.patch_embedding.image_size)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), atol=1e-5, rtol=1e-5)


def test_models_of_all_libraries_are_known_by_their_class():
    transformers = pytest.importorskip("transformers")
    ours = create_vit(**SMALL)
    for convert in (to_timm, to_torchvision):
        check(load_pretrained(convert(ours)), ours)
    theirs = to_transformers(ours)
    assert isinstance(theirs, transformers.PreTrainedModel)
    check(load_pretrained(theirs), ours)
    with pytest.raises(ConversionError, match="Linear is of torch; known are timm, torchvision, transformers"):
        load_pretrained(nn.Linear(1, 1))


@pytest.mark.parametrize("form", ["safetensors", "pth", "wrapped", "parallel", "state dict"])
def test_weights_are_read_from_every_kind_of_file_with_their_number_of_classes(tiny, tmp_path, form):
    weights, path = tiny.state_dict(), tmp_path / f"weights.{'safetensors' if form == 'safetensors' else 'pth'}"
    if form == "safetensors":
        save_file(weights, path)
    elif form == "parallel":
        torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, path)
    else:
        torch.save({"state_dict": weights} if form == "wrapped" else weights, path)
    source = weights if form == "state dict" else path
    ours = load_pretrained(source, NAME)
    assert ours.num_classes == 5
    check(ours, tiny)
    with pytest.raises(ValueError, match=r"do not say of what model they are; .* \(32 tensors: "):
        load_pretrained(source)


def test_weights_of_torchvision_take_its_architecture(monkeypatch, tmp_path):
    theirs = to_torchvision(create_vit(**SMALL))
    monkeypatch.setattr(
        torchvision.models,
        "get_model",
        lambda name, weights, num_classes: torchvision.models.VisionTransformer(
            16, 4, 1, 3, 24, 96, num_classes=num_classes
        ),
    )
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    check(load_pretrained(tmp_path / "weights.pth", "torchvision:vit_b_16"), theirs)


def test_folders_that_timm_and_transformers_saved_are_read(tmp_path):
    pytest.importorskip("transformers")
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=4)
    timm.models.save_for_hf(theirs, str(tmp_path / "timm"), safe_serialization=True)
    check(load_pretrained(tmp_path / "timm"), theirs)
    ours = create_vit(**SMALL)
    to_transformers(ours).save_pretrained(tmp_path / "transformers")
    check(load_pretrained(str(tmp_path / "transformers")), ours)
    check(load_pretrained(f"transformers:{tmp_path / 'transformers'}"), ours)


def test_a_name_loads_the_published_weights(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(timm, "create_model", lambda name, **options: asked.append((name, options)) or tiny)
    check(load_pretrained("timm:vit_tiny_patch16_224.augreg_in21k"), tiny)
    assert asked == [("vit_tiny_patch16_224.augreg_in21k", {"pretrained": True})]


def test_weights_that_can_not_be_fetched_give_one_sentence(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route to host\nand much more")

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(
        ValueError, match=f"the weights of {NAME} could not be fetched: ConnectionError: no route to host$"
    ):
        load_pretrained(NAME)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "vit_tiny_patch16_224",
            "'vit_tiny_patch16_224' is no name of a model; give LIBRARY:NAME, such as timm:vit_tiny",
        ),
        ("keras:vit", "with one of timm, torchvision, transformers"),
        ("timm:", "'timm:' is no name of a model"),
        ("timm:vit_tinny_patch16_224", r"timm knows no vit_tinny_patch16_224; did you mean vit_tiny_patch16_224\?"),
        ("torchvision:vit_b_17", r"torchvision knows no vit_b_17; did you mean vit_b_16\?"),
        ("torchvision:zzz", "torchvision knows no zzz$"),
    ],
)
def test_names_that_are_none_are_refused_with_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        build_theirs(name, pretrained=False)
    with pytest.raises(ValueError, match=message):
        load_pretrained({"a": torch.zeros(1)}, name)


def test_a_library_that_is_not_there_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="transformers is not installed; install it with: pip install transformers"):
        build_theirs("transformers:google/vit-base-patch16-224", pretrained=True)


def test_a_model_of_another_kind_is_refused_by_name():
    with pytest.raises(ConversionError, match="timm's ResNet can't be converted"):
        load_pretrained(timm.create_model("resnet18"))


# Weights that do not fit


def test_wrong_weights_are_refused_with_counts_and_the_first_names(tiny):
    weights = tiny.state_dict()
    some = {n: t for n, t in weights.items() if n != "norm.weight"} | {"extra": torch.zeros(2)}
    with pytest.raises(ConversionError, match=r"of 32 weights, 1 missing \(norm.weight\) and 1 unexpected \(extra\)$"):
        load_pretrained(some, NAME)
    others = {f"encoder.{n}": t for n, t in weights.items()}
    with pytest.raises(
        ConversionError, match=r"of 32 weights, 32 missing \(cls_token, pos_embed, patch_embed.proj.weight, ...\)"
    ):
        load_pretrained(others, NAME)
    with pytest.raises(ConversionError, match=r"none fits; .* of 32 weights, 32 missing"):
        load_pretrained(others, NAME, incomplete=True)
    longer = weights | {"pos_embed": torch.zeros(1, 26, 24)}
    with pytest.raises(
        ConversionError,
        match=r"of 32 weights, 1 of another shape \(pos_embed \(1, 26, 24\) instead of \(1, 17, 24\)\)$",
    ):
        load_pretrained(longer, NAME)


def test_a_part_is_loaded_on_request_only_and_counted(tiny):
    weights = tiny.state_dict()
    part = {n: t + 1 for n, t in weights.items() if not n.startswith("blocks.1.")}
    part["pos_embed"] = torch.zeros(1, 26, 24)
    before = {n: t.clone() for n, t in weights.items()}
    with pytest.warns(
        UserWarning, match=r"^loaded 19 of 32 weights; as they were at first: pos_embed, blocks.1.norm1.weight"
    ):
        fill(tiny, part, incomplete=True)
    for name, tensor in tiny.state_dict().items():
        changed = name in part and name != "pos_embed"
        assert torch.equal(tensor, before[name] + changed)


# Files that are none


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_executed(tmp_path):
    torch.save({"weight": Evil(tmp_path / "harm")}, tmp_path / "evil.pth")
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(Evil(tmp_path / "harm")))
    for name in ("evil.pth", "evil.bin"):
        with pytest.raises(
            ValueError, match="holds more than tensors and plain values, and nothing in a file is executed"
        ):
            read_tensors(tmp_path / name)
    assert not (tmp_path / "harm").exists()


def saved_by_transformers(folder, **options):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=32
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder, **options)


def test_nothing_in_a_folder_of_another_library_is_executed(tmp_path):
    folders = [tmp_path / "timm", tmp_path / "transformers"]
    timm.models.save_for_hf(
        timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=3, img_size=32), str(folders[0])
    )
    saved_by_transformers(folders[1])
    for folder in folders:
        (folder / "model.safetensors").unlink(missing_ok=True)
        torch.save({"weight": Evil(tmp_path / "harm")}, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=f"the weights in {folder} can't be read: .*nothing in a file is executed"):
            load_pretrained(folder)
    assert not (tmp_path / "harm").exists()


def test_code_that_comes_with_a_folder_is_not_executed(tmp_path):
    saved_by_transformers(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    code = f"import os; os.mkdir({str(tmp_path / 'harm')!r})"
    (tmp_path / "configuration.py").write_text(code)
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "configuration.Evil"}}))
    load_pretrained(tmp_path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["../elsewhere/model.safetensors", "/etc/passwd", "a/b.safetensors", 3])
def test_a_folder_does_not_lead_outside_of_itself(tmp_path, name):
    saved_by_transformers(tmp_path, max_shard_size="10KB")
    load_pretrained(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {first: name}}))
    with pytest.raises(ValueError, match=f"index.json names a file that is not in its folder: {name}"):
        load_pretrained(tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is damaged: it does not say which weights are in which file"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("content", [b"", b"nothing", b"\x00" * 100])
@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
def test_damaged_files_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} can't be read: it is damaged, or"):
        load_pretrained(tmp_path / name, NAME)


def test_files_that_hold_no_weights_or_are_not_there_are_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "state.pth")
    with pytest.raises(ValueError, match="state.pth holds no weights: they are tensors by name"):
        load_pretrained(tmp_path / "state.pth", NAME)
    with pytest.raises(ValueError, match="nothing.pth does not exist"):
        load_pretrained(tmp_path / "nothing.pth", NAME)
