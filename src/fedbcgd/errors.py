"""Errors whose message is meant for the user, and the messages for exhausted resources."""

import errno
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, TypeVar


class UserError(ValueError):
    """A mistake in the user's input. The message says what is wrong, where, and what would be right."""


class Diverged(RuntimeError):
    """The server refused at least two thirds of the uploads in several successive rounds, so training cannot recover.

    Attributes:
        result: what `simulate` had computed until then; None if another caller raised the error.
    """

    result: Any = None


class NothingAccepted(RuntimeError):
    """No upload was accepted in several successive rounds, on Flower, so that continuing cannot help."""


class WorkerLost(RuntimeError):
    """Several worker processes were lost with the same task, or could not be started."""


_Function = TypeVar("_Function", bound=Callable[..., Any])
_hiding: set[CodeType] = set()


def hides_callers(function: _Function) -> _Function:
    """Decorate a function whose callers do not matter to a user who reads the traceback of an error from it."""
    _hiding.add(function.__code__)
    return function


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return what is below the last function of a traceback that `hides_callers`; all of it if there is none."""
    shown, entry = trace, trace
    while entry is not None:
        if entry.tb_frame.f_code in _hiding:
            shown = entry.tb_next
        entry = entry.tb_next
    return shown


@hides_callers
def call_users(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function."""
    return function(*arguments)


def with_line(error: BaseException) -> str:
    """Return the error's type and text, and the last line of the user's code in its traceback."""
    import torch  # not by everything that has errors

    others = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<")  # "<frozen importlib…>"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    line = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{line}"


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return a hint with the most similar allowed name, with a space before it; empty if none is similar."""
    similar = get_close_matches(str(name), list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {similar[0]!r}?" if similar else ""


def unknown(kind: str, name: str, allowed: Iterable[str]) -> UserError:
    """Make the error for a name that does not exist.

    Args:
        kind: what the name stands for, such as "algorithm"; or the field that has it.
        name: the name that the user wrote.
        allowed: all names that exist.

    Returns:
        An error that suggests the most similar name and lists all.
    """
    names = sorted(allowed)
    return UserError(f"{kind}: expected one of {', '.join(names) or 'none'}, got {name!r}.{did_you_mean(name, names)}")


# Options by the names that other libraries and papers have for them.
ALIASES = {
    **dict.fromkeys(("learning_rate", "client_lr", "local_lr", "step_size", "eta"), "lr"),
    **dict.fromkeys(("learning_rate_decay", "lr_scheduler", "gamma"), "lr_decay"),
    **dict.fromkeys(("server_learning_rate", "eta_s"), "server_lr"),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs", "local_epoch", "e"), "local_epochs"),
    **dict.fromkeys(("steps", "num_steps", "max_steps"), "local_steps"),
    **dict.fromkeys(("batch", "batchsize", "bs"), "batch_size"),
    **dict.fromkeys(("wd", "l2"), "weight_decay"),
    **dict.fromkeys(("clip", "grad_clip", "max_grad_norm", "gradient_clipping"), "clip_norm"),
    **dict.fromkeys(("num_blocks", "n_blocks", "n"), "blocks"),
    **dict.fromkeys(("server_momentum", "lam", "lambda"), "momentum"),
    **dict.fromkeys(("compression", "compressor", "quantization"), "codec"),
    **dict.fromkeys(("bits", "num_levels"), "levels"),
    **dict.fromkeys(("k", "sparsity"), "fraction"),
    **dict.fromkeys(("weights_by", "weighted"), "weighting"),
    **dict.fromkeys(("clients_per_round", "sample_size", "participation", "fraction_fit", "num_sampled"), "cohort"),
    **dict.fromkeys(("num_rounds", "n_rounds", "communication_rounds", "max_rounds"), "rounds"),
    **dict.fromkeys(("num_clients", "n_clients", "client_data", "datasets"), "clients"),
    **dict.fromkeys(("criterion", "loss_fn"), "loss"),
    **dict.fromkeys(("test_data", "testset", "eval_data", "validation_data"), "test"),
    **dict.fromkeys(("eval_every", "test_every", "eval_interval"), "evaluate_every"),
    **dict.fromkeys(("num_workers", "n_jobs", "processes"), "workers"),
    **dict.fromkeys(("random_seed", "random_state"), "seed"),
    **dict.fromkeys(("dtype", "amp", "mixed_precision"), "precision"),
    **dict.fromkeys(("net", "module", "architecture"), "model"),
    **dict.fromkeys(("method", "strategy"), "algorithm"),
    **dict.fromkeys(("verbose",), "progress"),
}
_NO_OPTIMIZER = (
    "no such option; clients step by SGD with lr, momentum is the server's (client_momentum is theirs), and train=… keeps "
    "an optimiser of your own (docs/own-training.md)"
)


def other_name(option: str, allowed: Iterable[str]) -> str:
    """Return a hint for an option that has another name in other libraries.

    Args:
        option: the name that the user wrote.
        allowed: all names that exist here.

    Returns:
        A text such as "no such option; it is called lr"; empty if no option is known by this other name.
    """
    key = option.lower().replace("-", "_")
    if key in ("optimizer", "optimiser", "opt"):
        return _NO_OPTIMIZER
    name = ALIASES.get(key)
    return f"no such option; it is called {name}" if name in set(allowed) else ""


_MESSAGES = {
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENOMEM: "out of memory",
    errno.EAGAIN: "too many processes or threads: raise the limit (ulimit -u)",
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "no space left on the disk: the quota is used up",
    errno.EFBIG: "a file became too large: raise the limit (ulimit -f)",
}
# In messages of PyTorch and of the dynamic loader.
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "failed to map segment")


def shortage(error: BaseException) -> str:
    """Return a sentence that says which resource of this machine ran out.

    Args:
        error: any error.

    Returns:
        A sentence for the user; empty if the error is about something else.
    """
    if isinstance(error, OSError):
        message = _MESSAGES.get(error.errno or 0, "")
        on_disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return f"{message} ({error.filename})" if on_disk and error.filename else message
    if isinstance(error, MemoryError):
        return "out of memory"
    text = str(error).strip() or type(error).__name__
    if "can't start new thread" in text:
        return _MESSAGES[errno.EAGAIN]
    # Without memory to create the right exception the interpreter raises SystemError.
    if isinstance(error, SystemError) or (
        isinstance(error, (RuntimeError, ImportError)) and any(part in text.lower() for part in _OUT_OF_MEMORY)
    ):
        return f"out of memory: {text.splitlines()[-1]}"
    return ""
