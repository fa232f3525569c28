"""Our presets in timm: registration, features, layer decay, and timm's own way to train and to validate."""

import subprocess
import sys

import pytest
import timm
import torch
from timm.data import create_loader, create_transform, resolve_data_config
from timm.data.dataset import ImageDataset
from timm.data.readers.reader import Reader
from timm.models import load_checkpoint, model_parameters
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, accuracy
from torch import nn

from vit_scratch.vision.conversion import to_timm
from vit_scratch.vision.timm_models import ARGUMENTS, PREFIX, TimmModel, default_cfgs
from vit_scratch.vision.vit import PRESETS, create_vit, vit_arguments

SMALL = dict(embed_dim=24, depth=4, num_heads=3, img_size=16)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(**options):
    return timm.create_model("vit_scratch_tiny_patch4_32", **SMALL | options).eval()


IN_BOTH_ORDERS = """
import os, torch, torchvision  # which take long, once
for order in ("import vit_scratch, timm", "import timm, vit_scratch"):
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        exec(order)
        print(sorted(timm.list_models("vit_scratch_*")), flush=True)
        os._exit(0)
"""


def test_importing_both_in_any_order_registers_the_presets():
    done = subprocess.run([sys.executable, "-c", IN_BOTH_ORDERS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == 2 * [str(sorted(PREFIX + preset for preset in PRESETS))]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_of_timm_is_ours_with_the_input_and_the_classes_of_its_data(preset):
    with torch.device("meta"):
        model = timm.create_model(PREFIX + preset)
    size = vit_arguments(preset)["image_size"]
    expected = vit_arguments(preset, num_classes=10 if size == 32 else 1000, image_size=(size, size), class_token=True)
    assert model.arguments == expected
    assert type(model) is TimmModel
    data = resolve_data_config({}, model=model)
    assert data["input_size"] == (3, size, size)
    assert model.default_cfg["classifier"] == "head"
    assert data["mean"] == default_cfgs[PREFIX + preset].default.mean
    assert all(0 < value < 1 for value in (*data["mean"], *data["std"]))


def test_weights_and_logits_are_those_of_create_vit():
    model = make(num_classes=5, in_chans=2, drop_path_rate=0.1, global_pool="avg", reg_tokens=2, init_values=0.1)
    changes = dict(dim=24, depth=4, heads=3, image_size=16, num_classes=5, in_channels=2)
    ours = create_vit("tiny_patch4_32", **changes, pooling="mean", registers=2, layer_scale=0.1, drop_path=0.1)
    ours.load_state_dict(model.state_dict())
    images = torch.randn(2, 2, 16, 16)
    assert torch.equal(ours.eval()(images), model(images))
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in model.named_modules()]
    assert (model.global_pool, model.in_chans, model.num_classes) == ("avg", 2, 5)
    assert ARGUMENTS.keys() >= {"img_size", "in_chans", "drop_path_rate"}


def test_what_ours_does_not_know_is_refused():
    with pytest.raises(ValueError, match="argument='mlp_ratio' is unknown; choose from activation, "):
        make(mlp_ratio=2.0)
    with pytest.raises(ValueError, match="drop_rate drops elements of the pooled features"):
        make(drop_rate=0.1)
    with pytest.raises(ValueError, match="global_pool='map' is unknown; choose from token, avg"):
        make(global_pool="map")
    with pytest.raises(ValueError, match="patch_size=8 can't be changed"):
        make().set_input_size(patch_size=8)
    with pytest.raises(RuntimeError, match="No pretrained weights"):
        make(pretrained=True)
    assert make(drop_rate=0.0).num_classes == 10


# Features


@pytest.mark.parametrize("options", [dict(), dict(reg_tokens=2), dict(global_pool="avg"), dict(class_token=True)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("indices", [None, 1, 3, [0, 2], [-1, 1]])
def test_intermediate_outputs_equal_timms(options, norm, indices):
    if options == dict(class_token=True):
        options = dict(global_pool="avg", class_token=True)
    model = make(**options)
    theirs = to_timm(model).eval()
    images = torch.randn(2, 3, 16, 16)
    for output_fmt in ("NCHW", "NLC"):
        for prefix in (False, True):
            for only in (False, True):
                arguments = dict(return_prefix_tokens=prefix, norm=norm, output_fmt=output_fmt, intermediates_only=only)
                mine = model.forward_intermediates(images, indices, **arguments)
                expected = theirs.forward_intermediates(images, indices, **arguments)
                compare(mine, expected)
    for reshape in (False, True):
        mine = model.get_intermediate_layers(images, indices or 2, reshape, True, norm)
        compare(mine, theirs.get_intermediate_layers(images, indices or 2, reshape, True, norm))


def compare(first, second):
    if isinstance(first, torch.Tensor):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
    else:
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            compare(a, b)


def test_features_only_gives_maps_and_drops_what_they_do_not_need():
    images = torch.randn(2, 3, 16, 16)
    whole = make(reg_tokens=1)
    backbone = make(reg_tokens=1, features_only=True, out_indices=[0, 2])
    assert backbone.feature_info.channels() == [24, 24]
    assert backbone.feature_info.reduction() == [4, 4]
    assert len(backbone.model.encoder.layers) == 3
    assert not any(name.startswith(("head", "encoder.norm")) for name, _ in backbone.model.named_parameters())
    weights = {n: t for n, t in whole.state_dict().items() if n in backbone.model.state_dict()}
    backbone.model.load_state_dict(weights)
    expected = whole.forward_intermediates(images, [0, 2], intermediates_only=True)
    for mine, other in zip(backbone(images), expected, strict=True):
        assert mine.shape == (2, 24, 4, 4)
        assert torch.equal(mine, other)
    again = create_vit(**backbone.model.arguments)
    again.load_state_dict(weights)
    torch.testing.assert_close(again.eval()(images), backbone.model.eval()(images))


def test_a_size_that_timm_sets_is_taken():
    model = make()
    model.set_input_size(img_size=(8, 24))
    assert model(torch.randn(1, 3, 8, 24)).shape == (1, 10)
    assert resolve_data_config({"img_size": 24}, model=make(dynamic_img_size=True))["input_size"] == (3, 24, 24)


# timm's optimizer factory, loops and files


def test_learning_rates_decay_from_layer_to_layer():
    model, theirs = make(), timm.create_model("vit_tiny_patch16_224", depth=4, embed_dim=24, num_heads=3)
    groups = {}
    for name, m in (("ours", model), ("theirs", theirs)):
        optimizer = create_optimizer_v2(m, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
        names = {p: n for n, p in m.named_parameters()}
        groups[name] = {
            names[p]: (g["lr_scale"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]
        }
    ours = groups["ours"]
    assert ours["encoder.layers.3.attention.qkv.weight"] == (0.5, 0.05)
    assert ours["encoder.layers.0.norm1.weight"] == (0.5**4, 0.0)
    assert ours["positions"] == ours["class_token"] == (0.5**5, 0.0)
    assert ours["patch_embedding.projection.weight"] == (0.5**5, 0.05)
    assert ours["encoder.norm.weight"] == (0.5, 0.0)
    assert ours["head.weight"] == (1.0, 0.05)
    assert sorted(ours.values()) == sorted(groups["theirs"].values())


class Squares(Reader):
    """Pictures in one of two colours; the class is the colour."""

    def __getitem__(self, index):
        import io

        from PIL import Image

        picture = Image.new("RGB", (20, 20), (200 * (index % 2), 30, 200 - 200 * (index % 2)))
        data = io.BytesIO()
        picture.save(data, "png")
        data.seek(0)
        return data, index % 2

    def __len__(self):
        return 32

    def _filename(self, index, basename=False, absolute=False):
        return str(index)


def test_timms_loops_train_validate_and_load_one_of_our_models(tmp_path):
    model = make(num_classes=2)
    config = resolve_data_config(dict(img_size=16), model=model)
    dataset = ImageDataset("", reader=Squares(), transform=create_transform(**config, is_training=False))
    loader = create_loader(
        dataset, config["input_size"], 8, mean=config["mean"], std=config["std"], use_prefetcher=False, num_workers=0
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05, layer_decay=0.8)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=6, warmup_epochs=1, warmup_lr=1e-4)
    average, loss_function = ModelEmaV3(model, decay=0.5), nn.CrossEntropyLoss()
    model.set_grad_checkpointing()
    for epoch in range(6):
        model.train()
        for images, target in loader:
            loss = loss_function(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model_parameters(model, exclude_head=False), 1.0)
            optimizer.step()
            average.update(model)
        scheduler.step(epoch + 1)
    torch.save({"state_dict": model.state_dict(), "state_dict_ema": average.module.state_dict()}, tmp_path / "last.pth")

    for use_ema in (False, True):
        loaded = make(num_classes=2)
        load_checkpoint(loaded, str(tmp_path / "last.pth"), use_ema=use_ema)
        top1 = AverageMeter()
        with torch.inference_mode():
            for images, target in loader:
                output = loaded(images)
                top1.update(accuracy(output, target, topk=(1,))[0].item(), images.size(0))
        assert (top1.avg, top1.count) == (100.0, 32)


def test_a_folder_that_timm_saved_is_loaded_by_timm(tmp_path):
    model = make(num_classes=3, positions="rotary", reg_tokens=1)
    timm.models.save_for_hf(model, str(tmp_path))
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(images), model(images))


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_a_folder_that_timm_saved_has_what_was_changed_since(tmp_path, positions):
    model = make(num_classes=3, positions=positions)
    model.set_input_size(img_size=(8, 24))
    model.reset_classifier(5, global_pool="avg")
    timm.models.save_for_hf(model, str(tmp_path))
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert resolve_data_config({}, model=loaded)["input_size"] == (3, 8, 24)
    images = torch.randn(2, 3, 8, 24)
    assert torch.equal(loaded(images), model.eval()(images))
