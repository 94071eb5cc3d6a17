"""The links, the speed and the availability of each client, and how long a task takes."""

import csv
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from fedbcgd.errors import UserError, unknown
from fedbcgd.files import read_text
from fedbcgd.rng import stream

log = logging.getLogger("fedbcgd")

MBIT = 1e6 / 8  # bytes

COLUMNS = ("uplink_mbit", "downlink_mbit", "latency_ms", "gradient_ms")
_OPTIONAL = ("availability", "client")


@dataclass(frozen=True)
class Links:
    """Links and speeds of all clients, as arrays with an entry for each client.

    Attributes:
        uplink: bytes per second.
        downlink: bytes per second.
        latency: seconds one way; counted once for the download and once for the upload.
        gradient: seconds for the gradient of one minibatch.
        availability: the share of rounds in which the client can be sampled.
    """

    uplink: np.ndarray
    downlink: np.ndarray
    latency: np.ndarray
    gradient: np.ndarray
    availability: np.ndarray

    def __len__(self) -> int:
        return len(self.uplink)

    def seconds(
        self,
        clients: np.ndarray,
        download: int | float | np.ndarray,
        evaluations: int | np.ndarray,
        upload: int | np.ndarray,
    ) -> np.ndarray:
        """Compute the seconds from the beginning of a round until each client's upload has arrived.

        Args:
            clients: the numbers of the clients.
            download: bytes of the broadcast.
            evaluations: gradients of minibatches that a client computes.
            upload: bytes of the upload.

        Returns:
            Seconds, one entry for each of `clients`.
        """
        transfer = download / self.downlink[clients] + upload / self.uplink[clients]
        return transfer + evaluations * self.gradient[clients] + 2 * self.latency[clients]

    def digest(self) -> str:
        """Compute a digest of all values, by which a resumed run recognises that its links have changed."""
        parts = (self.uplink, self.downlink, self.latency, self.gradient, self.availability)
        return hashlib.sha256(b"".join(np.ascontiguousarray(p, np.float64).tobytes() for p in parts)).hexdigest()[:16]

    @classmethod
    def of_columns(cls, table: np.ndarray, availability: np.ndarray) -> "Links":
        """Convert a table with a row for each client, columns in the order and the units of `COLUMNS`."""
        up, down, latency, gradient = table.T
        return cls(up * MBIT, down * MBIT, latency / 1e3, gradient / 1e3, availability)


def read_csv(path: Path, clients: int, seed: int) -> Links:
    """Read a user's measurements from a CSV file.

    Args:
        path: a file with the columns of `COLUMNS`, and optionally `availability` and `client`.
        clients: how many clients the federation has.
        seed: draws a row for each client if the file has no column `client`.

    Returns:
        The links of all clients.

    Raises:
        UserError: the file cannot be read, or a value or a client's row is missing or wrong.
    """
    rows = _read_rows(path)
    table = np.array([[row[name] for name in COLUMNS] for row in rows])
    availability = np.array([row.get("availability", 1.0) for row in rows])
    if "client" in rows[0]:
        row_of = {int(row["client"]): k for k, row in enumerate(rows)}
        missing = [client for client in range(clients) if client not in row_of]
        if missing:
            raise UserError(
                f"{path}: expected a row for each of {clients} clients, got none for client {missing[0]} "
                f"({len(missing)} are missing); add them, or remove the column `client` to assign rows at random"
            )
        chosen = np.array([row_of[client] for client in range(clients)])
    else:
        chosen = stream(seed, "network").integers(len(rows), size=clients)
    return Links.of_columns(table[chosen], availability[chosen])


def _read_rows(path: Path) -> list[dict[str, float]]:
    text = read_text(path, f"a CSV file with the columns {', '.join(COLUMNS)}", ": it does not exist")
    try:
        return _parse_rows(path, csv.reader(text.splitlines(), strict=True))
    except csv.Error as error:
        raise UserError(f"{path}: expected CSV, got: {error}") from None


def _parse_rows(path: Path, reader: Any) -> list[dict[str, float]]:
    not_blank = (cells for cells in reader if "".join(cells).strip())
    header = [name.strip() for name in next(not_blank, [])]
    _check_header(path, reader.line_num, header)
    rows: list[dict[str, float]] = []
    line_of: dict[float, int] = {}
    for cells in not_blank:
        row = _parse_row(f"{path}, line {reader.line_num}", header, cells)
        if "client" in row and line_of.setdefault(row["client"], reader.line_num) != reader.line_num:
            raise UserError(
                f"{path}, line {reader.line_num}: expected a row for each client, got a second one for client "
                f"{row['client']:g}, after that in line {line_of[row['client']]}; remove one of them"
            )
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: expected at least one row of measurements, got only a header")
    return rows


def _check_header(path: Path, line: int, header: list[str]) -> None:
    if not any(header):
        raise UserError(f"{path}: expected a first line with the columns {', '.join(COLUMNS)}, got an empty file")
    known = (*COLUMNS, *_OPTIONAL)
    others = [name for name in header if name not in known]
    for name in others:
        if get_close_matches(name, known, cutoff=0.75):  # a misspelling, not an unrelated column
            raise UserError(f"{path}, line {line}: {unknown('column', name, known)}")
    for name in known:
        if header.count(name) > 1:
            raise UserError(f"{path}, line {line}: expected each column once, got {name!r} twice; remove one of them")
    for name in COLUMNS:
        if name not in header:
            raise UserError(f"{path}, line {line}: expected the columns {', '.join(COLUMNS)}, got none named {name!r}")
    if others:
        log.warning("%s: the columns %s are ignored; known are %s", path, ", ".join(others), ", ".join(known))


# For each column: which finite values are right, as a function and in words.
_ALLOWED: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "uplink_mbit": (lambda value: value > 0, "a number > 0"),
    "downlink_mbit": (lambda value: value > 0, "a number > 0"),
    "latency_ms": (lambda value: value >= 0, "a number ≥ 0"),
    "gradient_ms": (lambda value: value >= 0, "a number ≥ 0"),
    "availability": (lambda value: 0 < value <= 1, "a share > 0 and ≤ 1"),
    "client": (lambda value: value >= 0 and value == int(value), "an integer ≥ 0"),
}


def _parse_row(where: str, header: list[str], cells: list[str]) -> dict[str, float]:
    if len(cells) != len(header):
        raise UserError(f"{where}: expected {len(header)} values, one for each column, got {len(cells)}")
    row = {}
    for name, cell in zip(header, cells, strict=True):
        if name not in _ALLOWED:
            continue
        is_allowed, expected = _ALLOWED[name]
        try:
            value = float(cell.replace("_", "no"))  # Python would read 1_0 as 10
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and is_allowed(value)):
            raise UserError(f"{where}: {name}: expected {expected}, got {cell.strip()!r}")
        row[name] = value
    return row
