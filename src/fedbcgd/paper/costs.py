"""Estimates of running time: the number of gradients, counted from the settings, times seconds measured on this machine."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import psutil
import torch

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.backends.workers.processes import cores
from fedbcgd.engine.loop import RoundInfo
from fedbcgd.paper.plan import Machine, build_network, count_rounds, data_facts
from fedbcgd.paper.search import gradients, rungs
from fedbcgd.paper.spec import Contender, Item, Panel, Scale
from fedbcgd.simulation import simulate

RUN_SECONDS = 3.3  # start and end of a run with worker processes
STEPS, PARAMETERS = 8, 5_000_000  # limits of a timed round: steps, and steps times parameters
ENOUGH = 2.0  # seconds after which the timing of a network ends


@dataclass(frozen=True)
class Cost:
    """A number of runs, and their hours on this machine."""

    runs: int
    hours: float

    def __str__(self) -> str:
        minutes = self.hours * 60
        if minutes < 1:
            return f"{self.runs} runs, under a minute"
        return f"{self.runs} runs, {f'{minutes:.0f} minutes' if minutes < 120 else f'{self.hours:,.0f} hours'}"


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum of some costs."""
    listed = list(costs)
    return Cost(sum(c.runs for c in listed), sum(c.hours for c in listed))


def cost(item: Item, scale: Scale, machine: Machine | None = None) -> Cost:
    """Estimate the cost of all runs of an item, none of them finished before or shared with another item."""
    machine = machine or Machine()
    return total(
        each
        for panel in item.panels[scale]
        for c in panel.contenders
        for each in (search_cost(panel, c, machine), run_cost(panel, c, machine, panel.effort.seeds))
    )


def run_cost(panel: Panel, contender: Contender, machine: Machine, seeds: int = 1) -> Cost:
    """Estimate the cost of some repetitions of a contender."""
    rounds = count_rounds(panel, contender)
    tested = min(rounds, panel.effort.evaluations) * data_facts(panel).test
    seconds = _seconds(panel, contender, rounds, tested, machine)
    return Cost(seeds, seeds * seconds / 3600)


def search_cost(panel: Panel, contender: Contender, machine: Machine) -> Cost:
    """Estimate the cost of the search for a contender."""
    held_out = panel.effort.validation * data_facts(panel).train
    runs, seconds, before = 0, 0.0, 0
    for rung in rungs(panel, contender):
        rounds = rung.rounds - before
        evaluations = rounds if panel.effort.halving else min(rounds, panel.effort.evaluations * 2 // 5)
        seconds += rung.candidates * _seconds(panel, contender, rounds, evaluations * held_out, machine)
        runs, before = max(runs, rung.candidates), rung.rounds
    return Cost(runs, seconds / 3600)


def _workers(panel: Panel, machine: Machine) -> int:
    asked = machine.workers if machine.workers is not None else panel.run.get("workers")
    return cores() if asked is None else int(asked)


def _seconds(panel: Panel, contender: Contender, rounds: int, tested: float, machine: Machine) -> float:
    """Estimate the seconds of a run with this many rounds and tested examples."""
    rule = make_algorithm(**{**panel.local, **contender.algorithm}).local
    per_client = data_facts(panel).train // panel.data["clients"]
    examples = rule.steps(per_client) * rule.batch_size if rule.local_steps else rule.local_epochs * per_client
    trained = rounds * panel.run["cohort"] * examples * gradients(panel, contender)
    workers = _workers(panel, machine)
    parallel = 1 if contender.rounds_of is not None else max(1, workers)
    computed = trained / parallel + tested / 3 / max(1, workers)  # a forward pass takes a third of a training step
    return seconds_per_example(panel, machine) * computed + RUN_SECONDS * (workers > 0)


def seconds_per_example(panel: Panel, machine: Machine) -> float:
    """Time a few steps of a panel's network; return the processor seconds for an example."""
    facts = data_facts(panel)
    timed = Machine(_workers(panel, machine), machine.device, machine.precision)
    return _time(json.dumps(dict(panel.model)), facts.shape, facts.classes, panel.local["batch_size"], timed)


@cache
def _time(model: str, shape: tuple[int, int, int], classes: int, batch: int, machine: Machine) -> float:
    built = build_network(json.loads(model), shape, classes)
    parameters = sum(p.numel() for p in built.module.parameters())
    steps = max(1, min(STEPS, PARAMETERS // parameters))
    clients = max(1, machine.workers or 0)
    data = torch.zeros(batch, *shape), torch.zeros(batch, dtype=torch.long)
    clocks: list[float] = []

    def note(info: RoundInfo) -> None:
        clocks.append(_clock(machine))
        if len(clocks) > 1 and info.seconds > ENOUGH:
            info.stop()

    simulate(
        *(built.module, [data] * clients, "fedavg"),
        rounds=1000,
        cohort=clients,
        loss=built.loss,
        metrics=built.metrics,
        callbacks=[note],
        progress=False,
        workers=machine.workers,
        device=machine.device,
        precision=machine.precision,  # type: ignore[arg-type]
        local_steps=steps,
        batch_size=batch,
        lr=1e-6,
    )
    return (clocks[-1] - clocks[0]) / ((len(clocks) - 1) * clients * steps * batch)


def _clock(machine: Machine) -> float:
    """Return the processor seconds of this process and its workers, so that other processes do not count."""
    if machine.device != "cpu":
        return time.perf_counter()
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(used.user + used.system for used in (process.cpu_times() for process in processes))
