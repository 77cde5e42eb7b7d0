"""The noise of a regression that the evidence chooses, against MacKay's equation and the residuals."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import TuningWarning
from laplace.tuning import objectives

TUNED = ("prior_precision", "sigma_noise")


def regression(n_data: int, n_outputs: int = 1) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A network with far more weights than data, trained for a while in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        x = torch.rand(n_data, 1, dtype=torch.float64) * 8 - 4
        y = torch.sin(1.3 * x) + 0.2 * torch.randn(n_data, n_outputs, dtype=torch.float64)
        model = nn.Sequential(
            nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, n_outputs)
        ).double()  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(300):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model, [(x, y)]


def tuned(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], weights: str, structure: str, n_noises: int = 0
) -> Laplace:
    noise = torch.ones(n_noises, dtype=torch.float64) if n_noises else 1.0
    la = Laplace(model, "regression", weights, structure, sigma_noise=noise)
    la.fit(data)
    la.optimize_hyperparameters(TUNED)
    return la


def effective_parameters(la: Laplace) -> float:
    """γ = P − δ tr P⁻¹, from the dense precision."""
    precision = la.posterior_precision
    dense = precision if isinstance(precision, Tensor) else precision.to_matrix()
    return la.n_params - la.prior_precision.item() * dense.double().inverse().trace().item()


@pytest.mark.parametrize(("n_data", "n_noises"), [(40, 0), (40, 2), (100, 0)], ids=["one", "two", "between 1.5 and 2"])
def test_a_noise_far_above_the_residuals_is_warned_of(n_data: int, n_noises: int) -> None:
    model, data = regression(n_data, max(1, n_noises))
    with pytest.warns(TuningWarning, match="the evidence chose a noise of") as caught:
        la = tuned(model, data, "all", "kron", n_noises)
    x, y = data[0]
    spread = (y - model(x)).square().mean(0).sqrt()
    ratio = (la.sigma_noise / spread).max().item()
    assert ratio > 2 if n_data == 40 else 1.5 < ratio < 2
    numbers = re.search(r"noise of (\S+), (\S+) times .* counts (\d+) %", str(caught[0].message))
    assert numbers is not None
    assert float(numbers[2]) == pytest.approx(ratio, rel=5e-3)
    assert int(numbers[3]) == pytest.approx(100 * (1 - ratio**-2), abs=1)
    if not n_noises:  # what the warning says of γ, by MacKay's equation, and by its definition
        assert effective_parameters(la) / y.numel() == pytest.approx(1 - ratio**-2, abs=1e-2)


@pytest.mark.filterwarnings("ignore::laplace.errors.CalibrationWarning")
@pytest.mark.parametrize(
    ("weights", "structure", "left_out"),
    [("all", "kron", ""), ("all", "full", "full"), ("last_layer", "diag", "last layer")],
)
def test_what_is_chosen_already_is_not_advised(weights: str, structure: str, left_out: str) -> None:
    model, data = regression(40)
    la = Laplace(model, "regression", weights, structure)
    la.fit(data)
    with pytest.MonkeyPatch.context() as patch, pytest.warns(TuningWarning, match="the evidence chose") as caught:
        patch.setattr(objectives, "_LARGEST_NOISE", 0.0)
        la.optimize_hyperparameters(TUNED)
    advice = str(caught[0].message)
    assert ("hessian_structure='full'" in advice) == (left_out != "full")
    assert ("use the last layer" in advice) == (left_out != "last layer")
    assert "tune on validation data" in advice


@pytest.mark.parametrize(("weights", "structure"), [("last_layer", "kron"), ("last_layer", "full"), ("all", "full")])
def test_a_noise_near_the_residuals_is_not(weights: str, structure: str) -> None:
    model, data = regression(150)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la = tuned(model, data, weights, structure)
    x, y = data[0]
    spread = (y - model(x)).square().mean().sqrt()
    gamma = effective_parameters(la)
    assert la.sigma_noise.item() == pytest.approx((spread / (1 - gamma / 150) ** 0.5).item(), rel=1e-3)
