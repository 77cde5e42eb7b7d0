"""A noise that was left at 1 while the residuals are of another size: told once per fit, where it first matters."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace, MixtureLaplace
from laplace.errors import ApproximationWarning, TuningWarning

X = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
TOLD = "sigma_noise is 1, its default"


def network(n_outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, n_outputs))


def targets(model: nn.Module, *spreads: float) -> Tensor:
    """Targets `[30, C]` at which the residuals of every output have exactly this root mean square."""
    with torch.no_grad():
        f = model(X)
    return f + torch.tensor(spreads) * torch.randn(f.shape, generator=torch.Generator().manual_seed(2)).sign()


def fitted(*spreads: float, weights: Any = "all", structure: Any = "kron", **options: Any) -> Any:
    model = network(len(spreads))
    la: Any = Laplace(model, "regression", weights, structure, **options)
    y = targets(model, *spreads)
    la.fit([(X[:20], y[:20]), (X[20:], y[20:])])
    return la


def told(call: Callable[[], Any]) -> str:
    with pytest.warns(ApproximationWarning, match=TOLD) as caught:
        call()
    assert [w.filename for w in caught] == [__file__]
    return str(caught[0].message)


USES: dict[str, Callable[[Any], Any]] = {
    "call": lambda la: la(X),
    "sampled": lambda la: la(X, pred_type="nn"),
    "predict": lambda la: la.predict(X).variance,
    "functional_samples": lambda la: la.functional_samples(X),
    "functional_variance_fast": lambda la: la.functional_variance_fast(X),
    "prior by evidence": lambda la: la.optimize_prior_precision(),
    "prior alone": lambda la: la.optimize_hyperparameters("prior_precision"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(("spread", "ratio"), [(0.02, "50 times as large"), (40.0, "40 times smaller")])
def test_whatever_first_depends_on_it_tells(use: Any, spread: float, ratio: str) -> None:
    la = fitted(spread)
    message = told(lambda: use(la))
    numbers = re.search(r"residuals is (\S+): .* assume is (.*?)\. ", message)
    assert numbers is not None
    assert float(numbers[1]) == pytest.approx(spread, rel=1e-2)
    assert numbers[2] == ratio


def test_once_per_fit() -> None:
    la = fitted(0.02)
    told(lambda: la(X))
    la(X)
    la.optimize_prior_precision()
    la.prior_precision = 3.0
    la.predict(X).interval(0.9)
    la.fit([(X, targets(la.model, 0.02))])
    told(lambda: la.optimize_prior_precision())
    la(X)


@pytest.mark.parametrize("spread", [0.25, 1.0, 4.5])
def test_nothing_is_said_of_a_noise_that_fits(spread: float) -> None:
    la = fitted(spread)
    la.optimize_prior_precision()
    la(X)


def test_nor_of_one_that_was_chosen() -> None:
    fitted(0.02, sigma_noise=0.9)(X)
    la = fitted(0.02)
    la.sigma_noise = 30.0
    la(X)
    la = fitted(0.02, weights="last_layer")
    la.optimize_hyperparameters(("prior_precision", "sigma_noise"))
    la.optimize_prior_precision()
    la(X)


def test_nor_in_a_loop_that_tunes_it_by_hand() -> None:
    """What scripts do after a fit: their own optimiser over the evidence, which assigns both."""
    la = fitted(0.02)
    logs = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([logs], 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (-la.log_marginal_likelihood(logs[:1].exp(), logs[1:].exp())).backward()
        optimizer.step()
    la(X)


def test_nor_of_few_data_or_of_other_likelihoods() -> None:
    model = network()
    la = Laplace(model, "regression")
    la.fit([(X[:9], targets(model, 0.02)[:9])])
    la(X)
    la = Laplace(network(3), "classification")
    la.fit([(X, torch.arange(30) % 3)])
    la(X)


def test_a_noise_of_every_output() -> None:
    """The mean over the outputs where one noise serves all, the worst output where each has its own."""
    la = fitted(0.15, 0.4)  # a root mean square of 0.3
    la(X)
    la = fitted(0.15, 0.4, sigma_noise=torch.ones(2))
    assert "residuals is 0.15:" in told(lambda: la(X))


def test_outputs_that_one_noise_does_not_suit() -> None:
    """One that is right in the mean is too large for one output and too small for the other."""
    la = fitted(0.2, 2.0)
    with pytest.warns(
        ApproximationWarning, match=r"^one noise serves 2 outputs .* between 0.2 and 2.*=torch.ones\(2\)"
    ):
        la(X)
    la(X)


@pytest.mark.parametrize(("weights", "structure", "options"), [
    ("last_layer", "full", {}), ("all", "gp", {"n_subset": 20}), ("all", "matrix_free", {}),
])  # fmt: skip
def test_other_posteriors(weights: str, structure: str, options: dict[str, Any]) -> None:
    la = fitted(0.02, weights=weights, structure=structure, **options)
    told(lambda: la(X))


def test_every_component_of_a_mixture() -> None:
    mixture = MixtureLaplace([fitted(0.02), fitted(1.0)])
    told(lambda: mixture(X))
    mixture(X)


def test_as_an_error_it_leaves_the_posterior() -> None:
    la = fitted(0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ApproximationWarning, match=TOLD):
            la(X)
        mean, variance = la(X)
    again = fitted(0.02)
    with pytest.warns(ApproximationWarning, match=TOLD):
        expected = again(X)
    assert torch.equal(mean, expected[0]) and torch.equal(variance, expected[1])


def test_exports_are_silent_but_for_the_prediction() -> None:
    la = fitted(0.02, structure="full")
    told(lambda: laplace.export(la, X))
    assert laplace.export(la, X)(X)[0].shape == (30, 1)


def test_a_validation_loss_of_the_prior_alone() -> None:
    la = fitted(0.02)
    with pytest.warns((ApproximationWarning, TuningWarning)) as caught:
        la.optimize_prior_precision(method="gridsearch", val_loader=[(X, targets(la.model, 0.02))])
    assert sum(TOLD in str(w.message) for w in caught) == 1
