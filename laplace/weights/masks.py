"""Subnetwork masks: which of the trainable parameters have a distribution, chosen by name, at random, or by a score.

Indices refer to the flattened vector of *trainable* parameters, in `model.parameters()` order: a frozen parameter
has no place in it and is never selected.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from laplace.core import batch as batches
from laplace.core.arguments import CheckedConstructor
from laplace.core.positions import as_rows
from laplace.core.precision_policy import wide_dtype
from laplace.core.random_numbers import drawn_seed
from laplace.enums import Likelihood, LikelihoodName
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, InvalidType, NotFittedError
from laplace.likelihoods import Likelihood as LikelihoodObject
from laplace.likelihoods import get_likelihood
from laplace.network import next_token
from laplace.network.input_errors import call_with_context
from laplace.network.model_guard import unwrap
from laplace.weights.discovery import find_last_layer, require_linear
from laplace.weights.last_layer import network_of


class SubnetMask(CheckedConstructor, ABC):
    """Base of all subnetwork masks, which choose single weights or whole tensors of a network.

    Call `select`, and pass its result to `Laplace(..., subset_of_weights="subnetwork", subnetwork_indices=...)`.

    Args:
        model: The network; it is not changed.

    Raises:
        InvalidArgument: Every parameter is frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = network_of(model)
        trainable = [p.detach() for p in self.model.parameters() if p.requires_grad]
        if not trainable:
            raise InvalidArgument(
                f"{type(model).__name__} has no trainable parameter to choose from; set requires_grad=True for some."
            )
        self.parameter_vector: Tensor = parameters_to_vector(trainable)
        self._n_params = self.parameter_vector.numel()
        self._n_kept: int | None = None
        self._indices: Tensor | None = None

    @property
    def indices(self) -> Tensor:
        """Indices of the selected weights among the flattened trainable parameters, sorted, `[p]`, int64.

        Raises:
            NotFittedError: `select` was not called.
        """
        if self._indices is None:
            raise NotFittedError(f"{type(self).__name__} has selected nothing yet; call select(train_loader) first.")
        return self._indices

    @property
    def n_params_subnet(self) -> int | None:
        """Number of selected weights, p; None while it is not known."""
        return self._n_kept

    def select(self, train_loader: Iterable[Any] | None = None) -> Tensor:
        """Chooses the subnetwork.

        Args:
            train_loader: Training data, for masks that need them.

        Returns:
            Indices of the selected weights among the flattened trainable parameters, sorted, `[p]`, int64.

        Raises:
            InvalidArgument: `select` was called before, or the mask needs data and got none.
        """
        if self._indices is not None:
            raise InvalidArgument(
                f"{type(self).__name__} has selected its subnetwork already; read `indices`, or make a new mask."
            )
        self._indices = self.convert_subnet_mask_to_indices(self.get_subnet_mask(train_loader))
        self._n_kept = self._indices.numel()
        return self._indices

    def convert_subnet_mask_to_indices(self, subnet_mask: Tensor) -> Tensor:
        """Indices of the ones of a mask `[P]` over the trainable parameters.

        Raises:
            InvalidArgument: It is not a binary vector of P integers or booleans.
        """
        if not isinstance(subnet_mask, Tensor):
            given = f"of type {type(subnet_mask).__name__}"
        elif subnet_mask.shape == (self._n_params,) and _is_binary(subnet_mask):
            return subnet_mask.nonzero(as_tuple=True)[0]
        else:
            shape, values = list(subnet_mask.shape), subnet_mask.unique()[:5].tolist()
            given = f"a tensor of shape {shape} and dtype {subnet_mask.dtype} with values {values}"
        raise InvalidArgument(
            f"the subnetwork mask is {given}; accepted is a tensor [{self._n_params}] of booleans or integers 0 and 1, "
            "one per trainable parameter."
        )

    @abstractmethod
    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        """The mask `[P]` over the trainable parameters, boolean."""


class WholeTensorSubnetMask(SubnetMask):
    """A mask of whole parameter tensors."""

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        """The mask `[P]` of the chosen tensors, boolean."""
        chosen = {id(parameter) for parameter in self._chosen(train_loader)}
        pieces = [
            torch.full((parameter.numel(),), id(parameter) in chosen, device=parameter.device)
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]
        return torch.cat(pieces)

    @abstractmethod
    def _chosen(self, train_loader: Iterable[Any] | None = None) -> Sequence[nn.Parameter]:
        """The tensors to select."""


class ParamNameSubnetMask(WholeTensorSubnetMask):
    """Selects parameter tensors by their names in `model.named_parameters()`.

    Args:
        model: The network.
        parameter_names: Names of trainable parameters; of a tied parameter either name works.

    Raises:
        InvalidArgument: No name is given, or one is unknown or that of a frozen parameter.
    """

    def __init__(self, model: nn.Module, parameter_names: Sequence[str]) -> None:
        super().__init__(model)
        known = dict(model.named_parameters(remove_duplicate=False))
        self.parameter_names = _known_names(parameter_names, known, "parameter_names")
        frozen = [name for name in self.parameter_names if not known[name].requires_grad]
        if frozen:
            raise InvalidArgument(f"the parameters {frozen} are frozen; set requires_grad=True or leave them out.")

    def _chosen(self, train_loader: Iterable[Any] | None = None) -> list[nn.Parameter]:
        known = dict(self.model.named_parameters(remove_duplicate=False))
        return [known[name] for name in self.parameter_names]


class ModuleNameSubnetMask(WholeTensorSubnetMask):
    """Selects the trainable parameters of leaf modules by their names in `model.named_modules()`.

    Args:
        model: The network.
        module_names: Names of modules without children that hold trainable parameters.

    Raises:
        InvalidArgument: No name is given, or one is unknown, has children or has nothing to train.
    """

    def __init__(self, model: nn.Module, module_names: Sequence[str]) -> None:
        super().__init__(model)
        known = dict(model.named_modules(remove_duplicate=False))
        self.module_names = _known_names(module_names, known, "module_names")
        for name in self.module_names:
            module = known[name]
            if any(True for _ in module.children()):
                children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
                raise InvalidArgument(f"the module {name!r} is not a leaf; name its leaves, among {children}.")
            if not any(p.requires_grad for p in module.parameters()):
                raise InvalidArgument(
                    f"the module {name!r} of type {type(module).__name__} has no trainable parameter; leave it out."
                )

    def _chosen(self, train_loader: Iterable[Any] | None = None) -> list[nn.Parameter]:
        return [p for name in self.module_names for p in self.model.get_submodule(name).parameters()]


class LastLayerSubnetMask(WholeTensorSubnetMask):
    """Selects the trainable parameters of the last layer, an `nn.Linear`.

    Args:
        model: The network.
        last_layer_name: Name of the layer; None to determine it by a forward pass on the first batch.
        dict_key_y: Where batches are mappings: key of the targets.

    Raises:
        InvalidArgument: The name is not that of an `nn.Linear`; on `select`, no loader to find it or nothing to train.
        InvalidData: On `select`, a loader without data.
    """

    def __init__(self, model: nn.Module, last_layer_name: str | None = None, dict_key_y: str = "labels") -> None:
        super().__init__(model)
        self.dict_key_y = dict_key_y
        self._last_layer_name = None if last_layer_name is None else require_linear(model, last_layer_name)

    def _chosen(self, train_loader: Iterable[Any] | None = None) -> list[nn.Parameter]:
        name = self._last_layer_name
        if name is None:
            loader = _require_loader(self, train_loader)
            with torch.random.fork_rng(devices=[]):  # from which a loader draws a seed
                batch = next(iter(loader), None)
            if batch is None:
                raise InvalidData(
                    "train_loader gave no data; the last layer is found by one batch, or by last_layer_name=."
                )
            x, _ = batches.split(batch, self.dict_key_y)
            name = find_last_layer(self.model, batches.to_device(x, self.parameter_vector.device))
        trainable = [p for p in unwrap(self.model).get_submodule(name).parameters() if p.requires_grad]
        if not trainable:
            raise InvalidArgument(f"every parameter of the last layer {name!r} is frozen; set requires_grad=True.")
        return trainable


def _require_loader(mask: SubnetMask, train_loader: Iterable[Any] | None) -> Iterable[Any]:
    if train_loader is None:
        raise InvalidArgument(f"{type(mask).__name__} looks at the data; call select(train_loader) with a loader.")
    return train_loader


def _is_binary(mask: Tensor) -> bool:
    integral = not (mask.is_floating_point() or mask.is_complex())
    return integral and bool(((mask == 0) | (mask == 1)).all())


def _known_names(names: Sequence[str], known: dict[str, Any], argument: str) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in listed if name not in known]
    if not listed or unknown:
        raise InvalidArgument(
            f"{argument}={names!r} {'is empty' if not listed else f'holds the unknown {unknown}'}; "
            f"accepted are one or more of {[name for name in known if name]}."
        )
    return listed


# Subnetwork masks by what a parameter is called, where it lives, or whatever a function says of it.


class RegexSubnetMask(WholeTensorSubnetMask):
    r"""Selects the trainable parameter tensors whose name in `model.named_parameters()` matches a regular expression.

    `re.search` is used: anchor the pattern by `^` and `$` to match whole names. For a tied tensor all names are tried.

    Args:
        model: The network; it is only read.
        pattern: A regular expression, or a compiled one; e.g. `r"\.bias$"` or `r"^layers\.[01]\."`.

    Raises:
        InvalidArgument: No regular expression, or one that matches the name of no trainable parameter.
    """

    def __init__(self, model: nn.Module, pattern: str | re.Pattern[str]) -> None:
        super().__init__(model)
        try:
            self.pattern = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InvalidArgument(f"pattern={pattern!r} is not a regular expression: {error}.") from error
        if not self._chosen():
            names = [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
            raise InvalidArgument(
                f"pattern={self.pattern.pattern!r} matches none of the trainable parameters {names}; it is searched "
                "for anywhere in the name."
            )

    def _chosen(self, train_loader: Iterable[Any] | None = None) -> list[nn.Parameter]:
        named = self.model.named_parameters(remove_duplicate=False)
        return [p for name, p in named if p.requires_grad and self.pattern.search(name)]


class ModuleTypeSubnetMask(WholeTensorSubnetMask):
    """Selects the trainable parameters of all modules of given types, including those of their submodules.

    Args:
        model: The network; it is only read.
        module_types: One type, or several; e.g. `nn.LayerNorm`.

    Raises:
        InvalidType: Something else than types of modules.
        InvalidArgument: No module of these types has a trainable parameter.
    """

    def __init__(self, model: nn.Module, module_types: type[nn.Module] | Sequence[type[nn.Module]]) -> None:
        super().__init__(model)
        listed = (module_types,) if isinstance(module_types, type) else tuple(module_types)
        if not all(isinstance(one, type) and issubclass(one, nn.Module) for one in listed):
            raise InvalidType(f"module_types={module_types!r}; accepted are classes of modules, such as nn.LayerNorm.")
        self.module_types = listed
        if not any(p.requires_grad for p in self._chosen()):
            known = sorted({type(m).__qualname__ for m in model.modules() if any(True for _ in m.parameters())})
            raise InvalidArgument(
                f"module_types={[one.__qualname__ for one in listed]}: no module of these types has a trainable "
                f"parameter; modules with parameters are of the types {known}."
            )

    def _chosen(self, train_loader: Iterable[Any] | None = None) -> list[nn.Parameter]:
        modules = [module for module in self.model.modules() if isinstance(module, self.module_types)]
        return [parameter for module in modules for parameter in module.parameters()]


class CallableSubnetMask(SubnetMask):
    """Selects what a function of name and value says: whole tensors, or entries of them.

    Args:
        model: The network; it is only read.
        choose: Called as `choose(name, value)` for every trainable parameter, its first name in
            `model.named_parameters()` and a detached copy of its value; returns a bool for the whole tensor, or a
            mask of the value's shape, of booleans or integers 0 and 1.

    Raises:
        InvalidType: `choose` cannot be called.
        InvalidArgument: On `select`, it returned something else, or chose nothing.
    """

    def __init__(self, model: nn.Module, choose: Callable[[str, Tensor], bool | Tensor]) -> None:
        super().__init__(model)
        if not callable(choose):
            raise InvalidType(f"choose={choose!r} cannot be called; give a function choose(name, value).")
        self.choose = choose

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        mask = torch.cat([self._of(name, p.detach().clone()) for name, p in named])
        if not mask.any():
            raise InvalidArgument(f"choose={self.choose!r} chose none of {[name for name, _ in named]}.")
        return mask

    def _of(self, name: str, value: Tensor) -> Tensor:
        """Mask of one tensor by the function, `[p]`."""
        answer = self.choose(name, value)
        if isinstance(answer, bool):
            return torch.full((value.numel(),), answer, device=value.device)
        if isinstance(answer, Tensor) and answer.shape == value.shape and not answer.is_floating_point():
            return answer.reshape(-1).to(value.device)
        said = f"a tensor {list(answer.shape)} of {answer.dtype}" if isinstance(answer, Tensor) else repr(answer)
        raise InvalidArgument(
            f"choose({name!r}, value) returned {said}; accepted are True, False, or a mask {list(value.shape)} of "
            "booleans or integers 0 and 1."
        )


# Subnetwork masks that keep the n parameters with the largest score.


class ScoreBasedSubnetMask(SubnetMask):
    """Base of the masks that select the weights with the largest scores; among equal scores the first.

    Args:
        model: The network; it is not changed.
        n_params_subnet: n, the number of weights to select, from 1 to P.

    Raises:
        InvalidArgument: n is None or out of range.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int) -> None:
        super().__init__(model)
        if not isinstance(n_params_subnet, int) or not 1 <= n_params_subnet <= self._n_params:
            raise InvalidArgument(
                f"n_params_subnet={n_params_subnet!r}; accepted is an integer from 1 to {self._n_params}, the number "
                "of trainable parameters."
            )
        self._n_kept = n_params_subnet

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        """The mask `[P]` of the n largest scores, boolean.

        Raises:
            InvalidArgument: The scores are not one number per trainable parameter.
        """
        scores = self.compute_param_scores(train_loader)
        bad = bool(scores.isnan().any())
        if bad or scores.shape != self.parameter_vector.shape:
            raise InvalidArgument(
                f"{type(self).__name__} made scores of shape {list(scores.shape)}{' with NaN' * bad}; one number per "
                f"trainable parameter, [{self._n_params}], is needed."
            )
        mask = torch.zeros_like(scores, dtype=torch.bool)
        mask[scores.argsort(descending=True, stable=True)[: self._n_kept]] = True
        return mask

    @abstractmethod
    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """Scores of the trainable parameters, `[P]`."""


class RandomSubnetMask(ScoreBasedSubnetMask):
    """Selects n weights at random.

    Args:
        model: The network.
        n_params_subnet: n, the number of weights to select.
        generator: Random generator; None for PyTorch's global one.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int, generator: torch.Generator | None = None) -> None:
        super().__init__(model, n_params_subnet)
        self._generator = generator

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """Uniform numbers `[P]`."""
        device = self.parameter_vector.device if self._generator is None else self._generator.device
        # float64: among many float32 numbers there are equal ones, and a tie prefers the first parameter.
        scores = torch.rand(self._n_params, generator=self._generator, device=device, dtype=wide_dtype(device))
        return scores.to(self.parameter_vector.device)


class LargestMagnitudeSubnetMask(ScoreBasedSubnetMask):
    """Selects the weights with the largest absolute values."""

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """|θ|, `[P]`."""
        return self.parameter_vector.abs()


class LargestVarianceDiagLaplaceSubnetMask(ScoreBasedSubnetMask):
    """Selects the weights with the largest posterior variance under a diagonal Laplace approximation.

    After Daxberger et al., "Bayesian Deep Learning via Subnetwork Inference" (2021).

    Args:
        model: The network.
        n_params_subnet: n, the number of weights to select.
        diag_laplace_model: A `DiagLaplace` of the same network; it is fitted by `select`.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int, diag_laplace_model: Any) -> None:
        super().__init__(model, n_params_subnet)
        self.diag_laplace_model = diag_laplace_model

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """Posterior variances, `[P]`, of which the largest lose least [Redux, appendix eq. 7].

        Raises:
            InvalidArgument: No loader is given.
        """
        self.diag_laplace_model.fit(_require_loader(self, train_loader))
        return self.diag_laplace_model.posterior_variance


class LargestVarianceSWAGSubnetMask(ScoreBasedSubnetMask):
    """Selects the weights with the largest variance over snapshots of further training by SGD (diagonal SWAG).

    Args:
        model: The network; a copy of it is trained.
        n_params_subnet: n, the number of weights to select.
        likelihood: A name, e.g. `"classification"`, or a likelihood object; its mean loss is minimised.
        swag_n_snapshots: Number of snapshots.
        swag_snapshot_freq: Number of epochs between snapshots.
        swag_lr: Learning rate.
        generator: Random generator that seeds the training; None for PyTorch's global one.

    Raises:
        InvalidArgument: The likelihood is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        n_params_subnet: int,
        likelihood: LikelihoodObject | LikelihoodName = Likelihood.CLASSIFICATION,
        swag_n_snapshots: int = 40,
        swag_snapshot_freq: int = 1,
        swag_lr: float = 0.01,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, n_params_subnet)
        self.criterion = MeanLoss(get_likelihood(likelihood))
        self.swag_n_snapshots = swag_n_snapshots
        self.swag_snapshot_freq = swag_snapshot_freq
        self.swag_lr = swag_lr
        self._generator = generator

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """Variances of the snapshots, `[P]`.

        Raises:
            InvalidArgument: No loader is given.
        """
        return fit_diagonal_swag_var(
            self.model,
            _require_loader(self, train_loader),
            self.criterion,
            n_snapshots_total=self.swag_n_snapshots,
            snapshot_freq=self.swag_snapshot_freq,
            lr=self.swag_lr,
            generator=self._generator,
            rules=self.criterion.likelihood,
        )


# Diagonal SWAG: variances of the weights along further training with a constant learning rate.
#
# After Maddox et al., "A Simple Baseline for Bayesian Uncertainty in Deep Learning" (2019).


@dataclass(frozen=True)
class MeanLoss:
    """The mean of −log p(y | f) over the targets that are not ignored, without constants: for any likelihood.

    Outputs that are independent are targets of their own, as in PyTorch's losses, and a noise is σ² = ½: of a
    classification it is the cross-entropy, of a regression the mean squared error.

    Attributes:
        likelihood: p(y | f).
    """

    likelihood: LikelihoodObject

    def __call__(self, f: Tensor, y: Tensor) -> Tensor:
        """The mean, 0-dim, of outputs `[B, C]`, or with positions, and targets as a loader gives them; 0 without any.

        Raises:
            InvalidData: Targets that do not fit the likelihood.
        """
        f, y = as_rows(f, y, None)
        y = self.likelihood.check_targets(f, y)
        terms = self.likelihood.loss_terms(f, y)
        scale = self.likelihood.curvature_scale("ggn", terms.new_tensor(0.5).sqrt(), terms.new_ones(()))
        count = torch.as_tensor(self.likelihood.count(f, y), dtype=terms.dtype, device=terms.device)
        n_targets = count * f.shape[1] if self.likelihood.independent_outputs else count
        return (scale * terms).sum() / torch.where(count > 0, n_targets, 1.0)


def fit_diagonal_swag_var(
    model: nn.Module,
    train_loader: Iterable[Any],
    criterion: Callable[[Tensor, Tensor], Tensor],
    n_snapshots_total: int = 40,
    snapshot_freq: int = 1,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 3e-4,
    min_var: float = 1e-30,
    dict_key_y: str = "labels",
    generator: torch.Generator | None = None,
    rules: next_token.TargetRules | None = None,
) -> Tensor:
    """Trains a copy of the model by SGD and returns the variance of its trainable parameters over the snapshots.

    Args:
        model: The network; it is copied, not written to.
        train_loader: Batches, pairs or mappings; iterated once per epoch.
        criterion: Mean loss of outputs and targets.
        n_snapshots_total: Number of snapshots S.
        snapshot_freq: Epochs between snapshots; `S * snapshot_freq` epochs are run.
        lr: Constant learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        min_var: Lower bound of the variances.
        dict_key_y: Key of the targets in batches that are mappings.
        generator: Seeds dropout and the loader's shuffling; the global random state, which is put back, if None.
        rules: The likelihood, which knows the form of targets in mappings and the label that is ignored, if there is
            one.

    Returns:
        Variances `(1/S) Σ_s (θ_s − θ̄)²`, `[P]`, at least `min_var`.

    Raises:
        InvalidArgument: S or the frequency is not a positive integer, or nothing is trainable.
        InvalidData: A loader without data.
        CurvatureError: The training diverged.
    """
    for name, value in {"n_snapshots_total": n_snapshots_total, "snapshot_freq": snapshot_freq}.items():
        if value < 1:
            raise InvalidArgument(f"{name}={value}; accepted is an integer of at least 1.")
    with _seeded(model, generator):
        learner = copy.deepcopy(unwrap(model)).train()
        trained = [p for p in learner.parameters() if p.requires_grad]
        if not trained:
            raise InvalidArgument("the model has no trainable parameter; set requires_grad=True for some.")
        optimizer = torch.optim.SGD(trained, lr=lr, momentum=momentum, weight_decay=weight_decay)
        moments = _RunningMoments(parameters_to_vector(trained).detach())
        for epoch in range(1, n_snapshots_total * snapshot_freq + 1):
            _train_epoch(learner, train_loader, criterion, optimizer, dict_key_y, rules)
            if epoch % snapshot_freq == 0:
                moments.update(parameters_to_vector(trained).detach())
    variance = moments.squares / moments.count
    if not bool(torch.isfinite(variance).all()):
        raise CurvatureError("the SWAG training diverged to NaN or infinite weights; pass a smaller lr (swag_lr).")
    return variance.clamp(min=min_var)


class _RunningMoments:
    """Running mean and variance after Welford, which loses no digits where E[θ²] − E[θ]² cancels."""

    def __init__(self, like: Tensor) -> None:
        self.count = 0
        self.mean = torch.zeros_like(like)
        self.squares = torch.zeros_like(like)

    def update(self, value: Tensor) -> None:
        self.count += 1
        step = value - self.mean
        self.mean = self.mean + step / self.count
        self.squares = self.squares + step * (value - self.mean)


def _train_epoch(
    model: nn.Module,
    loader: Iterable[Any],
    criterion: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    dict_key_y: str,
    rules: next_token.TargetRules | None,
) -> None:
    device, empty = next(model.parameters()).device, True
    with torch.enable_grad():
        for batch in loader:
            x, y = next_token.split(batch, dict_key_y, model, rules)
            empty = False
            optimizer.zero_grad()
            f = batches.latent(call_with_context(model, None, batches.to_device(x, device)))
            criterion(f, y.to(device)).backward()
            optimizer.step()
    if empty:
        raise InvalidData("train_loader gave no data; without training there are no snapshots to take a variance of.")


@contextmanager
def _seeded(model: nn.Module, generator: torch.Generator | None) -> Iterator[None]:
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        if generator is not None:
            torch.manual_seed(drawn_seed(generator))
        yield
