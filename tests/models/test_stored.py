"""Models that travel: from the file of a run back to the module, in a fresh process, also from hostile files."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedbcgd
from fedbcgd import UserError, load_model, model_info
from fedbcgd.files import read_tensors, write_tensors
from fedbcgd.models import MODELS, LeNet5, ViTSmall
from fedbcgd.models.problems import Point
from fedbcgd.models.stored import KEY, ModelInfo
from fedbcgd.runs import config as configuration
from fedbcgd.runs.execute import execute
from fedbcgd.runs.experiment import make_experiment

OPTIONS = {
    "lenet5": {"width": 0.1},
    "vgg11": {"width": 0.05, "norm": "group"},
    "vgg19": {"width": 0.05, "norm": "batch"},
    "resnet18": {"width": 0.05, "norm": "batch"},
    "vit-small": {"dim": 8, "depth": 1, "heads": 2},
}

NETS = """
    from pathlib import Path
    from torch import nn

    Path("imported").write_text("")

    class Net(nn.Module):
        def __init__(self, inputs, hidden=3):
            super().__init__()
            self.inputs, self.hidden = inputs, hidden
            self.a, self.b = nn.Linear(inputs, hidden), nn.Linear(hidden, inputs)
            self.b.weight = nn.Parameter(self.a.weight.detach().T.clone())

    def make(classes, shape, hidden=4):
        body = nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], hidden), nn.BatchNorm1d(hidden))
        return nn.Sequential(body, nn.Dropout(), nn.Linear(hidden, classes))
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "travel_nets.py").write_text(textwrap.dedent(NETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("travel_nets", None)


def run(path, model, **data):
    raw = {
        "model": model,
        "data": data,
        "algorithm": {"name": "fedbcgd", "local_steps": 1, "blocks": 2},
        "run": {"rounds": 1, "cohort": 2, "workers": 0},
    }
    execute(configuration.check(raw, "test"), path, figures=False)
    return load_file(path / "model.safetensors")


def elsewhere(code, cwd):
    """Run Python code in a fresh process, and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def altered(path, **changes):
    """Write the file again with other values in its description."""
    tensors, metadata, _ = read_tensors(path / "model.safetensors")
    tensors = {name: t.clone() for name, t in tensors.items()}
    values = json.loads(metadata.get(KEY, "{}")) | changes
    write_tensors(path / "model.safetensors", tensors, {KEY: json.dumps(values)})


def equal(module, tensors):
    state = module.state_dict()
    assert state.keys() == tensors.keys()
    return all(torch.equal(state[name], t) and state[name].dtype == t.dtype for name, t in tensors.items())


def stored(path, module, info=None):
    path.mkdir(exist_ok=True)
    state = {name: t.clone().contiguous() for name, t in module.state_dict().items()}
    write_tensors(path / "model.safetensors", state, (info or ModelInfo.of_module(module)).metadata())
    return state


LOAD = """
import torch, fedbcgd
from safetensors.torch import load_file
model = fedbcgd.load_model("run", trust={trust})
state, tensors = model.state_dict(), load_file("run/model.safetensors")
assert state.keys() == tensors.keys()
assert all(torch.equal(state[n], t) for n, t in tensors.items())
assert not any(m.training for m in model.modules())
print(type(model).__name__)
"""


def test_a_fresh_process_builds_the_model_of_a_run(tmp_path):
    tensors = run(tmp_path / "run", {"name": "lenet5", "width": 0.1})
    assert elsewhere(LOAD.format(trust=False), tmp_path) == "LeNet5\n"
    module = load_model(tmp_path / "run")
    assert equal(module, tensors)
    info = model_info(tmp_path / "run")
    assert (info.name, info.options, info.shape, info.classes) == ("lenet5", {"width": 0.1}, (1, 28, 28), 10)
    assert info.class_names[1] == "trouser"
    assert (info.precision, info.version) == ("fp32", fedbcgd.__version__)


@pytest.mark.parametrize("name", ["travel_nets:make", "travel_nets.py:make"])
def test_ones_own_factory_is_imported_with_trust_only(nets, name):
    run(nets / "run", {"name": name, "options": {"hidden": 5}})
    (nets / "imported").unlink()
    with pytest.raises(UserError, match=r"trained with travel_nets.*trust=True imports and runs it.*model=…"):
        load_model("run")
    assert not (nets / "imported").exists()
    assert elsewhere(LOAD.format(trust=True), nets) == "Sequential\n"


def test_a_factory_that_is_not_there_is_named(nets, tmp_path_factory, monkeypatch):
    tensors = run(nets / "run", {"name": "travel_nets.py:make"})
    module = fedbcgd.models.make.make_model("travel_nets.py:make", (1, 28, 28), 10).module
    monkeypatch.chdir(tmp_path_factory.mktemp("other"))
    with pytest.raises(
        UserError, match=r"travel_nets.py, which does not exist; load it from a folder where .* or pass"
    ):
        load_model(nets / "run", trust=True)
    assert load_model(nets / "run", model=module) is module
    assert equal(module, tensors)


def test_transformers_models_need_no_folder(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "patch_size": 14, **small}
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_size": 28, "num_channels": 1}))
    monkeypatch.chdir(tmp_path)
    tensors = run(tmp_path / "run", {"name": "hf:."})
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="hf:ViTForImageClassification, which is not part of fedbcgd"):
        load_model("run")
    module = load_model("run", trust=True)
    assert equal(module, tensors)
    assert module.config.num_labels == 10
    assert equal(load_model("run", model=type(module)(module.config)), tensors)
    kept = stored(tmp_path / "python", module)  # as from Python
    assert equal(load_model("python", trust=True), kept)
    altered(tmp_path / "run", config={**model_info("run").config, "architectures": ["pipeline"]})
    with pytest.raises(UserError, match="expected an architecture of transformers"):
        load_model("run", trust=True)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit-base"])
def test_every_model_of_the_package_says_how_it_was_made(tmp_path, name):
    options = OPTIONS.get(name, {})
    shape, classes = (3, 32, 32), 2 if name.startswith("binary") else 7
    module = MODELS[name](classes, shape, **options)
    info = ModelInfo.of_module(module)
    assert (info.name, info.shape, info.classes) == (name, shape, classes)
    assert info.options.items() >= options.items()
    state = stored(tmp_path, module)
    assert equal(load_model(tmp_path), state)


def test_heads_do_not_show_in_the_shapes_and_are_kept_all_the_same(tmp_path):
    module = ViTSmall(3, (3, 32, 32), dim=8, depth=1, heads=4).eval()
    stored(tmp_path, module)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(x), module(x))


def test_a_class_of_ones_own_keeps_its_arguments_in_attributes(nets):
    from travel_nets import Net  # type: ignore[import-not-found]

    module = Net(4, hidden=2).double()
    assert ModelInfo.of_module(module).options == {"inputs": 4, "hidden": 2}
    state = stored(nets / "run", module)
    assert state["a.weight"].dtype == torch.float64
    assert equal(load_model("run", trust=True), state)
    del module.hidden  # it has a default, but the module may have been made with another value
    assert ModelInfo.of_module(module).name is None


def test_a_module_without_a_name_is_loaded_into_its_like(tmp_path):
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = stored(tmp_path, module)
    with pytest.raises(UserError, match=r"does not say how to build its Sequential again; pass a module .*model=…"):
        load_model(tmp_path, trust=True)
    fresh = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert equal(load_model(tmp_path, model=fresh), state)
    with pytest.raises(UserError, match=r"expected weights of Linear, got others: .* is missing"):
        load_model(tmp_path, model=nn.Linear(2, 3))


def test_tied_weights_stay_tied(tmp_path):
    def tied():
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        net[1].weight = net[0].weight
        return net

    state = stored(tmp_path, tied())
    loaded = load_model(tmp_path, model=tied().double())
    assert loaded[0].weight is loaded[1].weight
    assert equal(loaded, state)


def test_quadratics(tmp_path):
    raw = {"data": {"name": "quadratics", "clients": 4}, "model": {"name": "point"}, "run": {"rounds": 1, "cohort": 2}}
    execute(configuration.check(raw | {"quadratics": {"dim": 6}}, "test"), tmp_path, figures=False)
    module = load_model(tmp_path)
    assert isinstance(module, Point)
    assert equal(module, load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("data", [{}, {"resize": 20, "crop": 16}])
def test_images_are_prepared_to_the_bits_of_the_run(tmp_path, data):
    raw = {"model": {"name": "logistic"}, "data": data, "run": {"rounds": 1}}
    experiment = make_experiment(configuration.check(raw, "test"))
    rows = torch.arange(5)
    expected, _ = experiment.test.gather(rows, None)
    pixels = experiment.test.images[experiment.test.positions[rows]]
    assert torch.equal(experiment.info.prepare(pixels), expected)
    with pytest.raises(UserError, match=r"images: expected uint8 \(n, 1, height, width\), got torch.float32"):
        experiment.info.prepare(pixels.float())
    with pytest.raises(UserError, match="was not trained on images of a data set"):
        ModelInfo().prepare(pixels)


def test_secrets_among_the_options_are_masked(nets):
    source = (nets / "travel_nets.py").read_text()
    (nets / "travel_nets.py").write_text(source.replace("hidden=4)", "hidden=4, hub_token='')"))
    run(nets / "run", {"name": "travel_nets:make", "options": {"hub_token": "hunter2"}})
    assert b"hunter2" not in (nets / "run" / "model.safetensors").read_bytes()


def test_files_of_earlier_versions_take_a_module(tmp_path):
    module = LeNet5(10, (1, 28, 28), 0.1)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="does not say how to build its module"):
        load_model(tmp_path)
    assert equal(load_model(tmp_path, model=LeNet5(10, (1, 28, 28), 0.1)), module.state_dict())


def test_what_is_not_there_or_no_file(tmp_path):
    with pytest.raises(UserError, match=r"model.safetensors does not exist: a run writes it when it is finished"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="expected a regular file, got a link"):
        load_model(tmp_path)


HOSTILE = {
    "an import": ({"name": "os:system", "options": {"command": "touch imported"}}, "os:system, which is not part"),
    "no model": ({"name": "evil"}, "evil, which is not part"),
    "too wide": ({"options": {"width": 1e9}}, "expected options of at most 4096"),
    "too large": ({"options": {"width": 16}}, "expected weights of LeNet5, got others"),
    "another shape": ({"shape": [3, 4096, 4096]}, "expected weights of LeNet5, got others"),
    "too many classes": ({"classes": 1 << 24}, "expected weights of LeNet5, got others"),
    "classes beyond": ({"classes": 1 << 60}, "is damaged: classes"),
    "negative": ({"shape": [1, -28, 28]}, "images of at least"),
    "a wrong type": ({"options": {"width": [1]}}, "is damaged: its options build no lenet5"),
    "an unknown option": ({"options": {"device": "cuda"}}, "expected an option of lenet5"),
    "another form": ({"shape": "1,28,28"}, "is damaged: shape"),
    "a wrong input": ({"inputs": {"": ["load", [1]]}}, "is damaged: inputs"),
}


@pytest.mark.parametrize(("changes", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_neither_import_nor_fill_memory(nets, changes, message):
    stored(nets / "run", LeNet5(10, (1, 28, 28), 0.1))
    altered(nets / "run", **changes)
    before = set(sys.modules)
    with pytest.raises(UserError, match=message):
        load_model("run")
    assert not (nets / "imported").exists()
    assert "evil" not in set(sys.modules) - before


def test_nested_and_cut_metadata_is_damaged(tmp_path):
    module = LeNet5(10, (1, 28, 28), 0.1)
    for text in ("[" * 100_000, '{"options": ' * 50_000, '{"name": "lenet5"', "7"):
        write_tensors(tmp_path / "model.safetensors", module.state_dict(), {KEY: text})
        with pytest.raises(UserError, match="is damaged"):
            load_model(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-3])
    with pytest.raises(UserError, match="is damaged"):
        load_model(tmp_path)
