"""The items against what the paper prints, read off its pages."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import inf

import pytest

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.paper import costs, plan, search
from fedbcgd.paper import printed as paper
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.reductions import _NAMES, reductions
from fedbcgd.paper.spec import Printed

NETWORKS = [
    (item, panel)
    for item in ("table2", "table3", "table4", "table6", "figure4", "figure5", "figure7")
    for panel in ITEMS[item].panels["paper"]
]


def panel(item, key, scale="paper"):
    return next(p for p in ITEMS[item].panels[scale] if p.key == key)


@pytest.mark.parametrize(("item", "panel"), NETWORKS, ids=lambda v: getattr(v, "key", v))
def test_networks_have_the_settings_of_appendix_f(item, panel):
    assert panel.data["clients"] == 100
    assert panel.run["cohort"] == 10
    assert panel.data["augment"] is True
    assert panel.data["dirichlet"] == (0.1 if item == "table4" else 0.6)
    assert panel.budget == (200 if item in ("table6", "figure4") else 1000)
    expected = {"local_epochs": 5, "batch_size": 50, "lr_decay": 0.998, "weight_decay": 0.001}
    assert dict(panel.local) == expected
    assert panel.effort.grid == {
        "lr": (0.01, 0.03, 0.05, 0.1, 0.2, 0.3),
        "momentum": (0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    }


def test_the_transformer():
    one, two = ITEMS["table5"].panels["paper"]
    assert (one.data["name"], two.data["name"]) == ("cifar100", "tiny-imagenet")
    assert two.data["resize"] == 256
    assert two.data["crop"] == 224
    for p in (one, two):
        assert (p.local["batch_size"], p.local["local_epochs"], p.budget, p.data["dirichlet"]) == (16, 1, 100, 0.6)
        assert p.contender("fedbcgd").algorithm["blocks"] == 6


def test_logistic_regression():
    p = panel("figure8", "logistic")
    assert (p.data["name"], p.data["dirichlet"], p.local["local_epochs"]) == ("emnist-byclass", 0.1, 1)
    assert p.contender("fedbcgd").algorithm["blocks"] == 5
    assert p.local["weight_decay"] == pytest.approx(1e-4 * 55.1)
    assert panel("appendix-erm", "erm").model["name"] == "binary-sigmoid"


@pytest.mark.parametrize(
    ("item", "key", "contender", "printed", "target"),
    [
        ("table2", "cifar100-lenet5", "fedavg", Printed(41.2, 0.2, 558), 40),
        ("table2", "cifar100-resnet18", "fedbcgd+", Printed(65.1, 1.8, 154), 54),
        ("table2", "cifar100-vgg11", "scaffold", Printed(47.9, 0.2, inf), 48),
        ("table3", "cifar10-lenet5", "fedbcgd", Printed(84.7, 0.7, 249), 78),
        ("table3", "cifar10-resnet18", "feddc", Printed(88.0, 0.6, 1985), 88),
        ("table3", "cifar10-vgg19", "central", Printed(88.6, 0.1), 84),
        ("table4", "cifar100-resnet18", "fedbcgd", Printed(59.5, 0.3, 147), 45),
        ("table4", "cifar10-resnet18", "fedbcgd+", Printed(80.2, 1.3, 768), 78),
        ("table5", "tiny-imagenet-vit", "fedbcgd", Printed(83.5, 0.2, 5.8), 70),
        ("table5", "cifar100-vit", "scaffold", Printed(88.2, 0.3, 88), 88),
        ("table6", "cifar100-lenet5", "qsgd+fedbcgd+", Printed(53.1, 0.2, 56), 40),
        ("table6", "cifar10-lenet5", "topk", Printed(74.5, 0.4, 92), 70),
    ],
)
def test_printed_numbers(item, key, contender, printed, target):
    p = panel(item, key)
    assert p.printed[contender] == printed
    assert p.target == target


def test_every_printed_number_has_a_contender():
    for item in ITEMS.values():
        for p in item.panels["paper"]:
            assert set(p.printed) <= {c.key for c in p.contenders}, item.name


def test_numbers_of_blocks_and_momenta():
    blocks = [
        make_algorithm(**c.algorithm).options().get("blocks", 1) for c in ITEMS["figure4"].panels["paper"][0].contenders
    ]
    assert blocks == [1, 2, 5, 10, 20]
    assert [c.algorithm["momentum"] for c in ITEMS["figure7"].panels["paper"][0].contenders] == list(paper.MOMENTA)


def test_the_ablations_are_five_and_only_the_last_has_momentum():
    algorithms = {c.key: make_algorithm(**c.algorithm) for c in panel("figure5", "cifar10-lenet5").contenders}
    assert [a.local.__class__.__name__ for a in algorithms.values()] == ["Frozen", "Frozen", "SGD", "SGD", "SGD"]
    assert [a.uplink.shared == "none" for a in algorithms.values()] == [True, False, True, False, False]
    assert [a.server.momentum == 0 for a in algorithms.values()] == [True, True, True, True, False]


@pytest.mark.parametrize("item", ITEMS.values(), ids=lambda i: i.name)
def test_a_miniature_keeps_clients_cohort_heterogeneity_blocks_and_augmentation(item):
    paper_panels = {p.key: p for p in item.panels["paper"]}
    for small in item.panels["cpu"]:
        big = paper_panels.get(small.key, item.panels["paper"][0])
        for name in ("clients", "dirichlet", "augment"):
            assert small.data.get(name) == big.data.get(name)
        assert small.run["cohort"] == big.run["cohort"]
        if small.model["name"] == big.model["name"]:
            assert [c.algorithm.get("blocks") for c in small.contenders if c.algorithm.get("blocks")] == [
                c.algorithm["blocks"] for c in big.contenders if c.algorithm.get("blocks")
            ]


def differing(big, small, where=""):
    """Every field of two descriptions that differs, by its name."""
    if is_dataclass(big):
        big, small = ({f.name: getattr(x, f.name) for f in fields(x)} for x in (big, small))
    if isinstance(big, Mapping) and isinstance(small, Mapping):
        return [
            name
            for key in {**big, **small}
            for name in differing(big.get(key), small.get(key), f"{where}.{key}" if where else key)
        ]
    return [where] if big != small else []


@pytest.mark.parametrize("scale", ["desk", "cpu", "smoke"])
@pytest.mark.parametrize("item", [i for i in ITEMS.values() if i.panels["cpu"]], ids=lambda i: i.name)
def test_every_reduction_is_stated(item, scale):
    """Every field of a panel that is not the paper's has its words, but titles, keys and what is no part of a setting."""
    unstated = {"key", "title", "printed", "contenders", "run.workers"}
    for small in item.panels[scale]:
        big = next((p for p in item.panels["paper"] if p.key == small.key), item.panels["paper"][0])
        text = "\n".join(reductions(item, [small]))
        for name in differing(big, small):
            searched = {f"effort.grid.{option}" for contender in small.contenders for option in contender.grid}
            if name not in unstated and not (name.startswith("effort.grid.") and name not in searched):
                assert f"{_NAMES.get(name.replace('effort.grid', 'effort'), name)}: " in text, name
        own = {c.key: c.algorithm for c in big.contenders}
        for contender in small.contenders:
            if contender.key not in own:
                (line,) = (line for line in text.splitlines() if line.endswith("which the paper does not have"))
                assert contender.title in line
            for name in differing(own.get(contender.key, contender.algorithm), contender.algorithm):
                assert f"{_NAMES.get(name, name)}: " in text, (contender.key, name)
        for contender in big.contenders:
            assert contender.key in {c.key for c in small.contenders} or f"without {contender.title}" in text
    assert reductions(item, list(item.panels["paper"])) == []


def test_fewer_blocks_are_stated():
    """ResNet-18 has five in Figure 7, LeNet-5 four."""
    assert "blocks N: 5 → 4" in reductions(ITEMS["figure7"], list(ITEMS["figure7"].panels["cpu"]))


def test_the_number_of_seeds_is_what_was_run():
    (small,) = ITEMS["figure7"].panels["cpu"]
    assert "seeds: 3 → 1 to 2" in reductions(ITEMS["figure7"], [small], {small.key: "1 to 2"})
    assert not any("seeds" in line for line in reductions(ITEMS["figure7"], [small], {small.key: "3"}))


def test_what_the_small_transformer_leaves_out_is_stated():
    lines = reductions(ITEMS["table5"], list(ITEMS["table5"].panels["cpu"]))
    assert "left out: ViT-Base, Tiny ImageNet" in lines
    assert any("pretrained weights: google/vit-base-patch16-224-in21k → none" in line for line in lines)


def test_equal_effort_at_cpu_scale():
    """Three learning rates for each that is tuned, and no more for ours."""
    for item in ITEMS.values():
        for p in item.panels["cpu"]:
            assert {len(search.candidates(p, c)) for c in p.contenders if c.tuned_as is None} == {3}


def test_at_paper_scale_momenta_are_searched_where_there_is_a_momentum():
    p = panel("table3", "cifar10-lenet5")
    tried = {c.key: len(search.candidates(p, c)) for c in p.contenders}
    assert tried["fedavg"] == tried["scaffold-derived"] == 6
    assert tried["fedbcgd"] == tried["fedbcgd+"] == tried["fedavgm"] == 36


def test_both_forms_of_scaffold_get_one_search():
    p = panel("table3", "cifar10-lenet5")
    assert search.candidates(p, p.contender("scaffold")) == []
    assert p.contender("scaffold").tuned_as == "scaffold-derived"


def test_costs_are_in_their_order(monkeypatch):
    by_pixels = {"binary-logistic": 1e-5, "binary-sigmoid": 1e-5, "vit-base": 1.0, "resnet18": 3e-2}
    monkeypatch.setattr(
        costs,
        "seconds_per_example",
        lambda panel, machine: by_pixels.get(panel.model["name"], 1e-3) * panel.model.get("width", 1.0) ** 2,
    )
    for item in ITEMS.values():
        if not item.panels["cpu"]:
            continue  # Table 1 is theory
        hours = {scale: costs.cost(item, scale).hours for scale in ("paper", "cpu", "smoke")}
        assert hours["paper"] > hours["cpu"] > hours["smoke"]
    minutes = costs.cost(ITEMS["figure8"], "cpu").hours * 60
    assert 1 < minutes < 45


@pytest.mark.parametrize("scale", ["desk", "cpu", "smoke"])
@pytest.mark.parametrize("item", ITEMS.values(), ids=lambda i: i.name)
def test_every_run_of_a_small_scale_is_a_valid_configuration_of_a_model_that_can_be_divided(item, scale):
    for p in item.panels[scale]:
        chosen = {c.key: {"lr": 0.1, "momentum": 0.5} for c in p.contenders}
        planned = plan.seed_runs(p, chosen, 1, plan.Machine())
        assert len(planned) == len(p.contenders)
        assert len({run.folder for _, run in planned}) == len(planned)
        assert all(run.config.run.cohort == 10 for _, run in planned)


@pytest.mark.parametrize("item", ITEMS.values(), ids=lambda i: i.name)
def test_every_run_of_the_papers_scale_is_a_valid_configuration(item, monkeypatch):
    monkeypatch.setattr(plan, "count_rounds", lambda panel, contender: 1000)  # whole networks need not be made
    for p in item.panels["paper"]:
        chosen = {c.key: {"lr": 0.1, "momentum": 0.5} for c in p.contenders}
        for contender, run in plan.seed_runs(p, chosen, 1, plan.Machine()):
            assert run.config.data.clients == 100
            assert run.config.algorithm["lr"] == 0.1
            assert run.config.run.budget == (None if contender.rounds_of else p.budget)


def test_what_a_budget_pays_for():
    """LeNet-5 at a quarter of its width: 51,274 parameters, 490 of them shared, so four blocks are (d − 490)/4 + 490 each on
    average: 0.2572 d, and 20 d pay for 77 rounds. FedAvg has 20, SCAFFOLD 10, FedBCGD+ half of FedBCGD's."""
    p = panel("table3", "cifar10-lenet5", "cpu")
    rounds = {c.key: plan.count_rounds(p, c) for c in p.contenders}
    assert plan.upload_per_round(p, p.contender("fedbcgd")) == pytest.approx(((51_274 - 490) / 4 + 490) / 51_274)
    assert rounds["fedavg"] == rounds["scaffold-derived"] == 20
    assert rounds["scaffold"] == 10
    assert (rounds["fedbcgd"], rounds["fedbcgd+"]) == (77, 38)
