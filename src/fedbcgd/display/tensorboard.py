"""TensorBoard events of a run (extra `tensorboard`)."""

from pathlib import Path

from fedbcgd.engine.loop import RoundInfo
from fedbcgd.errors import UserError


class TensorBoard:
    """A callback that writes every metric over the rounds; rounds that a resumed run repeats replace earlier ones.

    Args:
        folder: where the event files are written.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "run.tensorboard: expected the extra `tensorboard`, got none: pip install 'fedbcgd[tensorboard]'"
            ) from None
        self._writer_class = SummaryWriter
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def __call__(self, info: RoundInfo) -> None:
        for row in info.rows:
            step = int(row["round"])
            if self._writer is None:
                self._writer = self._writer_class(str(self._folder), purge_step=step)
            for name, value in row.items():
                if name != "round":
                    self._writer.add_scalar(name, value, step)
        if self._writer is not None and info.rows:
            self._writer.flush()
        if self._writer is not None and info.reason:
            self._writer.close()
