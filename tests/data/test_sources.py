"""Checks the data sets by name: pixels, labels, classes, the split of the training set, messages for missing data."""

import hashlib
import os
import pickle
import tarfile
import urllib.error
import urllib.request
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torchvision import datasets

from vit_scratch.data.images import ImageError
from vit_scratch.data.sources import NATIVE, ImageSource, load, split


def arrays(source, mode):
    return np.stack([np.asarray(source.read(i, mode)) for i in range(len(source))])


def test_digits_are_scikit_learns_with_a_fixed_stratified_test_set():
    first, second = load("digits", "unused"), load("digits", "elsewhere")
    assert (len(first.train), len(first.test), first.val) == (1437, 360, None)
    assert first.classes == [str(d) for d in range(10)]
    for part in ("train", "test"):
        a, b = getattr(first, part), getattr(second, part)
        np.testing.assert_array_equal(a.images, b.images)
        np.testing.assert_array_equal(a.labels, b.labels)

    totals, held = np.bincount(load_digits().target), np.bincount(first.test.labels)
    assert np.abs(held - totals * 360 / 1797).max() < 1
    np.testing.assert_array_equal(held + np.bincount(first.train.labels), totals)


def test_digits_are_each_in_one_part_with_their_label_and_exact_pixels():
    digits = load_digits()
    # The 17 grey levels 0 to 16, stretched to 0 to 255; all 1797 images differ.
    levels = np.round(digits.data * 255 / 16).astype(int)
    expected = {tuple(image): label for image, label in zip(levels, digits.target, strict=True)}
    assert len(expected) == 1797
    dataset = load("digits", "unused")
    seen = {}
    for source in (dataset.train, dataset.test):
        for image, label in zip(arrays(source, "L"), source.labels, strict=True):
            seen[tuple(image.ravel().astype(int))] = label
    assert seen == expected


def test_fake_images_are_torchvisions_and_differ_between_parts():
    dataset = load("fake", "unused", image_size=(6, 5), fake_images=25)
    assert (len(dataset.train), len(dataset.test)) == (25, 5)
    reference = datasets.FakeData(30, (3, 6, 5), num_classes=10)
    for source, first in ((dataset.train, 0), (dataset.test, 25)):
        for i, image in enumerate(arrays(source, "RGB")):
            np.testing.assert_array_equal(image, np.asarray(reference[first + i][0]))
            assert source.labels[i] == reference[first + i][1]
    everything = np.concatenate([arrays(dataset.train, "RGB"), arrays(dataset.test, "RGB")]).reshape(30, -1)
    assert len(np.unique(everything, axis=0)) == 30
    assert set(dataset.train.labels) <= set(range(10))


def test_fake_images_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    load("fake", "unused", image_size=(4, 4), fake_images=20)
    assert torch.equal(torch.get_rng_state(), before)


def fail_to_download(monkeypatch):
    def urlopen(*_, **__):
        raise urllib.error.URLError("no network in this test")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)


CIFAR = [
    ("cifar10", "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    ("cifar100", "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
]


@pytest.mark.parametrize(("kind", "file", "md5"), CIFAR)
@pytest.mark.parametrize("there", ["nothing", "half an archive", "a file instead of the folder"])
def test_cifar_without_network_says_where_to_put_which_file(tmp_path, monkeypatch, kind, file, md5, there):
    fail_to_download(monkeypatch)
    root = tmp_path / "images"
    if there == "half an archive":
        root.mkdir()
        (root / file).write_bytes(b"\x1f\x8b" + bytes(100))
    if there == "a file instead of the folder":
        root.write_text("")
    with pytest.raises(ValueError, match=kind) as caught:
        load(kind, str(root))
    for part in (str(root), file, md5, "configs/digits.yaml", "--data.root"):
        assert part in str(caught.value)
    if there == "nothing":
        assert "no network in this test" in str(caught.value)


def fake_cifar(kind, root, monkeypatch):
    """Put an archive with torchvision's layout into a folder, and its sums into torchvision's class.

    Returns the images (n, 32, 32, 3) and labels of the training and of the test part.
    """
    cls = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[kind]
    key = "labels" if kind == "cifar10" else "fine_labels"
    generator = np.random.default_rng(0)
    parts, files = {"train": ([], []), "test": ([], [])}, {}
    for part, names in (("train", [n for n, _ in cls.train_list]), ("test", [n for n, _ in cls.test_list])):
        for name in names:
            data = generator.integers(0, 256, (3, 3072)).astype(np.uint8)
            labels = generator.integers(0, 10, 3).tolist()
            files[name] = pickle.dumps({"data": data, key: labels})
            # A row holds the red, the green and the blue plane, each in reading order.
            parts[part][0].extend(np.stack([row.reshape(3, 1024).T.reshape(32, 32, 3) for row in data]))
            parts[part][1].extend(labels)
    files[cls.meta["filename"]] = pickle.dumps({cls.meta["key"]: [f"class {i}" for i in range(10)]})
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    root.mkdir()
    with tarfile.open(root / cls.filename, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{cls.base_folder}/{name}")
            entry.size = len(content)
            archive.addfile(entry, BytesIO(content))
    monkeypatch.setattr(cls, "tgz_md5", hashlib.md5((root / cls.filename).read_bytes()).hexdigest())
    monkeypatch.setattr(cls, "train_list", [[n, sums[n]] for n, _ in cls.train_list])
    monkeypatch.setattr(cls, "test_list", [[n, sums[n]] for n, _ in cls.test_list])
    monkeypatch.setattr(cls, "meta", cls.meta | {"md5": sums[cls.meta["filename"]]})
    return parts


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_a_cifar_archive_that_was_put_there_is_read_without_network(tmp_path, monkeypatch, kind):
    fail_to_download(monkeypatch)
    parts = fake_cifar(kind, tmp_path / "data", monkeypatch)
    for _ in range(2):  # the second time from the unpacked files
        dataset = load(kind, str(tmp_path / "data"))
        assert dataset.classes == [f"class {i}" for i in range(10)]
        assert dataset.val is None
        for source, (images, labels) in ((dataset.train, parts["train"]), (dataset.test, parts["test"])):
            np.testing.assert_array_equal(arrays(source, "RGB"), np.stack(images))
            assert source.labels.tolist() == labels


def test_a_changed_cifar_file_is_noticed_by_its_md5(tmp_path, monkeypatch):
    fail_to_download(monkeypatch)
    fake_cifar("cifar10", tmp_path / "data", monkeypatch)
    load("cifar10", str(tmp_path / "data"))
    (tmp_path / "data" / "cifar-10-python.tar.gz").unlink()
    (tmp_path / "data" / "cifar-10-batches-py" / "data_batch_2").write_bytes(b"changed")
    with pytest.raises(ValueError, match="neither in"):
        load("cifar10", str(tmp_path / "data"))


def tree(root, *names):
    """Files below a folder: an image of its own grey for each name with a picture's ending, else text."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() in (".png", ".bmp"):
            Image.new("L", (2, 2), number).save(path)
        elif path.suffix:
            path.write_text("no picture")
        else:
            path.mkdir(exist_ok=True)
    return str(root)


def contents(source):
    """The grey of each image and its label."""
    return [(source.read(i, "L").getpixel((0, 0)), int(source.labels[i])) for i in range(len(source))]


def test_folders_are_classes_in_alphabetical_order(tmp_path):
    root = tree(tmp_path, "train/2/a.png", "train/10/a.png", "train/B/a.png", "train/a/a.png", "train/1/a.png")
    dataset = load("imagefolder", root)
    assert dataset.classes == ["1", "10", "2", "B", "a"]
    assert contents(dataset.train) == [(4, 0), (1, 1), (0, 2), (2, 3), (3, 4)]
    assert (dataset.val, dataset.test, dataset.notes) == (None, None, [])


def test_links_are_followed_once_and_those_that_lead_nowhere_are_named(tmp_path):
    root = Path(tree(tmp_path / "root", "train/cat/a.png", "train/dog/b.png"))
    elsewhere = Path(tree(tmp_path / "elsewhere", "more/c.png", "one.png"))
    (root / "train" / "cat" / "more").symlink_to(elsewhere / "more")
    (root / "train" / "cat" / "loop").symlink_to(root / "train" / "cat")
    (root / "train" / "cat" / "again").symlink_to(elsewhere / "more")
    (root / "train" / "dog" / "one.png").symlink_to(elsewhere / "one.png")
    (root / "train" / "fox").symlink_to(elsewhere / "more")
    os.mkfifo(root / "train" / "dog" / "pipe.png")  # reading it would wait for ever
    train = load("imagefolder", str(root)).train
    names = [str(Path(p).relative_to(root / "train")) for p in train.images]
    # Of two links to one folder either may be the one that is entered.
    assert names[0] == "cat/a.png"
    assert names[1] in ("cat/again/c.png", "cat/more/c.png")
    assert names[2:] == ["dog/b.png", "dog/one.png", "fox/c.png"]
    assert train.labels.tolist() == [0, 0, 1, 1, 2]
    (root / "train" / "fox" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    train = load("imagefolder", str(root)).train
    with pytest.raises(ImageError, match=r"gone.png: .*No such file"):
        train.read(len(train) - 1, "RGB")


def test_names_in_any_script_are_found_and_written_as_they_are(tmp_path):
    names = ["Ωμέγα/ä b.png", "日本/写真.PNG", "כלב/תמונה.png", "emoji 🐈/'\"$(x).png", "back\\slash/new\nline.png"]
    root = tree(tmp_path, *(f"train/{name}" for name in names))
    dataset = load("imagefolder", root)
    assert dataset.classes == sorted(name.partition("/")[0] for name in names)
    assert {f"train/{name}" for name in names} == {str(Path(p).relative_to(root)) for p in dataset.train.images}
    assert len({grey for grey, _ in contents(dataset.train)}) == len(names)


def test_the_order_is_that_of_the_parts_of_the_paths(tmp_path):
    names = ["a/b.png", "a-b/a.png", "a/a/c.png", "a/a.png", "a.b/c.png", "A/z.png"]
    root = tree(tmp_path, "train/dog/x.png", *(f"train/cat/{name}" for name in names))
    found = [Path(p).relative_to(f"{root}/train/cat") for p in load("imagefolder", root).train.images[: len(names)]]
    assert found == sorted(map(Path, names))


def test_a_hundred_thousand_files_are_listed_and_read(tmp_path):
    for name in ("a", "b"):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        for i in range(0, 50_000):
            if i % 25_000 == 0:  # a file has a limited number of names
                path = folder / f"{i}.png"
                Image.new("L", (1, 1), 7).save(path)
            else:
                os.link(path, folder / f"{i}.png")
    train = load("imagefolder", str(tmp_path)).train
    assert len(train) == 100_000
    assert np.bincount(train.labels).tolist() == [50_000, 50_000]
    assert train.images[:3] == [str(tmp_path / "train" / "a" / f"{i}.png") for i in (0, 1, 10)]
    assert train.read(99_999, "L").getpixel((0, 0)) == 7


def test_nested_files_count_and_other_files_do_not(tmp_path):
    root = tree(
        tmp_path,
        "train/cat/deep/er/b.png",
        "train/cat/a.BMP",
        "train/dog/c.PNG",
        "train/cat/notes.txt",
        "train/dog/Thumbs.db",
        "train/readme.md",
        "train/stray.png",
        "labels.csv",
    )
    dataset = load("imagefolder", root)
    assert dataset.classes == ["cat", "dog"]
    assert sorted(contents(dataset.train)) == [(0, 0), (1, 0), (2, 1)]


THREE = ("train/a/1.png", "train/b/1.png", "train/c/1.png")


@pytest.mark.parametrize("part", ["val", "test"])
def test_a_class_that_a_folder_lacks_is_named(tmp_path, part):
    root = tree(tmp_path, *THREE, f"{part}/a/1.png", f"{part}/c/1.png")
    with pytest.raises(ValueError, match=f"{part} lacks.*'b'.*--data.allow_missing_classes true") as caught:
        load("imagefolder", root)
    assert "'a'" not in str(caught.value)


@pytest.mark.parametrize("part", ["val", "test"])
def test_class_indices_stay_where_a_class_may_be_missing(tmp_path, part):
    root = tree(tmp_path, *THREE, f"{part}/a/1.png", f"{part}/c/1.png")
    dataset = load("imagefolder", root, allow_missing_classes=True)
    assert dataset.classes == ["a", "b", "c"]
    assert contents(getattr(dataset, part)) == [(3, 0), (4, 2)]
    assert dataset.notes == [f"{part} has no images of the classes 'b'"]


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("part", ["val", "test"])
def test_an_unknown_class_is_refused_and_named(tmp_path, part, allow):
    root = tree(tmp_path, *THREE, *(f"{part}/{c}/1.png" for c in "abcd"))
    with pytest.raises(ValueError, match=f"{part} holds folders that are no classes.*'d'"):
        load("imagefolder", root, allow_missing_classes=allow)


def test_an_empty_class_folder_is_named(tmp_path):
    root = tree(tmp_path, *THREE, "test/a/1.png", "test/b", "test/c/1.png", "test/b/only.txt")
    with pytest.raises(ValueError, match=r"test/b holds no image"):
        load("imagefolder", root)
    dataset = load("imagefolder", root, allow_missing_classes=True)
    assert dataset.test.labels.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "no folder 'train'"),
        (("test/a/1.png",), "no folder 'train'.*train/CLASS/IMAGE"),
        (("train/1.png",), "holds 0 class folders; training needs at least 2"),
        (("train/a/1.png",), "holds 1 class folders; training needs at least 2"),
        (("train/a/1.png", "train/b"), "train/b holds no image"),
    ],
)
def test_folders_that_can_not_be_trained_on_are_refused(tmp_path, names, message):
    with pytest.raises(ValueError, match=message):
        load("imagefolder", tree(tmp_path, *names))


def test_the_classes_of_a_model_decide_the_indices(tmp_path):
    root = tree(tmp_path, "test/2/1.png", "test/10/1.png")
    dataset = load("imagefolder", root, classes=["10", "2", "7"], allow_missing_classes=True)
    assert dataset.classes == ["10", "2", "7"]
    assert contents(dataset.test) == [(1, 0), (0, 1)]
    assert len(dataset.train) == 0
    dataset = load("imagefolder", root, classes=["2", "10"])
    assert contents(dataset.test) == [(0, 0), (1, 1)]


def test_data_with_other_classes_than_the_models_are_refused(tmp_path):
    root = tree(tmp_path, "test/a/1.png", "test/b/1.png")
    with pytest.raises(ValueError, match="'b'"):
        load("imagefolder", root, classes=["a", "c"])
    with pytest.raises(ValueError, match="the classes of digits .* are not the model's"):
        load("digits", "unused", classes=["zero", "one"])


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=f"data.kind='mnist'.*{', '.join(NATIVE)}"):
        load("mnist", "unused")


def test_a_source_names_what_it_can_not_read(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    with pytest.raises(ImageError, match=r"bad\.png"):
        ImageSource([str(tmp_path / "bad.png")], [0]).read(0, "L")
    with pytest.raises(ImageError, match="image 1"):
        ImageSource(np.zeros((2, 2, 2), np.float32), [0, 0]).read(1, "L")


@pytest.mark.parametrize("array", [True, False])
def test_a_subset_keeps_images_and_labels_together_in_the_given_order(tmp_path, array):
    if array:
        source = ImageSource(np.arange(5, dtype=np.uint8).reshape(5, 1, 1), [10, 11, 12, 13, 14])
    else:
        root = tree(tmp_path, *(f"{i}.png" for i in range(5)))
        source = ImageSource([f"{root}/{i}.png" for i in range(5)], [10, 11, 12, 13, 14])
    assert contents(source.subset(np.array([3, 0, 4]))) == [(3, 13), (0, 10), (4, 14)]
    assert contents(source.subset(np.array([3, 0, 4])).subset(np.array([2]))) == [(4, 14)]


LABELS = np.repeat([0, 1, 2], [10, 20, 30])[np.random.default_rng(0).permutation(60)]


@pytest.mark.parametrize(
    ("share", "held"),
    [(0.1, [1, 2, 3]), (0.2, [2, 4, 6]), (0.5, [5, 10, 15]), (0.9, [9, 18, 27])],
)
def test_a_split_takes_the_same_share_of_each_class(share, held):
    learn, select = split(LABELS, share, seed=3)
    assert np.bincount(LABELS[select]).tolist() == held
    assert sorted([*learn, *select]) == list(range(60))
    assert list(learn) == sorted(learn)
    assert list(select) == sorted(select)


def test_a_split_is_a_function_of_the_seed():
    first, again, other = (split(LABELS, 0.2, seed)[1].tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other
    chosen = set().union(*(split(LABELS, 0.2, seed)[1].tolist() for seed in range(40)))
    assert chosen == set(range(60))


def test_holding_out_nothing_keeps_all_images():
    learn, select = split(LABELS, 0, seed=0)
    assert learn.tolist() == list(range(60))
    assert len(select) == 0


@pytest.mark.parametrize(
    ("labels", "share", "message"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 0, 0, 1], 0.2, "can't be split class by class"),
        ([0, 0, 1, 1, 2, 2], 0.3, "can't be split class by class"),
        ([0, 0, 1, 1], -0.1, "data.hold_out=-0.1 is not a share"),
        ([0, 0, 1, 1], 1.0, "data.hold_out=1.0 is not a share"),
        ([0, 0, 1, 1], float("nan"), "data.hold_out=nan is not a share"),
    ],
)
def test_a_split_that_is_not_possible_is_refused(labels, share, message):
    with pytest.raises(ValueError, match=message):
        split(np.array(labels), share, seed=0)


def test_a_hold_out_moves_training_images():
    dataset = load("digits", "unused")
    before = {tuple(i.ravel()): label for i, label in zip(dataset.train.images, dataset.train.labels, strict=True)}
    test = dataset.test.images.copy()
    dataset.hold_out(0.1, seed=0)
    assert (len(dataset.train), len(dataset.val)) == (1293, 144)
    after = {}
    for source in (dataset.train, dataset.val):
        after |= {tuple(i.ravel()): label for i, label in zip(source.images, source.labels, strict=True)}
    assert after == before
    np.testing.assert_array_equal(dataset.test.images, test)
    share = np.bincount(dataset.val.labels) / np.bincount(load("digits", "").train.labels)
    assert np.abs(share - 0.1).max() < 0.01


def test_a_val_folder_takes_the_place_of_the_hold_out(tmp_path):
    names = [f"{part}/{c}/{i}.png" for part, count in (("train", 6), ("val", 2)) for c in "ab" for i in range(count)]
    dataset = load("imagefolder", tree(tmp_path, *names))
    val, train = contents(dataset.val), contents(dataset.train)
    dataset.hold_out(0.5, seed=0)
    assert contents(dataset.val) == val == [(12, 0), (13, 0), (14, 1), (15, 1)]
    assert contents(dataset.train) == train
    assert len(train) == 12


def test_without_a_val_folder_images_are_held_out_class_by_class(tmp_path):
    dataset = load("imagefolder", tree(tmp_path, *(f"train/{c}/{i}.png" for c in "ab" for i in range(6))))
    everything = contents(dataset.train)
    dataset.hold_out(0.5, seed=0)
    assert sorted(contents(dataset.train) + contents(dataset.val)) == everything
    assert np.bincount(dataset.val.labels).tolist() == [3, 3]
    dataset = load("imagefolder", str(tmp_path))
    dataset.hold_out(0, seed=0)
    assert dataset.val is None
