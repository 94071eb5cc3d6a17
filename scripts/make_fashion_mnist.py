"""Make src/fedbcgd/data/fashion_mnist.npz: 10,000 train and 2,000 test images of Fashion-MNIST, class-balanced.

Reads the idx files of the Debian package `dataset-fashion-mnist` and takes the first 1,000 train and the first 200 test
images of each class in file order, from the official train and test splits.

    apt-get install dataset-fashion-mnist
    python scripts/make_fashion_mnist.py [FOLDER]
"""

import gzip
import sys
from pathlib import Path

import numpy as np

TRAIN_PER_CLASS, TEST_PER_CLASS, CLASSES = 1000, 200, 10
OUT = Path(__file__).parents[1] / "src" / "fedbcgd" / "data" / "fashion_mnist.npz"


def idx(path: Path) -> np.ndarray:
    """Read a compressed idx file of bytes."""
    raw = gzip.decompress(path.read_bytes())
    ndim = raw[3]
    shape = np.frombuffer(raw, ">u4", ndim, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def balanced(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Return the positions of the first `per_class` examples of each class, in file order."""
    rows = [np.flatnonzero(labels == c)[:per_class] for c in range(CLASSES)]
    assert all(len(r) == per_class for r in rows)
    return np.sort(np.concatenate(rows))


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/usr/share/datasets/fashion-mnist")
    arrays = {}
    for split, stem, per_class in (("train", "train", TRAIN_PER_CLASS), ("test", "t10k", TEST_PER_CLASS)):
        images, labels = idx(folder / f"{stem}-images-idx3-ubyte.gz"), idx(folder / f"{stem}-labels-idx1-ubyte.gz")
        rows = balanced(labels, per_class)
        arrays |= {f"x_{split}": images[rows], f"y_{split}": labels[rows]}
    np.savez_compressed(OUT, **arrays)
    print(f"{OUT}: {OUT.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
