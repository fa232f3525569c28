"""Checks augmentation against slow references by hand, image by image, and that it is a function of its seed."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

from vit_scratch.data.augmentation import (
    BatchTransform,
    SmallerFirst,
    erase,
    sample_transform,
    seeded,
    shift_and_flip,
)
from vit_scratch.tasks.classification import smoothed_cross_entropy

MODES = {"reflect": "reflect", "zero": "constant"}


def random_bytes(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def reference_shift_and_flip(images, shift, flip, padding="reflect"):
    """Pad, cut out, mirror: one image after the other, with the draws that the function makes."""
    batch, _, height, width = images.shape
    down = torch.randint(-shift, shift + 1, (batch, 1)).flatten().tolist()
    right = torch.randint(-shift, shift + 1, (batch, 1)).flatten().tolist()
    mirrored = (torch.rand(batch, 1) < 0.5).flatten().tolist() if flip else [False] * batch
    out = []
    for image, dy, dx, mirror in zip(images.numpy(), down, right, mirrored, strict=True):
        padded = np.pad(image, ((0, 0), (shift, shift), (shift, shift)), mode=MODES[padding])
        cut = padded[:, shift + dy : shift + dy + height, shift + dx : shift + dx + width]
        out.append(cut[:, :, ::-1] if mirror else cut)
    return np.stack(out)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(("height", "width", "shift"), [(8, 8, 2), (5, 9, 4), (32, 32, 4), (7, 3, 2), (6, 6, 0)])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("padding", ["reflect", "zero"])
def test_shift_and_flip_equals_the_reference(channels, height, width, shift, flip, padding):
    images = random_bytes(23, channels, height, width)
    for seed in range(3):
        with seeded(seed):
            result = shift_and_flip(images, shift, flip, padding)
        with seeded(seed):
            expected = reference_shift_and_flip(images, shift, flip, padding)
        np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.parametrize(("side", "shift"), [(4, 4), (4, 9), (1, 1), (2, 3)])
def test_a_shift_as_large_as_the_image_is_refused_or_reflects_again(side, shift):
    images, refusals = random_bytes(50, 2, side, side), []
    for seed in range(5):
        try:
            with seeded(seed):
                result = shift_and_flip(images, shift, True)
        except ValueError as error:
            refusals.append(str(error))
            continue
        with seeded(seed):
            expected = reference_shift_and_flip(images, shift, True)
        np.testing.assert_array_equal(result.numpy(), expected)
    assert all(str(shift) in message for message in refusals)


def test_all_offsets_and_both_mirrorings_are_reached():
    image = torch.arange(49, dtype=torch.uint8).view(1, 1, 7, 7)
    with seeded(0):
        result = shift_and_flip(image.expand(2000, -1, -1, -1), 2, True)
    centres = result[:, 0, 3, 3].long()
    mirrored = result[:, 0, 3, 2].long() > centres
    seen = {(c // 7 - 3, c % 7 - 3, m) for c, m in zip(centres.tolist(), mirrored.tolist(), strict=True)}
    assert seen == {(y, x, m) for y in range(-2, 3) for x in range(-2, 3) for m in (False, True)}
    assert 900 < mirrored.sum() < 1100


def test_no_shift_and_no_flip_changes_nothing():
    images = random_bytes(5, 3, 6, 6)
    assert torch.equal(shift_and_flip(images, 0, False), images)


def test_the_images_of_a_batch_draw_for_themselves():
    images = random_bytes(1, 3, 8, 8).expand(64, -1, -1, -1)
    with seeded(0):
        moved = shift_and_flip(images, 2, False)
    with seeded(0):
        mirrored = shift_and_flip(images, 0, True)
    with seeded(0):
        erased = erase(images.float() + 1, 1.0)
    assert len(moved.flatten(1).unique(dim=0)) > 15
    assert len(mirrored.flatten(1).unique(dim=0)) == 2
    assert len(erased.flatten(1).unique(dim=0)) > 50


def rectangles(images):
    """(top, left, height, width) of the zeros of each image, None where there are none; they must fill it."""
    found = []
    for image in images:
        zero = (image == 0).all(0)
        assert torch.equal(zero, (image == 0).any(0))
        if not zero.any():
            found.append(None)
            continue
        rows, columns = zero.any(1).nonzero().flatten(), zero.any(0).nonzero().flatten()
        top, left, bottom, right = rows[0].item(), columns[0].item(), rows[-1].item() + 1, columns[-1].item() + 1
        assert zero[top:bottom, left:right].all()
        assert zero.sum() == (bottom - top) * (right - left)
        found.append((top, left, bottom - top, right - left))
    return found


@pytest.mark.parametrize(("height", "width"), [(32, 32), (40, 20)])
def test_erased_are_rectangles_of_the_right_area_and_shape(height, width):
    images = random_bytes(2000, 2, height, width).float() + 1
    with seeded(1):
        erased = erase(images, 1.0)
    kept = erased != 0
    assert torch.equal(erased[kept], images[kept])
    shares = []
    for rectangle in rectangles(erased):
        _, _, h, w = rectangle
        # Sides are rounded to whole pixels, and end at the image's.
        assert (h - 0.5) * (w - 0.5) <= 0.33 * height * width
        assert (h + 0.5) * (w + 0.5) >= 0.02 * height * width
        assert w == width or (h - 0.5) / (w + 0.5) <= 3.3
        assert h == height or (h + 0.5) / (w - 0.5) >= 0.3
        shares.append(h * w / height / width)
    if height == width:
        assert np.mean(shares) == pytest.approx(0.175, abs=0.01)
        assert min(shares) < 0.03
        assert max(shares) > 0.31
    covered = ~kept.all(1)
    for row in (0, -1):
        for column in (0, -1):
            assert covered[:, row, column].any()


@pytest.mark.parametrize(("probability", "low", "high"), [(0.0, 0, 0), (0.25, 440, 560), (1.0, 2000, 2000)])
def test_erasing_has_its_probability(probability, low, high):
    with seeded(0):
        erased = erase(torch.ones(2000, 1, 8, 8), probability)
    assert low <= sum(r is not None for r in rectangles(erased)) <= high


def test_normalisation_by_hand():
    images = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).view(1, 2, 1, 2)
    x, labels = BatchTransform([0.5, 0.2], [0.25, 0.4])(images, torch.tensor([3]))
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.flatten(), torch.tensor([-2.0, -1.2, 2.0, 0.5]), rtol=1e-6, atol=1e-6)
    assert labels.tolist() == [3]


def test_erasing_comes_after_normalisation():
    transform = BatchTransform([0.5], [0.25], erase=1.0)
    x, _ = transform(torch.full((50, 1, 8, 8), 255, dtype=torch.uint8), torch.zeros(50, dtype=torch.long), seed=2)
    assert sorted(x.unique().tolist()) == [0.0, 2.0]
    assert None not in rectangles(x)


def mixed(kind, batch, seed, size=8):
    """Images and labels before and after MixUp or CutMix, each image of its own class."""
    images = random_bytes(batch, 3, size, size, seed=seed)
    plain = BatchTransform([0.5] * 3, [0.25] * 3)(images, torch.arange(batch))[0]
    transform = BatchTransform([0.5] * 3, [0.25] * 3, **{kind: 1.0}, num_classes=max(batch, 2))
    return plain, *transform(images, torch.arange(batch), seed)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
@pytest.mark.parametrize("batch", [1, 2, 7, 16])
def test_mixed_labels_are_probabilities_of_the_two_images_they_name(kind, batch):
    for seed in range(10):
        plain, x, y = mixed(kind, batch, seed)
        other = plain.roll(1, 0)
        assert y.shape == (batch, max(batch, 2))
        torch.testing.assert_close(y.sum(1), torch.ones(batch), rtol=0, atol=1e-6)
        own = y[range(batch), range(batch)]
        before = y[range(batch), [i - 1 for i in range(batch)]] if batch > 1 else 1 - own
        share = own[0].item() if batch > 1 else 1.0
        torch.testing.assert_close(own, torch.full((batch,), share), rtol=0, atol=1e-6)
        torch.testing.assert_close(before, torch.full((batch,), 1 - share), rtol=0, atol=1e-6)
        if kind == "mixup":
            torch.testing.assert_close(x, share * plain + (1 - share) * other, rtol=1e-5, atol=1e-5)
        else:
            from_own, from_other = (x == plain).all(1), (x == other).all(1)
            assert (from_own | from_other).all()
            if batch > 1:
                assert from_own.float().mean((1, 2)).tolist() == pytest.approx([share] * batch, abs=1e-6)


def test_cutmix_puts_in_a_rectangle():
    seen = set()
    for seed in range(20):
        plain, x, _ = mixed("cutmix", 2, seed)
        (rectangle,) = rectangles((x == plain).all(1, keepdim=True).float()[:1])
        seen.add(rectangle)
    assert len(seen) > 10


@pytest.mark.parametrize(("kind", "lowest"), [("mixup", 0.1), ("cutmix", 0.5)])  # a rectangle is cut off at the edge
def test_mixing_shares_vary(kind, lowest):
    shares = [mixed(kind, 2, seed)[2][0, 0].item() for seed in range(100)]
    assert min(shares) < lowest
    assert max(shares) > 0.9


def test_with_mixup_and_cutmix_each_batch_takes_one_of_the_two():
    images, labels = random_bytes(2, 1, 16, 16), torch.arange(2)
    plain = BatchTransform([0.5], [0.25])(images, labels)[0]
    transform = BatchTransform([0.5], [0.25], mixup=1.0, cutmix=1.0, num_classes=2)
    pasted = 0
    for seed in range(60):
        x, y = transform(images, labels, seed)
        pasted += ((x == plain) | (x == plain.roll(1, 0))).all().item()
        torch.testing.assert_close(y.sum(1), torch.ones(2))
    assert 15 < pasted < 45


FULL = dict(shift=2, flip=True, erase=0.5, mixup=0.4, cutmix=1.0, num_classes=5)


def test_a_batch_is_a_function_of_its_seed():
    images, labels = random_bytes(7, 3, 8, 8), torch.arange(7) % 5
    transform = BatchTransform([0.5] * 3, [0.25] * 3, **FULL)
    torch.manual_seed(1)
    x1, y1 = transform(images, labels, seed=5)
    torch.manual_seed(2)
    x2, y2 = transform(images, labels, seed=5)
    x3, _ = transform(images, labels, seed=6)
    assert torch.equal(x1, x2)
    assert torch.equal(y1, y2)
    assert not torch.equal(x1, x3)


def test_the_bytes_of_the_data_set_are_left_alone():
    images, labels = random_bytes(6, 3, 8, 8), torch.arange(6) % 5
    kept_images, kept_labels = images.clone(), labels.clone()
    BatchTransform([0.5] * 3, [0.25] * 3, **FULL)(images, labels, seed=1)
    assert torch.equal(images, kept_images)
    assert torch.equal(labels, kept_labels)


def test_seeded_restores_the_global_generator_also_after_an_error():
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    with seeded(3):
        inside = torch.rand(4)
    with pytest.raises(KeyError), seeded(4):
        torch.rand(100)
        raise KeyError
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(inside, torch.rand(4, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    "options",
    [FULL, dict(policy="randaugment"), dict(policy="trivialaugment", shift=1), dict(cutmix=1.0, num_classes=5), {}],
)
def test_the_images_of_a_part_of_a_batch_are_augmented_as_in_the_whole(options):
    images, labels = random_bytes(11, 3, 8, 8), torch.arange(11) % 5
    transform = BatchTransform([0.5] * 3, [0.25] * 3, **options)
    for seed in range(5):
        whole, whole_labels = transform(images, labels, seed)
        for places in (range(11), range(3, 7), [10, 0, 1], [5], range(6, 11)):
            x, y = transform(images[places], labels[places], seed, torch.tensor(places), 11)
            checked = slice(1 if transform.mix else 0, None)  # the first is mixed with one that is not here
            assert torch.equal(x[checked], whole[places][checked])
            assert torch.equal(y[checked], whole_labels[places][checked])
        empty, _ = transform(images[:0], labels[:0], seed, torch.arange(0), 11)
        assert empty.shape == (0, 3, 8, 8)


def test_a_batch_transform_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    BatchTransform([0.5] * 3, [0.25] * 3, **FULL)(random_bytes(4, 3, 8, 8), torch.arange(4), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
@pytest.mark.parametrize("channels", [1, 3])
def test_policies_are_torchvisions_for_groups_of_four(policy, channels):
    images, labels = random_bytes(10, channels, 16, 16), torch.arange(10)
    transform = BatchTransform([0.5] * channels, [0.25] * channels, policy=policy, magnitude=15)
    single = {"randaugment": v2.RandAugment(2, 15), "trivialaugment": v2.TrivialAugmentWide()}[policy]
    results = []
    for seed in range(10):
        with seeded(seed):
            group_seeds = torch.randint(2**31, (3,)).tolist()
        expected = []
        for number, image in enumerate(images):
            with seeded(group_seeds[number // 4]):
                expected.append(single(image))
        x, y = transform(images, labels, seed)
        torch.testing.assert_close(x, (torch.stack(expected).float() / 255 - 0.5) / 0.25)
        assert torch.equal(y, labels)
        results.append(torch.stack(expected))
    changed = [not torch.equal(a, b) for r in results for a, b in zip(r, images, strict=True)]
    assert sum(changed) > 50
    assert len(torch.stack(results)[:, 0].flatten(1).unique(dim=0)) > 5


def test_a_larger_magnitude_changes_more():
    images, changes = random_bytes(64, 3, 16, 16), []
    for magnitude in (1, 25):
        transform = BatchTransform([0.0] * 3, [1.0] * 3, policy="randaugment", magnitude=magnitude)
        x, _ = transform(images, torch.zeros(64), 0)
        changes.append((x - images / 255).abs().mean().item())
    assert changes[1] > 1.5 * changes[0]


def test_nothing_to_do_to_an_image_is_none():
    assert sample_transform((8, 8)) is None


def test_a_random_crop_keeps_at_least_its_share():
    # The value is the row in the upper, the column in the lower channel, so that a crop's extent can be read off.
    lines = torch.arange(0, 240, 4, dtype=torch.uint8)
    image = torch.stack([lines.view(-1, 1).expand(60, 60), lines.view(1, -1).expand(60, 60)])
    transform = sample_transform((20, 30), min_crop_area=0.5)
    areas = []
    for seed in range(100):
        with seeded(seed):
            crop = transform(image)
        assert crop.shape == (2, 20, 30)
        rows, columns = crop[0].float(), crop[1].float()
        # Distance between the middles of the outermost output pixels, taken to the whole crop.
        height = (rows.max() - rows.min()).item() / 4 * 20 / 19
        width = (columns.max() - columns.min()).item() / 4 * 30 / 29
        areas.append(height * width / 3600)
    assert min(areas) > 0.45
    assert max(areas) > 0.85
    assert len({round(a, 3) for a in areas}) > 50


class Logits(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("soft", [False, True])
def test_label_smoothing_is_applied_once_and_the_loss_summed(smoothing, soft):
    generator = torch.Generator().manual_seed(0)
    logits, hard = 3 * torch.randn(9, 5, generator=generator), torch.randint(0, 5, (9,), generator=generator)
    other = torch.randint(0, 5, (9,), generator=generator)
    labels = 0.7 * F.one_hot(hard, 5).float() + 0.3 * F.one_hot(other, 5).float() if soft else hard
    loss, correct = smoothed_cross_entropy(smoothing, Logits(), logits, labels)

    expected, right = 0.0, 0
    for x, first, second in zip(logits.double().numpy(), hard.tolist(), other.tolist(), strict=True):
        log_probability = x - x.max() - np.log(np.exp(x - x.max()).sum())
        target = np.zeros(5)
        target[first] += 0.7 if soft else 1.0
        target[second] += 0.3 if soft else 0.0
        expected -= (((1 - smoothing) * target + smoothing / 5) * log_probability).sum()
        right += int(x.argmax() == first)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert correct.item() == right
    assert not correct.is_floating_point()


def test_mixed_batches_train_with_odd_sizes():
    transform = BatchTransform([0.5] * 3, [0.25] * 3, mixup=0.8, cutmix=1.0, num_classes=5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5))
    for batch in (1, 7):
        x, y = transform(random_bytes(batch, 3, 8, 8), torch.arange(batch) % 5, seed=batch)
        loss, correct = smoothed_cross_entropy(0.1, model, x, y)
        loss.backward()
        probability = model(x).double().log_softmax(1)
        target = 0.9 * y.double() + 0.02
        assert loss.item() == pytest.approx(-(target * probability).sum().item(), rel=1e-5)
        assert 0 <= correct.item() <= batch
        assert model[1].weight.grad.abs().sum() > 0


def test_smaller_images_come_first_for_their_shares_of_the_updates():
    stages = SmallerFirst([((2, 3), 0.5), ((4, 4), 0.25)])
    images = torch.randn(2, 3, 8, 6)
    sizes = [tuple(stages(images, update / 8).shape[2:]) for update in range(8)]
    assert sizes == [(2, 3)] * 4 + [(4, 4)] * 2 + [(8, 6)] * 2
    assert stages(images, 0.75) is images


def test_smaller_images_are_averages_of_the_pixels_under_a_triangle():
    image = torch.randn(1, 2, 8, 8)
    small = SmallerFirst([((4, 4), 0.5)])(image, 0.0)[0].double()
    weights = np.zeros((4, 8))
    for i in range(4):  # half the size: a triangle two pixels of the large image wide on each side
        for j in range(8):
            weights[i, j] = max(0.0, 1 - abs((j + 0.5) - (2 * i + 1)) / 2)
    weights /= weights.sum(1, keepdims=True)
    expected = weights @ image[0].double().numpy() @ weights.T
    np.testing.assert_allclose(small.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("size", [(16, 24), (7, 48), (31, 5), (40, 20)])
def test_smaller_images_are_those_of_interpolate(size):
    images = torch.randn(3, 2, 32, 48)
    expected = F.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)
    torch.testing.assert_close(SmallerFirst([(size, 1.0)])(images, 0.0), expected, rtol=0, atol=1e-5)
