"""Interatomic potentials: energies and forces with their covariance, and shallow ensembles drawn from a posterior.

A network of energies E(x) of configurations is one of the outputs

    f = (√w_E E, −√w_F ∂E/∂x),    −log p(y | f) = ½ Σ (y − f)² / σ²,

so that a Gaussian over weights gives the joint covariance of the energy and of all components of the forces, by
derivatives of derivatives, and its generalised Gauss–Newton matrix is that of both losses with their weights w. Of the
last layer of a network whose energies are sums over atoms, with features φ = Σ_i φ_i, and of energies alone it is the
"rigidity" σ²(x) = α φᵀ (ΦᵀΦ + ς)⁻¹ φ (Bigi et al., 2024), with α = σ² and ς = σ²δ for a prior precision δ.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from laplace.core import batch as batches
from laplace.core import scores
from laplace.core.arguments import check_counts, checked
from laplace.core.batch import Inputs
from laplace.core.checks import require
from laplace.core.memory import ran_out
from laplace.core.precision_policy import widened
from laplace.engines.native.autograd import BackwardPasses
from laplace.errors import DataWarning, InvalidArgument, InvalidData, UnsupportedError, warn
from laplace.extensions.asked import Asked, group_of, posterior_of
from laplace.extensions.drawn import draw
from laplace.likelihoods.gaussian import Gaussian
from laplace.mixture.mixture import MixtureLaplace
from laplace.parametric import ParametricLaplace
from laplace.weights.problem import Caller


class EnergyForces(nn.Module):
    """A network of energies with forces: outputs (√w_E E, −√w_F ∂E/∂x), `[B, 1 + 3n]`, of B configurations.

    It is the network that a posterior is of:

        potential = EnergyForces(model, weights=(1.0, 100.0))
        la = Laplace(potential, potential.likelihood, "last_layer", "full")
        la.fit([(x, potential.targets(energies, forces)) for x, energies, forces in batches])
        found = energy_forces(la, x)

    Configurations are mappings, or dataclasses, of tensors with the data in their first dimension and positions
    `[B, n, 3]`, where those with fewer atoms are filled up; a tensor of such positions; or graphs of PyTorch Geometric,
    with positions `[N, 3]` of all atoms. Whatever else the network reads is passed along: species, neighbours, cells.
    In float32 the derivatives of derivatives lose digits; fit potentials in float64 where you can.

    Args:
        model: Returns energies `[B]` or `[B, 1]`, or a mapping with these under `"energy"`.
        weights: w_E and w_F, the weights of squared errors of an energy and of a component of a force in the loss. They
            are 1/σ² of both, up to a factor that `sigma_noise` has.
        n_atoms: Largest number n of atoms of a configuration; None for that of the positions `[B, n, 3]`.
        positions: Key or attribute of the positions.
        batch: Of graphs, key or attribute of the number of each atom's configuration, `[N]`, ascending.

    Raises:
        InvalidArgument: A weight that is not positive, or a number of atoms that is no positive integer.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: tuple[float, float] = (1.0, 1.0),
        n_atoms: int | None = None,
        positions: str = "positions",
        batch: str = "batch",
    ) -> None:
        super().__init__()
        if n_atoms is not None:
            check_counts(n_atoms=n_atoms)
        if len(weights) != 2 or not all(0 < weight < float("inf") for weight in weights):
            raise InvalidArgument(f"weights={weights!r}; two positive numbers are accepted, of energies and of forces.")
        self.model = model
        self.weights, self.n_atoms = (float(weights[0]), float(weights[1])), n_atoms
        self.positions, self.batch = positions, batch

    @property
    def likelihood(self) -> ForceGaussian:
        """Regression that warns of forces with another sign or unit; `.loss(potential(x), y)` is ½ Σ (y − f)²."""
        return ForceGaussian()

    def forward(self, configurations: Inputs) -> Tensor:
        """Energies and forces, times the roots of their weights, `[B, 1 + 3n]`; zeros for atoms that are not there.

        Raises:
            InvalidData: No positions, or energies of another shape.
            UnsupportedError: The energies have no graph that leads to the positions.
        """
        create_graph = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            energies, gradient = self._differentiated(configurations, create_graph=create_graph)
        f = self.packed(energies, -gradient, configurations)
        return f if create_graph else f.detach()

    def _differentiated(self, configurations: Inputs, *, create_graph: bool) -> tuple[Tensor, Tensor]:
        """Energies `[B]` and their gradients in the layout of the positions."""
        positions = self.read_positions(configurations)

        def total(at: Tensor) -> tuple[Tensor, Tensor]:
            energies = energies_of(self.model, self._at(configurations, at))
            return energies.sum(), energies

        try:
            leaf = positions if create_graph and positions.requires_grad else _leaf(positions)
        except RuntimeError:  # inside of torch.func, which differentiates by itself
            return tuple(reversed(grad(total, has_aux=True)(positions)))  # type: ignore[return-value]
        value, energies = total(leaf)
        found = [None]
        if value.requires_grad:
            found = torch.autograd.grad(value, [leaf], create_graph=create_graph, allow_unused=True)
        return energies, require_graph(found[0], self.positions)

    def read_positions(self, configurations: Inputs) -> Tensor:
        """The positions among the inputs, `[B, n, 3]` or `[N, 3]`."""
        found = configurations
        if not isinstance(configurations, Tensor):
            found = batches.part(configurations, self.positions)
        if not isinstance(found, Tensor) or not found.is_floating_point() or found.ndim not in (2, 3):
            what = type(found).__name__ if not isinstance(found, Tensor) else f"{found.dtype} {list(found.shape)}"
            raise InvalidData(
                f"positions={self.positions!r} of the inputs is {what}; real numbers [B, n, 3], or [N, 3] of graphs, "
                "are accepted. Say by EnergyForces(model, positions=...) under which key they are."
            )
        return found

    def _at(self, configurations: Inputs, positions: Tensor) -> Inputs:
        """The configurations at other positions."""
        if isinstance(configurations, Tensor):
            return positions
        if isinstance(configurations, Mapping):
            moved = {**configurations, self.positions: positions}
            return moved if isinstance(configurations, dict) else type(configurations)(moved)  # type: ignore[call-arg]
        moved = copy.copy(configurations)
        setter = object.__setattr__ if is_dataclass(configurations) else setattr
        setter(moved, self.positions, positions)
        return moved

    def at_leaf(self, configurations: Inputs) -> tuple[Inputs, Tensor]:
        """The configurations at positions that gradients lead to, and these positions."""
        positions = self.read_positions(configurations)
        leaf = positions if positions.requires_grad else _leaf(positions)
        return self._at(configurations, leaf), leaf

    def packed(self, energies: Tensor, forces: Tensor, configurations: Inputs) -> Tensor:
        """Outputs `[..., B, 1 + 3n]` of energies `[..., B]` and forces in the layout of the positions."""
        if self.read_positions(configurations).ndim == 2:
            forces = self._by_configuration(forces, configurations, energies.shape[-1])
        elif self.n_atoms is not None:
            _require_room(torch.tensor(forces.shape[-2]), self.n_atoms)
            forces = nn.functional.pad(forces, (0, 0, 0, self.n_atoms - forces.shape[-2]))
        (of_energies, of_forces) = (weight**0.5 for weight in self.weights)
        return torch.cat([of_energies * energies.unsqueeze(-1), of_forces * forces.flatten(-2)], -1)

    def _by_configuration(self, forces: Tensor, configurations: Inputs, n_data: int) -> Tensor:
        """Forces `[..., N, 3]` of all atoms as those of configurations, `[..., B, n, 3]`."""
        if self.n_atoms is None:
            raise InvalidArgument(
                "n_atoms=None with positions [N, 3] of all atoms; say by EnergyForces(model, n_atoms=...) how many the "
                "largest configuration of all data has."
            )
        number = batches.part(configurations, self.batch)
        number = torch.zeros(forces.shape[-2], dtype=torch.long, device=forces.device) if number is None else number
        counts = torch.bincount(number, minlength=n_data)
        _require_room(counts.amax(), self.n_atoms)
        within = torch.arange(len(number), device=number.device) - (counts.cumsum(0) - counts)[number]
        flat = forces.new_zeros(*forces.shape[:-2], n_data * self.n_atoms, 3)
        return flat.index_copy(-2, number * self.n_atoms + within, forces).unflatten(-2, (n_data, self.n_atoms))

    def targets(
        self, energies: Tensor, forces: Tensor | Sequence[Tensor | None], stress: Tensor | None = None
    ) -> Tensor:
        """Targets `[B, 1 + 3n]` of B configurations, NaN where nothing was observed, e.g. for atoms that are not there.

        Args:
            energies: `[B]`, in the unit of the network; NaN for those that are not known.
            forces: `[B, n, 3]`, NaN for atoms that are not there, or `[n_b, 3]` of every configuration, None for
                those that are not known. They are −∂E/∂x, in the units of the network: eV/Å where energies are in eV
                and positions in Å.
            stress: Not accepted.

        Raises:
            InvalidArgument: Stresses, which are no outputs, or lists of forces without `n_atoms`.
            InvalidData: Shapes that do not match.
        """
        if stress is not None:
            raise InvalidArgument(
                "stress= is given, but the outputs are energies and forces alone: leave it out. A cell among the "
                "inputs is read by the network; derivatives with respect to it are no targets."
            )
        if not isinstance(forces, Tensor):
            n = self.n_atoms or max((len(one) for one in forces if one is not None), default=1)
            table = energies.new_full((len(forces), n, 3), torch.nan)
            for row, one in zip(table, forces, strict=True):
                if one is not None:
                    _require_room(torch.tensor(len(one)), n)
                    row[: len(one)] = one
            forces = table
        elif self.n_atoms is not None and forces.ndim == 3:
            _require_room(torch.tensor(forces.shape[1]), self.n_atoms)
            forces = nn.functional.pad(forces, (0, 0, 0, self.n_atoms - forces.shape[1]), value=torch.nan)
        if energies.ndim != 1 or forces.ndim != 3 or forces.shape[::2] != (len(energies), 3):
            raise InvalidData(
                f"energies have shape {list(energies.shape)} and forces {list(forces.shape)}; [B] and [B, n, 3], or a "
                "list of [n_b, 3], are accepted."
            )
        (of_energies, of_forces) = (weight**0.5 for weight in self.weights)
        return torch.cat([of_energies * energies.unsqueeze(1), of_forces * forces.flatten(1)], 1)

    def unpacked(self, f: Tensor, power: int = 1) -> tuple[Tensor, Tensor]:
        """Energies `[...]` and forces `[..., n, 3]` in their own units, of outputs `[..., 1 + 3n]`.

        Args:
            f: Outputs, targets or standard deviations; or with `power` 2 variances.
            power: Of the units.
        """
        (of_energies, of_forces) = (weight ** (-power / 2) for weight in self.weights)
        return of_energies * f[..., 0], of_forces * f[..., 1:].unflatten(-1, (-1, 3))


def energies_of(model: nn.Module, configurations: Inputs) -> Tensor:
    """What a network returns, as energies `[B]`.

    Raises:
        InvalidData: No tensor `[B]` or `[B, 1]`, nor a mapping with one under `"energy"`.
    """
    output = batches.call(model, configurations)
    energies = output if isinstance(output, Tensor) else batches.part(output, "energy")
    if not isinstance(energies, Tensor) or energies.ndim not in (1, 2) or energies.shape[1:] not in ((), (1,)):
        what = f"shape {list(energies.shape)}" if isinstance(energies, Tensor) else f"type {type(output).__name__}"
        raise InvalidData(
            f"the network of energies returns {what}; one energy for every configuration, [B] or [B, 1], or a mapping "
            "with these under 'energy', is accepted."
        )
    return energies.reshape(len(energies))


def _leaf(positions: Tensor) -> Tensor:
    return positions.detach().clone().requires_grad_()


def require_graph(gradient: Tensor | None, name: str) -> Tensor:
    """Refuses energies that do not depend on the positions, as far as autograd knows."""
    if gradient is None:
        raise UnsupportedError(
            f"the energies have no graph that leads to the positions, {name!r} of the inputs, so that there are no "
            "forces: the network runs under torch.no_grad(), detaches them, goes through NumPy, or reads positions or "
            "distances that were computed before under another key. Let it compute distances from the positions."
        )
    return gradient


def _require_room(n: Tensor, n_atoms: int) -> None:
    require(
        n <= n_atoms,
        lambda: InvalidData(f"a configuration has {int(n)} atoms, and EnergyForces(..., n_atoms={n_atoms})."),
    )


_UNITS = {
    27.2114: "Hartree and eV",
    51.4221: "Hartree/Bohr and eV/Å",
    1.8897: "Bohr and Å",
    23.0605: "eV and kcal/mol",
    96.4853: "eV and kJ/mol",
    4.184: "kcal and kJ",
    10.0: "Å and nm",
    627.509: "Hartree and kcal/mol",
    1185.82: "Hartree/Bohr and kcal/mol/Å",
}
"""Ratios of units in use; of the two the first is the larger, or that of the larger force."""


@dataclass(frozen=True)
class ForceGaussian(Gaussian):
    """Regression on energies and forces that looks at the forces' scale: outputs `[B, 1 + 3n]` of `EnergyForces`."""

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Checked targets.

        Raises:
            InvalidData: Another shape, infinite values.

        Warns:
            DataWarning: Forces are those of the network but for a factor, which is named: a sign, or a unit.
        """
        y = super().check_targets(f, y)
        warn_of_scale(f.detach()[:, 1:], y[:, 1:])
        return y


_ALIKE = 0.8
"""Share of the forces' squares that a factor must explain: less tells of a poor network."""

_ENOUGH = 12
"""Components of forces from which a factor is found."""


def warn_of_scale(predicted: Tensor, observed: Tensor) -> None:
    """Warns where observed forces are predicted ones times a factor that is far from 1: r² > 0.8, c < 2/3 or > 3/2."""
    seen = ~observed.isnan()
    f, y = widened(torch.where(seen, predicted, 0.0)), widened(torch.where(seen, observed, 0.0))
    n, ff, fy, yy = torch.stack([seen.sum(), (f * f).sum(), (f * y).sum(), (y * y).sum()]).tolist()
    if n < _ENOUGH or not ff * yy > 0 or fy * fy < _ALIKE * ff * yy or 2 / 3 < fy / ff < 3 / 2:
        return
    factor = fy / ff
    size = max(abs(factor), abs(1 / factor))
    near = min(_UNITS, key=lambda ratio: abs(size / ratio - 1))
    reason = f"{near:.4g} is the ratio of {_UNITS[near]}" if abs(size / near - 1) < 0.1 else "look at their units"
    sign = "they have another sign, for forces are −∂E/∂x" if factor < 0 else ""
    reasons = " and ".join(filter(None, [sign, reason if size > 3 / 2 else ""]))
    warn(
        f"the forces of the data are {factor:.4g} times those of the network, and so explained to "
        f"{fy * fy / (ff * yy):.0%}: {reasons}. Give targets in the units of −∂E/∂x, or scale the network.",
        DataWarning,
    )


# Predictions in the units of energies and forces.


@dataclass(frozen=True, eq=False)
class AtomicPrediction:
    """Energies and forces of B configurations under a posterior, in their own units, without noise of observations.

    Attributes:
        energy: Means, `[B]`.
        forces: Means, `[B, n, 3]`, zeros for atoms that are not there.
        covariance: Joint covariance of the energy and of all components of the forces, `[B, 1 + 3n, 1 + 3n]`.
    """

    energy: Tensor
    forces: Tensor
    covariance: Tensor

    @property
    def energy_variance(self) -> Tensor:
        """Variances of the energies, `[B]`."""
        return self.covariance[:, 0, 0]

    @property
    def force_variance(self) -> Tensor:
        """Variances of the components of the forces, `[B, n, 3]`."""
        return self.covariance.diagonal(dim1=1, dim2=2)[:, 1:].unflatten(1, (-1, 3))


def energy_forces(la: ParametricLaplace | MixtureLaplace, x: Inputs) -> AtomicPrediction:
    """Energies, forces and their joint covariance under a posterior, or a mixture, of an `EnergyForces`.

    Args:
        la: A fitted posterior or mixture.
        x: Configurations.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: The network is no `EnergyForces`.
    """
    potential = potential_of(group_of(la).first.problem.module)
    prediction = la.predict(x)
    mean, covariance = prediction.latent_mean, prediction.latent_covariance
    energy, forces = potential.unpacked(mean)
    scale = mean.new_full((mean.shape[1],), potential.weights[1] ** -0.5)
    scale[0] = potential.weights[0] ** -0.5
    return AtomicPrediction(energy, forces, scale.unsqueeze(1) * covariance * scale)


@checked
def scale_to_residuals(la: ParametricLaplace, loader: Iterable[tuple[Inputs, Tensor]]) -> float:
    """Multiplies the covariance by α = mean (y − f)² / v over held-out data, and returns α (Bigi et al., 2024).

    The weights alone then explain the residuals, without noise, as ensembles of potentials are read. `la.temperature`
    is multiplied by α and `la.prior_precision` divided by it. For intervals of y take `la.calibrate`: it has a noise.

    Args:
        la: A fitted posterior of a regression.
        loader: Batches of configurations and targets that had no part in the training.

    Raises:
        NotFittedError: Before `fit`.
        InvalidData: No observed numbers, or none with a variance.
    """
    squares, variances = [], []
    for x, y in loader:
        prediction = la.predict(x)
        squares.append((y - prediction.latent_mean).square()[~y.isnan()])
        variances.append(prediction.latent_variance[~y.isnan()])
    square, variance = torch.cat(squares or [torch.empty(0)]), torch.cat(variances or [torch.empty(0)])
    some = variance > torch.finfo(variance.dtype).eps * variance.amax() if len(variance) else variance > 0
    if not some.any():
        raise InvalidData(
            "loader holds no observed number with a variance; give batches of (x, potential.targets(...))."
        )
    alpha = (square[some] / variance[some]).mean()
    la.temperature, la.prior_precision = la.temperature * float(alpha), la.prior_precision / alpha
    return float(alpha)


def potential_of(module: nn.Module) -> EnergyForces:
    """The network of a posterior, which must be one of energies and forces.

    Raises:
        InvalidArgument: It is another one.
    """
    if not isinstance(module, EnergyForces):
        raise InvalidArgument(
            f"la is a posterior of a {type(module).__name__}; one of laplace.extensions.atoms.EnergyForces(model) is "
            "accepted."
        )
    return module


# Shallow ensembles.


class ShallowEnsemble(nn.Module):
    """Members that share all of a network of energies but its last layer: `shallow_ensemble(la, n)` makes one.

    `ensemble(x)` gives energies and forces of all members, `[n, B, 1 + 3N]`, as `EnergyForces` lays them out;
    `ensemble.potential.unpacked` has them in their own units. One forward pass serves all members, and one vectorised
    backward pass their forces. All weights can be trained, the heads `heads` and the rest `potential`, of which
    `ensemble.potential.requires_grad_(False)` keeps the latter.
    """

    def __init__(self, potential: EnergyForces, heads: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.potential = potential
        self.heads = nn.ParameterList([nn.Parameter(tensor) for tensor in heads.values()])
        self._names = tuple(f"module.{name}" for name in heads)

    def forward(self, configurations: Inputs) -> Tensor:
        """Outputs of the members, `[n, B, 1 + 3N]`.

        Raises:
            UnsupportedError: The energies have no graph that leads to the positions.
        """
        create_graph = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            x, leaf = self.potential.at_leaf(configurations)
            energies = self._energies(x)
            eye = torch.eye(len(energies), dtype=energies.dtype, device=energies.device)
            passes = BackwardPasses([energies.sum(1)], [leaf], create_graph=create_graph)
            gradient = require_graph(passes.each(eye, loop=False)[0], self.potential.positions)
        f = self.potential.packed(energies, -gradient, configurations)
        return f if create_graph else f.detach()

    def _energies(self, x: Inputs) -> Tensor:
        """Energies of the members, `[n, B]`: what does not depend on the heads is computed once."""
        network, heads = Caller(self.potential.model, energies_of), list(self.heads)

        def one(*tensors: Tensor) -> Tensor:
            return functional_call(network, dict(zip(self._names, tensors, strict=True)), (x,))

        try:
            return vmap(one)(*heads)
        except RuntimeError as error:  # an operation of the network has no rule for several members
            if ran_out(error):
                raise
            return torch.stack([one(*tensors) for tensors in zip(*heads, strict=True)])

    def export(self, example_x: Inputs) -> nn.Module:
        """The ensemble as a plain PyTorch module for batches of any size, that needs this library no longer.

        It is like the result of `laplace.export`: traced at `example_x`, and checked against the ensemble there.

        Args:
            example_x: At least one configuration, in tensors with the data in their first dimension.

        Raises:
            InvalidData: No data.
            UnsupportedError: The ensemble cannot be traced, or its graph depends on the batch.
        """
        from laplace.extensions.export import exported

        return exported(lambda x: self(x).detach(), example_x, None, {})


@checked
def shallow_ensemble(la: Asked, n: int = 32, *, generator: torch.Generator | None = None) -> ShallowEnsemble:
    """An ensemble of n last layers drawn from their posterior, on a copy of the network (Kellner and Ceriotti, 2024).

    The draws θ_s are moved and scaled together so that their mean is the posterior's, θ̂ + √(n/(n − 1)) (θ_s − θ̄):
    each has the posterior's covariance still, and the members' mean is the network's prediction. Fine-tune them by
    `crps_loss` or `nll_loss`.

    Args:
        la: A fitted posterior over the last layer of an `EnergyForces`.
        n: Number of members, at least 2.
        generator: Random generator; the draws are those of `la.sample(n, generator)`.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: n is smaller than 2, or the posterior is not over the last layer of an `EnergyForces`.
        ModelChangedError: The network was trained further after `fit`.
    """
    check_counts(2, n=n)
    posterior = posterior_of(la)
    problem = posterior.problem
    potential_of(problem.module)
    if problem.head is None:
        raise InvalidArgument(
            "la is a posterior over more than the last layer, of which members would share nothing; fit "
            "subset_of_weights='last_layer', or take laplace.draw(la, n)."
        )
    functions = draw(la, n, generator=generator)
    potential = potential_of(functions[0].network.module).requires_grad_()  # pyright: ignore[reportArgumentType]
    refined = posterior.predictive().refined_step
    moved = torch.zeros(sum(problem.layout.sizes)) if refined is None else refined
    heads = {}
    for i, (slot, step) in enumerate(zip(problem.slots, moved.split(problem.layout.sizes), strict=True)):
        centre = potential.get_parameter(slot.name).requires_grad_(False)  # which the members' stand for
        centre = centre + slot.place(step.unsqueeze(0)).view(slot.shape).to(centre)
        steps = torch.stack([getattr(function, f"step_{i}") for function in functions])
        heads[slot.name.removeprefix("model.")] = centre + (n / (n - 1)) ** 0.5 * (steps - steps.mean(0))
    return ShallowEnsemble(potential, heads)


def crps_loss(members: Tensor, y: Tensor, noise: float = 1e-3) -> Tensor:
    """Mean continuous ranked probability score of the members' Gaussian, per observed number, 0-dim.

    Args:
        members: Outputs of an ensemble, `[n, B, C]`.
        y: Targets `[B, C]`, NaN where nothing was observed.
        noise: Standard deviation of the outputs beside the members', in their unit: an atom without neighbours has
            none otherwise.
    """
    return _per_number(scores.gaussian_crps(*_moments(members, noise), y), y)


def nll_loss(members: Tensor, y: Tensor, noise: float = 1e-3) -> Tensor:
    """Mean negative log density of the members' Gaussian, in nats per observed number, 0-dim.

    Args:
        members: Outputs of an ensemble, `[n, B, C]`.
        y: Targets `[B, C]`, NaN where nothing was observed.
        noise: As of `crps_loss`.
    """
    return _per_number(scores.gaussian_nll(*_moments(members, noise), y), y)


def _moments(members: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Mean and variance over members, `[B, C]` each."""
    return members.mean(0), members.var(0, correction=0) + noise**2


def _per_number(losses: Tensor, y: Tensor) -> Tensor:
    return losses.sum() / (~y.isnan()).sum()
