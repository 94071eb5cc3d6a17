"""Ordinary Flower messages, which an existing app receives and sends, and the two records that we add to them.

A client that trains in an app of its own gets the whole model as an `ArrayRecord` and the settings as a `ConfigRecord`,
under the names that Flower's own strategies use. Our two records are the task and the form of the messages. The form has
the layout of the model, so that a client can cut out its block without knowing the module.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedbcgd.backends.flower import wire
from fedbcgd.core.reading import MOST_METRICS, Evaluation, Malformed, read, shorten
from fedbcgd.core.vector import Entry, Layout
from fedbcgd.errors import UserError

FORM = "fedbcgd-form"  # the record with the form of the messages
ROUND = "server-round"  # the setting in which Flower's strategies send the number of the round
_MOST_RECORDS = 8  # in a client's evaluation


@dataclass(frozen=True)
class RecordNames:
    """Names in the messages to an app.

    Attributes:
        arrays: the name of the record with the model.
        config: the name of the record with the settings.
        weighted_by: the name of the metric that says how many examples the client has.

    Raises:
        UserError: two records have one name.
    """

    arrays: str = "arrays"
    config: str = "config"
    weighted_by: str = "num-examples"

    def __post_init__(self) -> None:
        ours = {wire.TASK, FORM}
        if self.arrays == self.config or ours & {self.arrays, self.config}:
            raise UserError(
                f"arrayrecord_key, configrecord_key: expected two names other than {', '.join(sorted(ours))}, got "
                f"{self.arrays!r} and {self.config!r}"
            )

    def content(
        self, arrays: ArrayRecord, settings: Mapping[str, Any], round: int, layout: Layout | None = None
    ) -> RecordDict:
        """Return the content of a message to an app, to which the caller adds the task.

        Args:
            arrays: the model.
            settings: `train_config` or `evaluate_config`.
            round: the number of the round, from 1.
            layout: where each block lies; None if the client does not need it.
        """
        values: dict[str, Any] = {"arrays": self.arrays, "config": self.config, "weighted_by": self.weighted_by}
        if layout is not None:
            values["layout"] = pack_layout(layout)
        config = ConfigRecord({**settings, ROUND: round})
        return RecordDict({self.arrays: arrays, self.config: config, FORM: ConfigRecord(values)})

    @classmethod
    def read(cls, content: RecordDict) -> "RecordNames":
        """Read the form of a message that the server sent."""
        values: Any = content[FORM]
        return cls(values["arrays"], values["config"], values["weighted_by"])


def arrays(state: Mapping[str, Tensor]) -> ArrayRecord:
    """Return a state_dict in Flower's form; bfloat16 becomes float32."""
    # Flower keeps arrays in NumPy's form, which has no bfloat16; float32 holds all its values exactly.
    return ArrayRecord({n: t.float() if t.dtype == torch.bfloat16 else t for n, t in state.items()})


def read_layout(content: RecordDict, digest: str) -> Layout:
    """Read the layout of a message that the server sent.

    Raises:
        UserError: it is not the one that the task names.
    """
    values: Any = content[FORM]
    layout = _unpack_layout(values["layout"])
    if layout.digest != digest:
        raise UserError(
            f"layout: expected the server's ({digest}), got another one ({layout.digest}) with the task; install the same "
            "version of fedbcgd on both"
        )
    return layout


def pack_layout(layout: Layout) -> bytes:
    """Return the layout as compressed JSON, about ten bytes for each named parameter of a large model."""
    entries = [[[e.name, list(e.shape), list(e.order)] for e in part] for part in (layout.parameters, layout.buffers)]
    dtype = str(layout.dtype).removeprefix("torch.")
    return zlib.compress(json.dumps([*entries, list(layout.bounds), dtype, layout.divider]).encode(), 9)


@lru_cache(4)
def _unpack_layout(data: bytes) -> Layout:
    parameters, buffers, bounds, dtype, divider = json.loads(zlib.decompress(data))
    entries, offset = [], 0
    for name, shape, order in [*parameters, *buffers]:
        entries.append(Entry(name, offset, tuple(shape), tuple(order)))
        offset += entries[-1].numel
    count = len(parameters)
    dim = sum(e.numel for e in entries[:count])
    return Layout(
        tuple(entries[:count]), tuple(entries[count:]), tuple(bounds), dim, offset, getattr(torch, dtype), divider
    )


def read_evaluation(content: Any, weighted_by: str) -> Evaluation:
    """Read the reply of an app's own evaluation: one record of metrics, with the number of examples among them.

    Args:
        content: the content of the reply. Metrics that are lists are left out.
        weighted_by: the name of the metric that is the number of examples.

    Raises:
        Malformed: it has another form.
    """
    wire.record_names(content, _MOST_RECORDS)
    records = [record for record in content.values() if isinstance(record, MetricRecord)]
    if len(records) != 1:
        raise Malformed(f"expected one MetricRecord, got {len(records)}")
    if len(records[0]) > MOST_METRICS + 1:
        raise Malformed(f"expected at most {MOST_METRICS} metrics, got {len(records[0]):,}")
    metrics: dict[str, Any] = dict(records[0])
    if weighted_by not in metrics:
        raise Malformed(
            f"metrics: expected {shorten(weighted_by, 60)!r} among them, the number of examples (weighted_by_key), got none"
        )
    return read(
        Evaluation,
        {
            "examples": whole(metrics.pop(weighted_by)),
            "metrics": {name: value for name, value in metrics.items() if not isinstance(value, list)},
        },
    )


def whole(value: Any) -> Any:
    """Return a float that is a whole number as an integer, and anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
