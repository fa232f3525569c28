"""Checks each corruption against its definition, and how published data sets are read and refused."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from vit_scratch.evaluation import robustness
from vit_scratch.evaluation.robustness import CORRUPTIONS, STRENGTHS, read_cifar10_1, read_cifar10_c


def picture(channels=3, side=32, seed=0):
    """A smooth image and two more, bytes (3, C, side, side)."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (3, channels, 8, 8)).astype(np.float32)
    large = torch.nn.functional.interpolate(torch.from_numpy(small), (side, side), mode="bicubic")
    return large.clamp(0, 255).to(torch.uint8)


def error(images, changed):
    return (images.float() - changed.float()).square().mean().sqrt().item()


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_is_stronger_from_step_to_step_and_leaves_its_input_alone(name, channels):
    change, strengths = CORRUPTIONS[name]
    assert len(strengths) == STRENGTHS
    images = picture(channels)
    before, errors = images.clone(), []
    for strength in strengths:
        changed = change(images, strength=strength)
        assert (changed.dtype, changed.shape) == (torch.uint8, images.shape)
        assert changed.equal(change(images, strength=strength))
        errors.append(error(images[:, :3], changed[:, :3]))
        if channels == 4 and name in ("jpeg", "bright", "dark", "contrast"):
            assert changed[:, 3].equal(images[:, 3])
    assert images.equal(before)
    assert errors[0] > 0.5
    assert errors == sorted(errors)


@pytest.mark.parametrize("side", [2, 4, 8, 224])
def test_all_take_images_of_any_size(side):
    for change, strengths in CORRUPTIONS.values():
        for strength in strengths:
            assert change(picture(3, side), strength=strength).shape == (3, 3, side, side)


def test_noise_has_its_deviation():
    grey = torch.full((8, 3, 32, 32), 128, dtype=torch.uint8)
    for strength in (0.04, 0.1):
        found = (robustness.noise(grey, strength).float() - 128).std().item()
        assert found == pytest.approx(strength * 255, rel=0.03)


def test_jpeg_is_pillow_s():
    image = picture()[:1]
    buffer = io.BytesIO()
    Image.fromarray(image[0].permute(1, 2, 0).numpy()).save(buffer, "JPEG", quality=50)
    theirs = torch.from_numpy(np.array(Image.open(buffer))).permute(2, 0, 1)[None]
    assert robustness.jpeg(image, 50).equal(theirs)
    assert robustness.jpeg(image[:0], 50).shape == (0, 3, 32, 32)


def test_brightness_and_contrast_are_pillow_s():
    image = picture()[:1]
    pillow = Image.fromarray(image[0].permute(1, 2, 0).numpy())
    for ours, theirs in (
        (robustness.brightness, ImageEnhance.Brightness),
        (robustness.contrast, ImageEnhance.Contrast),
    ):
        for strength in (0.3, 0.75, 1.4):
            expected = np.asarray(theirs(pillow).enhance(strength)).astype(int)
            found = ours(image, strength)[0].permute(1, 2, 0).numpy().astype(int)
            assert np.abs(found - expected).max() <= 1


def test_a_blur_keeps_the_mean_and_spreads_a_point():
    point = torch.zeros(1, 1, 33, 33, dtype=torch.uint8)
    point[0, 0, 16, 16] = 255
    blurred = robustness.blur(point, 1.0 * 32 / 33)[0, 0].double()  # a deviation of one pixel
    places = torch.arange(33) - 16.0
    gauss = torch.exp(-(places**2) / 2)
    expected = 255 * torch.outer(gauss, gauss) / gauss.sum() ** 2
    assert (blurred - expected).abs().max() <= 1


def test_pixels_become_coarse():
    coarse = robustness.pixelate(picture(3, 32), 0.25)
    assert coarse.equal(coarse[..., ::4, ::4].repeat_interleave(4, -1).repeat_interleave(4, -2))


@pytest.fixture
def small(monkeypatch):
    """CIFAR-10-C with 50 images in a file instead of 50,000."""
    monkeypatch.setattr(robustness, "PUBLISHED", 50)


def test_published_images_are_read(tmp_path, small):
    random = np.random.default_rng(0)
    fog, labels = random.integers(0, 256, (50, 32, 32, 3), np.uint8), random.integers(0, 10, 50, np.uint8)
    np.save(tmp_path / "fog.npy", fog)
    np.save(tmp_path / "labels.npy", labels)
    images, found = read_cifar10_c(tmp_path)
    assert list(images) == ["fog"]
    assert (images["fog"] == fog).all()
    assert (found == labels).all()
    newer = random.integers(0, 256, (2000, 32, 32, 3), np.uint8)
    np.save(tmp_path / "cifar10.1_v6_data.npy", newer)
    np.save(tmp_path / "cifar10.1_v6_labels.npy", np.arange(2000, dtype=np.int32) % 10)
    images_1, labels_1 = read_cifar10_1(tmp_path)
    assert (images_1 == newer).all()
    assert labels_1.tolist() == [i % 10 for i in range(2000)]


def test_published_images_that_are_missing_or_wrong_are_refused(tmp_path, small):
    for reader, word in ((read_cifar10_c, "zenodo"), (read_cifar10_1, "github")):
        for folder in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(ValueError, match=word):
                reader(folder)
    np.save(tmp_path / "labels.npy", np.zeros(50, np.uint8))
    wrong = {
        "float64": np.zeros((50, 32, 32, 3)),
        r"\(49, 32, 32, 3\)": np.zeros((49, 32, 32, 3), np.uint8),
        "int64": np.zeros((50, 32, 32, 3), np.int64),
    }
    for word, array in wrong.items():
        np.save(tmp_path / "fog.npy", array)
        with pytest.raises(ValueError, match=f"fog.npy holds .*{word}"):
            read_cifar10_c(tmp_path)
    np.save(tmp_path / "fog.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="fog.npy is damaged, or no array"):
        read_cifar10_c(tmp_path)
    (tmp_path / "fog.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match="fog.npy is damaged, or no array"):
        read_cifar10_c(tmp_path)
