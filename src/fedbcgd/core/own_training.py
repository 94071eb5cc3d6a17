"""Training by a user's own function, `train(model, data, config)`, instead of a local rule's steps.

The function gets a copy of the model with the values of the broadcast and may do anything with it. Its parameters and
buffers are then read back by name. The copy is dropped, and with it all hooks, flags and modes that the function has set.

A rule that needs only y − x takes any training. A rule that corrects gradients does so in the optimiser that
`config.optimizer(…)` makes, before each step. With such a rule the training is refused if anything else moved the model,
since the client's control variates would then be wrong.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.corrections import Corrections, Refusal, needs
from fedbcgd.core.generators import generators_restored, seed_generators
from fedbcgd.core.messages import Task
from fedbcgd.core.objective import Objective
from fedbcgd.core.reading import LONGEST_NAME, MOST_TRAIN_METRICS
from fedbcgd.core.vector import FlatModel
from fedbcgd.core.work import Work
from fedbcgd.data.sources import examples_in
from fedbcgd.errors import UserError, call_users
from fedbcgd.rng import stream

Train = Callable[[nn.Module, Any, "TrainConfig"], Any]

EXAMPLES = "num-examples"  # the metric that says on how many examples a client trained, as in Flower's apps
# For `Conditions.likely_cause`: the function may step with a learning rate of its own.
LIKELY_CAUSE = "a learning rate that is too high in the clients' own training; another one is NaN in the data"


@dataclass(frozen=True)
class TrainConfig:
    """What a training function gets to know about its task, as the third argument of `train(model, data, config)`.

    `config["name"]` and `config.get("name", default)` read the values that came with the task (on Flower, those of
    `train_config`). A name that is not among them is looked up among the attributes.

    Attributes:
        round: the number of the round, from 1.
        client: the index of the client, from 0.
        seed: the seed of this client in this round; the generators of torch, numpy and random were seeded with it.
        lr: the algorithm's learning rate of this round.
        weight_decay: the algorithm's weight decay.
        local_epochs: passes over the data that the algorithm asks for.
        local_steps: steps that the algorithm asks for instead of epochs; None: it asks for epochs.
        batch_size: examples of a minibatch.
        device: where the model is.
        values: the values that came with the task.
    """

    round: int
    client: int
    seed: int
    lr: float
    weight_decay: float
    local_epochs: int
    local_steps: int | None
    batch_size: int
    device: torch.device
    values: Mapping[str, Any] = field(default_factory=dict)
    _attach: Callable[[Optimizer], None] = field(default=lambda optimizer: None, repr=False)

    def optimizer(self, params: Any, cls: type[Optimizer] = SGD, **options: Any) -> Optimizer:
        """Make an optimiser whose gradients are corrected as the algorithm asks, just before each step.

        Algorithms that correct gradients (SCAFFOLD, FedDC, FedProx, FedBCGD+ …) need it; with all others it is an ordinary
        optimiser.

        Args:
            params: as torch's optimisers take them, such as `model.parameters()`.
            cls: the class of the optimiser.
            **options: its options; by default `lr` and `weight_decay` are the algorithm's.

        Returns:
            The optimiser.
        """
        known = inspect.signature(cls).parameters
        defaults = {"lr": self.lr, "weight_decay": self.weight_decay}
        chosen = cls(params, **{name: value for name, value in defaults.items() if name in known} | options)
        self._attach(chosen)
        return chosen

    def __getitem__(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name in _PUBLIC:
            return getattr(self, name)
        raise KeyError(f"config has no {name!r}; it has {', '.join((*self.values, *_PUBLIC))}")

    def __contains__(self, name: object) -> bool:
        return name in self.values or name in _PUBLIC

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value by its name, or the default."""
        try:
            return self[name]
        except KeyError:
            return default


_PUBLIC = tuple(f.name for f in fields(TrainConfig) if f.name != "values" and not f.name.startswith("_"))


@dataclass(frozen=True)
class Trained:
    """What is known of a client's training, beside the model.

    Attributes:
        examples: n_i, on how many examples the client trained.
        loss: the mean over the training; None: not known.
        metrics: further metrics, by name.
    """

    examples: int
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


def check_own_training(train: Any, algorithm: Algorithm) -> None:
    """Check that a training function can be used with an algorithm.

    Args:
        train: the function.
        algorithm: the algorithm.

    Raises:
        UserError: it is not callable, or the algorithm has options that only its own steps can honour.
    """
    if not callable(train):
        raise UserError(f"train: expected a function of (model, data, config), got {train!r}")
    rule = algorithm.local
    if needs(rule) == "refused":
        raise UserError(
            f"train: expected a local rule that says how another function takes its steps (LocalRule.own_training), got "
            f"{rule.registered_name()!r}; leave train out, or take another algorithm"
        )
    if algorithm.uplink.pooled:
        raise UserError(
            f"train: expected none with {algorithm.name}, which trains on the data of all clients at once; leave it out"
        )
    for option, advice in options_of_own_steps(algorithm):
        raise UserError(f"{option}: expected none together with train, got {getattr(rule, option)}: {advice}")


def options_of_own_steps(algorithm: Algorithm) -> list[tuple[str, str]]:
    """Return the options that only the algorithm's own steps can honour, if they are set, and what to do instead."""
    advice = {
        "clip_norm": "clip in the function, before optimizer.step()",
        "client_momentum": "give your optimiser its momentum",
    }
    return [(option, what) for option, what in advice.items() if getattr(algorithm.local, option, None)]


def training_seed(seed: int, task: Task) -> int:
    """Return the seed of the global generators while this client trains by a user's code."""
    return int(stream(seed, "train", task.round, task.client).integers(2**32))


class OwnTraining:
    """Trains clients by a user's function, for `Client.fit`.

    Args:
        train: the function.
        algorithm: the algorithm whose local rule the function replaces.
        model: holds the broadcast model x before the training, and the trained model y after it.
        objective: what is minimised; for rules that need the full gradient.
        seed: the seed of the run.

    Raises:
        UserError: see `check_own_training`.
    """

    def __init__(self, train: Train, algorithm: Algorithm, model: FlatModel, objective: Objective, seed: int):
        check_own_training(train, algorithm)
        self._train = train
        self._algorithm = algorithm
        self._model = model
        self._objective = objective
        self._seed = seed

    def run(self, work: Work, task: Task, data: Any, values: Mapping[str, Any]) -> Trained:
        """Train one client: move work.y, and count its steps.

        Args:
            work: the client's work; its model has the values of the broadcast.
            task: which client, and which round.
            data: the data that the user gave for this client.
            values: the values that came with the task.

        Raises:
            UserError: what the function did cannot be uploaded; the message says why.
        """
        rule, module = self._algorithm.local, self._copy()
        seed = training_seed(self._seed, task)
        refuse = Refusal(self._algorithm.name, task)
        corrections = None
        if needs(rule) != "free":
            corrections = Corrections(rule, work, self._model, module, self._objective, data, refuse)
        config = TrainConfig(
            task.round + 1,
            task.client,
            seed,
            work.eta,
            rule.weight_decay,
            rule.local_epochs,
            rule.local_steps,
            rule.batch_size,
            work.y.device,
            dict(values),
            *([corrections.attach] if corrections is not None else []),
        )
        count = 0

        def stepped(*step: Any) -> None:
            nonlocal count
            count += 1

        counting = register_optimizer_step_post_hook(stepped)
        try:
            with generators_restored():
                seed_generators(seed, data)
                returned = call_users(self._train, module, data, config)
        finally:
            counting.remove()
            if corrections is not None:
                corrections.detach()
        self._read(module, refuse)
        work.steps, work.evaluations = max(1, count), count
        if corrections is not None:
            corrections.finish()
        return _read_result(returned, data, refuse)

    def _copy(self) -> nn.Module:
        """Return a copy of the model in memory of its own."""
        # A view is copied with all the memory behind it, which is the whole vector: buffers are copied beforehand.
        module = self._model.module
        return copy.deepcopy(module, {id(b): b.detach().clone() for b in module.buffers()})

    def _read(self, module: nn.Module, refuse: Refusal) -> None:
        """Read parameters and buffers back into the vector, by their names."""
        layout = self._model.layout
        views, buffers = layout.views(self._model.vector), {e.name for e in layout.buffers}
        before, after = _tensors(self._model.module, buffers), _tensors(module, buffers)
        if set(before) != set(after):
            lost, new = sorted(set(before) - set(after)), sorted(set(after) - set(before))
            refuse(
                "expected a model with the same parameters and buffers as before training"
                + (f", got one without {', '.join(lost[:3])}" if lost else ", got one")
                + (f" with {', '.join(new[:3])} besides" if new else "")
                + "; wrap the model as a whole (wrapped = DDP(model)) instead of changing its parts"
            )
        for name, value in after.items():
            if value.shape != before[name].shape:
                refuse(
                    f"expected {name!r} of shape {tuple(before[name].shape)}, as before training, got {tuple(value.shape)}"
                )
            if name in views:
                views[name].copy_(value.detach())
        for name, value in after.items():
            # Frozen parameters, and further names of tied ones, which were read under their first name.
            if name not in views and not _equal(before[name], value):
                refuse(
                    f"expected {name!r} as it was before training, since it is frozen or tied to another parameter and not "
                    "uploaded, got other values; leave it as it is, or let it require gradients in the model that you pass"
                )


def _tensors(module: nn.Module, buffers: set[str]) -> dict[str, Tensor]:
    """Return all parameters, tied ones under each of their names, and the buffers of these names."""
    sent = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in buffers}
    return dict(module.named_parameters(remove_duplicate=False)) | sent


def _equal(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach(), b.detach().to(a.device, a.dtype)
    return torch.equal(a, b) or bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _read_result(returned: Any, data: Any, refuse: Refusal) -> Trained:
    """Read what the function returned: a dictionary of metrics, a number for the loss, or None."""
    wanted = "expected a dictionary of numbers, a number for the loss, or None"
    if returned is None:
        returned = {}
    elif not isinstance(returned, Mapping):
        if (loss := _number(returned)) is None:
            refuse(f"{wanted} to be returned, got {type(returned).__name__}")
        returned = {"loss": loss}
    numbers: dict[str, float] = {}
    for name, value in returned.items():
        number = _number(value)
        if not isinstance(name, str) or number is None:
            refuse(f"{wanted} to be returned, got {name!r} of type {type(value).__name__}")
        numbers[name.removeprefix("train_")] = number
    examples = numbers.pop(EXAMPLES, None)
    if examples is None:
        examples = examples_in(data)
    if examples is None or not math.isfinite(examples) or examples < 1:
        found = "none" if examples is None else f"{examples:g}"
        refuse(
            f"{EXAMPLES}: expected the number of examples, n ≥ 1, got {found}; where the data does not tell it, return "
            f'{{"{EXAMPLES}": n}}'
        )
    loss = numbers.pop("loss", None)
    metrics = {name: value for name, value in numbers.items() if math.isfinite(value)}
    if len(metrics) > MOST_TRAIN_METRICS:
        refuse(f"expected at most {MOST_TRAIN_METRICS} metrics to be returned, got {len(metrics)}")
    for name in metrics:
        if not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
            refuse(f"expected names of metrics with 1 to {LONGEST_NAME} printable characters, got {name!r}")
    return Trained(int(examples), loss, metrics)


def _number(value: Any) -> float | None:
    """Return a number, or a tensor or array that holds just one, as a float; None for anything else."""
    try:
        if isinstance(value, (Tensor, np.ndarray)):
            return float(value.item()) if math.prod(value.shape) == 1 else None
        return float(value) if isinstance(value, Real) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):  # complex, text, too large, without values
        return None
