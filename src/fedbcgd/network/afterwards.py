"""Any network applied to a run that is over: hours at each row of its metrics, hours to a target, who served which block.

Watching changes nothing, so one run serves for all networks: `traffic.jsonl` in its folder says what was sent. A run whose
own network did more than watch is tied to it: elsewhere others would have been late, or had other blocks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbcgd.config import Config
from fedbcgd.errors import UserError
from fedbcgd.loop import Row
from fedbcgd.network.bias import Lean, leans
from fedbcgd.network.links import Links
from fedbcgd.network.settings import Network, as_network
from fedbcgd.network.traffic import Round, read
from fedbcgd.runner import Folder

Given = str | Mapping[str, Any] | Network | Links


class Tied(UserError):
    """The run went as its own network had it, so that no other tells its time."""


def hours(folder: Path | str, network: Given | None = None) -> list[float]:
    """Hours since the beginning of the run, on the clock of `network`, at each row of its metrics.

    network: the name of a profile, settings as in `[network]`, or Links made elsewhere; None: the run's own.
    """
    place = Folder(Path(folder))
    rows = place.rows()
    if network is None:
        own_network(place)
        return [row["hours"] for row in rows]
    links = _links(place, network)
    _refuse_tied(place, links)
    at = [0.0]
    for sent in _rounds(place):
        at.append(at[-1] + sent.seconds(links) / 3600)
    if rows and rows[-1]["round"] >= len(at):
        raise UserError(
            f"{place.traffic} has {len(at) - 1} rounds and the metrics {rows[-1]['round']:g}: it is not whole"
        )
    return [at[int(row["round"])] for row in rows]


def bias(folder: Path | str, network: Given | None = None) -> list[Lean]:
    """Who served each block of a run, by the speed of its uplink in `network` (None: the run's own)."""
    place = Folder(Path(folder))
    return leans(_rounds(place), _links(place, own_network(place) if network is None else network))


def to_reach(rows: Sequence[Row], values: Sequence[float], metric: str, target: float) -> float | None:
    """The value (hours, rounds, upload) at the first row whose metric reached the target; None if none did."""
    pairs = zip(rows, values, strict=True)
    return next((value for row, value in pairs if row.get(metric, -1.0) >= target), None)


def check_target(target: float | None) -> None:
    if target is not None and not 0 < target <= 1:
        raise UserError(f"target: an accuracy above 0 and at most 1 is wanted, such as 0.8; given {target:g}")


def _refuse_tied(place: Folder, links: Links) -> None:
    config = _config(place)
    own, algorithm = config.network, config.algorithm
    if own is None:
        return
    ties = [name for name in ("deadline", "minimum", "absences", "dropout") if getattr(own, name)]
    ties += ["oversample"] if own.oversample > 1 else []
    if algorithm.get("uplink") == "matched" and (algorithm["haste"] or algorithm["divider"] == "links"):
        ties.append("uplink = 'matched'")
    if ties and own.links(len(links), config.run.seed).digest() != links.digest():
        raise Tied(
            f"{place.path}: {', '.join(ties)}: who was asked, in time, or had which block depended on its own network, so "
            "that its hours on another one would mislead; run it with that one"
        )


def own_network(place: Folder) -> Network:
    network = _config(place).network
    if network is None:
        raise UserError(f"{place.path} was run without a network: name one, such as 4g")
    return network


def _config(place: Folder) -> Config:
    if not place.config.exists():
        raise UserError(f"{place.path} is no folder of a run: it has no {place.config.name}")
    return place.configuration()


def _links(place: Folder, network: Given) -> Links:
    if isinstance(network, Links):
        return network
    config, settings = _config(place), as_network(network)
    assert settings is not None
    return settings.links(config.data.clients, config.run.seed)


def _rounds(place: Folder) -> list[Round]:
    if not place.traffic.exists():
        raise UserError(f"{place.path} has no {place.traffic.name}, which `fedbcgd run` and `compare` write")
    return list(read(place.traffic))
