"""What a client sends after training, and its new state."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedbcgd.core.algorithm import RESIDUAL, Algorithm
from fedbcgd.core.messages import BUFFERS, Allocator, Broadcast, Task
from fedbcgd.core.vector import Layout
from fedbcgd.core.work import Progress
from fedbcgd.rng import stream

# Passed to codecs that draw nothing: making a new generator takes as long as encoding a small upload.
_UNUSED = np.random.default_rng(0)

StateValues = dict[str, Sequence[tuple[slice, Tensor]]]


def encode(
    algorithm: Algorithm,
    layout: Layout,
    seed: int,
    work: Progress,
    broadcast: Broadcast,
    task: Task,
    buffers: Tensor,
    allocate: Allocator,
) -> tuple[dict[str, list[Tensor]], StateValues]:
    """Encode the changes on the slices that the task uploads, and compute the client's new state.

    The new state is computed from the decoded values, so that client and server add the same numbers.

    Args:
        algorithm: its local rule determines what is sent, its codec how.
        layout: where each parameter lies in the vector.
        seed: the seed of the run.
        work: the client's training: where it began (x) and where it ended (y).
        broadcast: the model and controls that the client was sent.
        task: which client, and which block it uploads.
        buffers: the floating-point buffers after training.
        allocate: returns memory to write the upload into.

    Returns:
        The payload, and the new state on the uploaded coordinates.
    """
    rule, codec, dtype = algorithm.local, algorithm.codec, layout.dtype
    rng = _UNUSED if codec.in_place else stream(seed, "codec", task.round, task.client)
    payload: dict[str, list[Tensor]] = {channel: [] for channel in rule.channels}
    parts: list[tuple[slice, dict[str, Tensor]]] = []
    residual: list[tuple[slice, Tensor]] = []
    for s in work.slices:
        sent = {}
        for channel, change in rule.changes(work, s).items():
            # Error feedback: add what earlier uploads left out, keep what this one leaves out.
            feedback = codec.residual and channel == "dx"
            intended = change.add_(work.state[RESIDUAL][s]).clone() if feedback else None
            data = codec.encode(change, rng, allocate)
            payload[channel].append(data)
            if algorithm.state_names:
                sent[channel] = codec.decode(data, s.stop - s.start, dtype)
            if intended is not None:
                residual.append((s, intended.sub_(sent[channel])))
        if rule.controls:
            controls = {name: c[s] for name, c in broadcast.controls.items()}
            parts.append((s, rule.complete(sent, controls, work.eta, work.steps)))
    values: StateValues = dict(rule.new_controls(work, parts))
    if codec.residual:
        values[RESIDUAL] = residual
    if buffers.numel():
        data = buffers.view(torch.uint8)
        payload[BUFFERS] = [allocate(len(data)).copy_(data)]
    return payload, values
