"""Take a run back to an earlier checkpoint."""

import os
from dataclasses import dataclass
from pathlib import Path

from fedbcgd.engine import checkpoint
from fedbcgd.engine.run_folder import RunFolder, exclusive_lock
from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, remove, sync_folder

ASIDE = "rolled-back"  # part of the new names of files that a rollback renames


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint of a run folder."""

    path: Path
    round: int | None  # the number of finished rounds; None: the checkpoint is damaged
    problem: str = ""


def checkpoints(folder: Path) -> list[KeptCheckpoint]:
    """Return the checkpoints that a folder has, the newest first.

    Raises:
        UserError: it has none.
    """
    places = checkpoint.Checkpoints(RunFolder(folder).checkpoint, None)
    found: list[KeptCheckpoint] = []
    for path in (places.path, places.previous):
        try:
            found.append(KeptCheckpoint(path, int(checkpoint.read(path)[1]["round"])))
        except FileNotFoundError:
            continue
        except Damaged as error:
            found.append(KeptCheckpoint(path, None, str(error)))
    if not found:
        raise UserError(f"{folder}: expected the folder of a run with a checkpoint, got one without")
    return found


def roll_back(folder: Path, round: int) -> list[Path]:
    """Take a run back to an earlier checkpoint. The newer checkpoint and the model are renamed.

    Rows of metrics and traffic after the checkpoint are cut off when the run continues. Client state of a simulated run is
    that of the checkpoint. On Flower the clients keep their state themselves, so controls (SCAFFOLD, FedDC, FedBCGD+) begin
    again from zero.

    Args:
        folder: the run folder.
        round: the number of finished rounds at that checkpoint; `checkpoints` lists them.

    Returns:
        The new names of the renamed files; empty if the run is at this round already.

    Raises:
        UserError: there is no such checkpoint, or another process uses the folder.
    """
    place = RunFolder(folder)
    checkpoints(folder)  # raises if this is not the folder of a run, before a lock file is made in it
    with exclusive_lock(folder):
        kept = checkpoints(folder)
        if round not in [k.round for k in kept]:
            rounds = ", ".join(str(k.round) for k in kept if k.round is not None) or "none"
            raise UserError(f"round: expected one of the checkpoints in {folder} ({rounds}), got {round}")
        if kept[0].round == round:
            return []
        remove(place.summary)  # the run is not finished any more
        aside = []
        for path in (place.model, kept[0].path):  # the checkpoint last: if this is interrupted, it can be repeated
            if os.path.lexists(path):
                aside.append(path.with_stem(f"{path.stem}-{ASIDE}"))
                path.replace(aside[-1])
                sync_folder(path.parent)
        return aside
