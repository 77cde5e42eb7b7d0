"""Kronecker factors of fewer rows than half of their width: eigenpairs in place of matrices, the rest by its number."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.core.nested import named_tensors
from laplace.curvature import NativeEF, NativeGGN
from laplace.engines.kron_parts import ThinFactor
from laplace.errors import InvalidData
from laplace.structures.kron import KronCurvature
from tests.reference import few_rows
from tests.reference.compare import assert_close

Batches = list[tuple[Tensor, Tensor]]

WIDTHS = (40, 30, 3)
"""Of a network of which four data leave every side but that of the outputs thin."""


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Tanh(), nn.Linear(WIDTHS[1], WIDTHS[2])).to(dtype)


def data(n_data: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Two of the data are the same one."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n_data, WIDTHS[0], generator=generator, dtype=torch.float64).to(dtype)
    x[1] = x[0]
    return x, torch.randint(WIDTHS[2], (n_data,), generator=generator)


def fitted(batches: Batches, model: nn.Module | None = None, structure: str = "kron", **options: Any) -> Any:
    la = Laplace(model or network(), "classification", "all", structure, **options)
    la.fit(batches)
    return la


def split(x: Tensor, y: Tensor, size: int) -> Batches:
    return list(zip(x.split(size), y.split(size), strict=True))


def oracle(la: Any, x: Tensor, deltas: list[float] | float = 1.0) -> few_rows.Posterior:
    each = deltas if isinstance(deltas, list) else [deltas] * 4
    return few_rows.Posterior(few_rows.rows(la.model, x, classification=True), each)


def parts(la: Any) -> Any:
    curvature = la.fitted().curvature
    return (curvature if isinstance(curvature, KronCurvature) else curvature.kron).parts


def ranks(la: Any) -> dict[str, int]:
    return {key: side.rank for key, side in parts(la).thin.items()}


# Numbers, against the oracle of the rows.


@pytest.mark.parametrize("delta", [1.0, 1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_log_determinants(likelihood: str, delta: float, size: int) -> None:
    """Of a classification to 1e-9: its outputs' own side, Σ Λ, is a matrix with rounding in the place of its zero."""
    delta = max(delta, 1e-9) if likelihood == "classification" else delta
    x, y = data()
    la: Any = Laplace(network(), likelihood, "all", "kron")
    la.fit(split(x, y if likelihood == "classification" else torch.randn(4, 3, dtype=x.dtype), size))
    n_columns = 2 if likelihood == "classification" else 3  # rows of softmax's Λ sum to zero
    assert ranks(la) == {"out:0": 4 * n_columns, "in:0": 4, "in:2": 4}
    la.prior_precision = torch.tensor(delta, dtype=torch.float64)
    ratio = la.log_det_posterior_precision - la.log_det_prior_precision
    truth = few_rows.Posterior(few_rows.rows(la.model, x, classification=likelihood == "classification"), [delta] * 4)
    assert ratio.item() == pytest.approx(truth.logdet_ratio(), rel=1e-8)


def test_log_determinants_of_priors_per_tensor() -> None:
    x, y = data()
    la = fitted([(x, y)])
    deltas = [1e-3, 2.0, 1e-6, 0.5]
    la.prior_precision = torch.tensor(deltas, dtype=torch.float64)
    ratio = la.log_det_posterior_precision - la.log_det_prior_precision
    assert ratio.item() == pytest.approx(oracle(la, x, deltas).logdet_ratio(), rel=1e-8)


@pytest.mark.parametrize("size", [3, 8])
def test_eigenvalues_of_a_float32_network_are_those_of_its_rows(size: int) -> None:
    """In float64, as exact as the rows: summed in float32 the smallest ones would be lost."""
    x, y = data(8, torch.float32)
    x[:, 0] *= 1e4
    la = fitted(split(x, y, size), network(torch.float32))
    side = parts(la).thin["in:0"]
    assert side.values.dtype == side.vectors.dtype == torch.float64
    expected = torch.linalg.svdvals(x.double()).square().flip(0)
    assert_close(side.values[0, 1:], expected[1:], "backend")
    assert side.values[0, 0] <= 1e-20 * side.values.max(), "one datum is there twice"


@pytest.mark.parametrize("delta", [1.0, 1e-4])
def test_moments_and_samples(delta: float) -> None:
    x, y = data()
    la = fitted([(x, y)])
    la.prior_precision = torch.tensor(delta, dtype=torch.float64)
    truth, precision = oracle(la, x, delta), la.posterior_precision
    noise = torch.randn(5, la.n_params, dtype=torch.float64)
    own = la.fitted().curvature.precision(torch.ones(1, dtype=torch.float64), la.prior)
    assert_close(own.to_dense(), truth.power(1), "backend")
    assert_close(own.diagonal_of_inverse(), truth.power(-1).diagonal(), "backend")
    assert_close(own.sample(noise), noise @ truth.power(-0.5), "backend")
    assert_close(own.covariance, truth.power(-1), "backend")
    assert_close(own.quad(noise), ((noise @ truth.power(1)) * noise).sum(1), "backend")
    assert_close(precision.to_matrix(), truth.power(1), "backend")


def test_variances_of_predictions() -> None:
    x, y = data()
    la = fitted([(x, y)])
    new = torch.cat([x, torch.randn(3, WIDTHS[0], dtype=torch.float64)])
    jacobians, _ = la.backend.jacobians(new)
    covariance = oracle(la, x).power(-1)
    expected = jacobians @ covariance @ jacobians.mT
    assert_close(la.functional_variance(jacobians), expected, "backend")
    _, variances = la._glm_predictive_distribution(new)
    assert_close(variances, expected, "backend")
    flat = jacobians.flatten(0, 1)
    _, joint = la._glm_predictive_distribution(new, joint=True)
    assert_close(joint, flat @ covariance @ flat.T, "backend")


def test_a_prior_that_varies_within_a_tensor_is_shared_by_the_null_space() -> None:
    """By its mean over all directions of eigenvalue 0, which knows no basis of them."""
    x = torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    la: Any = Laplace(network(), "regression", "all", "kron")
    la.fit([(x, torch.zeros(4, WIDTHS[2], dtype=torch.float64))])
    assert ranks(la) == {"out:0": 12, "in:0": 4, "in:2": 4}
    layers, shape = few_rows.rows(la.model, x, classification=False), (WIDTHS[1], WIDTHS[0])
    varying = torch.linspace(0.5, 2.0, shape[0] * shape[1], dtype=torch.float64)
    la.prior_precision = torch.cat([varying, varying.new_ones(la.n_params - len(varying))])
    inputs, outputs = layers[0]
    expected = few_rows.Posterior(layers, [1.0] * 4).ratios[1:]
    total = torch.stack([ratios.log1p().sum() for ratios in expected]).sum()
    for left, weights_l, times_l in _directions(outputs):
        for right, weights_r, times_r in _directions(inputs):
            mean = weights_l @ varying.view(shape) @ weights_r
            total += times_l * times_r * torch.log(left * right / len(x) + mean)
    assert la.log_det_posterior_precision.item() == pytest.approx(total.item(), rel=1e-8)


def _directions(rows: Tensor) -> list[tuple[Tensor, Tensor, int]]:
    """Eigenvalue, weights of the entries, and multiplicity of every direction, the null space as one."""
    values, vectors = few_rows.eigen(rows)
    count, n = rows.shape
    own = [(values[j], vectors[:, j].square(), 1) for j in range(count)]
    return [*own, (values.new_zeros(()), (1 - vectors[:, :count].square().sum(1)) / (n - count), n - count)]


def test_damping() -> None:
    x, y = data()
    la = fitted([(x, y)])
    own: Any = la.fitted().curvature.precision(torch.ones(1, dtype=torch.float64), la.prior, damping=True)
    ((a, g), _), delta = few_rows.rows(la.model, x, classification=True), 1.0
    left, u = few_rows.eigen(g)
    right, v = few_rows.eigen(a)
    values = torch.outer(left + delta**0.5, right / len(a) + delta**0.5).flatten()
    basis = torch.kron(u, v)
    assert_close(own.to_dense()[: len(values), : len(values)], (basis * values) @ basis.T, "backend")


@pytest.mark.parametrize("structure", ["ekfac", "kron"])
@pytest.mark.parametrize("delta", [1e-2, 1.0])
def test_wider_data_give_the_same_posterior_in_either_form(
    structure: str, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data()
    new = torch.randn(3, WIDTHS[0], dtype=torch.float64)
    thin = fitted(split(x, y, 3), structure=structure)
    assert ranks(thin)
    monkeypatch.setattr(ThinFactor, "holds", staticmethod(lambda rows, width: False))
    dense = fitted(split(x, y, 3), structure=structure)
    assert not ranks(dense)
    for la in (thin, dense):
        la.prior_precision = torch.tensor(delta, dtype=torch.float64)
    assert_close(thin.log_marginal_likelihood(), dense.log_marginal_likelihood(), "backend")
    for kind in ("probit", "mc"):
        generators = [torch.Generator().manual_seed(0) for _ in range(2)]
        first, second = (
            la(new, link_approx=kind, generator=g) for la, g in zip((thin, dense), generators, strict=True)
        )
        assert_close(first, second, "backend")
    assert_close(thin.posterior_variance, dense.posterior_variance, "backend")


# Sums over data.


def test_fits_add_up_until_there_are_too_many_rows() -> None:
    x, y = data(24)
    la = fitted([(x[:3], y[:3])])
    seen = []
    for start in range(3, 24, 3):
        la.fit([(x[start : start + 3], y[start : start + 3])], override=False)
        seen.append(ranks(la).get("in:0"))
        assert all(side.orthonormal for side in parts(la).thin.values())
        assert_close(
            la.log_marginal_likelihood(),
            fitted([(x[: start + 3], y[: start + 3])]).log_marginal_likelihood(),
            "backend",
        )
    assert seen == [6, 9, 12, 15, 18, None, None]
    assert parts(la).factors["in:0"].dtype == torch.float64


def test_curvature_is_scaled_and_subtracted() -> None:
    x, y = data(8)
    la = fitted([(x, y)])
    curvature, part = la.fitted().curvature, fitted([(x[:4], y[:4])]).fitted().curvature
    rest = fitted([(x[4:], y[4:])]).fitted().curvature
    one, prior = torch.ones(1, dtype=torch.float64), la.prior
    assert_close(
        curvature.minus(part).precision(one, prior).to_dense(), rest.precision(one, prior).to_dense(), "backend"
    )
    twice = fitted([(x, y), (x, y)]).fitted().curvature
    assert_close(
        curvature.scaled(2.0).precision(one, prior).to_dense(), twice.precision(one, prior).to_dense(), "backend"
    )


def test_sums_of_shards_are_matrices() -> None:
    x, y = data(4)
    la = fitted([(x, y)])
    with torch.no_grad():
        passes = [la.structure.first_pass(la.engine, la.structure_options) for _ in range(2)]
        for shard, (inputs, labels) in zip(passes, split(x, y, 2), strict=True):
            shard.add(inputs, labels)
        first, second = (shard.sums() for shard in passes)
        for name, tensor in first.items():
            tensor.add_(second[name])
        together = passes[0].finish()
    one = torch.ones(1, dtype=torch.float64)
    whole = la.fitted().curvature.precision(one, la.prior).to_dense()
    assert_close(together.precision(one, la.prior).to_dense(), whole, "backend")


# States.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states_hold_eigenpairs_and_no_rows(dtype: torch.dtype) -> None:
    x, y = data(4, dtype)
    la = fitted([(x, y)], network(dtype))
    stream = io.BytesIO()
    torch.save(la.state_dict(), stream)
    stream.seek(0)
    other = Laplace(network(dtype), "classification", "all", "kron")
    other.load_state_dict(torch.load(stream))
    for delta in (1.0, 1e-6, 1e-12):
        prior = torch.tensor(delta, dtype=dtype)
        assert torch.equal(la.log_marginal_likelihood(prior), other.log_marginal_likelihood(prior))
    assert torch.equal(la(x), other(x))
    tensors = dict(named_tensors(la.fitted().curvature.state()))
    assert tensors["thin.in:0.values"].shape == (1, 4) and tensors["thin.in:0.vectors"].shape == (1, WIDTHS[0], 4)
    held = tensors["thin.in:0.vectors"][0].to(dtype)
    assert not any(torch.allclose(column * datum.norm(), datum) for column in held.T for datum in x)
    more = data(6, dtype)
    for la_or_other in (la, other):
        la_or_other.fit([more], override=False)
    assert ranks(other)["in:0"] == 10
    assert torch.equal(la.log_marginal_likelihood(), other.log_marginal_likelihood())


def test_moves_between_dtypes() -> None:
    x, y = data(4, torch.float32)
    la = fitted([(x, y)], network(torch.float32))
    before = la.log_marginal_likelihood()
    la.to(dtype=torch.float64)
    assert_close(la.log_marginal_likelihood().float(), before, "float32")
    la.to(dtype=torch.float32)
    assert_close(la.log_marginal_likelihood(), before, "float32")
    assert torch.isfinite(la(x)).all()


def test_curvature_as_users_hold_it_is_dense() -> None:
    x, y = data()
    la = fitted([(x, y)])
    (a, g), (b, _) = few_rows.rows(la.model, x, classification=True)
    factors = la.H.kfacs
    assert_close(factors[0][0], g.T @ g, "backend")
    assert_close(factors[0][1], a.T @ a / len(a), "backend")
    assert_close(factors[2][1], b.T @ b / len(b), "backend")
    assert_close(la.H_facs.kfacs[0][1], a.T @ a / len(a), "backend")
    vectors, values = la.H.eigenvectors[0][1], la.H.eigenvalues[0][1]
    assert torch.equal(values, values.sort()[0]) and vectors.shape == (40, 40)
    assert_close((vectors * values) @ vectors.T, a.T @ a / len(a), "backend")
    summed = la.H
    assigned = Laplace(network(), "classification", "all", "kron")
    assigned.fit([(x, y)])
    assigned.H = summed.factors
    assert_close(assigned.log_marginal_likelihood(), la.log_marginal_likelihood(), "backend")


def test_squares_beyond_the_dtype_are_refused() -> None:
    """As where they are summed to a matrix."""
    x, y = data(4)
    with pytest.raises(InvalidData, match="not finite"):
        fitted([(x, y), (1e200 * x, y)])


def test_plans_count_eigenpairs() -> None:
    model = nn.Sequential(nn.Linear(2000, 400), nn.Tanh(), nn.Linear(400, 3))
    x, y = torch.randn(24, 2000), torch.randint(3, (24,))
    batches = split(x, y, 8)
    la: Any = Laplace(model, "classification", "all", "kron")
    plan = la.plan(batches)
    la.fit(batches)
    tensors = dict(named_tensors(la.fitted().curvature.state())).values()
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert ranks(la) == {"out:0": 48, "in:0": 24, "in:2": 24}
    assert held / 1.2 <= plan.kept_bytes <= 1.2 * held < 4 * 2000**2
    assert la.plan(Unknown(batches)).kept_bytes >= 4 * 2000**2, "of an unknown number of batches, matrices"


class Unknown:
    """A loader without a length."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


# Layers.


def test_positions_and_biases_of_convolutions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(12, 40, 3), nn.Tanh(), nn.Flatten(), nn.Linear(160, 3)).double()
    x, y = torch.randn(5, 12, 4, 4).double(), torch.randint(3, (5,))
    la = fitted([(x[:2], y[:2]), (x[2:], y[2:])], model)
    assert ranks(la)["in:0"] == 20 and ranks(la)["in:2"] == 5
    reduced = fitted([(x, y)], model, backend_kwargs={"kfac_approx": "reduce"})
    assert ranks(reduced)["in:0"] == 5
    unfolded = nn.functional.unfold(x, 3).mT.flatten(0, 1)
    assert_close(la.H.kfacs[0][1], unfolded.T @ unfolded / len(unfolded), "backend")
    assert torch.isfinite(la(x)).all() and torch.isfinite(reduced(x)).all()


def test_a_last_layer_of_many_features_and_outputs() -> None:
    """Under the empirical Fisher of few data the output side of a head is thin as well."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 20)).double()
    x, y = torch.randn(6, 4).double(), torch.randint(20, (6,))
    new = torch.randn(3, 4).double()
    for backend, expected in ((NativeGGN, {"in:0": 6}), (NativeEF, {"in:0": 6, "out:0": 6})):
        la: Any = Laplace(model, "classification", "last_layer", "kron", backend=backend)
        la.fit([(x, y)])
        assert ranks(la) == expected
        jacobians, _ = la.backend.last_layer_jacobians(new)
        covariance = la.posterior_precision.to_matrix(-1)
        _, variances = la._glm_predictive_distribution(new)
        assert_close(variances, jacobians @ covariance @ jacobians.mT, "backend")


def test_batches_that_read_no_row_of_a_table() -> None:
    """Of which the padding alone is looked up: the output side is summed of no rows, then of few."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 40, padding_idx=0), nn.Flatten(), nn.Linear(80, 3)).double()
    x, y = torch.tensor([[0, 0], [0, 0], [1, 2], [3, 1]]), torch.tensor([0, 1, 2, 0])
    apart, whole = fitted(split(x, y, 2), model), fitted([(x, y)], model)
    assert ranks(whole)
    assert_close(apart.log_marginal_likelihood(), whole.log_marginal_likelihood(), "backend")


def test_rows_are_copied() -> None:
    """A loader may reuse the memory of its batches."""
    x, y = data(8)
    whole, buffer = fitted(split(x, y, 4)), torch.empty_like(x[:4])

    class Reusing:
        def __iter__(self) -> Any:
            for part, labels in split(x, y, 4):
                buffer.copy_(part)
                yield buffer, labels

        def __len__(self) -> int:
            return 2

    assert torch.equal(fitted(Reusing()).log_marginal_likelihood(), whole.log_marginal_likelihood())  # pyright: ignore
