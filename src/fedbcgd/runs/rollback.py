"""Take a run back to the checkpoint before its last one."""

import os
from dataclasses import dataclass
from pathlib import Path

from fedbcgd.engine import checkpoint
from fedbcgd.engine.run_folder import RunFolder, exclusive_lock
from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, remove, sync_folder

ASIDE = "rolled-back"  # in the names of files that a rollback sets aside


@dataclass(frozen=True)
class Kept:
    """A checkpoint of a run folder."""

    path: Path
    round: int | None  # rounds that were done; None: it is damaged
    problem: str = ""


def checkpoints(folder: Path) -> list[Kept]:
    """Return the checkpoints that a folder has, the newest first.

    Raises:
        UserError: it has none.
    """
    places = checkpoint.Checkpoints(RunFolder(folder).checkpoint, None)
    found: list[Kept] = []
    for path in (places.path, places.previous):
        try:
            found.append(Kept(path, int(checkpoint.read(path)[1]["round"])))
        except FileNotFoundError:
            continue
        except Damaged as error:
            found.append(Kept(path, None, str(error)))
    if not found:
        raise UserError(f"{folder}: expected the folder of a run with a checkpoint, got one without")
    return found


def roll_back(folder: Path, round: int) -> list[Path]:
    """Let a run go on from an earlier checkpoint. What is newer is set aside, under another name.

    Rows of metrics and traffic after it are cut off when the run goes on. Client state of a simulated run is that of the
    checkpoint. On Flower the clients keep their state themselves, so that controls (SCAFFOLD, FedDC, FedBCGD+) begin
    again from zero.

    Args:
        folder: of the run.
        round: the rounds that were done then; `checkpoints` tells which there are.

    Returns:
        The files that were set aside; empty if the run is at this round already.

    Raises:
        UserError: there is no such checkpoint, or another process is at work in the folder.
    """
    place = RunFolder(folder)
    checkpoints(folder)  # before a file for the lock is made in a folder that is none of ours
    with exclusive_lock(folder):
        kept = checkpoints(folder)
        if round not in [k.round for k in kept]:
            rounds = ", ".join(str(k.round) for k in kept if k.round is not None) or "none"
            raise UserError(f"round: expected one of the checkpoints in {folder} ({rounds}), got {round}")
        if kept[0].round == round:
            return []
        remove(place.summary)  # the run is not finished any more
        aside = []
        for path in (place.model, kept[0].path):  # the checkpoint last: if this is cut off, it can be repeated
            if os.path.lexists(path):
                aside.append(path.with_stem(f"{path.stem}-{ASIDE}"))
                path.replace(aside[-1])
                sync_folder(path.parent)
        return aside
