"""Signals wait for safe moments."""

import os
import signal
import threading

import pytest

from fedbcgd.engine.signals import uninterrupted


def test_a_signal_within_is_handled_right_after():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
        done.append("whole")
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_within_comes_through():
    with pytest.raises(ZeroDivisionError), uninterrupted():
        _ = 1 / 0


def test_other_threads_are_left_alone():
    seen = []

    def work():
        with uninterrupted():
            seen.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1]


def test_an_interrupt_in_the_middle_of_a_commit_comes_after_it(federation, net, toys, monkeypatch):
    """The server and the store move together or not at all."""
    from fedbcgd import make_algorithm
    from fedbcgd.core.server import Server
    from fedbcgd.engine.loop import Loop, Stop

    f = federation(make_algorithm("scaffold", batch_size=3), net(), toys(), cohort=4)
    original = Server._move_controls

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        original(self)

    monkeypatch.setattr(Server, "_move_controls", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Loop(f.server, f.backend, Stop(rounds=5)).run()
    assert f.server.round == 1
    assert len(f.store.clients()) == 4
    import torch

    torch.testing.assert_close(f.server.controls["c"], f.controls().mean(0))


def test_an_interrupt_while_a_checkpoint_is_begun_leaves_nothing_that_cannot_be_waited_for(
    federation, net, toys, monkeypatch, tmp_path
):
    """Ctrl-C between making and starting the thread that writes."""
    from fedbcgd import make_algorithm
    from fedbcgd.engine.checkpoint import Checkpoints

    f = federation(make_algorithm("fedavg", batch_size=3), net(), toys(), cohort=4)
    checkpoints = Checkpoints(tmp_path, 1)
    start = threading.Thread.start

    def interrupted(thread):
        if thread.name == "checkpoint":
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.begin(f.server, f.store, {})
    checkpoints.finish(f.store)
    assert checkpoints.load()[1]["round"] == 0
