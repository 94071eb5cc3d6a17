"""`compare` and `sweep` from Python: the runs, tables and files of the commands of these names."""

import inspect
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fedbcgd.algorithms.registry import algorithm_names
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.display.progress import in_notebook
from fedbcgd.display.terminal import display
from fedbcgd.engine.assemble import check_integer
from fedbcgd.engine.loop import Outcome
from fedbcgd.errors import UserError, unknown
from fedbcgd.report import page, reach
from fedbcgd.runs import compare as runs_compare
from fedbcgd.runs import sweep as runs_sweep
from fedbcgd.runs.batch import PlannedRun, run_all
from fedbcgd.runs.from_python import described, hold_out
from fedbcgd.simulation import CheckedArguments, check_options, simulate

Factory = Callable[[], nn.Module]


@dataclass
class Runs:
    """Several runs. Printed, or shown by a notebook, it is the tables of the command.

    Attributes:
        folder: has a folder for each run.
        rows: a row for each run, with its last metrics and its cost.
        outcomes: the outcome of each run, by the folder's name.
        best: of a sweep, the best options.
    """

    folder: Path
    rows: list[dict[str, Any]]
    outcomes: dict[str, Outcome]
    best: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list, repr=False)

    def frame(self) -> Any:
        """Return the rows as a data frame of pandas, which must be installed."""
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(self.rows)

    def page(self, path: str | Path) -> None:
        """Write the page that `fedbcgd report` writes about these runs."""
        page.write([self.folder], Path(path))

    def __repr__(self) -> str:
        return f"<{len(self.rows)} runs in {self.folder}; print them for their tables>"

    def __str__(self) -> str:
        console = Console(width=110, file=io.StringIO())
        for table in self.tables:
            console.print(table)
        return console.file.getvalue()  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def compare(
    model: nn.Module | Factory,
    clients: Sequence[Any],
    algorithms: Sequence[str] | Mapping[str, Mapping[str, Any] | Algorithm],
    *,
    out: str | Path,
    seeds: int = 1,
    reach_target: float | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Runs:
    """Run several algorithms on the same clients, with one or more seeds each, as `fedbcgd compare` does.

    Each run has a folder `out/NAME/seed-S`. Finished runs are kept and not run again, unfinished ones continue, so after
    Ctrl-C the same call goes on. Writes compare.csv, compare.png and reach.csv.

    Example:
        >>> runs = fedbcgd.compare(make_model, clients, ["fedavg", "fedbcgd"], test=test, budget=20, seeds=3, out="runs/c")
        >>> print(runs)

    Args:
        model: a model, which every run begins with; or a function that makes one, which is called for each seed after
            `torch.manual_seed(seed)`.
        clients: as for `simulate`.
        algorithms: names; or, by name, the options of each or an Algorithm. An option `name` says which algorithm it is, so
            that one can be compared with itself: {"5 blocks": {"name": "fedbcgd", "blocks": 5}, …}.
        out: the folder of the comparison.
        seeds: runs of each algorithm; the first has `seed`, each other the next integer.
        reach_target: the value of the metric in reach.csv and the second table, which say what each algorithm needed to
            reach it; default: the best that every run reached.
        progress: whether to show progress; default: on a terminal and in a notebook.
        **settings: further arguments of `simulate`. An option of algorithms goes to all that have it.

    Returns:
        The outcomes, with their rows and tables.

    Raises:
        UserError: something is wrong; the message says what.
        KeyboardInterrupt: Ctrl-C; the same call continues.
    """
    check_integer("seeds", seeds, 1)
    named = algorithms if isinstance(algorithms, Mapping) else {name: {} for name in algorithms}
    if isinstance(algorithms, str) or not named:
        raise UserError(f"algorithms: expected a list of names or a dictionary, got {algorithms!r}")
    arguments, common = _separate(settings)
    first = arguments.pop("seed", 0)
    check_integer("seed", first, 0)
    runs = []
    for seed in range(first, first + seeds):
        module, known = _made(model, seed), None
        for label, own in named.items():
            algorithm, options = _options(label, own, common)
            checked = _checked(module, clients, algorithm, options, {**arguments, "seed": seed})
            known = known or described(checked.experiment, checked.settings)
            config, prepare = checked.planned(f"compare {label}", known)
            title = label if seeds == 1 else f"{label}, seed {seed}"
            runs.append(PlannedRun(title, label, _folder_of(label, seed), config, prepare))
    runs.sort(key=lambda planned: list(named).index(planned.group))
    folder = Path(out)
    with _shown(runs, progress) as shown:
        outcomes = runs_compare.run(runs, folder, shown)
    _, tables = reach.write_comparison(outcomes, folder, reach_target)
    by_folder = {_folder_of(name, seed): outcome for name, group in outcomes.items() for seed, outcome in group.items()}
    return Runs(folder, runs_compare.rows(outcomes), by_folder, tables=tables)


def sweep(
    model: nn.Module | Factory,
    clients: Sequence[Any],
    algorithm: str = "fedbcgd",
    *,
    grid: Mapping[str, Sequence[Any]],
    out: str | Path,
    validation: Any = 0.1,
    progress: bool | None = None,
    **settings: Any,
) -> Runs:
    """Try every combination of some options of an algorithm, as `fedbcgd sweep` does, and choose the best.

    It is chosen by the metric of the run (`metric`, else an accuracy, another metric, the loss) on data that no client has.
    Writes sweep.csv and a folder for each run; finished runs are kept, so after Ctrl-C the same call goes on.

    Example:
        >>> found = fedbcgd.sweep(model, clients, "fedbcgd", grid={"lr": [0.01, 0.03, 0.1]}, rounds=50, out="runs/s")
        >>> result = fedbcgd.simulate(model, clients, "fedbcgd", **found.best, test=test, rounds=500)

    Args:
        model: as for `compare`.
        clients: as for `simulate`.
        algorithm: the name of the algorithm.
        grid: values of options, by the names of the options.
        out: the folder of the sweep.
        validation: the share of each client's examples that is held out to measure on; or data to measure on.
        progress: whether to show progress; default: on a terminal and in a notebook.
        **settings: further arguments of `simulate`, except `test`.

    Returns:
        The outcomes, with rows and table, and the best options as `best`.

    Raises:
        UserError: something is wrong, or all runs diverged.
        KeyboardInterrupt: Ctrl-C; the same call continues.
    """
    if "test" in settings:
        raise UserError(
            "test: expected none, since hyper-parameters must not be chosen on test data; pass validation=…"
        )
    if not isinstance(grid, Mapping) or not grid:
        raise UserError(f"grid: expected options and their values, such as {{'lr': [0.01, 0.1]}}, got {grid!r}")
    for option, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise UserError(f"grid: expected a list of values of {option}, got {values!r}")
    arguments, common = _separate(settings)
    check_integer("seed", arguments.get("seed", 0), 0)
    if isinstance(validation, float):
        if not 0 < validation < 1:
            raise UserError(f"validation: expected a share > 0 and < 1, or data, got {validation!r}")
        clients, validation = hold_out(clients, validation, arguments.get("seed", 0))
    module, known, runs, chosen_by = _made(model, arguments.get("seed", 0)), None, [], {}
    for chosen, label, name in runs_sweep.points({option: [*values] for option, values in grid.items()}):
        checked = _checked(module, clients, algorithm, {**common, **chosen}, {**arguments, "test": validation})
        checked = replace(checked, experiment=replace(checked.experiment, prefix="validation"))
        known = known or described(checked.experiment, checked.settings)
        config, prepare = checked.planned(f"sweep {label}", known)
        runs.append(PlannedRun(label, label, name, config, prepare))
        chosen_by[label] = chosen
    folder = Path(out)
    with _shown(runs, progress) as shown:
        outcomes = run_all(runs, folder, shown)
    best = runs_sweep.write(runs, outcomes, folder)
    by_folder = {planned.folder: outcomes[planned.label] for planned in runs}
    tables = [runs_sweep.table(runs, outcomes)]
    return Runs(folder, runs_sweep.rows(runs, outcomes), by_folder, {**common, **chosen_by[best.label]}, tables)


def _folder_of(label: str, seed: int) -> str:
    return f"{label.replace('/', '-')}/seed-{seed}"


def _made(model: Any, seed: int) -> Any:
    """Return the model, or the one that a user's function makes with this seed."""
    if isinstance(model, nn.Module) or not callable(model):
        return model
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return model()


def _separate(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate arguments of `simulate` from options of algorithms."""
    if "resume" in settings:
        raise UserError("resume: expected none, since finished runs in out are kept and others continue; leave it out")
    names = set(inspect.signature(simulate).parameters) - {"options", "resume"}
    common = {name: value for name, value in settings.items() if name not in names}
    check_options(common)
    return {name: value for name, value in settings.items() if name in names}, common


def _options(label: str, own: Any, common: Mapping[str, Any]) -> tuple[str | Algorithm, dict[str, Any]]:
    """Return an algorithm of a comparison, and its options."""
    if isinstance(own, Algorithm):
        return own, {}
    if not isinstance(own, Mapping):
        raise UserError(f"algorithms[{label!r}]: expected a dictionary of options or an Algorithm, got {own!r}")
    name = own.get("name", label)
    if name not in algorithm_names():
        raise unknown("algorithm", name, algorithm_names())
    options = runs_compare.options_of(name, common, {k: v for k, v in own.items() if k != "name"})
    return options.pop("name"), options


def _checked(
    model: Any, clients: Any, algorithm: Any, options: Mapping[str, Any], arguments: Mapping[str, Any]
) -> CheckedArguments:
    bound = inspect.signature(simulate).bind(model, clients, algorithm, **arguments)
    bound.apply_defaults()
    return CheckedArguments.of({**bound.arguments, "options": options})


def _shown(runs: Sequence[PlannedRun], progress: bool | None) -> Any:
    wanted = progress or (progress is None and (sys.stderr.isatty() or in_notebook()))
    return display([planned.label for planned in runs], quiet=not wanted, as_json=False)
