"""Small data sets in every format, and helpers for tests of hostile archives."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import tempfile
import tracemalloc
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedbcgd.data import store
from fedbcgd.errors import UserError

CONTAINERS = ("folder", "zip", "tar", "tar.gz", "tar.bz2", "tar.xz")


def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a cache folder that does not exist yet, and a folder for temporary files that tests can inspect."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("FEDBCGD_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refusal(tmp_path: Path, path: Path, name: str = "mine", **options: Any) -> str:
    """Check that adding `path` is refused and changes no file under tmp_path; return the message."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as refused:
        store.add(name, path, **options)
    assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
    assert not store.stored_names()
    message = str(refused.value)
    assert message.isprintable(), "more than a line, or something that a terminal would follow"
    return message


@contextmanager
def memory_below(mebibytes: float):
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    assert peak < mebibytes, f"{peak:.0f} MiB at the peak"


# Containers.


def tar_bytes(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def zip_bytes(files: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return out.getvalue()


def pack(files: Mapping[str, bytes], path: Path, kind: str) -> Path:
    """Write these files as a folder, zip or tar."""
    path = path.with_name(f"{path.name}.{kind}") if kind != "folder" else path
    if kind == "folder":
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    elif kind == "zip":
        path.write_bytes(zip_bytes(files))
    else:
        with tarfile.open(path, f"w:{kind.removeprefix('tar').lstrip('.')}") as tar:  # type: ignore[call-overload]
            tar.addfile(_folder_member("somewhere"))
            for name, data in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def _folder_member(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = tarfile.DIRTYPE
    return member


# Images and labels.


def pictures(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def image(pixels: Any, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(out, kind)
    return out.getvalue()


def plain(color: Any, width: int = 2, height: int = 2, kind: str = "PNG") -> bytes:
    """Make an image of one colour: three numbers, or one for grey."""
    pixels = np.empty((height, width, 3) if isinstance(color, tuple) else (height, width), np.uint8)
    pixels[:] = color
    return image(pixels, kind)


# Formats: files by their name.


def python2(entries: Mapping[bytes, Any], numpy: bytes = b"numpy.core.multiarray") -> bytes:
    """Pickle as Python 2's cPickle did with protocol 2, in which CIFAR is published: all texts are byte strings."""
    out = [b"\x80\x02}q\x01("]
    for key, value in entries.items():
        out.append(b"U" + bytes([len(key)]) + key)
        if isinstance(value, np.ndarray):
            rows, columns = value.shape
            out.append(b"c" + numpy + b"\n_reconstruct\nq\x06cnumpy\nndarray\nq\x07K\x00\x85U\x01b\x87Rq\x08")
            out.append(b"(K\x01J" + struct.pack("<i", rows) + b"J" + struct.pack("<i", columns) + b"\x86")
            out.append(b"cnumpy\ndtype\nq\tU\x02u1K\x00K\x01\x87Rq\n")
            out.append(b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
            out.append(b"T" + struct.pack("<I", value.size) + value.tobytes() + b"tb")
        elif isinstance(value, bytes):
            out.append(b"U" + bytes([len(value)]) + value)
        else:
            items = (b"K" + bytes([v]) if isinstance(v, int) else b"U" + bytes([len(v)]) + v for v in value)
            out.append(b"](" + b"".join(items) + b"e")
    return b"".join(out) + b"u."


def cifar10_python(rows: Sequence[np.ndarray], labels: Sequence[list[int]], names: list[bytes]) -> dict[str, bytes]:
    """The last of the rows (n, 3072) and labels are the test batch."""
    files = {"batches.meta": python2({b"label_names": names})}
    for k, (data, numbers) in enumerate(zip(rows, labels, strict=True), 1):
        batch = f"data_batch_{k}" if k < len(rows) else "test_batch"
        files[batch] = python2({b"batch_label": b"batch", b"labels": numbers, b"data": data})
    return {f"cifar-10-batches-py/{name}": data for name, data in files.items()}


def cifar100_python(train: Any, test: Any, names: list[str], protocol: int = 4) -> dict[str, bytes]:
    """Pickle CIFAR-100 with Python 3. Each split has rows, fine labels and coarse labels."""
    files = {"meta": pickle.dumps({"fine_label_names": names, "coarse_label_names": ["a", "b"]}, protocol)}
    for split, (rows, fine, coarse) in (("train", train), ("test", test)):
        files[split] = pickle.dumps({b"data": rows, b"fine_labels": fine, b"coarse_labels": coarse}, protocol)
    return {f"cifar-100-python/{name}": data for name, data in files.items()}


def cifar10_binary(rows: Sequence[np.ndarray], labels: Sequence[list[int]], names: list[str]) -> dict[str, bytes]:
    files = {"batches.meta.txt": ("\n".join(names) + "\n\n").encode()}
    for k, (data, numbers) in enumerate(zip(rows, labels, strict=True), 1):
        records = b"".join(bytes([n]) + row.tobytes() for n, row in zip(numbers, data, strict=True))
        files[f"data_batch_{k}.bin" if k < len(rows) else "test_batch.bin"] = records
    return {f"cifar-10-batches-bin/{name}": data for name, data in files.items()}


def cifar_sheets(rows: Sequence[np.ndarray], labels: Sequence[list[int]]) -> dict[str, bytes]:
    """Five sheets and one of test images, each (n, 1024, 3)."""
    files = {f"package/data_batch_{k}.png": image(sheet) for k, sheet in enumerate(rows[:5], 1)}
    files["package/test_batch.png"] = image(rows[5])
    files["package/train_lables.json"] = json.dumps(labels[0]).encode()
    return files | {"package/test_lables.json": json.dumps(labels[1]).encode()}


def idx(array: Any) -> bytes:
    array = np.asarray(array, dtype=np.uint8)
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist(x: Any, y: Any, x_test: Any, y_test: Any, prefix: str = "", gz: bool = False) -> dict[str, bytes]:
    files = {
        f"{prefix}train-images-idx3-ubyte": idx(x),
        f"{prefix}train-labels-idx1-ubyte": idx(y),
        f"{prefix}t10k-images-idx3-ubyte": idx(x_test),
        f"{prefix}t10k-labels-idx1-ubyte": idx(y_test),
    }
    return {name + ".gz": gzip.compress(data) for name, data in files.items()} if gz else files


def tiny_imagenet(kind: str = "JPEG") -> dict[str, bytes]:
    """Two classes, the second of which is listed first; n01 is black, n02 is white."""
    at = "tiny-imagenet-200/"
    return {
        f"{at}wnids.txt": b"n02\nn01\n",
        f"{at}words.txt": b"n01\tgoldfish, Carassius auratus\nn02\tbullfrog\nn99\tnothing here\n",
        f"{at}train/n01/images/n01_0.JPEG": plain((0, 0, 0), 64, 64, kind),
        f"{at}train/n01/n01_boxes.txt": b"n01_0.JPEG\t0\t0\t1\t1\n",
        f"{at}train/n02/images/n02_0.JPEG": plain((255, 255, 255), 64, 64, kind),
        f"{at}train/n02/images/n02_1.JPEG": plain(255, 64, 64, kind),  # grey, as some of the real ones are
        f"{at}val/val_annotations.txt": b"val_1.JPEG\tn02\t0\t0\t9\t9\nval_0.JPEG\tn01\t0\t0\t9\t9\n",
        f"{at}val/images/val_0.JPEG": plain((0, 0, 0), 64, 64, kind),
        f"{at}val/images/val_1.JPEG": plain((255, 255, 255), 64, 64, kind),
        f"{at}test/images/test_0.JPEG": plain((9, 9, 9), 64, 64, kind),
    }


def image_folder() -> dict[str, bytes]:
    return {
        "set/train/cat/0.png": plain((10, 20, 30)),
        "set/train/dog/0.png": plain((40, 50, 60)),
        "set/train/dog/1.png": plain((70, 80, 90)),
        "set/test/dog/0.png": plain((1, 2, 3)),
        "set/README": b"not an image",
    }


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def npy(header: str, body: bytes = b"") -> bytes:
    """Make the file of an array with any header."""
    text = header.encode("latin1")
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def every_format() -> dict[str, dict[str, bytes]]:
    """A small valid data set in each format, as the files it has."""
    rows = [pictures(2, 3072, seed=k) for k in range(3)]
    labels = [[0, 1], [1, 0], [1, 1]]
    x = pictures(3, 4, 5)
    sheets = [pictures(1, 1024, 3, seed=k) for k in range(6)]
    return {
        "cifar10 python": cifar10_python(rows, labels, [b"a", b"b"]),
        "cifar100 python": cifar100_python((rows[0], [0, 1], [0, 0]), (rows[1], [1, 0], [0, 1]), ["a", "b"]),
        "cifar10 binary": cifar10_binary(rows, labels, ["a", "b"]),
        "cifar sheets": cifar_sheets(sheets, ([0, 1, 2, 0, 1], [2])),
        "idx": mnist(x, [0, 1, 2], x[:1], [1]),
        "idx.gz": mnist(x, [0, 1, 2], x[:1], [1], gz=True),
        "tiny imagenet": tiny_imagenet(),
        "image folder": image_folder(),
    }
