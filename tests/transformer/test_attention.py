"""Attention: both paths against each other, a float64 formula and torch.nn.MultiheadAttention; masks, cache, errors."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from vit_scratch.transformer.attention import (
    KeyValueCache,
    MultiHeadAttention,
    attention,
    causal_mask,
    check_heads,
    expand_mask,
    fused_attention,
)
from vit_scratch.transformer.encoder import Encoder, EncoderLayer
from vit_scratch.transformer.positions import rotation_2d

DIM, HEADS, QUERIES, KEYS = 16, 4, 5, 6
PATHS = pytest.mark.parametrize("path", [attention, fused_attention], ids=["readable", "fused"])
MASK_SHAPES = ["NS", "BS"] + [
    "".join(letters) for names in ("BNS", "BHNS") for letters in itertools.product(*[(n, "1") for n in names])
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def attended(path, *args):
    output = path(*args)
    return output[0] if isinstance(output, tuple) else output


def formula(query, key, value, mask=None):
    """Equation 1 in float64, one query at a time."""
    query, key, value = (t.detach().double().numpy() for t in (query, key, value))
    batch, heads, queries, width = query.shape
    allowed = np.ones((batch, heads, queries, key.shape[2]), dtype=bool)
    if mask is not None:
        allowed = np.broadcast_to(mask.numpy(), allowed.shape)
    output, weights = np.zeros_like(query), np.zeros(allowed.shape)
    for b, h, n in itertools.product(range(batch), range(heads), range(queries)):
        keys = np.flatnonzero(allowed[b, h, n])
        if len(keys):
            exponentials = np.exp([query[b, h, n] @ key[b, h, s] / math.sqrt(width) for s in keys])
            weights[b, h, n, keys] = exponentials / exponentials.sum()
            output[b, h, n] = weights[b, h, n, keys] @ value[b, h, keys]
    return torch.from_numpy(output), torch.from_numpy(weights)


def random_mask(letters, batch, keys, queries=QUERIES):
    sizes = {"B": batch, "H": HEADS, "N": queries, "S": keys, "1": 1}
    mask = torch.rand([sizes[letter] for letter in letters]) > 0.4
    rows = mask.view(-1, mask.shape[-1])
    if len(rows) > 1:
        rows[0] = False
        rows[1, 0] = True
    return mask


def run_module(module, x, memory, **options):
    """Output, then the gradients of x, memory and all parameters for one fixed cotangent."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    memory = None if memory is None else memory.clone().requires_grad_()
    output = module(x, memory, **options)
    cotangent = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    output.backward(cotangent)
    leaves = [x] if memory is None else [x, memory]
    return [output.detach()] + [p.grad.clone() for p in leaves + list(module.parameters())]


@PATHS
@pytest.mark.parametrize("letters", [None, "11NS", "B11S", "BHNS"])
def test_attention_equals_the_float64_formula(path, letters):
    query, key, value = (torch.randn(2, HEADS, n, 4) for n in (QUERIES, KEYS, KEYS))
    mask = None if letters is None else random_mask(letters, 2, KEYS)
    expected, expected_weights = formula(query, key, value, mask)
    torch.testing.assert_close(attended(path, query, key, value, mask).double(), expected, atol=1e-6, rtol=1e-5)
    in_double = attended(path, query.double(), key.double(), value.double(), mask)
    torch.testing.assert_close(in_double, expected, atol=1e-12, rtol=1e-12)
    _, weights = attention(query, key, value, mask)
    torch.testing.assert_close(weights.double(), expected_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_multi_head_attention_equals_heads_written_out(fused, cross):
    module = MultiHeadAttention(DIM, HEADS).double()
    module.fused = fused
    x, memory = torch.randn(2, QUERIES, DIM).double(), torch.randn(2, KEYS, DIM).double()
    source = memory if cross else x
    weight, bias = module.qkv.weight.detach(), module.qkv.bias.detach()
    query, key, value = (
        tokens @ weight[part * DIM : (part + 1) * DIM].T + bias[part * DIM : (part + 1) * DIM]
        for part, tokens in enumerate((x, source, source))
    )
    heads = []
    for h in range(HEADS):
        columns = slice(h * DIM // HEADS, (h + 1) * DIM // HEADS)
        heads.append(formula(*(t[:, None, :, columns] for t in (query, key, value)))[0][:, 0])
    expected = torch.cat(heads, dim=-1) @ module.out.weight.T + module.out.bias
    torch.testing.assert_close(module(x, memory if cross else None), expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("case", ["whole", "first queries", "memory", "cached", "cached memory"])
def test_attention_without_biases_is_that_with_biases_of_zero(case):
    without, module = MultiHeadAttention(DIM, HEADS, qkv_bias=False), MultiHeadAttention(DIM, HEADS)
    assert without.qkv.bias is None
    missing = module.load_state_dict(without.state_dict(), strict=False).missing_keys
    assert missing == ["qkv.bias"]
    nn.init.zeros_(module.qkv.bias)
    x, results = torch.randn(2, QUERIES, DIM), []
    memory = torch.randn(2, KEYS, DIM) if "memory" in case else None
    for attend in (without, module):
        cache = KeyValueCache() if "cached" in case else None
        first = attend(x, memory, cache=cache, num_queries=2 if case == "first queries" else None)
        results.append([first] + ([attend(x[:, :1], memory, cache=cache)] if cache else []))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("letters", MASK_SHAPES)
def test_both_paths_agree_in_outputs_and_gradients_for_every_mask_shape(letters, batch, cross, training):
    module = MultiHeadAttention(DIM, HEADS).train(training)
    x = torch.randn(batch, QUERIES, DIM)
    memory = torch.randn(batch, KEYS, DIM) if cross else None
    mask = random_mask(letters, batch, KEYS if cross else QUERIES)
    fused = run_module(module, x, memory, mask=mask)
    module.fused = False
    readable = run_module(module, x, memory, mask=mask)
    for a, b in zip(fused, readable, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("letters", ["NS", "BS", "BNS", "BHNS"])
def test_both_paths_are_finite_and_near_float32_in_half_precision(letters, dtype):
    module = MultiHeadAttention(DIM, HEADS).to(dtype)
    x, mask = torch.randn(2, QUERIES, DIM).to(dtype), random_mask(letters, 2, QUERIES)
    results = []
    for fused in (True, False):
        module.fused = fused
        results.append(run_module(module, x, None, mask=mask))
    exact = MultiHeadAttention(DIM, HEADS)
    exact.load_state_dict(module.state_dict())
    for a, b, c in zip(*results, run_module(exact, x.float(), None, mask=mask), strict=True):
        assert a.dtype == b.dtype == dtype
        assert a.isfinite().all()
        assert b.isfinite().all()
        torch.testing.assert_close(a.float(), c, atol=5e-2, rtol=5e-2)
        torch.testing.assert_close(b.float(), c, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("fused", [False, True])
def test_autocast_with_normalised_queries_runs_and_stays_near_float32(fused):
    module = MultiHeadAttention(DIM, HEADS, qk_norm=True)
    module.fused = fused
    x, mask = torch.randn(2, QUERIES, DIM), random_mask("BS", 2, QUERIES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(x, mask=mask)
    torch.testing.assert_close(output.float(), module(x, mask=mask), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_both_paths_agree_with_rotation_and_normalised_queries(qk_norm):
    module = MultiHeadAttention(DIM, HEADS, qk_norm=qk_norm)
    x, rotation = torch.randn(2, 6, DIM), rotation_2d((2, 2), DIM // HEADS, prefix=2)
    fused = run_module(module, x, None, rotation=rotation)
    module.fused = False
    for a, b in zip(fused, run_module(module, x, None, rotation=rotation), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    without = module(x)
    assert (without - fused[0]).abs().max() > 1e-3


@pytest.mark.parametrize("cross", [False, True])
def test_normalised_queries_and_keys_have_zero_mean_and_unit_variance_per_head(cross):
    module = MultiHeadAttention(DIM, HEADS, qk_norm=True).double()
    x, memory = (30 * torch.randn(2, n, DIM).double() for n in (QUERIES, KEYS))
    query, key, value = module.qkv(x).view(2, QUERIES, 3, HEADS, 4).permute(2, 0, 3, 1, 4).unbind()
    if cross:
        _, key, value = module.qkv(memory).view(2, KEYS, 3, HEADS, 4).permute(2, 0, 3, 1, 4).unbind()
    query, key = (
        (t - t.mean(-1, keepdim=True)) / (t.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt() for t in (query, key)
    )
    expected, expected_weights = formula(query, key, value)
    output, weights = module(x, memory if cross else None, return_weights=True)
    torch.testing.assert_close(weights, expected_weights, atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(output, module.out(expected.transpose(1, 2).flatten(2)), atol=1e-10, rtol=1e-8)


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_nothing_allowed_give_zeros_and_zero_gradients_and_leave_other_rows_alone(path, dtype):
    query, key, value = (torch.randn(2, HEADS, n, 4, dtype=dtype).requires_grad_() for n in (QUERIES, KEYS, KEYS))
    filled = torch.rand(2, 1, QUERIES, KEYS) > 0.5
    filled[..., 0] = True
    mask = filled.clone()
    mask[0, :, 1:3] = False
    mask[1] = False
    output = attended(path, query, key, value, mask)
    assert (output[0, :, 1:3] == 0).all()
    assert (output[1] == 0).all()
    torch.testing.assert_close(output[0, :, [0, 3, 4]], attended(path, query, key, value, filled)[0, :, [0, 3, 4]])
    output.backward(torch.randn_like(output))
    assert (query.grad[0, :, 1:3] == 0).all()
    assert (query.grad[0, :, [0, 3, 4]] != 0).any()
    for tensor in (query, key, value):
        assert tensor.grad.isfinite().all()
        assert (tensor.grad[1] == 0).all()


def test_no_kernel_ever_sees_a_row_with_nothing_allowed(monkeypatch):
    seen, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask, **options):
        seen.append(attn_mask)
        return kernel(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    mask = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])
    MultiHeadAttention(DIM, HEADS)(torch.randn(2, 3, DIM), mask=mask)
    assert torch.equal(seen[0].squeeze(), torch.tensor([[True, False, True], [True] * 3, [False, True, False]]))


def test_a_whole_pass_takes_the_causal_kernel_and_a_step_needs_no_mask(monkeypatch):
    seen, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, is_causal=False, **options):
        seen.append((attn_mask if attn_mask is None else attn_mask.squeeze().tolist(), is_causal))
        return kernel(*args, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    module, x, cache = MultiHeadAttention(DIM, HEADS), torch.randn(2, 3, DIM), KeyValueCache()
    for tokens in (x, x[:, :1], x[:, :2]):
        module(tokens, causal=True, cache=cache)
    assert seen == [(None, True), (None, False), (lower_triangle(2, 6).tolist(), False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_readable_path_takes_the_softmax_in_float32(dtype):
    query, key = torch.randn(1, 2, 5, 4, dtype=dtype), torch.randn(1, 2, 300, 4, dtype=dtype)
    _, weights = attention(query, key, torch.randn(1, 2, 300, 4))
    expected = ((query * 0.5) @ key.transpose(-1, -2)).double().softmax(-1)
    torch.testing.assert_close(weights.double(), expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_fully_masked_sample_comes_out_of_the_module_as_the_output_bias(fused):
    module = MultiHeadAttention(DIM, HEADS)
    module.fused = fused
    x = torch.randn(2, QUERIES, DIM)
    mask = torch.ones(2, QUERIES, dtype=torch.bool)
    full = module(x, mask=mask)
    mask[1] = False
    output = module(x, mask=mask)
    assert torch.equal(output[1], module.out.bias.expand(QUERIES, DIM))
    assert torch.equal(output[0], full[0])


@PATHS
@pytest.mark.parametrize("kept", range(KEYS))
def test_a_mask_with_one_kept_key_returns_that_value_exactly(path, kept):
    query, key, value = (torch.randn(2, HEADS, n, 4) for n in (QUERIES, KEYS, KEYS))
    mask = torch.zeros(1, 1, 1, KEYS, dtype=torch.bool)
    mask[..., kept] = True
    output = attended(path, 100 * query, key, value, mask)
    assert torch.equal(output, value[:, :, kept : kept + 1].expand_as(output))


@pytest.mark.parametrize("letters", MASK_SHAPES)
def test_weights_sum_to_one_or_zero_are_zero_where_masked_and_belong_to_the_fused_output(letters):
    module = MultiHeadAttention(DIM, HEADS)
    x, memory, mask = torch.randn(2, QUERIES, DIM), torch.randn(2, KEYS, DIM), random_mask(letters, 2, KEYS)
    output, weights = module(x, memory, mask=mask, return_weights=True)
    allowed = expand_mask(mask, 2, HEADS, QUERIES, KEYS).expand(2, HEADS, QUERIES, KEYS)
    torch.testing.assert_close(weights.sum(-1), allowed.any(-1).float(), atol=1e-6, rtol=0)
    assert (weights[~allowed] == 0).all()
    assert (weights[allowed] > 0).all()
    torch.testing.assert_close(output, module(x, memory, mask=mask), atol=1e-5, rtol=1e-5)
    assert module.fused


def test_returned_weights_sum_to_one_also_under_dropout():
    module = MultiHeadAttention(DIM, HEADS, dropout=0.5).train()
    _, weights = module(torch.randn(2, QUERIES, DIM), return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, QUERIES))


@PATHS
def test_dropout_drops_single_weights_and_keeps_the_expectation(path):
    queries, keys = 4000, 8
    zeros = torch.zeros(1, 1, queries, 4), torch.zeros(1, 1, keys, 4)
    output = attended(path, *zeros, torch.ones(1, 1, keys, 4), None, 0.5)[0, 0]
    kept = output[:, 0] / (2 / keys)
    torch.testing.assert_close(kept, kept.round())
    assert set(kept.round().int().tolist()) >= {1, 2, 3, 4, 5, 6, 7}
    assert abs(output.mean().item() - 1) < 0.03


@pytest.mark.parametrize("fused", [False, True])
def test_dropout_acts_in_training_only(fused):
    module, x = MultiHeadAttention(DIM, HEADS, dropout=0.5), torch.randn(2, QUERIES, DIM)
    module.fused = fused
    without = MultiHeadAttention(DIM, HEADS)
    without.load_state_dict(module.state_dict())
    without.fused = fused
    assert torch.equal(module.eval()(x), without(x))
    assert not torch.allclose(module.train()(x), without(x), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.float16])
def test_a_mask_that_is_not_boolean_is_refused_with_its_meaning(dtype):
    module = MultiHeadAttention(DIM, HEADS)
    with pytest.raises(ValueError, match=r"torch\.bool, True meaning \"may attend\"") as error:
        module(torch.randn(2, QUERIES, DIM), mask=torch.ones(2, QUERIES, dtype=dtype))
    assert str(dtype) in str(error.value)


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (KEYS,),
        (QUERIES - 1, KEYS),
        (KEYS, QUERIES),
        (1, KEYS),
        (QUERIES, 1),
        (3, KEYS),
        (2, QUERIES, KEYS + 1),
        (HEADS, QUERIES, KEYS),
        (2, 3, QUERIES, KEYS),
        (2, HEADS, QUERIES, KEYS - 1),
        (1, 2, HEADS, QUERIES, KEYS),
    ],
)
def test_a_mask_of_another_shape_is_refused_with_the_accepted_shapes(shape):
    module = MultiHeadAttention(DIM, HEADS)
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ValueError, match="mask has shape") as error:
        module(torch.randn(2, QUERIES, DIM), torch.randn(2, KEYS, DIM), mask=mask)
    for part in (str(shape), "(N, S) = (5, 6)", "(B, S) = (2, 6)", "(B, N, S) = (2, 5, 6)", "(2, 4, 5, 6)"):
        assert part in str(error.value)


@pytest.mark.parametrize("keys", [3, KEYS])
def test_a_mask_that_could_mean_pairs_or_padding_is_refused_and_both_spellings_work(keys):
    module = MultiHeadAttention(DIM, HEADS)
    x, memory = torch.randn(3, 3, DIM), torch.randn(3, keys, DIM)
    mask = torch.rand(3, keys) > 0.4
    mask[:, 0] = True
    with pytest.raises(ValueError, match=r"could be \(N, S\) or \(B, S\)") as error:
        module(x, memory, mask=mask)
    assert "(1, N, S)" in str(error.value)
    assert "(B, 1, S)" in str(error.value)
    everyone = mask[None].expand(3, 3, keys)
    torch.testing.assert_close(module(x, memory, mask=mask[None]), module(x, memory, mask=everyone))
    padded = mask[:, None].expand(3, 3, keys)
    torch.testing.assert_close(module(x, memory, mask=mask[:, None]), module(x, memory, mask=padded))


def test_a_single_query_in_a_batch_of_one_is_no_ambiguity():
    mask = torch.tensor([[True, False, True]])
    assert torch.equal(expand_mask(mask, 1, HEADS, 1, 3), mask[None, None])


@pytest.mark.parametrize("letters", MASK_SHAPES)
def test_expanded_masks_say_the_same_for_every_sample_head_query_and_key(letters):
    mask = random_mask(letters, 2, KEYS)
    expanded = expand_mask(mask, 2, HEADS, QUERIES, KEYS).expand(2, HEADS, QUERIES, KEYS)
    for b, h, n, s in itertools.product(range(2), range(HEADS), range(QUERIES), range(KEYS)):
        place = {"B": b, "H": h, "N": n, "S": s, "1": 0}
        assert expanded[b, h, n, s] == mask[tuple(place[letter] for letter in letters)]


def test_the_causal_mask_allows_a_token_itself_and_what_stands_before_it():
    mask = causal_mask(6)
    assert mask.dtype == torch.bool
    assert all(mask[n, s] == (s <= n) for n in range(6) for s in range(6))


@pytest.mark.parametrize(
    ("length", "keys", "rows"),
    [
        (1, 1, ["x"]),
        (1, 4, ["xxxx"]),
        (2, 4, ["xxx.", "xxxx"]),
        (3, 4, ["xx..", "xxx.", "xxxx"]),
        (3, 3, ["x..", "xx.", "xxx"]),
        (2, 7, ["xxxxxx.", "xxxxxxx"]),
    ],
)
def test_the_causal_mask_of_the_last_tokens_ends_in_the_lower_right_corner(length, keys, rows):
    expected = torch.tensor([[letter == "x" for letter in row] for row in rows])
    assert torch.equal(causal_mask(length, keys), expected)


def lower_triangle(queries, keys):
    """(N, S): key s stands no later than query n, whose place among the keys is S - N + n."""
    return torch.tensor([[s <= keys - queries + n for s in range(keys)] for n in range(queries)])


@pytest.mark.parametrize("queries", range(1, KEYS + 1))
def test_the_fused_causal_path_equals_the_float64_formula_for_any_number_of_last_queries(queries):
    query, key, value = (torch.randn(2, HEADS, n, 4) for n in (queries, KEYS, KEYS))
    expected, _ = formula(query, key, value, lower_triangle(queries, KEYS))
    output = fused_attention(query, key, value, causal=True)
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("batch", [1, 2, QUERIES])
@pytest.mark.parametrize("letters", [None, *MASK_SHAPES])
def test_causal_equals_the_explicit_mask_on_top_of_any_other_in_outputs_weights_and_gradients(letters, batch, fused):
    if batch == QUERIES and letters in ("NS", "BS"):
        letters = {"NS": "1NS", "BS": "B1S"}[letters]  # two dimensions are ambiguous where B = N
    module, x = MultiHeadAttention(DIM, HEADS), torch.randn(batch, QUERIES, DIM)
    module.fused = fused
    mask, explicit = None, lower_triangle(QUERIES, QUERIES)[None, None]
    if letters is not None:
        mask = random_mask(letters, batch, QUERIES)
        explicit = explicit & expand_mask(mask, batch, HEADS, QUERIES, QUERIES)
    causal = run_module(module, x, None, mask=mask, causal=True)
    for a, b in zip(causal, run_module(module, x, None, mask=explicit), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    output, weights = module(x, mask=mask, causal=True, return_weights=True)
    query, key, value = module.qkv(x).view(batch, QUERIES, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(weights.double(), formula(query, key, value, explicit)[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(output, causal[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kept", [range(QUERIES), [4], [2, 3]])
def test_a_causal_row_whose_earlier_tokens_are_all_masked_gives_the_output_bias(kept, fused):
    module, x = MultiHeadAttention(DIM, HEADS), torch.randn(1, QUERIES, DIM)
    nn.init.normal_(module.out.bias)
    module.fused = fused
    mask = torch.tensor([[s in kept for s in range(QUERIES)]])
    output = module(x, mask=mask, causal=True)
    for n in range(QUERIES):
        assert torch.equal(output[0, n], module.out.bias) == (n < min(kept))


# Cache


def test_a_cache_returns_all_that_was_appended_also_after_rows_were_selected():
    cache = KeyValueCache()
    keys = values = torch.empty(3, 2, 0, 4)
    for step, length in enumerate([1, 1, 1, 3, 1, 1, 9, 1]):
        key, value = torch.randn(len(keys), 2, length, 4), torch.randn(len(keys), 2, length, 4)
        keys, values = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        returned = cache.append(key, value)
        assert cache.length == keys.shape[2]
        for pair in (returned, cache.contents()):
            assert torch.equal(pair[0], keys)
            assert torch.equal(pair[1], values)
        if step in (1, 4, 5):
            rows = {1: torch.tensor([2, 0, 0, 1]), 4: torch.tensor([3, 1]), 5: torch.tensor([1, 0, 1])}[step]
            cache.select(rows)
            keys, values = keys[rows], values[rows]
            assert torch.equal(cache.contents()[0], keys)
            assert torch.equal(cache.contents()[1], values)


def test_rows_that_were_selected_twice_go_on_independently():
    cache = KeyValueCache()
    cache.append(torch.zeros(1, 1, 2, 1), torch.ones(1, 1, 2, 1))
    cache.select(torch.tensor([0, 0]))
    key, value = cache.append(torch.tensor([5.0, 6.0]).view(2, 1, 1, 1), torch.tensor([7.0, 8.0]).view(2, 1, 1, 1))
    assert key.flatten(1).tolist() == [[0, 0, 5], [0, 0, 6]]
    assert value.flatten(1).tolist() == [[1, 1, 7], [1, 1, 8]]


def test_a_cache_that_grows_token_by_token_is_copied_a_few_times_only():
    cache, buffers = KeyValueCache(), []
    for _ in range(100):
        cache.append(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
        if not buffers or buffers[-1] is not cache.buffers[0]:
            buffers.append(cache.buffers[0])
    assert len(buffers) <= 8


@pytest.mark.parametrize("path", ["fused", "readable", "with weights"])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunks", [[1] * 6, [6], [2, 3, 1], [1, 3, 2]])
def test_self_attention_with_a_cache_equals_that_over_all_tokens_so_far(chunks, causal, rotated, path):
    module, cache, end = MultiHeadAttention(DIM, HEADS, qk_norm=True), KeyValueCache(), 0
    module.fused = path == "fused"
    x, angles = torch.randn(2, 6, DIM), rotation_2d((2, 3), DIM // HEADS)
    options = dict(causal=causal, return_weights=path == "with weights")
    for length in chunks:
        start, end = end, end + length
        rotations = [tuple(part[i:end] for part in angles) if rotated else None for i in (start, 0)]
        outputs = module(x[:, start:end], rotation=rotations[0], cache=cache, **options)
        expected = module(x[:, :end], rotation=rotations[1], **options)
        if path == "with weights":
            torch.testing.assert_close(outputs[1], expected[1][:, :, start:], atol=1e-6, rtol=1e-5)
            outputs, expected = outputs[0], expected[0]
        torch.testing.assert_close(outputs, expected[:, start:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_cross_attention_with_a_cache_reads_the_memory_in_the_first_step_only(qk_norm, fused):
    module, cache = MultiHeadAttention(DIM, HEADS, qk_norm=qk_norm), KeyValueCache()
    module.fused = fused
    x, memory, mask = torch.randn(2, 4, DIM), torch.randn(2, KEYS, DIM), random_mask("BS", 2, KEYS)
    expected = module(x, memory, mask=mask)
    for n, given in enumerate([memory, torch.randn_like(memory), torch.full_like(memory, math.nan), memory[:, :0]]):
        output = module(x[:, n : n + 1], given, mask=mask, cache=cache)
        torch.testing.assert_close(output, expected[:, n : n + 1], atol=1e-6, rtol=1e-5)
        assert cache.length == KEYS
    rows = torch.tensor([1, 1, 0])
    cache.select(rows)
    output = module(x[rows, :1], memory[rows], mask=mask[rows], cache=cache)
    torch.testing.assert_close(output, expected[rows, :1], atol=1e-6, rtol=1e-5)


def compare_with_torch(dim, heads, x, memory):
    ours, theirs = MultiHeadAttention(dim, heads), nn.MultiheadAttention(dim, heads, batch_first=True)
    nn.init.normal_(ours.qkv.bias)
    nn.init.normal_(ours.out.bias)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    source = x if memory is None else memory
    padding, pairs = torch.rand(2, source.shape[1]) > 0.5, torch.rand(QUERIES, source.shape[1]) > 0.5
    padding[:, 0] = pairs[:, 0] = True
    expected, expected_weights = theirs(
        x, source, source, key_padding_mask=~padding, attn_mask=~pairs, average_attn_weights=False
    )
    mask = padding[:, None] & pairs
    output, weights = ours(x, memory, mask=mask, return_weights=True)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(x, memory, mask=mask), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kdim_tokens", [QUERIES, KEYS, 1])
@pytest.mark.parametrize(("dim", "heads"), [(16, 4), (12, 3), (8, 1), (8, 8)])
def test_cross_attention_equals_torch(dim, heads, kdim_tokens):
    compare_with_torch(dim, heads, torch.randn(2, QUERIES, dim), torch.randn(2, kdim_tokens, dim))


@pytest.mark.parametrize(("dim", "heads"), [(16, 4), (12, 3), (8, 1), (8, 8)])
def test_self_attention_equals_torch(dim, heads):
    compare_with_torch(dim, heads, torch.randn(2, QUERIES, dim), None)


@pytest.mark.parametrize("build", [MultiHeadAttention, EncoderLayer, lambda dim, heads: Encoder(dim, 2, heads)])
@pytest.mark.parametrize(
    ("dim", "heads", "valid"),
    [(10, 3, "1, 2, 5, 10"), (512, 6, "1, 2, 4, 8, 16, 32, 64, 128, 256, 512"), (7, 8, "1, 7"), (4, 0, "1, 2, 4")],
)
def test_heads_that_do_not_divide_the_width_are_refused_with_the_counts_that_do(build, dim, heads, valid):
    with pytest.raises(ValueError, match=f"dim={dim} is not divisible by heads={heads}; valid head counts: {valid}$"):
        build(dim, heads)


@pytest.mark.parametrize("dim", [0, -4])
def test_a_width_without_any_head_count_is_refused(dim):
    with pytest.raises(ValueError, match=f"dim={dim} .* valid head counts: none"):
        check_heads(dim, 2)


@pytest.mark.parametrize("dropout", [-0.1, 1.5])
def test_a_dropout_that_is_no_probability_is_refused_at_construction(dropout):
    with pytest.raises(ValueError, match=f"dropout.*{dropout}"):
        MultiHeadAttention(DIM, HEADS, dropout=dropout)


@pytest.mark.parametrize("options", [{"rotation": rotation_2d((2, 2), DIM // HEADS)}, {"causal": True}])
def test_rotation_and_causal_together_with_a_memory_are_refused(options):
    module, x = MultiHeadAttention(DIM, HEADS), torch.randn(2, 4, DIM)
    with pytest.raises(ValueError, match="rotation and causal describe the tokens of x"):
        module(x, x, **options)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_inputs_are_unchanged_and_leaves_get_gradients(fused, cross):
    module = MultiHeadAttention(DIM, HEADS)
    module.fused = fused
    x = torch.randn(2, QUERIES, DIM, requires_grad=True)
    memory = torch.randn(2, KEYS, DIM, requires_grad=True) if cross else None
    mask = random_mask("BNS", 2, KEYS if cross else QUERIES)
    rotation = None if cross else rotation_2d((1, QUERIES), DIM // HEADS)
    given = [t for t in (x, memory, mask, *(rotation or ())) if t is not None]
    copies = [t.detach().clone() for t in given]
    module(x, memory, mask=mask, rotation=rotation).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    assert all((t.grad != 0).any() for t in (x, memory) if t is not None)
