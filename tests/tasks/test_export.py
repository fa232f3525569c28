"""The command export: programs that compute what the model does, with what is known about it, or nothing at all."""

import json
import re

import numpy as np
import pytest
import torch

from vit_scratch import beam_search, cli, create_vit, greedy
from vit_scratch.config import SequenceConfig, SequenceDataConfig, SequenceModelConfig, to_dict
from vit_scratch.data.loaders import ImageFormat
from vit_scratch.data.sequences import pad, source_ids
from vit_scratch.tasks import export as module
from vit_scratch.tasks.convert import Classifier, write_ours
from vit_scratch.tasks.export import OnnxTransformer, check_decoding, check_difference
from vit_scratch.tasks.sequence import create_transformer, model_arguments
from vit_scratch.training.checkpoint import save_weights

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SMALL = dict(dim=32, depth=2, heads=4, image_size=16, patch_size=4, num_classes=3)
CONVOLUTIONS = dict(pooling="mean", positions="rotary", stem="convolution", feed_forward_kernel=3, any_size=True)
CLASSES, MEAN, STD = ["cat", "dog", "owl"], [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
LONGEST = 16


def run(*arguments):
    try:
        return cli.main(["export", *[str(a) for a in arguments]])
    except SystemExit as stop:
        return int(stop.code or 0)


def checkpoint(path, **changes):
    """One of our checkpoints with random weights."""
    torch.manual_seed(0)
    model = create_vit(**SMALL | changes).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    channels = model.patch_embedding.in_channels
    form = ImageFormat({1: "L", 3: "RGB"}[channels], model.patch_embedding.image_size, "bilinear")
    known = Classifier(model, CLASSES[: model.num_classes], form, MEAN[:channels], STD[:channels], temperature=1.5)
    write_ours(known, path)
    return model


def expected(model, pixels):
    """Logits for pixels from 0 to 1, normalised by hand."""
    mean, std = (torch.tensor(values[: pixels.shape[1]])[None, :, None, None] for values in (MEAN, STD))
    with torch.no_grad():
        return model((pixels - mean) / std)


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    "changes",
    [
        CONVOLUTIONS,
        dict(registers=2, layer_scale=0.1, qk_norm=True, positions="sinusoidal", image_size=[8, 20])
        | dict(num_classes=0, in_channels=1, activation="quick_gelu", norm_first=False, dropout=0.5, drop_path=0.5),
    ],
)
def test_a_program_of_torch_takes_pixels_of_any_number_of_images_and_knows_the_classes(tmp_path, capsys, changes):
    model = checkpoint(tmp_path / "start.safetensors", **changes)
    assert run(tmp_path / "start.safetensors", tmp_path / "net.pt2") == 0
    printed = capsys.readouterr().out
    difference = float(re.search(r"of the logits, for 1, 2, 7 random images: (\S+)", printed)[1])
    assert difference <= 1e-5
    about = {"classes": "", "preprocessing": ""}
    program = torch.export.load(tmp_path / "net.pt2", extra_files=about).module()
    channels, size = model.patch_embedding.in_channels, model.patch_embedding.image_size
    for batch in (1, 2, 5):
        pixels = torch.rand(batch, channels, *size)
        torch.testing.assert_close(program(pixels), expected(model, pixels), atol=1e-5, rtol=1e-5)
    assert json.loads(about["classes"]) == CLASSES[: model.num_classes]
    look = {"mode": {1: "L", 3: "RGB"}[channels], "image_size": list(size), "interpolation": "bilinear"}
    assert json.loads(about["preprocessing"]) == look | {"mean": MEAN[:channels], "std": STD[:channels]}
    assert {p.name for p in tmp_path.iterdir()} == {"start.safetensors", "net.pt2"}


def test_an_onnx_file_is_one_file_and_computes_what_the_model_does(tmp_path):
    model = checkpoint(tmp_path / "start.safetensors", **CONVOLUTIONS)
    assert run(tmp_path / "start.safetensors", tmp_path / "net.onnx") == 0
    assert {p.name for p in tmp_path.iterdir()} == {"start.safetensors", "net.onnx"}
    onnx.checker.check_model(str(tmp_path / "net.onnx"), full_check=True)
    net = session(tmp_path / "net.onnx")
    assert [(x.name, x.shape, x.type) for x in net.get_inputs()] == [("images", ["batch", 3, 16, 16], "tensor(float)")]
    assert [(x.name, x.shape) for x in net.get_outputs()] == [("logits", ["batch", 3])]
    for batch in (1, 2, 5):
        pixels = torch.rand(batch, 3, 16, 16)
        logits = net.run(None, {"images": pixels.numpy()})[0]
        np.testing.assert_allclose(logits, expected(model, pixels).numpy(), atol=1e-5, rtol=1e-5)
    about = net.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == CLASSES
    assert json.loads(about["preprocessing"])["mean"] == MEAN
    assert json.loads(about["temperature"]) == 1.5


def test_accuracy_of_a_run_before_and_after_export_and_quantisation(tmp_path, capsys):
    options = ["--data.kind", "digits", "--model.patch_size", "2", "--model.dim", "64", "--model.depth", "2"]
    options += ["--model.heads", "2", "--train.epochs", "3", "--train.warmup_epochs", "1", "--device", "cpu"]
    options += ["--train.batch_size", "32", "--train.lr", "3e-3", "--augment.flip", "false", "--augment.shift", "1"]
    options += ["--data.workers", "0", "--out", str(tmp_path / "run")]
    assert cli.main(["train", *options]) == 0
    before = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    capsys.readouterr()
    assert run(tmp_path / "run", tmp_path / "net.onnx", "--quantize", "true", "--evaluate", "true") == 0
    printed = capsys.readouterr().out
    counts = re.findall(r"^test accuracy, (.*): .* % \((\d+)/360\)$", printed, re.MULTILINE)
    assert [name for name, _ in counts] == ["before", "exported", "8-bit integers"]
    correct = [int(count) for _, count in counts]
    assert correct[0] == before["correct"] > 100
    assert abs(correct[1] - correct[0]) <= 1  # a tie may be decided otherwise
    assert abs(correct[2] - correct[0]) <= 15
    large, small, difference = re.search(
        r"8-bit integers: (\S+) MB become (\S+) MB, and logits of up to \S+ differ by at most (\S+)\n", printed
    ).groups()
    assert float(small) < 0.5 * float(large)
    assert f"{(tmp_path / 'net.onnx').stat().st_size / 1e6:.2f}" == small
    assert 0 < float(difference) < 0.5
    stored = {w.name: onnx.numpy_helper.to_array(w) for w in onnx.load(tmp_path / "net.onnx").graph.initializer}
    matrices = [w for w in stored.values() if w.ndim == 2 and w.size >= 64 * 10]
    assert len(matrices) >= 2 * 4 + 1  # of both layers, and of the patches
    assert {w.dtype for w in matrices} == {np.dtype(np.uint8)}
    assert json.loads(session(tmp_path / "net.onnx").get_modelmeta().custom_metadata_map["classes"])[3] == "3"


def test_a_program_that_differs_is_not_written(tmp_path, capsys, monkeypatch):
    checkpoint(tmp_path / "start.safetensors")
    monkeypatch.setattr(module, "compare", lambda *_: (float("nan"), 2.0))
    assert run(tmp_path / "start.safetensors", tmp_path / "net.pt2") == 1
    message = (
        f"could not write {tmp_path / 'net.pt2'}: what it computes differs from the model by nan, more than 0.0002"
    )
    assert message in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"start.safetensors"}


def test_a_model_that_is_too_large_for_one_onnx_file_is_refused(tmp_path, capsys, monkeypatch):
    checkpoint(tmp_path / "start.safetensors")
    monkeypatch.setattr(module, "ONNX_LIMIT", 1000)
    assert run(tmp_path / "start.safetensors", tmp_path / "net.onnx") == 2
    assert "whose weights exceed 2 GiB; take .pt2" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"start.safetensors"}


def test_the_tolerance_grows_with_large_logits_only():
    check_difference(0.9e-4, 0.01)
    check_difference(0.9e-3, 10.0)
    for difference, largest in ((1.1e-4, 0.01), (1.1e-3, 10.0), (float("nan"), 10.0)):
        with pytest.raises(RuntimeError, match="more than"):
            check_difference(difference, largest)


def transformer(path, kind="reverse", tokenizer=None):
    """A file with a sequence model of random weights; with this seed targets depend on their sources, and some end."""
    torch.manual_seed(3)
    config = SequenceConfig(
        model=SequenceModelConfig(dim=32, encoder_depth=1, decoder_depth=2, heads=4, hidden_dim=48, tie="none"),
        data=SequenceDataConfig(kind=kind, symbols=20, longest=LONGEST - 2, max_length=LONGEST),
    )
    arguments = model_arguments(config.model, 23, LONGEST)
    model = create_transformer(**arguments).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.3)
    description = {"task": "sequence", "model": arguments, "tokenizer": tokenizer, "config": to_dict(config)}
    save_weights(path, model.state_dict(), description)
    return model


SOURCES = [[5, 9, 4, 17, 3, 8, 12], [7], [20, 3, 3], [], [6] * (LONGEST - 1)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A sequence model and its exported folder, not to be changed."""
    folder = tmp_path_factory.mktemp("pair")
    model = transformer(folder / "net.safetensors", "text", tokenizer='{"of": "text"}')
    assert run(folder / "net.safetensors", folder / "net") == 0
    return model, folder / "net"


def test_the_exported_pair_generates_what_the_model_does(pair):
    model, folder = pair
    exported = OnnxTransformer(folder)
    source = pad([source_ids(s) for s in SOURCES])
    options = dict(bos_id=1, eos_id=2, max_length=LONGEST - 1)
    for search, more in ((greedy, {}), (beam_search, dict(beams=3))):
        ours, theirs = (search(m, source, **options, **more) for m in (model, exported))
        assert [h.tokens for h in theirs] == [h.tokens for h in ours]
        assert len({tuple(h.tokens) for h in ours}) >= 3
        assert max(len(set(h.tokens)) for h in ours) >= 3
        assert {h.ended for h in ours} == {True, False}
        for a, b in zip(ours, theirs, strict=True):
            assert b.log_probability == pytest.approx(a.log_probability, abs=1e-3)


def test_two_files_need_nothing_but_onnxruntime(pair):
    model, folder = pair
    assert {p.name for p in folder.iterdir()} == {"encoder.onnx", "decoder.onnx", "tokenizer.json"}
    assert (folder / "tokenizer.json").read_text() == '{"of": "text"}'
    encoder, decoder = session(folder / "encoder.onnx"), session(folder / "decoder.onnx")
    shapes = {x.name: x.shape for x in [*encoder.get_inputs(), *decoder.get_inputs()]}
    assert shapes == {
        "source": ["batch", "source"],
        "token": ["batch"],
        "memory": [2, 2, "batch", 4, "source", 8],
        "mask": ["batch", 1, "source"],
        "past": [2, 2, "batch", 4, "length", 8],
    }
    about = {k: int(v) for k, v in decoder.get_modelmeta().custom_metadata_map.items()}
    assert about == {"bos_id": 1, "eos_id": 2, "pad_id": 0, "max_length": LONGEST}
    for source in SOURCES:
        memory, mask = encoder.run(None, {"source": np.array([[*source, about["eos_id"]]])})
        token, past, written = np.array([about["bos_id"]]), memory[..., :0, :], []
        for _ in range(about["max_length"] - 1):
            logits, past = decoder.run(None, {"token": token, "memory": memory, "mask": mask, "past": past})
            logits[:, [about["pad_id"], about["bos_id"]]] = -np.inf  # which are never written
            token = logits.argmax(axis=1)
            if token[0] == about["eos_id"]:
                break
            written.append(int(token[0]))
        [hypothesis] = greedy(model, pad([source_ids(source)]), bos_id=1, eos_id=2, max_length=LONGEST - 1)
        assert written == hypothesis.tokens


class Wrong:
    """A model that likes least what another one likes best."""

    pad_id = 0

    def __init__(self, model):
        self.start, self.right = model.start, model

    def step(self, tokens, state):
        return -self.right.step(tokens, state)


def test_a_pair_that_writes_something_else_is_not_left(tmp_path, capsys, monkeypatch):
    model = transformer(tmp_path / "net.safetensors")
    with pytest.raises(RuntimeError, match=r"the exported model makes \[.*\] of \[.*\], and the model itself \["):
        check_decoding(model, Wrong(model), 23, LONGEST)
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: None)  # which takes seconds
    monkeypatch.setattr(module, "write_onnx", lambda program, path, *_: path.write_bytes(b"half"))
    monkeypatch.setattr(module, "OnnxTransformer", lambda folder: Wrong(model))
    assert run(tmp_path / "net.safetensors", tmp_path / "out") == 1
    assert "the exported model makes [" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"net.safetensors"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["start.safetensors", "net.pb"], "destination=net.pb is not a .pt2 or an .onnx file"),
        (["start.safetensors", "net"], "destination=net is not a .pt2 or an .onnx file"),
        (["start.safetensors", "there.onnx"], "destination=there.onnx is there already; choose another, or remove it"),
        (["start.safetensors", "no/net.onnx"], "destination=no/net.onnx: there is no folder"),
        (["start.safetensors", "net.pt2", "--quantize", "true"], "quantize=true is for .onnx files, not for"),
        (["cifar10-tiny", "net.onnx", "--evaluate", "true"], "evaluate=true needs a run of ours, which knows its data"),
        (["start.safetensors", "net.pt2", "--evaluate", "true"], "evaluate=true needs test images, and"),
        (["features.safetensors", "net.pt2", "--evaluate", "true"], "the model in features.safetensors has no"),
        (["nothing.safetensors", "net.pt2"], "nothing.safetensors does not exist"),
        (["sequence.safetensors", "net.onnx"], "destination=net.onnx is not a folder, as which sequence models are"),
        (["sequence.safetensors", "net", "--quantize", "true"], "quantize=true is for models for images, and sequence"),
        (["sequence.safetensors", "net", "--evaluate", "true"], "evaluate=true is for models for images, and sequence"),
        (["start.safetensors"], "destination"),
        (["start.safetensors", "net.onnx", "--quantise", "true"], "did you mean quantize?"),
    ],
)
def test_what_can_not_be_exported_ends_with_one_sentence_and_nothing_written(
    tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "start.safetensors")
    checkpoint(tmp_path / "features.safetensors", num_classes=0)
    transformer(tmp_path / "sequence.safetensors")
    (tmp_path / "there.onnx").write_text("mine")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named_with_the_extra_before_any_work(tmp_path, capsys, monkeypatch, package):
    checkpoint(tmp_path / "start.safetensors")
    transformer(tmp_path / "sequence.safetensors")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.setattr(module, "read_classifier", lambda *_: pytest.fail("the model was read"))
    monkeypatch.setattr(module, "load_transformer", lambda *_: pytest.fail("the model was read"))
    for arguments in (("start.safetensors", "net.onnx"), ("sequence.safetensors", "net")):
        assert run(*[tmp_path / a for a in arguments]) == 2
        error = capsys.readouterr().err
        assert f"ONNX needs a package that is missing ({package}); pip install 'vit-scratch[export]'" in error
