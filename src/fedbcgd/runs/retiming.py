"""Timing a finished run on any network: hours at each row of its metrics, hours to a target, who served which block.

A network that only measures time does not change training, so that one run can be timed on all networks:
`traffic.jsonl` in its folder has what was sent. A run whose network did more is tied to that network: on another one,
other clients would have been late, or had other blocks.
"""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbcgd.engine.loop import Row
from fedbcgd.engine.run_folder import MAX_READ_BYTES, RunFolder
from fedbcgd.engine.traffic import Round, read
from fedbcgd.errors import UserError
from fedbcgd.files import parse_json_object, read_regular
from fedbcgd.network.links import Links
from fedbcgd.network.settings import Network, as_network
from fedbcgd.runs import config as configuration
from fedbcgd.runs.bias import BlockBias, block_biases

LARGEST_CSV = 1 << 26  # bytes of measurements
MOST_CLIENTS = 1_000_000  # for a configuration that may come from anywhere

NetworkLike = str | Mapping[str, Any] | Network | Links  # the name of a profile, settings as in `[network]`, or links


@dataclass(frozen=True)
class RunConditions:
    """What must be known about a run to compute its time on a network."""

    clients: int
    seed: int
    network: Network | None
    algorithm: Mapping[str, Any]
    closed_early: bool = False  # on Flower: whether rounds closed before all uploads had arrived


class Tied(UserError):
    """A run depended on its own network, so that hours on another one would be misleading."""


def hours(folder: Path | str, network: NetworkLike | None = None) -> list[float]:
    """Compute the hours since the beginning of a run at each row of its metrics.

    Args:
        folder: the run folder.
        network: the network to time the run on; None: the run's own.

    Returns:
        The hours at each row.

    Raises:
        Tied: the run depended on its own network.
        UserError: the folder has no run, or a file in it is damaged.
    """
    run = RunFolder(Path(folder))
    rows = run.rows()
    if network is None:
        own_network(run)
        if not all("hours" in row for row in rows):
            raise UserError(f"{run.metrics}: expected hours in each row, got rows without: the file is incomplete")
        return [row["hours"] for row in rows]
    return hours_under(run.path, {"it": network}, [row["round"] for row in rows])["it"]


def hours_under(
    folder: Path, networks: Mapping[str, NetworkLike | None], rounds: Sequence[float]
) -> dict[str, list[float]]:
    """Compute the hours of a run on several networks after some rounds.

    Args:
        folder: the run folder.
        networks: the networks by name; None: the profile of that name.
        rounds: the rounds after which the hours are computed.

    Returns:
        For each network the hours after each of the rounds.

    Raises:
        Tied: the run depended on its own network.
        UserError: the folder has no run, or a file in it is damaged.
    """
    run = RunFolder(folder)
    conditions = conditions_of(run)
    links_of = {name: _links(conditions, name if network is None else network) for name, network in networks.items()}
    for links in links_of.values():
        _refuse_tied(run, conditions, links)
    clocks = {name: array("d", [0.0]) for name in links_of}
    for sent in _rounds(run, min(map(len, links_of.values()))):
        for name, links in links_of.items():
            clocks[name].append(clocks[name][-1] + sent.seconds(links) / 3600)
    length = min(map(len, clocks.values()))
    if not all(0 <= round < length for round in rounds):
        raise UserError(f"{run.traffic}: expected {max(rounds):g} rounds as in the metrics, got {length - 1}")
    return {name: [clock[int(round)] for round in rounds] for name, clock in clocks.items()}


def bias(folder: Path | str, network: NetworkLike | None = None) -> list[BlockBias]:
    """Measure how fast the uplinks of the clients are that served each block of a run.

    Args:
        folder: the run folder.
        network: the network that has the uplinks; None: the run's own.

    Returns:
        The bias of each block.

    Raises:
        UserError: the folder has no run, or a file in it is damaged.
    """
    run = RunFolder(Path(folder))
    links = _links(conditions_of(run), own_network(run) if network is None else network)
    return block_biases(_rounds(run, len(links)), links)


def to_reach(
    rows: Sequence[Row], values: Sequence[float], metric: str, target: float, falling: bool = False
) -> float | None:
    """Return the cost at which a run reached a target.

    Args:
        rows: the metrics of the run.
        values: the cost at each row, such as hours, rounds or upload.
        metric: the name of the metric in the rows.
        target: the value that the metric should reach.
        falling: whether the metric reaches it from above.

    Returns:
        The value at the first row that reaches the target; None if none does.
    """
    pairs = ((row.get(metric, math.nan), value) for row, value in zip(rows, values, strict=True))
    return next((value for got, value in pairs if (got <= target if falling else got >= target)), None)


def check_target(target: float | None) -> None:
    """Check that a target is a possible accuracy.

    Raises:
        UserError: it is not above 0, or it is above 1.
    """
    if target is not None and not 0 < target <= 1:
        raise UserError(f"target: expected an accuracy > 0 and ≤ 1, such as 0.8, got {target:g}")


def _refuse_tied(run: RunFolder, conditions: RunConditions, links: Links) -> None:
    own, algorithm = conditions.network, conditions.algorithm
    if conditions.closed_early:
        raise Tied(
            f"{run.path}: close_at: which clients were in time depended on the run's real network, so that hours on "
            "another one would mislead"
        )
    if own is None:
        return
    ties = [name for name in ("deadline", "minimum", "absences", "dropout") if getattr(own, name)]
    ties += ["oversample"] if own.oversample > 1 else []
    ties += ["close_at"] if own.close_at < 1 else []
    if algorithm.get("uplink") == "matched" and (algorithm["haste"] or algorithm["divider"] == "links"):
        ties.append("uplink = 'matched'")
    if ties and _drawn(own, len(links), conditions.seed).digest() != links.digest():
        raise Tied(
            f"{run.path}: {', '.join(ties)}: which clients were sampled, in time, or had which block depended on the "
            "run's own network, so that hours on another one would mislead; repeat the run with that network"
        )


def own_network(run: RunFolder) -> Network:
    """Return the network of a run.

    Raises:
        UserError: the run had none, or its configuration cannot be read.
    """
    network = conditions_of(run).network
    if network is None:
        raise UserError(f"{run.path} was run without a network: name one, such as 4g")
    return network


def conditions_of(run: RunFolder) -> RunConditions:
    """Read the conditions of a run: from its configuration or, on Flower, from federation.json.

    Raises:
        UserError: the file cannot be read, or a value is wrong.
    """
    if run.federation.exists() and not run.config.exists():
        return _conditions_on_flower(run.federation)
    try:
        config = configuration.check(configuration.read_table(run.config), str(run.config), trust=False)
    except FileNotFoundError:
        raise UserError(
            f"{run.path}: expected the folder of a run, got one without {run.config.name} or {run.federation.name}"
        ) from None
    except OSError as error:
        raise UserError(f"{run.config} cannot be read: {error.strerror}") from None
    if config.data.clients > MOST_CLIENTS:
        raise UserError(f"{run.config}: data.clients: expected at most {MOST_CLIENTS:,}, got {config.data.clients}")
    return RunConditions(config.data.clients, config.run.seed, config.network, config.algorithm)


def _conditions_on_flower(path: Path) -> RunConditions:
    try:
        values = parse_json_object(read_regular(path, MAX_READ_BYTES))[0]
        clients, seed, early = values["data"]["clients"], values["run"]["seed"], values["run"]["close_at"] < 1
        if not isinstance(clients, int) or not 1 <= clients <= MOST_CLIENTS or not isinstance(seed, int):
            raise ValueError(f"clients: expected 1 to {MOST_CLIENTS:,}")
        return RunConditions(clients, seed, None, {}, early)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _links(conditions: RunConditions, network: NetworkLike) -> Links:
    if isinstance(network, Links):
        return network
    settings = as_network(network)
    assert settings is not None
    return _drawn(settings, conditions.clients, conditions.seed)


def _drawn(network: Network, clients: int, seed: int) -> Links:
    """Draw or read the links; a file that the configuration names must be regular and not too large."""
    path = None if network.csv is None else Path(network.csv)
    if path is not None and path.exists() and (not path.is_file() or path.stat().st_size > LARGEST_CSV):
        raise UserError(f"network.csv: expected a file of at most {LARGEST_CSV:,} bytes, got {path}")
    return network.links(clients, seed)


def _rounds(run: RunFolder, clients: int) -> Iterator[Round]:
    if not run.traffic.exists():
        raise UserError(f"{run.path} has no {run.traffic.name}, which `fedbcgd run` and `compare` write")
    for sent in read(run.traffic):
        largest = max(sent.clients, default=0)
        if largest >= clients:
            raise UserError(f"{run.traffic}, line {sent.round}: expected clients below {clients}, got {largest}")
        yield sent
