"""The corrections of a local rule, attached to the optimisers with which a user's training function steps."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fedbcgd.core.generators import generators_restored
from fedbcgd.core.local_rule import LocalRule
from fedbcgd.core.messages import Task
from fedbcgd.core.objective import Objective
from fedbcgd.core.torch_private import copy_each
from fedbcgd.core.vector import FlatModel
from fedbcgd.core.work import Work
from fedbcgd.data.sources import as_source, first_loader, to_device
from fedbcgd.errors import UserError

_SAME_GRADIENT = 1e-3  # relative difference up to which two gradients of one minibatch at one point count as equal


class Refusal:
    """Raises a UserError about a client's training; the message names the client and the round.

    Args:
        algorithm: the name of the algorithm.
        task: the client's task.
    """

    def __init__(self, algorithm: str, task: Task):
        self.algorithm = algorithm
        self._where = f"client {task.client}, round {task.round + 1}"

    def __call__(self, reason: str) -> NoReturn:
        raise UserError(f"train, {self._where}: {reason}")


def needs(rule: LocalRule) -> str:
    """Return `own_training` of the rule's own class, never an inherited one: a subclass may step in another way."""
    return str(vars(type(rule)).get("own_training", "refused"))


@dataclass(eq=False)
class Corrections:
    """Corrects the gradients of the optimisers that a function takes from `config.optimizer`, as the local rule says.

    It also checks that nothing but their steps moves the model.

    Args:
        rule: the local rule.
        work: the client's work.
        model: holds the broadcast model x before the training, and the trained model y after it.
        module: the copy of the model that the function trains.
        objective: what is minimised; for rules that need the full gradient.
        data: the data that the user gave for this client.
        refuse: called with the reason why the training cannot be uploaded.
    """

    rule: LocalRule
    work: Work
    model: FlatModel
    module: nn.Module
    objective: Objective
    data: Any
    refuse: Refusal

    def __post_init__(self) -> None:
        self._anchored = needs(self.rule) == "anchored"
        # With control variates or an anchor a step is y ← y − η·g and nothing else.
        self._plain_sgd = self._anchored or bool(self.rule.controls)
        self._names = [e.name for e in self.model.layout.parameters]
        self._gradient = torch.zeros_like(self.work.y)
        self._gradient_views = self._views(self._gradient)
        self._expected = self.work.x.clone()  # the value that y has if only corrected steps have moved it
        self._correct: Callable[[Tensor], None] | None = None
        self._rates: list[float] = []
        self._extra_evaluations = 0
        self._hooks: list[Any] = []

    def attach(self, optimizer: Optimizer) -> None:
        """Correct the gradients before each step of an optimiser, and count its steps."""
        if any(group.get("fused") for group in optimizer.param_groups):
            # With a GradScaler the gradients of a fused optimiser are still scaled when its step begins.
            self.refuse(
                f"fused: expected False, since {self.refuse.algorithm} corrects gradients, got True; leave it out"
            )
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def detach(self) -> None:
        """Stop correcting; all optimisers are then as they were."""
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> None:
        """Check the whole training, and set the steps and the rate of the work, which the control variates need.

        Raises:
            UserError: there was no corrected step, something else moved the model, or the learning rates do not suit the
                algorithm.
        """
        work, steps = self.work, len(self._rates)
        if not steps:
            self.refuse(
                f"expected steps of config.optimizer(…), since {self.refuse.algorithm} corrects gradients, got none; step "
                "with config.optimizer(model.parameters()), or take an algorithm that corrects none (fedavg, fedbcgd, …)"
            )
        self._check_y()
        work.steps = steps
        work.evaluations += self._extra_evaluations
        total = math.fsum(self._rates)
        if not total:
            self.refuse(
                f"lr: expected a step with lr > 0, since {self.refuse.algorithm} divides by the sum of the rates, got 0 in "
                "every step"
            )
        if getattr(self.rule, "derived", False) and not math.isclose(total, steps * work.eta, rel_tol=1e-6):
            self.refuse(
                f"lr: expected {work.eta:g} (config.lr) in every step, since with derived=True the server computes the "
                f"control change from it, got {total / steps:g} on average; leave lr out of config.optimizer"
            )
        if any(rate != work.eta for rate in self._rates):
            work.eta = total / steps  # c_i⁺ = c_i − c + (x − y)/Ση_t

    # -- a step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Correct the gradients that are computed already, or those that the closure will compute."""
        self._moved_parameters(optimizer)  # check them before anything is computed
        if self._plain_sgd:
            self._check_plain_sgd(optimizer)
        self._read_y()
        self._check_y()
        closure = args[1] if len(args) > 1 else options.get("closure")
        if closure is not None:
            return (args[0], lambda: self._corrected_loss(optimizer, closure)), {}
        if self._anchored:
            self.refuse(
                f"expected optimizer.step(closure), since {self.refuse.algorithm} takes each minibatch's gradient at two "
                "points, got optimizer.step(); pass a closure that sets the gradients to zero, computes the loss of the "
                "current minibatch, calls backward() and returns the loss"
            )
        self._correct_gradients(optimizer)
        return None

    def _after_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        self._read_y()
        if self.rule.project(self.work):
            self._write_y(self.model.views)
        self._expected.copy_(self.work.y)
        self._rates.append(float(optimizer.param_groups[0]["lr"]))

    def _corrected_loss(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        if self._anchored:
            self._compute_at_anchor(optimizer, closure)
        loss = closure()
        if self._anchored and not self._rates:
            self._check_closure(optimizer)
        self._correct_gradients(optimizer)
        return loss

    def _correct_gradients(self, optimizer: Optimizer) -> None:
        parameters = self._moved_parameters(optimizer)
        self._read_gradients(parameters)
        if self._correct is None:
            self._correct = self.rule.corrector(self.work)
        self._correct(self._gradient)
        for name, view in zip(self._names, self._gradient_views, strict=True):
            if name in parameters:
                p = parameters[name]
                p.grad = view.to(p.device, p.dtype, copy=True)

    # -- the anchor

    def _compute_at_anchor(self, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        """Write ∇f_i(x; ζ) of the closure's minibatch to the work's notes, and before the first step ∇f_i(x)."""
        parameters = self._moved_parameters(optimizer)
        if not self._rates:
            self.work.notes["full"] = self._full_gradient(parameters)
        with generators_restored():  # the closure must draw the same numbers again at y
            self._write_y(self._views(self.work.x))
            for p in parameters.values():
                p.grad = None
            closure()
            self._read_gradients(parameters)
            for p in parameters.values():
                p.grad = None
            self._write_y(self.model.views)
        self.work.notes["anchor"] = self._gradient.clone()
        self._extra_evaluations += 1

    def _full_gradient(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return ∇f_i(x), weight decay included: the mean over the client's data, in minibatches. It needs y = x."""
        total, examples = torch.zeros_like(self.work.x), 0
        views = self._views(total)
        given = [parameters[name] for name in self._names]
        with generators_restored(), torch.enable_grad():
            for batch, size in self._batches():
                loss = self.objective.loss(self.module, to_device(batch, given[0].device))
                for view, g in zip(views, torch.autograd.grad(loss, given, allow_unused=True), strict=True):
                    if g is not None:
                        view.add_(g.to(view.device), alpha=size)
                examples += size
                self._extra_evaluations += 1
        if not examples:
            self.refuse("data: expected at least one example, for the full gradient, got none")
        return total.div_(examples).add_(self.work.x, alpha=self.rule.weight_decay)

    def _batches(self) -> Iterator[tuple[Any, int]]:
        """Yield all examples once, and the size of each batch."""
        loader = first_loader(self.data)
        if loader is not None:
            for batch in loader:
                yield batch, _batch_size(batch)
            return
        source = as_source(self.data, "train: the full gradient needs the client's data, which")
        rng = np.random.default_rng(0)  # for augmentation
        for rows in torch.arange(len(source)).split(self.rule.batch_size):
            yield source.gather(rows, rng), len(rows)

    def _check_closure(self, optimizer: Optimizer) -> None:
        """At the first step y = x: both gradients of the minibatch must be the same."""
        self._read_gradients(self._moved_parameters(optimizer))
        first = self.work.notes["anchor"]
        if torch.linalg.vector_norm(self._gradient - first) > _SAME_GRADIENT * torch.linalg.vector_norm(first):
            self.refuse(
                f"closure: expected the same gradient from both calls at one point ({self.refuse.algorithm} calls it twice "
                "in a step), got two; set gradients to zero in it, and compute the loss of one minibatch, drawn before the "
                "step"
            )

    # -- checks

    def _check_plain_sgd(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        why = f"since {self.refuse.algorithm} corrects the steps of plain SGD"
        if type(optimizer) is not SGD:
            self.refuse(
                f"optimizer: expected SGD, {why}, got {type(optimizer).__name__}; take config.optimizer(model.parameters())"
            )
        for option in ("momentum", "maximize"):
            if value := next((group[option] for group in groups if group[option]), None):
                self.refuse(f"{option}: expected none, {why}, got {value}; leave it out")
        if len(rates := {float(group["lr"]) for group in groups}) > 1:
            self.refuse(f"lr: expected one rate for all parameters, {why}, got {', '.join(map(str, sorted(rates)))}")
        decay = self.rule.weight_decay
        if self._anchored and any(group["weight_decay"] != decay for group in groups):
            self.refuse(
                f"weight_decay: expected the algorithm's, {decay:g}, since {self.refuse.algorithm} has weight decay in its "
                "full gradient, got another; leave it out of config.optimizer, and set the algorithm's weight_decay"
            )

    def _check_y(self) -> None:
        """Refuse a model that is not where the last corrected step left it."""
        # Values that are not finite pass here: the server refuses them.
        if not torch.equal(self.work.y, self._expected) and bool(self.work.y.isfinite().all()):
            self.refuse(
                "expected parameters that are moved by steps of config.optimizer(model.parameters()) alone, since "
                f"{self.refuse.algorithm} corrects gradients, got other changes too"
            )

    def _moved_parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the parameters of the model that the optimiser moves, by name."""
        in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        moved = {name: p for name, p in self._trained().items() if id(p) in in_optimizer}
        if len(moved) < (len(self._names) if self._plain_sgd else 1):
            missing = next(name for name in self._names if name not in moved)
            self.refuse(
                f"expected all parameters in the optimiser, since {self.refuse.algorithm} corrects all gradients, got one "
                f"without {missing!r}; step with config.optimizer(model.parameters())"
            )
        return moved

    # -- vectors and parameters

    def _trained(self) -> dict[str, Tensor]:
        """Return the parameters as the module has them now."""
        now = dict(self.module.named_parameters())
        if lost := [name for name in self._names if name not in now]:
            self.refuse(f"expected the model to keep its parameter {lost[0]!r}, got one without")
        return {name: now[name] for name in self._names}

    def _views(self, vector: Tensor) -> list[Tensor]:
        return [e.view(vector) for e in self.model.layout.parameters]

    def _read_y(self) -> None:
        """Read y from the module."""
        copy_each(self.model.views, [p.detach() for p in self._trained().values()])

    def _write_y(self, values: list[Tensor]) -> None:
        """Set the module's parameters."""
        copy_each([p.detach() for p in self._trained().values()], values)

    def _read_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Read the gradient; a parameter that the loss does not use has gradient zero."""
        for name, view in zip(self._names, self._gradient_views, strict=True):
            g = parameters[name].grad if name in parameters else None
            view.zero_() if g is None else view.copy_(g)


def _batch_size(batch: Any) -> int:
    """Return how many examples a batch has: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch)
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return _batch_size(next(iter(parts)))
