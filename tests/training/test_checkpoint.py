"""Checks that weights and states come back bit by bit, survive failed writes, and that nothing is ever executed."""

import errno
import io
import json
import os
import pickle
import resource
import zipfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vit_scratch import Decoder, Encoder, Transformer
from vit_scratch.training import checkpoint
from vit_scratch.training.checkpoint import (
    SaveError,
    TrainingStates,
    load_weights,
    read_description,
    replacing,
    save_weights,
)
from vit_scratch.training.ema import ExponentialMovingAverage

WEIGHTS = {
    "fp32": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)),
    "bf16": torch.randn(4, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "integers": torch.tensor([2**62, -1]),
    "scalar": torch.tensor(3.5),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(12.0).view(3, 4).T,
    "part": torch.arange(10.0)[2:5],
    "special": torch.tensor([float("nan"), float("inf"), -0.0]),
    "learned": torch.nn.Parameter(torch.ones(2)),
}
DESCRIPTION = {
    "classes": ["Katze 🐈", 'a "b"', ""],
    "model": {"image_size": [8, 8], "dropout": 0.1, "layer_scale": None, "qk_norm": True},
    "mean": [0.1 + 0.2, 1e-300],
}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def test_weights_and_their_description_come_back_exactly(tmp_path):
    save_weights(tmp_path / "w.safetensors", WEIGHTS, DESCRIPTION)
    weights, description = load_weights(tmp_path / "w.safetensors")
    assert weights.keys() == WEIGHTS.keys()
    for name, tensor in weights.items():
        assert same(tensor, WEIGHTS[name].detach()), name
        assert not tensor.requires_grad
    assert description == DESCRIPTION
    assert os.listdir(tmp_path) == ["w.safetensors"]


def damage(path, kind):
    data = path.read_bytes()
    if kind == "foreign":
        save_file({"a": torch.ones(2)}, path, {"format": "pt"})
    elif kind == "foreign without header":
        save_file({"a": torch.ones(2)}, path)
    else:
        path.write_bytes(
            {
                "truncated": data[:-10],
                "half": data[: len(data) // 2],
                "one byte": data[:1],
                "empty": b"",
                "random": os.urandom(500),
                "text": b"not weights at all, just text",
                "header": data[:40] + b"\xff\xfe" + data[42:],
                "description": data.replace(b'\\"format\\": 2', b'\\"format\\"; 2'),
                "pickle": pickle.dumps({"a": 1}),
            }[kind]
        )


@pytest.mark.parametrize(
    "kind", ["truncated", "half", "one byte", "empty", "random", "text", "header", "description", "pickle"]
)
def test_damaged_weights_are_refused_by_name(tmp_path, kind):
    path = tmp_path / "w.safetensors"
    save_weights(path, WEIGHTS, DESCRIPTION)
    damage(path, kind)
    for read in (load_weights, read_description):
        with pytest.raises(ValueError, match=r"w\.safetensors is damaged or no safetensors file"):
            read(path)


def places(data, seed, count):
    """Random places in a file, half of them in its header, with what stands there changed."""
    random = np.random.default_rng(seed)
    header = min(8 + int.from_bytes(data[:8], "little"), len(data)) if data[:1] != b"P" else len(data)
    for _ in range(count):
        limit = header if random.random() < 0.5 else len(data)
        changed = bytearray(data)
        for place in random.integers(0, limit, random.choice([1, 1, 1, 2, 5])):
            changed[place] ^= 1 << random.integers(8) if random.random() < 0.5 else random.integers(1, 256)
        yield bytes(changed)


def attempt(read, *arguments):
    """What a function returns, and the message with which it refuses instead."""
    try:
        return read(*arguments), None
    except ValueError as error:
        return None, str(error)


def test_weights_with_any_byte_changed_are_refused_or_the_same(tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(path, WEIGHTS, DESCRIPTION)
    data, outcomes = path.read_bytes(), Counter()
    for changed in places(data, 0, 2000):
        path.write_bytes(changed)
        result, error = attempt(load_weights, path)
        outcomes["refused" if error else "accepted"] += 1
        if error:
            assert str(path) in error
            continue
        weights, description = result
        assert description == DESCRIPTION
        assert weights.keys() == WEIGHTS.keys()
        assert all(same(weights[name], tensor.detach()) for name, tensor in WEIGHTS.items())
    assert outcomes["refused"] > 1900


def test_states_with_any_byte_changed_are_refused_or_the_same(tmp_path):
    states, saved = TrainingStates(tmp_path), state(4)
    saved["text"] = "x" * 100
    states.save(4, saved)
    path = states.paths()[0]
    data, outcomes = path.read_bytes(), Counter()
    for changed in places(data, 1, 1000):
        path.write_bytes(changed)
        result, error = attempt(states.load)
        outcomes["refused" if error else "accepted"] += 1
        assert str(path) in error if error else repr(result[0]) == repr(saved)
    assert outcomes["refused"] > 500


def test_a_state_that_would_unpack_to_more_than_it_is_is_refused(tmp_path):
    states = TrainingStates(tmp_path)
    states.save(1, {"zeros": torch.zeros(10**6)})
    path = states.paths()[0]
    with zipfile.ZipFile(path) as whole:
        entries = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name, content in entries.items():
            bomb.writestr(name, content)
    assert path.stat().st_size < 20_000
    with pytest.raises(
        ValueError,
        match=r"update_00000001.pt can't be read: it is compressed, as torch.save does not, and unpacks to 4,0",
    ):
        states.load()


@pytest.mark.parametrize("change", [lambda n: n * 2**20, lambda n: 2**63 - 1, lambda n: n - 1, lambda n: 0])
def test_a_header_that_lies_about_sizes_is_refused(tmp_path, change):
    path = tmp_path / "w.safetensors"
    save_weights(path, WEIGHTS, DESCRIPTION)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(change(length).to_bytes(8, "little") + data[8:])
    with pytest.raises(ValueError, match="is damaged or no safetensors file"):
        load_weights(path)
    header = json.loads(data[8 : 8 + length])
    header["transposed"]["data_offsets"][1] = change(header["transposed"]["data_offsets"][1])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match="is damaged or no safetensors file"):
        load_weights(path)


@pytest.mark.parametrize("kind", ["foreign", "foreign without header"])
def test_weights_of_others_are_refused(tmp_path, kind):
    path = tmp_path / "w.safetensors"
    save_weights(path, WEIGHTS, DESCRIPTION)
    damage(path, kind)
    for read in (load_weights, read_description):
        with pytest.raises(ValueError, match=r"w\.safetensors.* was not written by vit_scratch"):
            read(path)


def test_missing_weights_are_refused(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        for read in (load_weights, read_description):
            with pytest.raises(ValueError, match=f"{path} does not exist"):
                read(path)


def test_a_description_is_read_without_the_weights(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    save_weights(path, WEIGHTS, DESCRIPTION)
    monkeypatch.setattr(checkpoint, "load_file", lambda path: pytest.fail("weights were read"))
    description = read_description(path)
    assert {k: description[k] for k in DESCRIPTION} == DESCRIPTION
    assert description.keys() - DESCRIPTION.keys() == {"tied"}


def tied_model(tie="all", seed=0):
    torch.manual_seed(seed)
    return Transformer(
        Encoder(dim=8, depth=1, heads=2),
        Decoder(dim=8, depth=1, heads=2),
        source_vocabulary=50,
        target_vocabulary=50,
        tie=tie,
    ).eval()


EMBEDDINGS = {"all": ["source_embedding.embedding.weight", "target_embedding.embedding.weight", "head.weight"]}
EMBEDDINGS["target"] = EMBEDDINGS["all"][1:]
SOURCE, TARGET = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 6, 7]])


@pytest.mark.parametrize("tie", ["all", "target"])
@pytest.mark.parametrize("which", ["model", "average"])
def test_tied_weights_are_written_once_and_come_back_tied_under_all_names(tmp_path, tie, which):
    path, model = tmp_path / "w.safetensors", tied_model(tie)
    if which == "average":
        average = ExponentialMovingAverage(model, 0.5)
        with torch.no_grad():
            model.head.weight.mul_(2)
        average.update(model)
        model = average.model
    names, state = EMBEDDINGS[tie], model.state_dict()
    save_weights(path, state, DESCRIPTION)
    written = load_file(path)
    assert len(written.keys() & set(names)) == 1
    assert len(written) == len(state) - len(names) + 1
    once = sum(p.numel() for p in model.parameters()) * 4
    assert once <= path.stat().st_size < once + 4096

    weights, description = load_weights(path)
    assert description == DESCRIPTION
    assert weights.keys() == state.keys()
    assert all(same(weights[n], state[n]) for n in state)
    again = tied_model(tie, seed=1)
    again.load_state_dict(weights)
    pointers = {name: p.data_ptr() for name, p in again.named_parameters(remove_duplicate=False)}
    assert len({pointers[name] for name in names}) == 1
    assert len(set(pointers.values())) == len(pointers) - len(names) + 1
    assert torch.equal(again(SOURCE, TARGET), model(SOURCE, TARGET))


def test_weights_that_are_not_tied_are_all_written(tmp_path):
    model = tied_model("none")
    save_weights(tmp_path / "w.safetensors", model.state_dict(), {})
    assert load_file(tmp_path / "w.safetensors").keys() == model.state_dict().keys()
    with torch.no_grad():  # equal numbers are no tie
        model.head.weight.copy_(model.target_embedding.embedding.weight)
    save_weights(tmp_path / "w.safetensors", model.state_dict(), {})
    assert load_file(tmp_path / "w.safetensors").keys() == model.state_dict().keys()


def test_different_views_of_one_memory_are_all_written_with_their_values(tmp_path):
    base = torch.arange(24.0)
    views = {
        "whole": base,
        "begin": base[:6],
        "overlap": base[3:9],
        "table": base.view(4, 6),
        "transposed": base.view(4, 6).T,
        "square": base[:9].view(3, 3),
        "square, transposed": base[:9].view(3, 3).T,
        "stride": base[::2],
        "bits": base.view(torch.int32),
        "expanded": base[:1].expand(5),
        "again": base[:6],
        "nothing": base[:0],
        "nothing else": base[:0],
    }
    save_weights(tmp_path / "w.safetensors", views, DESCRIPTION)
    weights, description = load_weights(tmp_path / "w.safetensors")
    assert weights.keys() == views.keys()
    assert all(same(weights[n], views[n]) for n in views)
    assert description == DESCRIPTION
    assert load_file(tmp_path / "w.safetensors").keys() == views.keys() - {"again"}


@pytest.mark.parametrize("tied", [{"a": "b"}, {"a": 3}, {"a": None}, ["a"], "a", 3])
def test_names_of_weights_that_are_not_there_are_refused(tmp_path, tied):
    path = tmp_path / "w.safetensors"
    description = json.dumps({"format": 1, "tied": tied, "task": "sequence"})
    save_file({"c": torch.ones(2)}, path, {checkpoint.KEY: description})
    with pytest.raises(ValueError, match=r"w\.safetensors is damaged: it names weights that it does not hold"):
        load_weights(path)


def test_files_from_before_weights_could_be_tied_are_read(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"c": torch.ones(2)}, path, {checkpoint.KEY: json.dumps({"format": 1, "classes": ["a"]})})
    weights, description = load_weights(path)
    assert torch.equal(weights["c"], torch.ones(2))
    assert description == {"classes": ["a"]}


def half_then_full(target, content=b"half of a file", error=None):
    """What a write to a path or to an open file on a disk that runs full leaves behind."""
    half = content[: len(content) // 2]
    if hasattr(target, "write"):
        target.write(half)
    else:
        Path(target).write_bytes(half)
    raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def small_files(size):
    """Let the system refuse files of more than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


BIG = torch.arange(40_000.0)


def test_a_full_disk_leaves_the_old_weights_intact(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    save_weights(path, {"a": BIG}, {"number": 1})
    before = path.read_bytes()
    monkeypatch.setattr(checkpoint, "save_file", lambda tensors, target, metadata: half_then_full(target))
    with pytest.raises(SaveError, match=r"could not write .*w\.safetensors: .*No space left.* before is intact"):
        save_weights(path, {"a": BIG + 1}, {"number": 2})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_weights_that_the_system_refuses_leave_the_old_ones_intact(tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(path, {"a": BIG}, {"number": 1})
    with small_files(50_000), pytest.raises(SaveError, match=r"could not write .*w\.safetensors: .*File too large"):
        save_weights(path, {"a": BIG + 1}, {"number": 2})
    weights, description = load_weights(path)
    assert torch.equal(weights["a"], BIG)
    assert description == {"number": 1}
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_a_failed_first_write_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), replacing(tmp_path / "new.txt") as path:
        path.write_text("half")
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path):
    (tmp_path / "a.txt").write_text("old")
    with replacing(tmp_path / "a.txt") as path:
        path.write_text("new")
        assert (tmp_path / "a.txt").read_text() == "old"
    assert (tmp_path / "a.txt").read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(("umask", "permissions"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_who_may_read_weights_and_states_is_what_the_umask_says(tmp_path, umask, permissions):
    before = os.umask(umask)
    try:
        for _ in range(2):  # the second replaces the first
            save_weights(tmp_path / "w.safetensors", {"a": BIG}, {"number": 1})
        TrainingStates(tmp_path).save(1, state(1))
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {permissions}


def state(update):
    return {
        "progress": {"update": update, "best": 0.5, "loss": float("nan")},
        "model": {"w": torch.full((3,), float(update)), "half": torch.ones(2, dtype=torch.bfloat16)},
        "ema": None,
        "random_cpu": torch.get_rng_state(),
        "list": [1, "two", (3.0, True)],
    }


def files(folder):
    return sorted(os.listdir(folder))


def test_a_state_comes_back_exactly(tmp_path):
    states, saved = TrainingStates(tmp_path / "run" / "states"), state(4)
    assert states.load() == (None, [])
    states.save(4, saved)
    loaded, faults = states.load()
    assert faults == []
    assert loaded.keys() == saved.keys()
    assert loaded["list"] == saved["list"]
    assert repr(loaded["progress"]) == repr(saved["progress"])
    assert same(loaded["model"]["w"], saved["model"]["w"])
    assert same(loaded["model"]["half"], saved["model"]["half"])
    assert torch.equal(loaded["random_cpu"], saved["random_cpu"])


def test_states_load_with_torchs_safe_default(tmp_path):
    TrainingStates(tmp_path).save(1, state(1))
    loaded = torch.load(tmp_path / "update_00000001.pt", weights_only=True)
    assert loaded["state"]["progress"]["update"] == 1


def test_the_newest_two_are_kept(tmp_path):
    states = TrainingStates(tmp_path)
    for update in (1, 2, 9, 10, 100, 99_999_999, 100_000_000):
        states.save(update, state(update))
        assert states.load()[0]["progress"]["update"] == update
    assert [p.name for p in states.paths()] == ["update_100000000.pt", "update_99999999.pt"]
    assert files(tmp_path) == ["update_100000000.pt", "update_99999999.pt"]


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    for name in ("notes.txt", "update_best.pt", "update_3.pt.bak"):
        (tmp_path / name).write_text("mine")
    states = TrainingStates(tmp_path)
    for update in range(4):
        states.save(update, state(update))
    assert {"notes.txt", "update_best.pt", "update_3.pt.bak"} < set(files(tmp_path))
    assert states.load()[0]["progress"]["update"] == 3


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unexpected pos 64")])
def test_a_full_disk_leaves_the_state_before_intact_and_says_so(tmp_path, monkeypatch, error):
    states = TrainingStates(tmp_path)
    states.save(1, state(1))
    whole = (tmp_path / "update_00000001.pt").read_bytes()
    monkeypatch.setattr(torch, "save", lambda value, target: half_then_full(target, whole, error))
    with pytest.raises(SaveError, match=r"update_00000002\.pt: .*what was saved before is intact"):
        states.save(2, state(2))
    assert files(tmp_path) == ["update_00000001.pt"]
    assert states.load()[0]["progress"]["update"] == 1


def test_a_failed_first_state_says_that_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", lambda value, target: half_then_full(target))
    with pytest.raises(SaveError, match="No space left.*what was saved before is intact"):
        TrainingStates(tmp_path).save(2, state(2))
    assert files(tmp_path) == []


def test_a_state_that_the_system_refuses_says_why_and_leaves_the_one_before(tmp_path):
    states = TrainingStates(tmp_path)
    states.save(1, state(1))
    with small_files(50_000), pytest.raises(SaveError) as caught:
        states.save(2, state(2) | {"big": BIG})
    assert files(tmp_path) == ["update_00000001.pt"]
    assert states.load()[0]["progress"]["update"] == 1
    assert "update_00000002.pt" in str(caught.value)
    assert "File too large" in str(caught.value)


def test_a_folder_that_can_not_be_made_is_a_save_error(tmp_path):
    (tmp_path / "states").write_text("a file")
    with pytest.raises(SaveError, match="could not write"):
        TrainingStates(tmp_path / "states").save(1, state(1))


def test_what_a_killed_write_left_is_ignored_and_written_over(tmp_path):
    states = TrainingStates(tmp_path)
    states.save(1, state(1))
    whole = (tmp_path / "update_00000001.pt").read_bytes()
    part = tmp_path / ".update_00000002.pt.part"
    part.write_bytes(whole[: len(whole) // 2])
    loaded, faults = states.load()
    assert (loaded["progress"]["update"], faults) == (1, [])
    states.save(2, state(2))
    assert files(tmp_path) == ["update_00000001.pt", "update_00000002.pt"]

    weights = tmp_path / "w.safetensors"
    save_weights(weights, {"a": BIG}, {"number": 1})
    (tmp_path / ".w.safetensors.part").write_bytes(weights.read_bytes()[:1000])
    assert load_weights(weights)[1] == {"number": 1}
    save_weights(weights, {"a": BIG}, {"number": 2})
    assert load_weights(weights)[1] == {"number": 2}
    assert not any(name.endswith(".part") for name in files(tmp_path))


DAMAGES = {
    "truncated": lambda data: data[:-200],
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "random": lambda data: bytes(range(256)) * 20,
    "text": lambda data: b"not a state",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_of_a_damaged_newest_state_the_one_before_is_loaded_and_it_is_said(tmp_path, kind):
    states = TrainingStates(tmp_path)
    states.save(1, state(1))
    states.save(2, state(2))
    path = tmp_path / "update_00000002.pt"
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    loaded, faults = states.load()
    assert loaded["progress"]["update"] == 1
    assert len(faults) == 1
    assert faults[0].startswith(f"{path} can't be read: ")
    assert "\n" not in faults[0]


def test_damaged_states_alone_are_refused_with_all_names(tmp_path):
    states = TrainingStates(tmp_path)
    for update in (1, 2):
        states.save(update, state(update))
        (tmp_path / f"update_0000000{update}.pt").write_bytes(b"gone")
    with pytest.raises(ValueError, match="No other state is left; start anew with another --out") as caught:
        states.load()
    assert "update_00000001.pt" in str(caught.value)
    assert "update_00000002.pt" in str(caught.value)


def test_after_a_damaged_state_two_readable_ones_are_kept_again(tmp_path):
    states = TrainingStates(tmp_path)
    states.save(1, state(1))
    states.save(9, state(9))
    (tmp_path / "update_00000009.pt").write_bytes(b"gone")
    for update in (2, 3, 4):
        states.save(update, state(update))
    assert states.load()[0]["progress"]["update"] == 4
    (tmp_path / "update_00000004.pt").write_bytes(b"gone")
    assert states.load()[0]["progress"]["update"] == 3


def test_no_message_advises_to_switch_safety_off(tmp_path):
    for number, content in enumerate((b"not a state", pickle.dumps({"progress": Path("x")}, protocol=2)), 1):
        (tmp_path / f"update_{number}.pt").write_bytes(content)
    with pytest.raises(ValueError, match="No other state is left") as caught:
        TrainingStates(tmp_path).load()
    assert "weights_only" not in str(caught.value)
    assert "False" not in str(caught.value)


class Harmful:
    """Would make a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["pickle", "torch", "torch, old"])
def test_a_harmful_pickle_is_refused_and_not_executed(tmp_path, form):
    mark = tmp_path / "executed"
    content = io.BytesIO()
    if form == "pickle":
        pickle.dump({"progress": Harmful(mark)}, content, protocol=2)
    else:
        torch.save({"progress": Harmful(mark)}, content, _use_new_zipfile_serialization=form == "torch")
    states = TrainingStates(tmp_path / "states")
    states.save(1, state(1))
    (tmp_path / "states" / "update_00000002.pt").write_bytes(content.getvalue())
    loaded, faults = states.load()
    assert loaded["progress"]["update"] == 1
    assert len(faults) == 1
    assert not mark.exists()

    (tmp_path / "states" / "update_00000001.pt").unlink()
    with pytest.raises(ValueError, match=r"update_00000002\.pt can't be read"):
        states.load()
    with pytest.raises(ValueError, match="is damaged or no safetensors file"):
        load_weights(tmp_path / "states" / "update_00000002.pt")
    assert not mark.exists()
    if form == "pickle":  # the file would do harm if it were unpickled
        pickle.loads(content.getvalue())
        assert mark.exists()
