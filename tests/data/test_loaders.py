"""Checks the loaders: which images come when, the same bits from memory, files and workers, and faults by name."""

import gc
import os
import pickle
import signal
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from vit_scratch.data.augmentation import BatchTransform, sample_transform
from vit_scratch.data.images import ImageError
from vit_scratch.data.loaders import (
    DeadWorkerError,
    HeldImages,
    ImageFormat,
    MemoryLoader,
    StreamLoader,
    UnreadableImageError,
    channel_statistics,
    make_loader,
    open_images,
    seeds,
)
from vit_scratch.data.sources import ImageSource

CPU = torch.device("cpu")
FORM = ImageFormat("RGB", (6, 5), "bicubic")
COUNT, BATCH = 23, 5
KINDS = ["memory", "stream", "workers"]


class Noise:
    """A transform whose every draw can be told from every other."""

    def __call__(self, image):
        return torch.randint(0, 256, image.shape, dtype=torch.uint8)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A source of files; the first pixel's red is the number of the image, its label the number modulo 4."""
    folder = tmp_path_factory.mktemp("images")
    generator, paths = np.random.default_rng(0), []
    for number in range(COUNT):
        pixels = generator.integers(0, 256, (6, 5, 3)).astype(np.uint8)
        pixels[0, 0, 0] = number
        paths.append(str(folder / f"{number:02}.png"))
        Image.fromarray(pixels).save(paths[-1])
    return ImageSource(paths, [number % 4 for number in range(COUNT)])


def plain(**augment):
    """From bytes to the same numbers as floats."""
    return BatchTransform([0.0] * 3, [1 / 255] * 3, **augment)


AUGMENT = dict(shift=2, flip=True, erase=0.5, mixup=0.8, cutmix=1.0, num_classes=4)


def loader_of(kind, source, transform=None, **options):
    held = open_images(source, FORM, in_memory=kind == "memory", skip_broken=False)[0]
    workers = 2 if kind == "workers" else 0
    return make_loader(held, FORM, BATCH, transform or plain(), workers=workers, device=CPU, **options)


def numbers(batches):
    """The numbers of the images in each batch."""
    return [x[:, 0, 0, 0].round().int().tolist() for x, _, _ in batches]


def equal(first, second):
    first, second = list(first), list(second)
    return len(first) == len(second) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2] for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_holds_every_image_once_with_its_label_and_pixels(files, kind):
    loader = loader_of(kind, files, seed=3)
    assert isinstance(loader, MemoryLoader if kind == "memory" else StreamLoader)
    for epoch in range(2):
        batches = list(loader.batches(epoch))
        assert [count for _, _, count in batches] == [len(x) for x, _, _ in batches] == [5, 5, 5, 5, 3]
        assert len(loader) == 5
        order = sum(numbers(batches), [])
        assert sorted(order) == list(range(COUNT))
        assert torch.cat([y for _, y, _ in batches]).tolist() == [number % 4 for number in order]
        for pixels, number in zip(torch.cat([x for x, _, _ in batches]), order, strict=True):
            expected = np.asarray(files.read(number, "RGB")).astype(np.float32)
            np.testing.assert_allclose(pixels.permute(1, 2, 0), expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_a_function_of_seed_and_epoch(files, kind):
    loader = loader_of(kind, files, seed=3)
    orders = [numbers(loader.batches(epoch)) for epoch in (0, 1, 2, 0)]
    assert orders[0] == orders[3]
    assert len({str(order) for order in orders}) == 3
    assert orders[0] == numbers(loader_of(kind, files, seed=3).batches(0))
    assert orders[0] != numbers(loader_of(kind, files, seed=4).batches(0))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_seed_the_order_is_the_given_one_and_two_passes_are_bit_identical(files, kind):
    loader = loader_of(kind, files)
    first, second = list(loader.batches()), list(loader.batches(5))
    assert sum(numbers(first), []) == list(range(COUNT))
    assert equal(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_start_goes_on_with_the_same_bits(files, kind):
    loader = loader_of(kind, files, plain(**AUGMENT), seed=1, sample_transform=v2.RandAugment())
    whole = list(loader.batches(4))
    for start in range(len(loader) + 1):
        assert equal(loader.batches(4, start), whole[start:])


def test_memory_files_and_workers_give_the_same_bits_in_every_epoch(files):
    steps = v2.RandAugment()
    loaders = [loader_of(kind, files, plain(**AUGMENT), seed=7, sample_transform=steps) for kind in KINDS]
    for epoch in (0, 1, 2, 1):
        memory, stream, workers = (list(loader.batches(epoch)) for loader in loaders)
        assert equal(memory, stream)
        assert equal(memory, workers)


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_of_one_seed_do_not_depend_on_the_global_generators(files, kind):
    results = []
    for state in (1, 2):
        torch.manual_seed(state)
        np.random.seed(state)  # noqa: NPY002
        steps = v2.TrivialAugmentWide()
        results.append(list(loader_of(kind, files, plain(**AUGMENT), seed=7, sample_transform=steps).batches(0)))
    assert equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_leave_the_global_generator_alone(files, kind):
    loader = loader_of(kind, files, plain(**AUGMENT), seed=7, sample_transform=Noise())
    torch.manual_seed(5)
    states = [torch.get_rng_state()]
    for epoch in range(2):
        list(loader.batches(epoch))
        states.append(torch.get_rng_state())
    del loader  # a failed test would keep its workers
    assert torch.equal(states[1], states[0])
    assert torch.equal(states[2], states[0])


@pytest.mark.parametrize("kind", KINDS)
def test_an_abandoned_epoch_does_not_disturb_the_next(files, kind):
    expected = list(loader_of("memory", files, seed=7).batches(1))
    loader = loader_of(kind, files, seed=7)
    abandoned = loader.batches(0)
    next(abandoned)
    abandoned.close()
    assert equal(loader.batches(1), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_draws_of_images_never_repeat_across_workers_and_epochs(files, kind):
    loader = loader_of(kind, files, seed=0, sample_transform=Noise())
    drawn = torch.cat([x for epoch in range(4) for x, _, _ in loader.batches(epoch)]).flatten(1)
    assert len(drawn.unique(dim=0)) == 4 * COUNT


@pytest.mark.parametrize("kind", KINDS)
def test_the_draws_of_batches_never_repeat_across_epochs(files, kind):
    loader = loader_of(kind, files, plain(mixup=1.0, num_classes=4), seed=0)
    shares = []
    for epoch in range(4):
        for _, labels, _ in loader.batches(epoch):
            values = [v for v in labels.flatten().tolist() if 0 < v < 1]
            shares.append(round(max(values), 6))
    assert len(set(shares)) == 4 * len(loader)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize(("size", "channels"), [((6, 5), ()), ((6, 5), (3,)), ((6, 5), (4,)), ((5, 6), (3,))])
def test_arrays_in_memory_are_what_is_read_of_them_one_by_one(mode, size, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (7, *size, *channels), dtype=np.uint8)
    source, form = ImageSource(pixels, np.arange(7)), ImageFormat(mode, (6, 5), "bicubic")
    held, faults = open_images(source, form, in_memory=True, skip_broken=False)
    assert torch.equal(held.images, torch.stack([form(source, i) for i in range(7)]))
    assert held.images.is_contiguous()
    assert (held.labels.tolist(), faults) == (list(range(7)), [])
    pixels[:] = 0
    assert held.images.any()


def test_seeds_are_a_function_of_all_of_the_entropy_and_do_not_repeat():
    drawn = [seeds(100, seed, epoch, part).tolist() for seed in (0, 1) for epoch in (0, 1) for part in (1, 2)]
    assert len(set(sum(drawn, []))) == 800
    assert seeds(100, 1, 1, 2).tolist() == drawn[-1]


@pytest.mark.parametrize("batch", [1, 4, 23, 100])
def test_the_last_batch_holds_what_is_left(files, batch):
    held = open_images(files, FORM, in_memory=True, skip_broken=False)[0]
    loader = MemoryLoader(held, batch, plain(), seed=0, device=CPU)
    sizes = [count for _, _, count in loader.batches(0)]
    assert sizes == {1: [1] * 23, 4: [4] * 5 + [3], 23: [23], 100: [23]}[batch]
    assert len(loader) == len(sizes)


def shapes_of(batches):
    return Counter((tuple(x.shape), tuple(y.shape)) for x, y, _ in batches)


def announced(loader):
    """The same, of the batches that a loader says it will yield."""
    found = Counter()
    for x, y, number in loader.shapes():
        assert number > 0
        found[tuple(x.shape), tuple(y.shape)] += number
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, dict(seed=3), dict(seed=3, sample_transform=v2.RandAugment())])
def test_the_shapes_are_those_of_an_epochs_batches_without_their_data(files, kind, options):
    loader = loader_of(kind, files, plain(shift=2, flip=True, erase=0.5), **options)
    assert announced(loader) == {((5, 3, 6, 5), (5,)): 4, ((3, 3, 6, 5), (3,)): 1}
    for epoch in (0, 1):
        batches = list(loader.batches(epoch))
        assert announced(loader) == shapes_of(batches)
        assert {(x.dtype, y.dtype) for x, y, _ in loader.shapes()} == {(x.dtype, y.dtype) for x, y, _ in batches}
    assert {t.device.type for x, y, _ in loader.shapes() for t in (x, y)} == {"meta"}


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("batch", [1, 4, 22, 23, 24])
@pytest.mark.parametrize(("mode", "size"), [("L", (6, 5)), ("RGBA", (3, 8))])
def test_the_shapes_follow_the_format_and_the_batch_size(files, in_memory, batch, mode, size):
    form = ImageFormat(mode, size, "nearest")
    held = open_images(files, form, in_memory=in_memory, skip_broken=False)[0]
    channels = {"L": 1, "RGBA": 4}[mode]
    transform = BatchTransform([0.5] * channels, [0.5] * channels)
    loader = make_loader(held, form, batch, transform, seed=0, device=CPU)
    assert isinstance(loader, MemoryLoader if in_memory else StreamLoader)
    assert announced(loader) == shapes_of(loader.batches(0))
    assert sum(number for _, _, number in loader.shapes()) == len(loader)


def test_crops_have_the_shape_of_the_format(files):
    steps = sample_transform((6, 5), min_crop_area=0.3)
    loader = loader_of("stream", files, seed=0, sample_transform=steps, crops=True)
    assert announced(loader) == shapes_of(loader.batches(0))


def test_mixed_labels_have_the_shapes_of_images_all_the_same(files):
    """Labels become probabilities of classes, which changes no product; the images are as announced."""
    loader = loader_of("memory", files, plain(mixup=1.0, num_classes=4), seed=0)
    batches = list(loader.batches(0))
    assert all(y.shape == (count, 4) for _, y, count in batches)
    assert shapes_of((x, y[:, 0], count) for x, y, count in batches) == announced(loader)


def test_a_crop_in_the_worker_gets_the_image_in_its_own_size(tmp_path):
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :10] = 255  # lies outside of what `fit` keeps
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    source = ImageSource([str(tmp_path / "wide.png")], [0])
    seen = []

    def record(image):
        seen.append(tuple(image.shape))
        return image[:, :6, :5]

    def run(crops):
        loader = StreamLoader(source, FORM, 1, plain(), sample_transform=record, crops=crops, seed=0, device=CPU)
        return next(loader.batches(0))[0]

    assert run(True).max() == pytest.approx(255)
    assert run(False).max() == pytest.approx(0)
    assert seen == [(3, 20, 40), (3, 6, 5)]


def test_images_are_converted_to_the_mode_and_size_of_the_model(tmp_path):
    Image.new("RGBA", (10, 12), (10, 20, 30, 51)).save(tmp_path / "a.png")
    Image.fromarray(np.full((12, 10), 257 * 9, np.uint16)).save(tmp_path / "b.png")
    source = ImageSource([str(tmp_path / "a.png"), str(tmp_path / "b.png")], [0, 1])
    held = open_images(source, FORM, in_memory=True, skip_broken=False)[0]
    assert held.images.shape == (2, 3, 6, 5)
    assert held.images[0].flatten(1).T.unique(dim=0).tolist() == [[206, 208, 210]]
    assert held.images[1].unique().tolist() == [9]


@pytest.fixture(scope="module")
def broken(tmp_path_factory, files):
    """The files of `files`, of which 3 is truncated and 11 is no image."""
    folder = tmp_path_factory.mktemp("broken")
    paths = []
    for number, path in enumerate(files.images):
        with open(path, "rb") as file:
            data = file.read()
        data = {3: data[: len(data) // 2], 11: b"text"}.get(number, data)
        paths.append(str(folder / f"{number:02}.png"))
        (folder / f"{number:02}.png").write_bytes(data)
    return ImageSource(paths, files.labels)


def test_reading_into_memory_names_all_broken_images_before_any_work(broken):
    with pytest.raises(ImageError, match="2 of 23 images can't be read") as caught:
        open_images(broken, FORM, in_memory=True, skip_broken=False)
    message = str(caught.value)
    assert broken.images[3] in message
    assert broken.images[11] in message
    assert broken.images[4] not in message
    assert "--data.skip_broken true" in message


def test_of_many_broken_images_five_are_shown_and_the_rest_counted(tmp_path):
    paths = [str(tmp_path / f"{i}.png") for i in range(8)]
    for path in paths:
        with open(path, "w") as file:
            file.write("text")
    with pytest.raises(ImageError, match="8 of 8 images") as caught:
        open_images(ImageSource(paths, [0] * 8), FORM, in_memory=True, skip_broken=False)
    assert sum(path in str(caught.value) for path in paths) == 5
    assert "and 3 more" in str(caught.value)


def fault(loader):
    """The message with which an epoch stops; the error itself would keep the workers alive."""
    try:
        first = next(loader.batches())
    except UnreadableImageError as error:
        return str(error)
    return f"no error, but images {numbers([first])}"


@pytest.mark.parametrize("kind", ["stream", "workers"])
def test_a_broken_image_stops_the_epoch_by_name_and_without_a_traceback(broken, kind):
    message = fault(loader_of(kind, broken))
    assert message.startswith(broken.images[3] + ": ")
    assert "--data.skip_broken true" in message
    assert "Traceback" not in message
    assert "Caught" not in message


@pytest.mark.parametrize("kind", KINDS)
def test_skipping_leaves_out_exactly_the_broken_images(broken, kind):
    images, faults = open_images(broken, FORM, in_memory=kind == "memory", skip_broken=True)
    assert len(faults) == 2
    assert broken.images[3] in faults[0]
    assert broken.images[11] in faults[1]
    workers = 2 if kind == "workers" else 0
    batches = list(make_loader(images, FORM, BATCH, plain(), workers=workers, device=CPU).batches())
    kept = [number for number in range(COUNT) if number not in (3, 11)]
    assert sum(numbers(batches), []) == kept
    assert torch.cat([y for _, y, _ in batches]).tolist() == [number % 4 for number in kept]


@pytest.mark.parametrize("kind", KINDS)
def test_skipping_where_nothing_is_broken_changes_nothing(files, kind):
    images, faults = open_images(files, FORM, in_memory=kind == "memory", skip_broken=True)
    assert faults == []
    assert equal(make_loader(images, FORM, BATCH, plain(), device=CPU).batches(), loader_of(kind, files).batches())


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_channel_statistics_equal_numpys(channels):
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (11, channels, 6, 5)).astype(np.uint8))
    mean, std = channel_statistics(images)
    scaled = images.numpy().astype(np.float64) / 255
    np.testing.assert_allclose(mean, scaled.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std((0, 2, 3)), rtol=1e-12)


def test_a_channel_that_never_changes_has_a_deviation_to_divide_by():
    images = torch.stack([torch.full((4, 3, 3), 51), torch.arange(36).view(4, 3, 3)], 1).to(torch.uint8)
    mean, std = channel_statistics(images)
    assert mean[0] == pytest.approx(0.2)
    assert std[0] == 1 / 255
    x, _ = BatchTransform(mean, std)(images, torch.zeros(4))
    assert x.isfinite().all()
    assert x[:, 0].abs().max() < 1e-4


def test_normalised_training_images_have_mean_0_and_deviation_1(files):
    held = open_images(files, FORM, in_memory=True, skip_broken=False)[0]
    loader = MemoryLoader(held, 100, BatchTransform(*channel_statistics(held.images)), device=CPU)
    ((x, _, _),) = loader.batches()
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3), rtol=0, atol=1e-5)


def test_everything_a_worker_needs_can_be_pickled(files):
    steps = sample_transform((6, 5), min_crop_area=0.5)
    loader = StreamLoader(files, FORM, BATCH, plain(), sample_transform=steps, seed=0, workers=2, device=CPU)
    samples = loader.loader.dataset
    copy = pickle.loads(pickle.dumps(samples))
    image, label = copy[(6, 99)]
    assert torch.equal(image, samples[(6, 99)][0])
    assert label == 2
    for part in (loader.loader.collate_fn, loader.loader.batch_sampler, loader.transform, FORM, files):
        pickle.dumps(part)


def test_workers_that_start_anew_give_the_same_bits(files):
    steps = v2.RandAugment()
    expected = list(loader_of("memory", files, seed=2, sample_transform=steps).batches(0))
    loader = StreamLoader(files, FORM, BATCH, plain(), sample_transform=steps, seed=2, workers=1, device=CPU)
    loader.loader.multiprocessing_context = "spawn"
    assert equal(loader.batches(0), expected)
    del loader
    gc.collect()


@pytest.mark.parametrize(
    ("kind", "processes"), [(k, p) for k in ("memory", "stream") for p in (2, 3, 7)] + [("workers", 3)]
)
@pytest.mark.parametrize("augment", [{}, AUGMENT, dict(policy="randaugment", shift=1)])
def test_processes_divide_each_batch_of_one(files, kind, processes, augment):
    steps = Noise()
    whole = loader_of(kind, files, plain(**augment), seed=4, sample_transform=steps)
    parts = [
        loader_of(kind, files, plain(**augment), seed=4, sample_transform=steps, share=(number, processes))
        for number in range(processes)
    ]
    for epoch, start in ((0, 0), (1, 2)):
        divided = zip(*(loader.batches(epoch, start) for loader in parts), strict=True)
        for (x, y, count), batches in zip(whole.batches(epoch, start), divided, strict=True):
            assert torch.equal(torch.cat([b[0] for b in batches]), x)
            assert torch.equal(torch.cat([b[1] for b in batches]), y)
            assert {b[2] for b in batches} == {count} == {len(x)}
            assert {len(b[0]) for b in batches} <= {count // processes, -(-count // processes)}
    assert announced(parts[0]) == announced(whole)


class Deadly:
    """Kills the process that it is called in, as a system without memory does."""

    def __call__(self, image):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_named_with_cause_and_remedy(files):
    loader = StreamLoader(files, FORM, BATCH, plain(), sample_transform=Deadly(), seed=2, workers=2, device=CPU)
    message = r"has ended \(DataLoader worker .*too little memory.*lower --data.workers, 0 for none"
    with pytest.raises(DeadWorkerError, match=message):
        list(loader.batches(0))


def test_held_images_count_themselves():
    assert len(HeldImages(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3))) == 3
