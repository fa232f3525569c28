"""Checks that linear maps are torch's own: values and all kinds of derivatives, also where oneDNN computes them."""

import copy
import itertools
import pickle
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from vit_scratch.transformer.decoder import Decoder
from vit_scratch.transformer.encoder import Encoder
from vit_scratch.transformer.linear import Linear, linear, matrices, onednn_is_faster
from vit_scratch.transformer.transformer import Transformer

IN, OUT = 6, 7
ROWS = [(5,), (1,), (3, 4), (1, 1), (2, 3, 4)]
ONEDNN_NAME = "mkldnn::_linear_pointwise"
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")


@pytest.fixture(autouse=True)
def _whatever_the_processor(monkeypatch):
    """oneDNN's products are tested where they are not the faster ones, too."""
    monkeypatch.setattr("vit_scratch.transformer.linear.ONEDNN", torch.backends.mkldnn.is_available())


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(rows=(3, 4), bias=True):
    return random(*rows, IN, seed=1), random(OUT, IN, seed=2), random(OUT, seed=3) if bias else None


class Products(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def by_onednn(function):
    """Whether oneDNN's product is called."""
    with Products() as products:
        function()
    assert products.names
    return ONEDNN_NAME in products.names


def gradients(function, tensors, gradient_of=None):
    """The output of a function of tensors and the gradients of those that need one, for a fixed random cotangent."""
    leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
    output = function(*leaves)
    needed = [t for t in leaves if t is not None and t.requires_grad]
    cotangent = random(*output.shape, seed=9) if gradient_of is None else gradient_of(output)
    return output, torch.autograd.grad(output, needed, cotangent)


def all_trained(tensors):
    """The same tensors, strides kept, with a gradient needed."""
    return [None if t is None else t.detach().requires_grad_() for t in tensors]


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def assert_like_torch(tensors, gradient_of=None):
    """Values, shapes and gradients are those of torch's linear, and of its formulas in float64."""
    output, found = gradients(linear, all_trained(tensors), gradient_of)
    expected, wanted = gradients(F.linear, all_trained(tensors), gradient_of)
    assert_close(output, expected)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b)

    x, weight, bias = (None if t is None else t.detach().double().numpy() for t in tensors)
    cotangent = random(*output.shape, seed=9) if gradient_of is None else gradient_of(output)
    g = cotangent.double().numpy()
    reference = np.einsum("...i,oi->...o", x, weight) + (0 if bias is None else bias)
    flat_g, flat_x = g.reshape(-1, OUT), x.reshape(-1, x.shape[-1])
    formulas = [np.einsum("...o,oi->...i", g, weight), np.einsum("ro,ri->oi", flat_g, flat_x), flat_g.sum(0)]
    np.testing.assert_allclose(output.detach().numpy(), reference, rtol=2e-5, atol=2e-5)
    for a, formula in zip(found, formulas, strict=False):
        np.testing.assert_allclose(a.numpy(), formula, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", ROWS)
def test_values_and_gradients_are_those_of_torch_and_of_float64(rows, bias):
    assert_like_torch(inputs(rows, bias))


LAYOUTS = {
    "transposed weight": lambda x, w, b: (x, random(IN, OUT).t(), b),
    "rows of a larger weight": lambda x, w, b: (x, random(3 * OUT, IN)[OUT : 2 * OUT], random(3 * OUT)[OUT : 2 * OUT]),
    "every other row of a weight": lambda x, w, b: (x, random(2 * OUT, IN)[::2], b),
    "every other column of a weight": lambda x, w, b: (x, random(OUT, 2 * IN)[:, 1::2], b),
    "expanded weight": lambda x, w, b: (x, random(1, IN).expand(OUT, IN), b),
    "strided bias": lambda x, w, b: (x, w, random(2 * OUT)[::2]),
    "expanded bias": lambda x, w, b: (x, w, random(1).expand(OUT)),
    "bias in a column": lambda x, w, b: (x, w, random(OUT, 3)[:, 1]),
    "transposed input": lambda x, w, b: (random(4, 3, IN).transpose(0, 1), w, b),
    "input with its width in front": lambda x, w, b: (random(IN, 3, 4).permute(1, 2, 0), w, b),
    "every other column of an input": lambda x, w, b: (random(3, 4, 2 * IN)[..., ::2], w, b),
    "every other row of an input": lambda x, w, b: (random(3, 8, IN)[:, ::2], w, b),
    "expanded input": lambda x, w, b: (random(1, 1, IN).expand(3, 4, IN), w, b),
    "input of one number a row": lambda x, w, b: (random(3, 4, 1).expand(3, 4, IN), w, b),
    "width 1": lambda x, w, b: (random(3, 4, 1), random(OUT, 1), b),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_in_memory_does_not_matter(layout):
    tensors = LAYOUTS[layout](*inputs())
    assert all(t.is_contiguous() for t in tensors) == (layout in ("rows of a larger weight", "width 1"))
    assert_like_torch(tensors)


@pytest.mark.parametrize(
    "gradient_of",
    [
        lambda y: torch.ones(()).expand_as(y),  # that of a sum
        lambda y: random(1, y.shape[-1]).expand_as(y),
        lambda y: random(*reversed(y.shape)).permute(*range(y.dim() - 1, -1, -1)),
        lambda y: random(*y.shape[:-1], 2 * y.shape[-1])[..., ::2],
        torch.zeros_like,
    ],
)
def test_a_gradient_may_have_any_layout(gradient_of):
    assert_like_torch(inputs(), gradient_of)


NAMES = ("x", "weight", "bias")
SOME = [subset for count in (1, 2, 3) for subset in itertools.combinations(range(3), count)]


@pytest.mark.parametrize("needed", SOME, ids=lambda s: "+".join(NAMES[i] for i in s))
def test_gradients_of_what_needs_one_and_of_nothing_else(needed):
    tensors = inputs()
    for i in needed:
        tensors[i].requires_grad_()
    _, expected = gradients(F.linear, tensors)
    with FlopCounterMode(display=False) as counter:
        output, found = gradients(linear, tensors)
    assert output.requires_grad
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)
    product = 2 * 12 * IN * OUT
    assert counter.get_total_flops() == product * (1 + (0 in needed) + (1 in needed))  # no product for nothing

    linear(*tensors).sum().backward()
    assert [t.grad is not None for t in tensors] == [i in needed for i in range(3)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(0,), (3, 0), (0, 4)])
def test_an_empty_batch_gives_an_empty_output_and_gradients_of_zero(rows, bias):
    output, (x, weight, *rest) = gradients(linear, all_trained(inputs(rows, bias)))
    assert output.shape == (*rows, OUT)
    assert x.shape == (*rows, IN)
    assert torch.equal(weight, torch.zeros(OUT, IN))
    assert len(rest) == bias
    assert all(torch.equal(r, torch.zeros(OUT)) for r in rest)


@pytest.mark.parametrize("bias", [True, False])
def test_a_map_from_no_inputs_is_its_bias(bias):
    tensors = random(5, 0), random(OUT, 0), random(OUT) if bias else None
    output, (x, weight, *rest) = gradients(linear, all_trained(tensors))
    assert torch.equal(output, random(OUT).expand(5, OUT) if bias else torch.zeros(5, OUT))
    assert (x.shape, weight.shape) == ((5, 0), (OUT, 0))
    assert all(torch.equal(r, random(5, OUT, seed=9).sum(0)) for r in rest)
    assert len(rest) == bias


def test_a_map_to_no_outputs_gives_none_and_gradients_of_zero():
    tensors = random(5, IN), random(0, IN), random(0)
    for function in (F.linear, linear):
        output, found = gradients(function, all_trained(tensors))
        assert output.shape == (5, 0)
        assert [g.shape for g in found] == [(5, IN), (0, IN), (0,)]
        assert not found[0].any()


def sequential(a, b):
    """The product of (n, k) and (k, m) as the plainest program sums it in float32, one term after the other."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total = total + a[:, k : k + 1] * b[k]
    return total


def test_a_large_map_and_its_gradients_are_float32s():
    """Whatever the order of the sums, which differs between processors; TF32 and bfloat16 are 350 times further off."""
    x, weight, bias = random(130, 700), random(257, 700, seed=1), random(257, seed=2)
    cotangent, zero = random(130, 257, seed=3), torch.zeros(())
    output, (of_x, of_weight, _) = gradients(linear, all_trained((x, weight, bias)), lambda y: cotangent)
    products = [(output, x, weight.t(), bias), (of_x, cotangent, weight, zero), (of_weight, cotangent.t(), x, zero)]
    for product, a, b, c in products:
        exact = a.double() @ b.double() + c.double()
        assert (product - exact).abs().max() < 3 * (sequential(a, b) + c - exact).abs().max()


@pytest.mark.parametrize("needed", SOME, ids=lambda s: "+".join(NAMES[i] for i in s))
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_gradients_are_torchs(needed, bias):
    def second(function):
        tensors = list(inputs(bias=bias))
        needing = [i for i in needed if tensors[i] is not None]
        for i in needing:
            tensors[i].requires_grad_()
        leaves = [tensors[i] for i in needing]
        first = torch.autograd.grad((function(*tensors) ** 3).mean(), leaves, create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in first), leaves)

    if needed == (2,) and not bias:
        return
    for a, b in zip(second(linear), second(F.linear), strict=True):
        assert b.abs().max() > 1e-3
        assert_close(a, b)


def test_a_weight_that_changes_before_the_backward_pass_is_noticed():
    x, weight, bias = all_trained(inputs())
    output = linear(x, weight, bias)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


X, WEIGHT, BIAS = inputs()
MANY_X, MANY_WEIGHTS, MANY_BIASES = random(2, 3, 4, IN), random(2, OUT, IN), random(2, OUT)
TRANSFORMS = {
    "grad of x": lambda f: torch.func.grad(lambda x: (f(x, WEIGHT, BIAS) ** 3).sum())(X),
    "grad of all": lambda f: torch.func.grad(lambda *a: (f(*a) ** 3).sum(), (0, 1, 2))(X, WEIGHT, BIAS),
    "grad of grad": lambda f: torch.func.grad(
        lambda w: (torch.func.grad(lambda x: (f(x, w, BIAS) ** 3).sum())(X) ** 2).sum()
    )(WEIGHT),
    "vmap over x": lambda f: torch.func.vmap(f, (0, None, None))(MANY_X, WEIGHT, BIAS),
    "vmap over single rows": lambda f: torch.func.vmap(torch.func.vmap(lambda x: f(x, WEIGHT, BIAS)))(X),
    "vmap over weights": lambda f: torch.func.vmap(f, (None, 0, None))(X, MANY_WEIGHTS, BIAS),
    "vmap over weights, no bias": lambda f: torch.func.vmap(f, (None, 0))(X, MANY_WEIGHTS),
    "vmap over biases": lambda f: torch.func.vmap(f, (None, None, 0))(X, WEIGHT, MANY_BIASES),
    "vmap over biases in columns": lambda f: torch.func.vmap(f, (None, None, 1))(X, WEIGHT, MANY_BIASES.t()),
    "vmap over all": lambda f: torch.func.vmap(f)(MANY_X, MANY_WEIGHTS, MANY_BIASES),
    "vmap over the last dimension": lambda f: torch.func.vmap(f, (-1, -1, None), 1)(
        MANY_X.movedim(0, -1), MANY_WEIGHTS.movedim(0, -1), BIAS
    ),
    "gradients per sample": lambda f: torch.func.vmap(
        torch.func.grad(lambda w, b, x: (f(x, w, b) ** 3).sum(), (0, 1)), (None, None, 0)
    )(WEIGHT, BIAS, X),
    "jvp of all": lambda f: torch.func.jvp(f, (X, WEIGHT, BIAS), (MANY_X[0], MANY_WEIGHTS[0], MANY_BIASES[0]))[1],
    "jvp of x": lambda f: torch.func.jvp(lambda x: f(x, WEIGHT, BIAS), (X,), (MANY_X[0],))[1],
    "jvp of the weight": lambda f: torch.func.jvp(lambda w: f(X, w, BIAS), (WEIGHT,), (MANY_WEIGHTS[0],))[1],
    "jvp of the bias": lambda f: torch.func.jvp(lambda b: f(X, WEIGHT, b), (BIAS,), (MANY_BIASES[0],))[1],
    "jvp without bias": lambda f: torch.func.jvp(f, (X, WEIGHT), (MANY_X[0], MANY_WEIGHTS[0]))[1],
    "jvp of grad": lambda f: torch.func.jvp(
        torch.func.grad(lambda w: (f(X, w, BIAS) ** 3).sum()), (WEIGHT,), (MANY_WEIGHTS[0],)
    )[1],
    "jacrev": lambda f: torch.func.jacrev(lambda w: f(X[0], w, BIAS))(WEIGHT),
    "jacfwd": lambda f: torch.func.jacfwd(lambda w: f(X[0], w, BIAS))(WEIGHT),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms_are_torchs(transform):
    found, expected = TRANSFORMS[transform](linear), TRANSFORMS[transform](F.linear)
    found, expected = (t if isinstance(t, tuple) else (t,) for t in (found, expected))
    for a, b in zip(found, expected, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=5e-5, atol=5e-5 * b.abs().max().item())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("dual", SOME, ids=lambda s: "+".join(NAMES[i] for i in s))
def test_tangents_of_dual_numbers_are_torchs(dual):
    tangents = MANY_X[0], MANY_WEIGHTS[0], MANY_BIASES[0]
    with torch.autograd.forward_ad.dual_level():
        tensors = [
            torch.autograd.forward_ad.make_dual(t, tangents[i]) if i in dual else t for i, t in enumerate(inputs())
        ]
        found, expected = (torch.autograd.forward_ad.unpack_dual(f(*tensors)) for f in (linear, F.linear))
        assert_close(found.primal, expected.primal)
        assert_close(found.tangent, expected.tangent)
        assert found.tangent.abs().max() > 1e-3


@needs_onednn
@pytest.mark.parametrize("rows", ROWS)
def test_onednn_computes_float32_on_the_cpu_and_the_gradient_of_its_input(rows):
    x, weight, bias = all_trained(inputs(rows))
    assert by_onednn(lambda: linear(x, weight, bias))
    with torch.no_grad():
        assert by_onednn(lambda: linear(x, weight))
        assert by_onednn(lambda: Linear(IN, OUT)(x))
    output = linear(x, weight, bias)
    assert by_onednn(lambda: output.sum().backward())
    output = linear(x.detach(), weight, bias)
    assert not by_onednn(lambda: output.sum().backward())


@needs_onednn
@pytest.mark.parametrize(("capability", "faster"), [("AVX512", True), ("AVX2", False), ("DEFAULT", False)])
def test_onednn_is_for_processors_with_avx512(capability, faster, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert onednn_is_faster() == faster


def test_elsewhere_it_is_torchs_product_bit_by_bit(monkeypatch):
    monkeypatch.setattr("vit_scratch.transformer.linear.ONEDNN", False)
    tensors = all_trained(inputs())
    assert not by_onednn(lambda: linear(*tensors).sum().backward())
    (output, found), (expected, wanted) = (gradients(f, tensors) for f in (linear, F.linear))
    assert torch.equal(output, expected)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_torchs_product_bit_by_bit(dtype):
    tensors = all_trained(t.to(dtype) for t in inputs())
    assert not by_onednn(lambda: linear(*tensors))

    def cotangent(y):
        return random(*y.shape, seed=9).to(dtype)

    (output, found), (expected, wanted) = (gradients(f, tensors, cotangent) for f in (linear, F.linear))
    assert output.dtype == dtype
    assert torch.equal(output, expected)
    assert all(map(torch.equal, found, wanted))


def test_types_that_do_not_fit_are_refused_as_by_torch():
    x, weight, bias = inputs()
    for wrong in ((x, weight.double(), bias.double()), (x.double(), weight, bias), (x, weight.bfloat16(), None)):
        with pytest.raises(RuntimeError) as torchs:
            F.linear(*wrong)
        with pytest.raises(RuntimeError, match=re.escape(str(torchs.value))):
            linear(*wrong)


def test_autocast_gives_bfloat16_and_gradients_in_float32():
    tensors = all_trained(inputs())

    def under_autocast(function):
        with torch.autocast("cpu", torch.bfloat16):
            return function(*tensors)

    output, expected = (under_autocast(f) for f in (linear, F.linear))
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    found, wanted = (torch.autograd.grad(y.float().square().sum(), tensors) for y in (output, expected))
    assert [g.dtype for g in found] == [torch.float32] * 3
    assert all(map(torch.equal, found, wanted))
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert linear(*tensors).dtype == torch.float32


@pytest.mark.parametrize("bias", [True, False])
def test_a_single_vector_is_mapped(bias):
    x, weight, b = inputs((), bias)
    assert x.shape == (IN,)
    (output, found), (expected, wanted) = (gradients(f, all_trained((x, weight, b))) for f in (linear, F.linear))
    assert torch.equal(output, expected)
    assert all(map(torch.equal, found, wanted))
    exact = weight.double() @ x.double() + (0 if b is None else b.double())
    assert_close(output.double(), exact)


@pytest.mark.parametrize("rows", [(5,), (3, 4), (0,)])
def test_the_meta_device_gives_shapes(rows):
    layer, x = Linear(IN, OUT, device="meta"), torch.empty(*rows, IN, device="meta")
    assert not by_onednn(lambda: layer(x))  # which is the CPU's
    output = layer(x)
    assert (output.shape, output.device.type, output.dtype) == ((*rows, OUT), "meta", torch.float32)


def test_compiled_as_one_graph_it_is_torchs_linear():
    graphs = []

    def backend(graph, example):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    layer, (x, _, _) = Linear(IN, OUT), inputs()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x), F.linear(x, layer.weight, layer.bias))
    assert graphs == [[F.linear]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("rows", ROWS)
def test_torchs_counter_counts_two_operations_for_each_multiply_add(rows, device):
    layer = Linear(IN, OUT, device=device)
    x = torch.ones(*rows, IN, device=device, requires_grad=True)
    product = 2 * int(np.prod(rows)) * IN * OUT
    with FlopCounterMode(display=False) as forward:
        output = layer(x)
    assert forward.get_total_flops() == product
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert backward.get_total_flops() == 2 * product


def test_a_linear_map_is_an_nn_linear():
    torch.manual_seed(0)
    layer, reference = Linear(IN, OUT), nn.Linear(3, 2)
    torch.manual_seed(0)
    reference = nn.Linear(IN, OUT)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features, layer.stacked) == (IN, OUT, 1)
    state = layer.state_dict()
    assert list(state) == list(reference.state_dict()) == ["weight", "bias"]
    assert all(torch.equal(state[n], w) for n, w in reference.state_dict().items())  # the same first weights, too
    other = nn.Linear(IN, OUT)
    other.load_state_dict(state)
    layer.load_state_dict(nn.Linear(IN, OUT).state_dict())
    assert torch.equal(other.weight, state["weight"]) == torch.equal(layer.weight, reference.weight)
    assert list(Linear(IN, OUT, bias=False).state_dict()) == ["weight"]
    assert Linear(IN, OUT, bias=False).bias is None
    assert Linear(IN, OUT, dtype=torch.float64).weight.dtype == torch.float64
    assert Linear(IN, 3 * OUT, stacked=3).stacked == 3


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_map_computes_what_an_nn_linear_of_its_weights_computes(bias):
    layer, reference = Linear(IN, OUT, bias=bias), nn.Linear(IN, OUT, bias=bias)
    reference.load_state_dict(layer.state_dict())
    outputs = []
    for module in (layer, reference):
        x = random(3, 4, IN).requires_grad_()
        output = module(x)
        (output**2).sum().backward()
        outputs.append([output, x.grad, *[p.grad for p in module.parameters()]])
    assert len(outputs[0]) == 3 + bias
    for a, b in zip(*outputs, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_is_equal_and_has_weights_of_its_own(copy_of):
    layer, x = Linear(IN, 3 * OUT, stacked=3), random(4, IN)
    copied = copy_of(layer)
    assert type(copied) is Linear
    assert copied.stacked == 3
    assert torch.equal(copied(x), layer(x))
    with torch.no_grad():
        copied.weight.zero_()
    assert not torch.equal(copied(x), layer(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_values_are_the_same(mode):
    tensors = all_trained(inputs())
    expected = linear(*tensors)
    assert expected.requires_grad
    with mode():
        output = linear(*tensors)
    assert torch.equal(output, expected)
    assert not output.requires_grad
    assert output.is_inference() == (mode is torch.inference_mode)


ATTENTION = {"qkv.weight": 3, "out.weight": 1}
FEED_FORWARD = {"feed_forward.linear1.weight": 1, "feed_forward.linear2.weight": 1}


def in_layers(depth, *attentions):
    """The matrices of a stack of layers, by hand."""
    layer = {f"{a}.{n}": stacked for a in attentions for n, stacked in ATTENTION.items()} | FEED_FORWARD
    return {f"layers.{i}.{n}": stacked for i in range(depth) for n, stacked in layer.items()}


def test_matrices_are_the_weights_of_all_linear_maps_with_how_many_are_stacked():
    encoder, decoder = Encoder(8, 2, 2, layer_scale=0.1, qk_norm=True), Decoder(8, 3, 2)
    in_encoder, in_decoder = in_layers(2, "attention"), in_layers(3, "self_attention", "cross_attention")
    assert (len(in_encoder), len(in_decoder)) == (8, 18)
    assert matrices(encoder) == in_encoder
    assert matrices(decoder) == in_decoder
    for module, found in ((encoder, in_encoder), (decoder, in_decoder)):
        parameters = dict(module.named_parameters())
        assert found.keys() == {n for n, p in parameters.items() if p.dim() == 2}
        for name, stacked in found.items():
            assert parameters[name].shape[0] % stacked == 0
            if stacked == 3:
                assert parameters[name].shape == (24, 8)
    model = Transformer(encoder, decoder, source_vocabulary=11, target_vocabulary=11, tie="all")
    expected = {f"encoder.{n}": s for n, s in in_encoder.items()} | {f"decoder.{n}": s for n, s in in_decoder.items()}
    assert model.hidden_matrices() == expected  # neither embeddings nor head
    assert matrices(model) == expected | {"head.weight": 1}


def test_matrices_of_a_model_without_linear_maps_are_none():
    assert matrices(nn.Sequential(nn.LayerNorm(3), nn.Embedding(3, 4))) == {}
    assert matrices(nn.Sequential(Linear(2, 6, stacked=2), nn.ReLU(), Linear(6, 1))) == {"0.weight": 2, "2.weight": 1}


def test_convolutions_are_matrices_unless_each_channel_stands_alone():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6), Linear(6, 1))
    assert matrices(model) == {"0.weight": 1, "3.weight": 1}


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_bias_that_is_broadcast_is_torchs(shape):
    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(shape)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (torch.ones(4, 6), None),
        (torch.ones(4, 5), torch.ones(3)),
        (torch.ones(5), torch.ones(7)),
        (torch.ones(4, 5), torch.ones(4, dtype=torch.float64)),
    ],
    ids=["width", "bias", "vector", "type of the bias"],
)
def test_what_does_not_fit_gets_torchs_message(weight, bias):
    messages = []
    for function in (F.linear, linear):
        with pytest.raises(RuntimeError) as caught:
            function(torch.randn(3, 5), weight, bias)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_map_by_itself_is_named_as_its_parameter():
    assert matrices(Linear(3, 4)) == {"weight": 1}
