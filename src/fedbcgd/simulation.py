"""`simulate`: train a model with a simulated federation, from Python."""

import copy
import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbcgd.algorithms.options import as_text
from fedbcgd.algorithms.registry import all_option_names, make_algorithm
from fedbcgd.backends.inprocess import Transport
from fedbcgd.backends.placement import Placement
from fedbcgd.backends.registry import make_backend
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.objective import Loss, Metrics, Precision
from fedbcgd.core.own_training import Train
from fedbcgd.data.sources import as_source
from fedbcgd.display.metrics import falls, main_metric, make_target
from fedbcgd.display.progress import single_run_display
from fedbcgd.engine.assemble import DEFAULT_COHORT, Run, check_integer
from fedbcgd.engine.client_evaluation import PREFIX, check_tests
from fedbcgd.engine.loop import DIVERGED, Callback, Outcome, Stop
from fedbcgd.engine.probe import explained
from fedbcgd.errors import Diverged, UserError, did_you_mean, other_name, users_frames
from fedbcgd.network.settings import Network, as_network
from fedbcgd.runs.config import EARLIER_NAMES, Config, RunSection
from fedbcgd.runs.execute import Prepare, execute
from fedbcgd.runs.experiment import Experiment
from fedbcgd.runs.from_python import as_config, described, hold_out_per_client
from fedbcgd.runs.prepare import PreparedRun

log = logging.getLogger("fedbcgd")


@dataclass
class Result(Outcome):
    """How a run went, and the model it trained. A notebook shows it as a table with curves."""

    module: nn.Module = field(kw_only=True)

    def plot(self, metric: str | None = None, against: str = "upload_d", axes: Any = None) -> Any:
        """Draw a metric of the run.

        Example:
            >>> figure = first.plot("test_loss")
            >>> second.plot("test_loss", axes=figure.axes[0])
            >>> figure.savefig("loss.pdf")

        Args:
            metric: a column of `rows`; default: the accuracy on test data, else a loss.
            against: the column on the x axis, such as "round", "gradient_evaluations" or "hours".
            axes: matplotlib's Axes to draw into; default: a new figure.

        Returns:
            The matplotlib Figure.

        Raises:
            UserError: the rows have no such column.
        """
        from fedbcgd.display.notebook import curve

        return curve(self, metric, against, axes)

    def __repr__(self) -> str:
        metric = main_metric(self.final, self.metric)
        shown = "" if metric is None else f", {metric} {self.final[metric]:.4f}"
        upload = f"{self.ledger.upload_d:.2f} d uploaded"
        return f"<Result of {self.algorithm}: {self.rounds} rounds, stopped by {self.stopped}{shown}, {upload}>"

    def _repr_html_(self) -> str:
        from fedbcgd.display.notebook import html

        return html(self)


class Interrupted(KeyboardInterrupt):
    """`simulate` was interrupted by Ctrl-C; `result` holds the run up to the last finished round."""

    def __init__(self, result: Result, message: str = "interrupted"):
        super().__init__(message)
        self.result = result


def simulate(
    model: nn.Module,
    clients: Sequence[Any],
    algorithm: str | Algorithm = "fedbcgd",
    *,
    train: Train | None = None,
    test: Any = None,
    client_tests: Sequence[Any] | None = None,
    held_out: float | None = None,
    rounds: int | None = None,
    budget: float | None = None,
    target: float | Mapping[str, float] | tuple[str, float] | tuple[str, str, float] | None = None,
    cohort: int | None = None,
    seed: int = 0,
    loss: Loss | nn.Module | None = None,
    metrics: Metrics | None = None,
    weights: Mapping[str, Tensor] | None = None,
    metric: str | None = None,
    goal: str | None = None,
    evaluate_every: int = 1,
    personal: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    backend: str = "workers",
    address: str | None = None,
    gpus: float | None = None,
    device: str | torch.device = "cpu",
    channels_last: bool | None = None,
    precision: Precision = "fp32",
    batch_clients: int | None = None,
    transport: Transport | None = None,
    network: str | Mapping[str, Any] | Network | None = None,
    **options: Any,
) -> Result:
    """Train a model on clients' data with a federated algorithm, on this machine or a Ray cluster.

    The same seed gives the same model, bit for bit, for any number of workers and on every backend.

    Example:
        >>> result = fedbcgd.simulate(model, clients, "fedbcgd", blocks=5, lr=0.1, test=test, budget=20)
        >>> result.final["test_accuracy"], result.ledger.upload_d
        >>> result.module  # the trained model

    What is trained:
        model: any nn.Module; it is copied, not changed.
        clients: for each client a pair (x, y) of tensors, a dictionary of tensors, or a map-style data set; with `train`,
            whatever that function takes, such as a DataLoader.
        test: data of the same kinds, for the metrics.
        client_tests: for each client held-out data of its own, or None; rows then tell how the metric is spread over the
            clients: clients_accuracy_mean, _std, _worst_tenth, _lowest_quarter (docs/runs.md).
        held_out: instead of client_tests, the share of each client's examples that is kept out of its training for this.
        loss: a callable (model, batch) → scalar, or a criterion module for (x, y) batches; default cross entropy.
        metrics: a callable (model, batch) → dictionary of means over the batch, or of boolean tensors (an entry for each
            example), which are counted exactly; default loss and accuracy.
        weights: a state_dict to start from instead of the model's own values.

    How:
        algorithm: a registered name (`fedbcgd.algorithm_names()` lists them) or an Algorithm.
        **options: hyper-parameters of a named algorithm: `blocks=5, lr=0.1, weighting="examples"`. All of them
            are listed at the end of `help(fedbcgd.simulate)`, in docs/options.md and by `fedbcgd options [ALGORITHM]`.
        train: a training function of your own, train(model, data, config), which replaces the algorithm's local steps. It
            trains the model in place in any way, and returns metrics: a dictionary of numbers, a number for the loss, or
            None. docs/own-training.md says what `config` has, and which algorithms need config.optimizer.
        cohort: clients sampled in a round; default 10, or all if there are fewer.
        seed: the seed of every random draw.

    When it stops, whichever comes first:
        rounds: a number of rounds.
        budget: stop before the mean upload of a participating client exceeds this, in units of the model's size d.
        target: an accuracy on `test`; a metric and its value, such as {"mae": 0.3} or ("test_loss", 0.5); or
            ("test_score", "<=", 0.1), for a metric that should fall although its name does not tell.

    What is reported during the run:
        metric: the metric that progress, tables and figures are about, such as "mae"; default: the accuracy, else a loss.
            A `target` that is a number is one of this metric.
        goal: what this metric should do, "min" or "max"; default: "min" if its name tells so, as loss, mae and error do.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        personal: also measure each client on its held-out examples after this many local steps (plain SGD) from the global
            model: clients_personal_accuracy_mean and so on.
        callbacks: called with a RoundInfo after each round; `info.stop()` ends the run.
        progress: whether to show a progress bar; default: on a terminal and in a notebook.

    Where it is written:
        out: the folder of the run, as `fedbcgd run` writes it: configuration, metrics, checkpoints, model, label counts.
            An object that a configuration cannot name, such as a function, is written as module:name. Default: nothing is
            written.
        resume: whether to continue the run that is in `out`, if there is one, to the same bits as an uninterrupted run.
            rounds, budget and target may be extended then.

    Where it is computed:
        workers: how many processes do the clients' work; default: one per core. 0 does it in this process, which starts
            faster and is easier to debug.
        backend: "workers" (processes of this machine), "inprocess" (this process) or "ray" (actors of a Ray cluster; needs
            the extra `ray`).
        address: the address of the Ray cluster ("auto", "host:port"); default: start Ray on this machine.
        gpus: with Ray, the share of a GPU that each actor gets.
        device: "cpu", "cuda", …
        channels_last: whether to compute in that memory format; default: for models with 2-d convolutions, if a trial
            shows that they can.
        precision: "fp32" or "bf16". With "bf16", training and evaluation compute under PyTorch's autocast in bfloat16,
            while parameters, uploads, sums, controls and steps stay in float32, which must be the type of the model. That
            is faster on a CPU or GPU that has bfloat16, and slower elsewhere, which a warning then says (docs/speed.md).
        batch_clients: how many clients are trained in one batch, at most. It needs a model that has `stacked_gradient`
            (logistic regression and other linear ones), is much faster for small models, and gives the same result up to
            rounding.

    Over which network:
        network: the simulated links of the clients: the name of a profile ("4g", "broadband", "datacentre", "mix") or a
            dictionary of the settings of `[network]` in docs/network.md, such as deadlines, over-sampling and faults. Rows
            then have a column `hours`: the time on the clock of that network.
        transport: for tests: a function that is called with each upload and returns it, a damaged one, or None to lose it.
            Only with workers=0.

    Returns:
        The rows of metrics, the ledger, why it stopped, and the trained module.

    Raises:
        UserError: an argument is wrong; the message says which, and what is expected.
        Diverged: at least two thirds of the uploads were refused in each of three successive rounds; its `result` has
            the run so far.
        Interrupted: Ctrl-C; its `result` has the run so far.
    """
    checked = CheckedArguments.of(locals())
    if resume and out is None:
        raise UserError("resume: expected out, the folder of the run to continue, got none; pass out=…")
    with single_run_display(checked.algorithm.name, progress) as bar:
        shown = [bar] if bar else []
        try:
            return _run(checked, None if out is None else Path(out), resume, shown)
        except Exception as error:
            if error.__traceback__ is not None:  # our own frames are cut out
                error.__traceback__.tb_next = users_frames(error.__traceback__.tb_next)
            raise


if simulate.__doc__:  # none with python -OO
    simulate.__doc__ += (
        f"\n    Options of algorithms (default): meaning [which take it, if not all]\n{as_text('        ')}\n    "
    )


@dataclass(frozen=True)
class CheckedArguments:
    """The arguments of `simulate`, checked.

    Attributes:
        experiment: what is trained.
        algorithm: how.
        settings: when it stops, and where it is computed.
        network: the simulated network; None: no network.
        transport: see `simulate`.
    """

    experiment: Experiment
    algorithm: Algorithm
    settings: RunSection
    network: Network | None
    transport: Transport | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "CheckedArguments":
        """Check the arguments of `simulate`.

        Args:
            given: `locals()` of `simulate`: the arguments by name, with the options of the algorithm as `options`.

        Raises:
            UserError: one of them is wrong.
        """
        given, options = {**given}, {**given["options"]}
        for earlier, name in EARLIER_NAMES.items():
            if earlier in options:
                log.warning("%s: expected the new name, %s; the old one works in this version only", earlier, name)
                given[name] = options.pop(earlier)
        algorithm = _algorithm(given["algorithm"], options)
        network, target, transport = as_network(given["network"]), given["target"], given["transport"]
        model, clients, test, train = (given[name] for name in ("model", "clients", "test", "train"))
        _check(model, clients, test, Stop(given["rounds"], given["budget"], make_target(target)), given)
        _check_metric(given["metric"], given["goal"])
        _check_functions(given["loss"], given["metrics"])
        # Any other sequence may be lazy: its clients are checked when they are used.
        if train is None and isinstance(clients, (list, tuple)):
            for i, data in enumerate(clients):
                as_source(data, f"client {i}")
        clients, tests = _with_tests(clients, given)
        cohort = min(DEFAULT_COHORT, len(clients)) if given["cohort"] is None else given["cohort"]
        check_integer("cohort", cohort, 1)
        types = {"rounds": int, "budget": float, "seed": int, "evaluate_every": int, "device": str}
        values = {name: given[name] for name in RunSection.model_fields if name in given and name != "callbacks"}
        values |= {name: kind(values[name]) for name, kind in types.items() if values[name] is not None}
        values |= {"cohort": int(cohort), "target": dict(target) if isinstance(target, Mapping) else target}
        if transport is not None and values["workers"] is None:
            values["workers"] = 0
        # Not validated again: all values were checked above, with messages about arguments instead of keys.
        settings = RunSection.model_construct(**values)
        _check_placement(settings.placement, network, transport)
        own = {name: given[name] for name in ("loss", "metrics", "weights", "callbacks", "held_out")}
        experiment = Experiment(model, clients, test, "test", train=train, client_tests=tests, **own)
        return cls(experiment, algorithm, settings, network, transport)

    def planned(self, where: str, experiment: Experiment | None = None) -> tuple[Config, Prepare]:
        """Return the configuration of this run in a folder, and what prepares it.

        Args:
            where: what was called, for messages.
            experiment: what is trained, as `described` returned it; None: that of these arguments.
        """
        known = described(self.experiment, self.settings) if experiment is None else experiment
        settings = self.settings.model_copy(update=_written_target(self.settings))
        config = as_config(known, self.algorithm.for_cohort(settings.cohort), settings, self.network, where)
        return config, lambda complete: self.prepared(known, complete.run)

    def prepared(self, experiment: Experiment, settings: RunSection, in_folder: bool = True) -> PreparedRun:
        """Make the objects of the run; see `PreparedRun`."""
        return PreparedRun(experiment, self.algorithm, settings, self.network, self.transport, in_folder)


def _run(checked: CheckedArguments, out: Path | None, resume: bool, shown: Sequence[Callback]) -> Result:
    """Run to the end; an error that ends the run gets the result so far."""
    prepared: list[PreparedRun] = []  # one, once it is prepared
    model = checked.experiment.model
    try:
        stopped = (
            _in_memory(checked, shown, prepared) if out is None else _in_folder(checked, out, resume, shown, prepared)
        )
        return _result(prepared[0].run, model, stopped)
    except KeyboardInterrupt as error:
        if not prepared or prepared[0].run.loop is None:
            raise
        text = _in_python(error) or "interrupted"
        raise Interrupted(_result(prepared[0].run, model, "interrupted"), text) from None
    except Diverged as error:
        error.result = _result(prepared[0].run, model, DIVERGED)
        raise
    except UserError as error:
        if (text := _in_python(error)) == str(error):
            raise
        raise type(error)(text) from error.__cause__


def _in_memory(checked: CheckedArguments, shown: Sequence[Callback], prepared: list[PreparedRun]) -> str:
    """Run without writing anything; return why it stopped."""
    settings = checked.settings
    prepared.append(checked.prepared(checked.experiment, settings, in_folder=False))
    prepared[0].warn()
    with prepared[0].run as run:
        loop = run.start(
            partial(make_backend, where=prepared[0].placement, transport=checked.transport),
            every=settings.evaluate_every,
            callbacks=[*checked.experiment.callbacks, *shown],
            overlap=prepared[0].overlap,
            metric=settings.metric,
            goal=settings.goal,
        )
        try:
            return loop.run()
        except RuntimeError as error:
            if checked.experiment.train is None and (explanation := explained(error, run.job)):
                raise explanation from None
            raise


def _in_folder(
    checked: CheckedArguments, out: Path, resume: bool, shown: Sequence[Callback], prepared: list[PreparedRun]
) -> str:
    """Run in a folder, as `fedbcgd run` does; return why it stopped."""
    config, make = checked.planned("simulate")

    def prepare(config: Config) -> PreparedRun:
        prepared.append(make(config))
        return prepared[0]

    return execute(config, out, resume=resume, callbacks=shown, prepare=prepare).stopped


def _written_target(settings: RunSection) -> dict[str, Any]:
    """Return the target as a configuration has it, with the goal where the metric's name does not tell the direction."""
    target = settings.target_of("test")
    if target is None or isinstance(settings.target, (int, float)):
        return {}
    name, how, value = target
    written: dict[str, Any] = {"target": {name: value}}
    if (how == "<=") == falls(name, settings.metric, settings.goal):
        return written
    if settings.metric not in (None, name, name.removeprefix("test_")):
        direction = "fall" if how == "<=" else "rise"
        raise UserError(
            f"target: expected the run's metric, {settings.metric!r}, with {how!r}, got {name!r}, whose name does not tell "
            f"that it should {direction}; pass metric={name!r}"
        )
    return {**written, "metric": settings.metric or name, "goal": "min" if how == "<=" else "max"}


def _in_python(error: BaseException) -> str:
    """Return a message about options of the command line as one about arguments."""
    return str(error).replace("--resume", "resume=True").replace("another --out", "another out")


def _result(run: Run, model: nn.Module, reason: str) -> Result:
    module = copy.deepcopy(model)  # ordinary parameters, each with memory of its own
    module.load_state_dict(run.state_dict())
    return Result(**vars(run.outcome(reason)), module=module)


def _algorithm(algorithm: str | Algorithm, options: dict[str, Any]) -> Algorithm:
    if isinstance(algorithm, Algorithm):
        if options:
            given = ", ".join(options)
            raise UserError(
                f"{next(iter(options))}: expected no options with an Algorithm object, which has its own, got {given}; pass "
                "the algorithm's name to set them"
            )
        return algorithm
    check_options(options)
    return make_algorithm(algorithm, **options)


_CALLBACKS = {  # keys of [run], and other names that people try: in Python these are callbacks
    **dict.fromkeys(("patience", "early_stopping"), "fedbcgd.EarlyStopping(patience=…)"),
    "keep_best": "fedbcgd.KeepBest()",
    "wandb": "fedbcgd.WandB()",
    "mlflow": "fedbcgd.MLflow()",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Check that some algorithm has each of these options.

    Raises:
        UserError: none has; the message names one that is similar.
    """
    known = all_option_names()
    arguments = [name for name in inspect.signature(simulate).parameters if name != "options"]
    for option in options:
        if option not in known:
            if option in arguments:
                raise UserError(f"{option}: expected an option of algorithms, got an argument of simulate")
            if option in _CALLBACKS:
                callback = _CALLBACKS[option]
                raise UserError(
                    f"{option}: expected an option, got the name of a callback; pass callbacks=[{callback}]"
                )
            if hint := other_name(option, [*known, *arguments]):
                raise UserError(f"{option}: {hint}")
            near = did_you_mean(option, [*known, *arguments])
            raise UserError(f"{option}: expected an argument listed by help(fedbcgd.simulate), got {option!r}.{near}")


def _check(model: Any, clients: Any, test: Any, stop: Stop, given: Mapping[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"model: expected an nn.Module (an instance, not a class), got {model!r}")
    if not isinstance(clients, Sequence) and not (hasattr(clients, "__len__") and hasattr(clients, "__getitem__")):
        raise UserError(f"clients: expected a list with the data of each client, got {type(clients).__name__}")
    if isinstance(clients, Mapping):
        raise UserError("clients: expected a list, got a dictionary; pass list(clients.values())")
    if not len(clients):
        raise UserError("clients: expected at least one, got an empty list")
    if stop.rounds is None and stop.budget is None and stop.target is None:
        raise UserError(
            "rounds: expected rounds, budget (upload in d) or target (a metric on test), got none of them; give one, "
            "such as rounds=100"
        )
    check_integer("rounds", 1 if stop.rounds is None else stop.rounds, 1)
    if stop.budget is not None and not (_is_number(stop.budget) and 0 < stop.budget < math.inf):
        raise UserError(f"budget: expected a positive number (upload in d), got {stop.budget!r}")
    of_clients = stop.target is not None and stop.target[0].startswith(PREFIX)
    if stop.target is not None and test is None and not of_clients:
        raise UserError("test: expected data to measure the target on, got none; pass test=…")
    check_integer("evaluate_every", given["evaluate_every"], 1)
    check_integer("seed", given["seed"], 0)
    callbacks = given["callbacks"]
    if callable(callbacks) or not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise UserError(f"callbacks: expected a list of callables, got {callbacks!r}")


def _with_tests(clients: Any, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the clients' examples for training, and each one's own for evaluation; None if there are none."""
    tests, share = given["client_tests"], given["held_out"]
    if given["personal"] is not None:
        check_integer("personal", given["personal"], 1)
    if share is None:
        return clients, None if tests is None else check_tests(tests, len(clients))
    if not (_is_number(share) and 0 < share < 1):
        raise UserError(f"held_out: expected a share > 0 and < 1, got {share!r}")
    if tests is not None or given["train"] is not None:
        other, advice = "client_tests", "leave one of them out"
        if tests is None:
            other, advice = "train, whose data may be of any kind", "pass client_tests=…"
        raise UserError(f"held_out: expected none with {other}, got {share:g}; {advice}")
    return hold_out_per_client(clients, share, given["seed"])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_metric(metric: Any, goal: Any) -> None:
    if metric is not None and not isinstance(metric, str):
        raise UserError(f"metric: expected the name of a metric, such as 'mae', got {metric!r}")
    if goal not in (None, "min", "max"):
        raise UserError(f"goal: expected 'min' or 'max', got {goal!r}")
    if goal and metric is None:
        raise UserError(f"metric: expected the name of the metric that goal={goal!r} is about, got none")


def _check_placement(placement: Placement, network: Network | None, transport: Transport | None) -> None:
    """Check where the run is computed, and begin to start what it needs."""
    if transport is not None and not placement.entry.takes_transport:
        raise UserError(
            f"transport: expected none with backend = {placement.entry.name!r}, got one; it works in this process only "
            "(workers=0)"
        )
    placement.check()
    if network is not None and network.crash and (problem := placement.crash_problem()):
        raise UserError(f"network.{problem}")
    placement.entry.start_early()


def _check_functions(loss: Any, metrics: Any) -> None:
    for name, function in (("loss", loss), ("metrics", metrics)):
        if function is not None and not callable(function):
            raise UserError(f"{name}: expected a function of (model, batch), got {function!r}")
