"""The configuration of a run: one TOML file, checked field by field."""

import json
import logging
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from fedbcgd.backends.placement import Placement
from fedbcgd.backends.registry import BACKENDS
from fedbcgd.core.parts import Section, explain_error
from fedbcgd.data.names import EMBEDDED, PYTHON, QUADRATICS
from fedbcgd.display.metrics import make_target
from fedbcgd.errors import ALIASES, UserError, other_name
from fedbcgd.files import read_regular, read_text, verify_checksum
from fedbcgd.network.links import COLUMNS
from fedbcgd.network.profiles import Distribution
from fedbcgd.network.settings import Network
from fedbcgd.runs.secrets import looks_secret, mask_config

log = logging.getLogger("fedbcgd")


class Data(Section):
    """`[data]`: the data set, and its partition over the clients."""

    name: str = Field(
        EMBEDDED,
        description="embedded: 10,000 train and 2,000 test images of Fashion-MNIST, in the package; a name that "
        "`fedbcgd data list` shows; module:attribute of your own loader; or quadratics, see [quadratics]",
    )
    clients_from: str | None = Field(
        None,
        description="module:attribute of your own loader of clients: it returns a list of them, (clients, test) or "
        "(clients, test, client_tests)",
    )
    clients: int = Field(100, ge=1, description="M: clients in the federation")
    partition: Literal["dirichlet", "dirichlet-unequal", "iid", "shards", "quantity", "group"] = Field(
        "dirichlet",
        description="how the training set is split over the clients: dirichlet, dirichlet-unequal, iid, shards, quantity, "
        "group",
    )
    dirichlet: float = Field(0.6, gt=0, description="ρ, for dirichlet: the smaller, the fewer labels a client has")
    shards: int = Field(2, ge=1, description="for shards: how many each client gets of the examples sorted by label")
    spread: float = Field(0.5, gt=0, description="for quantity: the smaller, the more unequal the clients' sizes")
    positive: int | None = Field(None, ge=0, description="make the problem binary: this label becomes 1, all others 0")
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the training set that is held out; metrics are then computed on it, not on the test set",
    )
    held_out: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of each client's examples that is not trained on but measured on: columns clients_… "
        "(docs/runs.md)",
    )
    augment: bool = Field(False, description="move training images by up to 4 pixels and mirror half of them")
    resize: int | None = Field(None, ge=1, le=4096, description="side, in pixels, to which images are scaled")
    crop: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="side of the square that is cut out after resizing: at random with augment, else from the middle",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of your own loader")


class Model(Section):
    """`[model]`: the network and its initial weights."""

    name: str = Field(
        "lenet5",
        description="lenet5, vgg11, vgg19, resnet18, vit-base, vit-small, logistic, binary-logistic, binary-sigmoid; "
        "module:attribute of your own factory; hf:FOLDER with a transformers configuration; point, for quadratics",
    )
    width: float | None = Field(None, gt=0, le=16, description="factor on the channels of a convolutional network")
    norm: Literal["none", "group", "batch"] | None = Field(
        None, description="normalisation of resnet18 (unset: group) and vgg (unset: none)"
    )
    weights: str | None = Field(
        None,
        description="a file of weights to start from; for vit-base also a Hugging Face id (tensors named as in timm or "
        "transformers)",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of your own factory")


class Quadratics(Section):
    """`[quadratics]`: a problem with a known optimum; its metric is `gap`, the distance f(x) − f* to the optimum."""

    dim: int = Field(20, ge=1, description="d: number of parameters")
    beta: float = Field(10.0, gt=0, description="β: the largest curvature")
    mu: float = Field(1.0, gt=0, description="μ: the smallest curvature")
    sigma: float = Field(1.0, ge=0, description="σ: standard deviation of an example's gradient around its client's")
    G: float = Field(5.0, ge=0, description="G: root mean square of the clients' gradients at the optimum")
    examples: int = Field(10, ge=1, description="examples of each client")


EARLIER_NAMES = {"carrier": "backend", "together": "batch_clients"}  # keys of [run]


@cache
def _warn_of_earlier_name(earlier: str) -> None:
    """Log a warning, but only once in a process, since hundreds of runs may be read."""
    log.warning("run.%s is called run.%s now; the old name works in this version only", earlier, EARLIER_NAMES[earlier])


class RunSection(Section):
    """`[run]`: seed, cohort, when to stop, and where clients compute."""

    seed: int = Field(
        0, ge=0, lt=2**63, description="fixes every random draw: partition, initial weights, cohorts, minibatches"
    )
    cohort: int = Field(10, ge=1, description="S: clients sampled in a round")
    rounds: int | None = Field(None, ge=1, description="stop after this many rounds")
    budget: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="stop before a client has uploaded more than this on average, in units of the model's size d",
    )
    metric: str | None = Field(
        None,
        description="the metric that tables and figures are about, such as mae; unset: the accuracy, else the loss",
    )
    goal: Literal["min", "max"] | None = Field(
        None, description="what this metric should do; unset: min if its name tells so, as loss, mae and error do"
    )
    target: float | dict[str, float] | None = Field(
        None, description="stop at this accuracy, or at the value of another metric: { mae = 0.3 }"
    )
    evaluate_every: int = Field(1, ge=1, description="rounds between evaluations")
    personal: int | None = Field(
        None,
        ge=1,
        description="also measure each client on its held-out examples after this many local steps from the global model",
    )
    checkpoint_every: int | None = Field(
        None, ge=1, description="rounds between checkpoints; unset: as often as takes less than 2 % of the time"
    )
    workers: int | None = Field(None, ge=0, description="processes; 0: this process only; unset: one per core")
    backend: str = Field("workers", description="; ".join(f"{b.name}: {b.summary}" for b in BACKENDS.values()))
    address: str | None = Field(None, description='Ray cluster: "auto" or "host:port"; unset: start Ray here')
    gpus: float | None = Field(None, ge=0, description="with ray: the share of a GPU that each actor gets")
    batch_clients: int | None = Field(
        None,
        ge=1,
        description="train up to this many clients in one batch (logistic, binary-logistic, binary-sigmoid and your own "
        "models with stacked_gradient): faster, equal up to rounding",
    )
    device: str = Field("cpu", description="where clients compute: cpu, cuda, mps")
    channels_last: bool | None = Field(
        None, description="compute in this memory format; unset: for 2-d convolutions, if a trial shows that they can"
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="type of forward and backward passes: fp32, or bf16, which is faster if the processor has it (`fedbcgd "
        "doctor`); models, uploads and steps stay in float32",
    )
    tensorboard: bool = Field(False, description="also write TensorBoard events (extra `tensorboard`)")
    patience: int | None = Field(
        None, ge=1, description="stop when the metric has not become better for this many evaluations"
    )
    keep_best: bool = Field(False, description="also keep the model with the best metric, as best.safetensors")
    callbacks: list[str] = Field(
        default_factory=list,
        description="called after each round: csv, wandb, mlflow, or module:attribute of your own (docs/callbacks.md)",
    )

    @property
    def placement(self) -> Placement:
        """Where the clients compute."""
        return Placement(self.backend, self.workers, self.address, self.gpus, self.device)

    def target_of(self, prefix: str) -> tuple[str, str, float] | None:
        """Return the target as a column, "<=" or ">=", and a value; None if there is none.

        Args:
            prefix: begins the metrics' names in a row.
        """
        return make_target(self.target, prefix, self.metric, self.goal)

    @field_validator("target", mode="plain")
    @classmethod
    def _possible_target(cls, given: Any, info: ValidationInfo) -> Any:
        if given is None:
            return None
        values = given if isinstance(given, dict) else {"": given}
        finite = all(isinstance(v, (int, float)) and v is not True and math.isfinite(v) for v in values.values())
        if isinstance(given, dict) and len(given) == 1 and finite:
            return {str(name): float(value) for name, value in given.items()}
        if not isinstance(given, dict) and finite and (info.data.get("metric") or 0 < given <= 1):
            return float(given)
        raise PydanticCustomError("target", "expected an accuracy > 0 and ≤ 1, or a metric and a value: { mae = 0.3 }")

    @model_validator(mode="after")
    def _goal_of_a_metric(self) -> "RunSection":
        if self.goal is not None and self.metric is None:
            raise ValueError(f"goal: expected metric = a name with it, got goal = {self.goal!r} alone")
        return self

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, name: str) -> str:
        if name not in BACKENDS:
            *others, last = map(repr, BACKENDS)
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})
        return name

    @model_validator(mode="before")
    @classmethod
    def _rename_earlier_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for earlier in EARLIER_NAMES.keys() & given.keys():
            _warn_of_earlier_name(earlier)
        return {EARLIER_NAMES.get(key, key): value for key, value in given.items()}


class Config(Section):
    """The configuration of a run.

    `[algorithm]` is checked by `make_algorithm`, since its keys depend on the algorithm.
    """

    data: Data = Data()
    model: Model = Model()
    algorithm: dict[str, Any] = {"name": "fedbcgd"}
    run: RunSection = RunSection()
    quadratics: Quadratics | None = None
    network: Network | None = None
    compare: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="options for a single algorithm in `fedbcgd compare`"
    )
    origin: dict[str, str] = Field(
        default_factory=dict,
        description="written by `fedbcgd.simulate`: where the objects came from that have no name here",
    )

    @property
    def placement(self) -> Placement:
        """Where the clients compute."""
        return self.run.placement

    def text(self) -> str:
        """Return the configuration as TOML, with secrets masked."""
        values = self.model_dump()
        if self.data.name == PYTHON:
            values["data"] = self.data.model_dump(exclude_unset=True)  # no key says how the program made the data
        return tomli_w.dumps(_without_unset(mask_config(values)))


def _without_unset(values: Any) -> Any:
    """Leave out None, which TOML does not have, and empty tables."""
    if isinstance(values, Mapping):
        return {k: _without_unset(v) for k, v in values.items() if v is not None and v != {}}
    return [_without_unset(v) for v in values] if isinstance(values, list) else values


SECTIONS: dict[str, type[Section]] = {"data": Data, "model": Model, "run": RunSection, "quadratics": Quadratics}
SECTIONS |= {"network": Network, **dict.fromkeys((*COLUMNS, "availability"), Distribution)}

# What may differ between a run and its continuation.
MAY_CHANGE = {"run.rounds", "run.budget", "run.target", "run.workers", "run.checkpoint_every", "run.tensorboard"}
MAY_CHANGE |= {"run.patience", "run.keep_best", "run.callbacks"}
MAY_CHANGE |= {"run.backend", "run.address", "run.gpus", "run.metric", "run.goal", "origin.program"}

# Limits for a configuration from a run folder, which may come from anywhere.
MAX_BYTES = 1 << 16
MAX_DOTS = 2000  # in a line: the parser's memory grows with the square of the number of parts of a dotted key


def load(path: Path, overrides: Sequence[str] = (), run: Mapping[str, Any] | None = None) -> Config:
    """Read a configuration from a TOML file.

    Args:
        path: the file.
        overrides: items such as "run.seed=1".
        run: further values of `[run]`, which are set last; None removes a value.

    Returns:
        The configuration, checked.

    Raises:
        UserError: the file cannot be read, or a value is wrong.
    """
    text = read_text(path, "a configuration file", f"; `fedbcgd init {path}` writes one to start from")
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected TOML, got: {error}") from None
    for item in overrides:
        _override(raw, item)
    if run and isinstance(raw.setdefault("run", {}), dict):
        raw["run"] = {k: v for k, v in (raw["run"] | dict(run)).items() if v is not None}
    return check(raw, str(path))


def read_table(path: Path) -> dict[str, Any]:
    """Read the config.toml of a run folder, without checking the values.

    Args:
        path: the file, which may come from anywhere.

    Returns:
        Its tables.

    Raises:
        UserError: it is not a regular file, too large, damaged, or not TOML.
        OSError: it does not exist, or cannot be read.
    """
    data = read_regular(path, MAX_BYTES)
    try:
        verify_checksum(data)
        text = data.decode()
        if max(line.count(".") for line in text.split("\n")) > MAX_DOTS:
            raise ValueError(f"a line has more than {MAX_DOTS:,} dots")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def check(raw: Mapping[str, Any], where: str, trust: bool = True) -> Config:
    """Make a configuration from tables of values.

    Args:
        raw: the tables.
        where: their source, for messages.
        trust: whether the user's own code that the tables name may be imported; not if they come from a run folder.

    Returns:
        The configuration.

    Raises:
        UserError: a value is wrong, or values do not go together; the message names the field.
    """
    raw = {**raw}
    if isinstance(data := raw.get("data"), dict) and (loader := data.get("clients_from")) is not None:
        if data.get("name", loader) != loader:
            raise UserError(
                f"{where}: data.name: expected none with data.clients_from, got {data['name']!r}; leave it out"
            )
        raw["data"] = {**data, "name": loader}
    if isinstance(raw.get("algorithm"), dict):
        raw["algorithm"] = {"name": "fedbcgd", **raw["algorithm"]}
    try:
        config = Config(**raw)
    except ValidationError as error:
        raise UserError("\n".join(f"{where}: {_explain(e)}" for e in error.errors())) from None
    # A program, and a user's own module, may have an algorithm of their own.
    own = config.data.name == PYTHON or ":" in str(config.algorithm.get("name"))
    for problem in [*([] if own else _misplaced(config)), *_contradictions(config)]:
        raise UserError(f"{where}: {problem}")
    if not own or (trust and config.data.name != PYTHON):
        algorithm_of(config, where)
    return config


def algorithm_of(config: Config, where: str) -> Any:
    """Make the algorithm of a configuration.

    Args:
        config: the configuration of a run.
        where: its source, for messages.

    Returns:
        The algorithm.

    Raises:
        UserError: an option is wrong.
    """
    from fedbcgd.algorithms.registry import make_algorithm
    from fedbcgd.runs.user_code import make_own_algorithm

    options = dict(config.algorithm)
    try:
        own = ":" in str(name := options.pop("name"))
        chosen = make_own_algorithm(name, options) if own else make_algorithm(name, **options)
        return chosen.for_cohort(config.run.cohort)
    except UserError as error:
        text = str(error)
        if text.startswith("algorithm: "):
            text = text.replace("algorithm", "name", 1)
        names_a_field = text.partition(":")[0].isidentifier()
        raise UserError(f"{where}: algorithm{'.' if names_a_field else ': '}{text}") from None


def complete(config: Config) -> Config:
    """Fill in all defaults of the algorithm, and make the path of measured links absolute.

    Then the configuration reproduces the run in a later version with other defaults, and from any folder.
    """
    network = config.network
    if network is not None and network.csv is not None:
        network = network.model_copy(update={"csv": str(Path(network.csv).resolve())})
    algorithm = config.algorithm
    if config.data.name != PYTHON and ":" not in algorithm["name"]:
        algorithm = algorithm_of(config, "configuration").options()
    return config.model_copy(update={"algorithm": algorithm, "network": network})


def differences(a: Config, b: Config) -> list[str]:
    """List how two configurations differ.

    What may change when a run is resumed is left out, and so are secrets, which a run folder does not have.

    Args:
        a: a configuration.
        b: another one.

    Returns:
        Lines `section.key: value in a → value in b`.
    """
    old, new = flat(mask_config(a.model_dump())), flat(mask_config(b.model_dump()))
    changed = [k for k in {**old, **new} if old.get(k) != new.get(k) and not looks_secret(k)]
    changed = [k for k in changed if k != "data.clients" or b.data.clients_from is None]  # the loader knows how many
    keys = [k for k in changed if ".".join(k.split(".")[:2]) not in MAY_CHANGE]  # run.target.mae is of run.target
    return [f"{k}: {_format(old.get(k))} → {_format(new.get(k))}" for k in keys]


def template() -> str:
    """Return the text of a configuration file with all defaults and comments, for a run of 100 rounds."""
    from fedbcgd.algorithms.local_rules import LocalRule
    from fedbcgd.algorithms.options import meaning_of
    from fedbcgd.algorithms.registry import algorithm_names, make_algorithm

    parts = ["# A run of fedbcgd: `fedbcgd run THIS-FILE --out FOLDER`. Commented lines show a default or a choice."]
    for name, section in (("data", Data), ("model", Model)):
        parts.append(_section(name, section))
    names = "\n".join(f"#   {name}: {summary}" for name, summary in algorithm_names().items())
    chosen = make_algorithm("fedbcgd")
    lines = [f'[algorithm]\n# One of:\n{names}\nname = "fedbcgd"']
    for part in (chosen.uplink, chosen.local, chosen.server):
        for key, info in type(part).model_fields.items():
            line = _line(key, getattr(part, key), info.description)
            # Options that only some algorithms have are comments, so that `name` can be changed without other changes.
            lines.append(line if key in LocalRule.model_fields or line.startswith("#") else f"# {line}")
    for key, value in (("codec", "plain"), ("uplink", "blocks")):
        lines.append("# " + _line(key, value, meaning_of(key)))
    lines.append(_line("weighting", "uniform", meaning_of("weighting")))
    for key, value in (("max_norm", "20x"), ("over_norm", "refuse")):
        lines.append("# " + _line(key, value, meaning_of(key)))
    parts.append("\n".join(lines))
    parts.append(_section("run", RunSection).replace("# rounds = …", "rounds = 100"))
    lines = _section("network", Network).splitlines()
    title = "# The simulated links of the clients; metrics then have a column `hours` (docs/network.md):"
    parts.append("\n".join([title, *(line if line.startswith("#") else f"# {line}" for line in lines)]))
    parts.append("# Options for a single algorithm when several are compared:\n# [compare.fedavg]\n# lr = 0.05")
    return "\n\n".join(parts) + "\n"


def _section(name: str, section: type[Section]) -> str:
    lines = [
        _line(key, None if info.default_factory else info.default, info.description)
        for key, info in section.model_fields.items()
        if info.default_factory is not dict  # a table of its own
    ]
    return "\n".join([f"[{name}]", *lines])


def _line(key: str, default: Any, description: str | None) -> str:
    text = tomli_w.dumps({key: default}).rstrip() if default is not None else f"# {key} = …"
    return f"{text:<28}  # {description}" if description else text


def _override(raw: dict[str, Any], item: str) -> None:
    path, equals, text = item.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise UserError(f"--set: expected section.key=value, such as run.seed=1, got {item!r}")
    table: Any = raw
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise UserError(f"--set: expected {key} to be a section, got a value in {item!r}")
    table[keys[-1]] = parse_value(text)


def parse_value(text: str) -> Any:
    """Parse a value from the command line as TOML; any other text is a string, so that no quotes are needed."""
    try:
        return tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _misplaced(config: Config) -> list[str]:
    """List the keys of `[algorithm]` that belong to another section."""
    from fedbcgd.algorithms.registry import all_option_names

    own = all_option_names() | {"name"}
    hints = {key: _in_another_section(key, "algorithm", own) for key in config.algorithm if key not in own}
    return [f"algorithm.{key}: {hint}" for key, hint in hints.items() if hint]


def _contradictions(config: Config) -> Iterator[str]:
    """Yield a message about all values that do not go together."""
    run, data, chosen = config.run, config.data, config.quadratics
    yield from (f"run.{problem}" for problem in config.placement.problems())
    if run.rounds is None and run.budget is None and run.target is None:
        yield "run: expected rounds, budget or target, which say when to stop, got none of them"
    if data.name != PYTHON and (data.name == QUADRATICS) != (config.model.name == "point"):
        yield (
            f"model.name: expected point with data.name = 'quadratics' and only then, got model {config.model.name!r} "
            f"with data {data.name!r}"
        )
    if chosen is not None and data.name != QUADRATICS:
        yield f"quadratics: expected this section only with data.name = 'quadratics', got {data.name!r}"
    if chosen is not None and chosen.mu > chosen.beta:
        yield f"quadratics.mu: expected at most beta = {chosen.beta:g}, got {chosen.mu:g}"
    if data.name == QUADRATICS and data.validation:
        yield (
            f"data.validation: expected 0 with quadratics, whose metric is the gap to the optimum, got {data.validation:g}"
        )
    if data.name == QUADRATICS and data.held_out is not None:
        yield f"data.held_out: expected none with quadratics, got {data.held_out:g}"
    if data.name == QUADRATICS and isinstance(run.target, float) and run.metric is None:
        yield (
            f"run.target: expected {{ gap = … }} with quadratics, whose metric is the gap to the optimum, got "
            f"{run.target:g}"
        )
    if config.network is not None and config.network.crash and (problem := config.placement.crash_problem()):
        yield f"network.{problem}"
    if run.cohort > data.clients and data.clients_from is None:
        yield f"run.cohort: expected at most data.clients = {data.clients}, got {run.cohort}"


def _explain(error: Any) -> str:
    """Return one of pydantic's errors as a message to the user."""
    section: Any = Config
    path = [str(step) for step in error["loc"]]
    for key in path[:-1]:
        section = SECTIONS.get(key, section)
    here = path[0] if section is not Config else ""
    if error["type"] == "extra_forbidden" and here in {"", *_HINTED}:
        from fedbcgd.algorithms.registry import all_option_names

        own = list(section.model_fields)
        elsewhere = _in_another_section(path[-1], here, own) or _in_algorithm(path[-1], all_option_names())
        if hint := other_name(path[-1], own) or elsewhere:
            return f"{'.'.join(path)}: {hint}"
    # A section is a table to the user, who knows no classes.
    return re.sub(r"a dictionary or instance of \w+", "a table", explain_error(error, section))


_HINTED: dict[str, type[Section]] = {"data": Data, "model": Model, "run": RunSection}


def _in_another_section(key: str, here: str, own: Collection[str]) -> str:
    """Return a hint at the section that has this key, perhaps by another name; empty if none has it."""
    if other_name(key, own):
        return ""
    name = ALIASES.get(key.lower(), key)
    for section, fields in _HINTED.items():
        if section != here and name in fields.model_fields and name != "name":
            return f"no such key here; it belongs to [{section}]" + (f" and is called {name}" if name != key else "")
    return ""


def _in_algorithm(key: str, options: Collection[str]) -> str:
    if key in options:
        return "no such key here; it belongs to [algorithm]"
    hint = other_name(key, options)
    return hint.replace("no such option; it is called", "no such key here; it belongs to [algorithm] and is called")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: values by their dotted names, tuples as lists."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": _as_list(value)}
    return out


def _as_list(value: Any) -> Any:
    return [_as_list(item) for item in value] if isinstance(value, (list, tuple)) else value


def _format(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False, default=str)  # a list too is one line
