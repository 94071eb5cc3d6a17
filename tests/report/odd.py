"""Run folders damaged at random, or made to do harm."""

import os
import random
import re
import shutil
from pathlib import Path

FILES = ("config.toml", "summary.json", "metrics.jsonl", "label_counts.json", "traffic.jsonl")
SECRET = "a linked secret"
VALUES = [
    *(
        "null",
        "true",
        "-1",
        "0",
        "1e999",
        "-1e999",
        "NaN",
        "9" * 400,
        "9" * 5000,
        str(2**63),
        "1e308",
        "0.5",
        "[]",
        "{}",
    ),
    *(
        '"²"',
        '"\\ud800"',
        '"\\u001b[31m"',
        '"\u202eabc"',
        '"</script><script>alert(1)"',
        '"__proto__"',
        '"[/red]"',
        '""',
    ),
    '"' + "long" * 20_000 + '"',
    *("[" * depth + "]" * depth for depth in (20, 500, 5000)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (20, 500, 5000)),
    *("1970-01-01", ".".join("a" * 3000) + " = 1", '"/dev/zero"', '"4g"', '"matched"', '"own"'),
]
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.e+-]*|true|false|null')


def damage(folder: Path, chance: random.Random) -> None:
    """Spoil one or two of the files of a run folder."""
    for name in chance.sample(FILES, chance.randint(1, 2)):
        path = folder / name
        if chance.random() < 0.15:
            _replace(path, chance)
            continue
        data = path.read_bytes()
        if chance.random() < 0.7:  # the checksum would notice every other damage
            data = re.sub(rb', "crc": [0-9]+}|# crc: [0-9]+\n', lambda found: b"}" * found[0].endswith(b"}"), data)
        for _ in range(chance.randint(1, 4)):
            data = _spoilt(data, chance)
        path.write_bytes(data)


def _replace(path: Path, chance: random.Random) -> None:
    """Put something else in the place of a file."""
    path.unlink()
    kind = chance.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        (path.parent.parent / "secret").write_text(f'{{"algorithm": "{SECRET}"}}')
        path.symlink_to(path.parent.parent / "secret")
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.symlink_to("/dev/zero")


def _spoilt(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    kind = chance.randrange(6)
    if kind == 0:
        return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + data[at + chance.randrange(200) :]
    if kind == 2:
        return data[:at] + data[chance.randrange(len(data) + 1) :][:300] + data[at:]
    tokens = list(_TOKEN.finditer(data))
    if not tokens:
        return chance.choice(VALUES).encode()
    start, end = chance.choice(tokens).span()
    return data[:start] + chance.choice(VALUES).encode() + data[end:]


def copy(run: Path, folder: Path) -> Path:
    """The files of a run that are read for the page."""
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copy(run / name, folder / name)
    (folder / ".lock").touch()
    return folder
