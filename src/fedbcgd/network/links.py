"""What each client has: its links, its speed, and how often it is there; and how long a task takes it."""

import csv
import hashlib
import logging
import math
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from fedbcgd.errors import UserError, unknown
from fedbcgd.rng import stream

log = logging.getLogger("fedbcgd")

MBIT = 1e6 / 8  # bytes

COLUMNS = ("uplink_mbit", "downlink_mbit", "latency_ms", "gradient_ms")
_OPTIONAL = ("availability", "client")


@dataclass(frozen=True)
class Links:
    """An entry for each client."""

    uplink: np.ndarray  # bytes a second
    downlink: np.ndarray  # bytes a second
    latency: np.ndarray  # seconds one way: paid once for the download and once for the upload
    gradient: np.ndarray  # seconds for one gradient evaluation (a minibatch)
    availability: np.ndarray  # the share of rounds in which it can be asked

    def __len__(self) -> int:
        return len(self.uplink)

    def seconds(
        self,
        clients: np.ndarray,
        download: int | float | np.ndarray,
        evaluations: int | np.ndarray,
        upload: int | np.ndarray,
    ) -> np.ndarray:
        """From the beginning of the round until the upload is there."""
        moved = download / self.downlink[clients] + upload / self.uplink[clients]
        return moved + evaluations * self.gradient[clients] + 2 * self.latency[clients]

    def digest(self) -> str:
        """Of all numbers: it says whether a run goes on with the links it began with."""
        parts = (self.uplink, self.downlink, self.latency, self.gradient, self.availability)
        return hashlib.sha256(b"".join(np.ascontiguousarray(p, np.float64).tobytes() for p in parts)).hexdigest()[:16]

    @classmethod
    def of_columns(cls, table: np.ndarray, availability: np.ndarray) -> "Links":
        """`table`: a row for each client, columns in the order and the units of COLUMNS."""
        up, down, latency, gradient = table.T
        return cls(up * MBIT, down * MBIT, latency / 1e3, gradient / 1e3, availability)


def read_csv(path: Path, clients: int, seed: int) -> Links:
    """Measurements of a user. With a column `client` each client has a row of its own; without one every client of the
    federation is given a row at random, from the seed."""
    rows = _rows(path)
    table = np.array([[row[name] for name in COLUMNS] for row in rows])
    availability = np.array([row.get("availability", 1.0) for row in rows])
    if "client" in rows[0]:
        at = {int(row["client"]): k for k, row in enumerate(rows)}
        missing = [client for client in range(clients) if client not in at]
        if missing:
            raise UserError(
                f"{path}: client {missing[0]} has no row ({len(missing)} of {clients} have none); without the column "
                "`client`, rows are given out at random"
            )
        chosen = np.array([at[client] for client in range(clients)])
    else:
        chosen = stream(seed, "network").integers(len(rows), size=clients)
    return Links.of_columns(table[chosen], availability[chosen])


def _rows(path: Path) -> list[dict[str, float]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            filled = (cells for cells in reader if "".join(cells).strip())
            header = [name.strip() for name in next(filled, [])]
            _check_header(path, reader.line_num, header)
            rows: list[dict[str, float]] = []
            seen: dict[float, int] = {}
            for cells in filled:
                row = _row(path, reader.line_num, header, cells)
                if "client" in row and seen.setdefault(row["client"], reader.line_num) != reader.line_num:
                    raise UserError(
                        f"{path}, line {reader.line_num}: client {row['client']:g} has a row already, in line "
                        f"{seen[row['client']]}"
                    )
                rows.append(row)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; wanted is a CSV file with the columns {', '.join(COLUMNS)}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; a CSV file is wanted") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file: {error.reason} at byte {error.start}") from None
    except csv.Error as error:
        raise UserError(f"{path} is not valid CSV: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not rows:
        raise UserError(f"{path} has a header and no rows: at least one measurement is needed")
    return rows


def _check_header(path: Path, line: int, header: list[str]) -> None:
    if not any(header):
        raise UserError(f"{path} is empty: its first line must name the columns: {', '.join(COLUMNS)}")
    known = (*COLUMNS, *_OPTIONAL)
    others = [name for name in header if name not in known]
    for name in others:
        if get_close_matches(name, known, cutoff=0.75):  # a slip of the pen, not a column of something else
            raise UserError(f"{path}, line {line}: {unknown('column', name, known)}")
    for name in known:
        if header.count(name) > 1:
            raise UserError(f"{path}, line {line}: column {name!r} stands twice")
    for name in COLUMNS:
        if name not in header:
            raise UserError(f"{path}, line {line}: column {name!r} is missing; needed are {', '.join(COLUMNS)}")
    if others:
        log.warning("%s: nothing is read from the columns %s; known are %s", path, ", ".join(others), ", ".join(known))


def _row(path: Path, line: int, header: list[str], cells: list[str]) -> dict[str, float]:
    where = f"{path}, line {line}"
    if len(cells) != len(header):
        raise UserError(f"{where}: {len(cells)} values for {len(header)} columns")
    row = {}
    for name, cell in zip(header, cells, strict=True):
        if name not in (*COLUMNS, *_OPTIONAL):
            continue
        try:
            value = float(cell.replace("_", "no"))  # Python reads 1_0 as 10; nobody else does
        except ValueError:
            raise UserError(f"{where}: {name}: a number is wanted, given {cell.strip()!r}") from None
        if problem := _problem(name, value):
            raise UserError(f"{where}: {name}: {problem}, given {cell.strip()}")
        row[name] = value
    return row


def _problem(name: str, value: float) -> str:
    if not math.isfinite(value):
        return "a finite number is wanted"
    if name == "client":
        return "" if value >= 0 and value == int(value) else "a whole number of at least 0 is wanted"
    if name == "availability":
        return "" if 0 < value <= 1 else "a share above 0 and at most 1 is wanted"
    if name in ("latency_ms", "gradient_ms"):
        return "" if value >= 0 else "at least 0 is wanted"
    return "" if value > 0 else "a positive number is wanted"
