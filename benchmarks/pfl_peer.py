"""pfl-research's simulation on the same workloads (extra `bench`): its FedAvg, two processes of one thread.

The module and its memory format, the resident images, the batches and the steps are those of `raw.py`; pfl keeps the batches
of each client as slices and does not shuffle them. It runs in processes of its own and makes the rounds of a turn at each
request. They are started as `python -m torch.distributed.run --standalone --nproc-per-node 2` starts them, but not each in a
session of its own: Linux gives every session an equal share of a busy machine.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import util
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import DECAY, LR, WORKLOADS

from fedbcgd.backends.workers.processes import ENVIRONMENT

PROCESSES = 2


def installed() -> bool:
    return bool(util.find_spec("pfl"))


class Pfl:
    """Rounds of one workload, those of a turn for each call of `turn`.

    Args:
        name: of the workload.
        precision: "fp32" or "bf16".
    """

    def __init__(self, name: str, precision: str = "fp32"):
        self._home = tempfile.TemporaryDirectory()
        home = Path(self._home.name)
        for pipe in ("go", "done"):
            os.mkfifo(home / pipe)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            **ENVIRONMENT,  # the settings of our own workers: one thread, and an allocator that makes it faster too
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            "TORCHELASTIC_RUN_ID": "none",  # by which pfl knows that it is one of several processes
            "WORLD_SIZE": str(PROCESSES),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        with (home / "errors").open("w") as errors:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, __file__, name, precision, str(home)],
                    env=environment | {"RANK": str(k), "LOCAL_RANK": str(k)},
                    stdout=errors,
                    stderr=errors,
                )
                for k in range(PROCESSES)
            ]
        self._done = os.open(home / "done", os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self._done, True)
        self._go = os.open(home / "go", os.O_RDWR)
        self._wait()  # until it is ready

    def turn(self) -> None:
        os.write(self._go, b".")
        self._wait()

    def _wait(self) -> None:
        while not os.read(self._done, 1):  # not open yet, or ended
            time.sleep(0.05)
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"pfl ended: {(Path(self._home.name) / 'errors').read_text()[-2000:]}")

    def close(self) -> None:
        os.write(self._go, b"e")
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        os.close(self._go)
        os.close(self._done)
        self._home.cleanup()

    def pids(self) -> list[int]:
        """Return the process numbers."""
        return [process.pid for process in self._processes]


class Trained(nn.Module):
    """A model with the two methods that pfl asks for."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict:
        from pfl.metrics import Weighted

        return {"loss": Weighted(float(self.loss(x, y)) * len(x), len(x))}


def simulate(name: str, precision: str, home: Path) -> None:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)
    first = torch.distributed.get_rank() == 0  # pfl has joined the processes when it was imported
    workload = WORKLOADS[name]
    if first:
        go, done = os.open(home / "go", os.O_RDONLY), os.open(home / "done", os.O_WRONLY)

    class OneTurnAtATime(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
            if central_iteration % workload.rounds:
                return False, Metrics()
            more = torch.zeros(1)
            if first:
                os.write(done, b".")  # ready for the first turn, or done with one
                more += os.read(go, 1) == b"."
            torch.distributed.broadcast(more, 0)
            return not more.item(), Metrics()

    x, y = workload.floats()
    clients = [Dataset([x[rows], y[rows]], user_id=str(k)) for k, rows in _slices(workload)]
    module = workload.module()
    if workload.convolutional:
        module = module.to(memory_format=torch.channels_last)
    trained = Trained(module)
    model = PyTorchModel(
        trained,
        partial(torch.optim.SGD, weight_decay=DECAY),
        torch.optim.SGD(trained.parameters(), lr=1.0),
        amp_dtype=torch.bfloat16 if precision == "bf16" else None,
    )
    data = FederatedDataset(clients.__getitem__, MinimizeReuseUserSampler(list(range(len(clients)))))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=1 << 40,
            evaluation_frequency=1 << 41,
            train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=workload.batch),
        callbacks=[OneTurnAtATime()],
        send_metrics_to_platform=False,
    )


def _slices(workload):  # type: ignore[no-untyped-def]
    """Yield each client and its images: a slice where they are neighbours, so that nothing is copied."""
    for k in range(workload.clients):
        rows = workload.rows(k)
        start, end = int(rows[0]), int(rows[-1]) + 1
        yield k, slice(start, end) if end - start == len(rows) else rows


if __name__ == "__main__":
    simulate(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
