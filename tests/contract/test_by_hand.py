"""Fits that users put together: parts that are assigned, loops over batches, hooks of classes, losses around ours."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from laplace.utils import Kron
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
    ReadOnlyError,
    TuningWarning,
    UnsupportedError,
)
from tests import grid
from tests import problems as catalogue
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


# Parts.


N = FullLaplace(PROBLEM.make_model(), "regression").n_params or 0
NAN = torch.full((N, N), torch.nan, dtype=torch.float64)


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
