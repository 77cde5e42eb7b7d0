"""A grid over prior, noise and temperature: every candidate against the predictions of a posterior that has it."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, marglik_training
from laplace.errors import (
    InvalidArgument,
    InvalidData,
    LaplaceWarning,
    ModelChangedError,
    TuningWarning,
    UnsupportedError,
)
from laplace.metrics import (
    brier,
    expected_calibration_error,
    gaussian_crps,
    gaussian_nll,
    mean_confidence,
    nll,
)
from laplace.structures import STRUCTURES
from laplace.tuning import TuningResult
from laplace.tuning.search import GridSearch
from tests import grid
from tests.reference.compare import assert_close

AXES = {
    "prior_precision": torch.tensor([0.1, 2.0, 30.0]),
    "sigma_noise": torch.tensor([0.4, 1.3]),
    "temperature": torch.tensor([0.5, 3.0]),
}
FEW = {"prior_precision": [1.0, 2.0, 3.0], "temperature": [1.0, 2.0]}
FOREIGN = 4 * torch.randn(7, 3, generator=torch.Generator().manual_seed(5))
CELLS = [(weights, structure) for weights in grid.WEIGHTS for structure in STRUCTURES]


def quietly(la: Any, *arguments: Any, **options: Any) -> TuningResult:
    """Tunes on a grid without a word about edges."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        return la.optimize_hyperparameters(*arguments, method="grid", **options)


def one_by_one(la: Any, axes: dict[str, Tensor], predict: Any, ratios: Tensor | None = None) -> list[Any]:
    """The prediction of a posterior at every candidate, the last axis running fastest; it keeps its own values.

    Noises per output have these ratios.
    """
    former, found = {name: getattr(la, name) for name in axes}, []
    for values in itertools.product(*axes.values()):
        for name, value in zip(axes, values, strict=True):
            each = value if ratios is None or name != "sigma_noise" else value * ratios
            setattr(la, name, each.expand(former[name].shape))
        found.append(predict(la))
    for name, value in former.items():
        setattr(la, name, value)
    return found


# Exhaustively.


@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_classification(weights: str, structure: str) -> None:
    axes = {name: AXES[name] for name in ("prior_precision", "temperature")}
    x, y = grid.data(seed=11)
    la = grid.fitted(weights, structure)
    predictions = one_by_one(la, axes, lambda p: p(x))
    for objective, metric in (("nll", nll), ("brier", brier), ("ece", expected_calibration_error)):
        result = quietly(la, tuple(axes), objective, val_loader=grid.batches(seed=11), grid=axes)
        expected = torch.stack([metric(p, y) for p in predictions]).view(3, 2)
        assert_close(result.values, expected, "float32", label=objective)
        best = int(result.values.argmin())
        assert result.value == result.values.min() == result.values.flatten()[best]
        assert la.prior_precision.item() == axes["prior_precision"][best // 2].item()
        assert la.temperature.item() == axes["temperature"][best % 2].item()


@pytest.mark.parametrize(
    ("weights", "structure", "per_output"),
    [(*cell, False) for cell in CELLS] + [("all", structure, True) for structure in STRUCTURES],
)
@pytest.mark.turns
def test_regression(weights: str, structure: str, per_output: bool) -> None:
    """Of a noise per output a value is the geometric mean, in the ratios of the residuals on the validation data."""
    x, y = grid.data("regression", seed=11)
    noise = torch.tensor([0.5, 1.0, 2.0]) if per_output else 1.0
    la = grid.fitted(weights, structure, "regression", sigma_noise=noise)
    size = (la.predict(x).latent_mean - y).square().mean(0).sqrt()
    ratios = size / size.prod() ** (1 / 3) if per_output else None
    totals = one_by_one(la, AXES, lambda p: p(x, diagonal_output=True, observation_noise=True), ratios)
    for objective, metric in (("nll", gaussian_nll), ("crps", gaussian_crps)):
        loader = grid.batches("regression", seed=11)
        result = quietly(la, tuple(AXES), objective, val_loader=loader, grid=AXES)
        expected = torch.stack([metric(mean, variance, y) for mean, variance in totals]).view(3, 2, 2)
        assert_close(result.values, expected, "float32_solve", label=objective)
    assert la.sigma_noise.shape == torch.as_tensor(noise).shape


@pytest.mark.parametrize("ratio", [10.0, 1000.0])
@pytest.mark.parametrize("how", ["calibrate", "grid", "grid of an iterator"])
def test_outputs_of_unlike_size_get_their_own_noise(how: str, ratio: float) -> None:
    """Whatever the noise was before: one per output starts at the residual of each."""
    draws, sizes = torch.Generator().manual_seed(0), torch.tensor([1.0, ratio])
    x = torch.randn(300, 2, generator=draws)
    y = sizes * (x + 0.3 * torch.randn(300, 2, generator=draws))
    model = nn.Linear(2, 2)
    model.load_state_dict({"weight": torch.diag(sizes), "bias": torch.zeros(2)})
    la: Any = Laplace(model, "regression", "all", "full", sigma_noise=torch.ones(2))
    la.fit([(x[:100], y[:100])])
    validation = [(x[100:150], y[100:150]), (x[150:200], y[150:200])]
    if how == "calibrate":
        la.calibrate(validation)
    else:
        loader = validation if how == "grid" else iter(validation)
        quietly(la, ("prior_precision", "sigma_noise"), "nll", val_loader=loader)
    size: Tensor = (model(x[100:200]) - y[100:200]).square().mean(0).sqrt()
    noise = la.predict(x[:1]).sigma_noise if how == "calibrate" else la.sigma_noise
    assert_close(noise / noise[0], size / size[0], "float32")
    low, high = la.predict(x[200:]).interval(0.9)
    inside = ((y[200:] >= low) & (y[200:] <= high)).double().mean(0)
    assert bool((inside > 0.8).all() and (inside < 0.99).all())


@pytest.mark.parametrize("how", ["calibrate", "grid", "evidence", "online", "default"])
def test_one_noise_for_outputs_of_unlike_size_is_announced(how: str) -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(120, 2, generator=draws)
    y = torch.tensor([0.1, 1.4]) * (x + torch.randn(120, 2, generator=draws))
    model = nn.Linear(2, 2)
    model.load_state_dict({"weight": torch.diag(torch.tensor([0.1, 1.4])), "bias": torch.zeros(2)})
    la: Any = Laplace(model, "regression", "all", "full")
    la.fit([(x[:60], y[:60])])
    validation = [(x[60:], y[60:])]
    names, advice = ("prior_precision", "sigma_noise"), r"one noise serves 2 outputs .*=torch.ones\(2\)"
    with pytest.warns(LaplaceWarning, match=advice):
        if how == "calibrate":
            la.calibrate(validation)
        elif how == "grid":
            la.optimize_hyperparameters(names, "nll", val_loader=validation)
        elif how == "evidence":
            la.optimize_hyperparameters(names)
        elif how == "online":
            marglik_training(model, [(x[:60], y[:60])], "regression", n_epochs=1, n_hypersteps=1)
        else:
            la(x)


def test_temperature_alone_keeps_a_noise_per_output() -> None:
    noise = torch.tensor([0.5, 1.0, 2.0])
    x, y = grid.data("regression", seed=11)
    axes = {"temperature": AXES["temperature"]}
    la = grid.fitted("all", "kron", "regression", sigma_noise=noise)
    result = quietly(la, "temperature", "nll", val_loader=grid.batches("regression", seed=11), grid=axes)
    for temperature, value in zip(axes["temperature"], result.values, strict=True):
        other = grid.fitted("all", "kron", "regression", sigma_noise=noise, temperature=temperature)
        expected = gaussian_nll(*other(x, diagonal_output=True, observation_noise=True), y)
        assert_close(value, expected, "float32_solve")
    assert torch.equal(la.sigma_noise, noise)


@pytest.mark.parametrize("options", [{"link_approx": "mc"}, {"link_approx": "bridge"}, {"pred_type": "nn"}])
def test_other_predictives(options: dict[str, Any]) -> None:
    """A loss of one candidate among many is its loss on a grid of its own: random numbers are shared."""
    axes = {name: AXES[name] for name in ("prior_precision", "temperature")}
    for likelihood in ("classification", "regression") if "pred_type" in options else ("classification",):
        la = grid.fitted("last_layer", "kron", likelihood)
        options |= {"val_loader": grid.batches(likelihood, seed=11), "n_samples": 20}
        whole = quietly(la, tuple(axes), "nll", grid=axes, **options)
        for (i, delta), (j, temperature) in itertools.product(*map(enumerate, axes.values())):
            single = {"prior_precision": delta.view(1), "temperature": temperature.view(1)}
            assert_close(quietly(la, tuple(axes), "nll", grid=single, **options).value, whole.values[i, j], "float32")


@pytest.mark.parametrize("seed", [0, 1])
def test_the_generator_decides_the_samples(seed: int) -> None:
    la = grid.fitted("all", "diag")
    options = {
        "val_loader": grid.batches(seed=11),
        "link_approx": "mc",
        "n_samples": 5,
        "grid": {"prior_precision": [1.0]},
    }
    values = [
        quietly(la, objective="nll", generator=torch.Generator().manual_seed(s), **options).value
        for s in (seed, seed, seed + 2)
    ]
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize("damping", [False, True])
def test_damped_kronecker_factors(damping: bool) -> None:
    """(√s A + √δ) ⊗ (√s B + √δ) is homogeneous in (s, δ) too."""
    axes = {name: AXES[name] for name in ("prior_precision", "temperature")}
    x, y = grid.data(seed=11)
    la = grid.fitted("all", "kron", damping=damping)
    result = quietly(la, tuple(axes), "nll", val_loader=[(x, y)], grid=axes)
    expected = torch.stack(one_by_one(la, axes, lambda p: nll(p(x), y)))
    assert_close(result.values.flatten(), expected, "float32")


# Foreign inputs: equation 12 of Daxberger et al. (2021).


@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_foreign_inputs_of_classes(weights: str, structure: str) -> None:
    """(Σ_val −log p(y | x) − λ Σ_out H[p(y | x)]) / N_val, with sums over both sets as in the paper."""
    x, y = grid.data(seed=11)
    axes = {"prior_precision": AXES["prior_precision"]}
    la = grid.fitted(weights, structure)
    foreign = [FOREIGN[:4], FOREIGN[4:]]
    result = quietly(la, objective="nll", val_loader=[(x, y)], grid=axes, ood_loader=foreign, ood_weight=0.3)
    for delta, value in zip(axes["prior_precision"], result.values, strict=True):
        la.prior_precision = delta
        likelihoods = la(x).log().gather(1, y[:, None]).sum()
        entropies = torch.distributions.Categorical(la(FOREIGN)).entropy().sum()
        assert_close(value, -(likelihoods + 0.3 * entropies) / len(y), "float32")


@pytest.mark.parametrize("likelihood", ["regression", "bernoulli"])
def test_foreign_inputs_of_other_likelihoods(likelihood: str) -> None:
    x, y = grid.data(likelihood, seed=11)
    axes = {"prior_precision": AXES["prior_precision"]}
    la = grid.fitted("all", "kron", likelihood)
    plain = quietly(la, objective="nll", val_loader=[(x, y)], grid=axes)
    result = quietly(la, objective="nll", val_loader=[(x, y)], grid=axes, ood_loader=[(FOREIGN, y)], ood_weight=0.3)
    for i, delta in enumerate(axes["prior_precision"]):
        la.prior_precision = delta
        prediction = la(FOREIGN)
        if likelihood == "regression":
            mean, variance = prediction
            spread = (variance.diagonal(dim1=1, dim2=2) + la.sigma_noise**2).sqrt()
            entropies = torch.distributions.Normal(mean, spread).entropy()
        else:
            entropies = torch.distributions.Bernoulli(prediction).entropy()
        assert_close(result.values[i], plain.values[i] - 0.3 * entropies.sum() / len(y), "float32")


def test_foreign_inputs_lower_the_prior_precision() -> None:
    la = grid.fitted("all", "kron")
    options = {"objective": "nll", "val_loader": grid.batches(seed=3)}
    without = quietly(la, **options).prior_precision.item()
    within = quietly(la, **options, ood_loader=[[FOREIGN]], ood_weight=1.0).prior_precision.item()
    assert within < without


def test_weight_zero_is_no_foreign_data() -> None:
    la = grid.fitted("all", "diag")
    options: dict[str, Any] = {"objective": "brier", "val_loader": grid.batches(seed=11)}
    assert_close(
        quietly(la, **options, ood_loader=[FOREIGN], ood_weight=0).values, quietly(la, **options).values, "exact"
    )


@pytest.mark.parametrize("weight", [-0.1, math.inf, math.nan])
def test_weights_out_of_range(weight: float) -> None:
    la = grid.fitted("all", "diag")
    with pytest.raises(InvalidArgument, match="ood_weight"):
        la.optimize_hyperparameters(objective="nll", val_loader=grid.batches(), ood_loader=[FOREIGN], ood_weight=weight)


# The search of appendix F.4 of the paper on mixtures: the smallest prior precision that is confident enough.


@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_the_first_of_equal_losses_is_the_smallest_prior_that_reaches_a_threshold(weights: str, structure: str) -> None:
    """By a scan of single predictions; where nothing reaches it, the nearest is chosen, and its loss says so."""
    x, y = grid.data(seed=11)
    values = torch.logspace(-3, 3, 13)
    la = grid.fitted(weights, structure)
    confidences: list[float] = []
    for delta in values:
        la.prior_precision = delta
        confidences.append(mean_confidence(la(x)).item())
    threshold = 0.5 * (confidences[0] + confidences[-1])
    first = next(i for i, confidence in enumerate(confidences) if confidence >= threshold)
    assert 0 < first < 12

    def missed(p: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
        return (threshold - mean_confidence(p)).clamp(min=0)

    result = quietly(la, objective=missed, val_loader=[(x, y)], grid={"prior_precision": values})
    assert la.prior_precision.item() == values[first].item()
    assert result.value == 0
    threshold = 1.5
    assert quietly(la, objective=missed, val_loader=[(x, y)], grid={"prior_precision": values}).value > 0.5
    assert la.prior_precision.item() == values[max(range(13), key=confidences.__getitem__)].item()


# The network runs once, whatever the number of candidates.


class Counting(nn.Module):
    """A network that counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = grid.network()

    def forward(self, x: Tensor) -> Tensor:
        counter.append(len(x))
        return self.network(x)


counter: list[int] = []


@pytest.mark.parametrize(("weights", "structure"), grid.DIAGONAL)
@pytest.mark.parametrize("n_candidates", [1, 40])
def test_passes_of_the_network(weights: str, structure: str, n_candidates: int) -> None:
    options = {"subnetwork_indices": grid.INDICES} if weights == "subnetwork" else {}
    la = Laplace(Counting(), "classification", weights, structure, **options)  # pyright: ignore
    la.fit(grid.batches())
    batches = grid.batches(seed=11)
    quietly(la, objective="nll", val_loader=batches, grid={"prior_precision": [1.0]})  # plans are proved now
    counter.clear()
    values = torch.logspace(-3, 3, n_candidates)
    quietly(la, ("prior_precision", "temperature"), "nll", val_loader=batches, ood_loader=[FOREIGN],
            grid={"prior_precision": values, "temperature": [1.0, 2.0]})  # fmt: skip
    many = len(counter)
    counter.clear()
    quietly(la, objective="nll", val_loader=batches, ood_loader=[FOREIGN], grid={"prior_precision": [1.0]})
    assert many == len(counter) > 0


def test_a_parameter_without_a_rule_is_not_differentiated_per_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces are computed when they are asked for: once, not once per candidate."""
    from laplace.jacobian import blocks

    monkeypatch.setattr(blocks, "CHUNK_BYTES", 8)
    calls: list[int] = []
    whole = blocks.Block.pieces

    def counted(self: Any) -> Any:
        calls.append(1)
        return whole(self)

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.matrix) @ self.matrix

    la = Laplace(Bare(), "classification", "all", "diag")
    la.fit(grid.batches())
    monkeypatch.setattr(blocks.Block, "pieces", counted)
    numbers: list[int] = []
    for n_candidates in (2, 20):
        calls.clear()
        quietly(
            la, objective="nll", val_loader=[grid.data(seed=11)], grid={"prior_precision": torch.ones(n_candidates)}
        )
        numbers.append(len(calls))
    assert numbers[0] == numbers[1] > 0


# What is refused, reported and left alone.


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tune": "weight_decay"}, "tune="),
        ({"tune": ()}, "tune="),
        ({"tune": "sigma_noise"}, "sigma_noise"),
        ({"objective": "nll", "val_loader": None}, "val_loader"),
        ({"objective": "evidence"}, "uses no validation data"),
        ({"objective": "accuracy"}, "no objective"),
        ({"grid": {"temperature": [1.0]}}, "not tuned"),
        ({"grid": {"prior_precision": [-1.0]}}, "prior_precision"),
        ({"grid": {"prior_precision": []}}, "prior_precision"),
        ({"grid": {"prior_precision": [[1.0]]}}, "prior_precision"),
        ({"grid": {"prior_precision": [1.0]}, "method": "adam"}, "grid="),
        ({"method": "newton"}, "method="),
        ({"prior_structure": "block"}, "prior_structure"),
        ({"pred_type": "gp"}, "pred_type"),
        ({"link_approx": "logit"}, "link_approx"),
    ],
)
def test_arguments(options: dict[str, Any], match: str) -> None:
    la = grid.fitted("all", "diag", prior_precision=3.0)
    with pytest.raises(InvalidArgument, match=match):
        la.optimize_hyperparameters(**({"objective": "nll", "val_loader": grid.batches()} | options))
    assert la.prior_precision.item() == 3.0


def test_a_vector_prior_that_is_not_tuned() -> None:
    la = grid.fitted("all", "kron", prior_precision=torch.ones(4))
    with pytest.raises(InvalidArgument, match="method='lbfgs'"):
        quietly(la, "temperature", "nll", val_loader=grid.batches())


@pytest.mark.parametrize("name", ["val_loader", "ood_loader"])
def test_loaders_without_data(name: str) -> None:
    la = grid.fitted("all", "kron", prior_precision=3.0)
    loaders: dict[str, Any] = {"val_loader": grid.batches(), "ood_loader": [FOREIGN]} | {name: []}
    for method in ("grid", "lbfgs"):
        with pytest.raises(InvalidData, match="no "):
            la.optimize_hyperparameters(objective="nll", method=method, **loaders)
    assert la.prior_precision.item() == 3.0


def test_edges_are_reported_per_hyperparameter() -> None:
    la = grid.fitted("all", "kron")
    values = iter(range(100))
    with pytest.warns(TuningWarning, match="best temperature, 1, is on the edge") as caught:
        result = la.optimize_hyperparameters(
            ("prior_precision", "temperature"), lambda *_: [5, 6, 7, 1, 2, 3, 8, 9, 9][next(values)],
            val_loader=grid.batches(), method="grid",
            grid={"prior_precision": [1.0, 2.0, 3.0], "temperature": [1.0, 2.0, 3.0]},
        )  # fmt: skip
    assert [w.filename for w in caught if w.category is TuningWarning] == [__file__]
    assert len(result.notes) == 1
    assert (la.prior_precision.item(), la.temperature.item()) == (2.0, 1.0)


def test_a_flat_objective_is_reported() -> None:
    la = grid.fitted("all", "kron")
    with pytest.warns(TuningWarning, match="does not depend on the prior precision and the temperature"):
        la.optimize_hyperparameters(
            ("temperature", "prior_precision"), lambda *_: 1.0, val_loader=grid.batches(), grid=FEW
        )


@pytest.mark.parametrize(("structure", "length"), [("layerwise", 4), ("diag", 38), (None, 4), ("scalar", 1)])
def test_the_structure_of_the_prior(structure: str | None, length: int) -> None:
    la = grid.fitted("all", "kron", prior_precision=torch.ones(4))
    quietly(la, objective="nll", val_loader=grid.batches(), prior_structure=structure)
    assert la.prior_precision.shape == (length,)
    assert bool((la.prior_precision == la.prior_precision[0]).all())


def test_a_network_trained_further() -> None:
    la = grid.fitted("all", "kron", prior_precision=3.0)
    with torch.no_grad():
        next(la.model.parameters()).add_(1.0)
    for method in ("grid", "lbfgs"):
        with pytest.raises(ModelChangedError):
            la.optimize_hyperparameters(objective="nll", val_loader=grid.batches(), method=method)
    assert la.prior_precision.item() == 3.0


def test_warnings_as_errors_leave_the_posterior() -> None:
    la = grid.fitted("all", "kron", prior_precision=3.0, temperature=2.0)
    with pytest.raises(TuningWarning):
        la.optimize_hyperparameters(
            ("prior_precision", "temperature"), lambda *_: 1.0, val_loader=grid.batches(), grid=FEW
        )
    assert (la.prior_precision.item(), la.temperature.item()) == (3.0, 2.0)


def test_a_noise_per_output_needs_its_fit() -> None:
    la = grid.fitted("all", "kron", "regression")
    la.sigma_noise = torch.tensor([0.5, 1.0, 2.0])
    with pytest.raises(UnsupportedError, match="before fit"):
        quietly(la, objective="nll", val_loader=grid.batches("regression"))
    assert torch.equal(la.sigma_noise, torch.tensor([0.5, 1.0, 2.0]))


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_places_have_an_index_on_every_axis(shape: tuple[int, ...]) -> None:
    axes = {str(axis): torch.ones(n) for axis, n in enumerate(shape)}
    candidates = GridSearch(axes, grid.fitted("all", "diag").snapshot().hypers, torch.ones(1))
    expected = itertools.product(*map(range, shape))
    assert [tuple(candidates.index_of(place)) for place in range(math.prod(shape))] == list(expected)
