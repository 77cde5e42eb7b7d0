"""Soft labels: one-hot rows say what labels say, everywhere; others are expectations over labels.

Their curvatures are compared with the dense truth by the problem `mlp_soft_labels` of the catalogue.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import ELLA, FunctionalLaplace, Laplace, MixtureLaplace, OnlineLaplace, VaLLA, marglik_training
from laplace.curvature import NativeEF, NativeGGN, NativeHessian
from laplace.errors import DataWarning, InvalidData
from laplace.likelihoods import Categorical
from laplace.metrics import RunningNLLMetric, accuracy, brier, expected_calibration_error, nll
from tests import grid
from tests import problems as catalogue
from tests.conformance.backends import BACKENDS, Backend, engine_of
from tests.conformance.cases import STRUCTURE_NAMES, Case
from tests.conformance.test_invariance import same
from tests.pairs import nightly
from tests.reference import curvature as reference
from tests.reference.compare import assert_close

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": lambda hot: hot.double(),
    "float32": lambda hot: hot.float(),
    "integer": lambda hot: hot,
    "truth values": lambda hot: hot.bool(),
}
KINDS = {"ggn": NativeGGN, "ef": NativeEF, "hessian": NativeHessian}

Batches = list[tuple[Tensor, Tensor]]


def one_hot(batches: Batches, form: str = "float64") -> Batches:
    """The same data with rows of zeros and a one as labels."""
    return [(x, FORMS[form](nn.functional.one_hot(y, 3))) for x, y in batches]


def soft(n: int, *shape: int, seed: int = 0) -> Tensor:
    """Rows that sum to 1, `[n, *shape]`."""
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed)).double().mul(2).softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_one_hot_rows_are_labels_in_every_curvature(structure: str, kind: str) -> None:
    case = Case(catalogue.get("mlp_classification"), structure, "all")
    options: dict[str, Any] = {"backend": KINDS[kind]}
    if kind == "hessian":
        if structure not in ("full", "diag"):
            pytest.skip("its Hessian has no factors, or takes negative directions for an error")
        options["structure_kwargs"] = {"indefinite": "clamp"}
    la, expected = case.build(**options), case.build(**options)
    expected.fit(case.problem.batches(4))
    for form in FORMS:
        la.fit(one_hot(case.problem.batches(4), form))
        same(la, expected, form)
    la.fit(one_hot(case.problem.batches(2)[::-1], "integer"))
    if structure != "ekfac":
        same(la, expected, "in another order")


ODD_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "any numbers": lambda rows: rows,
    "too large a sum": lambda rows: rows.abs() + 1,
    "zeros": torch.zeros_like,
    "some rows": lambda rows: torch.cat([rows[:2], rows[2:].softmax(-1)]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ODD_ROWS)
def test_floating_rows_that_are_no_probabilities_have_the_loss_of_a_cross_entropy(rows: str, kind: str) -> None:
    model = catalogue.get("mlp_classification").make_model()
    x = catalogue.get("mlp_classification").x
    y = ODD_ROWS[rows](torch.randn(len(x), 3, generator=torch.Generator().manual_seed(0)).double())
    names = reference.trainable_names(model)
    la = Laplace(model, "classification", "all", "full", backend=KINDS[kind], prior_precision=1e3)
    with pytest.warns(DataWarning, match=r"no probabilities of the classes.*CrossEntropyLoss"):
        la.fit([(x[:3], y[:3]), (x[3:], y[3:])])
    assert_close(la.loss, nn.functional.cross_entropy(model(x), y, reduction="sum").detach(), "algebra")
    truths = {"ggn": reference.ggn, "ef": reference.empirical_fisher, "hessian": reference.exact_hessian}
    labels = torch.zeros(len(x), dtype=torch.long) if kind == "ggn" else y
    assert_close(la.H, truths[kind](model, x, labels, names, "classification"), "algebra")


def test_rows_that_are_no_probabilities_are_refused_where_they_have_no_meaning() -> None:
    x, _ = grid.data()
    rows = torch.randn(len(x), 3, generator=torch.Generator().manual_seed(0))
    missing = rows.where(torch.arange(3) > 0, torch.nan)
    for y, likelihood, words in (
        (missing, "classification", "NaN or infinite"),
        ((3 * rows).long(), "classification", "must be at least 0"),
        (rows, Categorical(class_weight=[1, 2, 3]), "must be at least 0"),
        (rows.abs() + 1, Categorical(class_weight=[1, 2, 3]), "sum must be 1"),
    ):
        with pytest.raises(InvalidData, match=words):
            Laplace(grid.network(), likelihood, "all", "diag").fit([(x, y)])


def test_draws_do_not_depend_on_labels() -> None:
    def fitted(batches: Batches) -> Any:
        options = {"stochastic": True, "generator": torch.Generator().manual_seed(0)}
        la = grid.make("all", "full", backend_kwargs=options)
        la.fit(batches)
        return la

    hard = fitted(grid.batches())
    assert_close(fitted(one_hot(grid.batches())).H, hard.H, "exact")
    mixed = [(x, soft(len(x), 3)) for x, _ in grid.batches()]
    assert_close(fitted(mixed).H, hard.H, "exact")


def test_the_gradient_of_a_saturated_datum_keeps_its_digits() -> None:
    f = torch.tensor([[40.0, 0.0, -3.0], [30.0, 0.0, 0.0]])
    likelihood = Categorical()
    hard = likelihood.gradient(f, torch.tensor([0, 0]))
    hot = likelihood.check_targets(f, torch.tensor([[1, 0, 0], [1, 0, 0]]))
    assert (hard[:, 0] < 0).all()
    assert_close(likelihood.gradient(f, hot), hard, "float32")
    mixed = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.9, 0.0]])
    assert_close(likelihood.gradient(f, mixed), f.softmax(1) - mixed, "float32")


@pytest.mark.parametrize("channel_dim", [None, -1, 1])
@pytest.mark.parametrize("kind", ["ggn", "ef"])
def test_labels_of_positions(kind: str, channel_dim: int | None) -> None:
    """Soft labels `[B, T, C]`, or with the classes elsewhere, are the rows of the flattened data."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, q = torch.randn(5, 4, 2).double(), soft(5, 4, 3)
    options: dict[str, Any] = {"backend": KINDS[kind]}

    place = -1 if channel_dim is None else channel_dim

    def moved(model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs).movedim(-1, place)

    rows = Laplace(network, "classification", "all", "full", **options)
    rows.fit([(x.flatten(0, 1), q.flatten(0, 1))])
    la = Laplace(network, "classification", "all", "full", forward_fn=moved, channel_dim=channel_dim, **options)
    la.fit([(part, labels.movedim(-1, place)) for part, labels in zip(x.split(2), q.split(2), strict=True)])
    same(la, rows)
    names = reference.trainable_names(network)
    oracle = reference.ggn if kind == "ggn" else reference.empirical_fisher
    assert_close(la.H, oracle(network, x.flatten(0, 1), q.flatten(0, 1), names, "classification"), "backend")
    assert la.n_data == 20


def tuned(batches: Batches, objective: str, method: str) -> Tensor:
    la = grid.fitted("all", "kron")
    candidates = {"grid": {"prior_precision": [0.1, 1.0, 10.0]}} if method == "grid" else {"n_steps": 4}
    la.optimize_hyperparameters(objective=objective, method=method, val_loader=batches, **candidates)
    return la.prior_precision.detach()


def online(batches: Batches, *_: Any) -> Tensor:
    network = copy.deepcopy(grid.network())
    torch.manual_seed(0)
    _, _, evidences, losses = marglik_training(
        network, batches, n_epochs=2, n_hypersteps=2, optimizer_kwargs={"lr": 0.01}
    )
    return torch.tensor(evidences + losses)


def refined(batches: Batches, method: str) -> Tensor:
    la = grid.make("all", "diag")
    la.fit(batches)
    la.refine(batches, method=method, max_steps=3)
    return torch.cat([la.mean, la.posterior_variance])


def mixed(batches: Batches) -> Tensor:
    mixture = MixtureLaplace([grid.make("all", "diag"), grid.make("all", "diag", prior_precision=3.0)])
    mixture.fit(batches)
    return torch.cat([mixture(grid.data()[0]).flatten(), torch.as_tensor(mixture.log_marginal_likelihood()).reshape(1)])


def of_functions(batches: Batches, cls: Any, *arguments: Any, **options: int) -> Tensor:
    la = cls(grid.network(), "classification", *arguments)
    la.fit(batches, **options)
    return la(grid.data()[0])


def by_metric(batches: Batches) -> Tensor:
    la = grid.fitted("all", "kron")
    la.optimize_prior_precision(method="gridsearch", val_loader=batches, loss=RunningNLLMetric(), grid_size=3)
    return la.prior_precision


USES: dict[str, Callable[[Batches], Tensor]] = {
    **{f"{score} by {method}": lambda b, s=score, m=method: tuned(b, s, m)
       for score, method in [("nll", "grid"), ("brier", "grid"), ("ece", "grid"), ("nll", "adam"), ("brier", "lbfgs")]},
    "a metric": by_metric,
    "online training": online,
    "the refined mode": lambda b: refined(b, "map"),
    "the refined Gaussian": lambda b: refined(b, "variational"),
    "a mixture": mixed,
    "a Gaussian process": lambda b: of_functions(b, FunctionalLaplace, 8),
    "ELLA": lambda b: of_functions(b, ELLA, 8, 4),
    "VaLLA": lambda b: of_functions(b, VaLLA, "random", 4, iterations=20),
}  # fmt: skip

SLOW = "the refined Gaussian"


@pytest.mark.filterwarnings("ignore::laplace.errors.TuningWarning")
@pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning")  # a search that is not at its end
@pytest.mark.parametrize("use", [*(use for use in USES if use != SLOW), *nightly(SLOW)])
def test_one_hot_rows_are_labels_in_every_use(use: str) -> None:
    expected = USES[use](grid.batches())
    for form in FORMS:
        assert_close(USES[use](one_hot(grid.batches(), form)), expected, "float32", label=form)


def test_scores_are_expectations_over_labels() -> None:
    p, q = soft(7, 3, seed=1), soft(7, 3, seed=2)
    every = torch.arange(3).expand(7, 3)
    expected = -(q * p.log()).sum(1).mean()
    assert_close(nll(p, q), expected, "algebra")
    running = RunningNLLMetric()
    running.update(p[:2], q[:2])
    running.update(p[2:], q[2:])
    assert_close(running.compute(), expected, "algebra")
    shares = q.gather(1, p.argmax(1, keepdim=True)).squeeze(1)
    assert_close(accuracy(p, q), shares.mean(), "algebra")
    by_labels = torch.stack([(p.argmax(1) == every[:, c]).double() * q[:, c] for c in range(3)]).sum(0)
    assert_close(accuracy(p, q), by_labels.mean(), "algebra")
    assert_close(brier(p, q), (p - q).square().sum(1).mean(), "algebra")
    assert_close(expected_calibration_error(p, p), 0.0, "algebra")
    hard = torch.randint(3, (7,), generator=torch.Generator().manual_seed(0))
    hot = nn.functional.one_hot(hard, 3)
    for score in (nll, brier, accuracy, expected_calibration_error):
        assert_close(score(p, hot), score(p, hard), "algebra")
        assert_close(score(p.view(7, 1, 3), hot.view(7, 1, 3)), score(p, hard), "algebra")


@pytest.mark.parametrize("likelihood", ["classification", "reward_modeling"])
def test_loss_and_evidence_of_soft_labels(likelihood: str) -> None:
    x, _ = grid.data(likelihood)
    n_outputs = 2 if likelihood == "reward_modeling" else 3
    q = soft(len(x), n_outputs)
    network = grid.network(likelihood).eval()
    la = grid.make("all", "full", likelihood)
    la.fit([(x[:3], q[:3]), (x[3:], q[3:])])
    log_p = network(x).log_softmax(1).detach()
    assert_close(la.loss, -(q.to(log_p) * log_p).sum(), "float32")
    assert la.n_data == len(x)
    assert_close(la.log_likelihood, (q.to(log_p) * log_p).sum(), "float32")


def test_counts_before_the_first_estimate_of_online_training() -> None:
    x, y = grid.data()
    for labels in (y, nn.functional.one_hot(y, 3), soft(len(y), 3)):
        training = OnlineLaplace(grid.network(), [(x, labels)], "classification")
        training.loss(training.forward(x), labels)
        assert training.n_data == len(x)
    network = nn.Linear(2, 3)
    tokens, targets = torch.randn(4, 5, 2), torch.randint(3, (4, 5))
    targets[0, :2] = -100
    assert OnlineLaplace(network, [(tokens, targets)], "classification").n_data == 18
    assert OnlineLaplace(network, [(tokens, soft(4, 5, 3))], "classification").n_data == 20


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=str)
def test_packages_compute_what_does_not_depend_on_labels(backend: Backend) -> None:
    """The rest is the native engine's, and `coverage` says why."""
    case = Case(catalogue.get("mlp_soft_labels"), "full", "all")
    options = {"structure_kwargs": {"indefinite": "clamp"}} if backend.kind == "hessian" else {}
    la = case.build(backend=backend.cls, **options)
    la.fit(case.problem.batches(4))
    reasons = set(la.coverage().values())
    if backend.kind == "ggn":
        assert reasons == {backend.package}
    else:
        assert all(reason.endswith(f"not {backend.package} (soft labels)") for reason in reasons)
    names = reference.trainable_names(case.problem.make_model())
    truths = {"ggn": reference.ggn, "ef": reference.empirical_fisher, "hessian": reference.exact_hessian}
    model, x, y = case.problem.make_model(), case.problem.x, case.problem.y
    summary, values = engine_of(backend, case).full(x, y)
    assert_close(values[0], truths[backend.kind](model, x, y, names, "classification"), "backend")
    assert_close(summary.loss_terms.sum(), reference.loss(model(x), y, "classification").detach(), "backend")


@pytest.mark.parametrize("name", ["BackPackGGN", "CurvlinopsGGN", "AsdlGGN"])
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_packages_draw_what_they_draw_for_labels(name: str, structure: str) -> None:
    def fitted(batches: Batches) -> Any:
        kwargs = {"stochastic": True, "generator": torch.Generator().manual_seed(0)}
        la = grid.make("all", structure, backend=BACKENDS[name].cls, backend_kwargs=kwargs)
        la.fit(batches)
        return la.posterior_variance

    mixed = [(x, soft(len(x), 3)) for x, _ in grid.batches()]
    assert_close(fitted(mixed), fitted(grid.batches()), "float32")


def test_a_loss_that_softens_labels() -> None:
    """Assigned to the backend: the targets that it stands for are soft labels."""

    def softened(y: Tensor) -> Tensor:
        return 0.9 * nn.functional.one_hot(y, 3) + 0.1 / 3

    case = Case(catalogue.get("mlp_classification"), "full", "all")
    la, expected = case.build(backend=NativeEF), case.build(backend=NativeEF)
    own = la.backend.lossfunc
    la.backend.lossfunc = lambda f, y: own(f, softened(y).to(f))
    la.fit(case.problem.batches(4))
    expected.fit([(x, softened(y)) for x, y in case.problem.batches(4)])
    same(la, expected, kind="float32")
