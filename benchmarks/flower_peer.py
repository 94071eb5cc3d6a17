"""Flower's simulation on the same workloads (extra `bench`): clients trained a second, the usual loop on each client.

FedAvg of Flower's own, two actors of one CPU each on its Ray backend; a client's data is resident in its actor. The time
of a round is from one aggregation to the next, so that start-up does not count.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib import util
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from workloads import WORKLOADS

ROUNDS = 7
NODES = 100
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_worker_niceness": "0"}


def measure(console: Console, repeats: int = 1) -> list[dict]:
    if not util.find_spec("flwr") or not util.find_spec("ray"):
        console.print("flower: not installed (pip install 'fedbcgd[bench]')", highlight=False)
        return []
    rows = []
    for name in ("logistic", "lenet5", "cnn"):
        console.print(f"Flower's simulation of {name}, {ROUNDS - 2} rounds", highlight=False)
        with tempfile.TemporaryDirectory() as home:
            out = Path(home) / "times.json"
            done = subprocess.run(
                [sys.executable, __file__, name, str(out)],
                env={**os.environ, **QUIET, "FLWR_HOME": home, "PYTHONPATH": str(Path(__file__).parent)},
                capture_output=True,
                text=True,
                timeout=600,
            )
            if not out.exists():
                console.print(done.stderr[-2000:], markup=False)
                continue
            times = json.loads(out.read_text())
        seconds = [b - a for a, b in pairwise(times[1:])]
        speed = WORKLOADS[name].cohort / statistics.median(seconds)
        rows.append({"workload": name, "way": "flower's simulation, two actors", "clients a second": speed})
    return rows


def simulate(name: str, out: Path) -> None:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    workload, times, client, server = WORKLOADS[name], [], ClientApp(), ServerApp()

    @client.train()
    def train(message, context):
        from flower_peer import resident  # by name: what is defined in a script travels by value and forgets

        work = resident(name)
        work.start = message.content["arrays"].to_torch_state_dict()
        work.client(int(context.node_config["partition-id"]))
        arrays = ArrayRecord(work.module.state_dict())
        metrics = MetricRecord({"num-examples": workload.images})
        return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable) -> tuple:
            result = super().aggregate_train(server_round, replies)
            times.append(time.perf_counter())
            return result

    @server.main()
    def main(grid, context):
        strategy = Timed(fraction_train=workload.cohort / NODES, fraction_evaluate=0.0, min_available_nodes=NODES)
        strategy.start(grid, ArrayRecord(workload.module(usual=True).state_dict()), num_rounds=ROUNDS)
        out.write_text(json.dumps(times))

    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "include_dashboard": False},
    }
    run_simulation(server_app=server, client_app=client, num_supernodes=NODES, backend_config=resources)


_RESIDENT = {}


def resident(name: str):
    """The data and the model of this actor, made once."""
    if name not in _RESIDENT:
        from raw import Naive

        _RESIDENT[name] = Naive(WORKLOADS[name], threads=1)
    return _RESIDENT[name]


if __name__ == "__main__":
    simulate(sys.argv[1], Path(sys.argv[2]))
