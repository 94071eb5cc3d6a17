"""What an operator sees of a run on Flower: lost clients with the reason, the progress of a round, why a run failed."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedbcgd.backends.flower.log import log
from fedbcgd.core.messages import RoundReport, Task
from fedbcgd.core.server import Server
from fedbcgd.engine.loop import RoundInfo, Row
from fedbcgd.errors import NothingAccepted, UserError
from fedbcgd.files import write_text

MOST_LOGGED = 20  # lost clients of a round that are logged one by one; the others are counted
MOST_NAMED = 5  # reasons that the last message of a run names


class Monitor:
    """Logs how the rounds of a run go, writes it to a metrics file, and ends a run in which no upload is accepted.

    Args:
        max_empty_rounds: rounds in a row without an accepted upload after which the run stops; None: it never does.
        progress_seconds: seconds between two lines about the progress of a round.
        metrics_file: where to write OpenMetrics text after each round; None: nowhere.
    """

    def __init__(self, max_empty_rounds: int | None, progress_seconds: float, metrics_file: Path | None):
        self._max_empty = max_empty_rounds
        self._interval = progress_seconds
        self._file = metrics_file
        self._empty = 0  # rounds in a row without an accepted upload
        self._accepted = 0  # uploads, since this process began
        self._row: Row = {}  # the newest metrics
        self.opened(0, 0)

    def opened(self, round: int, asked: int) -> None:
        """Begin a round.

        Args:
            round: its number, from 1.
            asked: how many clients are asked.
        """
        self._round, self._asked = round, asked
        self._answers, self._bytes, self._lost = 0, 0, 0
        self._start = self._logged = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the open round began."""
        return time.monotonic() - self._start

    def answered(self, nbytes: int) -> None:
        """Count a reply of this many bytes; log the progress of the round if the last such line is long enough ago."""
        self._answers += 1
        self._bytes += nbytes
        self.waiting()

    def waiting(self) -> None:
        """Log the progress of the round if the last such line is long enough ago."""
        if time.monotonic() - self._logged >= self._interval:
            self._logged = time.monotonic()
            size = f"{self._bytes / 1e6:.1f} MB"
            log.info(
                "round %d: %d of %d replies, %s, %.0f s", self._round, self._answers, self._asked, size, self.elapsed
            )

    def lost(self, task: Task, why: str) -> None:
        """Log that a client is lost for this round."""
        self._lost += 1
        if self._lost <= MOST_LOGGED:
            log.warning("round %d: client %d is lost: %s", task.round + 1, task.client, why)

    def closed(self, report: RoundReport) -> None:
        """End a round: count its accepted uploads, and the clients whose loss was not logged."""
        if self._lost > MOST_LOGGED:
            log.warning("round %d: and %d more clients are lost", self._round, self._lost - MOST_LOGGED)
        self._accepted += report.accepted
        self._empty = 0 if report.accepted else self._empty + 1

    def check(self, report: RoundReport) -> None:
        """End a run in which no upload was accepted for several rounds in a row.

        Raises:
            NothingAccepted: no upload was accepted in the last rounds; the message has the reasons.
        """
        if self._max_empty is None or self._empty < self._max_empty:
            return
        reasons = [*report.refused, *report.lost]
        more = f"; and {len(reasons) - MOST_NAMED} more" if len(reasons) > MOST_NAMED else ""
        why = "; ".join(reasons[:MOST_NAMED]) + more or "nobody could be asked"
        rounds = "round" if self._empty == 1 else f"{self._empty} rounds"
        raise NothingAccepted(
            f"no upload was accepted in the last {rounds}, so the run stops after round {report.round + 1}. {why}"
        )

    # -- OpenMetrics --------------------------------------------------------------------------------------------------

    def write(self, info: RoundInfo, online: int) -> None:
        """Write the metrics file, if one is wanted, in one step. A full disk does not end the run.

        Args:
            info: the RoundInfo of the round.
            online: how many clients are connected.
        """
        self._row = info.row or self._row
        if self._file is None:
            return
        try:
            write_text(self._file, self.text(info.server, online, info.report, self.elapsed))
        except UserError as error:
            log.warning("metrics_file: %s", error)

    def text(self, server: Server, online: int, report: RoundReport, seconds: float) -> str:
        """Return the state of the run as OpenMetrics text.

        Args:
            server: the server of the run.
            online: how many clients are connected.
            report: the report of the last round.
            seconds: the duration of the last round.
        """
        ledger, label = server.ledger, {"algorithm": server.algorithm.name}
        uploads = {"accepted": self._accepted, "refused": ledger.refused, "lost": ledger.lost}
        gauges: dict[str, tuple[str, float]] = {
            "round": ("Rounds that are done.", server.round),
            "clients": ("Clients of the federation, online or not.", server.clients),
            "clients_online": ("Clients that are connected.", online),
            "round_seconds": ("Duration of the last round.", seconds),
            "round_accepted": ("Uploads that were accepted in the last round.", report.accepted),
            "empty_rounds": ("Rounds in a row without an accepted upload.", self._empty),
            "train_loss": ("Mean training loss of the last round.", report.train_loss),
            "upload_models": ("Upload of a client so far, in models.", ledger.upload_d),
            "last_round_timestamp_seconds": ("When the last round ended.", time.time()),
        }
        counters: dict[str, tuple[str, float]] = {
            "upload_bytes": ("Uploads as they were encoded.", ledger.upload_bytes),
            "wire_bytes": ("Uploads as Flower counts them.", ledger.wire_bytes),
            "download_bytes": ("Broadcasts.", ledger.download_bytes),
        }
        lines: list[str] = []
        for name, (text, value) in gauges.items():
            lines += _family(name, "gauge", text, [("", label, value)])
        for name, (text, value) in counters.items():
            lines += _family(name, "counter", text, [("_total", label, value)])
        results = [("_total", {**label, "result": result}, float(count)) for result, count in uploads.items()]
        lines += _family("uploads", "counter", "Uploads by what became of them; accepted: of this process.", results)
        values = {name: v for name, v in self._row.items() if name.startswith(("test_", "clients_", "validation_"))}
        rows = [("", {**label, "name": name}, v) for name, v in values.items()]
        lines += _family("metric", "gauge", "The newest evaluation.", rows)
        return "\n".join([*lines, "# EOF\n"])


def _family(name: str, kind: str, text: str, samples: Sequence[tuple[str, Mapping[str, str], float]]) -> Iterator[str]:
    """Yield the lines of one family of OpenMetrics."""
    yield f"# TYPE fedbcgd_{name} {kind}"
    yield f"# HELP fedbcgd_{name} {text}"
    for suffix, labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        number = repr(value) if math.isfinite(value) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
        yield f"fedbcgd_{name}{suffix}{{{inside}}} {number}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
