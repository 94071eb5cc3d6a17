"""precision = "bf16": what is computed in bfloat16, what is not, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedbcgd
from fedbcgd import UserError, algorithm_names, simulate
from fedbcgd.core.objective import objective
from fedbcgd.models import Logistic
from fedbcgd.models.binary import BinaryLogistic


def parameters(result):
    return torch.cat([p.detach().flatten() for p in result.module.parameters()])


@pytest.mark.parametrize("name", [n for n in algorithm_names() if n != "fedbcgd-matched"])
def test_every_gradient_of_every_algorithm_is_computed_in_bfloat16(net, toys, name, monkeypatch):
    """So are both gradients of ζ in FedBCGD+. What is uploaded, summed and kept stays in float32."""
    monkeypatch.setattr("fedbcgd.runs.prepare.warn_if_slower", lambda *_: None)  # it computes in float32 too
    trained, measured = set(), set()

    def loss(model, batch):
        logits = model(batch[0])
        trained.add(logits.dtype)
        return F.cross_entropy(logits, batch[1])

    def metrics(model, batch):
        logits = model(batch[0])
        measured.add(logits.dtype)
        return {"loss": F.cross_entropy(logits, batch[1])}

    kept = []
    result = simulate(
        net(), toys(), name, rounds=2, cohort=4, workers=0, batch_size=3, precision="bf16", test=toys()[0],
        loss=loss, metrics=metrics, callbacks=[lambda info: kept.extend(info.server.snapshot()[0].values())],
    )  # fmt: skip
    assert trained == {torch.bfloat16}
    assert measured == {torch.bfloat16}
    assert {t.dtype for t in (*kept, *result.module.parameters())} == {torch.float32}


def test_steps_that_bfloat16_could_not_hold_are_taken():
    """η·∇ = 1e-4·∇ at parameters of size 1: below the resolution of bfloat16, which is 2⁻⁸ there."""

    def model():
        linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(linear.weight)
        return linear

    clients = [(torch.ones(4, 1), torch.zeros(4, 1))]
    options = {
        "loss": F.mse_loss,
        "rounds": 5,
        "lr": 1e-4,
        "local_epochs": 1,
        "batch_size": 4,
        "workers": 0,
        "precision": "bf16",
    }
    moved = simulate(model(), clients, "fedavg", **options).module.weight.item()
    assert moved == pytest.approx((1 - 2e-4) ** 5, abs=1e-5)


def test_within_a_callers_autocast_each_step_has_its_own_weights(net, toys):
    """PyTorch keeps the bfloat16 copies of weights until the outermost autocast ends."""
    options = {"rounds": 2, "workers": 0, "batch_size": 2, "lr": 0.2, "precision": "bf16"}
    alone = simulate(net(), toys(), "fedavg", **options)
    with torch.autocast("cpu", torch.bfloat16):
        within = simulate(net(), toys(), "fedavg", **options)
    assert torch.equal(parameters(within), parameters(alone))


def test_the_loss_of_binary_models_is_computed_in_float32():
    goal = objective(BinaryLogistic.own_loss, BinaryLogistic.own_metrics, "bf16")
    model, batch = BinaryLogistic(shape=(1, 2, 2)), (torch.ones(3, 1, 2, 2), torch.ones(3))
    assert goal.loss(model, batch).dtype == torch.float32
    assert goal.metrics(model, batch)["loss"].dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "words"),
    [(torch.float64, "torch.float64"), (torch.bfloat16, "torch.bfloat16"), (torch.float16, "float16")],
)
def test_a_model_of_another_type_is_refused(net, toys, dtype, words):
    with pytest.raises(UserError, match=rf"precision: expected 'fp32' for a model of .*{words}.*model\.float\(\)"):
        simulate(net().to(dtype), toys(), "fedavg", rounds=1, precision="bf16")


def test_another_precision_is_refused(net, toys):
    with pytest.raises(UserError, match="precision: expected 'fp32' or 'bf16', got 'fp16'"):
        simulate(net(), toys(), "fedavg", rounds=1, precision="fp16")


def test_batched_clients_are_refused():
    clients = [(torch.zeros(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64))] * 4
    with pytest.raises(UserError, match=r'batch_clients: .* has no autocast, which precision = "bf16" needs'):
        simulate(Logistic(2, (1, 2, 2)), clients, "fedavg", rounds=1, precision="bf16", batch_clients=2)


def test_it_is_a_setting_of_a_configuration():
    from fedbcgd.runs import config

    assert config.check({"run": {"rounds": 1}}, "test").run.precision == "fp32"
    assert config.check({"run": {"rounds": 1, "precision": "bf16"}}, "test").run.precision == "bf16"
    with pytest.raises(UserError, match=r"run\.precision: .*'fp32' or 'bf16'"):
        config.check({"run": {"rounds": 1, "precision": "fp16"}}, "test")


def test_the_default_is_fp32(net, toys):
    plain, named = (
        simulate(net(), toys(), "fedbcgd", rounds=1, workers=0, blocks=2, **more)
        for more in ({}, {"precision": "fp32"})
    )
    assert torch.equal(parameters(plain), parameters(named))
    assert fedbcgd.core.objective.objective().precision == "fp32"
