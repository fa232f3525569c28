"""Models in folders and by name: what was saved comes back, offline, and what is damaged is refused in a sentence."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vit_scratch.vision import hub
from vit_scratch.vision.timm_models import TimmModel
from vit_scratch.vision.vit import VisionTransformer, create_vit

SMALL = dict(dim=24, depth=2, heads=3, image_size=16, patch_size=4, num_classes=2)
KINDS = [
    dict(),
    dict(positions="rotary", heads=2, pooling="mean", stem="convolution", feed_forward_kernel=3, local_attention=5.0),
    dict(registers=2, prefix_positions="all", embedding_norm=True, final_norm=False, pooled_norm=True, layer_scale=0.1),
    dict(num_classes=0, image_size=(8, 12), any_size=True),
]
KNOWN = {
    "classes": ["cat", "Eule"],
    "preprocessing": {"mode": "RGB", "image_size": [16, 16], "interpolation": "bicubic", "mean": [0.5], "std": [0.2]},
    "results": ["91.25 % of 400 pictures of mine (seed 3)"],
}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    torch.manual_seed(0)


def make(cls=VisionTransformer, **changes):
    model = create_vit(None, cls, **SMALL | changes).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("changes", KINDS)
@pytest.mark.parametrize("cls", [VisionTransformer, TimmModel])
def test_a_model_comes_back_with_its_weights_and_all_that_is_known(tmp_path, cls, changes):
    model = make(cls, **changes)
    model.metadata = copy.deepcopy(KNOWN)
    model.train().save_pretrained(tmp_path / "saved")
    loaded = cls.from_pretrained(tmp_path / "saved")
    assert type(loaded) is cls
    assert not loaded.training
    assert loaded.metadata == KNOWN
    assert json.loads(json.dumps(loaded.arguments)) == json.loads(json.dumps(model.arguments))
    images = torch.randn(2, 3, *model.patch_embedding.image_size)
    assert torch.equal(loaded(images), model.eval()(images))
    loaded.save_pretrained(tmp_path / "again" / "saved")
    for name in ("config.json", "README.md", "model.safetensors"):
        assert (tmp_path / "again" / "saved" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
    assert len({path.stat().st_mode for path in (tmp_path / "saved").iterdir()}) == 1  # who may read one may read all


def test_changed_heads_and_sizes_are_saved_as_they_are(tmp_path):
    model = make()
    model.reset_classifier(5, "avg")
    model.set_input_size((8, 24))
    model.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 8, 24)
    assert torch.equal(VisionTransformer.from_pretrained(tmp_path)(images), model(images))


def test_the_card_says_what_is_known_and_nothing_else(tmp_path):
    model = make()
    model.save_pretrained(tmp_path / "bare")
    card = (tmp_path / "bare" / "README.md").read_text()
    assert "Not measured." in card
    assert 'VisionTransformer.from_pretrained("bare")' in card
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters, 24 wide, 2 deep, 3 heads" in card
    model.metadata = KNOWN
    model.save_pretrained(tmp_path / "full")
    card = (tmp_path / "full" / "README.md").read_text()
    for text in ("- 91.25 % of 400 pictures of mine (seed 3)", "cat, Eule", "interpolation: bicubic", "license: mit"):
        assert text in card
    assert "Not measured" not in card


def test_weights_of_half_precision_are_computed_in_float32(tmp_path):
    model = make()
    copy.deepcopy(model).half().save_pretrained(tmp_path)
    assert all(t.dtype == torch.float16 for t in load_file(tmp_path / "model.safetensors").values())
    loaded = VisionTransformer.from_pretrained(tmp_path)
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, model.state_dict()[name].half().float())


def test_a_model_of_the_hub_is_fetched_by_name(tmp_path, monkeypatch):
    model = make()
    model.save_pretrained(tmp_path)
    asked = []

    def fetch(repo_id, filename, **options):
        asked.append((repo_id, filename, options["revision"]))
        return str(tmp_path / filename)

    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", fetch)
    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    loaded = VisionTransformer.from_pretrained("someone/model", revision="v1")
    assert asked == [("someone/model", "config.json", "v1"), ("someone/model", "model.safetensors", "v1")]
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(images), model(images))


def test_models_still_pickle_copy_and_compile_like_any_module():
    model = make(registers=1)
    images = torch.randn(2, 3, 16, 16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.arguments == model.arguments
        assert other.arguments is not model.arguments
        assert torch.equal(other(images), model(images))
    assert make().metadata is not make().metadata


# What can't be loaded


def spoil(folder, how):
    config, weights = folder / "config.json", folder / "model.safetensors"
    values = json.loads(config.read_text())
    if how == "no configuration":
        config.unlink()
    elif how == "no JSON":
        config.write_text("{")
    elif how == "another configuration":
        config.write_text(json.dumps({"architectures": ["BertModel"]}))
    elif how == "no weights":
        weights.unlink()
    elif how == "damaged weights":
        weights.write_bytes(weights.read_bytes()[:50])
    elif how == "unknown argument":
        config.write_text(json.dumps(values | {"arguments": values["arguments"] | {"wide": 3}}))
    elif how == "another width":
        config.write_text(json.dumps(values | {"arguments": values["arguments"] | {"dim": 48}}))
    elif how == "a weight less":
        save_file({n: t for n, t in load_file(weights).items() if n != "head.bias"}, weights)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no configuration", "holds no config.json, so save_pretrained did not write it"),
        ("no JSON", "is no folder that can be read.*JSONDecodeError"),
        ("another configuration", "has no config.json of this package"),
        ("no weights", "model.safetensors does not exist"),
        ("damaged weights", "model.safetensors is damaged: "),
        ("unknown argument", "argument='wide' is unknown"),
        (
            "another width",
            r"other weights than those of the model in config.json: of 32 weights, 31 of another",
        ),
        ("a weight less", r"of 32 weights, 1 missing \(head.bias\)$"),
    ],
)
def test_folders_that_are_not_whole_are_refused(tmp_path, how, message):
    make().save_pretrained(tmp_path)
    spoil(tmp_path, how)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        VisionTransformer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["nobody/nothing", "cifar10-huge", "/nowhere/at/all"])
def test_a_name_that_is_nothing_says_what_it_could_have_been(name):
    with pytest.raises(ValueError, match="is no folder that can be read, none of the weights in this package|Repo id"):
        VisionTransformer.from_pretrained(name)


# The weights of the package


@pytest.mark.parametrize("name", hub.PACKAGED)
def test_the_weights_of_the_package_load_offline_are_small_and_say_where_they_are_from(name):
    code = (
        "import socket, sys\n"
        "socket.socket.connect = lambda *a: sys.exit('it connects')\n"
        "from vit_scratch import VisionTransformer\n"
        f"model = VisionTransformer.from_pretrained({name!r})\n"
        "print(len(model.metadata['classes']), model.num_classes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first == second
    folder = hub.WEIGHTS / name
    assert (folder / "model.safetensors").stat().st_size < 4e6
    model = VisionTransformer.from_pretrained(name)
    assert model.metadata["preprocessing"].keys() == {"mode", "image_size", "interpolation", "mean", "std"}
    card = (folder / "README.md").read_text()
    for sentence in model.metadata["results"]:
        assert sentence in card
    assert any("test images" in s and "seed" in s and "commit" in s for s in model.metadata["results"])
