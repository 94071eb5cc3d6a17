"""TensorBoard events of a run (extra `tensorboard`)."""

from pathlib import Path

from fedbcgd.engine.loop import RoundInfo
from fedbcgd.errors import UserError


class TensorBoard:
    """A callback: every metric over the rounds. Rows written again after a resume purge the ones they replace."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("run.tensorboard needs the extra: pip install 'fedbcgd[tensorboard]'") from None
        self._make = SummaryWriter
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def __call__(self, info: RoundInfo) -> None:
        for row in info.rows:
            step = int(row["round"])
            if self._writer is None:
                self._writer = self._make(str(self._folder), purge_step=step)
            for name, value in row.items():
                if name != "round":
                    self._writer.add_scalar(name, value, step)
        if self._writer is not None and info.rows:
            self._writer.flush()
        if self._writer is not None and info.reason:
            self._writer.close()
