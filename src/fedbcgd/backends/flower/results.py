"""The results of a round, as records of Flower's result and as a line of the log."""

from collections.abc import Mapping
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedbcgd.backends.flower.log import log
from fedbcgd.core.messages import RoundReport
from fedbcgd.core.server import Server
from fedbcgd.engine.loop import RoundInfo, Row, train_columns

EVALUATE_FN = "evaluate_fn_"  # prefix for a value of `evaluate_fn` that has the name of a metric on the test data


def evaluate_fn_names(values: Mapping[str, Any], row: Mapping[str, float]) -> dict[str, str]:
    """Return, for each value of `evaluate_fn`, the name of its column in a row of metrics."""
    columns = {}
    for name in values:
        short = name.removeprefix("test_")
        columns[name] = f"test_{EVALUATE_FN}{short}"
        if columns[name] not in row:
            columns[name] = f"test_{short}"
    return columns


def record_start(result: Result, values: Mapping[str, Any]) -> None:
    """Add the values of `evaluate_fn` before the first round to Flower's result, and log them."""
    _add(result.evaluate_metrics_serverapp, 0, values)
    if shown := _listed(values):
        log.info("round 0: %s", shown)


def record_round(result: Result, info: RoundInfo, values: Mapping[str, Any]) -> None:
    """Add a round to Flower's result.

    Args:
        result: what `start` returns in the end.
        info: the RoundInfo of the round.
        values: the values of `evaluate_fn` after the round.
    """
    now = info.server.round
    result.train_metrics_clientapp[now] = train_record(info.report, info.server)
    row = {name: float(value) for name, value in (info.row or {}).items()}
    of_clients = {n.removeprefix("clients_"): v for n, v in row.items() if n.startswith("clients_")}
    of_function = set(evaluate_fn_names(values, row).values())
    on_test = {n: v for n, v in row.items() if n.startswith("test_") and n not in of_function}
    _add(result.evaluate_metrics_serverapp, now, {**on_test, **values})
    _add(result.evaluate_metrics_clientapp, now, of_clients)


def _add(records: dict[int, MetricRecord], round: int, values: Mapping[str, Any] | None) -> None:
    """Add values to the record of a round."""
    if values:
        records[round] = MetricRecord({**records.get(round, {}), **values})


def train_record(report: RoundReport, server: Server) -> MetricRecord:
    """Return what Flower calls the training metrics of a round."""
    return MetricRecord(
        {
            **train_columns(report),  # as in the rows; and below under their own names, as in Flower's strategies
            **report.metrics,
            "accepted": report.accepted,
            "refused": len(report.refused),
            "lost": len(report.lost),
            "upload_d": server.ledger.upload_d,
            "upload_bytes": server.ledger.upload_bytes,
            "wire_bytes": server.ledger.wire_bytes,
        }
    )


def _listed(values: Mapping[str, Any]) -> str:
    """Return the numbers among the values, for the log."""
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items() if isinstance(value, (int, float)))


def log_line(row: Row | None, values: Mapping[str, Any], report: RoundReport, server: Server) -> str:
    """Return the log's line for a round: its metrics, the values of `evaluate_fn`, and how many uploads were accepted.

    Args:
        row: the round's metrics; None if it was not evaluated.
        values: the values of `evaluate_fn`.
        report: the report of the round.
        server: the server of the run.
    """
    row = row or {}
    shown = {name: value for name, value in row.items() if name.endswith(("accuracy", "loss"))}
    more = {name: values[name] for name, column in evaluate_fn_names(values, row).items() if column not in shown}
    parts = [_listed({**shown, **more})] if shown or more else []
    parts.append(f"{report.accepted} uploads, {len(report.refused)} refused, {len(report.lost)} lost")
    parts.append(f"{server.ledger.upload_d:.2f} d")
    return ", ".join(parts)
