"""Checks that weights and states come back bit by bit, survive failed writes, and that nothing is ever executed."""

import errno
import io
import os
import pickle
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vit_scratch.training import checkpoint
from vit_scratch.training.checkpoint import SaveError, TrainingStates, load_weights, replacing, save_weights

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
                "description": data.replace(b'\\"format\\": 1', b'\\"format\\"; 1'),
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
    with pytest.raises(ValueError, match=r"w\.safetensors is damaged or no safetensors file"):
        load_weights(path)


@pytest.mark.parametrize("kind", ["foreign", "foreign without header"])
def test_weights_of_others_are_refused(tmp_path, kind):
    path = tmp_path / "w.safetensors"
    save_weights(path, WEIGHTS, DESCRIPTION)
    damage(path, kind)
    with pytest.raises(ValueError, match=r"w\.safetensors.* was not written by vit_scratch"):
        load_weights(path)


def test_missing_weights_are_refused(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(ValueError, match=f"{path} does not exist"):
            load_weights(path)


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
