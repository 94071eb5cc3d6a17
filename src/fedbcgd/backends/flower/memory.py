"""A client's state between rounds: in Flower's context, or in a folder, where it survives a restart.

New state is pending until the client's next task says whether the upload that it belongs to was accepted. If it was not, the
new state is dropped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedbcgd.backends.flower.log import log
from fedbcgd.backends.flower.wire import TaskRequest, array, tensor
from fedbcgd.core.messages import StateUpdate
from fedbcgd.files import make_folder, read_tensors, write_tensors

NEVER = -1  # the version of state before the client's first accepted upload
RECORD = "fedbcgd-state"

Pieces = Sequence[tuple[slice, Tensor]]


@dataclass
class ClientMemory:
    """The state of one client in one run.

    Attributes:
        run: the id of the run.
        epoch: the control epoch.
        version: the round of the last accepted upload.
        vectors: control variates and residuals, by name.
        pending_round: the round of an upload of which it is not known yet whether it was accepted.
        pending: the new values that belong to that upload.
    """

    run: str = ""
    epoch: int = 0
    version: int = NEVER
    vectors: dict[str, Tensor] = field(default_factory=dict)
    pending_round: int = NEVER
    pending: dict[str, Pieces] = field(default_factory=dict)

    def settle(self, request: TaskRequest, dim: int, dtype: torch.dtype) -> bool:
        """Apply or drop the pending state, as the server's request says.

        Args:
            request: the request of the client's next task.
            dim: the length of a vector.
            dtype: the type of its values.

        Returns:
            Whether the state then has the version that the server expects.
        """
        if self.run != request.run:
            self.run, self.vectors, self.version = request.run, {}, NEVER
        elif self.epoch == request.epoch and self.pending and self.pending_round == request.accepted:
            for name, pieces in self.pending.items():
                vector = self.vectors.setdefault(name, torch.zeros(dim, dtype=dtype))
                for s, values in pieces:
                    vector[s] = values
            self.version = self.pending_round
        if self.epoch != request.epoch:
            self.epoch, self.vectors, self.version = request.epoch, {}, NEVER
        self.pending, self.pending_round = {}, NEVER
        return self.version == request.accepted

    def reset_to(self, request: TaskRequest) -> None:
        """Go on with zero vectors, as if they were the state of the server's version."""
        self.vectors, self.version = {}, request.accepted

    def keep_pending(self, round: int, update: StateUpdate) -> None:
        """Keep new state as pending, until it is known whether the upload of this round was accepted."""
        self.pending_round, self.pending = round, dict(update.values)

    # -- storage ------------------------------------------------------------------------------------------------------

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the memory as tensors by name and plain values, which `parse` reads."""
        tensors = dict(self.vectors)
        for name, pieces in self.pending.items():
            for s, t in pieces:
                tensors[f"{name}@{s.start}"] = t
        names = {"run": "run", "epoch": "epoch", "version": "version", "pending": "pending_round"}
        return tensors, {key: getattr(self, name) for key, name in names.items()}

    @classmethod
    def parse(cls, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> "ClientMemory":
        """Read what `dump` returned."""
        memory = cls(str(values["run"]), int(values["epoch"]), int(values["version"]))
        memory.pending_round = int(values["pending"])
        pending: dict[str, list[tuple[slice, Tensor]]] = {}
        for key, t in tensors.items():
            name, at, start = key.partition("@")
            if at:
                pending.setdefault(name, []).append((slice(int(start), int(start) + t.numel()), t))
            else:
                memory.vectors[name] = t
        memory.pending = dict(pending)
        return memory


class ContextStorage:
    """Keeps a client's state in Flower's context, until the SuperNode or the run ends.

    Args:
        state: the context's state.
        dtype: the type of the vectors' values.
    """

    def __init__(self, state: RecordDict, dtype: torch.dtype):
        self._state = state
        self._dtype = dtype

    def load(self) -> ClientMemory:
        """Return the state; empty if none is kept."""
        arrays, values = self._state.get(RECORD), self._state.get(f"{RECORD}-values")
        if not isinstance(arrays, ArrayRecord) or not isinstance(values, ConfigRecord):
            return ClientMemory()
        return ClientMemory.parse({k: tensor(a, self._dtype) for k, a in arrays.items()}, values)

    def save(self, memory: ClientMemory) -> None:
        """Store the state in the context."""
        tensors, values = memory.dump()
        arrays: dict[str, Array] = {k: array(t) for k, t in tensors.items()}
        self._state[RECORD] = ArrayRecord(arrays)
        self._state[f"{RECORD}-values"] = ConfigRecord(values)


class FolderStorage:
    """Keeps a client's state in a file, where a restarted SuperNode finds it.

    Args:
        folder: holds a file for each client; it is made if it does not exist.
        client: the client's index.
    """

    def __init__(self, folder: Path, client: int):
        self._path = make_folder(folder) / f"client-{client}.safetensors"

    def load(self) -> ClientMemory:
        """Return the state; empty if there is no file, or it is damaged."""
        try:
            tensors, metadata, _ = read_tensors(self._path)
            return ClientMemory.parse({key: t.clone() for key, t in tensors.items()}, json.loads(metadata["fedbcgd"]))
        except FileNotFoundError:
            return ClientMemory()
        except (OSError, KeyError, ValueError) as error:
            log.warning("the client's state is lost: %s", error)
            return ClientMemory()

    def save(self, memory: ClientMemory) -> None:
        """Store the state; the file is replaced in one step."""
        tensors, values = memory.dump()
        write_tensors(
            self._path, {k: t.contiguous().clone() for k, t in tensors.items()}, {"fedbcgd": json.dumps(values)}
        )
