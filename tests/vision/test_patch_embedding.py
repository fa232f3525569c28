"""Patch embedding and convolutional stem against the same by hand; sizes that do not fit."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from vit_scratch.vision.patch_embedding import ConvolutionalStem, PatchEmbedding, as_pair

SIZES = pytest.mark.parametrize(
    ("image_size", "patch_size", "channels", "grid"),
    [
        (8, 4, 3, (2, 2)),
        ((24, 48), (4, 8), 3, (6, 6)),
        ((12, 8), 4, 1, (3, 2)),
        (9, (3, 9), 5, (3, 1)),
        ((4, 6), 1, 2, (4, 6)),
        (16, 16, 4, (1, 1)),
    ],
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@SIZES
def test_patch_embedding_equals_a_convolution_with_stride_and_its_gradients(image_size, patch_size, channels, grid):
    embedding = PatchEmbedding(image_size, patch_size, channels, 7)
    assert embedding.grid == grid
    size, patch = as_pair("image_size", image_size), as_pair("patch_size", patch_size)
    kernel = embedding.projection.weight.view(7, channels, *patch)
    results = []
    for convolve in (False, True):
        images = torch.linspace(-1, 1, 2 * channels * size[0] * size[1]).sin().view(2, channels, *size)
        images = (images * 3).requires_grad_()
        if convolve:
            output = F.conv2d(images, kernel, embedding.projection.bias, stride=patch).flatten(2).transpose(1, 2)
        else:
            output = embedding(images)
        embedding.zero_grad()
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
        results.append([output, images.grad, embedding.projection.weight.grad.clone()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@SIZES
def test_each_token_is_the_linear_map_of_its_own_patch_in_reading_order(image_size, patch_size, channels, grid):
    embedding = PatchEmbedding(image_size, patch_size, channels, 5)
    (height, width), (rows, columns) = embedding.patch_size, grid
    images = torch.randn(2, channels, *embedding.image_size)
    tokens = embedding(images)
    assert tokens.shape == (2, rows * columns, 5)
    for row, column in itertools.product(range(rows), range(columns)):
        patch = images[:, :, row * height : (row + 1) * height, column * width : (column + 1) * width]
        pixels = torch.stack([patch[:, c, y, x] for c in range(channels) for y in range(height) for x in range(width)])
        expected = pixels.T @ embedding.projection.weight.T + embedding.projection.bias
        torch.testing.assert_close(tokens[:, row * columns + column], expected, atol=1e-5, rtol=1e-5)


def test_every_pixel_reaches_exactly_the_token_of_its_cell():
    embedding = PatchEmbedding((6, 8), (3, 2), 2, 4)
    base = embedding(torch.zeros(1, 2, 6, 8))
    for c, y, x in itertools.product(range(2), range(6), range(8)):
        images = torch.zeros(1, 2, 6, 8)
        images[0, c, y, x] = 1.0
        changed = (embedding(images) != base).any(dim=-1)[0].nonzero().flatten().tolist()
        assert changed == [(y // 3) * 4 + x // 2]


def test_images_are_unchanged_and_leaves_get_gradients():
    embedding, images = PatchEmbedding(8, 4, 3, 5), torch.randn(2, 3, 8, 8, requires_grad=True)
    before = images.detach().clone()
    embedding(images).sum().backward()
    assert torch.equal(images, before)
    assert (images.grad != 0).all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(8, 8), (16, 24)])
@pytest.mark.parametrize(("patch", "channels", "dim"), [(1, 2, 6), (2, 1, 6), (4, 3, 12), (8, 3, 8)])
def test_a_convolutional_stem_equals_its_formula(patch, channels, dim, size, training):
    stem = ConvolutionalStem(8, patch, channels, dim, any_size=True).train(training)
    for name, tensor in stem.state_dict().items():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5) if "running_var" in name else tensor.normal_(0.1, 0.5)
    images = torch.randn(3, channels, *size)
    before, x, width = images.clone(), images, dim // patch
    kernels = [m for m in stem.modules() if isinstance(m, torch.nn.Conv2d)]
    norms = [m for m in stem.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(kernels) == len(norms) == patch.bit_length()
    expected_statistics = []
    for i, (kernel, norm) in enumerate(zip(kernels, norms, strict=True)):
        x = F.conv2d(x, kernel.weight, padding=1)
        assert x.shape[1] == width * 2**i
        if i:
            rows, columns = x.shape[2] // 2, x.shape[3] // 2
            x = x.view(3, -1, rows, 2, columns, 2).amax(dim=(3, 5))
        if training:
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
            expected_statistics.append(0.9 * norm.running_mean + 0.1 * mean.detach())
        else:
            mean, variance = norm.running_mean, norm.running_var
            expected_statistics.append(mean)
        x = (x - mean[:, None, None]) / (variance[:, None, None] + 1e-5).sqrt()
        x = F.gelu(x * norm.weight[:, None, None] + norm.bias[:, None, None])
    expected = x.flatten(2).mT @ stem.projection.weight.T + stem.projection.bias
    output = stem(images)
    assert output.shape == (3, size[0] * size[1] // patch**2, dim)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    for norm, statistic in zip(norms, expected_statistics, strict=True):
        torch.testing.assert_close(norm.running_mean, statistic, atol=1e-5, rtol=1e-5)
    assert torch.equal(images, before)


@pytest.mark.parametrize("patch", [3, 6, (2, 4), (4, 2)])
def test_a_patch_that_halving_does_not_reach_is_refused(patch):
    with pytest.raises(ValueError, match="patch_size=.* can't be reached by halving; .* needs a power of two"):
        ConvolutionalStem(24, patch, 3, 12)


def test_a_width_that_the_stem_can_not_halve_is_refused():
    with pytest.raises(ValueError, match="dim=10 is not a multiple of patch_size=4"):
        ConvolutionalStem(8, 4, 3, 10)


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (2, 3, 8, 12), (3, 8, 8)])
def test_a_stem_refuses_the_images_that_a_patch_embedding_refuses(shape):
    with pytest.raises(ValueError, match="images have shape .*; this model takes"):
        ConvolutionalStem(8, 4, 3, 8)(torch.zeros(shape))


@pytest.mark.parametrize(
    ("image_size", "patch_size", "side", "near"),
    [
        (33, 4, "height 33 is not a multiple of the patch height 4", "32 and 36"),
        ((32, 30), 4, "width 30 is not a multiple of the patch width 4", "28 and 32"),
        ((24, 48), (5, 8), "height 24 is not a multiple of the patch height 5", "20 and 25"),
        ((24, 48), (4, 9), "width 48 is not a multiple of the patch width 9", "45 and 54"),
        (3, 4, "height 3 is not a multiple of the patch height 4", "4"),
    ],
)
def test_an_image_the_patch_does_not_divide_is_refused_with_the_nearest_sizes(image_size, patch_size, side, near):
    with pytest.raises(ValueError, match=f"{side} .*nearest that are: {near}$"):
        PatchEmbedding(image_size, patch_size, 3, 8)


@pytest.mark.parametrize(
    "shape", [(2, 1, 8, 16), (2, 4, 8, 16), (2, 3, 16, 8), (2, 3, 8, 8), (2, 3, 12, 20), (3, 8, 16), (2, 8, 16, 3)]
)
def test_images_of_another_size_or_channel_count_are_refused(shape):
    embedding = PatchEmbedding((8, 16), 4, 3, 5)
    with pytest.raises(ValueError, match="images have shape") as error:
        embedding(torch.zeros(shape))
    assert str(shape) in str(error.value)
    assert "(B, 3, 8, 16)" in str(error.value)


@pytest.mark.parametrize(("size", "pair"), [(4, (4, 4)), ((4, 8), (4, 8)), ([4, 8], (4, 8)), (1, (1, 1))])
def test_a_size_is_a_number_for_both_sides_or_a_pair(size, pair):
    assert as_pair("patch_size", size) == pair


@pytest.mark.parametrize("size", [0, -4, (4, 0), (4,), (4, 4, 4), (4.0, 4), "44", 4.0, None])
def test_what_is_no_size_is_refused_by_name(size):
    with pytest.raises(ValueError, match="patch_size="):
        as_pair("patch_size", size)
