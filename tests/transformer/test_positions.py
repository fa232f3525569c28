"""Positions: sinusoidal, learned, two-dimensional and rotary ones against formulas written out in float64."""

import itertools
import math

import numpy as np
import pytest
import torch

from vit_scratch.transformer.positions import (
    LearnedPositions,
    SinusoidalPositions,
    grid_coordinates,
    rotate,
    rotation_2d,
    sinusoids,
    sinusoids_2d,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def formula(positions, dim):
    """Section 3.5 of the paper, one column at a time: PE(pos, 2i) = sin, PE(pos, 2i+1) = cos of pos / 10000^(2i/D)."""
    table = np.empty((len(positions), dim), dtype=np.float64)
    for column in range(dim):
        pair = column // 2
        angle = np.asarray(positions, dtype=np.float64) / 10000.0 ** (2 * pair / dim)
        table[:, column] = np.cos(angle) if column % 2 else np.sin(angle)
    return table


@pytest.mark.parametrize("dim", [1, *range(2, 65), 127, 192, 512])
def test_sinusoids_equal_the_paper_cell_by_cell(dim):
    positions = np.arange(5001)
    table = sinusoids(torch.from_numpy(positions), dim)
    assert table.dtype == torch.float32
    assert np.abs(table.double().numpy() - formula(positions, dim)).max() < 1e-6


@pytest.mark.parametrize("positions", [[0.0, 0.5, -3.25, 17.75], [4999, 0, 12]])
def test_sinusoids_take_any_positions_in_any_order(positions):
    table = sinusoids(torch.tensor(positions), 10)
    assert np.abs(table.double().numpy() - formula(positions, 10)).max() < 1e-6


def test_sinusoids_take_another_base():
    expected = [[f(5 / 100 ** (2 * i / 6)) for i in range(3) for f in (math.sin, math.cos)]]
    torch.testing.assert_close(sinusoids(torch.tensor([5]), 6, base=100.0), torch.tensor(expected))


@pytest.mark.parametrize("dim", [2, 5, 16, 33, 64])
def test_no_two_columns_of_the_same_kind_are_equal(dim):
    table = sinusoids(torch.arange(2000), dim)
    for kind in (table[:, 0::2], table[:, 1::2]):
        for a, b in itertools.combinations(kind.T, 2):
            assert (a - b).abs().max() > 1e-3


@DTYPES
def test_tables_do_not_depend_on_the_default_dtype(dtype, default_dtype):
    positions = SinusoidalPositions(33, max_length=300)
    assert positions.table.dtype == torch.float32
    assert np.abs(positions.table.double().numpy() - formula(range(300), 33)).max() < 1e-6
    rows, columns = np.repeat(np.arange(3), 4), np.tile(np.arange(4), 3)
    both = np.concatenate([formula(rows, 8), formula(columns, 8)], axis=1)
    assert np.abs(sinusoids_2d((3, 4), 16).double().numpy() - both).max() < 1e-6


@DTYPES
def test_rotations_are_float32_whatever_the_default_dtype(dtype, default_dtype):
    angles = rotation_angles((3, 5), 16, prefix=2)
    for part, expected in zip(rotation_2d((3, 5), 16, prefix=2), (np.cos(angles), np.sin(angles)), strict=True):
        assert part.dtype == torch.float32
        assert np.abs(part.double().numpy() - expected).max() < 1e-6


@pytest.mark.parametrize("dim", [0, -2])
def test_a_width_below_one_is_refused(dim):
    with pytest.raises(ValueError, match=f"dim={dim} is not a width"):
        sinusoids(torch.arange(3), dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 4, 10])
def test_sinusoidal_positions_add_the_table_and_leave_the_input_alone(length, dtype):
    positions, x = SinusoidalPositions(5, max_length=10), torch.randn(2, length, 5, dtype=dtype)
    before = x.clone()
    output = positions(x)
    assert torch.equal(x, before)
    assert output.dtype == dtype
    expected = x.double() + torch.from_numpy(formula(range(length), 5))
    torch.testing.assert_close(output.double(), expected, atol=4 * torch.finfo(dtype).eps + 1e-6, rtol=0)


@pytest.mark.parametrize("build", [lambda: SinusoidalPositions(6, max_length=9), lambda: LearnedPositions(9, 6)])
def test_a_leaf_that_requires_grad_gets_the_gradient_of_a_sum(build):
    module, x = build(), torch.randn(2, 4, 6, requires_grad=True)
    before = x.detach().clone()
    module(x).sum().backward()
    assert torch.equal(x, before)
    assert torch.equal(x.grad, torch.ones(2, 4, 6))


@pytest.mark.parametrize("build", [lambda: SinusoidalPositions(6, max_length=9), lambda: LearnedPositions(9, 6)])
def test_a_sequence_longer_than_the_positions_is_refused(build):
    module = build()
    assert module(torch.zeros(1, 9, 6)).abs().sum() > 0
    with pytest.raises(ValueError, match="a sequence of 10 tokens exceeds the 9 positions"):
        module(torch.zeros(1, 10, 6))


@pytest.mark.parametrize("start", [0, 1, 4, 7])
def test_sinusoidal_positions_count_from_the_given_start(start):
    positions, x = SinusoidalPositions(6, max_length=9), torch.randn(2, 2, 6)
    expected = x.double() + torch.from_numpy(formula(range(start, start + 2), 6))
    torch.testing.assert_close(positions(x, start).double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("start", "length"), [(9, 1), (8, 2), (20, 3)])
def test_a_start_from_which_the_sequence_exceeds_the_positions_is_refused(start, length):
    with pytest.raises(ValueError, match=f"a sequence of {start + length} tokens exceeds the 9 positions"):
        SinusoidalPositions(6, max_length=9)(torch.zeros(1, length, 6), start)


def test_the_sinusoidal_table_is_not_in_the_state_dict():
    positions = SinusoidalPositions(6)
    assert not positions.state_dict()
    assert not list(positions.parameters())
    assert len(positions.table) == 5000


@pytest.mark.parametrize("length", [1, 5, 7])
def test_learned_positions_add_exactly_the_first_weights(length):
    positions, x = LearnedPositions(7, 6), torch.randn(3, length, 6)
    output = positions(x)
    for b, n in itertools.product(range(3), range(length)):
        assert torch.equal(output[b, n], x[b, n] + positions.weight[n])
    output.sum().backward()
    used = torch.zeros(7, 6)
    used[:length] = 3
    assert torch.equal(positions.weight.grad, used)


def test_learned_positions_start_with_standard_deviation_002():
    weight = LearnedPositions(400, 64).weight
    assert abs(weight.std().item() - 0.02) < 5e-4
    assert abs(weight.mean().item()) < 5e-4


def test_grid_coordinates_are_in_reading_order():
    rows, columns = grid_coordinates((2, 3))
    assert rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert columns.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("grid", [(1, 1), (3, 5), (6, 2)])
@pytest.mark.parametrize("dim", [4, 8, 20, 64])
def test_two_dimensional_sinusoids_are_row_and_column_side_by_side(grid, dim):
    table = sinusoids_2d(grid, dim)
    assert table.shape == (grid[0] * grid[1], dim)
    for cell, (row, column) in enumerate(itertools.product(range(grid[0]), range(grid[1]))):
        expected = np.concatenate([formula([row], dim // 2)[0], formula([column], dim // 2)[0]])
        assert np.abs(table[cell].double().numpy() - expected).max() < 1e-6


@pytest.mark.parametrize("dim", [1, 2, 6, 10, 63])
def test_two_dimensional_positions_need_a_multiple_of_four(dim):
    with pytest.raises(ValueError, match=f"dim={dim} is not a multiple of 4"):
        sinusoids_2d((2, 2), dim)
    with pytest.raises(ValueError, match=f"head width {dim} is not a multiple of 4"):
        rotation_2d((2, 2), dim)


def rotation_angles(grid, width, prefix=0, base=100.0):
    """Angle of every token and channel: a quarter of the channels turns with the row, the next with the column."""
    angles = np.zeros((prefix + grid[0] * grid[1], width))
    for cell, (row, column) in enumerate(itertools.product(range(grid[0]), range(grid[1]))):
        for i in range(width // 4):
            frequency = base ** (-4 * i / width)
            for half in (0, width // 2):
                angles[prefix + cell, half + i] = row * frequency
                angles[prefix + cell, half + width // 4 + i] = column * frequency
    return angles


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (14, 5)])
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("width", [4, 8, 16])
def test_rotations_hold_cosine_and_sine_of_hand_computed_angles(grid, prefix, width):
    cos, sin = rotation_2d(grid, width, prefix)
    angles = rotation_angles(grid, width, prefix)
    assert cos.dtype == sin.dtype == torch.float32
    assert np.abs(cos.double().numpy() - np.cos(angles)).max() < 2e-6
    assert np.abs(sin.double().numpy() - np.sin(angles)).max() < 2e-6


def test_rotating_unit_vectors_gives_the_cosine_and_sine_of_their_angles():
    cos, sin = rotation_2d((3, 4), 8)
    row, column, cell = 2, 3, 2 * 4 + 3
    for i, angle in enumerate([row, row * 0.1, column, column * 0.1]):
        x = torch.zeros(1, 1, 12, 8)
        x[..., i] = 1.0
        expected = torch.zeros(8)
        expected[i], expected[i + 4] = math.cos(angle), math.sin(angle)
        torch.testing.assert_close(rotate(x, (cos, sin))[0, 0, cell], expected)


def test_rotation_is_multiplication_by_a_complex_number_on_the_unit_circle():
    rotation, x = rotation_2d((3, 4), 8, prefix=1), torch.randn(2, 3, 13, 8)
    angles = torch.from_numpy(rotation_angles((3, 4), 8, prefix=1))[:, :4]
    turned = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(rotate(x, rotation).double(), expected, atol=2e-6, rtol=1e-5)


def test_rotation_keeps_lengths_and_its_input_and_turns_no_prefix_token():
    rotation, x = rotation_2d((5, 4), 16, prefix=3), torch.randn(2, 3, 23, 16)
    before = x.clone()
    output = rotate(x, rotation)
    assert torch.equal(x, before)
    torch.testing.assert_close(output.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(output[:, :, :3], x[:, :, :3])
    moved = (output - x)[:, :, 3:].abs().amax(dim=(0, 1, 3))
    assert moved[0] == 0
    assert (moved[1:] > 0.1).all()


def test_rotated_dot_products_depend_on_row_and_column_offsets_only():
    grid, width = (5, 6), 16
    rotation = rotation_2d(grid, width)
    query, key = torch.randn(2, width).double()
    everywhere = torch.ones(1, 1, grid[0] * grid[1], 1).double()
    products = (rotate(everywhere * query, rotation) @ rotate(everywhere * key, rotation).transpose(-1, -2))[0, 0]
    cells = list(itertools.product(range(grid[0]), range(grid[1])))
    by_offset = {}
    for (a, (ra, ca)), (b, (rb, cb)) in itertools.product(enumerate(cells), repeat=2):
        by_offset.setdefault((ra - rb, ca - cb), []).append(products[a, b].item())
    assert max(max(values) - min(values) for values in by_offset.values()) < 1e-5
    first = sorted(values[0] for values in by_offset.values())
    assert len(first) == 9 * 11
    assert min(b - a for a, b in itertools.pairwise(first)) > 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_rotation_keeps_the_dtype_of_queries_and_keys(dtype):
    rotation, x = rotation_2d((3, 4), 8), torch.randn(1, 2, 12, 8)
    output = rotate(x.to(dtype), rotation)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), rotate(x, rotation), atol=5e-2, rtol=0)


def test_everything_builds_and_runs_on_the_meta_device():
    with torch.device("meta"):
        sinusoidal, learned = SinusoidalPositions(6, max_length=9), LearnedPositions(9, 6)
        made = [sinusoidal.table, learned.weight, sinusoids_2d((2, 3), 8), *rotation_2d((2, 3), 8, prefix=1)]
        x, heads = torch.empty(2, 4, 6), torch.empty(1, 2, 7, 8)
    made += [sinusoidal(x), learned(x), rotate(heads, tuple(made[3:5])), sinusoids(torch.arange(4, device="meta"), 5)]
    assert all(tensor.device.type == "meta" for tensor in made)
    shapes = [(9, 6), (9, 6), (6, 8), (7, 8), (7, 8), (2, 4, 6), (2, 4, 6), (1, 2, 7, 8), (4, 5)]
    assert [tuple(tensor.shape) for tensor in made] == shapes
