"""The warning of an evidence that leads to worse predictions than the network's, and what it must not touch."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import CalibrationWarning
from laplace.tuning.held_out import held_out_losses

N, D, C = 120, 60, 4


def separable(n: int = N) -> tuple[nn.Module, Tensor, Tensor]:
    """A head that fits clean data of many features: the evidence leaves its weights too much room."""
    draws = torch.Generator().manual_seed(0)
    centres = torch.randn(C, D, generator=draws)
    y = torch.arange(n) % C
    x = centres[y] + 0.5 * torch.randn(n, D, generator=draws)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, C))
    optimizer = torch.optim.Adam(model[2].parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.zero_grad()
    return model, x, y


def fitted(model: nn.Module, x: Tensor, y: Tensor, size: int = 50, **options: Any) -> Any:
    la = cast("Any", Laplace)(model, "classification", **options)
    la.fit(list(zip(x.split(size), y.split(size), strict=True)))
    return la


TUNINGS = {
    "adam": lambda la: la.optimize_prior_precision(),
    "em": lambda la: la.optimize_prior_precision(method="em"),
    "lbfgs": lambda la: la.optimize_hyperparameters(),
}


@pytest.mark.parametrize("structure", ["kron", "full", "diag", "ekfac", "block"])
@pytest.mark.parametrize("tune", TUNINGS.values(), ids=TUNINGS.keys())
def test_a_posterior_that_is_worse_is_warned_of(tune: Any, structure: str) -> None:
    model, x, y = separable()
    la = fitted(model, x, y, hessian_structure=structure)
    with pytest.warns(CalibrationWarning, match=r"la\.calibrate"):
        tune(la)


def test_the_forecast_is_right_on_new_data() -> None:
    model, x, y = separable(3 * N)
    la = fitted(model, x[:N], y[:N])
    with pytest.warns(CalibrationWarning):
        la.optimize_prior_precision()
    rows = torch.arange(2 * N)
    ours, network = la(x[N:]), model(x[N:]).softmax(1)
    assert (network[rows, y[N:]].log() - ours[rows, y[N:]].log()).mean() > 0.08
    losses = held_out_losses(la.snapshot())
    assert losses is not None and (losses[0] - losses[1]).mean() > 0.08


def test_a_posterior_like_the_network_is_not_warned_of() -> None:
    model, x, y = separable()
    la = fitted(model, x, y)
    la.prior_precision = 1e6
    losses = held_out_losses(la.snapshot())
    assert losses is not None
    assert (losses[0] - losses[1]).abs().max() < 1e-2


def test_a_regression_is_compared_as_well() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 2)), torch.randn(60, 3)
        y = model(x).detach() + 0.1 * torch.randn(60, 2)
    la = cast("Any", Laplace)(model, "regression", sigma_noise=0.1, prior_precision=1e6)
    la.fit([(x, y)])
    losses = held_out_losses(la.snapshot())
    assert losses is not None and (losses[0] - losses[1]).abs().max() < 1e-2
    la.prior_precision = 1.0
    wide = held_out_losses(la.snapshot())
    assert wide is not None and torch.equal(wide[1], losses[1]) and not torch.allclose(wide[0], losses[0])


def test_results_and_random_states_are_those_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = separable()
    generator = torch.Generator().manual_seed(1)
    weights = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state(), generator.get_state()
    first = fitted(model, x, y, backend_kwargs={"generator": generator})
    with pytest.warns(CalibrationWarning):
        first.optimize_prior_precision(generator=generator)
    assert torch.equal(state[0], torch.get_rng_state()) and torch.equal(state[1], generator.get_state())
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    monkeypatch.setattr("laplace.tuning.held_out.warn_if_worse", lambda tuned: None)
    second = fitted(model, x, y)
    second.optimize_prior_precision()
    assert torch.equal(first.prior_precision, second.prior_precision)
    assert torch.equal(first(x), second(x))
    assert first.state_dict().keys() == second.state_dict().keys()


def refit(la: Any, x: Tensor, y: Tensor) -> None:
    la.fit([(x[:40], y[:40])])


def forget(la: Any, x: Tensor, y: Tensor) -> None:
    la.forget([(x[:50], y[:50])])


def weigh(la: Any, x: Tensor, y: Tensor) -> None:
    la.fit([(x, y)], weight_fn=lambda inputs, targets: torch.ones(len(targets)))


@pytest.mark.parametrize(("change", "count"), [(refit, 14), (forget, None), (weigh, None)])
def test_features_are_those_of_the_present_fit_or_none(change: Any, count: int | None) -> None:
    model, x, y = separable()
    la = fitted(model, x, y)
    change(la, x, y)
    losses = held_out_losses(la.snapshot())
    assert (None if losses is None else len(losses[0])) == count


def test_inputs_that_are_written_to_are_not_looked_at() -> None:
    """Those of a network that is a head alone are its features."""
    _, x, y = separable()
    model = nn.Linear(D, C)
    la = fitted(model, x, y)
    assert held_out_losses(la.snapshot()) is not None
    x.add_(1)
    assert held_out_losses(la.snapshot()) is None


def test_data_that_are_added_are_seen_too() -> None:
    model, x, y = separable()
    la = fitted(model, x[:50], y[:50])
    la.fit([(x[50:], y[50:])], override=False)
    whole = held_out_losses(fitted(model, x, y).snapshot())
    losses = held_out_losses(la.snapshot())
    assert whole is not None and losses is not None
    assert torch.allclose(losses[0], whole[0], rtol=1e-3)


def test_copies_and_states_are_without_features() -> None:
    model, x, y = separable()
    la = fitted(model, x, y)
    size = len(pickle.dumps(la))
    other = Laplace(model, "classification")
    other.fit([(x[:2], y[:2])])
    assert size < 1.5 * len(pickle.dumps(other)) + 4 * x.numel()
    for again in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert held_out_losses(again.snapshot()) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again.optimize_prior_precision()


def test_large_features_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laplace.engines.engine._MAX_KEPT_BYTES", 1000)
    model, x, y = separable()
    assert held_out_losses(fitted(model, x, y).snapshot()) is None


def test_other_weights_and_few_data_are_not_looked_at() -> None:
    model, x, y = separable()
    assert held_out_losses(fitted(model, x, y, subset_of_weights="all").snapshot()) is None
    assert held_out_losses(fitted(model, x[:20], y[:20]).snapshot()) is None
