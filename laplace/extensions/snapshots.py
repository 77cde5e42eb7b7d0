"""Several networks out of one training: states that it passed through, and short restarts, weighted on held-out data.

What a posterior around one network lacks are other functions. A training leaves some behind for nothing (Huang et al.,
2017), and a network that is shrunk towards fresh initial weights (Ash and Adams, 2020) is trained again in a fraction
of the epochs. They are weighted by their predictions of held-out data (stacking: Yao et al., 2018), half of the weight
stays with the network, and where held-out data do not show that the pool is as good, all of it does.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core.arguments import check_counts, checked
from laplace.core.checks import named
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import check_generator, global_numbers
from laplace.engines.engine import outputs
from laplace.enums import HessianStructure, LikelihoodName, StructureName, SubsetOfWeights, WeightsName
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.grid import from_names
from laplace.likelihoods import Likelihood
from laplace.mixture.mixture import MixtureLaplace
from laplace.network.fsdp import require_unsharded
from laplace.network.model_guard import autograd_mode, require_module, same_random_state, unwrap
from laplace.posterior.posterior import Posterior
from laplace.structures.base import Curvature
from laplace.tuning.calibrate import caution
from laplace.tuning.losses import Targets, Validation, find_score
from laplace.tuning.stacking import stacking_weights
from laplace.weights.base import Weights

_STEPS = 100
"""Steps of EM from equal weights: so few that they are still shared where data are few."""

_LEAST_WEIGHT = 0.01
"""Weight within the pool below which a state is dropped."""

_MANY = 90
"""Data from which on half of the caution of `calibrate` is enough: the pool holds the network itself."""

_READ = ("dict_key_x", "dict_key_y", "forward_fn", "channel_dim")
"""Options of `Laplace` that say how a network is run."""

State = dict[str, Tensor]


@dataclass(frozen=True)
class SnapshotChoice:
    """What held-out data said of a pool of states.

    Attributes:
        n_data: Number of held-out inputs.
        network_nll: Mean negative log predictive density of the network, in nats; in regression with the noise that
            suits it best.
        pool_nll: That of half the network and half the pool, which was weighted on these data.
        standard_error: Paired standard error of their difference.
        caution: Number of standard errors that count against the pool.
        is_network: True if the network stays alone: the difference plus these standard errors is positive.
        weights: Weights of the states in the mixture, `[K]`, the network's first.
        origins: Where each is from: 0 for the training itself, i for the i-th restart.
    """

    n_data: int
    network_nll: float
    pool_nll: float
    standard_error: float
    caution: float
    is_network: bool
    weights: Tensor
    origins: tuple[int, ...]

    def __str__(self) -> str:
        """One sentence."""
        restarted = sum(origin > 0 for origin in self.origins)
        chosen = (
            "the network alone, than which the pool is not shown to be better"
            if self.is_network
            else f"{len(self.weights)} networks, {restarted} of them from restarts"
        )
        return (
            f"{chosen}: NLL of the network {self.network_nll:.4f}, of the pool {self.pool_nll:.4f}, "
            f"{self.pool_nll - self.network_nll:+.4f} ± {self.standard_error:.4f} on {self.n_data} held-out data"
        )


@dataclass(frozen=True)
class _Member:
    """A state, and where it is from."""

    origin: int
    state: State


class Snapshots:
    """States of one training and of its restarts: `laplace.snapshots(model)` makes it.

    Attributes:
        model: The network that is trained; it is read, and never written.
        most: Number of states that are kept of every training, the last ones.
        choice: What the last `posterior` found; None before.
    """

    def __init__(self, model: nn.Module, most: int) -> None:
        self.model = model
        self.most = most
        self.choice: SnapshotChoice | None = None
        self._kept: list[deque[State]] = [deque(maxlen=most)]
        self._restarted: nn.Module | None = None  # in training

    def __len__(self) -> int:
        """Number of states that are kept."""
        return sum(map(len, self._kept))

    def __repr__(self) -> str:
        """States by where they are from, and the choice."""
        n_restarts = len(self._kept) - 1
        known = (
            f"{len(self._kept[0])} states of the training, {len(self) - len(self._kept[0])} of {n_restarts} restarts"
        )
        return f"Snapshots({known})" if self.choice is None else f"Snapshots({known}; {self.choice})"

    @checked
    def keep(self, network: nn.Module | None = None) -> None:
        """Keeps a copy of the present weights and buffers, as a rule after an epoch of the second half of training.

        Args:
            network: The one in training: within a restart that which `train` was given. None for the model.

        Raises:
            InvalidArgument: Another network.
        """
        network = self.model if network is None else unwrap(network)
        if network is not self.model and network is not self._restarted:
            raise InvalidArgument(
                "network is neither the model nor the one that is being restarted; give keep() what train was given."
            )
        self._kept[0 if network is self.model else -1].append(_state_of(network))

    @checked
    def restarts(
        self, train: Callable[[nn.Module], object], n: int = 4, *, generator: torch.Generator | None = None
    ) -> None:
        """Trains n more networks from θ/2 + fresh initial weights (Ash and Adams, 2020), which takes few epochs.

        Half of what was learned is there, and the fresh half makes other functions of it. Weights that an
        initialisation makes equal, as scales of normalisations, are half-way to that; frozen ones stay.

        Args:
            train: Trains a network in place: your training in short, such as half of the epochs at most, stopped by the
                loss of validation data. The state that it ends with is kept.
            n: Number of restarts.
            generator: Source of the fresh weights; None for the global one.

        Raises:
            InvalidArgument: n is not positive.
            UnsupportedError: A module has trainable parameters of its own, and no `reset_parameters()`.
        """
        check_counts(n=n)
        check_generator(generator)
        for _ in range(n):
            network = _copied(self.model)
            with global_numbers(generator):
                _shrink_and_perturb(network)
            self._kept.append(deque(maxlen=self.most))
            self._restarted = network
            try:
                train(network)
                self.keep(network)
            except BaseException:
                self._kept.pop()
                raise
            finally:
                self._restarted = None

    @checked
    def posterior(
        self,
        val_loader: Iterable[Any],
        likelihood: Likelihood | LikelihoodName,
        subset_of_weights: WeightsName | type[Weights] = SubsetOfWeights.LAST_LAYER,
        hessian_structure: StructureName | type[Curvature] = HessianStructure.KRON,
        *,
        progress_bar: bool = False,
        **options: Any,
    ) -> MixtureLaplace:
        """A mixture of the network and the pool of states, or of the network alone where the pool is not shown better.

        Weights w of the pool, of which the network is one, maximise Σ_n log Σ_k w_k p_k(y_n) over held-out data, by 100
        steps of EM from equal weights. The mixture is half the network and half the pool; states below 1 % of the pool
        are dropped. It is taken where its mean log score is better than the network's by k paired standard errors or
        more, k = ½ + 4/√n, half of that from 90 data on. Both are by the data that chose the weights: see `choice`.
        Fit, tune and calibrate it as any mixture.

        Args:
            val_loader: Validation data, batches as `fit` takes them: labelled data that the network was not trained on.
            likelihood: As in `Laplace`.
            subset_of_weights: As in `Laplace`.
            hessian_structure: As in `Laplace`.
            progress_bar: Show a progress bar.
            **options: Further arguments of `Laplace`. In regression `sigma_noise` is by default that of the network's
                residuals on these data.

        Returns:
            A mixture that is not fitted yet. Its first component is of the model, the others are of copies.

        Raises:
            InvalidArgument: Nothing was kept.
            InvalidData: No data, or a batch that cannot be used.
        """
        if not len(self):
            raise InvalidArgument("no state was kept; call keep() after epochs of the training, or restarts(train).")
        members = self._members()
        networks = [_with_state(self.model, member.state) for member in members]
        read = {name: options[name] for name in _READ if name in options}
        with autograd_mode(), torch.no_grad(), same_random_state(self.model):
            scores = _LogDensities.from_data(
                networks, likelihood, read, val_loader, options.get("sigma_noise"), progress_bar
            )
        chosen, self.choice = scores.choice([member.origin for member in members])
        if scores.sigma is not None:
            options["sigma_noise"] = scores.sigma
        parts = [self.model, *(networks[i] for i in chosen[1:])]
        weights = self.choice.weights
        return MixtureLaplace(parts, likelihood, subset_of_weights, hessian_structure, weights=weights, **options)

    def _members(self) -> list[_Member]:
        """The network as it is, and the states that differ from it."""
        now = _state_of(self.model)
        states = [_Member(origin, state) for origin, kept in enumerate(self._kept) for state in kept]
        return [_Member(0, now), *(member for member in states if not _equal(member.state, now))]


@checked
def snapshots(model: nn.Module, most: int = 20) -> Snapshots:
    """Collects states of a network's training, and makes a mixture of those that help: members for few or no trainings.

    Example:
        states = laplace.snapshots(model)
        for epoch in range(100):
            train_epoch(model)
            if epoch >= 50:
                states.keep()
        states.restarts(train_shortly, n=4)
        la = states.posterior(val_loader, "classification")
        la.fit(train_loader)

    Args:
        model: The network in training. Its weights are copied by `keep()`; nothing writes to it.
        most: Number of states that are kept of every training, the last ones: as many copies of the network.

    Raises:
        InvalidType: No module.
        UnsupportedError: Weights that are spread over processes.
    """
    check_counts(most=most)
    require_unsharded(require_module(unwrap(model) if isinstance(model, nn.Module) else model), "states are copies")
    return Snapshots(unwrap(model), most)


# Networks and their states.


def _state_of(network: nn.Module) -> State:
    return {
        name: tensor.detach().clone() for name, tensor in network.state_dict().items() if isinstance(tensor, Tensor)
    }


def _equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _copied(model: nn.Module) -> nn.Module:
    """A copy to be trained: gradients are none of its."""
    try:
        network = copy.deepcopy(model)
    except Exception as error:
        raise UnsupportedError(
            f"the model cannot be copied ({error}), and states are copies of it. Remove what copy.deepcopy refuses, "
            "such as tensors that are no leaves, open files and locks."
        ) from error
    network.zero_grad(set_to_none=True)
    return network


def _with_state(model: nn.Module, state: State) -> nn.Module:
    network = _copied(model)
    network.load_state_dict(state, strict=False)  # what is no tensor in a state is as in the model
    return network


def _shrink_and_perturb(network: nn.Module) -> None:
    """θ ← θ/2 + θ₀ with fresh initial weights θ₀; half-way to θ₀ where these are one number. In place."""
    trained = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    for path, module in network.named_modules():
        own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
        reset: Any = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))  # attention's
        if own and not callable(reset):
            where = f"module {path!r}, a {type(module).__name__}" if path else f"the {type(module).__name__}"
            raise UnsupportedError(
                f"{where} has parameters {own} of its own and no reset_parameters(), which draws fresh initial "
                "weights; define it, or train further networks yourself and give them to MixtureLaplace."
            )
        if own:
            reset()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in frozen:
                parameter.copy_(trained[name])
                continue
            fresh = parameter.clone()
            is_constant = bool((fresh == fresh.flatten()[:1]).all()) if fresh.numel() > 1 else False
            parameter.copy_(0.5 * trained[name] + (0.5 if is_constant else 1.0) * fresh)


# Scores of all states on held-out data.


@dataclass(frozen=True)
class _LogDensities:
    """Log densities of N held-out targets under K networks."""

    values: Tensor  # `[N, K]`, float64
    inputs: Tensor  # Of which input each target is, `[N]`: positions of one input are no sample by themselves
    sigma: float | None  # Noise of the network's residuals, where it was asked for

    @classmethod
    def from_data(
        cls,
        networks: Sequence[nn.Module],
        likelihood: Likelihood | LikelihoodName,
        read: dict[str, Any],
        loader: Iterable[Any],
        sigma: float | Tensor | None,
        progress_bar: bool,
    ) -> _LogDensities:
        probes = [_probe(network, likelihood, read) for network in networks]
        first, n_inputs = probes[0], 0
        parts: list[tuple[list[Tensor], Tensor]] = []  # outputs of all networks, and targets, of a batch
        inputs: list[Tensor] = []
        for name, x, y in Validation(loader, progress_bar=progress_bar).batches(first, "snapshots"):
            with named(name):
                rows = [outputs(probe.engine, x) for probe in probes]
                targets = Targets.from_outputs(first, rows[0].values, y, rows[0].positions)
                each = [targets.counted(row.values) for row in rows]
            per_input = math.prod(rows[0].positions)
            known = torch.arange(len(rows[0].values)) // per_input + n_inputs
            n_inputs += len(rows[0].values) // per_input
            parts.append(([f for f, _ in each], each[0][1]))
            inputs.append(known if targets.rows is None else known[targets.rows.cpu()])
        noise = sigma if sigma is not None or not first.likelihood.has_noise else _noise(first, parts)
        values = torch.cat([_log_densities(first, f, y, noise) for f, y in parts])
        found = noise if sigma is None and first.likelihood.has_noise else None
        return cls(values.cpu(), torch.cat(inputs), None if found is None else float(found))

    def choice(self, origins: Sequence[int]) -> tuple[list[int], SnapshotChoice]:
        """Indices of the networks that are chosen, the network first, and why."""
        every = stacking_weights(self.values, pseudo_counts=0.0, n_steps=_STEPS)
        kept = sorted({0, *(int(i) for i in (every >= _LEAST_WEIGHT).nonzero().flatten())})
        pool = every[kept] * (every[kept] >= _LEAST_WEIGHT)
        weights = 0.5 * pool / pool.sum() if float(pool.sum()) > 0 else torch.zeros_like(pool)
        weights[0] = 1 - weights[1:].sum()
        gap = self.values[:, 0] - torch.logsumexp(self.values[:, kept] + weights.log(), 1)
        n_data, mean, error = self._paired(gap)
        n_errors = caution(n_data) * (0.5 if n_data >= _MANY else 1.0)
        network = -float(self.values[:, 0].mean())
        found = SnapshotChoice(
            n_data, network, network + mean, error, n_errors, False, weights, tuple(origins[i] for i in kept)
        )
        if len(kept) > 1 and mean + n_errors * error <= 0:
            return kept, found
        return [0], replace(found, is_network=True, weights=torch.ones(1, dtype=weights.dtype), origins=(0,))

    def _paired(self, gap: Tensor) -> tuple[int, float, float]:
        """Number of inputs, mean of a difference `[N]` and its standard error, between inputs."""
        n_data, mean = int(self.inputs.max()) + 1, float(gap.mean())
        residuals = gap.new_zeros(n_data).index_add(0, self.inputs, gap - mean)
        if n_data < 2:
            return n_data, mean, math.inf
        return n_data, mean, float((residuals.square().sum() * n_data / (n_data - 1)).sqrt()) / len(gap)


def _probe(network: nn.Module, likelihood: Likelihood | LikelihoodName, read: dict[str, Any]) -> Posterior:
    """A posterior that is never fitted: it runs the network as all of them do."""
    return from_names(network, likelihood, SubsetOfWeights.ALL, HessianStructure.DIAG, **read).snapshot()


def _noise(posterior: Posterior, parts: Sequence[tuple[list[Tensor], Tensor]]) -> Tensor:
    """Root mean square of the network's residuals."""
    squares = torch.cat([(posterior.likelihood.inverse_link(f[0]) - y).square().flatten() for f, y in parts])
    return squares[squares.isfinite()].mean().sqrt().clamp(min=torch.finfo(squares.dtype).tiny)


def _log_densities(posterior: Posterior, f: Sequence[Tensor], y: Tensor, sigma: float | Tensor | None) -> Tensor:
    """Of targets `[R]` under the networks with outputs f, `[R, K]`, float64."""
    likelihood, score = posterior.likelihood, find_score("nll", posterior.likelihood)
    noise = torch.as_tensor(1.0 if sigma is None else sigma, dtype=f[0].dtype, device=f[0].device)
    return torch.stack(
        [-widened(score(likelihood, likelihood.target.at_outputs(likelihood, one), y, noise)) for one in f], 1
    )
