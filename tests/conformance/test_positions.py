"""Outputs beyond two dimensions: tokens and pixels, against the dense Jacobian of every position."""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import CurvatureInterface, NativeEF, NativeGGN, NativeHessian
from laplace.errors import InvalidArgument, InvalidData, InvalidType, TuningWarning, UnsupportedError
from laplace.mixture import MixtureLaplace
from laplace.structures import STRUCTURES
from laplace.training import OnlineLaplace
from tests.reference import curvature as reference
from tests.reference import decomposition as reference_parts
from tests.reference import predictive
from tests.reference.compare import assert_close
from tests.reference.positions import Rows, target_rows

DELTA = 0.7


class Tokens(nn.Module):
    """An embedding, attention over the positions, and a head that is applied to every one."""

    def __init__(self, n_outputs: int = 3, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        return self.head(self.norm(z + self.attend(z, z, z, need_weights=False)[0]))


def pixels(kernel: int, n_outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, n_outputs, kernel, padding=kernel // 2))


@dataclass(frozen=True)
class Net:
    """A network with its data and their dense truth.

    Attributes:
        model: The network, float64.
        x: Inputs.
        y: Targets.
        likelihood: `"classification"`, `"regression"` or `"bernoulli"`.
        channel_dim: Where its outputs have their channels.
        head: Entries of the last layer, counted from the end.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    likelihood: str
    channel_dim: int
    head: int

    @property
    def rows(self) -> Tensor:
        return target_rows(self.y, self.likelihood == "classification", self.channel_dim)

    @property
    def network(self) -> Rows:
        return Rows(self.model, self.channel_dim)

    def size(self, weights: str) -> int:
        return self.head if weights == "last_layer" else sum(p.numel() for p in self.model.parameters())

    def make(self, weights: str, structure: str, **options: object) -> Laplace:
        subnetwork = {"subnetwork_indices": SUBNETWORK} if weights == "subnetwork" else {}
        la = Laplace(
            self.model, self.likelihood, weights, structure, prior_precision=DELTA, channel_dim=self.channel_dim,
            **subnetwork, **options,
        )  # fmt: skip
        la.fit([(self.x, self.y)])
        return la


SUBNETWORK = torch.tensor([0, 3, 5, 30, 31, 40, 60])


@cache
def net(name: str) -> Net:
    torch.manual_seed(zlib.crc32(name.encode()))
    if name.startswith("tokens"):
        n_outputs = 1 if name.endswith("bernoulli") else 2 if name.endswith("regression") else 3
        model, x = Tokens(n_outputs).double(), torch.randint(0, 6, (4, 3))
        channel_dim, head = -1, 5 * n_outputs
    else:
        kernel = 3 if "3x3" in name else 1
        n_outputs = 2 if name.endswith("regression") else 3
        model, x = pixels(kernel, n_outputs).double(), torch.randn(3, 2, 2, 3, dtype=torch.float64)
        channel_dim, head = 1, (3 * kernel**2 + 1) * n_outputs
    f = model(x).detach()
    if name.endswith("regression"):
        return Net(model, x, f + torch.randn_like(f), "regression", channel_dim, head)
    if name.endswith("bernoulli"):
        return Net(model, x, torch.randint(0, 2, f.shape).to(f), "bernoulli", channel_dim, head)
    y = torch.randint(0, n_outputs, f.movedim(channel_dim, -1).shape[:-1])
    y[0, 1:], y[2] = -100, -100  # some positions of a datum, and a whole datum
    return Net(model, x, y, "classification", channel_dim, head)


NETS = (
    "tokens", "tokens_regression", "tokens_bernoulli", "pixels_1x1", "pixels_3x3", "pixels_regression",
)  # fmt: skip
WEIGHTS = ("all", "last_layer", "subnetwork")


@cache
def truth(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """J `[B·T, C, P]`, f `[B·T, C]` and the GGN `[P, P]` of all weights."""
    case = net(name)
    names = reference.trainable_names(case.network)
    jacobian, f = reference.flat_jacobian(case.network, case.x, names)
    inner = reference.output_hessian(f, case.likelihood, case.rows)
    return jacobian, f, torch.einsum("bcp,bcd,bdq->pq", jacobian, inner, jacobian)


def columns(case: Net, weights: str) -> Tensor:
    if weights == "subnetwork":
        return SUBNETWORK
    n_params = case.size("all")
    return torch.arange(n_params - case.size(weights), n_params)


def covariance(name: str, weights: str) -> tuple[Tensor, Tensor, Tensor]:
    """J of the treated entries, f and P⁻¹ of the full posterior."""
    jacobian, f, curvature = truth(name)
    at = columns(net(name), weights)
    inverse = torch.linalg.inv(curvature[at][:, at] + DELTA * torch.eye(len(at)).double())
    return jacobian[:, :, at], f, inverse


# Fit.


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NETS)
def test_curvature(name: str, weights: str) -> None:
    case, at = net(name), columns(net(name), weights)
    expected = truth(name)[2][at][:, at]
    la = case.make(weights, "full")
    assert_close(la.H, expected, "backend")
    assert_close(case.make(weights, "diag").H, expected.diagonal(), "backend")
    counted = case.rows.shape[0] - int((case.rows == -100).sum())
    assert la.n_data == counted
    assert la.n_outputs == truth(name)[1].shape[1]
    assert_close(la.loss, reference.loss(truth(name)[1], case.rows, case.likelihood), "algebra")


@pytest.mark.parametrize("name", ["tokens", "pixels_3x3"])
def test_empirical_fisher_is_a_sum_over_positions(name: str) -> None:
    case = net(name)
    names = reference.trainable_names(case.network)
    expected = reference.empirical_fisher(case.network, case.x, case.rows, names, case.likelihood)
    for weights in ("all", "last_layer"):
        at = columns(case, weights)
        assert_close(case.make(weights, "full", backend=NativeEF).H, expected[at][:, at], "backend")
        assert_close(case.make(weights, "diag", backend=NativeEF).H, expected.diagonal()[at], "backend")


def test_exact_hessian() -> None:
    case = net("tokens")
    names = reference.trainable_names(case.network)
    expected = reference.exact_hessian(case.network, case.x, case.rows, names, case.likelihood)
    assert_close(case.make("all", "full", backend=NativeHessian).H, expected, "backend")


@pytest.mark.parametrize("name", ["tokens", "pixels_1x1", "pixels_3x3"])
def test_kronecker_factors_of_a_head_are_those_of_its_rows(name: str) -> None:
    """B = Σ Λ and A = mean φφᵀ over the positions that count, ignored ones nowhere."""
    case = net(name)
    jacobian, f, _ = truth(name)
    kept, n_outputs = case.rows != -100, f.shape[1]
    inner = reference.output_hessian(f, "classification", case.rows).sum(0)
    n_weights = case.head - n_outputs
    features = jacobian[kept][:, 0, -case.head :][:, : n_weights // n_outputs]  # ∂f_0/∂w_0 = φ
    expected = torch.kron(inner, features.T @ features / kept.sum())
    for structure, weights in (("kron", "last_layer"), ("kron", "all")):
        la = case.make(weights, structure)
        found = la.posterior_precision.to_matrix()[-case.head :, -case.head :]
        found = found - DELTA * torch.eye(case.head).double()
        assert_close(found[:n_weights, :n_weights], expected, "backend")
        assert_close(found[n_weights:, n_weights:], inner, "backend")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_batches_do_not_matter(structure: str, weights: str) -> None:
    """Every structure: split batches, batches of other lengths, and whatever stands under an ignored label."""
    case = net("tokens")
    one = case.make(weights, structure)
    assert one(case.x).shape == (4, 3, 3)
    assert bool(one.log_marginal_likelihood().isfinite())
    split = case.make(weights, structure)
    split.fit([(case.x[:1], case.y[:1]), (case.x[1:], case.y[1:])])
    assert split.n_data == one.n_data
    if structure != "lowrank_kron":  # whose basis is a sketch
        assert_close(split.log_marginal_likelihood(), one.log_marginal_likelihood(), "backend")
        assert_close(split(case.x), one(case.x), "backend")


def test_ignored_positions_of_a_head_count_nowhere() -> None:
    """A head's posterior does not depend on features whose labels are ignored."""
    case = net("pixels_1x1")
    x = case.x.clone()
    x[2] = 7.0  # a datum that is ignored altogether
    other = [(x, case.y)]
    for structure in STRUCTURES:
        la = case.make("last_layer", structure)
        before = la.log_marginal_likelihood()
        la.fit(other)
        assert_close(la.log_marginal_likelihood(), before, "algebra")


def test_lengths_may_differ_between_batches() -> None:
    case = net("tokens")
    short = (case.x[:, :2], case.y[:, :2])
    first = truth("tokens")[2]
    names = reference.trainable_names(case.network)
    second = reference.ggn(case.network, short[0], short[1].flatten(), names, "classification")
    la = case.make("all", "full")
    la.fit([(case.x, case.y), short])
    assert_close(la.H, first + second, "backend")
    assert la(case.x[:, :1]).shape == (4, 1, 3)


@pytest.mark.parametrize(("budget", "structures"), [(1, ("diag",)), (20_000, ("full", "kron"))])
def test_a_few_positions_at_a_time_are_all_of_them(budget: int, structures: tuple[str, ...]) -> None:
    """As many as the memory budget allows: one, or a few."""
    case = net("tokens")
    options = {"backend_kwargs": {"memory_budget": budget}}
    for structure in structures:
        whole, parts = case.make("all", structure), case.make("all", structure, **options)
        assert_close(parts.log_marginal_likelihood(), whole.log_marginal_likelihood(), "backend")
        assert_close(parts(case.x), whole(case.x), "backend")


def test_one_noise_per_output() -> None:
    """Terms per output, which change with the noise after the fit."""
    case = net("pixels_regression")
    sigma = torch.tensor([0.5, 2.0]).double()
    for weights in ("all", "last_layer"):
        part = truth("pixels_regression")[0][:, :, columns(case, weights)]
        expected = torch.einsum("bcp,c,bcq->pq", part, sigma**-2, part) + DELTA * torch.eye(part.shape[2]).double()
        for structure in ("full", "diag", "kron"):
            la = case.make(weights, structure, sigma_noise=sigma.flip(0))
            la.sigma_noise = sigma
            if structure == "full":
                assert_close(la.posterior_precision, expected, "backend")
            elif structure == "diag":
                assert_close(la.posterior_precision, expected.diagonal(), "backend")
            else:  # of a bias it is exact
                assert_close(la.posterior_precision.to_matrix()[-2:, -2:], expected[-2:, -2:], "backend")


def test_sampled_curvature_takes_a_pass_per_sample_and_is_right_on_average() -> None:
    case = net("tokens")
    expected = truth("tokens")[2].diagonal()
    draws = 4000
    la = case.make("all", "diag", backend_kwargs={"stochastic": True, "num_samples": draws, "max_passes": draws})
    assert_close(la.H / expected.clamp(min=1e-3), expected / expected.clamp(min=1e-3), "mc", standard_error=0.05)
    few = case.make("last_layer", "diag", backend_kwargs={"stochastic": True, "num_samples": draws})
    at = columns(case, "last_layer")
    assert_close(few.H / expected[at], torch.ones(len(at)), "mc", standard_error=0.05)


def test_evidence() -> None:
    """The likelihood is a product over the positions that count."""
    for name in ("tokens", "pixels_regression"):
        case = net(name)
        _, f, curvature = truth(name)
        la = case.make("all", "full")
        theta = torch.cat([p.detach().flatten() for p in case.model.parameters()])
        log_likelihood = -reference.loss(f, case.rows, case.likelihood)
        if case.likelihood == "regression":
            log_likelihood = log_likelihood - 0.5 * f.numel() * torch.log(torch.tensor(2 * torch.pi))
        precision = curvature + DELTA * torch.eye(len(theta))
        ratio = torch.logdet(precision) - len(theta) * torch.log(torch.tensor(DELTA))
        expected = log_likelihood - 0.5 * (ratio + DELTA * theta.square().sum())
        assert_close(la.log_marginal_likelihood(), expected, "float32")


# Predictions.


def shaped(case: Net, rows: Tensor) -> Tensor:
    """Rows `[B·T, C]` in the shape of the network's outputs."""
    last = case.model(case.x).movedim(case.channel_dim, -1).shape
    return rows.view(last).movedim(-1, case.channel_dim)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["tokens", "pixels_3x3"])
def test_class_probabilities(name: str, weights: str) -> None:
    case = net(name)
    jacobian, f, inverse = covariance(name, weights)
    variance = predictive.functional_variance(jacobian, inverse)
    la = case.make(weights, "full")
    for link in ("probit", "probit_centred", "bridge", "bridge_norm"):
        expected = getattr(predictive, link)(f, variance)
        assert_close(la(case.x, link_approx=link), shaped(case, expected), "backend", label=link)
    draws = torch.Generator().manual_seed(0)
    expected, error = predictive.monte_carlo(f, variance, 4000, draws)
    found = la(case.x, link_approx="mc", n_samples=4000, generator=torch.Generator().manual_seed(1))
    assert_close(found, shaped(case, expected), "mc", standard_error=shaped(case, error) * 2**0.5)
    joint = la(case.x, link_approx="mc", joint=True, n_samples=4000, generator=torch.Generator().manual_seed(1))
    assert_close(joint, shaped(case, expected), "mc", standard_error=shaped(case, error) * 2**0.5)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["tokens_regression", "pixels_regression"])
def test_regression(name: str, weights: str) -> None:
    case = net(name)
    jacobian, f, inverse = covariance(name, weights)
    variance = predictive.functional_variance(jacobian, inverse)
    la = case.make(weights, "full")
    mean, found = la(case.x)
    assert_close(mean, case.model(case.x), "algebra")
    lead = mean.movedim(case.channel_dim, -1).shape
    assert_close(found, variance.view(*lead, lead[-1]), "backend")
    noisy = la(case.x, observation_noise=True)[1]
    assert_close(noisy, (variance + torch.eye(lead[-1])).view(*lead, lead[-1]), "backend")
    diagonal = variance.diagonal(dim1=1, dim2=2)
    assert_close(la(case.x, diagonal_output=True)[1], shaped(case, diagonal), "backend")
    assert_close(la.functional_variance_fast(case.x)[1], shaped(case, diagonal), "backend")
    mean, found = la(case.x, joint=True)
    assert_close(mean, f.flatten(), "algebra")
    assert_close(found, predictive.functional_covariance(jacobian, inverse), "backend")


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["tokens", "pixels_regression", "tokens_bernoulli"])
def test_sampled_weights(name: str, weights: str) -> None:
    case = net(name)
    la = case.make(weights, "full")
    found = la(case.x, "nn", n_samples=5)
    shape = case.model(case.x).shape
    assert all(part.shape == shape for part in (found if isinstance(found, tuple) else (found,)))
    samples = la.functional_samples(case.x, "nn", n_samples=3, generator=torch.Generator().manual_seed(0))
    thetas = la.sample(3, generator=torch.Generator().manual_seed(0))
    for theta, sample in zip(thetas, samples, strict=True):
        network, values = copy.deepcopy(case.model), theta
        tensors = list(network.parameters())
        if weights == "last_layer":
            tensors = tensors[-2:]
        nn.utils.vector_to_parameters(values, tensors)
        assert_close(sample, network(case.x), "backend")
    assert la.functional_samples(case.x, n_samples=3).shape == (3, *shape)
    probabilities = la.predictive_samples(case.x, n_samples=3)
    assert probabilities.shape == (3, *shape)
    if case.likelihood == "classification":
        assert_close(
            probabilities.sum(case.channel_dim + (1 if case.channel_dim > 0 else 0)), torch.ones(3, 4, 3), "algebra"
        )


def test_a_head_costs_the_same_per_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backward pass per position and class, and no tensor that grows with the square of the positions."""
    torch.manual_seed(0)
    model = Tokens(5).double()
    x, y = torch.randint(0, 6, (2, 400)), torch.randint(0, 5, (2, 400))
    largest = 0
    whole = torch.Tensor.new_zeros

    def watched(self: Tensor, *size: int, **options: object) -> Tensor:
        nonlocal largest
        made = whole(self, *size, **options)
        largest = max(largest, made.numel())
        return made

    monkeypatch.setattr(torch.Tensor, "new_zeros", watched)
    for structure in ("full", "kron", "diag", "lowrank", "ekfac"):
        la = Laplace(model, "classification", "last_layer", structure)
        la.fit([(x, y)])
        assert la(x).shape == (2, 400, 5)
        assert la(x, "nn", n_samples=3).shape == (2, 400, 5)
    assert largest < 100 * x.numel()
    la = Laplace(model, "classification", "last_layer", "full", prior_precision=DELTA)
    la.fit([(x, y)])
    with torch.no_grad():
        features = torch.cat([model.norm(_trunk(model, x)).flatten(0, 1), torch.ones(800, 1)], 1).double()
    p = torch.softmax(model(x).detach().flatten(0, 1), 1)
    weights = la.H.view(25, 25)[:20, :20].view(5, 4, 5, 4)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    assert_close(weights, torch.einsum("bcd,bi,bj->cidj", inner, features[:, :4], features[:, :4]), "backend")


def _trunk(model: Tokens, x: Tensor) -> Tensor:
    z = model.embed(x)
    return z + model.attend(z, z, z, need_weights=False)[0]


class Rearranged(nn.Module):
    """A linear head on pixels, whose outputs are permuted; or one followed by an operation that is no rearrangement."""

    def __init__(self, clip: bool) -> None:
        super().__init__()
        self.body, self.head, self.clip = nn.Conv2d(2, 3, 1), nn.Linear(3, 2), clip

    def forward(self, x: Tensor) -> Tensor:
        f = self.head(torch.tanh(self.body(x)).movedim(1, -1)).permute(0, 3, 1, 2)
        return f.clamp(min=0.0) if self.clip else f


@pytest.mark.parametrize("clip", [False, True])
def test_a_head_is_told_from_what_follows_it(clip: bool) -> None:
    torch.manual_seed(1)
    model = Rearranged(clip).double()
    with torch.no_grad():
        model.head.bias += 5.0  # on the first data nothing is clipped
    x, y = torch.randn(2, 2, 2, 3).double(), torch.randint(0, 2, (2, 2, 3))
    la = Laplace(model, "classification", "last_layer", "full", channel_dim=1, prior_precision=DELTA)
    la.fit([(x, y), (x - 30.0, y)])
    with torch.no_grad():
        model.head.bias -= 5.0  # now some are
    la.fit([(x, y)])
    rows = Rows(model, 1)
    names = reference.trainable_names(rows)[-2:]
    assert_close(la.H, reference.ggn(rows, x, y.flatten(), names, "classification"), "backend")
    jacobian, f = reference.flat_jacobian(rows, x, names)
    variance = predictive.functional_variance(jacobian, la.posterior_covariance)
    assert_close(la(x), predictive.probit(f, variance).view(2, 2, 3, 2).movedim(-1, 1), "backend")
    assert all(e.is_head is not clip for e in la.engine.forward(x).plan)


# Predictions as one object.


FORMS = ({}, {"joint": True}, {"diagonal_output": True})


def per_position(case: Net, rows: Tensor) -> Tensor:
    """Rows `[B·T]` as `[B, *positions]`."""
    return rows.view(case.model(case.x).movedim(case.channel_dim, -1).shape[:-1])


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("name", NETS)
def test_latents_of_a_prediction(name: str, weights: str) -> None:
    """Each is read first of a fresh prediction, for what was computed before says what the positions are."""
    case = net(name)
    jacobian, f, inverse = covariance(name, weights)
    blocks = predictive.functional_variance(jacobian, inverse)
    variance = shaped(case, blocks.diagonal(dim1=1, dim2=2))
    lead = per_position(case, f[:, 0]).shape
    la = case.make(weights, "full")
    for form in FORMS:
        assert_close(la.predict(case.x, **form).latent_mean, case.model(case.x), "algebra")
        assert_close(la.predict(case.x, **form).latent_variance, variance, "backend")
        found = la.predict(case.x, **form).latent_covariance
        if "joint" in form:
            assert_close(found, predictive.functional_covariance(jacobian, inverse), "backend")
        else:
            assert_close(found, variance if form else blocks.view(*lead, *blocks.shape[1:]), "backend")
        samples = la.predict(case.x, n_samples=3, generator=draws(), **form).latent_samples
        assert torch.equal(samples, la.functional_samples(case.x, n_samples=3, generator=draws(), **form))


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("name", ["tokens", "pixels_3x3", "tokens_bernoulli"])
def test_probabilities_of_a_prediction(name: str, weights: str) -> None:
    case = net(name)
    jacobian, f, inverse = covariance(name, weights)
    variance = predictive.functional_variance(jacobian, inverse)
    la, binary = case.make(weights, "full"), case.likelihood == "bernoulli"
    dim = case.channel_dim if case.channel_dim < 0 else case.channel_dim + 1
    for form in FORMS:
        for link in ("probit",) if binary else ("probit", "bridge", "bridge_norm"):
            expected = getattr(predictive, "bernoulli_probit" if binary else link)(f, variance)
            options = {"link_approx": link, "n_samples": 20, **form}
            assert_close(la.predict(case.x, **options).probabilities, shaped(case, expected), "backend", label=link)
            found = la.predict(case.x, generator=draws(), **options)
            assert_close(found.variance, shaped(case, expected * (1 - expected)), "backend")
            entropy = reference_parts.entropy(expected)
            if binary:
                entropy = entropy + reference_parts.entropy(1 - expected)
            assert_close(la.predict(case.x, **options).entropy, per_position(case, entropy), "backend")
            samples = la.predictive_samples(case.x, n_samples=20, generator=draws(), **form)
            assert_close(found.probability_samples, samples, "algebra")
            parts = reference_parts.parts(samples.movedim(dim, -1).flatten(1, -2))
            if binary:
                parts = reference_parts.binary_parts(f, variance.diagonal(dim1=1, dim2=2))
            if link == "probit":
                decomposition = found.decomposition
                for part, values in parts.items():
                    where = shaped if values.ndim == 2 else per_position
                    assert_close(getattr(decomposition, part), where(case, values), "backend", label=part)
            else:
                dirichlet = la.predict(case.x, **options).distribution("probabilities")
                assert_close(dirichlet.mean.movedim(-1, case.channel_dim), shaped(case, expected), "backend")
                assert_close(found.decomposition.total, found.variance, "backend")
            lower, upper = la.predict(case.x, **options).interval(0.9)
            assert lower.shape == upper.shape == case.model(case.x).shape
            probs = la.predict(case.x, **options).distribution().probs.movedim(-1, case.channel_dim)
            assert_close(probs, shaped(case, expected), "backend")


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("name", ["tokens_regression", "pixels_regression"])
def test_targets_of_a_regression(name: str, weights: str) -> None:
    """With one noise per output."""
    case, sigma = net(name), torch.tensor([0.5, 2.0]).double()
    la = case.make(weights, "full", sigma_noise=sigma)
    part = truth(name)[0][:, :, columns(case, weights)]
    precision = torch.einsum("bcp,c,bcq->pq", part, sigma**-2, part) + DELTA * torch.eye(part.shape[2]).double()
    latent = predictive.functional_variance(part, torch.linalg.inv(precision))
    for form in FORMS:
        noisy = latent + torch.diag(sigma**2)
        variance = shaped(case, noisy.diagonal(dim1=1, dim2=2))
        if form == {"diagonal_output": True}:
            noisy = torch.diag_embed(noisy.diagonal(dim1=1, dim2=2))
        assert_close(la.predict(case.x, **form).variance, variance, "backend")
        lower, upper = la.predict(case.x, **form).interval(0.95)
        assert_close(0.5 * (upper - lower), 1.959963984540054 * variance.sqrt(), "backend")
        found = la.predict(case.x, **form).decomposition
        assert_close(found.total, variance, "backend")
        assert_close(found.aleatoric, shaped(case, (sigma**2).expand(len(latent), 2)), "algebra")
        entropy = 0.5 * torch.logdet(2 * torch.pi * torch.e * noisy)
        assert_close(found.predictive_entropy, per_position(case, entropy), "backend")
        if "joint" not in form:
            target = la.predict(case.x, **form).distribution()
            assert_close(target.variance.movedim(-1, case.channel_dim), variance, "backend")
            assert target.log_prob(case.y.movedim(case.channel_dim, -1)).shape[:3] == target.batch_shape[:3]


@pytest.mark.parametrize("name", ["tokens", "pixels_3x3", "pixels_regression"])
def test_sampled_predictions_have_the_moments_of_their_samples(name: str) -> None:
    case = net(name)
    la = case.make("last_layer", "diag")
    found = la.predict(case.x, "nn", n_samples=6, generator=draws())
    samples = found.latent_samples
    assert samples.shape == (6, *case.model(case.x).shape)
    assert_close(found.latent_mean, samples.mean(0), "algebra")
    assert_close(found.latent_variance, samples.var(0), "algebra")
    diagonal = found.latent_covariance.diagonal(dim1=-2, dim2=-1)
    assert_close(diagonal.movedim(-1, case.channel_dim), samples.var(0), "algebra")
    assert found.entropy.shape == per_position(case, truth(name)[1][:, 0]).shape


# Mixtures.


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_mixtures_of_networks_with_positions(weights: str) -> None:
    """Images with as many rows, columns and channels, of which no dimension may pass for another one."""
    torch.manual_seed(0)
    networks = [pixels(1, 2).double() for _ in range(2)]
    x = torch.randn(3, 2, 2, 2).double()
    shares = torch.tensor([0.3, 0.7]).double()
    y = torch.randint(0, 2, (3, 2, 2))
    y[0, 0] = -100
    mixture = MixtureLaplace(networks, "classification", weights, "full", weights=shares, channel_dim=1)
    mixture.fit([(x, y)])
    assert_close(mixture(x), sum(w * la(x) for w, la in zip(shares, mixture.components, strict=True)), "algebra")
    found = mixture.predictive_samples(x, n_samples=3, generator=draws())
    assert_close(found, mixture.functional_samples(x, n_samples=3, generator=draws()).softmax(2), "algebra")
    mixture = MixtureLaplace(networks, "regression", weights, "full", weights=shares, channel_dim=1)
    mixture.fit([(x, torch.randn(3, 2, 2, 2).double())])
    means, within = zip(*(la(x) for la in mixture.components), strict=True)
    mean = sum(w * m for w, m in zip(shares, means, strict=True))
    expected = sum(w * c for w, c in zip(shares, within, strict=True))
    for w, m in zip(shares, means, strict=True):
        expected = expected + w * torch.einsum("bchw,bdhw->bhwcd", m - mean, m - mean)
    assert_close(mixture(x)[0], mean, "algebra")
    assert_close(mixture(x)[1], expected, "algebra")
    diagonal = expected.diagonal(dim1=-2, dim2=-1).movedim(-1, 1)
    assert_close(mixture(x, diagonal_output=True)[1], diagonal, "algebra")
    assert mixture(x, joint=True)[1].shape == (24, 24)
    other = Laplace(copy.deepcopy(networks[0]), "regression", weights, "full", channel_dim=2)
    with pytest.raises(InvalidArgument, match=r"channel_dim=\[1, 1, 2\]"):
        MixtureLaplace([*mixture.components, other])


# Tuning.


def test_tuning_by_the_evidence() -> None:
    case = net("tokens")
    la = case.make("last_layer", "full")
    before = la.log_marginal_likelihood()
    la.optimize_prior_precision(n_steps=20)
    assert la.log_marginal_likelihood() > before


class Count:
    """A running metric that remembers what it saw."""

    seen: ClassVar[list[tuple[torch.Size, torch.Size]]] = []

    def reset(self) -> None:
        self.total, self.number = 0.0, 0

    def update(self, prediction: Tensor, y: Tensor) -> None:
        Count.seen.append((prediction.shape, y.shape))
        self.total += float(-prediction.gather(1, y[:, None]).log().sum())
        self.number += len(y)

    def compute(self) -> float:
        return self.total / self.number


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_tuning_by_validation_data(weights: str) -> None:
    """Every way of computing the mean over the positions that count gives the same choice."""
    case = net("tokens")
    loader = [(case.x[:1], case.y[:1]), (case.x[1:], case.y[1:])]
    kept = case.rows != -100
    la = case.make(weights, "full")
    values = torch.tensor([0.1, 1.0, 10.0, 100.0]).double()
    losses = []
    for value in values:
        la.prior_precision = value
        probs = la(case.x).flatten(0, 1)[kept]
        losses.append(-probs.gather(1, case.rows[kept][:, None]).log().mean())
    best, expected = values[int(torch.stack(losses).argmin())], torch.stack(losses)
    grid = {"grid": {"prior_precision": values}, "val_loader": loader, "method": "grid"}
    with _whatever_it_warns():
        result = la.optimize_hyperparameters(objective="nll", **grid)
    assert float(la.prior_precision) == float(best)
    assert_close(result.values, expected, "backend")
    Count.seen.clear()
    with _whatever_it_warns():
        la.optimize_hyperparameters(objective=Count(), **grid)
    assert float(la.prior_precision) == float(best)
    assert {y for _, y in Count.seen} <= {torch.Size([1]), torch.Size([6])}
    for objective in ("brier", "ece"):
        with _whatever_it_warns():
            la.optimize_hyperparameters(objective=objective, pred_type="nn", n_samples=3, **grid)


def test_gradients_of_a_validation_loss() -> None:
    for name in ("tokens", "pixels_regression"):
        case = net(name)
        la = case.make("last_layer", "full")
        data = [(case.x, case.y)]
        with _whatever_it_warns():
            smooth = la.optimize_hyperparameters(objective="nll", method="lbfgs", val_loader=data, n_steps=3)
            at = {"prior_precision": la.prior_precision.reshape(-1)}
            grid = la.optimize_hyperparameters(objective="nll", method="grid", val_loader=data, grid=at)
        assert_close(smooth.value, grid.value, "backend")


@contextmanager
def _whatever_it_warns() -> Iterator[None]:
    """Of edges and flat objectives, which are not the matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        yield


# What is refused.


def test_work_above_the_budget_names_the_ways_out() -> None:
    case = net("tokens")
    small = {"backend_kwargs": {"max_passes": 5}}
    with pytest.raises(UnsupportedError, match=r"6 backward passes.*stochastic.*subsampled GGN.*last_layer"):
        case.make("all", "diag", **small)
    la = case.make("all", "diag", backend_kwargs={"max_passes": 5, "stochastic": True})
    with pytest.raises(UnsupportedError, match=r"linearised prediction.*pred_type='nn'.*last_layer"):
        la(case.x)
    assert la(case.x, "nn", n_samples=3).shape == (4, 3, 3)
    assert case.make("last_layer", "diag", **small)(case.x).shape == (4, 3, 3)
    assert case.make("all", "lowrank", **small).n_data == 7
    with pytest.raises(InvalidArgument, match="max_passes=0"):
        case.make("all", "diag", backend_kwargs={"max_passes": 0})


def test_targets_of_another_shape() -> None:
    case = net("pixels_1x1")
    la = Laplace(case.model, "classification", "last_layer", "diag", channel_dim=1)
    with pytest.raises(InvalidData, match=r"labels \[3, 2, 3\] or values"):
        la.fit([(case.x, case.y.clamp(min=0).flatten(1))])
    with pytest.raises(InvalidData, match=r"(?s)sum must be 1.*channel_dim="):
        la.fit([(case.x, torch.zeros(3, 3, 2, 3).long())])
    with pytest.raises(InvalidData, match="out of range"):
        la.fit([(case.x, case.y.clamp(min=0) + 3)])
    with pytest.raises(InvalidData, match="pass channel_dim=1, which these targets fit"):
        last = Laplace(case.model, "classification", "last_layer", "diag", channel_dim=-1)
        last.fit([(case.x, case.y.clamp(min=0))])
    assert not la.is_fitted


def test_a_channel_dimension_that_is_none() -> None:
    case = net("pixels_1x1")
    with pytest.raises(InvalidArgument, match=r"channel_dim=0 is of outputs \[B\]"):
        Laplace(case.model, "classification", "all", "diag", channel_dim=0).fit([(case.x, case.y)])
    with pytest.raises(InvalidType, match="an integer is accepted"):
        Laplace(case.model, "classification", "all", "diag", channel_dim="last")
    la = Laplace(case.model, "classification", "all", "diag", channel_dim=4)
    with pytest.raises(InvalidArgument, match=r"channel_dim=4.*from 1 to 3"):
        la.fit([(case.x, case.y)])


def test_a_reduction_of_features_has_no_place() -> None:
    case = net("tokens")
    options = {"feature_reduction": "average", "channel_dim": -1}
    la = Laplace(case.model, "classification", "last_layer", "diag", **options)
    with pytest.raises(InvalidArgument, match=r"feature_reduction='average'.*positions"):
        la.fit([(case.x, case.y)])
    with pytest.raises(InvalidArgument, match="of type Conv2d"):
        Laplace(net("pixels_1x1").model, "classification", last_layer_name="2", feature_reduction="average")


def test_users_backends_know_no_positions() -> None:
    class Own(NativeGGN):
        def diag(self, x: Tensor, y: Tensor, **options: object) -> tuple[Tensor, Tensor]:
            return CurvatureInterface.diag(self, x, y)

    case = net("tokens")
    with pytest.raises(UnsupportedError, match="backend=Own"):
        case.make("all", "diag", backend=Own)


def test_all_data_ignored() -> None:
    case = net("tokens")
    with pytest.raises(InvalidData, match="gave no data"):
        Laplace(case.model, "classification", channel_dim=-1).fit([(case.x, torch.full_like(case.y, -100))])


def test_a_plan_and_a_saved_state() -> None:
    for name in ("tokens", "pixels_3x3"):
        case = net(name)
        for weights in ("all", "last_layer"):
            la = case.make(weights, "kron")
            assert la.plan([(case.x, case.y)]).peak_bytes > 0
            other = Laplace(case.model, "classification", weights, "kron", channel_dim=case.channel_dim)
            other.load_state_dict(la.state_dict())
            assert torch.equal(other(case.x), la(case.x))
            assert torch.equal(copy.deepcopy(la)(case.x), la(case.x))


# Training.


@pytest.mark.parametrize("name", ["tokens", "pixels_regression"])
def test_training_with_hyperparameters_by_the_evidence(name: str) -> None:
    case = net(name)
    online = OnlineLaplace(
        copy.deepcopy(case.model), [(case.x, case.y)], case.likelihood, "diag",
        laplace_kwargs={"channel_dim": case.channel_dim},
    )  # fmt: skip
    loss = online.loss(case.model(case.x), case.y)
    kept = case.rows.shape[0] - int((case.rows == -100).sum())
    data = reference.loss(truth(name)[1], case.rows, case.likelihood) / kept
    theta = torch.cat([p.detach().flatten() for p in case.model.parameters()])
    assert_close(loss, data + theta.square().sum() / (2 * kept), "backend")
    online.step(1)
    assert online.finish().n_data == kept
