"""Parts of a posterior that are assigned: what it is made of, added to, and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from laplace.utils import Kron, KronDecomposed
from torch import Tensor

from laplace import (
    Laplace,
)
from laplace.errors import (
    InvalidArgument,
    InvalidData,
    NotFittedError,
    UnsupportedError,
)
from tests.contract.test_by_hand import CLASSES, NAN, PROBLEM, N, X, Y, assert_same, fit_by_hand, fitted, make
from tests.reference import curvature, evidence
from tests.reference.compare import assert_close


def test_before_a_fit() -> None:
    for structure in CLASSES:
        la = make("all", structure, prior_mean=0.3)
        H = la.H.to_matrix() if structure == "kron" else la.H
        assert not H.any() and H.shape[-1] == la.n_params
        assert_close(la.mean, 0.3, "exact")
        assert (la.loss, la.n_data, la.n_outputs, la.is_fitted) == (0, 0, 0, False)
    unknown = Laplace(PROBLEM.make_model(), "regression", "last_layer", "kron")
    assert unknown.mean is None
    for use in (lambda: unknown.H, unknown.start_fit, lambda: unknown.curvature_of(X, Y, 8)):
        with pytest.raises(NotFittedError, match="last_layer_name"):
            use()


def test_data_are_added_to_what_was_assigned() -> None:
    half, rest = PROBLEM.batches(4)[:1], PROBLEM.batches(4)[1:]
    for structure in ("full", "diag"):
        la, first = make("all", structure), make("all", structure)
        first.fit(half)
        la.H, la.loss, la.n_data, la.n_outputs = first.H, first.loss, first.n_data, first.n_outputs
        la.fit(rest, override=False)
        assert_same(la, fitted("all", structure))
    la = make("all", "kron")
    fit_by_hand(la)
    with pytest.raises(InvalidData, match=r"assigned.*override=True.*la\.start_fit\(\)"):
        la.fit(rest, override=False)


@pytest.mark.parametrize("way", ["fit", "state"])
def test_factors_are_not_added_to_those_of_a_fit(way: str) -> None:
    """Sums of the means on the input sides would be twice a mean; what the message says gives the fit of all data."""
    la = fitted("all", "kron")
    if way == "state":
        la, former = make("all", "kron"), la
        la.load_state_dict(former.state_dict())
    (x, y), *_ = PROBLEM.batches(4)
    with pytest.raises(InvalidArgument, match=r"means over the data.*override=False.*la\.start_fit\(\)"):
        la.H += la.curvature_of(x, y, len(x))[1]
    with pytest.raises(InvalidArgument, match="Kron can be added to Kron only"):
        la.curvature_of(x, y, len(x))[1] + la.H
    assert_same(la, fitted("all", "kron"))
    fit_by_hand(la)
    assert_same(la, fitted("all", "kron"))


def dense(H: Any) -> Tensor:
    return H.to_matrix() if isinstance(H, Kron | KronDecomposed) else torch.diag(H) if H.ndim == 1 else H


def some_curvature(la: Any) -> Any:
    """A curvature of one's own, in the form of the posterior's structure."""
    generator = torch.Generator().manual_seed(2)
    if isinstance(la.H, Kron):
        blocks = []
        for block in la.H.kfacs:
            roots = [torch.randn(len(f), len(f), dtype=f.dtype, generator=generator) for f in block]
            blocks.append([root @ root.T for root in roots])
        return Kron(blocks)
    root = torch.randn(la.n_params, la.n_params, dtype=torch.float64, generator=generator)
    return root @ root.T if la.H.ndim == 2 else (root @ root.T).diagonal().clone()


@pytest.mark.parametrize("structure", CLASSES)
def test_evidence_and_its_gradients_are_those_of_what_was_assigned(structure: str) -> None:
    la = make("all", structure)
    la.H = H = some_curvature(la)
    step = torch.linspace(-0.1, 0.2, la.n_params, dtype=torch.float64)
    la.mean, la.loss, la.n_data, la.n_outputs = la.expansion_point + step, 3.5, 20, 2
    hypers = [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (0.7, 0.4)]
    delta, sigma = hypers
    value = la.log_marginal_likelihood(delta, sigma)
    loglik = evidence.log_likelihood(torch.tensor(3.5, dtype=torch.float64), 20, 2, sigma)
    prior = delta.expand(la.n_params)
    expected = evidence.log_marginal_likelihood(dense(H), la.mean, prior, 0.0, sigma**-2, loglik)
    assert_close(value, expected.squeeze(), "backend")
    for mine, theirs in zip(
        torch.autograd.grad(value, hypers), torch.autograd.grad(expected.sum(), hypers), strict=True
    ):
        assert_close(mine, theirs, "backend")
    J = curvature.flat_jacobian(la.model, X, tuple(curvature.trainable_names(la.model)))[0]
    covariance = torch.linalg.inv(dense(H) / 0.16 + 0.7 * torch.eye(la.n_params, dtype=torch.float64))
    mean, variance = la(X)
    assert_close(variance, J @ covariance @ J.mT, "backend")
    assert_close(mean, la.model(X), "backend")


@pytest.mark.parametrize("structure", CLASSES)
def test_states_copies_and_moves_of_what_was_assigned(structure: str) -> None:
    la = make("all", structure)
    la.H = some_curvature(la)
    la.mean, la.loss, la.n_data, la.n_outputs = la.expansion_point + 0.1, 3.5, 20, 2
    loaded = make("all", structure)
    loaded.load_state_dict(la.state_dict())
    for other in (loaded, copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert_close(other.mean, la.mean, "exact")
        assert (float(other.loss), other.n_data, other.n_outputs) == (3.5, 20, 2)
        assert_same(other, la)
    narrow = copy.deepcopy(la).to(dtype=torch.float32)
    assert narrow.mean.dtype == torch.float32
    assert_close(narrow.mean, la.mean, "float32")
    assert_close(narrow.posterior_variance, la.posterior_variance, "float32")


def test_parts_of_other_dtypes_are_converted() -> None:
    la = fitted()
    la.H, la.mean = la.H.float(), la.mean.float().requires_grad_()
    assert la.H.dtype == la.mean.dtype == torch.float64
    assert not la.mean.requires_grad
    la.n_data, la.loss, la.n_outputs = torch.tensor(8), torch.tensor([2.5]), torch.tensor(2)
    assert (la.n_data, float(la.loss), la.n_outputs) == (8, 2.5, 2)
    assert isinstance(la.n_data, int)


def test_an_eigendecomposition_is_its_factors() -> None:
    la, other = fitted("all", "kron"), fitted("all", "kron")
    factors = Kron([[f.clone() for f in block] for block in la.H_facs.kfacs])
    la.H, other.H_facs = factors.decompose(), factors
    assert isinstance(la.H, KronDecomposed)
    assert other.H is factors
    assert_same(la, other)
    assert_same(la, fitted("all", "kron"))
    other.H_facs = None
    assert other.H is factors
    with pytest.raises(InvalidArgument, match="prior_precision"):
        la.H = factors.decompose() + 1.0
    with pytest.raises(InvalidArgument, match="damping"):
        la.H = factors.decompose(damping=True)
    damped = fitted("all", "kron", damping=True)
    damped.H = factors.decompose(damping=True)
    assert_same(damped, fitted("all", "kron", damping=True))


LOPSIDED = torch.eye(N, dtype=torch.float64) + torch.ones(N, N, dtype=torch.float64).triu(1)


WRONG: list[tuple[str, str, Any, str]] = [
    *((structure, "H", value, "H") for structure in CLASSES for value in (None, "zero", 3.0, torch.zeros(3))),
    ("full", "H", NAN, "NaN"),
    ("full", "H", LOPSIDED, "symmetric"),
    ("full", "H", -torch.eye(N, dtype=torch.float64), "negative"),
    ("full", "H", torch.zeros(N, N, dtype=torch.complex128), "real"),
    ("diag", "H", NAN[0], "NaN"),
    ("diag", "H", -torch.ones(N, dtype=torch.float64), "negative"),
    ("kron", "H", torch.zeros(N, N), "Kron"),
    ("kron", "H", Kron([[torch.eye(2)]]), "blocks"),
    ("kron", "H", Kron([[torch.eye(2)]] * 4), "sizes of the factors"),
    ("kron", "H_facs", 3, "Kron"),
    *(("diag", "mean", value, "mean") for value in (None, 0.0, torch.zeros(3), NAN[0])),
    *(("diag", "loss", value, "loss") for value in (None, "1", True, float("nan"), torch.zeros(2))),
    *(("diag", "n_data", value, "n_data") for value in (None, -1, float("inf"), 2j)),
    *(("diag", "n_outputs", value, "n_outputs") for value in (None, -1, 1.5)),
    *(("diag", "posterior_scale", value, "posterior_scale") for value in (None, torch.zeros(3), NAN, -torch.ones(N))),
]


@pytest.mark.parametrize(("structure", "name", "value", "message"), WRONG)
def test_what_is_not_accepted_leaves_the_posterior(structure: str, name: str, value: Any, message: str) -> None:
    la = fitted("all", structure)
    before = la._posterior
    with pytest.raises(InvalidArgument, match=message) as caught:
        setattr(la, name, value)
    assert name.removesuffix("_facs") in str(caught.value)
    assert la._posterior is before


def test_factors_that_are_no_curvature() -> None:
    la = fitted("all", "kron")
    for change, message in ((lambda f: f + torch.ones_like(f).triu(1), "symmetric"), (lambda f: -f, "negative"),
                            (lambda f: f * torch.nan, "NaN")):  # fmt: skip
        blocks = [list(block) for block in la.H_facs.kfacs]
        blocks[0][0] = change(blocks[0][0])
        with pytest.raises(InvalidArgument, match=message):
            la.H = Kron(blocks)


def test_one_noise_per_output_and_refined_posteriors() -> None:
    la = fitted("all", "full", sigma_noise=torch.tensor([0.5, 2.0]))
    for name in ("loss", "H"):
        with pytest.raises(UnsupportedError, match=f"{name} per output"):
            setattr(la, name, getattr(la, name))
    la = fitted()
    la.refine(PROBLEM.batches(4))
    before = la._posterior
    for name in ("H", "mean", "loss"):
        with pytest.raises(UnsupportedError, match=f"{name} is assigned to a refined"):
            setattr(la, name, getattr(la, name))
    assert la._posterior is before
    fit_by_hand(la)
    assert_same(la, fitted())
