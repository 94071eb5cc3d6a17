"""Flower's simulation on the same workloads (extra `bench`): the usual loop on each client.

Flower's FedAvg, with two actors of one CPU each on its Ray backend; the data stays in the actors. It runs in a process of
its own and makes one round at each request, so that it can take turns with others.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import util
from pathlib import Path

from workloads import WORKLOADS

NODES = 100
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_worker_niceness": "0"}


def installed() -> bool:
    return bool(util.find_spec("flwr") and util.find_spec("ray"))


class Flower:
    """Rounds of one workload, up to `rounds`, one for each call of `turn`."""

    def __init__(self, name: str, rounds: int):
        self._home = tempfile.TemporaryDirectory()
        go, self._go = os.pipe()
        self._done, done = os.pipe()
        self._errors = Path(self._home.name) / "errors"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__, name, str(rounds), str(go), str(done)],
                env={**os.environ, **QUIET, "FLWR_HOME": self._home.name, "PYTHONPATH": str(Path(__file__).parent)},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(go, done),
            )
        os.close(go)
        os.close(done)
        self._wait()  # until it is ready

    def turn(self) -> None:
        os.write(self._go, b".")
        self._wait()

    def _wait(self) -> None:
        if not os.read(self._done, 1):
            self._process.wait()
            raise RuntimeError(f"Flower's simulation ended: {self._errors.read_text()[-2000:]}")

    def close(self) -> None:
        os.close(self._go)  # ends it, if it has rounds left
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._done)
        self._home.cleanup()


def simulate(name: str, rounds: int, go: int, done: int) -> None:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    workload, client, server = WORKLOADS[name], ClientApp(), ServerApp()

    @client.train()
    def train(message, context):
        from flower_peer import resident  # imported: functions of a script are pickled by value, without their cache

        work = resident(name)
        work.start = message.content["arrays"].to_torch_state_dict()
        work.client(int(context.node_config["partition-id"]))
        arrays = ArrayRecord(work.module.state_dict())
        metrics = MetricRecord({"num-examples": workload.images})
        return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    class OneRoundAtATime(FedAvg):
        def configure_train(self, *args, **kwargs):
            os.write(done, b".")  # ready for the first round, or done with the one before
            if not os.read(go, 1):
                raise EOFError("no more rounds are requested")
            return super().configure_train(*args, **kwargs)

        def aggregate_train(self, server_round: int, replies: Iterable) -> tuple:
            result = super().aggregate_train(server_round, replies)
            if server_round == rounds:
                os.write(done, b".")
            return result

    @server.main()
    def main(grid, context):
        strategy = OneRoundAtATime(
            fraction_train=workload.cohort / NODES, fraction_evaluate=0.0, min_available_nodes=NODES
        )
        strategy.start(grid, ArrayRecord(workload.module(usual=True).state_dict()), num_rounds=rounds)

    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "include_dashboard": False},
    }
    run_simulation(server_app=server, client_app=client, num_supernodes=NODES, backend_config=resources)


_RESIDENT = {}


def resident(name: str):
    """Return the data and the model of this actor, made once."""
    if name not in _RESIDENT:
        from raw import Naive

        _RESIDENT[name] = Naive(WORKLOADS[name], threads=1)
    return _RESIDENT[name]


if __name__ == "__main__":
    simulate(sys.argv[1], *map(int, sys.argv[2:]))
