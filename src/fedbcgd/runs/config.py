"""The configuration of a run: one TOML file, checked field by field."""

import json
import logging
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticKnownError

from fedbcgd.backends.placement import Placement
from fedbcgd.backends.registry import BACKENDS
from fedbcgd.core.parts import Section, explain_error
from fedbcgd.data.names import EMBEDDED, QUADRATICS
from fedbcgd.errors import UserError
from fedbcgd.files import read_regular, vouched
from fedbcgd.network.links import COLUMNS
from fedbcgd.network.profiles import Distribution
from fedbcgd.network.settings import Network
from fedbcgd.runs.secrets import looks_secret, mask_config

# `[algorithm]` is checked by make_algorithm: which keys it may have depends on the algorithm.

log = logging.getLogger("fedbcgd")


class Data(Section):
    name: str = Field(
        EMBEDDED,
        description="embedded: 10,000 train and 2,000 test images of Fashion-MNIST, in the package; a name that `fedbcgd "
        "data list` shows; module:attribute of your own loader; or quadratics, see [quadratics]",
    )
    clients: int = Field(100, ge=1, description="M: clients in the federation")
    partition: Literal["dirichlet", "dirichlet-unequal", "iid", "shards", "quantity", "group"] = Field(
        "dirichlet",
        description="how the training set is split over them: also dirichlet-unequal, iid, shards, quantity, group",
    )
    dirichlet: float = Field(0.6, gt=0, description="ρ: small for few labels per client")
    shards: int = Field(2, ge=1, description="for shards: how many each client gets of the examples sorted by label")
    spread: float = Field(0.5, gt=0, description="for quantity: small for clients of very unequal size")
    positive: int | None = Field(None, ge=0, description="this label against all others: two classes, 1 and 0")
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the training set held out; if positive, metrics are of it and not of the test set",
    )
    augment: bool = Field(False, description="training images moved by up to 4 pixels, and mirrored at random")
    resize: int | None = Field(None, ge=1, le=4096, description="the side that images are scaled to")
    crop: int | None = Field(
        None, ge=1, le=4096, description="the side then cut out: at random with augment, else from the middle"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of your own loader")


class Model(Section):
    name: str = Field(
        "lenet5",
        description="lenet5, vgg11, vgg19, resnet18, vit-base, vit-small, logistic, binary-logistic, binary-sigmoid; "
        "module:attribute of your own factory; hf:FOLDER with a transformers configuration; point, for quadratics",
    )
    width: float | None = Field(None, gt=0, le=16, description="channels of a convolutional network, times this")
    norm: Literal["none", "group", "batch"] | None = Field(None, description="of resnet18 (group) and vgg (none)")
    weights: str | None = Field(
        None, description="a file to start from; for vit-base also a Hugging Face id, timm's and transformers' names"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of your own factory")


class Quadratics(Section):
    """A problem with a known optimum; its metric is `gap`."""

    dim: int = Field(20, ge=1, description="d")
    beta: float = Field(10.0, gt=0, description="β: the largest curvature")
    mu: float = Field(1.0, gt=0, description="μ: the smallest curvature")
    sigma: float = Field(1.0, ge=0, description="σ: deviation of a single example's gradient from its client's")
    G: float = Field(5.0, ge=0, description="G: root mean square of the clients' gradients at the optimum")
    examples: int = Field(10, ge=1, description="of each client")


@cache
def _tell_of_the_new_name() -> None:
    """Once in a process: hundreds of runs may be read."""
    log.warning("run.carrier is called run.backend now; the old name works in this version only")


class Run(Section):
    seed: int = Field(
        0, ge=0, lt=2**63, description="of every random draw: partition, initial weights, cohorts, minibatches"
    )
    cohort: int = Field(10, ge=1, description="S: clients sampled in a round")
    rounds: int | None = Field(None, ge=1, description="stop after so many rounds")
    budget: float | None = Field(
        None, gt=0, le=1e9, description="stop at so much upload, in units of the model's size d"
    )
    target: float | None = Field(None, gt=0, le=1, description="stop at this accuracy")
    evaluate_every: int = Field(1, ge=1, description="rounds between evaluations")
    checkpoint_every: int | None = Field(
        None, ge=1, description="rounds between checkpoints; unset: under 2 % of the time"
    )
    workers: int | None = Field(None, ge=0, description="processes; 0 for this one alone; unset: one per core")
    backend: str = Field("workers", description="; ".join(f"{b.name}: {b.summary}" for b in BACKENDS.values()))
    address: str | None = Field(None, description='of the cluster: "auto", "host:port"; unset: Ray is started here')
    gpus: float | None = Field(None, ge=0, description="with ray: the share of a GPU that each actor gets")
    together: int | None = Field(
        None,
        ge=1,
        description="clients computed in one multiplication, for logistic, binary-logistic, binary-sigmoid: faster, and "
        "equal up to rounding",
    )
    device: str = Field("cpu", description="where clients compute: cpu, cuda, mps")
    tensorboard: bool = Field(False, description="also write TensorBoard events (extra `tensorboard`)")

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, name: str) -> str:
        if name not in BACKENDS:
            *others, last = map(repr, BACKENDS)
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})
        return name

    @model_validator(mode="before")
    @classmethod
    def _earlier_names(cls, given: Any) -> Any:
        if isinstance(given, dict) and "carrier" in given:
            _tell_of_the_new_name()
            given = {"backend" if key == "carrier" else key: value for key, value in given.items()}
        return given


class Config(Section):
    data: Data = Data()
    model: Model = Model()
    algorithm: dict[str, Any] = {"name": "fedbcgd"}
    run: Run = Run()
    quadratics: Quadratics | None = None
    network: Network | None = None
    compare: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="options for one algorithm alone in `fedbcgd compare`"
    )

    @property
    def where(self) -> Placement:
        run = self.run
        return Placement(run.backend, run.workers, run.address, run.gpus, run.device)

    def text(self) -> str:
        """As TOML; what looks like a secret is masked."""
        return tomli_w.dumps(_without_unset(mask_config(self.model_dump())))


def _without_unset(values: Any) -> Any:
    """Leave out what is None, for which TOML has no word, and empty tables."""
    if isinstance(values, Mapping):
        return {k: _without_unset(v) for k, v in values.items() if v is not None and v != {}}
    return [_without_unset(v) for v in values] if isinstance(values, list) else values


SECTIONS: dict[str, type[Section]] = {"data": Data, "model": Model, "run": Run, "quadratics": Quadratics}
SECTIONS |= {"network": Network, **dict.fromkeys((*COLUMNS, "availability"), Distribution)}

# What may differ between a run and its continuation.
EXTENDABLE = {"run.rounds", "run.budget", "run.target", "run.workers", "run.checkpoint_every", "run.tensorboard"}
EXTENDABLE |= {"run.backend", "run.address", "run.gpus"}

LARGEST = 1 << 16  # bytes of the configuration of a run folder that may come from anywhere
MOST_DOTS = 2000  # in one line of it: the parser's memory grows with the square of a key's parts


def load(path: Path, overrides: Sequence[str] = (), run: Mapping[str, Any] | None = None) -> Config:
    """Read a TOML file and apply `section.key=value` overrides, then values of `[run]` (None unsets)."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; `fedbcgd init {path}` writes one to start from") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; a TOML file is wanted") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    for item in overrides:
        _override(raw, item)
    if run and isinstance(raw.setdefault("run", {}), dict):
        raw["run"] = {k: v for k, v in (raw["run"] | dict(run)).items() if v is not None}
    return check(raw, str(path))


def read_table(path: Path) -> dict[str, Any]:
    """Read the config.toml of a run folder that may come from anywhere; the values are not checked.

    Raises:
        UserError: it is no regular file, too large, damaged, or not TOML.
        OSError: it is not there, or cannot be read.
    """
    data = read_regular(path, LARGEST)
    try:
        vouched(data)
        text = data.decode()
        if max(line.count(".") for line in text.split("\n")) > MOST_DOTS:
            raise ValueError(f"a line has more than {MOST_DOTS:,} dots")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def check(raw: Mapping[str, Any], where: str) -> Config:
    """A configuration from plain values; every mistake is named with its field."""
    raw = {**raw}
    if isinstance(raw.get("algorithm"), dict):
        raw["algorithm"] = {"name": "fedbcgd", **raw["algorithm"]}
    try:
        config = Config(**raw)
    except ValidationError as error:
        raise UserError("\n".join(f"{where}: {explain(e)}" for e in error.errors())) from None
    for problem in _impossible(config):
        raise UserError(f"{where}: {problem}")
    algorithm_of(config, where)
    return config


def algorithm_of(config: Config, where: str) -> Any:
    from fedbcgd.algorithms.registry import make_algorithm

    try:
        return make_algorithm(**config.algorithm).for_cohort(config.run.cohort)
    except UserError as error:
        raise UserError(f"{where}: algorithm: {error}") from None


def complete(config: Config) -> Config:
    """The same with every default of its algorithm written out, so that it reproduces the run under later defaults, and
    measurements found from any folder."""
    network = config.network
    if network is not None and network.csv is not None:
        network = network.model_copy(update={"csv": str(Path(network.csv).resolve())})
    return config.model_copy(update={"algorithm": algorithm_of(config, "configuration").options(), "network": network})


def differences(a: Config, b: Config) -> list[str]:
    """Lines `section.key: this → that`, leaving out what may change between a run and its continuation, and secrets,
    which a run folder does not have."""
    one, two = flat(mask_config(a.model_dump())), flat(mask_config(b.model_dump()))
    keys = [k for k in {**one, **two} if one.get(k) != two.get(k) and k not in EXTENDABLE and not looks_secret(k)]
    return [f"{k}: {_shown(one.get(k))} → {_shown(two.get(k))}" for k in keys]


def template() -> str:
    """A commented file that says the same as an empty one."""
    from fedbcgd.algorithms.local_rules import LocalRule
    from fedbcgd.algorithms.registry import algorithm_names, make_algorithm

    parts = [
        "# A run of fedbcgd: `fedbcgd run THIS-FILE --out FOLDER`. What is commented out shows the default or a choice."
    ]
    for name, section in (("data", Data), ("model", Model)):
        parts.append(_section(name, section))
    names = "\n".join(f"#   {name}: {summary}" for name, summary in algorithm_names().items())
    chosen = make_algorithm("fedbcgd")
    lines = [f'[algorithm]\n# One of:\n{names}\nname = "fedbcgd"']
    for part in (chosen.uplink, chosen.local, chosen.server):
        for key, info in type(part).model_fields.items():
            line = _line(key, getattr(part, key), info.description)
            # what every algorithm has stands; what only some have is a comment, so that `name` can be changed alone
            lines.append(line if key in LocalRule.model_fields or line.startswith("#") else f"# {line}")
    lines.append(
        "# "
        + _line(
            "codec", "plain", "how floats become bytes: plain, float16, qsgd (levels, bucket, scale), topk (fraction)"
        )
    )
    lines.append(
        "# "
        + _line(
            "uplink",
            "blocks",
            "what each client sends: whole, blocks, or matched, blocks that fit the links of [network] (haste = 0.9: from "
            "0, fair, to 1, fast)",
        )
    )
    lines.append(_line("weighting", "uniform", "of clients in a mean: uniform, or examples"))
    limit = "largest norm of an upload: a number, or a multiple of the median of those accepted (off by default)"
    lines.append("# " + _line("max_norm", "20x", limit))
    lines.append(
        "# " + _line("over_norm", "refuse", "what becomes of a larger one: refuse, or scale (down to the limit)")
    )
    parts.append("\n".join(lines))
    parts.append(_section("run", Run).replace("# rounds = …", "rounds = 100"))
    lines = _section("network", Network).splitlines()
    told = "# Whose links the clients have; rows of metrics then have `hours` (docs/network.md):"
    parts.append("\n".join([told, *(line if line.startswith("#") else f"# {line}" for line in lines)]))
    parts.append("# Options for one algorithm alone when several are compared:\n# [compare.fedavg]\n# lr = 0.05")
    return "\n\n".join(parts) + "\n"


def _section(name: str, section: type[Section]) -> str:
    lines = [
        _line(key, info.default, info.description)
        for key, info in section.model_fields.items()
        if info.default_factory is None
    ]
    return "\n".join([f"[{name}]", *lines])


def _line(key: str, default: Any, description: str | None) -> str:
    text = tomli_w.dumps({key: default}).rstrip() if default is not None else f"# {key} = …"
    return f"{text:<28}  # {description}" if description else text


def _override(raw: dict[str, Any], item: str) -> None:
    path, equals, text = item.partition("=")
    steps = path.strip().split(".")
    if not equals or len(steps) < 2 or not all(steps):
        raise UserError(f"--set {item}: wanted is section.key=value, such as run.seed=1")
    table: Any = raw
    for step in steps[:-1]:
        table = table.setdefault(step, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {item}: {step} is a value, not a section")
    try:
        table[steps[-1]] = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        table[steps[-1]] = text.strip()  # a bare word is a string


def _impossible(config: Config) -> list[str]:
    run, data = config.run, config.data
    out = [f"run.{problem}" for problem in config.where.problems()]
    if run.rounds is None and run.budget is None and run.target is None:
        out.append("run: say when to stop: rounds, budget or target")
    if (data.name == QUADRATICS) != (config.model.name == "point"):
        out.append(
            f"model.name: data {data.name!r} and model {config.model.name!r} do not go together; quadratics want point"
        )
    if config.quadratics is not None and data.name != QUADRATICS:
        out.append("quadratics: this section belongs to data.name = 'quadratics'")
    if config.quadratics is not None and config.quadratics.mu > config.quadratics.beta:
        out.append(f"quadratics.mu: at most beta = {config.quadratics.beta:g}, given {config.quadratics.mu:g}")
    if data.name == QUADRATICS and (data.validation or run.target is not None):
        out.append("data.validation and run.target need images: the metric of quadratics is the gap to the optimum")
    if config.network is not None and config.network.crash and (problem := config.where.crash_problem()):
        out.append(f"network.{problem}")
    if run.cohort > data.clients:
        out.append(f"run.cohort: {run.cohort} clients cannot be sampled of data.clients = {data.clients}")
    return out


def explain(error: Any) -> str:
    """One of pydantic's errors, said to a person."""
    section: Any = Config
    for step in [str(step) for step in error["loc"]][:-1]:
        section = SECTIONS.get(step, section)
    return explain_error(error, section)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, under names with dots."""
    out: dict[str, Any] = {}
    for key, v in values.items():
        out |= flat(v, f"{prefix}{key}.") if isinstance(v, Mapping) else {f"{prefix}{key}": _plain(v)}
    return out


def _plain(v: Any) -> Any:
    return [_plain(item) for item in v] if isinstance(v, (list, tuple)) else v


def _shown(v: Any) -> str:
    return "unset" if v is None else json.dumps(v, ensure_ascii=False, default=str)  # in one line, a list too
