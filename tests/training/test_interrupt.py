"""Checks that signals are noted inside the block, and handled as before outside of it."""

import os
import signal

import pytest

from vit_scratch.training.interrupt import Interrupt


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_the_handlers_are_restored(number):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with Interrupt() as interrupt:
        assert interrupt.signal is None
        send(number)
        assert interrupt.signal == number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_interrupts_at_once(first):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        send(first)
        send(signal.SIGINT)
    assert interrupt.signal == first
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_sigterm_does_not_interrupt():
    with Interrupt() as interrupt:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert interrupt.signal == signal.SIGTERM


def test_the_handlers_are_restored_after_an_error():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(OSError, match="disk"), Interrupt():
        raise OSError("disk")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
