"""Functions drawn from a posterior: f + J (θ_s − θ*) for ever, with the joint covariance of the linearised network."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace, MixtureLaplace
from laplace.errors import InvalidArgument, InvalidData, ModelChangedError, NotFittedError, UnsupportedError
from laplace.extensions.drawn import DrawnFunction
from tests import problems as catalogue
from tests.pairs import nightly
from tests.reference import tilt
from tests.reference.compare import assert_close
from tests.tuning import test_tilting as widths


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fitted(weights: str = "all", structure: str = "kron", n_outputs: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, n_outputs)).double()
    x, y = torch.randn(30, 2).double(), torch.randn(30, n_outputs).double()
    kind: Any = Laplace
    la = kind(model, "regression", weights, structure, prior_precision=2.0, sigma_noise=0.5, **options)
    la.fit([(x, y)])
    return la


X = torch.randn(3, 2, generator=seeded(1)).double()
EVERY = catalogue.problems()
PROBLEMS = [each if i % 3 == 0 else nightly(each)[0] for i, each in enumerate(EVERY)]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_it_is_the_linearised_network_of_every_kind(problem: Any) -> None:
    model = problem.make_model()
    la = Laplace(model, problem.likelihood, "all", "diag", prior_precision=1.0)
    la.fit(problem.batches(4))
    x = problem.x
    (function,) = laplace.draw(la, 1, generator=seeded())
    step = la.sample(1, seeded())[0] - la.expansion_point
    jacobian, f = la.backend.jacobians(x)
    expected = f + (jacobian @ step).view_as(f)
    actual = function(x)
    assert_close(actual.reshape(expected.shape), expected.detach(), "backend")


@pytest.mark.parametrize(
    ("weights", "structure"),
    [("all", "gp"), ("last_layer", "kron"),
     *nightly(("all", "full"), ("all", "kron"), ("all", "diag"), ("all", "lowrank"), ("all", "matrix_free"),
              ("last_layer", "full"), ("subnetwork", "full"), ("subnetwork", "diag"))],
)  # fmt: skip
def test_moments_over_draws_and_calls_are_those_of_the_posterior(weights: str, structure: str) -> None:
    options: dict[str, Any] = (
        {"subnetwork_indices": torch.tensor([1, 3, 15, 20, 30])} if weights == "subnetwork" else {}
    )
    options |= {"n_subset": 30} if structure == "gp" else {}
    la = fitted(weights, structure, **options)
    functions = laplace.draw(la, 10_000, generator=seeded())
    values = torch.cat([DrawnFunction.stacked(functions, x) for x in (X[:2], X[2:])], 1)  # separate calls
    assert torch.equal(values[7, 2], functions[7](X[2:])[0]) or torch.allclose(values[7, 2], functions[7](X[2:])[0])
    mean, covariance = la.predictive_moments(X, joint=True)
    rows = values.flatten(1) - mean
    variance = covariance.diagonal()
    assert (rows.mean(0).abs() <= 4 * (variance / len(rows)).sqrt()).all()
    error = ((variance.unsqueeze(1) * variance + covariance.square()) / len(rows)).sqrt()
    # 21 different entries: one beyond 3 standard errors in 20 cases is what chance gives.
    far = ((rows.T @ rows / len(rows) - covariance).abs() / error.clamp(min=1e-12)).triu()
    assert (far <= 4).all()
    assert (far > 3).sum() <= 1


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_refined_posterior_is_drawn_around_its_mode(structure: str) -> None:
    la = fitted("all", structure)
    data = [(torch.randn(30, 2, generator=seeded(2)).double(), torch.randn(30, 2, generator=seeded(3)).double())]
    la.fit(data)
    la.refine(data)
    values = DrawnFunction.stacked(laplace.draw(la, 4000, generator=seeded()), X)
    mean, variance = la.predictive_moments(X, diagonal_output=True)
    assert ((values.mean(0) - mean).abs() <= 4 * (variance / 4000).sqrt()).all()
    with pytest.raises(UnsupportedError, match="after refine"):
        laplace.draw(la, 1, linearised=False)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_the_network_at_sampled_weights(weights: str) -> None:
    la = fitted(weights)
    (function,) = laplace.draw(la, 1, generator=seeded(), linearised=False)
    network = copy.deepcopy(la.snapshot().model)
    tensors = list(network.parameters())[-2 if weights == "last_layer" else 0 :]
    nn.utils.vector_to_parameters(la.sample(1, seeded())[0], tensors)
    assert_close(function(X), network(X).detach(), "algebra")
    if weights == "last_layer":
        assert_close(function(X), laplace.draw(la, 1, generator=seeded())[0](X), "algebra")


def test_a_function_is_one_for_ever() -> None:
    la = fitted()
    function, other = laplace.draw(la, 2, generator=seeded())
    expected = function(X)
    assert not torch.allclose(expected, other(X))
    assert not expected.requires_grad
    la.prior_precision = 100.0
    with torch.no_grad():
        la.model[0].weight.mul_(2.0)
    assert torch.equal(function.train()(X), expected)
    assert torch.equal(pickle.loads(pickle.dumps(function))(X), expected)
    with torch.inference_mode():
        assert torch.equal(function(X), expected)
    assert torch.autograd.gradcheck(function, (X.clone().requires_grad_(),))


def test_it_is_compiled_and_exported() -> None:
    torch._dynamo.reset()
    (function,) = laplace.draw(fitted(), 1, generator=seeded())
    expected = function(X)
    assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(X), expected, "algebra")
    assert_close(torch.export.export(function, (X,)).module()(X), expected, "algebra")
    module = function.export(X)
    assert_close(module(X.repeat(3, 1))[6:], expected, "algebra")
    dynamic = torch.export.export(module, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert_close(dynamic.module()(X.repeat(3, 1))[6:], expected, "algebra")


class Forgetful(nn.Module):
    """A network that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)).double()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def test_the_network_is_untouched() -> None:
    model = Forgetful().train()
    la = Laplace(model, "regression", "all", "diag")
    la.fit([(X, torch.randn(3, 3).double())])
    calls, state = model.calls, copy.deepcopy(model.state_dict())
    (function,) = laplace.draw(la, 1)
    assert torch.equal(function(X), function(X))
    assert model.calls == calls and model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_no_jacobian_of_many_outputs_is_made() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
    la = Laplace(model, "regression", "all", "diag", channel_dim=1)
    la.fit([(torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8))])
    image = torch.randn(1, 1, 500, 500)
    values = torch.stack([function(image) for function in laplace.draw(la, 16)])
    assert values.shape == (16, 1, 1, 500, 500)


def test_functions_of_a_mixture_are_of_its_components() -> None:
    parts = [fitted(), fitted(structure="diag")]
    mixture = MixtureLaplace(parts, weights=[0.25, 0.75])
    functions = laplace.draw(mixture, 2000, generator=seeded())
    values = torch.stack([function(X) for function in functions])
    assert torch.equal(DrawnFunction.stacked(functions[:20], X), values[:20])
    mean, variance = mixture(X, diagonal_output=True)
    assert ((values.mean(0) - mean).abs() <= 5 * (variance / 2000).sqrt()).all()
    assert ((values.var(0) - variance).abs() <= 0.25 * variance).all()


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_logits_under_a_width_are_those_of_predictions(weights: str) -> None:
    la = widths.calibrated(widths.fitted(weights, "kron"), 2.0, 3.0, 0.1, [widths.data(widths.N_TRAIN, 0)])
    x, model = widths.new_inputs(), widths.network()
    functions = laplace.draw(la, 3, generator=seeded())
    r = widths.true_distances(la, "all", x)[1]
    mean = model(x).detach() / tilt.squared_temperature(r, 2.0, 3.0).sqrt()[:, None]
    found = la.calibration
    la.calibration = dataclasses.replace(found, tilt=None)
    plain = laplace.draw(la, 3, generator=seeded())
    la.calibration = found
    for function, other in zip(functions, plain, strict=True):
        assert_close(function(x) - mean, other(x) - model(x).detach(), "algebra")
    assert_close(DrawnFunction.stacked(functions, x), torch.stack([function(x) for function in functions]), "algebra")
    assert_close(functions[0].export(x)(x[:4]), functions[0](x[:4]), "algebra")
    assert torch.equal(pickle.loads(pickle.dumps(functions[0]))(x), functions[0](x))
    sampled = laplace.draw(la, 2, generator=seeded(), linearised=False)
    expected = la.functional_samples(x, pred_type="nn", n_samples=2, generator=seeded())
    assert_close(torch.stack([function(x) for function in sampled]), expected, "algebra")


def test_functions_of_a_regression_are_without_the_noise_of_a_width() -> None:
    la = widths.fitted("all", "kron", "regression", sigma_noise=0.7)
    widths.calibrated(la, 2.0, 3.0, 0.1)
    function, x = laplace.draw(la, 1, generator=seeded())[0], widths.new_inputs()
    found = la.calibration
    la.calibration = dataclasses.replace(found, tilt=None)
    assert_close(function(x), laplace.draw(la, 1, generator=seeded())[0](x), "algebra")


class Pixels(nn.Module):
    """Three classes at every position, in dimension 1, by one layer of all positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).transpose(1, 2)


def test_a_width_at_positions() -> None:
    generator = seeded(2)
    x, y = torch.randn(40, 5, 4, generator=generator).double(), torch.randint(3, (40, 5), generator=generator)
    la: Any = Laplace(Pixels(), "classification", "all", "kron", channel_dim=1)
    la.fit([(x[:20], y[:20])])
    found = la.calibrate([(x[20:], y[20:])])
    la.calibration = dataclasses.replace(found, tilt=dataclasses.replace(found.tilt, width=2.0), scale=0.0)
    assert_close(laplace.draw(la, 1)[0](x[:3]).softmax(1), la(x[:3]), "float32")


class NoDirection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * g


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3).double(), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(NoDirection.apply(self.first(x)))  # pyright: ignore[reportArgumentType]


class Held(nn.Module):
    """A network that holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(2, 2).double(), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_bad_input_is_refused() -> None:
    la = fitted()
    for n in (0, -1, 1.5, True, "3"):
        with pytest.raises(InvalidArgument, match="n="):
            laplace.draw(la, n)
        with pytest.raises(InvalidArgument, match="n="):
            laplace.draw(MixtureLaplace([fitted(), fitted()]), n)  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotFittedError):
        laplace.draw(Laplace(nn.Linear(2, 2), "regression", "all", "diag"), 1)
    with pytest.raises(InvalidArgument, match="functions"):
        DrawnFunction.stacked([], X)
    others: list[tuple[Any, str]] = [
        ([1], "int"),
        ([laplace.draw(la, 1)[0], 1], "int"),
        ("ab", "str"),
        (None, "NoneType"),
    ]
    for other, kind in others:
        with pytest.raises(InvalidArgument, match=f"functions are .*{kind}"):
            DrawnFunction.stacked(other, X)
    for call in (laplace.draw(la, 1)[0], lambda x: DrawnFunction.stacked(laplace.draw(la, 2), x)):
        with pytest.raises(InvalidData, match="do not fit the network"):
            call(torch.zeros(3, 5).double())
    with torch.no_grad():
        la.model[0].weight.mul_(2.0)
    with pytest.raises(ModelChangedError):
        laplace.draw(la, 1)
    whole = Held()
    la = Laplace(whole, "regression", "all", "diag")
    la.fit([(X, torch.randn(3, 2).double())])
    with pytest.raises(UnsupportedError, match="cannot be copied"):
        laplace.draw(la, 1)
    la = Laplace(Custom(), "regression", "all", "diag")
    la.fit([(X, torch.randn(3, 2).double())])
    with pytest.raises(UnsupportedError, match="setup_context"):
        laplace.draw(la, 1)[0](X)
    assert laplace.draw(la, 1, linearised=False)[0](X).shape == (3, 2)
