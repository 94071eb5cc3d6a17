"""Small federations that the tests share."""

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import nn

from fedbcgd.backends.inprocess import InProcess
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.messages import Upload
from fedbcgd.core.objective import objective
from fedbcgd.core.server import Conditions, Server
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.job import Job

# Tests that start real processes, servers or a browser: marked `integration`.
INTEGRATION = (
    "cli/",
    "backends/workers/",
    "backends/ray/",
    "backends/flower/test_deployment",
    "backends/flower/test_faults",
    "backends/flower/test_operations",
    "report/test_browser",
    "report/test_serve",
)


# Files whose tests share something that takes long to start. `--dist loadgroup` gives each group to one process.
GROUPS = {
    "backends/ray/test_ray": "ray",
    "paper/test_smoke": "smoke",
    "paper/test_command": "command",
    "report/test_browser": "browser",
}


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        if path.startswith(INTEGRATION):
            item.add_marker("integration")
        for start, group in GROUPS.items():
            if path.startswith(start):
                item.add_marker(pytest.mark.xdist_group(group))


# A shell that starts `make test &` has it ignore Ctrl-C; what is tested of Ctrl-C needs to hear it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup leaves it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Several test processes share the cores: threads of one would wait for those of another.
torch.set_num_threads(1)

settings.register_profile("house", deadline=None)  # a busy machine is no reason to fail
settings.load_profile("house")


@pytest.fixture(scope="module")
def no_figures() -> Iterator[dict[str, Any]]:
    """Runs in folders draw no figures: those take longer than a short run, and are tested elsewhere.

    Yields:
        The functions that draw, for the fixture `figures`.
    """
    from fedbcgd.display import plots

    drawing = {name: getattr(plots, name) for name in ("curves", "label_counts")}
    with pytest.MonkeyPatch.context() as patch:
        for name in drawing:
            patch.setattr(plots, name, lambda *_, **__: None)
        yield drawing


@pytest.fixture
def figures(no_figures: dict[str, Any]) -> Iterator[None]:
    """Figures all the same, in a module that draws none."""
    from fedbcgd.display import plots

    with pytest.MonkeyPatch.context() as patch:
        for name, function in no_figures.items():
            patch.setattr(plots, name, function)
        yield


class Federation:
    """Server, client and in-process backend put together, with every part open to look at."""

    def __init__(
        self,
        algorithm: Algorithm,
        model: nn.Module,
        clients: Sequence[Any],
        cohort: int,
        seed: int = 0,
        loss: Any = None,
        transport: Callable[[Upload], Upload | None] | None = None,
        conditions: Conditions | None = None,
        train: Any = None,
    ):
        self.layout = algorithm.uplink.layout(model)
        self.job = Job(algorithm, self.layout, model, objective(loss), seed, clients, train=train)
        self.client = self.job.client
        x = self.client.model.vector
        self.server = Server(algorithm, self.layout, x, len(clients), cohort, seed, conditions or Conditions())
        self.store = StateStore(algorithm.state_names, self.layout.dim, self.layout.dtype)
        self.backend = InProcess(self.job, self.store, transport)

    def round(self) -> Any:
        self.backend.run_round(self.server, self.server.plan())
        report = self.server.commit()
        self.store.commit()
        return report

    def controls(self, name: str = "c") -> torch.Tensor:
        """c_i of every client, a row each; zero for those that never took part."""
        rows = torch.zeros(self.server.clients, self.layout.dim, dtype=self.layout.dtype)
        for i in self.store.clients():
            rows[i] = self.store.load(i, self.server.epoch)[name]
        return rows


@pytest.fixture
def federation() -> type[Federation]:
    return Federation


class Point(nn.Module):
    """Parameters that are nothing but a point; with `pull` as the loss, client i pulls it to its data's mean."""

    def __init__(self, *values: float):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w - x


def pull(model: nn.Module, batch: Any) -> torch.Tensor:
    """½‖w − x‖², averaged over the batch: its gradient is w − mean(x)."""
    return 0.5 * model(batch[0]).square().sum(1).mean()


@pytest.fixture
def point() -> type[Point]:
    return Point


@pytest.fixture
def pull_loss() -> Any:
    return pull


def at(*values: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A client with one example, the point (values)."""
    return torch.tensor([values], dtype=torch.float64), torch.zeros(1)


@pytest.fixture
def at_point() -> Any:
    return at


def toy_clients(sizes: Sequence[int] = (7, 5, 1, 9, 4, 6), classes: int = 3, features: int = 4, seed: int = 0) -> Any:
    g = torch.Generator().manual_seed(seed)
    out = []
    for k, n in enumerate(sizes):
        x = torch.randn(n, features, generator=g) + 0.3 * k
        out.append((x, torch.randint(classes, (n,), generator=g)))
    return out


@pytest.fixture
def toys() -> Any:
    return toy_clients


def small_net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def net() -> Any:
    return small_net
