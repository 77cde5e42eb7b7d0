"""Energies and forces: their joint covariance against a dense oracle, shallow ensembles, and bad input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace, MixtureLaplace, metrics
from laplace.errors import DataWarning, InvalidArgument, InvalidData, UnsupportedError
from laplace.extensions.atoms import (
    EnergyForces,
    ForceGaussian,
    crps_loss,
    energy_forces,
    nll_loss,
    scale_to_residuals,
    shallow_ensemble,
)
from tests.reference import atoms as oracle
from tests.reference.compare import assert_close

WEIGHTS = (0.5, 4.0)
PRIOR = 0.7
HEAD = ["head.weight", "head.bias"]


def network(seed: int = 0, **options: Any) -> oracle.MessagePassing:
    torch.manual_seed(seed)
    return oracle.MessagePassing(**options).double()


def configurations(n_data: int = 5, n_atoms: int = 4, *, periodic: bool = False, seed: int = 1) -> dict[str, Tensor]:
    """Of one to n atoms each, those that are not there as species −1."""
    generator = torch.Generator().manual_seed(seed)
    species = torch.randint(oracle.N_SPECIES, (n_data, n_atoms), generator=generator)
    absent = torch.arange(n_atoms) >= (n_atoms - torch.arange(n_data) % n_atoms).unsqueeze(1)
    cell = torch.eye(3).expand(n_data, 3, 3) * 2.2 + 0.1 * torch.randn(n_data, 3, 3, generator=generator)
    return {
        "positions": 1.2 * torch.randn(n_data, n_atoms, 3, dtype=torch.float64, generator=generator),
        "species": species.masked_fill(absent, -1),
        "cell": cell.double() * periodic,
    }


def observations(model: nn.Module, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Energies and forces near those of a network, NaN for atoms that are not there."""
    generator = torch.Generator().manual_seed(2)
    f = oracle.energies_and_forces(model, x).detach()
    f = f + 0.1 * torch.randn(f.shape, dtype=f.dtype, generator=generator)
    return f[:, 0], f[:, 1:].unflatten(1, (-1, 3)).masked_fill((x["species"] < 0).unsqueeze(2), torch.nan)


def batches(potential: EnergyForces, x: dict[str, Tensor], size: int = 2) -> list[Any]:
    y = potential.targets(*observations(potential.model, x))
    return [({key: part[i : i + size] for key, part in x.items()}, y[i : i + size]) for i in range(0, len(y), size)]


def fitted(weights: Any = "all", structure: Any = "full", *, periodic: bool = False, **options: Any) -> Any:
    potential = EnergyForces(network(), weights=WEIGHTS)
    kind: Any = Laplace
    la = kind(potential, potential.likelihood, weights, structure, prior_precision=PRIOR, **options)
    la.fit(batches(potential, configurations(periodic=periodic)))
    return la


def output_weights(x: dict[str, Tensor]) -> Tensor:
    """Weights of energies and forces, zero for atoms that are not there, `[B, 1 + 3n]`."""
    is_atom = (x["species"] >= 0).double().repeat_interleave(3, 1)
    return torch.cat([torch.full((len(is_atom), 1), WEIGHTS[0]), WEIGHTS[1] * is_atom], 1).double()


def expected_curvature(model: oracle.MessagePassing, x: Any, names: list[str], structure: str) -> Tensor:
    rows = oracle.jacobian(model, x, names)
    whole = oracle.curvature(rows, output_weights(x))
    if structure == "full":
        return whole
    if structure == "diag":
        return whole.diagonal().diag()
    sizes = [model.get_parameter(name).numel() for name in names]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    blocks = [whole[end - size : end, end - size : end] for end, size in zip(ends, sizes, strict=True)]
    if "species.weight" in names:
        a, b = oracle.species_factors(model, x, output_weights(x))
        blocks[names.index("species.weight")] = torch.kron(b, a)
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("periodic", [False, True], ids=["open", "periodic"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_energies_and_forces_have_the_covariance_of_the_oracle(structure: str, weights: str, periodic: bool) -> None:
    options = {"backend_kwargs": {"kfac_approx": "reduce"}} if structure == "kron" else {}
    la = fitted(weights, structure, periodic=periodic, **options)
    model, x = network(), configurations(periodic=periodic)
    names = [name for name, _ in model.named_parameters()] if weights == "all" else HEAD
    precision = expected_curvature(model, x, names, structure) + PRIOR * torch.eye(la.n_params, dtype=torch.float64)
    other = configurations(3, periodic=periodic, seed=7)
    rows = oracle.jacobian(model, other, names)
    covariance = oracle.covariance(rows, precision)
    found = energy_forces(la, other)
    assert_close(found.covariance, covariance, "backend", label="covariance")
    assert_close(found.energy_variance, covariance[:, 0, 0], "backend")
    variances = covariance.diagonal(dim1=1, dim2=2)[:, 1:].unflatten(1, (-1, 3))
    assert_close(found.force_variance, variances, "backend")
    f = oracle.energies_and_forces(model, other).detach()
    assert_close(found.energy, f[:, 0], "algebra")
    assert_close(found.forces.flatten(1), f[:, 1:], "algebra")


def test_the_oracle_has_the_gradient() -> None:
    model, x = network(), configurations(2, periodic=True)
    f = oracle.energies_and_forces(model, x).detach()
    for atom, axis in ((0, 0), (1, 2)):
        step = torch.zeros_like(x["positions"])
        step[:, atom, axis] = 1e-5
        ends = [model(**{**x, "positions": x["positions"] + sign * step}) for sign in (1, -1)]
        assert_close(f[:, 1 + 3 * atom + axis], ((ends[1] - ends[0]) / 2e-5).detach(), "finite_difference")


def test_images_pull_at_each_other() -> None:
    alone, among = (configurations(4, periodic=periodic) for periodic in (False, True))
    model = network()
    assert (model(**alone) - model(**among)).abs().min() > 1e-6


def test_the_last_layer_is_the_rigidity_of_features_summed_over_atoms() -> None:
    """σ² = α φᵀ (ΦᵀΦ + ς)⁻¹ φ, with α and ς by two arguments, or by the calibration of residuals."""
    model = network()
    model.head = nn.Linear(4, 1, bias=False).double()
    x, other = configurations(6), configurations(3, seed=9)
    alpha, ridge = 0.3, 0.05
    kind: Any = Laplace
    la = kind(
        model, "regression", "last_layer", "full", sigma_noise=alpha**0.5, prior_precision=ridge / alpha,
        forward_fn=lambda network, x: network(**x).unsqueeze(1),
    )  # fmt: skip

    def summed(x: dict[str, Tensor]) -> Tensor:
        return (model.features(**x) * (x["species"] >= 0).unsqueeze(2)).sum(1).detach()

    def observed(x: dict[str, Tensor]) -> Tensor:
        return (model(**x).detach() + summed(x) @ torch.tensor([1.0, -2.0, 0.5, 1.5]).double()).unsqueeze(1)

    la.fit([(x, observed(x))])

    def rigidity(alpha: Any, ridge: Any) -> Tensor:
        inside = torch.linalg.inv(summed(x).T @ summed(x) + ridge * torch.eye(4, dtype=torch.float64))
        return alpha * torch.einsum("bd,de,be->b", summed(other), inside, summed(other))

    assert_close(la.predict(other).latent_variance[:, 0], rigidity(alpha, ridge), "algebra")
    held_out = configurations(60, seed=11)
    chosen = la.calibrate([(held_out, observed(held_out))])
    assert chosen.scale > 0
    assert chosen.tilt is None
    squares = chosen.network_noise**2
    alpha, ridge = chosen.scale * squares, squares * chosen.prior_precision
    assert_close(la.predict(other).latent_variance[:, 0], rigidity(alpha, ridge), "algebra")


@pytest.mark.parametrize(("weights", "structure"), [("last_layer", "full"), ("all", "diag")])
def test_residuals_scale_the_covariance(weights: str, structure: str) -> None:
    la, x = fitted(weights, structure), configurations(4, seed=5)
    before = la.predict(x).latent_variance
    held_out = batches(EnergyForces(network(), weights=WEIGHTS), configurations(6, seed=6))
    alpha = scale_to_residuals(la, held_out)
    assert_close(la.predict(x).latent_variance, alpha * before, "algebra")
    assert abs(scale_to_residuals(la, held_out) - 1) < 1e-9
    with pytest.raises(InvalidData, match="no observed number with a variance"):
        scale_to_residuals(la, [])


def test_members_have_the_posterior_and_share_the_network() -> None:
    la, x = fitted("last_layer"), configurations(3, seed=5)
    ensemble = shallow_ensemble(la, 500, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        members = ensemble(x)
    assert_close(members.mean(0), EnergyForces(network(), weights=WEIGHTS)(x).detach(), "algebra")
    truth = la.predict(x).latent_covariance
    centred = members - members.mean(0)
    found = torch.einsum("sbc,sbd->bcd", centred, centred) / len(members)
    spread = truth.diagonal(dim1=1, dim2=2)
    error = ((truth.square() + spread.unsqueeze(1) * spread.unsqueeze(2)) / len(members)).sqrt()
    assert_close(found, truth, "mc", standard_error=error)


def test_members_are_the_network_with_their_heads() -> None:
    la, x = fitted("last_layer"), configurations(3, seed=5)
    ensemble = shallow_ensemble(la, 4, generator=torch.Generator().manual_seed(0))
    members = ensemble(x)
    for k in range(4):
        model = network()
        with torch.no_grad():
            for name, stacked in zip(HEAD, ensemble.heads, strict=True):
                model.get_parameter(name).copy_(stacked[k])
        assert_close(members[k].detach(), EnergyForces(model, weights=WEIGHTS)(x).detach(), "algebra")


def test_a_member_by_member_pass_is_the_same() -> None:
    class WritesInPlace(oracle.MessagePassing):
        def forward(self, positions: Tensor, species: Tensor, cell: Tensor) -> Tensor:
            atoms = self.head(self.features(positions, species, cell)).squeeze(2) * (species >= 0)
            total = positions.new_zeros(len(positions))
            return total.index_add_(0, torch.arange(len(total)), atoms.sum(1))

    la, x = fitted("last_layer"), configurations(3, seed=5)
    ensemble = shallow_ensemble(la, 4, generator=torch.Generator().manual_seed(0))
    expected = ensemble(x)
    other = copy.deepcopy(ensemble)
    other.potential.model.__class__ = WritesInPlace
    assert_close(other(x).detach(), expected.detach(), "algebra")


@pytest.mark.parametrize("loss", [crps_loss, nll_loss])
def test_an_ensemble_is_trained(loss: Any) -> None:
    la = fitted("last_layer")
    ensemble = shallow_ensemble(la, 8, generator=torch.Generator().manual_seed(0))
    (x, y) = batches(EnergyForces(network(), weights=WEIGHTS), configurations(), 5)[0]
    optimizer = torch.optim.Adam([p for p in ensemble.parameters() if p.requires_grad], lr=3e-3)
    found = []
    for _ in range(8):
        optimizer.zero_grad()
        value = loss(ensemble(x), y)
        value.backward()
        optimizer.step()
        found.append(value.item())
    assert found[-1] < found[0]
    assert all(p.grad is not None for p in ensemble.parameters() if p.requires_grad)
    assert la.predict(x).mean.isfinite().all()  # the network of the posterior is another


def test_losses_are_those_of_a_gaussian() -> None:
    generator = torch.Generator().manual_seed(0)
    members = torch.randn(5, 3, 4, dtype=torch.float64, generator=generator)
    y = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    mean, variance = members.mean(0), members.var(0, correction=0) + 0.1**2
    assert_close(crps_loss(members, y, 0.1), metrics.gaussian_crps(mean, variance, y) / 4, "algebra")
    assert_close(nll_loss(members, y, 0.1), metrics.gaussian_nll(mean, variance, y) / 4, "algebra")
    members[:, 0, 0] = 0.0  # an atom that is not there
    members.requires_grad_()
    y[0, 0] = torch.nan
    (crps_loss(members, y) + nll_loss(members, y)).backward()
    assert members.grad is not None
    assert members.grad.isfinite().all()


def test_an_ensemble_is_exported() -> None:
    ensemble = shallow_ensemble(fitted("last_layer"), 3, generator=torch.Generator().manual_seed(0))
    module = ensemble.export(configurations(4))
    other = configurations(6, seed=8)
    assert_close(module(**other).detach(), ensemble(other).detach(), "algebra")


def test_functions_are_drawn_of_all_weights() -> None:
    la, x = fitted("all", "diag"), configurations(3, seed=5)
    (function,) = laplace.draw(la, 1, generator=torch.Generator().manual_seed(0))
    step = la.sample(1, torch.Generator().manual_seed(0))[0] - la.expansion_point
    model = network()
    names = [name for name, _ in model.named_parameters()]
    scale = torch.tensor([WEIGHTS[0] ** 0.5] + [WEIGHTS[1] ** 0.5] * 12, dtype=torch.float64)
    moved = scale * (oracle.energies_and_forces(model, x).detach() + oracle.jacobian(model, x, names) @ step)
    assert_close(function(x).detach(), moved, "backend")


def test_forces_follow_the_positions_and_leave_them() -> None:
    potential, x = EnergyForces(network(), weights=WEIGHTS), configurations(2)
    x["positions"].requires_grad_()
    potential(x)[:, 0].sum().backward()
    f = oracle.energies_and_forces(network(), {**x, "positions": x["positions"].detach()})
    assert_close(x["positions"].grad, -(WEIGHTS[0] ** 0.5) * f[:, 1:].detach().view_as(x["positions"]), "algebra")
    x["positions"] = x["positions"].detach()
    with torch.no_grad():
        assert not potential(x).requires_grad
    with torch.inference_mode():
        assert_close(potential(x), potential.packed(f[:, 0], f[:, 1:].unflatten(1, (-1, 3)), x).detach(), "algebra")
    assert not x["positions"].requires_grad


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_variances_follow_the_positions(weights: str) -> None:
    la, x = fitted(weights, "diag", enable_backprop=True), configurations(2, seed=5)
    x["positions"].requires_grad_()
    la.predict(x).latent_variance[0, 2].backward()
    step = torch.zeros_like(x["positions"])
    step[0, 1, 2] = 1e-5
    start = x["positions"].detach()
    ends = [la.predict({**x, "positions": start + sign * step}).latent_variance[0, 2] for sign in (1, -1)]
    gradient = x["positions"].grad
    assert gradient is not None
    assert_close(gradient[0, 1, 2], (ends[0] - ends[1]).detach() / 2e-5, "finite_difference")


def test_targets_in_every_layout_come_back() -> None:
    potential = EnergyForces(network(), weights=WEIGHTS, n_atoms=5)
    energies, forces = observations(network(), configurations())
    y = potential.targets(energies, forces)
    listed = potential.targets(energies, [one[~one.isnan().any(1)] for one in forces])
    assert y.shape == (5, 16)
    assert torch.equal(y.nan_to_num(9.0), listed.nan_to_num(9.0))
    back = potential.unpacked(y)
    assert_close(back[0], energies, "exact")
    assert_close(back[1][:, :4], forces, "exact")
    assert_close(potential.unpacked(y.square(), 2)[0], energies.square(), "algebra")
    assert potential.targets(energies, [None] * 5)[:, 1:].isnan().all()
    assert potential(configurations()).shape == (5, 16)


def test_mixtures_of_potentials() -> None:
    parts = [fitted("last_layer"), fitted("last_layer", "diag")]
    x = configurations(2, seed=3)
    found = energy_forces(MixtureLaplace(parts), x)
    mean = sum(energy_forces(la, x).covariance for la in parts) / 2
    assert_close(found.covariance, mean, "algebra")


def test_graphs_are_configurations() -> None:
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Batch, Data

    class OfGraphs(nn.Module):
        """The network on padded tensors, given graphs."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, graphs: Any) -> Tensor:
            number = torch.zeros(len(graphs.pos), dtype=torch.long) if graphs.batch is None else graphs.batch
            counts = torch.bincount(number)
            within = torch.arange(len(number)) - (counts.cumsum(0) - counts)[number]
            where = number, within
            positions = graphs.pos.new_zeros(len(counts), 4, 3).index_put(where, graphs.pos)
            species = torch.full((len(counts), 4), -1).index_put(where, graphs.species)
            return self.inner(positions, species, positions.new_zeros(len(counts), 3, 3))

    x = configurations()
    present = x["species"] >= 0
    graphs = [
        Data(pos=pos[there], species=species[there], num_nodes=int(there.sum()))
        for pos, species, there in zip(x["positions"], x["species"], present, strict=True)
    ]
    potential = EnergyForces(OfGraphs(), weights=WEIGHTS, n_atoms=4, positions="pos")
    y = EnergyForces(network(), weights=WEIGHTS).targets(*observations(network(), x))
    batch: Any = Batch.from_data_list(graphs)  # pyright: ignore[reportArgumentType]
    assert_close(potential(batch).detach(), EnergyForces(network(), weights=WEIGHTS)(x).detach(), "algebra")
    for weights, structure in (("all", "diag"), ("last_layer", "full")):
        kind: Any = Laplace
        la = kind(potential, potential.likelihood, weights, structure, prior_precision=PRIOR)
        la.fit([(batch, y)])
        expected = energy_forces(fitted(weights, structure), x).covariance
        assert_close(energy_forces(la, batch).covariance, expected, "backend")
    assert_close(energy_forces(la, graphs[1]).energy, energy_forces(la, batch).energy[1:2], "algebra")
    with pytest.raises(InvalidArgument, match="n_atoms=None with positions"):
        EnergyForces(OfGraphs(), positions="pos")(batch)
    with pytest.raises(InvalidData, match="has 4 atoms, and EnergyForces"):
        EnergyForces(OfGraphs(), positions="pos", n_atoms=3)(batch)


# Bad input.


class Detached(oracle.MessagePassing):
    def forward(self, positions: Tensor, species: Tensor, cell: Tensor) -> Tensor:
        return super().forward(positions.detach(), species, cell)


class WithoutGraph(oracle.MessagePassing):
    def forward(self, positions: Tensor, species: Tensor, cell: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(positions, species, cell)


@pytest.mark.parametrize("kind", [Detached, WithoutGraph])
def test_energies_without_a_graph_are_refused(kind: Any) -> None:
    potential = EnergyForces(kind().double())
    with pytest.raises(UnsupportedError, match=r"no graph that leads to the positions, 'positions' of the inputs"):
        potential(configurations())
    x = configurations()
    y = potential.targets(torch.zeros(5, dtype=torch.float64), torch.zeros(5, 4, 3, dtype=torch.float64))
    with pytest.raises(UnsupportedError, match="no graph that leads"):
        Laplace(potential, "regression", "all", "diag").fit([(x, y)])


@pytest.mark.parametrize(
    ("factor", "message"),
    [(-1.0, "they have another sign, for forces are −∂E/∂x. Give"), (27.2114, "27.21 is the ratio of Hartree and eV"),
     (1 / 51.4221, "51.42 is the ratio"), (-1 / 23.0605, "another sign, for forces are −∂E/∂x and 23.06 is the ratio"),
     (3.3, "look at their units"), (1.0, ""), (1.3, "")],
)  # fmt: skip
def test_forces_of_another_sign_or_unit_are_noticed(factor: float, message: str) -> None:
    potential, x = EnergyForces(network(), weights=WEIGHTS), configurations()
    f = oracle.energies_and_forces(network(), x).detach()
    y = potential.targets(f[:, 0], factor * f[:, 1:].unflatten(1, (-1, 3)))
    la = Laplace(potential, potential.likelihood, "last_layer", "diag")
    if not message:
        la.fit([(x, y)])
        return
    with pytest.warns(DataWarning, match=f"forces of the data are {factor:.4g} times.*{message}"):
        la.fit([(x, y)])


def test_other_residuals_warn_of_nothing() -> None:
    f = torch.randn(20, 7, generator=torch.Generator().manual_seed(0))
    ForceGaussian().check_targets(f, torch.randn(20, 7))
    ForceGaussian().check_targets(f, torch.zeros(20, 7))
    ForceGaussian().check_targets(f[:1], -f[:1])  # too few


def test_what_is_wrong_is_said() -> None:
    potential, x = EnergyForces(network(), n_atoms=4), configurations()
    energies, forces = observations(network(), x)
    with pytest.raises(InvalidArgument, match="stress= is given, but the outputs are energies and forces alone"):
        potential.targets(energies, forces, torch.zeros(5, 3, 3))
    with pytest.raises(InvalidData, match=r"energies have shape \[5, 1\]"):
        potential.targets(energies.unsqueeze(1), forces)
    with pytest.raises(InvalidData, match="a configuration has 5 atoms"):
        potential.targets(energies, torch.zeros(5, 5, 3))
    with pytest.raises(InvalidArgument, match=r"weights=\(1.0, 0.0\)"):
        EnergyForces(network(), weights=(1.0, 0.0))
    with pytest.raises(InvalidData, match=r"positions='positions' of the inputs is NoneType"):
        potential({"pos": x["positions"]})
    with pytest.raises(InvalidData, match=r"returns shape \[5, 4, 1\]"):
        EnergyForces(PerAtom().double())(x)
    with pytest.raises(InvalidArgument, match="la is a posterior of a Linear"):
        la = Laplace(nn.Linear(3, 1), "regression", "last_layer", "diag")
        energy_forces(la.fit([(torch.randn(4, 3), torch.randn(4, 1))]) or la, x)
    with pytest.raises(InvalidArgument, match="more than the last layer"):
        shallow_ensemble(fitted("all", "diag"))
    with pytest.raises(InvalidArgument, match="n=1"):
        shallow_ensemble(fitted("last_layer"), 1)


class PerAtom(oracle.MessagePassing):
    def forward(self, positions: Tensor, species: Tensor, cell: Tensor) -> Tensor:
        return self.head(self.features(positions, species, cell))
