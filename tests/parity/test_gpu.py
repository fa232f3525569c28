"""Compares models, batches and training on a GPU with the same on the CPU; skipped where there is none."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F

from vit_scratch import Decoder, Encoder, Transformer, beam_search, cli, create_vit, greedy
from vit_scratch.data.augmentation import BatchTransform
from vit_scratch.data.loaders import HeldImages, MemoryLoader
from vit_scratch.training.optimizer import make_optimizers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
pytestmark = pytest.mark.skipif(DEVICE.type == "cpu", reason="there is no GPU here")


@pytest.fixture(autouse=True)
def _exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def outputs_and_gradients(model, *inputs):
    """Logits and the gradient of every parameter for a fixed direction, on the CPU."""
    device = next(model.parameters()).device
    output = model(*(x.to(device) for x in inputs))
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device)
    gradients = torch.autograd.grad((output * direction).sum(), list(model.parameters()))
    return [t.detach().cpu() for t in (output, *gradients)]


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("pooling", ["class", "mean"])
@pytest.mark.parametrize("size", [32, 24])
def test_a_vision_transformer_gives_the_same_logits_and_gradients(positions, pooling, size):
    torch.manual_seed(0)
    options = dict(dim=48, depth=2, heads=4, positions=positions, pooling=pooling, any_size=True, layer_scale=0.5)
    model = create_vit("tiny_patch4_32", **options)
    images = torch.randn(3, 3, size, size)
    expected = outputs_and_gradients(model, images)
    for a, b in zip(outputs_and_gradients(copy.deepcopy(model).to(DEVICE), images), expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_decoder_gives_the_same_logits_gradients_and_sequences(norm_first):
    torch.manual_seed(0)
    options = dict(dim=32, depth=2, heads=4, norm_first=norm_first)
    model = Transformer(Encoder(**options), Decoder(**options), source_vocabulary=20, target_vocabulary=20)
    source, target = torch.randint(1, 20, (3, 7)), torch.randint(1, 20, (3, 5))
    source[1, 4:] = 0
    other = copy.deepcopy(model).to(DEVICE)
    for a, b in zip(
        outputs_and_gradients(other, source, target), outputs_and_gradients(model, source, target), strict=True
    ):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)
    ids = dict(bos_id=1, eos_id=2, max_length=8)
    for search in (greedy, lambda *a, **k: beam_search(*a, beams=3, **k)):
        expected = [h.tokens for h in search(model.eval(), source, **ids)]
        assert [h.tokens for h in search(other.eval(), source.to(DEVICE), **ids)] == expected


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_rows_without_anything_to_attend_to_stay_finite_in_half_precision(precision):
    encoder = Encoder(32, 2, 4).to(DEVICE)
    x = torch.randn(2, 6, 32, device=DEVICE, requires_grad=True)
    mask = torch.ones(2, 6, 6, dtype=torch.bool, device=DEVICE)
    mask[0, 3] = False
    with torch.autocast(DEVICE.type, precision):
        output = encoder(x, mask)
    output.float().square().sum().backward()
    assert output.isfinite().all()
    assert x.grad.isfinite().all()


def test_batches_are_the_same_on_the_device():
    images = HeldImages(torch.randint(0, 256, (50, 3, 16, 16), dtype=torch.uint8), torch.arange(50) % 7)
    transform = BatchTransform(
        [0.4, 0.5, 0.6], [0.2, 0.2, 0.2], shift=2, flip=True, erase=0.5, mixup=0.4, cutmix=1.0, num_classes=7
    )
    here, there = (MemoryLoader(images, 16, transform, seed=3, device=d) for d in (torch.device("cpu"), DEVICE))
    for (x, y, n), (a, b, m) in zip(here.batches(1), there.batches(1), strict=True):
        assert n == m
        torch.testing.assert_close(a.cpu(), x, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(b.cpu(), y)


def test_muon_takes_nearly_the_same_steps_in_bfloat16():
    torch.manual_seed(0)
    model = create_vit("tiny_patch4_32", dim=48, depth=2, heads=4)
    other = copy.deepcopy(model).to(DEVICE)
    images, labels = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for network in (model, other):
        device = next(network.parameters()).device
        options = dict(muon_lr=0.01, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
        F.cross_entropy(network(images.to(device)), labels.to(device)).backward()
        for optimizer in make_optimizers(network, **options):
            optimizer.step()
    for name in model.hidden_matrices():
        step = model.get_parameter(name) - before[name]
        error = other.get_parameter(name).cpu() - model.get_parameter(name)
        assert error.norm() < 0.05 * step.norm(), name


def test_a_training_learns_and_goes_on_from_its_state(tmp_path):
    options = ["train", "--config", "configs/digits.yaml", "--train.epochs", "6", "--train.optimizer", "muon"]
    options += ["--augment.smaller_first", "[[8, 0.5]]", "--out", str(tmp_path), "--device", DEVICE.type]
    assert cli.main(options) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["test"]["accuracy"] > 0.6
    assert cli.main(["train", "--out", str(tmp_path), "--resume"]) == 0
