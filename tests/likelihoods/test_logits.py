"""Networks that return probabilities are refused, by every way of fitting, and no others are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import FunctionalLaplace, Laplace, MixtureLaplace, OnlineLaplace, continual_training, marglik_training
from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN, NativeEF, NativeGGN, NativeHessian
from laplace.errors import ApproximationWarning, InvalidData
from laplace.likelihoods.checks import require_logits

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(1))
BITS = torch.randint(0, 2, (12, 3), generator=torch.Generator().manual_seed(2)).float()
SOFTMAX = r"probabilities.*softmax.*return logits"
SIGMOID = r"probabilities.*sigmoid.*return logits"
STRUCTURES = ("full", "block", "kron", "ekfac", "diag", "lowrank", "lowrank_kron")


def network(*tail: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), *tail)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_softmax_at_the_end(weights: str, structure: str) -> None:
    la = Laplace(network(nn.Softmax(-1)), "classification", weights, structure)
    with pytest.raises(InvalidData, match=rf"batch 0.*{SOFTMAX}"):
        la.fit([(X, LABELS)])
    assert not la.is_fitted


@pytest.mark.parametrize(
    "tail", [(nn.Sigmoid(),), (nn.Sigmoid(), nn.Flatten()), (nn.Unflatten(1, (3, 1)), nn.Sigmoid())]
)
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_sigmoid_at_the_end(weights: str, tail: tuple[nn.Module, ...]) -> None:
    targets = BITS.unsqueeze(-1) if len(tail) > 1 and isinstance(tail[1], nn.Sigmoid) else BITS
    for structure in ("kron", "diag"):
        with pytest.raises(InvalidData, match=SIGMOID):
            Laplace(network(*tail), "bernoulli", weights, structure).fit([(X, targets)])


class Own(NativeGGN):
    """A user's own backend, with curvature of its own."""

    def diag(self, x: Tensor, y: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(()), torch.ones(31)


class OwnJacobians(NativeGGN):
    """A user's own backend that gives Jacobians."""

    def jacobians(self, x: Tensor, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        return torch.ones(len(x), 3, 31), self.model(x).detach()


PACKAGES = {AsdlGGN: "asdl", BackPackGGN: "backpack", CurvlinopsGGN: "curvlinops"}
ENGINES = (AsdlGGN, BackPackGGN, CurvlinopsGGN, NativeEF, NativeHessian, Own, OwnJacobians)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # on import of curvlinops
@pytest.mark.parametrize("backend", ENGINES, ids=lambda backend: backend.__name__)
def test_every_engine(backend: type) -> None:
    if backend in PACKAGES:
        pytest.importorskip(PACKAGES[backend])
    for tail, likelihood, y, match in (
        (nn.Softmax(-1), "classification", LABELS, SOFTMAX),
        (nn.Sigmoid(), "bernoulli", BITS, SIGMOID),
    ):
        with pytest.raises(InvalidData, match=match):
            Laplace(network(tail), likelihood, "all", "diag", backend=backend).fit([(X, y)])


def _functional(model: nn.Module, likelihood: str, y: Tensor) -> None:
    FunctionalLaplace(model, likelihood, n_subset=6).fit([(X, y)])


def _subset(model: nn.Module, likelihood: str, y: Tensor) -> None:
    Laplace(model, likelihood, "all", "diag").fit([(X, y)], subset=5)


def _mixture(model: nn.Module, likelihood: str, y: Tensor) -> None:
    MixtureLaplace([model, copy.deepcopy(model)], likelihood, "all", "diag").fit([(X, y)])


def _training(model: nn.Module, likelihood: str, y: Tensor) -> None:
    marglik_training(model, [(X, y)], likelihood, "diag", n_epochs=1, n_epochs_burnin=9)


def _online(model: nn.Module, likelihood: str, y: Tensor) -> None:
    online = OnlineLaplace(model, [(X, y)], likelihood, "diag")
    online.loss(online.forward(X), y)


def _continual(model: nn.Module, likelihood: str, y: Tensor) -> None:
    continual_training(Laplace(model, likelihood, "all", "diag"), [[(X, y)]], n_epochs=1)


def _plan(model: nn.Module, likelihood: str, y: Tensor) -> None:
    Laplace(model, likelihood, "all", "diag").plan([(X, y)])


WAYS = (_functional, _subset, _mixture, _training, _online, _continual, _plan)


@pytest.mark.parametrize("fit", WAYS, ids=lambda way: way.__name__)
def test_every_way_of_fitting(fit: Callable[[nn.Module, str, Tensor], None]) -> None:
    with pytest.raises(InvalidData, match=SOFTMAX):
        fit(network(nn.Softmax(-1)), "classification", LABELS)
    with pytest.raises(InvalidData, match=SIGMOID):
        fit(network(nn.Sigmoid()), "bernoulli", BITS)


def test_the_former_posterior_is_kept() -> None:
    model = network()
    la = Laplace(model, "classification", "all", "diag")
    la.fit([(X, LABELS)])
    former = la.H.clone()
    model.append(nn.Softmax(-1))
    with pytest.raises(InvalidData, match=SOFTMAX):
        la.fit([(X, LABELS)])
    assert la.n_data == 12
    assert torch.equal(la.H, former)


def test_positions() -> None:
    rows = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(3))
    y = torch.zeros(4, 5, dtype=torch.long)
    for weights in ("all", "last_layer"):
        Laplace(network(), "classification", weights, "diag").fit([(rows, y)])
        with pytest.raises(InvalidData, match=SOFTMAX):
            Laplace(network(nn.Softmax(-1)), "classification", weights, "diag").fit([(rows, y)])


@pytest.mark.parametrize(
    ("tail", "likelihood", "y"),
    [
        (nn.LogSoftmax(-1), "classification", LABELS),
        (nn.Hardsigmoid(), "classification", LABELS),
        (nn.Softplus(), "classification", LABELS),
        (nn.Softmax(-1), "regression", torch.zeros(12, 3)),
        (nn.Sigmoid(), "regression", torch.zeros(12, 3)),
        (nn.LogSigmoid(), "bernoulli", BITS),
        (nn.Softmax(-1), "bernoulli", BITS),
        (nn.Hardsigmoid(), "bernoulli", BITS),
        (nn.Sequential(nn.Sigmoid(), nn.Linear(3, 3)), "bernoulli", BITS),
        (nn.Sequential(nn.Sigmoid(), nn.Linear(3, 3)), "classification", LABELS),
    ],
)
def test_other_ends_pass(tail: nn.Module, likelihood: str, y: Tensor) -> None:
    for weights in ("all", "last_layer"):
        Laplace(network(tail), likelihood, weights, "diag").fit([(X, y)])


class Pitch(nn.Module):
    """Ends in a sigmoid that is no module, as networks of pitch and of many labels do, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.body(x + 0 * torch.rand(())))


@pytest.mark.parametrize("structure", [*STRUCTURES, "gp"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_softmax_of_a_sigmoid_is_warned_of(weights: str, structure: str) -> None:
    """It may be what the network was trained for, so that it is fitted all the same."""
    options = {"n_subset": 6} if structure == "gp" else {}
    la = Laplace(Pitch(), "classification", weights, structure, **options)
    state = torch.get_rng_state()
    with pytest.warns(ApproximationWarning, match=r"sigmoid.*no probability of 3 exceeds 0\.58") as caught:
        la.fit([(X, LABELS)])
    assert [w.filename for w in caught] == [__file__]
    assert la.is_fitted
    assert torch.equal(torch.get_rng_state(), state)
    assert la(X).max() < 0.58


@pytest.mark.parametrize("backend", ENGINES, ids=lambda backend: backend.__name__)
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_a_softmax_of_a_sigmoid_with_every_engine(backend: type) -> None:
    if backend in PACKAGES:
        pytest.importorskip(PACKAGES[backend])
    with pytest.warns(ApproximationWarning, match="sigmoid"):
        Laplace(network(nn.Sigmoid()), "classification", "all", "diag", backend=backend).fit([(X, LABELS)])


def test_a_softmax_of_a_sigmoid_of_every_position() -> None:
    rows = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(3))
    with pytest.warns(ApproximationWarning, match="no probability of 3"):
        Laplace(Pitch(), "classification", "all", "diag").fit([(rows, torch.zeros(4, 5, dtype=torch.long))])


def test_the_remedies_of_that_warning_work() -> None:
    reference = Laplace(network(), "classification", "all", "full")
    reference.fit([(X, LABELS)])
    la = Laplace(network(nn.Sigmoid()), "classification", "all", "full", forward_fn=lambda model, x: model(x).logit())
    la.fit([(X, LABELS)])
    torch.testing.assert_close(la(X), reference(X))
    Laplace(network(nn.Sigmoid()), "bernoulli", "all", "full", forward_fn=lambda model, x: model(x).logit()).fit(
        [(X, BITS)]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_classes", [2, 10, 1000])
def test_rounding_of_the_networks_dtype(n_classes: int, dtype: torch.dtype) -> None:
    likelihood = Laplace(network(), "classification").likelihood_object
    logits = torch.randn(16, n_classes, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InvalidData, match=SOFTMAX):
        require_logits(likelihood, logits.to(dtype).softmax(1).float(), dtype)
    require_logits(likelihood, logits.to(dtype), dtype)
    require_logits(likelihood, logits.to(dtype).sigmoid(), dtype)


def test_one_row_that_is_none_is_enough() -> None:
    likelihood = Laplace(network(), "classification").likelihood_object
    f = torch.rand(8, 4).softmax(1)
    f[3] *= 1 + 2e-5
    require_logits(likelihood, f, torch.float32)
    require_logits(likelihood, -f, torch.float32)


def test_the_remedies_of_the_message_work() -> None:
    reference = Laplace(network(), "classification", "all", "full")
    reference.fit([(X, LABELS)])
    la = Laplace(network(nn.Softmax(-1)), "classification", "all", "full", forward_fn=lambda model, x: model(x).log())
    la.fit([(X, LABELS)])
    torch.testing.assert_close(la.H, reference.H, rtol=1e-4, atol=1e-5)
    reference = Laplace(network(), "bernoulli", "all", "full")
    reference.fit([(X, BITS)])
    la = Laplace(
        network(nn.Sigmoid()), "bernoulli", "all", "full",
        forward_fn=lambda model, x: model(x).log() - (1 - model(x)).log(),
    )  # fmt: skip
    la.fit([(X, BITS)])
    torch.testing.assert_close(la.H, reference.H, rtol=1e-4, atol=1e-5)
