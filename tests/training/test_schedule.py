"""Checks the learning rate of every update against formulas, its exact ends, and that it rises and then falls."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_scratch.training.schedule import SCHEDULES


def rates(updates, warmup, peak, final, shape="cosine"):
    rate = SCHEDULES[shape]
    return [rate(u, updates=updates, warmup=warmup, peak=peak, final=final) for u in range(1, updates + 1)]


def test_a_short_schedule_by_hand():
    quarter = 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
    expected = [0.25, 0.5, 0.75, 1.0, quarter, 0.55, 1.1 - quarter, 0.1]
    assert rates(8, 4, 1.0, 0.1) == pytest.approx(expected, rel=1e-15)
    assert rates(8, 4, 1.0, 0.2, "linear") == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2], rel=1e-15)


def test_without_a_warmup_the_first_update_stands_at_the_peak():
    assert rates(3, 0, 0.5, 0.0) == pytest.approx([0.5, 0.25, 0.0], abs=1e-15)
    assert rates(3, 1, 0.5, 0.0) == rates(3, 0, 0.5, 0.0)


@pytest.mark.parametrize("shape", SCHEDULES)
def test_one_update_has_the_peak(shape):
    assert rates(1, 0, 0.5, 0.1, shape) == [0.5]


SHAPES = st.sampled_from(sorted(SCHEDULES))


@st.composite
def schedules(draw):
    updates = draw(st.integers(2, 300))
    peak = draw(st.floats(1e-6, 10))
    return updates, draw(st.integers(0, updates - 1)), peak, draw(st.floats(0, 1)) * peak, draw(SHAPES)


@settings(max_examples=200, deadline=None)
@given(schedules())
def test_the_ends_are_exact(schedule):
    _, warmup, peak, final, _ = schedule
    values = rates(*schedule)
    assert values[max(warmup, 1) - 1] == peak
    assert values[-1] == final
    if warmup > 1:
        assert values[0] == peak / warmup


@settings(max_examples=200, deadline=None)
@given(schedules())
def test_it_rises_in_equal_steps_and_then_falls(schedule):
    _, warmup, peak, final, _ = schedule
    values = rates(*schedule)
    top = max(warmup, 1)
    for number, rate in enumerate(values[: top - 1], 1):
        assert rate == pytest.approx(peak * number / warmup, rel=1e-12)
    assert all(a < b for a, b in pairwise(values[:top]))
    assert all(a >= b * (1 - 1e-15) for a, b in pairwise(values[top - 1 :]))
    assert all(final * (1 - 1e-12) <= rate <= peak * (1 + 1e-12) for rate in values[top - 1 :])


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_the_fall_is_half_a_cosine_or_a_line(schedule):
    updates, warmup, peak, final, shape = schedule
    top = max(warmup, 1)
    for number, rate in enumerate(rates(*schedule)[top - 1 :]):
        done = number / max(updates - top, 1)
        share = {"cosine": 0.5 + 0.5 * math.cos(math.pi * done), "linear": 1 - done}[shape]
        assert rate == pytest.approx(final + (peak - final) * share, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("shape", SCHEDULES)
def test_recipes_reach_their_peak_exactly(shape):
    for peak in (1e-3, 5e-4, 3e-3, 0.1):
        for final in (1e-5, 1e-6, 0.0):
            values = rates(1000, 50, peak, final, shape)
            assert values[49] == max(values) == peak
            assert values[-1] == min(values[50:]) == final
