"""Checks which parameters go where and which decay, and the steps of AdamW and Muon against recurrences in float64."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from vit_scratch.training.optimizer import Muon, adamw, make_optimizers, orthogonalise, parameter_groups
from vit_scratch.transformer.decoder import Decoder
from vit_scratch.transformer.encoder import Encoder
from vit_scratch.transformer.transformer import Transformer
from vit_scratch.vision.patch_embedding import ConvolutionalStem
from vit_scratch.vision.vit import create_vit

SMALL = dict(image_size=8, dim=16, depth=2, heads=2, num_classes=3)
VARIANTS = {
    "class token": {},
    "mean": dict(pooling="mean"),
    "everything": dict(registers=2, layer_scale=1e-4, qk_norm=True),
    "sinusoidal": dict(positions="sinusoidal", registers=1),
    "rotary": dict(positions="rotary", pooling="mean"),
    "no head": dict(num_classes=0),
    "convolutions": dict(stem="convolution", feed_forward_kernel=3, pooling="mean"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_in_exactly_one_group(variant):
    model = create_vit("tiny_patch4_32", **SMALL | VARIANTS[variant])
    groups = parameter_groups(model, 0.05)
    names = [n for group in groups for n in group["names"]]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    by_name = dict(model.named_parameters())
    for group in groups:
        assert all(by_name[n] is p for n, p in zip(group["names"], group["params"], strict=True))
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_weight_matrices_decay_and_nothing_else(variant):
    model = create_vit("tiny_patch4_32", **SMALL | VARIANTS[variant])
    expected = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    decayed, rest = (set(group["names"]) for group in parameter_groups(model, 0.05))
    assert decayed == expected
    special = {"class_token", "register_tokens", "positions"}
    for name in rest:
        assert name in special or name.endswith("bias") or "norm" in name or "scale" in name, name
    assert not any("norm" in n or "scale" in n or n.endswith("bias") for n in decayed)


def test_a_model_with_everything_has_everything():
    model = create_vit("tiny_patch4_32", **SMALL | VARIANTS["everything"])
    rest = set(parameter_groups(model, 0.05)[1]["names"])
    assert {"class_token", "register_tokens", "positions"} <= rest
    assert sum("scale" in name for name in rest) >= 4
    assert sum("norm" in name for name in rest) >= 10


def test_frozen_parameters_are_in_no_group():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    decayed, rest = (group["names"] for group in parameter_groups(model, 0.1))
    assert (decayed, rest) == (["2.weight"], ["1.weight", "1.bias", "2.bias"])


def test_a_step_without_gradient_shrinks_only_what_decays():
    model = create_vit("tiny_patch4_32", **SMALL | VARIANTS["everything"])
    decayed = set(parameter_groups(model, 0.05)[0]["names"])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = adamw(model, lr=0.1, betas=(0.9, 0.999), weight_decay=0.05)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 0.1 * 0.05 if name in decayed else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_steps_equal_the_recurrence_of_the_paper(weight_decay):
    torch.manual_seed(0)
    model, (lr, beta1, beta2) = nn.Linear(3, 2), (0.05, 0.8, 0.95)
    optimizer = adamw(model, lr=lr, betas=(beta1, beta2), weight_decay=weight_decay)
    values = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    moments = {n: (np.zeros_like(v), np.zeros_like(v)) for n, v in values.items()}
    generator = np.random.default_rng(0)
    for step in range(1, 6):
        for name, p in model.named_parameters():
            gradient = generator.normal(size=p.shape)
            p.grad = torch.from_numpy(gradient).float()
            first, second = moments[name]
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * gradient**2
            moments[name] = (first, second)
            decay = weight_decay if name == "weight" else 0.0
            step_size = (first / (1 - beta1**step)) / (np.sqrt(second / (1 - beta2**step)) + 1e-8)
            values[name] = values[name] * (1 - lr * decay) - lr * step_size
        optimizer.step()
        for name, p in model.named_parameters():
            np.testing.assert_allclose(p.detach().numpy(), values[name], rtol=1e-5, atol=1e-6)


def test_the_state_of_the_optimizer_holds_no_names():
    optimizer = adamw(nn.Linear(3, 2), lr=0.1, betas=(0.9, 0.999), weight_decay=0.1)
    assert all("names" not in group for group in optimizer.state_dict()["param_groups"])


def test_what_is_left_out_is_in_no_group():
    model = create_vit("tiny_patch4_32", **SMALL)
    named = dict(model.named_parameters())
    left_out = {"encoder.layers.0.attention.qkv.weight", "head.bias"}
    optimizer = adamw(model, lr=0.1, betas=(0.9, 0.999), weight_decay=0.1, leave_out=left_out)
    for group, whole in zip(optimizer.param_groups, parameter_groups(model, 0.1), strict=True):
        expected = [named[n] for n in whole["names"] if n not in left_out]
        assert len(expected) == len(whole["names"]) - 1
        assert [id(p) for p in group["params"]] == [id(p) for p in expected]
        assert group["weight_decay"] == whole["weight_decay"]


def orthogonalised(matrix, steps=5):
    """By singular values in float64: each step maps s to 3.4445 s - 4.7750 s^3 + 2.0315 s^5."""
    u, s, v = np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)
    s = s / np.sqrt((s**2).sum(-1, keepdims=True))
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s[..., None, :] @ v


SHAPES = [(4, 9), (9, 4), (6, 6), (1, 5), (5, 1), (1, 1), (3, 8, 5), (2, 3, 5, 8), (2, 1, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
def test_orthogonalising_maps_singular_values_by_the_polynomial_five_times(shape, dtype, tolerance):
    matrices = np.random.default_rng(0).normal(size=shape) * 37.0
    found = orthogonalise(torch.from_numpy(matrices).to(dtype))
    assert (found.dtype, found.shape) == (dtype, shape)
    np.testing.assert_allclose(found.double().numpy(), orthogonalised(matrices), rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(4, 6), (3, 8), (8, 3)])
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_as_many_steps_as_asked_for(steps, shape):
    matrix = np.random.default_rng(1).normal(size=shape)
    found = orthogonalise(torch.from_numpy(matrix), steps).numpy()
    np.testing.assert_allclose(found, orthogonalised(matrix, steps), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(8, 8), (8, 12), (8, 32), (32, 8)])
def test_small_singular_values_keep_their_directions_in_single_precision(shape):
    left, right = (np.linalg.qr(np.random.default_rng(6).normal(size=(n, n)))[0] for n in shape)
    matrix = left[:, :8] * np.logspace(0, -3.5, 8) @ right[:, :8].T
    found = orthogonalise(torch.from_numpy(matrix).float()).double().numpy()
    np.testing.assert_allclose(found, orthogonalised(matrix), rtol=0, atol=2e-3)


def test_orthogonalising_does_not_depend_on_the_scale_and_commutes_with_transposing_and_sign():
    matrices = torch.from_numpy(np.random.default_rng(2).normal(size=(3, 7, 5)))
    expected = orthogonalise(matrices)
    for scale in (1e-5, 0.3, 1e6):
        torch.testing.assert_close(orthogonalise(matrices * scale), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(orthogonalise(matrices.mT), expected.mT, rtol=0, atol=1e-10)
    torch.testing.assert_close(orthogonalise(-matrices), -expected, rtol=0, atol=1e-10)
    for matrix, alone in zip(matrices, expected, strict=True):
        torch.testing.assert_close(orthogonalise(matrix), alone, rtol=0, atol=1e-10)


LOWEST, HIGHEST = 0.68, 1.14  # as the docstring of `orthogonalise` has it


@pytest.mark.parametrize("shape", [(12, 12), (12, 30), (30, 12)], ids=str)
def test_singular_values_above_a_hundredth_of_the_norm_end_near_one(shape):
    generator = np.random.default_rng(3)
    left, right = (np.linalg.qr(generator.normal(size=(n, n)))[0] for n in shape)
    ends = []
    for largest in np.linspace(0.3, 0.99, 400):  # the share of the norm that the first singular value has
        others = np.linspace(1, 2, 11)
        others *= np.sqrt((1 - largest**2) / (others**2).sum())
        assert others.min() > 0.01
        values = np.concatenate([[largest], others])
        matrix = left[:, :12] * values @ right[:, :12].T
        ends.append(np.linalg.svd(orthogonalise(torch.from_numpy(matrix)).numpy(), compute_uv=False))
    assert np.min(ends) >= LOWEST
    assert np.max(ends) <= HIGHEST


def test_singular_vectors_stay():
    matrix = np.random.default_rng(4).normal(size=(5, 8))
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    core = u.T @ orthogonalise(torch.from_numpy(matrix)).numpy() @ v.T
    assert np.abs(core - np.diag(np.diag(core))).max() < 1e-10
    assert np.diag(core).min() > 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_matrix_of_zeros_stays_one_also_beside_others(dtype):
    zero = torch.zeros(3, 5, dtype=dtype)
    assert torch.equal(orthogonalise(zero), zero)
    other = torch.arange(15, dtype=dtype).view(3, 5).sin()
    both = orthogonalise(torch.stack([zero, other]))
    assert torch.equal(both[0], zero)
    assert both.isfinite().all()
    torch.testing.assert_close(both[1], orthogonalise(other))
    assert orthogonalise(torch.full((4, 4), 1e-30, dtype=dtype)).isfinite().all()


class Recurrence:
    """Muon as its docstring has it, in float64, for one weight."""

    def __init__(self, weight, *, lr, momentum, weight_decay, stacked=1):
        self.weight, self.average = np.array(weight, np.float64), np.zeros(weight.shape)
        self.lr, self.momentum, self.weight_decay, self.stacked = lr, momentum, weight_decay, stacked

    def step(self, gradient):
        self.average = self.momentum * self.average + (1 - self.momentum) * gradient
        update = self.momentum * self.average + (1 - self.momentum) * gradient
        parts = np.split(update, self.stacked)
        rows, columns = parts[0].reshape(len(parts[0]), -1).shape  # a kernel's row is all that makes one channel
        factor = np.sqrt(max(1, rows / columns))
        direction = np.concatenate([orthogonalised(part.reshape(rows, columns)).reshape(part.shape) for part in parts])
        self.weight = (1 - self.lr * self.weight_decay) * self.weight - self.lr * factor * direction


def parameter(*shape, seed=0, dtype=torch.float64):
    return nn.Parameter(torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype))


MUON_SHAPES = [
    ((4, 7), 1),
    ((9, 4), 1),
    ((5, 5), 1),
    ((12, 4), 3),
    ((6, 5), 3),
    ((24, 4), 2),
    ((6, 2, 3, 3), 1),
    ((8, 3, 1, 2), 2),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.95, 0.0), (0.9, 0.3), (0.0, 0.1)])
@pytest.mark.parametrize(("shape", "stacked"), MUON_SHAPES, ids=str)
def test_muons_steps_equal_its_recurrence(shape, stacked, momentum, weight_decay, dtype, tolerance):
    weight, options = parameter(*shape, dtype=dtype), dict(lr=0.05, momentum=momentum, weight_decay=weight_decay)
    optimizer = Muon([{"params": [weight], "stacked": stacked}], **options)
    expected = Recurrence(weight.detach().numpy(), stacked=stacked, **options)
    generator = np.random.default_rng(1)
    for step in range(6):
        gradient = generator.normal(size=shape) * 10.0 ** (step - 3)  # whose size counts for the average alone
        weight.grad = torch.from_numpy(gradient).to(dtype)
        given = weight.grad.clone()
        optimizer.step()
        expected.step(gradient)
        np.testing.assert_allclose(weight.detach().numpy(), expected.weight, rtol=0, atol=tolerance)
        assert torch.equal(weight.grad, given)


def test_groups_have_rates_decays_and_shapes_of_their_own():
    specification = [
        (dict(lr=0.1), [(4, 6), (6, 4), (4, 6), (4, 4)]),
        (dict(lr=0.02, stacked=3, weight_decay=0.5), [(12, 6), (12, 4), (3, 6), (12, 6)]),
        (dict(momentum=0.5, stacked=2), [(8, 6)]),
    ]
    defaults = dict(lr=0.3, momentum=0.9, weight_decay=0.1)
    groups, expected, seed = [], [], 0
    for options, group_shapes in specification:
        weights = []
        for shape in group_shapes:
            weights.append(parameter(*shape, seed=seed))
            expected.append((weights[-1], Recurrence(weights[-1].detach().numpy(), **defaults | options)))
            seed += 1
        groups.append({"params": weights} | options)
    optimizer = Muon(groups, **defaults)
    generator = np.random.default_rng(9)
    for _ in range(4):
        for weight, recurrence in expected:
            gradient = generator.normal(size=weight.shape)
            weight.grad = torch.from_numpy(gradient)
            recurrence.step(gradient)
        optimizer.step()
        for weight, recurrence in expected:
            np.testing.assert_allclose(weight.detach().numpy(), recurrence.weight, rtol=0, atol=1e-10)


def test_the_defaults_of_muon():
    weight = parameter(3, 4)
    expected = Recurrence(weight.detach().numpy(), lr=0.02, momentum=0.95, weight_decay=0.0)
    optimizer = Muon([weight])
    for seed in range(3):
        gradient = np.random.default_rng(seed).normal(size=(3, 4))
        weight.grad = torch.from_numpy(gradient)
        optimizer.step()
        expected.step(gradient)
    np.testing.assert_allclose(weight.detach().numpy(), expected.weight, rtol=0, atol=1e-10)


def test_stacked_maps_are_apart():
    """A large gradient of one of three maps must not make the updates of the two others small."""
    weight = parameter(12, 4)
    before = weight.detach().clone()
    weight.grad = torch.from_numpy(np.random.default_rng(5).normal(size=(12, 4)))
    weight.grad[:4] *= 1e6
    Muon([{"params": [weight], "stacked": 3}], lr=1.0).step()
    for part in (weight.detach() - before).chunk(3):
        assert 0.6 < torch.linalg.matrix_norm(part, 2) < 1.2


@pytest.mark.parametrize("shape", [(4, 7), (9, 4)], ids=str)
def test_muon_goes_where_torchs_own_goes(shape):
    """torch.optim.Muon computes in bfloat16, and so agrees to two digits."""
    ours, torchs = (parameter(*shape, dtype=torch.float32) for _ in range(2))
    options = dict(lr=0.1, momentum=0.9, weight_decay=0.2)
    optimizers = Muon([ours], **options), torch.optim.Muon([torchs], adjust_lr_fn="original", **options)
    for seed in range(5):
        gradient = np.random.default_rng(seed).normal(size=shape)
        for weight, optimizer in zip((ours, torchs), optimizers, strict=True):
            weight.grad = torch.from_numpy(gradient).float()
            optimizer.step()
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0.02)
    assert (ours - parameter(*shape, dtype=torch.float32)).abs().max() > 0.1


def test_what_has_no_gradient_is_left_alone_and_comes_in_later():
    weights = [parameter(4, 6, seed=seed) for seed in range(3)]
    before = [w.detach().clone() for w in weights]
    options = dict(lr=0.1, momentum=0.9, weight_decay=0.5)
    optimizer = Muon(weights, **options)
    expected = [Recurrence(w.detach().numpy(), **options) for w in weights]
    optimizer.step()
    assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True))
    assert not optimizer.state
    gradients = np.random.default_rng(0).normal(size=(3, 4, 6))
    for having in ((0, 2), (0, 1, 2)):
        for i in having:
            weights[i].grad = torch.from_numpy(gradients[i])
            expected[i].step(gradients[i])
        optimizer.step()
        assert len(optimizer.state) == len(having)
        for w, e in zip(weights, expected, strict=True):
            np.testing.assert_allclose(w.detach().numpy(), e.weight, rtol=0, atol=1e-10)


def test_a_gradient_of_zeros_only_decays():
    weight = parameter(4, 6, dtype=torch.float32)
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    Muon([weight], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach(), before * 0.95, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("shape", "stacked"), [((4,), 1), ((), 1), ((4, 3, 2, 2), 3), ((4, 6), 3), ((2, 6), 4)], ids=str
)
def test_muon_refuses_what_is_no_matrix_or_not_made_of_so_many(shape, stacked):
    good = parameter(6, 3)
    with pytest.raises(ValueError, match="stacked matrices, which Muon takes; give it to AdamW") as caught:
        Muon([{"params": [good]}, {"params": [nn.Parameter(torch.zeros(shape))], "stacked": stacked}])
    assert f"shape {shape} is not {stacked} stacked" in str(caught.value)


def test_muon_goes_on_from_its_state_with_the_same_bits(tmp_path):
    generator = np.random.default_rng(0)
    gradients = [[torch.from_numpy(generator.normal(size=s)).float() for s in ((4, 6), (9, 3))] for _ in range(6)]

    def start(lr):
        weights = [parameter(4, 6, dtype=torch.float32), parameter(9, 3, dtype=torch.float32)]
        groups = [{"params": weights[:1], "lr_ratio": lr}, {"params": weights[1:], "stacked": 3, "weight_decay": lr}]
        return weights, Muon(groups, lr=lr, momentum=0.8)

    def go(weights, optimizer, some):
        for step in some:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()

    weights, optimizer = start(0.1)
    go(weights, optimizer, gradients[:3])
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    middle = [w.detach().clone() for w in weights]
    go(weights, optimizer, gradients[3:])

    resumed, other = start(0.7)
    with torch.no_grad():
        for weight, value in zip(resumed, middle, strict=True):
            weight.copy_(value)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    go(resumed, other, gradients[3:])
    assert all(torch.equal(a, b) for a, b in zip(resumed, weights, strict=True))
    without = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert [{k: v for k, v in g.items() if k != "params"} for g in other.param_groups] == without
    assert [g["stacked"] for g in without] == [1, 3]


def transformer(tie):
    return Transformer(Encoder(8, 2, 2), Decoder(8, 1, 2), source_vocabulary=9, target_vocabulary=9, tie=tie)


MODELS = {name: lambda v=v: create_vit("tiny_patch4_32", **SMALL | v) for name, v in VARIANTS.items()}
MODELS |= {f"encoder-decoder, tie {tie}": lambda tie=tie: transformer(tie) for tie in ("none", "target", "all")}
ATTENTIONS = {"encoder": ["attention"], "decoder": ["self_attention", "cross_attention"]}


def inner_matrices(model):
    """Names of the matrices of patch embedding, encoder and decoder and of how many maps they consist, by hand."""
    found = {"patch_embedding.projection.weight": 1} if hasattr(model, "patch_embedding") else {}
    if isinstance(getattr(model, "patch_embedding", None), ConvolutionalStem):
        found |= {f"patch_embedding.blocks.{i}.convolution.weight": 1 for i in range(3)}
    for part, attentions in ATTENTIONS.items():
        for i in range(model.get_submodule(part).depth if hasattr(model, part) else 0):
            for attention in attentions:
                found |= {
                    f"{part}.layers.{i}.{attention}.qkv.weight": 3,
                    f"{part}.layers.{i}.{attention}.out.weight": 1,
                }
            found |= {f"{part}.layers.{i}.feed_forward.linear{n}.weight": 1 for n in (1, 2)}
    return found


OPTIONS = dict(lr=0.002, betas=(0.8, 0.95), weight_decay=0.07)


@pytest.mark.parametrize("name", MODELS)
def test_with_muon_every_parameter_is_in_one_group_of_one_optimizer(name):
    model = MODELS[name]()
    names = {id(p): n for n, p in model.named_parameters()}
    first, second = make_optimizers(model, muon_lr=0.03, **OPTIONS)
    assert (type(first), type(second)) == (torch.optim.AdamW, Muon)
    in_groups = [[names[id(p)] for p in g["params"]] for o in (first, second) for g in o.param_groups]
    assert sorted(sum(in_groups, [])) == sorted(names.values())

    inner = inner_matrices(model)
    assert sum(in_groups[2:], []) != []
    assert set(sum(in_groups[2:], [])) == inner.keys()
    assert [g["stacked"] for g in second.param_groups] == [1, 3]
    for group, found in zip(second.param_groups, in_groups[2:], strict=True):
        assert all(inner[n] == group["stacked"] for n in found)
        assert group["lr_ratio"] == 0.03 / 0.002
        assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.03, 0.07, 0.95)

    decayed, rest = (set(g["names"]) for g in parameter_groups(model, 0.07))
    assert set(in_groups[0]) == decayed - inner.keys()
    assert (in_groups[0] == []) == (name == "no head")
    assert set(in_groups[1]) == rest
    for group, decay in zip(first.param_groups, (0.07, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.002, (0.8, 0.95), decay)
        assert group.get("lr_ratio", 1.0) == 1.0
        assert "names" not in group


@pytest.mark.parametrize("muon_lr", [None, 0.03])
def test_frozen_parameters_are_in_no_optimizer(muon_lr):
    model = transformer("all")
    model.encoder.requires_grad_(False)
    frozen = [model.decoder.layers[0].feed_forward.linear1.weight, model.head.bias, model.decoder.norm.weight]
    for p in frozen:
        p.requires_grad_(False)
    frozen += model.encoder.parameters()
    found = [p for o in make_optimizers(model, muon_lr=muon_lr, **OPTIONS) for g in o.param_groups for p in g["params"]]
    assert not {id(p) for p in found} & {id(p) for p in frozen}
    assert len(found) == len({id(p) for p in found}) == len(list(model.parameters())) - len(frozen)


@pytest.mark.parametrize("name", ["everything", "encoder-decoder, tie all"])
def test_without_muon_it_is_adamw_alone(name):
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    (optimizer,) = make_optimizers(model, muon_lr=None, **OPTIONS)
    expected = adamw(twin, **OPTIONS)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.state_dict() == expected.state_dict()
    names, twin_names = ({id(p): n for n, p in m.named_parameters()} for m in (model, twin))
    for a, b in zip(optimizer.param_groups, expected.param_groups, strict=True):
        assert [names[id(p)] for p in a["params"]] == [twin_names[id(p)] for p in b["params"]]
    for step in range(2):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        optimizer.step()
        expected.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_with_muon_each_parameter_takes_the_steps_of_its_optimizer():
    model = MODELS["encoder-decoder, tie all"]().double()
    twin = copy.deepcopy(model)
    inner = inner_matrices(model)
    options = dict(lr=0.03, momentum=0.95, weight_decay=0.07)
    recurrences = {
        n: Recurrence(p.detach().numpy(), stacked=inner[n], **options)
        for n, p in model.named_parameters()
        if n in inner
    }
    optimizers, reference = make_optimizers(model, muon_lr=0.03, **OPTIONS), adamw(twin, **OPTIONS)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            q.grad = p.grad.clone()
            if n in inner:
                recurrences[n].step(p.grad.numpy())
        for optimizer in (*optimizers, reference):
            optimizer.step()
    for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        expected = recurrences[n].weight if n in inner else q.detach().numpy()
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=1e-10)


def test_without_matrices_to_train_muon_is_left_out():
    model = create_vit("tiny_patch4_32", **SMALL)
    model.encoder.requires_grad_(False)
    model.patch_embedding.requires_grad_(False)
    options = dict(muon_lr=0.01, lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    assert [type(o) for o in make_optimizers(model, **options)] == [torch.optim.AdamW]
    assert [type(o) for o in make_optimizers(nn.Linear(3, 2), **options)] == [torch.optim.AdamW]
