"""Fits that users put together: parts that are assigned, loops over batches, hooks of classes, losses around ours."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from laplace.utils import Kron, KronDecomposed
from torch import Tensor, nn

from laplace import (
    BlockLaplace,
    DiagLaplace,
    FullLaplace,
    FunctionalLaplace,
    KronLaplace,
    Laplace,
    LowRankLaplace,
    MixtureLaplace,
)
from laplace.errors import (
    InvalidArgument,
    InvalidData,
    LaplaceError,
    ModelChangedError,
    NotFittedError,
    ReadOnlyError,
    TuningWarning,
    UnsupportedError,
)
from tests import grid
from tests import problems as catalogue
from tests.reference import curvature, evidence
from tests.reference.compare import assert_close

PROBLEM = catalogue.get("mlp_regression")
X, Y = PROBLEM.x, PROBLEM.y
CLASSES = {"full": FullLaplace, "kron": KronLaplace, "diag": DiagLaplace}
CELLS = [(weights, structure) for weights in grid.WEIGHTS for structure in CLASSES]


def make(weights: str = "all", structure: str = "full", problem: catalogue.Problem = PROBLEM, **options: Any) -> Any:
    model = problem.make_model()
    if weights == "last_layer":
        options["last_layer_name"] = problem.head
    if weights == "subnetwork":
        options["subnetwork_indices"] = torch.arange(3, 9)
    return Laplace(model, problem.likelihood, weights, structure, **options)


def fitted(*cell: Any, **options: Any) -> Any:
    la = make(*cell, **options)
    la.fit((cell[2] if len(cell) > 2 else PROBLEM).batches(4))
    return la


def fit_by_hand(la: Any, problem: catalogue.Problem = PROBLEM) -> Any:
    """The loop of the documentation."""
    n_data = len(problem.y)
    la.start_fit()
    for x, y in problem.batches(4):
        loss, H = la.curvature_of(x, y, n_data)
        la.loss += loss
        la.H += H
    la.n_data, la.n_outputs = n_data, problem.make_model()(problem.x).shape[1]
    return la


def assert_same(la: Any, other: Any, x: Any = X) -> None:
    """Predictions, evidence and samples of two posteriors agree."""
    for one, two in zip(la(x, diagonal_output=True), other(x, diagonal_output=True), strict=True):
        assert_close(one, two, "backend")
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood(), "backend")
    draws = [one.sample(3, torch.Generator().manual_seed(0)) for one in (la, other)]
    assert_close(draws[0], draws[1], "backend")


# Loops.


@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_a_loop_is_a_fit(weights: str, structure: str) -> None:
    la = fit_by_hand(make(weights, structure, prior_precision=0.5))
    assert_same(la, fitted(weights, structure, prior_precision=0.5))


@pytest.mark.parametrize(
    "name", ["residual_cnn", "embedding", "attention_by_hand", "layer_norm", "bare_parameter", "stored_by_input"]
)
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_loop_with_blocks_of_every_form(name: str, structure: str) -> None:
    """A sum that starts from zeros takes on the form that batches have."""
    problem = catalogue.get(name)
    la, other = fit_by_hand(make("all", structure, problem), problem), fitted("all", structure, problem)
    assert_close(la.posterior_variance, other.posterior_variance, "backend")
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood(), "backend")


def test_factors_of_outputs_with_positions_are_shares_of_the_rows_of_targets() -> None:
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randint(7, (6, 5), generator=generator), torch.randint(3, (6, 5), generator=generator)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    la, other = KronLaplace(model, "classification"), KronLaplace(model, "classification")
    other.fit(batches)
    la.start_fit()
    for part in batches:
        loss, H = la.curvature_of(*part, n_data=6)
        assert_close(H.to_matrix(), la.backend.kron(*part, N=6)[1].to_matrix(), "algebra")
        la.loss += loss
        la.H += H
    la.n_data, la.n_outputs = other.n_data, 3
    assert_same(la, other, x)


@pytest.mark.parametrize("structure", CLASSES)
def test_labels_tell_which_dimension_has_the_channels(structure: str) -> None:
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.Tanh(), nn.Conv1d(3, 3, 1)).double()
    x, y = torch.randn(6, 2, 5, generator=generator).double(), torch.randint(3, (6, 5), generator=generator)
    la, other = CLASSES[structure](model, "classification"), CLASSES[structure](model, "classification")
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    other.fit(batches)
    la.start_fit()
    for part in batches:
        loss, H = la.curvature_of(*part, n_data=6)
        la.loss += loss
        la.H += H
    la.n_data, la.n_outputs = other.n_data, 3
    assert_same(la, other, x)
    with pytest.raises(InvalidData, match="channel_dim"):
        CLASSES[structure](model, "classification").curvature_of(x[..., :3], y[:, :3], n_data=6)


class Tenth(nn.Module):
    """A squared error of targets that are a tenth of those of the loader."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(f, y / 10, reduction="sum")


@pytest.mark.parametrize(
    "change",
    [lambda la: la, copy.deepcopy, lambda la: pickle.loads(pickle.dumps(la)), lambda la: la.to(dtype=torch.float64)],
)
def test_a_loss_of_the_backend_outlives_what_comes_before_a_fit(change: Any) -> None:
    tenth = [(x, y / 10) for x, y in PROBLEM.batches(4)]
    plain = make()
    plain.fit(tenth)
    la = make()
    la.backend.lossfunc = Tenth()
    la = change(la)
    assert_same(fit_by_hand(la), plain)
    la = make()
    la.backend.lossfunc = Tenth()
    la = change(la)
    la.fit(PROBLEM.batches(4))
    assert_same(la, plain)


@pytest.mark.parametrize("structure", CLASSES)
def test_writing_into_the_mean_leaves_what_it_was_read_from(structure: str) -> None:
    la = fitted("all", structure)
    weights, then, predictions = la.mean, la.snapshot(), la(X)
    la.mean += 0.1
    assert_close(la.mean, weights + 0.1, "exact")
    for mean in (la.expansion_point, then.mean):
        assert_close(mean, weights, "exact")
    assert_close(la(X)[0], predictions[0], "exact")
    unfitted = make("all", structure, prior_mean=torch.zeros_like(weights))
    unfitted.mean.add_(1.0)
    assert not unfitted.prior_mean.any()
    other = fitted("all", structure)
    other.mean = weights + 0.1
    assert_same(la, other)


def test_a_loop_adds_in_place_and_copies_nothing() -> None:
    la = make()
    la.start_fit()
    first, then = la.H, la.snapshot()
    for x, y in PROBLEM.batches(4):
        la.H += la.curvature_of(x, y, len(X))[1]
        assert la.H is first
    assert bool(first.any())
    assert not then.fit.curvature.values.any(), "a snapshot saw what was added later"
    evidence_now = la.log_marginal_likelihood()
    first.zero_()
    assert_close(la.log_marginal_likelihood(), evidence_now, "exact")


def test_single_entries_of_a_tensor_have_no_factors_to_add() -> None:
    entries = torch.tensor([0, 4, 11])
    la = Laplace(PROBLEM.make_model(), "regression", "subnetwork", "kron", subnetwork_indices=entries)
    with pytest.raises(UnsupportedError, match="single entries"):
        la.curvature_of(X, Y, len(X))


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


def test_structures_without_a_sum_by_hand() -> None:
    la = LowRankLaplace(PROBLEM.make_model(), "regression")
    for use in (la.start_fit, lambda: la.curvature_of(X, Y, 8), lambda: setattr(la, "H", torch.zeros(3))):
        with pytest.raises(UnsupportedError, match="'full', 'kron' or 'diag'"):
            use()
    la.fit(PROBLEM.batches(4))
    before = la.posterior_variance
    la.mean = la.mean + 0.1
    assert_close(la.posterior_variance, before, "exact")


def test_a_loop_after_further_training() -> None:
    la = fitted()
    with torch.no_grad():
        la.model[0].weight.add_(0.1)
    la.H = la.H
    with pytest.raises(ModelChangedError):
        la(X)
    fit_by_hand(la)
    other = FullLaplace(la.model, "regression")
    other.fit(PROBLEM.batches(4))
    assert_same(la, other)


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


# Parts.


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


N = FullLaplace(PROBLEM.make_model(), "regression").n_params or 0
NAN = torch.full((N, N), torch.nan, dtype=torch.float64)
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


# What follows an assignment.


@pytest.mark.parametrize("structure", CLASSES)
def test_tuning_mixtures_and_refinement(structure: str) -> None:
    warnings.simplefilter("ignore", TuningWarning)  # the best value may lie anywhere
    by_hand, plain = fit_by_hand(make("all", structure)), fitted("all", structure)
    for la in (by_hand, plain):
        la.optimize_hyperparameters()
        la.optimize_hyperparameters(
            objective="nll", val_loader=PROBLEM.batches(3), grid={"prior_precision": [0.01, 0.1, 1.0, 10.0]}
        )
    assert_close(by_hand.prior_precision, plain.prior_precision, "backend")
    assert_same(by_hand, plain)
    mixtures = [MixtureLaplace([la, fitted()], weights="evidence") for la in (by_hand, plain)]
    assert_close(mixtures[0](X, diagonal_output=True)[1], mixtures[1](X, diagonal_output=True)[1], "backend")
    for la in (by_hand, plain):
        la.refine(PROBLEM.batches(4))
    assert_close(by_hand.mean, plain.mean, "backend")
    assert_close(by_hand.log_marginal_likelihood(), plain.log_marginal_likelihood(), "backend")


# A root of the covariance.


def test_an_assigned_root_is_that_of_predictions_until_something_else_is_given() -> None:
    la, plain = fitted(), fitted()
    root = torch.linspace(0.1, 0.3, la.n_params, dtype=torch.float64)
    changes = (
        lambda: setattr(la, "prior_precision", 1.0),
        lambda: la.fit(PROBLEM.batches(4)),
        lambda: setattr(la, "H", plain.H),
        lambda: setattr(la, "mean", plain.mean),
    )
    for change in changes:
        la.posterior_scale = root
        assert_close(la.posterior_variance, root.square(), "algebra")
        assert_close(la.log_marginal_likelihood(), plain.log_marginal_likelihood(), "exact")
        draws = la.sample(2, torch.Generator().manual_seed(0))
        assert_close(draws, la.mean + (draws - la.mean) / root * root, "algebra")
        loaded = make()
        loaded.load_state_dict(la.state_dict())
        assert_close(loaded(X)[1], la(X)[1], "exact")
        assert_close(copy.deepcopy(la)(X)[1], la(X)[1], "exact")
        change()
        assert_close(la(X)[1], plain(X)[1], "backend")
    with pytest.raises(NotFittedError):
        make().posterior_scale = root


# Hooks of users' classes.


def hooked(base: Any, calls: list[int] | None = None) -> Any:
    """A class whose batches count twice."""

    class Twice(base):
        def _curv_closure(self, X: Any, y: Tensor, N: int) -> Any:
            assert torch.is_grad_enabled() and not self.model.training
            if calls is not None:
                calls.append(N)
            loss, H = super()._curv_closure(X, y, N)
            return 2 * loss, 2 * H if not isinstance(H, Kron) else H * 2.0

    return Twice


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
@pytest.mark.parametrize("structure", CLASSES)
def test_a_hook_computes_what_a_fit_sums(structure: str) -> None:
    calls: list[int] = []
    la, plain = hooked(CLASSES[structure], calls)(PROBLEM.make_model(), "regression"), fitted("all", structure)
    la.fit(PROBLEM.batches(4))
    assert set(calls) == {len(X)}
    assert_close(la.loss, 2 * plain.loss, "backend")
    assert (la.n_data, la.n_outputs) == (plain.n_data, plain.n_outputs)
    assert_close(dense_of(la), 2 * dense_of(plain), "backend")
    plain.temperature = 0.5
    assert_close(la(X)[1], plain(X)[1], "backend")
    la.fit(PROBLEM.batches(4), override=False, decay=0.5)
    assert la.n_data == 1.5 * len(X)


def dense_of(la: Any) -> Tensor:
    return (la.posterior().to_dense() - torch.diag(la.prior_precision_diag)).detach()


def test_a_hook_of_the_start() -> None:
    class Started(DiagLaplace):
        def _init_H(self) -> None:
            super()._init_H()
            self.H = self.H + 1

    la, plain = Started(PROBLEM.make_model(), "regression"), fitted("all", "diag")
    la.fit(PROBLEM.batches(4))
    assert_close(la.H, plain.H + 1, "backend")


def test_what_fails_in_a_hook_leaves_the_posterior() -> None:
    la = fitted()
    before = la._posterior
    for value in (torch.zeros(3), NAN):
        la.__class__ = type("Own", (FullLaplace,), {"_curv_closure": lambda la, X, y, N, H=value: (torch.zeros(()), H)})
        with pytest.raises(InvalidArgument, match="H "):
            la.fit(PROBLEM.batches(4))
        assert la._posterior is before


def test_a_hook_knows_no_positions() -> None:
    la = hooked(DiagLaplace)(nn.Sequential(nn.Linear(2, 3)), "classification")
    with pytest.raises(UnsupportedError, match=r"positions.*a _curv_closure does not support"):
        la.fit([(torch.randn(4, 5, 2), torch.zeros(4, 5, dtype=torch.long))])


@pytest.mark.parametrize("base", [BlockLaplace, LowRankLaplace, FunctionalLaplace])
@pytest.mark.parametrize("name", ["_curv_closure", "_init_H"])
def test_hooks_of_other_structures_are_refused(base: Any, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"defines {name}.*Instead"):
        type("Own", (base,), {name: lambda self, *args: None})


# A loss around the backend's own.


@pytest.mark.parametrize("structure", CLASSES)
def test_a_loss_that_relabels(structure: str) -> None:
    """Ignored labels stay ignored."""
    problem = catalogue.get("mlp_ignored_labels")
    n_classes = problem.make_model()(problem.x).shape[1]

    def relabelled(y: Tensor) -> Tensor:
        return torch.where(y < 0, y, (y + 1) % n_classes)

    la, plain = make("all", structure, problem), make("all", structure, problem)
    original = la.backend.lossfunc
    la.backend.lossfunc = lambda f, y: original(f, relabelled(y))
    la.fit(problem.batches(4))
    plain.fit([(x, relabelled(y)) for x, y in problem.batches(4)])
    assert_close(la.loss, plain.loss, "backend")
    assert la.n_data == plain.n_data
    assert_close(la.log_marginal_likelihood(), plain.log_marginal_likelihood(), "backend")
    la.fit(problem.batches(4))
    assert_close(la.loss, plain.loss, "backend", label="a later fit")
    loss, _ = la.curvature_of(*problem.batches(4)[0], len(problem.y))
    expected, _ = plain.backend.diag(problem.batches(4)[0][0], relabelled(problem.batches(4)[0][1]))
    assert_close(loss, expected, "backend")
    assert_close(la.backend.diag(*problem.batches(4)[0])[0], expected, "backend")


@pytest.mark.parametrize("wrong", [
    nn.NLLLoss(reduction="sum"),
    lambda f, y: 3 * nn.functional.mse_loss(f, y, reduction="sum"),
    lambda f, y: nn.functional.mse_loss(f, y),
    lambda f, y: nn.functional.l1_loss(f, y, reduction="sum"),
    lambda f, y: 3.0,
    lambda f, y: y.sum(),
])  # fmt: skip
def test_a_loss_that_is_no_transform_of_targets_is_refused(wrong: Any) -> None:
    la = fitted()
    before = la._posterior.data
    la.backend.lossfunc = wrong
    with pytest.raises(UnsupportedError, match=r"lossfunc.*likelihood object"):
        la.fit(PROBLEM.batches(4))
    assert la._posterior.data is before
    with pytest.raises(LaplaceError):
        la.curvature_of(X, Y, len(X))
    with pytest.raises(ReadOnlyError, match="factor"):
        la.backend.factor = 2.0
