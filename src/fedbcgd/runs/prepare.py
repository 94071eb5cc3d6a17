"""A run that is ready to start, from a configuration or from the arguments of `fedbcgd.simulate`."""

from collections.abc import Collection
from dataclasses import replace

from fedbcgd.backends.inprocess import Transport
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.objective import objective
from fedbcgd.data.sources import as_source
from fedbcgd.display.callbacks import EarlyStopping, KeepBest
from fedbcgd.display.metrics import falls, main_metric
from fedbcgd.engine.assemble import Run, make_job
from fedbcgd.engine.client_evaluation import PREFIX, ClientEvaluation, check_tests
from fedbcgd.engine.job import Job
from fedbcgd.engine.loop import Callback, Stop
from fedbcgd.engine.precision import warn_if_slower
from fedbcgd.engine.probe import metric_names, try_out
from fedbcgd.errors import UserError, unknown
from fedbcgd.network.settings import Network
from fedbcgd.network.simulator import NetworkSimulator, fit_to_links
from fedbcgd.runs import config as configuration
from fedbcgd.runs.config import Config, RunSection
from fedbcgd.runs.experiment import Experiment, make_experiment
from fedbcgd.runs.from_python import from_loader
from fedbcgd.runs.secrets import refuse_masked
from fedbcgd.runs.user_code import make_callbacks


class PreparedRun:
    """The objects of a run. Making them writes no file, and finds every mistake in what was asked for.

    Args:
        experiment: what is trained.
        algorithm: how.
        settings: when it stops, and where it is computed.
        network: the simulated network; None: no network.
        transport: see `fedbcgd.simulate`.
        in_folder: whether the run is written to a folder: then what is sent is recorded, and own code is tried first.

    Raises:
        UserError: something is wrong, or does not fit.
    """

    def __init__(
        self,
        experiment: Experiment,
        algorithm: Algorithm,
        settings: RunSection,
        network: Network | None = None,
        transport: Transport | None = None,
        in_folder: bool = True,
    ):
        self.experiment, self.settings, self.transport = experiment, settings, transport
        self.placement = placement = settings.placement
        model, clients = experiment.model, experiment.clients
        algorithm = algorithm.for_cohort(settings.cohort)
        algorithm = fit_to_links(algorithm, network, model, clients, settings.cohort, settings.seed)
        job = make_job(
            model,
            clients,
            algorithm,
            experiment.test,
            settings.seed,
            loss=experiment.loss,
            metrics=experiment.metrics,
            weights=experiment.weights,
            device=placement.local_device,
            channels_last=settings.channels_last,
            batch_clients=settings.batch_clients,
            train=experiment.train,
            precision=settings.precision,
        )
        if in_folder and experiment.own_code and experiment.train is None:
            try_out(job)
        self.stop = Stop(settings.rounds, settings.budget, settings.target_of(experiment.prefix))
        self._check_names(job)
        self.network = NetworkSimulator(job, network) if in_folder or network is not None else None
        self.run = Run(
            job,
            self.stop,
            cohort=settings.cohort,
            hooks=self.network,
            reliable=transport is None,
            clients_evaluation=self._client_evaluation(job),
        )

    def _check_names(self, job: Job) -> None:
        """Refuse a metric or a target that will not be measured, which would show only after the first rounds."""
        prefix, settings = self.experiment.prefix, self.settings
        named = {"metric": settings.metric, "target": self.stop.target[0] if self.stop.target else None}
        # Of training, of the clients and of costs other metrics are known only in a run.
        later = ("train_", PREFIX, "round", "upload_", "download_", "gradient_evaluations", "hours", "seconds")
        stated = {field: name for field, name in named.items() if name and not name.startswith(later)}
        if not stated:
            return
        tests = [job.test, *(self.experiment.client_tests or ())]
        test = next((as_source(test, "client_tests") for test in tests if test is not None), None)
        names = [] if test is None else metric_names(job, test)
        for field, name in stated.items():
            if test is None:
                raise UserError(f"{field}: expected data to measure {name!r} on, got none; pass test=…")
            if name.removeprefix(f"{prefix}_") not in names:
                raise unknown(field, name, names)

    def _client_evaluation(self, job: Job) -> ClientEvaluation | None:
        """Return what evaluates the model on each client's own examples; None if that is not asked for."""
        experiment, settings = self.experiment, self.settings
        if experiment.client_tests is None:
            if settings.personal is not None:
                raise UserError(
                    f"personal: expected held_out (a share) or client_tests with it, got none with personal = "
                    f"{settings.personal}; set data.held_out, or pass held_out=…"
                )
            return None
        if settings.personal is not None and experiment.train is not None:
            raise UserError(f"personal: expected none with train, got {settings.personal}; its steps are plain SGD")

        def choose(names: Collection[str]) -> tuple[str, bool]:
            columns = [f"{experiment.prefix}_{name}" for name in names]
            column = main_metric(columns, settings.metric) or columns[0]
            name = column.removeprefix(f"{experiment.prefix}_")
            return name, falls(column, settings.metric, settings.goal)

        tests = check_tests(experiment.client_tests, len(experiment.clients))
        clients = experiment.clients if job.algorithm.uplink.pooled else job.clients
        return ClientEvaluation(job, tests, choose, settings.personal, clients)

    @property
    def overlap(self) -> bool:
        """Whether a model may be evaluated during the next round; a user's callback sees each row with its own round."""
        return self.placement.entry.overlaps_evaluation and not self.experiment.callbacks

    def warn(self) -> None:
        """Log a warning if the run would be faster with another precision."""
        if self.settings.precision != "fp32" and not self.placement.entry.device_is_remote:
            warn_if_slower(self.run.job, objective(self.experiment.loss, self.experiment.metrics))


def prepare(config: Config) -> PreparedRun:
    """Make the objects that a complete configuration describes.

    Raises:
        UserError: something in it is wrong.
    """
    refuse_masked(config.model_dump())
    config.placement.check()
    experiment = make_experiment(config) if config.data.clients_from is None else from_loader(config)
    run = config.run
    callbacks: list[Callback] = [] if run.patience is None else [EarlyStopping(run.patience)]
    callbacks += [KeepBest()] if run.keep_best else []  # after what may stop the run, so that it sees the last row
    experiment = replace(experiment, callbacks=[*callbacks, *make_callbacks(run.callbacks)])
    algorithm = configuration.algorithm_of(config, "configuration")
    return PreparedRun(experiment, algorithm, config.run, config.network)
