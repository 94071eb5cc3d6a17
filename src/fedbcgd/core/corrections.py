"""The corrections of a local rule, attached to the optimisers that a user's training function steps with."""

import math
from collections.abc import Callable, Iterator, Mapping
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

_TOLERANCE = 1e-3  # relative difference up to which two gradients of one minibatch at one point count as equal


class Refusal:
    """Raises a UserError that names client and round."""

    def __init__(self, algorithm: str, task: Task):
        self.algorithm = algorithm
        self._where = f"client {task.client}, round {task.round + 1}"

    def __call__(self, reason: str) -> NoReturn:
        raise UserError(f"train: {reason} ({self._where})")


def needs(rule: LocalRule) -> str:
    """Return `own_training` of the rule's own class, never an inherited one: a subclass may step in another way."""
    return str(vars(type(rule)).get("own_training", "refused"))


class Corrections:
    """Corrects the gradients of the optimisers that a function takes from `config.optimizer`, as the local rule says.

    It also checks that nothing but their steps moves the model.
    """

    def __init__(
        self,
        rule: LocalRule,
        work: Work,
        model: FlatModel,
        module: nn.Module,
        objective: Objective,
        data: Any,
        refuse: Refusal,
    ):
        self._rule = rule
        self._work = work
        self._model = model
        self._module = module
        self._objective = objective
        self._data = data
        self._refuse = refuse
        self._anchored = needs(rule) == "anchored"
        # With control variates or an anchor a step is y ← y − η·g and nothing else.
        self._needs_plain_sgd = self._anchored or bool(rule.controls)
        self._names = [e.name for e in model.layout.parameters]
        self._gradient = torch.zeros_like(work.y)
        self._gradient_views = self._views(self._gradient)
        self._expected = work.x.clone()  # y, if only our steps move it
        self._correct: Callable[[Tensor], None] | None = None
        self._rates: list[float] = []
        self._extra_evaluations = 0
        self._hooks: list[Any] = []

    def attach(self, optimizer: Optimizer) -> None:
        """Correct the gradients before each step of an optimiser, and count its steps."""
        if any(group.get("fused") for group in optimizer.param_groups):
            # With a GradScaler the gradients of a fused optimiser are still scaled when its step begins.
            self._refuse(
                f"expected an optimiser without fused=True, whose gradients {self._refuse.algorithm} can correct, got one "
                "with it; leave it out"
            )
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def detach(self) -> None:
        """Leave all optimisers as they were."""
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> None:
        """Check the whole training, and set steps and rate of the work as the control variates need them.

        Raises:
            UserError: the model was moved by something else than corrected steps.
        """
        work, steps = self._work, len(self._rates)
        if not steps:
            self._refuse(
                f"expected steps of config.optimizer(model.parameters()), as {self._refuse.algorithm} corrects their "
                "gradients, got none; step with it, or choose an algorithm that needs no correction (fedavg, fedbcgd, …)"
            )
        self._check_unchanged()
        work.steps = steps
        work.evaluations += self._extra_evaluations
        total = math.fsum(self._rates)
        if not total:
            self._refuse(
                f"expected steps with lr > 0, by whose sum {self._refuse.algorithm} divides, got lr = 0 in all of them"
            )
        if getattr(self._rule, "derived", False) and not math.isclose(total, steps * work.eta, rel_tol=1e-6):
            self._refuse(
                f"expected lr = {work.eta:g} (config.lr) in every step, got {total / steps:g} in the mean; with "
                "derived=True the server computes the control change from that rate"
            )
        if any(rate != work.eta for rate in self._rates):
            work.eta = total / steps  # c_i⁺ = c_i − c + (x − y)/Ση_t

    # -- a step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Correct the gradients that are there, or those that the closure will compute."""
        self._moved_parameters(optimizer)  # check them before anything is computed
        if self._needs_plain_sgd:
            self._check_plain(optimizer)
        self._read_parameters()
        self._check_unchanged()
        closure = args[1] if len(args) > 1 else options.get("closure")
        if closure is not None:
            return (args[0], lambda: self._corrected_loss(optimizer, closure)), {}
        if self._anchored:
            self._refuse(
                f"expected optimizer.step(closure), got a step without a closure; {self._refuse.algorithm} computes each "
                "minibatch's gradient at two points, so closure() must set the gradients to zero, compute the loss of the "
                "current minibatch, call backward() and return the loss"
            )
        self._correct_gradients(optimizer)
        return None

    def _after_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        self._read_parameters()
        if self._rule.project(self._work):
            self._write_parameters(self._model.views)
        self._expected.copy_(self._work.y)
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
        self._gather_gradients(parameters)
        if self._correct is None:
            self._correct = self._rule.corrector(self._work)
        self._correct(self._gradient)
        for name, view in zip(self._names, self._gradient_views, strict=True):
            if name in parameters:
                p = parameters[name]
                p.grad = view.to(p.device, p.dtype, copy=True)

    # -- the anchor

    def _compute_at_anchor(self, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        """Store ∇f_i(x; ζ) of the closure's minibatch in `work.notes`, and before the first step ∇f_i(x)."""
        parameters = self._moved_parameters(optimizer)
        if not self._rates:
            self._work.notes["full"] = self._full_gradient(parameters)
        with generators_restored():  # so that the closure draws the same again at y
            self._write_parameters(self._views(self._work.x))
            for p in parameters.values():
                p.grad = None
            closure()
            self._gather_gradients(parameters)
            for p in parameters.values():
                p.grad = None
            self._write_parameters(self._model.views)
        self._work.notes["anchor"] = self._gradient.clone()
        self._extra_evaluations += 1

    def _full_gradient(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return ∇f_i(x) with weight decay: the mean over the client's data, computed in minibatches. Called while y = x."""
        total, examples = torch.zeros_like(self._work.x), 0
        views = self._views(total)
        given = [parameters[name] for name in self._names]
        with generators_restored(), torch.enable_grad():
            for batch, size in self._batches():
                loss = self._objective.loss(self._module, to_device(batch, given[0].device))
                for view, g in zip(views, torch.autograd.grad(loss, given, allow_unused=True), strict=True):
                    if g is not None:
                        view.add_(g.to(view.device), alpha=size)
                examples += size
                self._extra_evaluations += 1
        if not examples:
            self._refuse(
                f"expected at least one example in the client's data, of which {self._refuse.algorithm} needs the full "
                "gradient, got none"
            )
        return total.div_(examples).add_(self._work.x, alpha=self._rule.weight_decay)

    def _batches(self) -> Iterator[tuple[Any, int]]:
        """Yield all examples once, and the size of each batch."""
        loader = first_loader(self._data)
        if loader is not None:
            for batch in loader:
                yield batch, _batch_size(batch)
            return
        source = as_source(self._data, "train: the full gradient needs the client's data, which")
        rng = np.random.default_rng(0)  # for augmentation
        for rows in torch.arange(len(source)).split(self._rule.batch_size):
            yield source.gather(rows, rng), len(rows)

    def _check_closure(self, optimizer: Optimizer) -> None:
        """At the first step y = x: both gradients of the minibatch must be the same."""
        self._gather_gradients(self._moved_parameters(optimizer))
        first = self._work.notes["anchor"]
        if torch.linalg.vector_norm(self._gradient - first) > _TOLERANCE * torch.linalg.vector_norm(first):
            self._refuse(
                "expected a closure that gives the same gradient when it is called twice at one point, got two different "
                "ones; it must set gradients to zero and compute the loss of one minibatch, drawn before the step"
            )

    # -- checks

    def _check_plain(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        why = f"{self._refuse.algorithm} corrects the steps of plain SGD"
        if type(optimizer) is not SGD:
            name = type(optimizer).__name__
            self._refuse(f"expected torch.optim.SGD, got {name}; {why}: take config.optimizer(model.parameters())")
        for option in ("momentum", "maximize"):
            if values := [group[option] for group in groups if group[option]]:
                self._refuse(f"expected an optimiser without {option}, got {option} = {values[0]}; {why}")
        rates = sorted({float(group["lr"]) for group in groups})
        if len(rates) > 1:
            self._refuse(f"expected one lr for all parameters, got {', '.join(f'{rate:g}' for rate in rates)}; {why}")
        decay = self._rule.weight_decay
        if self._anchored and any(group["weight_decay"] != decay for group in groups):
            self._refuse(
                f"expected weight_decay = {decay:g}, the algorithm's, in the optimiser, got another one; "
                f"{self._refuse.algorithm} has weight decay in its full gradient, so set it as the algorithm's option and "
                "leave it out of config.optimizer"
            )

    def _check_unchanged(self) -> None:
        """Refuse a model whose parameters changed since the last corrected step."""
        # NaN is for the server to refuse, as always.
        if not torch.equal(self._work.y, self._expected) and bool(self._work.y.isfinite().all()):
            self._refuse(
                f"expected only steps of config.optimizer(model.parameters()), whose gradients {self._refuse.algorithm} "
                "corrects, to change the parameters, got another change"
            )

    def _moved_parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return those of the model's parameters that the optimiser moves, by name."""
        there = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = {name: p for name, p in self._trained().items() if id(p) in there}
        if len(found) < (len(self._names) if self._needs_plain_sgd else 1):
            missing = next(name for name in self._names if name not in found)
            self._refuse(
                f"expected an optimiser of all parameters, whose gradients {self._refuse.algorithm} corrects, got one "
                f"without {missing!r}; step with config.optimizer(model.parameters())"
            )
        return found

    # -- vectors and parameters

    def _trained(self) -> dict[str, Tensor]:
        """Return the parameters as the module has them now."""
        now = dict(self._module.named_parameters())
        if lost := [name for name in self._names if name not in now]:
            self._refuse(f"expected the parameter {lost[0]!r} to stay in the model, got a model without it")
        return {name: now[name] for name in self._names}

    def _views(self, vector: Tensor) -> list[Tensor]:
        return [e.view(vector) for e in self._model.layout.parameters]

    def _read_parameters(self) -> None:
        """Read y from the module."""
        copy_each(self._model.views, [p.detach() for p in self._trained().values()])

    def _write_parameters(self, values: list[Tensor]) -> None:
        copy_each([p.detach() for p in self._trained().values()], values)

    def _gather_gradients(self, parameters: Mapping[str, Tensor]) -> None:
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
