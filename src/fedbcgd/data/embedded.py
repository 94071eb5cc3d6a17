"""The images in the package: 10,000 train and 2,000 test images of Fashion-MNIST, class-balanced (MIT licence)."""

from importlib.resources import files

import numpy as np
import torch

from fedbcgd.data.images import Images

MEAN, STD = 0.2860, 0.3530  # of the full training set
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


def fashion_mnist() -> tuple[Images, Images]:
    """Load the images of the package.

    Returns:
        Train and test images of shape (1, 28, 28).
    """
    with files("fedbcgd.data").joinpath("fashion_mnist.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        train, test = (
            Images(
                torch.from_numpy(arrays[f"x_{name}"]).unsqueeze(1),
                torch.from_numpy(arrays[f"y_{name}"].astype(np.int64)),
                torch.tensor([MEAN]),
                torch.tensor([STD]),
            )
            for name in ("train", "test")
        )
    return train, test
