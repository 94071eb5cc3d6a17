"""Models by name: of the package, a user's factory, a transformers configuration; and adapters."""

import json
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedbcgd import UserError, divide, simulate
from fedbcgd.models import MODELS
from fedbcgd.models.make import make_model

FACTORY = """
    import torch
    from torch import nn

    def make(classes, shape, hidden=4):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], hidden), nn.Linear(hidden, classes))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * 2

    def with_loss(classes, shape):
        return make(classes, shape), loss

    ready = nn.Linear(2, 2)
    number = 7

    def broken():
        raise RuntimeError("no such layer")

    class Space:
        net = ready
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a user's module, as the current one."""
    (tmp_path / "user_nets.py").write_text(textwrap.dedent(FACTORY))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("user_nets", None)


@pytest.mark.parametrize("name", ["user_nets:make", "user_nets.py:make"])
def test_a_factory_gets_what_it_asks_for(here, name):
    net = make_model(name, (1, 2, 3), 5, options={"hidden": 7}).module
    assert [tuple(p.shape) for p in net.parameters()] == [(7, 6), (7,), (5, 7), (5,)]


def test_a_factory_may_bring_a_loss(here):
    built = make_model("user_nets:with_loss", (1, 1, 2), 2)
    batch = torch.zeros(1, 1, 1, 2), torch.tensor([0])
    plain = nn.functional.cross_entropy(built.module(batch[0]), batch[1])
    assert torch.equal(built.loss(built.module, batch), 2 * plain)


def test_a_name_may_be_that_of_a_module(here):
    assert isinstance(make_model("user_nets:ready").module, nn.Linear)
    assert isinstance(make_model("user_nets:Space.net").module, nn.Linear)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nowhere:make", {}, "got 'nowhere'"),
        ("nowhere.py:make", {}, "got nowhere.py, which does not exist"),
        ("user_nets:nothing", {}, "got 'nothing'"),
        ("user_nets:number", {}, "to return an nn.Module.*got int"),
        ("user_nets:make", {"hiden": 3}, "hiden: expected an argument of.*hidden"),
        ("user_nets:broken", {}, "RuntimeError: no such layer"),
        ("user_nets:", {}, "module:attribute"),
        ("lenet", {}, "Did you mean 'lenet5'"),
        ("lenet5", {"norm": "group"}, "norm: expected an option of lenet5"),
        ("vit-small", {"width": 0.5}, "width: expected an option of vit-small"),
        ("binary-logistic", {}, "classes: expected 2 for BinaryLogistic, got 10"),
    ],
)
def test_mistakes(here, name, options, message):
    with pytest.raises(UserError, match=message):
        make_model(name, (3, 32, 32), 10, options=options)


def test_a_module_that_cannot_be_imported_says_why(here):
    (here / "needs_more.py").write_text("import not_installed_at_all\n")
    with pytest.raises(UserError, match="not_installed_at_all"):
        make_model("needs_more:make")


def test_the_seed_draws_the_weights():
    one, same, other = (make_model("lenet5", (3, 32, 32), seed=s, options={"width": 0.1}).module for s in (0, 0, 1))
    assert torch.equal(one.conv1.weight, same.conv1.weight)
    assert not torch.equal(one.conv1.weight, other.conv1.weight)


def test_starting_from_a_file_of_ones_own(tmp_path):
    first = make_model("lenet5", (3, 32, 32), seed=1, options={"width": 0.1}).module
    save_file(first.state_dict(), tmp_path / "model.safetensors")
    built = make_model(
        "lenet5", (3, 32, 32), seed=2, weights=str(tmp_path / "model.safetensors"), options={"width": 0.1}
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), built.module.parameters(), strict=True))
    assert "model.safetensors" in built.notes[0]
    with pytest.raises(UserError, match=r"conv1.weight is 6×3×5×5 in the file, 12×3×5×5 in the model"):
        make_model("lenet5", (3, 32, 32), weights=str(tmp_path / "model.safetensors"), options={"width": 0.2})
    with pytest.raises(UserError, match=r"model\.weights"):
        make_model("lenet5", (3, 32, 32), weights=str(tmp_path / "absent.safetensors"))


def test_pretrained_notes_are_passed_on(tmp_path):
    first = MODELS["vit-small"](10, (3, 32, 32))
    save_file({**first.state_dict(), "extra": torch.zeros(1)}, tmp_path / "vit.safetensors")
    built = make_model("vit-small", (3, 32, 32), 7, weights=str(tmp_path / "vit.safetensors"))
    assert any("extra" in note for note in built.notes)
    assert torch.equal(built.module.pos_embed, first.pos_embed)


class Adapter(nn.Module):
    """A frozen layer with a low-rank path beside it, as in LoRA."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer
        for p in layer.parameters():
            p.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / 10)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


def test_only_what_is_trained_is_counted_and_sent():
    torch.manual_seed(0)
    model = nn.Sequential(Adapter(nn.Linear(20, 30)), nn.ReLU(), Adapter(nn.Linear(30, 3)))
    trained = 2 * (20 + 30) + 2 * (30 + 3)
    assert divide(model, 2, "even", "none").dim == trained
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(8, 20, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(4)]
    result = simulate(model, clients, "fedavg", rounds=2, cohort=4, workers=0, lr=0.5)
    assert result.ledger.upload_bytes == 2 * 4 * trained * 4
    assert torch.equal(result.module[0].layer.weight, model[0].layer.weight)
    assert not torch.equal(result.module[0].up, model[0].up)


VIT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 8}


@pytest.fixture
def config_folder(tmp_path):
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "patch_size": 4, **VIT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_transformers_model_from_a_local_configuration(config_folder):
    built = make_model(f"hf:{config_folder}", (3, 8, 8), 5, seed=3)
    assert built.module.config.num_labels == 5
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(4, 3, 8, 8, generator=g), torch.randint(5, (4,), generator=g)) for _ in range(3)]
    result = simulate(built.module, clients, rounds=1, blocks=3, cohort=3, workers=0, test=clients[0])
    assert result.ledger.refused == 0
    assert 0 <= result.final["test_accuracy"] <= 1


def test_lora_adapters_from_peft_are_all_that_is_sent(config_folder):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = make_model(f"hf:{config_folder}", (3, 8, 8), 5).module
    names = [n for n, m in base.named_modules() if isinstance(m, nn.Linear)]
    targets = [n for n in names if "classifier" not in n]
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(4, 3, 8, 8, generator=g), torch.randint(5, (4,), generator=g)) for _ in range(2)]
    result = simulate(model, clients, "fedavg", rounds=1, cohort=2, workers=0)
    assert result.ledger.dim == trained < sum(p.numel() for p in model.parameters()) / 4


def test_a_folder_without_a_configuration(tmp_path):
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    with pytest.raises(UserError, match=r"config\.json"):
        make_model(f"hf:{tmp_path}")
