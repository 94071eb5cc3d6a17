"""Images kept in memory as bytes, converted to floats batch by batch, and augmented if asked for."""

import copy
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

PAD = 4


class Resident:
    """The images that all clients of a data set share, as one uint8 tensor, and their conversion to floats.

    Args:
        images: uint8 (n, channels, height, width).
        labels: int64 (n).
        mean: of each channel, of values from 0 to 1.
        std: of each channel.
    """

    def __init__(self, images: Tensor, labels: Tensor, mean: Tensor, std: Tensor):
        pixels = images.permute(0, 2, 3, 1).contiguous()  # no copy if it has this layout already
        self.images, self.labels, self.mean, self.std = pixels.permute(0, 3, 1, 2), labels, mean, std
        self.size = tuple(pixels.shape[1:])  # height, width, channels
        flat = pixels.view(len(pixels), -1)
        # Copy rows as 64-bit words if possible: eight times as fast as byte by byte.
        self._flat = flat.view(torch.int64) if flat.shape[1] % 8 == 0 else flat
        # A scale for each byte of an image, since a loop over three channels would not vectorise.
        area = self.size[0] * self.size[1]
        self._scale = (1 / (255 * std)).repeat(area)
        self._shift = (-mean / std).repeat(area)

    def to(self, device: torch.device) -> "Resident":
        """Copy to a device."""
        return Resident(*(t.to(device) for t in (self.images, self.labels, self.mean, self.std)))

    def pixels(self, rows: Tensor) -> Tensor:
        """Copy the bytes of these rows: (batch, height, width, channels)."""
        return self._flat.index_select(0, rows).view(torch.uint8).view(-1, *self.size)

    def floats(self, pixels: Tensor) -> Tensor:
        """Convert bytes to normalised floats (batch, channels, height, width)."""
        x = pixels.view(len(pixels), -1).float()
        torch.addcmul(self._shift, x, self._scale, out=x)
        return x.view(-1, *self.size).permute(0, 3, 1, 2)


class Images:
    """A source of images that are kept in memory as one uint8 tensor.

    Args:
        images: uint8 (n, channels, height, width), fastest as a view of (n, height, width, channels).
        labels: int64 (n).
        mean: mean of each channel, of values from 0 to 1.
        std: standard deviation of each channel.
        rows: the rows of the images in this source, which are not copied; None: all.
        augment: whether to crop at random after padding with 4 black pixels, and to mirror half of the images.
        resize: side, in pixels, to which images are scaled.
        crop: side of the square that is cut out after resizing: at random with `augment`, else from the middle.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: Tensor,
        std: Tensor,
        rows: Tensor | None = None,
        *,
        augment: bool = False,
        resize: int | None = None,
        crop: int | None = None,
    ):
        self.resident = Resident(images, labels, mean, std)
        self.rows, self.augment, self.resize, self.crop = rows, augment, resize, crop

    @property
    def images(self) -> Tensor:
        """The pixels as bytes, of the whole data set."""
        return self.resident.images

    @property
    def labels(self) -> Tensor:
        """The labels of the whole data set."""
        return self.resident.labels

    @property
    def mean(self) -> Tensor:
        """The mean of each channel, which is subtracted from the pixels."""
        return self.resident.mean

    @property
    def std(self) -> Tensor:
        """The standard deviation of each channel, by which the pixels are divided."""
        return self.resident.std

    def __len__(self) -> int:
        return len(self.labels) if self.rows is None else len(self.rows)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that `gather` returns."""
        height, width, channels = self.resident.size
        if self.resize is not None:
            height = width = self.resize
        if self.crop is not None:
            height = width = self.crop
        return channels, height, width

    @property
    def device(self) -> torch.device:
        """The device that has the images."""
        return self.labels.device

    @property
    def positions(self) -> Tensor:
        """The rows of its images in the resident tensor."""
        return torch.arange(len(self.labels), device=self.device) if self.rows is None else self.rows

    def like(self, other: "Images") -> bool:
        """Return whether both have images of one data set, prepared in the same way."""
        attributes = ("resident", "augment", "resize", "crop")
        return all(getattr(self, name) == getattr(other, name) for name in attributes)

    def with_rows(self, rows: Tensor) -> "Images":
        """Select other resident images, prepared in the same way."""
        return self._with(rows=rows)

    @property
    def plain(self) -> bool:
        """Whether images are neither augmented nor resized nor cropped."""
        return not self.augment and self.resize is None and self.crop is None

    @property
    def example_size(self) -> int:
        """The number of values of an image."""
        return prod(self.shape)

    def gather(self, rows: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return the images and labels at these rows; `rng` is for augmentation."""
        rows = rows.to(self.device)
        positions = rows if self.rows is None else self.rows.index_select(0, rows)
        pixels = self.resident.pixels(positions)
        if self.augment and self.device.type == "cpu":
            pixels = torch.from_numpy(crop_and_flip(pixels.numpy(), rng))
        elif self.augment:
            pixels = crop_and_flip_on_device(pixels, rng)
        x = self.resident.floats(pixels)
        if self.resize is not None:
            smaller = self.resize < x.shape[2]
            x = F.interpolate(x, (self.resize, self.resize), mode="bilinear", antialias=smaller)
        if self.crop is not None:
            x = self._cropped(x, self.crop, rng)
        return x, self.labels.index_select(0, positions)

    def _cropped(self, x: Tensor, side: int, rng: np.random.Generator) -> Tensor:
        down, right = x.shape[2] - side, x.shape[3] - side
        if not self.augment:
            return x[:, :, down // 2 : down // 2 + side, right // 2 : right // 2 + side]
        tops, lefts = rng.integers(0, down + 1, len(x)), rng.integers(0, right + 1, len(x))
        return torch.stack([image[:, t : t + side, u : u + side] for image, t, u in zip(x, tops, lefts, strict=True)])

    def subset(self, rows: Tensor) -> "Images":
        """Select rows of this source, without a copy."""
        return self._with(rows=rows if self.rows is None else self.rows[rows])

    def shown_as(self, augment: bool = False, resize: int | None = None, crop: int | None = None) -> "Images":
        """Return the same images, prepared in another way; see the class for the arguments."""
        return self._with(augment=augment, resize=resize, crop=crop)

    def to(self, device: torch.device, resident: Resident | None = None) -> "Images":
        """Move to a device.

        Args:
            device: the destination.
            resident: the images on that device, if they are there already.
        """
        rows = None if self.rows is None else self.rows.to(device)
        return self._with(resident=resident or self.resident.to(device), rows=rows)

    def relabelled(self, labels: Tensor) -> "Images":
        """Return the same images with other labels."""
        resident = copy.copy(self.resident)
        resident.labels = labels
        return self._with(resident=resident)

    def _with(self, **changes: object) -> "Images":
        other = copy.copy(self)
        vars(other).update(changes)
        return other


def crop_and_flip(pixels: np.ndarray, rng: np.random.Generator, pad: int = PAD) -> np.ndarray:
    """Move each image at random by up to `pad` pixels, with a black border, and mirror half of them.

    Args:
        pixels: uint8 (n, height, width, channels).
        rng: the generator of the draws.
        pad: the largest move in pixels.

    Returns:
        New pixels of the same shape.
    """
    count, height, width, channels = pixels.shape
    padded = np.zeros((count, height + 2 * pad, width + 2 * pad, channels), np.uint8)
    padded[:, pad : pad + height, pad : pad + width] = pixels
    down, right, mirrored = _draw_moves(count, rng, pad)
    # A line of an image is contiguous, so each line of the result is a window on the padded memory.
    image, line = padded.strides[:2]
    starts = np.arange(count) * image + down * line + right * channels
    lines = as_strided(padded.reshape(-1), (padded.size - width * channels + 1, width * channels), (1, 1))
    out = lines[starts[:, None] + np.arange(height) * line].reshape(pixels.shape)
    as_items = out.view(f"V{channels}")[..., 0]  # a pixel is one item
    as_items[mirrored] = as_items[mirrored][:, :, ::-1]
    return out


def crop_and_flip_on_device(pixels: Tensor, rng: np.random.Generator, pad: int = PAD) -> Tensor:
    """Like `crop_and_flip`, with the same draws, on the device of the pixels."""
    count, height, width, _ = pixels.shape
    padded = F.pad(pixels, (0, 0, pad, pad, pad, pad))
    down, right, mirrored = (torch.from_numpy(draws).to(pixels.device) for draws in _draw_moves(count, rng, pad))
    lines = down[:, None] + torch.arange(height, device=pixels.device)
    columns = torch.arange(width, device=pixels.device).expand(count, -1)
    is_mirrored = torch.zeros(count, dtype=torch.bool, device=pixels.device).index_fill(0, mirrored, True)
    columns = right[:, None] + torch.where(is_mirrored[:, None], width - 1 - columns, columns)
    image = torch.arange(count, device=pixels.device)[:, None, None]
    return padded[image, lines[:, :, None], columns[:, None, :]]


def _draw_moves(count: int, rng: np.random.Generator, pad: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw how far each image is moved down and to the right, and which ones are mirrored."""
    down, right = rng.integers(0, 2 * pad + 1, (2, count))
    return down, right, np.flatnonzero(rng.random(count) < 0.5)
