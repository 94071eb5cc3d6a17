"""Checks and decodes one upload, from what a client sent to values that may be summed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.messages import BUFFERS, Payload, Upload
from fedbcgd.core.norms import NormLimit, norm
from fedbcgd.core.reading import Malformed, UploadValues, read, shown
from fedbcgd.core.vector import Layout

_MAX_CHANNELS = 16  # a payload with more channels is refused; an error message names at most this many

Norms = dict[tuple[str, int], float]  # (channel, owner of the slice) → Euclidean norm

# The owner of a slice is the number of a block, N for the shared block, or BUFFER_OWNER.
BUFFER_OWNER = -1


@dataclass(frozen=True)
class DecodedUpload:
    """An upload that passed every check; one dictionary of channels for each uploaded slice of the parameters."""

    values: UploadValues
    slices: list[dict[str, Tensor]]
    buffers: Tensor | None
    norms: Norms

    def without_tensors(self) -> "DecodedUpload":
        """Return what is still needed after the values have been added."""
        return DecodedUpload(self.values, [], None, self.norms)


def read_values(upload: Any) -> UploadValues:
    """Read the plain values of an upload, whatever object was handed in.

    Raises:
        Malformed: it is not an upload, or a value does not fit.
    """
    if not isinstance(upload, Upload):
        raise Malformed(f"expected an upload, got {shown(upload)}")
    return read(UploadValues, {name: getattr(upload, name) for name in UploadValues.model_fields})


def part_of(layout: Layout, owner: int) -> slice:
    """Return the coordinates of a block, of the shared block (owner N) or of the buffers (BUFFER_OWNER)."""
    if owner == BUFFER_OWNER:
        return layout.buffer_slice
    return layout.block(owner) if owner < layout.blocks else layout.shared


class UploadDecoder:
    """Checks the form of uploads, decodes them, and checks them against the norm limits of the round."""

    def __init__(self, algorithm: Algorithm, layout: Layout):
        self.limit = NormLimit(algorithm.max_norm)
        self._algorithm = algorithm
        self._layout = layout
        self._slices = [layout.slices(j) for j in range(layout.blocks)]
        self._lengths = [algorithm.lengths(layout, j) for j in range(layout.blocks)]
        self._floats = [self._count_floats(slices) for slices in self._slices]
        self._limits: dict[tuple[str, int], float] = {}  # of this round; computed when first needed

    def open_round(self) -> None:
        """Forget the norm limits of the previous round."""
        self._limits = {}

    def slices(self, block: int) -> tuple[slice, ...]:
        """Return the slices that are uploaded for a block; empty if there is no block of this number."""
        return self._slices[block] if 0 <= block < self._layout.blocks else ()

    def nbytes(self, block: int) -> int:
        """Return the size of an upload of this block in bytes; the largest possible one if it varies."""
        return sum(map(sum, self._lengths[block].values()))

    def floats(self, block: int) -> int:
        """Return how many values an upload of this block has, buffers included."""
        return self._floats[block] if 0 <= block < self._layout.blocks else self._count_floats(())

    def _count_floats(self, slices: tuple[slice, ...]) -> int:
        sent = sum(self._algorithm.codec.floats(s.stop - s.start) for s in slices)
        return sent * len(self._algorithm.local.channels) + self._layout.size - self._layout.dim

    # -- form -----------------------------------------------------------------------------------------------------------

    def check_form(self, block: int, payload: Any) -> None:
        """Check channels, types and lengths of a payload before anything is decoded.

        Raises:
            Malformed: one of them is not what this block's upload has.
        """
        expected = self._lengths[block]
        if not isinstance(payload, Mapping) or len(payload) > _MAX_CHANNELS or set(payload) != set(expected):
            got = sorted(map(shown, payload))[:_MAX_CHANNELS] if isinstance(payload, Mapping) else shown(payload)
            raise Malformed(f"channels: expected {sorted(expected)}, got {got}")
        for channel, lengths in expected.items():
            pieces = payload[channel]
            if not isinstance(pieces, (list, tuple)) or not all(map(_is_bytes, pieces[: len(lengths) + 1])):
                raise Malformed(
                    f"channel {channel!r}: expected a list of contiguous uint8 tensors, got {shown(pieces)}"
                )
            got_lengths = [piece.numel() for piece in pieces[: len(lengths) + 1]]
            if not self._lengths_fit(channel, block, got_lengths):
                raise Malformed(f"channel {channel!r}: expected slices of {lengths} bytes, got {got_lengths}")

    def _lengths_fit(self, channel: str, block: int, got: list[int]) -> bool:
        if channel == BUFFERS:
            return got == self._lengths[block][BUFFERS]
        codec, dtype = self._algorithm.codec, self._layout.dtype
        sizes = [s.stop - s.start for s in self._slices[block]]
        return len(got) == len(sizes) and all(codec.fits(k, n, dtype) for k, n in zip(got, sizes, strict=True))

    # -- content --------------------------------------------------------------------------------------------------------

    def decode(
        self, values: UploadValues, payload: Payload, x: Tensor, controls: Mapping[str, Tensor]
    ) -> DecodedUpload:
        """Decode a payload whose form was checked.

        Args:
            values: the plain values of the upload.
            payload: its bytes.
            x: the model of the round; the change of buffers is measured against it.
            controls: the server's control vectors.

        Returns:
            The decoded channels with their norms.

        Raises:
            Malformed: bytes that no encoder writes, or a value that is not finite.
        """
        rule, codec, dtype = self._algorithm.local, self._algorithm.codec, self._layout.dtype
        rate = rule.rate(values.round)
        slices = []
        try:
            for k, s in enumerate(self.slices(values.block)):
                sent = {c: codec.decode(payload[c][k], s.stop - s.start, dtype) for c in rule.channels}
                slices.append(rule.complete(sent, {n: c[s] for n, c in controls.items()}, rate, values.steps))
        except ValueError as error:
            raise Malformed(
                f"payload: expected what the codec writes, got bytes that cannot be decoded: {error}"
            ) from None
        buffers = payload[BUFFERS][0].clone().view(dtype) if BUFFERS in payload else None
        return DecodedUpload(values, slices, buffers, self._norms(values.block, slices, buffers, x))

    def _norms(self, block: int, slices: list[dict[str, Tensor]], buffers: Tensor | None, x: Tensor) -> Norms:
        """Return the norm of each channel on each slice; of the buffers, that of their change."""
        norms = {
            (channel, owner): norm(values)
            for owner, channels in zip((block, self._layout.blocks), slices, strict=False)
            for channel, values in channels.items()
        }
        if buffers is not None:
            norms[BUFFERS, BUFFER_OWNER] = norm(buffers - x[self._layout.buffer_slice])
        for (channel, _), size in norms.items():
            if not math.isfinite(size):
                raise Malformed(f"channel {channel!r}: expected finite values, got NaN or infinity")
        return norms

    def hold_to_limits(self, upload: DecodedUpload, x: Tensor) -> None:
        """Check the norms of an upload; with over_norm="scale", scale down in place what is too large.

        Raises:
            Malformed: a norm is too large, and over_norm is "refuse".
        """
        if not self.limit.on:
            return
        norms = upload.norms
        limits = {key: self._limit_of(*key, x) for key in norms}
        if self.limit.fixed is not None:
            rate = self._algorithm.local.rate(upload.values.round)
            for channel in {channel for channel, _ in norms}:
                # A control is about as large as a gradient, and one step changes x by η times a gradient.
                largest = self.limit.fixed / (1 if channel in ("dx", BUFFERS) else rate)
                total = math.hypot(*(size for (c, _), size in norms.items() if c == channel))
                if total > largest:
                    limits |= {key: size * (largest / total) for key, size in norms.items() if key[0] == channel}
        for key, size in norms.items():
            if size <= limits[key]:
                continue
            channel, owner = key
            if self._algorithm.over_norm == "refuse" or channel == BUFFERS:
                names = {BUFFER_OWNER: "buffers", self._layout.blocks: "shared block"}
                part = names.get(owner, f"block {owner + 1}")
                raise Malformed(f"channel {channel!r}, {part}: expected a norm ≤ {limits[key]:.3g}, got {size:.3g}")
            upload.slices[0 if owner == upload.values.block else 1][channel].mul_(limits[key] / size)
            norms[key] = limits[key]

    def _limit_of(self, channel: str, owner: int, x: Tensor) -> float:
        key = channel, owner
        if key not in self._limits:
            self._limits[key] = self.limit.of_slice(channel, owner, x[part_of(self._layout, owner)])
        return self._limits[key]


def _is_bytes(piece: object) -> bool:
    return (
        isinstance(piece, Tensor)
        and piece.layout == torch.strided
        and piece.device.type != "meta"
        and piece.dtype == torch.uint8
        and piece.dim() == 1
        and piece.is_contiguous()
    )
