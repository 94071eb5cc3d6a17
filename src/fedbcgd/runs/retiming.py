"""Any network applied to a run that is over: hours at each row of its metrics, hours to a target, who served which block.

Watching changes nothing, so one run serves for all networks: `traffic.jsonl` in its folder says what was sent. A run whose
own network did more than watch is tied to it: elsewhere others would have been late, or had other blocks.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbcgd.engine.loop import Row
from fedbcgd.engine.run_folder import LARGEST, RunFolder
from fedbcgd.engine.traffic import Round, read
from fedbcgd.errors import UserError
from fedbcgd.files import read_regular, unsealed
from fedbcgd.network.links import Links
from fedbcgd.network.settings import Network, as_network
from fedbcgd.runs import config as configuration
from fedbcgd.runs.bias import Lean, leans

LARGEST_CSV = 1 << 26  # bytes of measurements
MOST_CLIENTS = 1_000_000  # whose links are drawn afterwards, for a configuration that may come from anywhere

Given = str | Mapping[str, Any] | Network | Links


@dataclass(frozen=True)
class RunConditions:
    """How a run was run, as far as its time on a network depends on that."""

    clients: int
    seed: int
    network: Network | None
    algorithm: Mapping[str, Any]
    closed_early: bool = False  # on Flower: rounds closed before all uploads were there


class Tied(UserError):
    """The run went as its own network had it, so that no other tells its time."""


def hours(folder: Path | str, network: Given | None = None) -> list[float]:
    """Hours since the beginning of the run, on the clock of `network`, at each row of its metrics.

    network: the name of a profile, settings as in `[network]`, or Links made elsewhere; None: the run's own.
    """
    place = RunFolder(Path(folder))
    rows = place.rows()
    if network is None:
        own_network(place)
        if not all("hours" in row for row in rows):
            raise UserError(f"{place.metrics} has rows without hours: it is not whole")
        return [row["hours"] for row in rows]
    return hours_under(place.path, {"it": network}, [row["round"] for row in rows])["it"]


def hours_under(folder: Path, networks: Mapping[str, Given | None], rounds: Sequence[float]) -> dict[str, list[float]]:
    """Hours of a run on the clocks of several networks after these rounds.

    networks: by name; None: the profile of that name.
    """
    place = RunFolder(folder)
    run = conditions_of(place)
    links = {name: _links(run, name if network is None else network) for name, network in networks.items()}
    for made in links.values():
        _refuse_tied(place, run, made)
    at = {name: array("d", [0.0]) for name in links}
    for sent in _rounds(place, min(map(len, links.values()))):
        for name, made in links.items():
            at[name].append(at[name][-1] + sent.seconds(made) / 3600)
    whole = min(map(len, at.values()))
    if not all(0 <= round < whole for round in rounds):
        raise UserError(f"{place.traffic} has {whole - 1} rounds and the metrics {max(rounds):g}: it is not whole")
    return {name: [clock[int(round)] for round in rounds] for name, clock in at.items()}


def bias(folder: Path | str, network: Given | None = None) -> list[Lean]:
    """Who served each block of a run, by the speed of its uplink in `network` (None: the run's own)."""
    place = RunFolder(Path(folder))
    links = _links(conditions_of(place), own_network(place) if network is None else network)
    return leans(_rounds(place, len(links)), links)


def to_reach(rows: Sequence[Row], values: Sequence[float], metric: str, target: float) -> float | None:
    """The value (hours, rounds, upload) at the first row whose metric reached the target; None if none did."""
    pairs = zip(rows, values, strict=True)
    return next((value for row, value in pairs if row.get(metric, -1.0) >= target), None)


def check_target(target: float | None) -> None:
    if target is not None and not 0 < target <= 1:
        raise UserError(f"target: an accuracy above 0 and at most 1 is wanted, such as 0.8; given {target:g}")


def _refuse_tied(place: RunFolder, run: RunConditions, links: Links) -> None:
    own, algorithm = run.network, run.algorithm
    if run.closed_early:
        raise Tied(
            f"{place.path}: close_at: who was in time depended on its real network, so that its hours on another one "
            "would mislead"
        )
    if own is None:
        return
    ties = [name for name in ("deadline", "minimum", "absences", "dropout") if getattr(own, name)]
    ties += ["oversample"] if own.oversample > 1 else []
    ties += ["close_at"] if own.close_at < 1 else []
    if algorithm.get("uplink") == "matched" and (algorithm["haste"] or algorithm["divider"] == "links"):
        ties.append("uplink = 'matched'")
    if ties and _drawn(own, len(links), run.seed).digest() != links.digest():
        raise Tied(
            f"{place.path}: {', '.join(ties)}: who was asked, in time, or had which block depended on its own network, so "
            "that its hours on another one would mislead; run it with that one"
        )


def own_network(place: RunFolder) -> Network:
    network = conditions_of(place).network
    if network is None:
        raise UserError(f"{place.path} was run without a network: name one, such as 4g")
    return network


def conditions_of(place: RunFolder) -> RunConditions:
    """Read how a run was run: from its configuration, or, on Flower, from what the strategy wrote."""
    if place.federation.exists() and not place.config.exists():
        return _conditions_on_flower(place.federation)
    try:
        config = configuration.check(configuration.read_table(place.config), str(place.config))
    except FileNotFoundError:
        raise UserError(
            f"{place.path} is no folder of a run: it has no {place.config.name}, and no {place.federation.name}"
        ) from None
    except OSError as error:
        raise UserError(f"{place.config} cannot be read: {error.strerror}") from None
    if config.data.clients > MOST_CLIENTS:
        raise UserError(f"{place.config}: data.clients: expected at most {MOST_CLIENTS:,}, got {config.data.clients}")
    return RunConditions(config.data.clients, config.run.seed, config.network, config.algorithm)


def _conditions_on_flower(path: Path) -> RunConditions:
    try:
        values = unsealed(read_regular(path, LARGEST))[0]
        clients, seed, early = values["data"]["clients"], values["run"]["seed"], values["run"]["close_at"] < 1
        if not isinstance(clients, int) or not 1 <= clients <= MOST_CLIENTS or not isinstance(seed, int):
            raise ValueError(f"clients: expected 1 to {MOST_CLIENTS:,}")
        return RunConditions(clients, seed, None, {}, early)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _links(run: RunConditions, network: Given) -> Links:
    if isinstance(network, Links):
        return network
    settings = as_network(network)
    assert settings is not None
    return _drawn(settings, run.clients, run.seed)


def _drawn(network: Network, clients: int, seed: int) -> Links:
    """Draw the links; a file of measurements that a configuration from anywhere names must be an ordinary one."""
    path = None if network.csv is None else Path(network.csv)
    if path is not None and path.exists() and (not path.is_file() or path.stat().st_size > LARGEST_CSV):
        raise UserError(f"network.csv: expected a file of at most {LARGEST_CSV:,} bytes, got {path}")
    return network.links(clients, seed)


def _rounds(place: RunFolder, clients: int) -> Iterator[Round]:
    if not place.traffic.exists():
        raise UserError(f"{place.path} has no {place.traffic.name}, which `fedbcgd run` and `compare` write")
    for sent in read(place.traffic):
        if max(sent.clients, default=0) >= clients:
            raise UserError(f"{place.traffic}, line {sent.round}: client {max(sent.clients)} is none of {clients}")
        yield sent
