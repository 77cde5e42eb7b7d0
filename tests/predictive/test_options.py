"""`outputs=`: predictions of some outputs are those of all of them, without the others; bad choices are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from laplace import KronLaplace, Laplace, MixtureLaplace, ParametricLaplace
from laplace.core.memory import Available
from laplace.curvature import AsdlGGN, GGNInterface
from laplace.enums import LinkApprox
from laplace.errors import InvalidArgument, InvalidType, OutOfMemory, UnsupportedError
from laplace.likelihoods import get_likelihood
from laplace.predictive import latent
from tests import grid
from tests.conformance.test_positions import net
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable
N, C = 12, 3
SHARED = torch.tensor([2, 0])
OWN = torch.stack([torch.randperm(C, generator=torch.Generator().manual_seed(i))[:2] for i in range(N)])
CHOICES = {"shared": SHARED, "own": OWN, "list": [2, 0], "largest": 2}


def rows_of(choice: Any, f: Tensor) -> Tensor:
    """Indices `[B, K]` of a choice."""
    if isinstance(choice, int):
        return f.sort(1, descending=True).indices[:, :choice]
    return torch.as_tensor(choice).expand(len(f), -1)


def block(covariance: Tensor, outputs: Tensor) -> Tensor:
    """Covariances `[B, K, K]` between outputs of covariances `[B, C, C]` of all."""
    return torch.stack([rows[some][:, some] for rows, some in zip(covariance, outputs, strict=True)])


def fitted(weights: str, structure: str, likelihood: str = "classification", **options: Any) -> ParametricLaplace:
    model = grid.network(likelihood).double()
    la = grid.make(weights, structure, likelihood, model, **options)
    x, y = grid.data(likelihood)
    la.fit([(x.double(), y.double() if y.is_floating_point() else y)])
    return la


X = grid.data()[0].double()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_latents_are_those_of_all_outputs(weights: str, structure: str, choice: str) -> None:
    la = fitted(weights, structure)
    every, some = la.predict(X), la.predict(X, outputs=CHOICES[choice])
    outputs = rows_of(CHOICES[choice], every.latent_mean)
    assert torch.equal(some.outputs, outputs)
    assert_close(some.latent_mean, every.latent_mean.gather(1, outputs), "exact")
    assert_close(some.latent_variance, every.latent_variance.gather(1, outputs), "algebra")
    assert_close(some.latent_covariance, block(every.latent_covariance, outputs), "algebra")
    joint = la.predict(X, joint=True).latent_covariance
    places = (outputs + C * torch.arange(N).unsqueeze(1)).flatten()
    assert_close(
        la.predict(X, joint=True, outputs=CHOICES[choice]).latent_covariance, joint[places][:, places], "algebra"
    )
    mean, variance = la.predictive_moments(X, diagonal_output=True, outputs=CHOICES[choice])
    assert_close(mean, some.latent_mean, "exact")
    assert_close(variance, some.latent_variance, "algebra")
    assert every.outputs is None


@pytest.mark.parametrize("likelihood", ["classification", "bernoulli", "poisson", "regression"])
@pytest.mark.parametrize("link", LinkApprox)
def test_targets_are_those_of_a_network_without_the_other_outputs(likelihood: str, link: LinkApprox) -> None:
    la, known = fitted("all", "kron", likelihood), get_likelihood(likelihood)
    if known.links and link not in known.links:
        return
    every = la.predict(X, link_approx=link)
    covariance = block(every.latent_covariance, OWN)

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(1)

    some = la.predict(X, link_approx=link, outputs=OWN, n_samples=50, generator=seeded())
    called = la(X, link_approx=link, outputs=OWN, n_samples=50, generator=seeded())
    if known.latent_prediction:
        assert_close(called[1], covariance, "algebra")
        assert_close(la(X, outputs=OWN, observation_noise=True)[1], covariance + torch.eye(2).double(), "algebra")
    expected = every.latent_mean.gather(1, OWN)
    if not known.target.mean_is_latent:
        expected = known.predict(expected, covariance, link, 50, seeded())
    assert_close(some.mean, expected, "algebra")
    assert_close(called[0] if isinstance(called, tuple) else called, expected, "algebra")
    assert some.entropy.shape == (N,) and some.variance.shape == some.decomposition.epistemic.shape == (N, 2)
    assert all(end.shape == (N, 2) for end in some.interval())


def test_samples() -> None:
    la = fitted("all", "kron")
    for pred_type in ("glm", "nn"):
        options: dict[str, Any] = {"pred_type": pred_type, "n_samples": 4000}
        some = la.functional_samples(X, outputs=OWN, generator=torch.Generator().manual_seed(0), **options)
        assert some.shape == (4000, N, 2)
        every = la.functional_samples(X, generator=torch.Generator().manual_seed(0), **options)
        expected = every.gather(2, OWN.expand(4000, -1, -1))
        if pred_type == "nn":
            assert_close(some, expected, "exact")
        error = (2 * expected.var(0) / 4000).sqrt()
        assert ((some.mean(0) - expected.mean(0)).abs() <= 5 * error).all()
        probabilities = la.predictive_samples(X, outputs=2, **options)
        assert_close(probabilities.sum(2), torch.ones(4000, N, dtype=torch.float64), "algebra")
    sampled = la.predict(X, "nn", outputs=1, n_samples=20, generator=torch.Generator().manual_seed(0))
    means = la.predict(X, "nn", n_samples=20, generator=torch.Generator().manual_seed(0)).latent_mean
    assert torch.equal(sampled.outputs, means.argmax(1, keepdim=True))
    assert_close(sampled.latent_mean, means.amax(1, keepdim=True), "exact")


@pytest.mark.parametrize("name", ["tokens", "tokens_regression", "pixels_1x1", "pixels_3x3"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank_kron"])
def test_positions(name: str, weights: str, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = net(name)
    la = chosen.make(weights, structure)
    every = la.predict(chosen.x)
    means = every.latent_mean.movedim(chosen.channel_dim, -1)
    own = means.sort(-1).indices[..., :2]
    variances = every.latent_variance.movedim(chosen.channel_dim, -1)
    for _ in range(2):
        some = la.predict(chosen.x, outputs=own.movedim(-1, chosen.channel_dim))
        found = (some.outputs, some.latent_mean, some.latent_variance)
        expected = (own, means.gather(-1, own), variances.gather(-1, own))
        for part, truth in zip(found, expected, strict=True):
            assert_close(part.movedim(chosen.channel_dim, -1).double(), truth.double(), "algebra")
        single = la.predict(chosen.x, outputs=[1])
        assert_close(single.latent_variance.movedim(chosen.channel_dim, -1), variances[..., 1:2], "algebra")
        covariance = every.latent_covariance
        at = own.unsqueeze(-1).expand(*own.shape, means.shape[-1])
        assert_close(some.latent_covariance, covariance.gather(-2, at).gather(-1, own.unsqueeze(-2).expand(
            *own.shape[:-1], 2, 2)), "algebra")  # fmt: skip
        monkeypatch.setattr(la.engine, "memory_budget", 2000)  # a few data, positions and cotangents at a time
    with pytest.raises(InvalidArgument, match=r"\[B, T, K\]"):
        la(chosen.x, outputs=own[:, 0])
    with pytest.raises(InvalidArgument, match="rows"):
        la(chosen.x, outputs=own[:-1].movedim(-1, chosen.channel_dim))


def test_numbers_of_numpy() -> None:
    la = fitted("all", "diag")
    assert torch.equal(la(X, outputs=np.int64(2)), la(X, outputs=2))
    assert torch.equal(la(X, outputs=np.array([2, 0])), la(X, outputs=SHARED))


def test_as_many_backward_passes_as_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from laplace.engines.native.forward import Capture

    la, counts = fitted("all", "diag"), []
    pulled = Capture.gradients

    def gradients(self: Capture, cotangents: Tensor, calls: Any) -> Any:
        counts.append(len(cotangents))
        return pulled(self, cotangents, calls)

    monkeypatch.setattr(Capture, "gradients", gradients)
    la(X)
    la(X, outputs=2)
    assert counts == [C, 2]


class OwnJacobians(GGNInterface):
    """A backend with Jacobians of its own, of all outputs."""

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        return super().jacobians(x, enable_backprop)


@pytest.mark.parametrize("backend", [OwnJacobians, AsdlGGN])
def test_backends_that_give_all_outputs(backend: type[GGNInterface]) -> None:
    if backend is AsdlGGN:
        pytest.importorskip("asdl.fisher")
    la = fitted("all", "diag", backend=backend)
    every = la.predict(X)
    for choice in (OWN, SHARED, 2):
        some = la.predict(X, outputs=choice)
        outputs = rows_of(choice, every.latent_mean)
        assert_close(some.latent_variance, every.latent_variance.gather(1, outputs), "algebra")
    for bad in (OWN[:5], torch.cat([OWN, OWN])):
        with pytest.raises(InvalidArgument, match="rows"):
            la(X, outputs=bad)


def test_refined() -> None:
    la = fitted("all", "full")
    la.refine([(X, grid.data()[1])])
    every, some = la.predict(X), la.predict(X, outputs=OWN)
    assert_close(some.latent_mean, every.latent_mean.gather(1, OWN), "algebra")
    assert_close(some.latent_variance, every.latent_variance.gather(1, OWN), "algebra")


def test_gradients_lead_to_inputs_and_hyperparameters() -> None:
    for weights in ("all", "last_layer"):
        la = fitted(weights, "kron", enable_backprop=True)
        x = X.clone().requires_grad_()
        la.prior_precision = torch.ones(1, dtype=torch.float64, requires_grad=True)
        leaves = [x, la.prior_precision]
        every = torch.autograd.grad(la.predict(x).latent_variance.gather(1, OWN).sum(), leaves)
        some = torch.autograd.grad(la.predict(x, outputs=OWN).latent_variance.sum(), leaves)
        for found, expected in zip(some, every, strict=True):
            assert_close(found, expected, "algebra")


def test_mixtures() -> None:
    mixture = MixtureLaplace([fitted("all", "kron"), fitted("last_layer", "diag", prior_precision=3.0)])
    every, some = mixture.predict(X), mixture.predict(X, outputs=OWN)
    assert_close(some.latent_variance, every.latent_variance.gather(1, OWN), "algebra")
    expected = torch.stack([la(X, outputs=OWN) for la in mixture.components]).mean(0)
    assert_close(mixture(X, outputs=OWN), expected, "algebra")
    assert mixture.functional_samples(X, n_samples=6, outputs=SHARED).shape == (6, N, 2)
    for call in (mixture, mixture.predict, mixture.predictive_samples):
        with pytest.raises(InvalidArgument, match="Give indices"):
            call(X, outputs=2)


def test_a_posterior_over_functions() -> None:
    for options in ({"n_subset": N}, {"n_subset": 7, "independent_outputs": True}):
        la = Laplace(grid.network().double(), "classification", "all", "gp", **options)
        la.fit([(X, grid.data()[1])])
        if len(options) == 2:
            with pytest.raises(UnsupportedError, match="independent_outputs"):
                la(X, outputs=OWN)
            continue
        every, some = la.predict(X, "gp"), la.predict(X, "gp", outputs=OWN)
        assert_close(some.latent_variance, every.latent_variance.gather(1, OWN), "algebra")
        assert la(X, outputs=1).shape == (N, 1)


def test_noise_of_every_output() -> None:
    sigma = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    la = fitted("all", "diag", "regression", sigma_noise=sigma)
    every, some = la.predict(X), la.predict(X, outputs=SHARED)
    assert_close(some.variance, every.variance[:, SHARED], "algebra")
    for choice in (OWN, 2):
        with pytest.raises(InvalidArgument, match="noise of its own"):
            la(X, outputs=choice)


Bad = Callable[[], Any]
BAD: dict[str, tuple[Bad, type[Exception], str]] = {
    "too large": (lambda: [0, 3], InvalidArgument, "0 to 2"),
    "ignored label": (lambda: torch.tensor([[0, -100]] * N), InvalidArgument, "-100"),
    "twice": (lambda: [1, 1], InvalidArgument, "twice"),
    "twice in a row": (lambda: torch.tensor([[0, 1]] * (N - 1) + [[2, 2]]), InvalidArgument, "twice"),
    "floats": (lambda: torch.tensor([0.0]), InvalidType, "float32"),
    "mask": (lambda: torch.tensor([True, False, True]), InvalidType, "bool"),
    "a truth value": (lambda: True, InvalidType, "bool"),
    "words": (lambda: "top", InvalidType, "integers"),
    "none": (list, InvalidArgument, "shape"),
    "zero": (lambda: 0, InvalidArgument, "at least 1"),
    "more than there are": (lambda: C + 1, InvalidArgument, "3 outputs"),
    "0-dim": (lambda: torch.tensor(1), InvalidArgument, "shape"),
    "other rows": (lambda: OWN[:5], InvalidArgument, "5 rows"),
    "more rows": (lambda: torch.cat([OWN, OWN]), InvalidArgument, "24 rows"),
    "positions": (lambda: OWN.unsqueeze(1), InvalidArgument, "positions"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_bad_choices(name: str, pred_type: str) -> None:
    given, error, words = BAD[name]
    la = fitted("last_layer" if name in ("too large", "twice") else "all", "diag")
    for call in (la, la.functional_samples):
        with pytest.raises(error, match=words):
            call(X, pred_type, outputs=given())
    with pytest.raises(error, match=words):
        _ = la.predict(X, pred_type, outputs=given()).latent_mean


def test_outputs_that_mean_nothing_alone() -> None:
    for likelihood in ("heteroscedastic", "reward_modeling"):
        la = grid.make("all", "diag", likelihood)
        la.fit(grid.batches(likelihood))
        with pytest.raises(UnsupportedError, match="together"):
            la(grid.data(likelihood)[0], outputs=[0])


class OwnVariances(KronLaplace):
    """Predicts all outputs by a method of its own."""

    def functional_variance_fast(self, X: Any) -> tuple[Tensor, Tensor]:
        return super().functional_variance_fast(X)


def test_methods_of_users_know_all_outputs_alone() -> None:
    la = OwnVariances(grid.network(), "classification")
    la.fit(grid.batches())
    with pytest.raises(UnsupportedError, match="functional_variance_fast"):
        la(grid.data()[0], outputs=[0])


def test_covariances_that_no_memory_holds_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 20_000)).eval()
    x, y = torch.randn(8, 3), torch.randint(20_000, (8,))
    la = Laplace(model, "classification", "last_layer", "diag")
    la.fit([(x, y)])
    monkeypatch.setattr(latent, "available", lambda device: Available(2**32, "a test"))
    for options in ({"link_approx": "mc"}, {"link_approx": "bridge"}, {"joint": True, "link_approx": "mc"}):
        with pytest.raises(OutOfMemory, match=r"0000\].*a test.*probit.*diagonal_output=True.*outputs="):
            la(x, **options)
    with pytest.raises(OutOfMemory):
        la.functional_samples(x)
    assert la(x).shape == (8, 20_000)
    assert la(x, link_approx="mc", diagonal_output=True, n_samples=2).shape == (8, 20_000)
    assert la(x, link_approx="bridge", outputs=5).shape == (8, 5)
    monkeypatch.setattr(latent, "available", lambda device: None)
    latent.require_room((8, 20_000, 20_000), x)  # of a machine that says nothing
