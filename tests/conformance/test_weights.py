"""Weights of data and of classes: what datum-by-datum sums and repeated data say, for every structure."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import ELLA, FunctionalLaplace, Laplace, MixtureLaplace, OnlineLaplace, VaLLA
from laplace.curvature import CurvlinopsGGN, GGNInterface, NativeEF, NativeGGN, NativeHessian
from laplace.errors import InvalidArgument, InvalidData, InvalidType, MissingKey, UnsupportedError
from laplace.likelihoods import Categorical
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.parametric import ParametricLaplace
from tests import problems as catalogue
from tests.conformance.cases import STRUCTURE_NAMES, Case
from tests.conformance.test_positions import Tokens, pixels
from tests.problems import Problem
from tests.reference import evidence, weighted
from tests.reference.compare import assert_close

KINDS = {"ggn": NativeGGN, "ef": NativeEF, "hessian": NativeHessian}
FEW = ("mlp_classification", "conv2d_grouped", "embedding", "tied_head", "bare_parameter", "dict_input")
SIZE = 4
"""Data of a batch: no problem has a number of them that it divides without rest, so that batches differ."""


def in_batches(weights: Tensor) -> Callable[[Any, Tensor], Tensor]:
    """A `weight_fn` for batches of `SIZE` data in order, however often they are read."""
    parts = itertools.cycle(weights.split(SIZE))
    return lambda x, y: next(parts)


def whole(problem: Problem) -> Tensor:
    """Whole weights, one of them 0."""
    return torch.tensor([2, 1, 0, 3, 1, 2, 1])[: len(problem.y)]


def fractions(problem: Problem) -> Tensor:
    """Weights that are not whole."""
    return torch.tensor([0.3, 1.7, 0.0, 2.2, 1.0, 0.9, 0.4], dtype=torch.float64)[: len(problem.y)]


def same_posterior(la: ParametricLaplace, expected: ParametricLaplace, kind: str = "algebra") -> None:
    """Requires that two posteriors say the same."""
    assert la.n_data == pytest.approx(expected.n_data, rel=1e-12)
    assert_close(la.loss, expected.loss, kind, label="loss")
    assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood(), kind, label="evidence")
    precision, truth = la.posterior(), expected.posterior()
    assert_close(precision.to_dense(), truth.to_dense(), kind, label="precision")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [p.name for p in catalogue.problems("mlp", "kfac", without=("saturated", "frozen"))])
@pytest.mark.turns
def test_weighted_sums_are_those_of_single_data(name: str, kind: str) -> None:
    problem = catalogue.get(name)
    model, weights = problem.make_model(), fractions(problem)
    la = Laplace(model, problem.likelihood, "all", "full", backend=KINDS[kind])
    la.fit(problem.batches(SIZE), weight_fn=in_batches(weights))
    args = model, problem.x, problem.y, weights, problem.likelihood
    assert_close(la.H, weighted.matrix(*args, kind), "backend")
    assert_close(la.loss, weighted.loss(*args), "backend")
    counts = weights if "ignored_labels" not in problem.tags else weights * (problem.y != -100)
    assert la.n_data == pytest.approx(float(counts.sum()))


@pytest.mark.parametrize("kind", ["ggn", "ef"])
@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.turns
def test_whole_weights_are_repeated_data(name: str, structure: str, kind: str) -> None:
    problem = catalogue.get(name)
    case = Case(problem, structure, "all")
    la, expected = (case.build(backend=KINDS[kind], prior_precision=2.0) for _ in range(2))
    la.fit(problem.batches(SIZE), weight_fn=in_batches(whole(problem)))
    x, y = weighted.repeated(problem.x, problem.y, whole(problem))
    expected.fit([(x, y) if isinstance(x, Tensor) else {**x, "labels": y}])
    assert type(la.n_data) is int
    if structure == "matrix_free":
        assert_close(la(problem.x), expected(problem.x), "algebra")
    else:
        same_posterior(la, expected)


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
@pytest.mark.parametrize("outputs", ["tokens", "pixels"])
def test_positions_have_the_weight_of_their_datum(
    outputs: str, structure: str, weights: str, approximation: str
) -> None:
    torch.manual_seed(0)
    if outputs == "tokens":
        model, x, y = Tokens().double(), torch.randint(6, (5, 4)), torch.randint(3, (5, 4))
    else:
        model, x, y = pixels(1).double(), torch.randn(5, 2, 3, 3).double(), torch.randint(3, (5, 3, 3))
    y[1, 1:] = y[3] = -100  # of one datum some labels are ignored, of another all
    times = torch.tensor([1, 3, 0, 2, 2])
    options: dict[str, Any] = {"backend_kwargs": {"kfac_approx": approximation}, "prior_precision": 2.0}
    options["channel_dim"] = -1 if outputs == "tokens" else 1
    la, expected = (Laplace(model, "classification", weights, structure, **options) for _ in range(2))
    la.fit([(x, y)], weight_fn=lambda x, y: times)
    expected.fit([weighted.repeated(x, y, times)])
    same_posterior(la, expected)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_weight_zero_is_a_datum_left_out(structure: str) -> None:
    problem = catalogue.get("mlp_regression")
    case = Case(problem, structure, "all")
    x, y = problem.x.clone(), problem.y.clone()
    x[2], y[4] = torch.nan, torch.inf  # whatever it holds
    keep = torch.tensor([True, True, False, True, False, True, True])
    la, expected = case.build(), case.build()
    la.fit([(x, y)], weight_fn=lambda x, y: keep)
    expected.fit([(x[keep], y[keep])])
    same_posterior(la, expected, "exact")
    la.fit([(x[2:3], y[2:3]), (x[keep], y[keep])], weight_fn=lambda x, y: x.isfinite().all(1))
    same_posterior(la, expected, "exact")


def test_sum_of_weights_is_in_the_normaliser() -> None:
    problem = catalogue.get("mlp_regression")
    model, weights = problem.make_model(), fractions(problem)
    la = Laplace(model, "regression", "all", "full", sigma_noise=0.7)
    la.fit(problem.batches(SIZE), weight_fn=in_batches(weights))
    f, noise = model(problem.x).detach(), torch.tensor(0.7, dtype=torch.float64)
    each = torch.distributions.Normal(f, noise).log_prob(problem.y).sum(1)
    assert_close(la.log_likelihood, weights @ each, "algebra")
    H = weighted.matrix(model, problem.x, problem.y, weights, "regression", "ggn")
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    delta = torch.ones(len(theta), dtype=torch.float64)
    expected = evidence.log_marginal_likelihood(H, theta, delta, 0.0, 0.7**-2, weights @ each)
    assert_close(la.log_marginal_likelihood(), expected, "algebra")


def test_several_noises_weigh_every_output() -> None:
    problem = catalogue.get("mlp_regression")
    case, sigma = Case(problem, "kron", "all"), torch.tensor([0.5, 1.5])
    la, expected = case.build(sigma_noise=sigma), case.build(sigma_noise=sigma)
    la.fit(problem.batches(SIZE), weight_fn=in_batches(whole(problem)))
    expected.fit([weighted.repeated(problem.x, problem.y, whole(problem))])
    same_posterior(la, expected)


# Classes.

CLASS_WEIGHT = (0.0, 2.5, 0.4)


def of_classes(y: Tensor) -> Tensor:
    """Weights of the data by `CLASS_WEIGHT`."""
    weights = torch.tensor(CLASS_WEIGHT, dtype=torch.float64)
    return y @ weights if y.ndim > 1 else torch.where(y < 0, 1.0, weights[y.clamp(min=0)])


@pytest.mark.parametrize("name", ["mlp_classification", "mlp_ignored_labels", "mlp_soft_labels"])
def test_class_weights_are_those_of_the_cross_entropy(name: str) -> None:
    problem = catalogue.get(name)
    model = problem.make_model()
    loss = nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHT, dtype=torch.float64), reduction="sum")
    likelihood = Categorical(class_weight=CLASS_WEIGHT)
    f = model(problem.x).detach().requires_grad_()
    value = loss(f, problem.y)
    (gradient,) = torch.autograd.grad(value, f)
    assert_close(likelihood.loss(f, problem.y), value, "algebra")
    assert_close(likelihood.gradient(f.detach(), problem.y), gradient, "algebra")
    whole_hessian = torch.autograd.functional.hessian(lambda f: loss(f, problem.y), f)
    n = torch.arange(len(f))
    assert_close(likelihood.hessian(f.detach(), problem.y).matrix(), whole_hessian[n, :, n], "algebra")
    la = Laplace(model, likelihood, "all", "full")
    la.fit(problem.batches(SIZE))
    assert_close(la.loss, value, "algebra")
    counted = of_classes(problem.y) if problem.y.ndim > 1 else of_classes(problem.y)[problem.y != -100]
    assert la.n_data == pytest.approx(float(counted.sum()))


def test_class_weights_of_a_likelihood_with_other_parts() -> None:
    class Wider(Categorical):
        def hessian(self, f: Tensor, y: Tensor) -> OutputHessian:
            hessian = super().hessian(f, y)
            return replace(hessian, diag=1.5 * hessian.diag)

    problem = catalogue.get("mlp_classification")
    f = problem.make_model()(problem.x).detach()
    hessian = Wider(class_weight=CLASS_WEIGHT).hessian(f, problem.y)
    expected = of_classes(problem.y)[:, None, None] * Wider().hessian(f, problem.y).matrix()
    assert_close(hessian.matrix(), expected, "algebra")
    root = hessian.root()
    assert_close(torch.einsum("kbc,kbd->bcd", root, root), expected, "algebra")
    assert_close(hessian.times(f), (expected @ f.unsqueeze(2)).squeeze(2), "algebra")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_class_weights_are_weights_of_data(structure: str, kind: str) -> None:
    if kind == "hessian" and structure not in ("full", "block", "diag", "lowrank"):
        pytest.skip("the exact Hessian has no factors")
    clamped = {"structure_kwargs": {"indefinite": "clamp"}} if kind == "hessian" and structure != "block" else {}
    options: dict[str, Any] = {"backend": KINDS[kind], "prior_precision": 200.0, **clamped}
    problem = catalogue.get("mlp_ignored_labels")
    la = Laplace(problem.make_model(), Categorical(class_weight=CLASS_WEIGHT), "all", structure, **options)
    expected = Laplace(problem.make_model(), "classification", "all", structure, **options)
    la.fit(problem.batches(SIZE))
    expected.fit(problem.batches(SIZE), weight_fn=lambda x, y: of_classes(y))
    if structure == "matrix_free":
        assert_close(la(problem.x), expected(problem.x), "algebra")
    else:
        same_posterior(la, expected)


@pytest.mark.parametrize("kind", ["ggn", "ef"])
def test_soft_labels_count_by_what_their_classes_do(kind: str) -> None:
    problem = catalogue.get("mlp_soft_labels")
    weights = of_classes(problem.y)
    targets = problem.y * torch.tensor(CLASS_WEIGHT, dtype=torch.float64) / weights.unsqueeze(1)
    la = Laplace(problem.make_model(), Categorical(class_weight=CLASS_WEIGHT), "all", "kron", backend=KINDS[kind])
    expected = Laplace(problem.make_model(), "classification", "all", "kron", backend=KINDS[kind])
    la.fit([(problem.x, problem.y)])
    expected.fit([(problem.x, targets)], weight_fn=lambda x, y: weights)
    same_posterior(la, expected)


@pytest.mark.parametrize("by", ["class", "datum"])
def test_sampled_curvature_is_weighed_by_the_label_that_was_seen(by: str) -> None:
    problem = catalogue.get("mlp_classification")
    options: dict[str, Any] = {"backend_kwargs": {"stochastic": True, "num_samples": 4000}}
    likelihood = Categorical(class_weight=CLASS_WEIGHT) if by == "class" else "classification"
    weighing: dict[str, Any] = {} if by == "class" else {"weight_fn": lambda x, y: of_classes(y)}
    sampled = Laplace(problem.make_model(), likelihood, "all", "full", **options)
    exact = Laplace(problem.make_model(), likelihood, "all", "full")
    for la in (sampled, exact):
        la.fit([(problem.x, problem.y)], **weighing)
    assert float((sampled.H - exact.H).norm() / exact.H.norm()) < 0.05


def test_refinement_has_class_weights() -> None:
    problem = catalogue.get("mlp_classification")
    times = torch.tensor([1, 3, 2])
    la = Laplace(problem.make_model(), Categorical(class_weight=times), "all", "kron", prior_precision=2.0)
    expected = Laplace(problem.make_model(), "classification", "all", "kron", prior_precision=2.0)
    again = weighted.repeated(problem.x, problem.y, times[problem.y])
    la.fit([(problem.x, problem.y)])
    expected.fit([again])
    la.refine([(problem.x, problem.y)])
    expected.refine([again])
    assert_close(la.mean, expected.mean, "backend")
    same_posterior(la, expected, "backend")


@pytest.mark.parametrize("given", [[1.0, -1.0, 1.0], [1.0, float("nan"), 1.0], [0.0, 0.0, 0.0], 3.0, "abc"])
def test_class_weights_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(InvalidArgument, match="class_weight"):
        Categorical(class_weight=given)


def test_class_weights_of_other_classes_are_refused() -> None:
    problem = catalogue.get("mlp_classification")
    la = Laplace(problem.make_model(), Categorical(class_weight=[1.0, 2.0]), "all", "kron")
    with pytest.raises(InvalidData, match="2 numbers, the network 3 outputs"):
        la.fit(problem.batches())


# More and fewer data.


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_data_are_added_and_forgotten_with_their_weights(structure: str) -> None:
    problem = catalogue.get("mlp_classification")
    case, weights = Case(problem, structure, "all"), fractions(problem)
    first, second = ([(problem.x[part], problem.y[part])] for part in (slice(0, 4), slice(4, None)))
    both, one = case.build(), case.build()
    both.fit(first, weight_fn=lambda x, y: weights[:4])
    one.fit(first, weight_fn=lambda x, y: weights[:4])
    both.fit(second, override=False, weight_fn=lambda x, y: weights[4:])
    together = case.build()
    together.fit(first + second, weight_fn=in_batches(weights))
    same_posterior(both, together)
    both.forget(second, weight_fn=lambda x, y: weights[4:])
    same_posterior(both, one)
    with pytest.raises(InvalidData, match="are to be removed"):
        both.forget(first, weight_fn=lambda x, y: weights[:4] + 1)


def test_key_of_weights_is_not_given_to_the_network() -> None:
    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 3).double()

        def forward(self, x: Tensor, **more: Tensor) -> Tensor:
            assert not more
            return self.net(x)

    problem = catalogue.get("mlp_classification")
    model, weights = Open(), fractions(problem)
    la, expected = (Laplace(model, "classification", "all", "kron") for _ in range(2))
    batch = {"x": problem.x, "labels": problem.y, "weight": weights}
    la.fit([batch], dict_key_weight="weight")
    assert "weight" in batch
    expected.fit([(problem.x, problem.y)], weight_fn=lambda x, y: weights)
    same_posterior(la, expected, "exact")
    la.forget([batch], dict_key_weight="weight")
    assert la.n_data == 0
    with pytest.raises(MissingKey, match="'importance'"):
        la.fit([batch], dict_key_weight="importance")
    with pytest.raises(MissingKey, match="no mapping"):
        la.fit([(problem.x, problem.y)], dict_key_weight="weight")


def test_state_knows_that_data_had_weights() -> None:
    problem = catalogue.get("mlp_classification")
    la = Laplace(problem.make_model(), "classification", "all", "kron")
    la.fit([(problem.x, problem.y)], weight_fn=lambda x, y: torch.full((len(y),), 0.1))
    loaded = Laplace(problem.make_model(), "classification", "all", "kron")
    loaded.load_state_dict(copy.deepcopy(la.state_dict()))
    for posterior in (la, loaded):
        assert posterior.n_data == pytest.approx(0.1 * len(problem.y), rel=1e-6)
        with pytest.raises(UnsupportedError, match="weight_fn"):
            posterior.refine([(problem.x, problem.y)])


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
@pytest.mark.parametrize("by", ["class", "datum"])
def test_states_hold_weighted_curvature(structure: str, by: str) -> None:
    problem = catalogue.get("mlp_classification")
    likelihood = Categorical(class_weight=CLASS_WEIGHT) if by == "class" else "classification"
    weighing: dict[str, Any] = {} if by == "class" else {"weight_fn": lambda x, y: fractions(problem)[: len(y)]}
    la, loaded = (Laplace(problem.make_model(), likelihood, "all", structure) for _ in range(2))
    la.fit([(problem.x, problem.y)], **weighing)
    loaded.load_state_dict(copy.deepcopy(la.state_dict()))
    assert_close(loaded(problem.x), la(problem.x), "exact")
    assert_close(loaded.log_marginal_likelihood(), la.log_marginal_likelihood(), "exact")


@pytest.mark.parametrize("weighted_by", [None, "datum"])
def test_corrected_eigenvalues_are_exact_where_positions_share_a_basis(weighted_by: str | None) -> None:
    torch.manual_seed(0)
    model, x, y = Tokens().double(), torch.randint(6, (5, 4)), torch.randint(3, (5, 4))
    times, options = torch.tensor([1, 3, 0, 2, 2]), {"channel_dim": -1, "prior_precision": 2.0}
    la = Laplace(model, "classification", "all", "ekfac", backend_kwargs={"kfac_approx": "reduce"}, **options)
    full = Laplace(model, "classification", "all", "full", **options)
    for one in (la, full):
        # Where factors of "reduce" are singular their basis is not determined: what is diagonal in it need not agree
        # with that of repeated data, but with the curvature in this basis.
        if weighted_by is None:
            one.fit([weighted.repeated(x, y, times)])
        else:
            one.fit([(x, y)], weight_fn=lambda x, y: times)
    curvature, start = la._posterior.fit.curvature, 0
    for basis in curvature.bases:
        part = slice(start, start := start + basis.size)
        if basis.left is None:  # a table, whose rows are a factor that is diagonal as it is
            continue
        u = basis.left.matrix().squeeze(0)
        u = u if basis.right is None else torch.kron(u, basis.right.matrix().squeeze(0))
        assert_close(curvature.corrected[0, part], (u.T @ full.H[part, part] @ u).diagonal(), "algebra")


def test_mixture_takes_weights() -> None:
    problem = catalogue.get("mlp_classification")
    components = [Laplace(problem.make_model(), "classification", "all", "kron") for _ in range(2)]
    mixture = MixtureLaplace(components)
    mixture.fit([(problem.x, problem.y)], weight_fn=lambda x, y: fractions(problem))
    assert components[1].n_data == pytest.approx(float(fractions(problem).sum()))


# Refusals: the former posterior stays.


@pytest.mark.parametrize(
    ("weigh", "message"),
    [
        (lambda x, y: -torch.ones(len(y)), "from -1 to -1"),
        (lambda x, y: torch.full((len(y),), torch.nan), "nan"),
        (lambda x, y: torch.full((len(y),), torch.inf), "inf"),
        (lambda x, y: torch.ones(len(y) - 1), r"shape \[5\]"),
        (lambda x, y: torch.ones(len(y), 1), r"shape \[6, 1\]"),
        (lambda x, y: 1.0, "type float"),
        (lambda x, y: torch.zeros(len(y)), "gave no data"),
    ],
)
def test_weights_that_are_none_are_refused(weigh: Any, message: str) -> None:
    problem = catalogue.get("mlp_classification")
    la = Laplace(problem.make_model(), "classification", "all", "kron")
    la.fit(problem.batches())
    before = la(problem.x)
    with pytest.raises(InvalidData, match=message):
        la.fit(problem.batches(), weight_fn=weigh)
    assert torch.equal(la(problem.x), before)
    assert la.n_data == len(problem.y)


def test_two_kinds_of_weights_are_refused() -> None:
    problem = catalogue.get("mlp_classification")
    la = Laplace(problem.make_model(), "classification", "all", "kron")
    with pytest.raises(InvalidArgument, match="give one of them"):
        la.fit(problem.batches(), weight_fn=lambda x, y: y, dict_key_weight="weight")
    with pytest.raises(InvalidType, match="weight_fn is a Tensor"):
        la.fit(problem.batches(), weight_fn=torch.ones(6))
    with pytest.raises(InvalidType, match="dict_key_weight=3"):
        la.fit(problem.batches(), dict_key_weight=3)


def functional(cls: type[Any], likelihood: Any, **options: Any) -> Any:
    """A posterior over functions."""
    return cls(catalogue.get("mlp_classification").make_model(), likelihood, **options)


class Own(GGNInterface):
    """A user's own backend."""

    def diag(self, X: Any, y: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("asked for data that have weights")


REFUSING: dict[str, Callable[[Any], Any]] = {
    "gp": lambda likelihood: functional(FunctionalLaplace, likelihood, n_subset=3),
    "ella": lambda likelihood: functional(ELLA, likelihood, subsample_size=4, n_eigenvalues=2),
    "valla": lambda likelihood: functional(VaLLA, likelihood, inducing_locations=None, num_inducing=3),
    "Own": lambda likelihood: functional(
        Laplace, likelihood, subset_of_weights="all", hessian_structure="diag", backend=Own
    ),
    "CurvlinopsGGN": lambda likelihood: functional(
        Laplace, likelihood, subset_of_weights="all", hessian_structure="diag", backend=CurvlinopsGGN
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSING)
@pytest.mark.parametrize("by", ["class", "datum"])
def test_what_knows_no_weights_refuses_them_by_name(name: str, by: str) -> None:
    if name == "CurvlinopsGGN":
        pytest.importorskip("curvlinops")
    problem = catalogue.get("mlp_classification")
    likelihood = Categorical(class_weight=CLASS_WEIGHT) if by == "class" else "classification"
    weighing: dict[str, Any] = {} if by == "class" else {"weight_fn": lambda x, y: of_classes(y)}
    with pytest.raises(
        UnsupportedError, match=f"backend={name}" if name in ("Own", "CurvlinopsGGN") else "class_weight|weight_fn"
    ):
        REFUSING[name](likelihood).fit(problem.batches(), **weighing)


def test_subsets_and_online_training_refuse_weights() -> None:
    problem = catalogue.get("mlp_classification")
    la = Laplace(problem.make_model(), "classification", "all", "kron")
    with pytest.raises(UnsupportedError, match="subset=3"):
        la.fit(problem.batches(), subset=3, weight_fn=lambda x, y: of_classes(y))
    with pytest.raises(UnsupportedError, match="online training"):
        OnlineLaplace(problem.make_model(), problem.batches(), Categorical(class_weight=CLASS_WEIGHT))


def test_subset_of_data_with_class_weights_counts_them_all() -> None:
    problem = catalogue.get("mlp_classification")
    la = Laplace(problem.make_model(), Categorical(class_weight=CLASS_WEIGHT), "all", "full")
    la.fit(problem.batches(), subset=3)
    assert la.n_data == pytest.approx(float(of_classes(problem.y).sum()))
