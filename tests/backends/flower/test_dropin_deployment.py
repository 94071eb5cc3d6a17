"""The example of an existing app, before and after, on a real SuperLink with three SuperNodes."""

import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")

from .test_deployment import ROOT, loopback, place  # noqa: F401 (a fixture)

EXAMPLE = ROOT / "examples" / "flower-dropin"
OLDER = Path(__file__).parent / "older_app"
NODES = 3


@pytest.mark.slow
@pytest.mark.integration
def test_the_app_before_and_after_on_a_real_federation(place, capfd):  # noqa: F811
    with loopback.federation(place, NODES, secure=False) as federation:
        for side in ("before", "after"):
            app = shutil.copytree(EXAMPLE / side, place / side)
            process = federation.run(app, f'num-server-rounds=2 examples=100 output="{place / side}.pt"')
            try:
                assert process.wait(600) == 0
            finally:
                process.kill()
            assert federation.completed(), (place / "superlink.log").read_text()[-3000:]
    models = {side: torch.load(place / f"{side}.pt") for side in ("before", "after")}
    assert list(models["before"]) == list(models["after"])
    assert all(value.isfinite().all() for value in models["after"].values())
    assert not torch.equal(models["before"]["fc1.weight"], models["after"]["fc1.weight"])
    log = capfd.readouterr().out  # of `flwr run --stream`
    rounds = re.findall(r"round (\d): .*clients_eval_loss .*3 uploads, 0 refused, 0 lost, (\d\.\d+) d", log)
    assert [round for round, _ in rounds] == ["1", "2"]
    assert float(rounds[-1][1]) < 0.8  # two rounds of 3 blocks and the shared one, in d


def older_app(folder):
    """The example in Flower's older shape, with the two lines that the documentation changes in it."""
    app = shutil.copytree(EXAMPLE / "before", folder / "older")
    shutil.copytree(OLDER, app / "images_app", dirs_exist_ok=True)
    text = (ROOT / "docs" / "flower.md").read_text()
    (diff,) = re.findall(r"^  ```diff\n(.*?)```", text, re.M | re.S)
    lines = [line[2:] for line in diff.splitlines() if line.startswith(("  -", "  +"))]
    changes = list(zip(lines[::2], lines[1::2], strict=True))
    assert len(changes) == 2
    for path in ((app / "images_app" / name) for name in ("server_app.py", "client_app.py")):
        code = path.read_text()
        for old, new in changes:
            assert (old[0], new[0]) == ("-", "+")
            code = code.replace(f"\n{old[1:]}\n", f"\n{new[1:]}\n")
        assert code.count("fedbcgd.flower.") == 1
        path.write_text("import fedbcgd.flower\n" + code)
    return app


@pytest.mark.slow
@pytest.mark.integration
def test_an_app_of_the_older_shape_on_a_real_federation(place, capfd):  # noqa: F811
    with loopback.federation(place, NODES, secure=False) as federation:
        process = federation.run(older_app(place), "num-server-rounds=2 examples=100")
        try:
            assert process.wait(600) == 0
        finally:
            process.kill()
        assert federation.completed(), (place / "superlink.log").read_text()[-3000:]
    log = capfd.readouterr().out
    rounds = re.findall(r"round (\d): clients_accuracy .*3 uploads, 0 refused, 0 lost, (\d\.\d+) d", log)
    assert [round for round, _ in rounds] == ["1", "2"]
    assert float(rounds[-1][1]) < 0.8
