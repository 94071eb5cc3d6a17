"""Which task goes to which worker, and when."""

import os
import signal
from types import SimpleNamespace

import torch
from torch import nn

import fedbcgd
from fedbcgd import simulate
from fedbcgd.backends.workers import backend as workers_module
from fedbcgd.backends.workers.protocol import EvaluateRequest, FitRequest, Ready
from fedbcgd.engine.assemble import make_job, make_server
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.loop import Stop
from tests.backends.going import go, same, state


def test_the_longest_of_the_next_tasks_goes_first(monkeypatch):
    """Nobody waits for a long task that was begun last; sums keep the order of the plan, so the bits are the same."""
    clients = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (2, 2, 2, 2, 2, 40, 2, 2)]
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    clients_asked = []
    send = workers_module.Worker.send

    def watched(self, request):
        if isinstance(request, FitRequest):
            clients_asked.extend(assignment.task.client for assignment in request.assignments)
        send(self, request)

    monkeypatch.setattr(workers_module.Worker, "send", watched)
    ends = [simulate(net, clients, rounds=2, blocks=2, cohort=8, workers=w, batch_size=2).module for w in (0, 2)]
    assert (len(clients_asked), clients_asked[0], clients_asked[8]) == (16, 5, 5)
    assert all(torch.equal(a, b) for a, b in zip(ends[0].parameters(), ends[1].parameters(), strict=True))


def test_a_worker_has_its_next_short_task_before_it_has_done_the_last(toys, net, monkeypatch):
    """But the last tasks of a round go to whoever is free, and long ones are never handed out ahead.

    Of 12 tasks of equal size a third of what is left is 4, then 8/3 rounded up, 5/3, and one by one. Both workers are ready
    before the round begins, so the requests do not depend on who is faster.
    """
    job = make_job(net(), toys((6,) * 12), fedbcgd.make_algorithm("fedavg", batch_size=3), None, 0)
    send, held = workers_module.Worker.send, []

    def watched(self, request):
        held.append((len(self.pending), len(request.units)))
        send(self, request)

    monkeypatch.setattr(workers_module.Worker, "send", watched)
    models = []
    for short in (0.0, 1e9):
        held.clear()
        monkeypatch.setattr(workers_module, "SHORT_TASK", short)
        store = StateStore((), job.layout.dim, job.layout.dtype)
        server = make_server(job, 12, Stop(rounds=9))
        backend = workers_module.Workers(job, store, 2, 12)
        try:
            for worker in backend._workers:
                worker.ready = worker.connection.recv() == Ready()
            backend.last_seconds = 0.001
            backend.run_round(server, server.plan())
            assert server.commit().accepted == 12
        finally:
            backend.close()
            store.close()
        models.append(server.x)
        if short:
            assert held == [(0, 4), (0, 3), (1, 2), (1, 1), (1, 1), (0, 1)]
        else:
            assert held == [(0, 1)] * 12
    assert torch.equal(*models)


def test_short_tasks_are_handed_out_several_at_a_time(toys, net):
    """A third of the examples that are left, with two workers; one by one when a worker died of them."""
    job = make_job(net(), toys((6, 6, 6, 6, 2, 2, 2, 2, 2, 2)), fedbcgd.make_algorithm("fedavg"), None, 0)
    server = make_server(job, 10, Stop(rounds=9))
    store = StateStore((), job.layout.dim, job.layout.dtype)

    def counts(seconds, died=False):
        backend = SimpleNamespace(job=job, last_seconds=seconds, store=store)
        tasks, counts = workers_module._Round(backend, server, server.plan(), 10), []
        while request := tasks.next(2):
            if died:
                tasks.requeue(request)
                died = False
                continue
            counts.append([job.examples(unit[0].task.client) for unit in request.units])
        assert tasks._examples_left == 0
        return counts

    assert counts(0.001) == [[6, 6], [6, 6], [2, 2], [2, 2], [2], [2]]
    assert counts(0.011) == [[6]] * 4 + [[2]] * 6, "no more than SHORT_TASK at once"
    assert counts(0.001, died=True) == [[6]] * 4 + [[2]] * 6
    assert counts(workers_module.SHORT_TASK) == [[6]] * 4 + [[2]] * 6
    store.close()


def test_a_worker_killed_with_two_tasks_in_hand(toys, net, monkeypatch, caplog):
    monkeypatch.setattr(workers_module, "SHORT_TASK", 1e9)
    send, killed = workers_module.Worker.send, []

    def watched(self, request):
        send(self, request)
        if len(self.pending) == 2 and not killed:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(workers_module.Worker, "send", watched)
    settings = {"cohort": 12, "rounds": 3}
    disturbed = go(net, lambda *a: toys(*a) * 2, **settings)
    assert killed
    assert "its task runs again" in caplog.text
    assert same(state(disturbed), state(go(net, lambda *a: toys(*a) * 2, workers=0, **settings)))
    assert disturbed.ledger.lost == disturbed.ledger.refused == 0


def test_a_unit_of_many_clients_is_not_handed_out_early(net, toys):
    """Two processes that both write more than the connection between them holds would wait for each other."""
    algorithm = fedbcgd.make_algorithm("fedavg")
    job = make_job(net(), toys(), algorithm, None, 0)
    server = make_server(job, 5, Stop(rounds=9))
    plan = server.plan()
    store = StateStore((), job.layout.dim, job.layout.dtype)
    for batch_clients, early in ((None, True), (256, True), (257, False)):
        job.batch_clients = batch_clients
        backend = SimpleNamespace(job=job, last_seconds=0.0, store=store)
        request = workers_module._Round(backend, server, plan, 8).next(1, early=True)
        assert (request is not None) is early
    store.close()


def test_no_task_waits_behind_an_evaluation(toys, net, monkeypatch):
    """However short tasks are: a batch of an evaluation is not."""
    monkeypatch.setattr(workers_module, "SHORT_TASK", 1e9)
    algorithm = fedbcgd.make_algorithm("fedavg", batch_size=3, local_epochs=1)
    job = make_job(net(), toys(), algorithm, toys((700,))[0], 0)
    store = StateStore((), job.layout.dim, job.layout.dtype)
    server = make_server(job, 5, Stop(rounds=9))
    backend = workers_module.Workers(job, store, 1, 5)
    send, held = workers_module.Worker.send, []

    def watched(self, request):
        held.append((*map(type, self.pending), type(request)))
        send(self, request)

    monkeypatch.setattr(workers_module.Worker, "send", watched)
    try:
        backend.last_seconds = 0.0
        backend.begin_evaluation(server.x)
        worker = backend._workers[0]
        worker.ready = worker.connection.recv() == Ready()
        worker.send(backend._evaluation.next(1))
        backend.run_round(server, server.plan())
        assert server.commit().accepted == 5
        assert backend.finish_evaluation()["loss"] > 0
    finally:
        backend.close()
        store.close()
    assert held[:2] == [(EvaluateRequest,), (FitRequest,)]
    assert (FitRequest, FitRequest) in held
    assert (EvaluateRequest, FitRequest) not in held


def test_a_worker_has_its_next_task_while_its_upload_is_checked(toys, net, monkeypatch):
    """Also where tasks are too long to be handed out ahead."""
    monkeypatch.setattr(workers_module, "SHORT_TASK", 0.0)
    algorithm = fedbcgd.make_algorithm("fedavg", batch_size=3, local_epochs=1)
    job = make_job(net(), toys(), algorithm, None, 0)
    store = StateStore((), job.layout.dim, job.layout.dtype)
    server = make_server(job, 5, Stop(rounds=9))
    backend = workers_module.Workers(job, store, 1, 5)
    receive, pending = server.receive, []

    def watched(upload, sender):
        pending.append(len(backend._workers[0].pending))
        return receive(upload, sender)

    monkeypatch.setattr(server, "receive", watched)
    try:
        backend.run_round(server, server.plan())
        assert server.commit().accepted == 5
    finally:
        backend.close()
        store.close()
    assert pending == [1, 1, 1, 1, 0]
