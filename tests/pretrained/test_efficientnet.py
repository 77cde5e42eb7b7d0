"""EfficientNet-Lite0 with the weights of ImageNet, on images of MNIST: depthwise convolutions, batch normalisation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from examples.pretrained_data import efficientnet, features, for_imagenet, mnist
from laplace import Laplace
from tests.pairs import nightly
from tests.pretrained.loading import lent, loaded
from tests.reference import gaussian_process
from tests.reference.compare import assert_close
from tests.reference.curvature import output_hessian
from tests.reference.predictive import probit

C, DELTA = 3, 2.0


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    """24 images of three digits, and their labels."""
    pixels, labels = loaded(mnist)
    rows = torch.cat([(labels == c).nonzero().squeeze(1)[:8] for c in range(C)])
    return pixels[rows], labels[rows]


@pytest.fixture
def network() -> nn.Module:
    """Frozen but for a new last layer, in double precision."""
    model = loaded(efficientnet, C).double().requires_grad_(False)
    model._fc.requires_grad_(True)
    return model


@pytest.mark.nightly
def test_features_are_what_the_last_layer_is_given(network, images):
    x = for_imagenet(images[0])
    assert_close(network._fc(features(network.float(), images[0])), network(x), "float32")


def exact(phi: Tensor, star: Tensor, inner: Tensor) -> Tensor:
    """Covariance of the logits by the data's kernel; weights and bias of a last layer have the Jacobian I ⊗ (φ, 1)."""

    def jacobian(phi: Tensor) -> Tensor:
        rows = torch.cat([phi, torch.ones_like(phi[:, :1])], 1)
        return torch.einsum("cd,np->ncdp", torch.eye(C, dtype=phi.dtype), rows).flatten(2)

    prior = torch.full((C * (phi.shape[1] + 1),), DELTA, dtype=phi.dtype)
    joint = gaussian_process.posterior_covariance(jacobian(star), jacobian(phi), inner, prior)
    n = len(star)
    return joint.view(n, C, n, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def factored(phi: Tensor, star: Tensor, inner: Tensor) -> Tensor:
    """The same with the curvature B ⊗ A of the weights and B of the bias."""
    a, q = torch.linalg.eigh(phi.T @ phi / len(phi))
    b, v = torch.linalg.eigh(inner.sum(0))
    weights = (star @ q).square() @ (1 / (torch.outer(a, b) + DELTA))
    return torch.einsum("ck,nk,dk->ncd", v, weights + 1 / (b + DELTA), v)


@pytest.mark.parametrize(
    ("options", "covariance"),
    [({"hessian_structure": "gp", "n_subset": 12}, exact), ({"hessian_structure": "kron"}, factored)],
)
def test_last_layer_agrees_with_the_oracle(options, covariance, network, images):
    x, y = for_imagenet(images[0]).double(), images[1]
    x_train, y_train, star = x[::2], y[::2], x[1:6]
    with lent(network):
        la = Laplace(network, "classification", prior_precision=DELTA, **options)
        la.fit([(x_train[:5], y_train[:5]), (x_train[5:], y_train[5:])])
        found = la.predict(star)
    with torch.no_grad():
        phi = network.extract_features(x_train).mean((2, 3))
        phi_star = network.extract_features(star).mean((2, 3))
        f, f_star = network._fc(phi), network._fc(phi_star)
    expected = covariance(phi, phi_star, output_hessian(f, "classification"))
    assert_close(found.latent_mean, f_star, "algebra")
    assert_close(found.latent_covariance, expected, "algebra")
    assert_close(found.probabilities, probit(f_star, expected), "algebra")


@pytest.mark.parametrize("structure", ["diag", *nightly("kron", "lowrank_kron")])
def test_all_weights(structure, network, images):
    network.float().requires_grad_(True)
    x, y = for_imagenet(images[0][::6], size=32), images[1][::6]
    with lent(network):
        la = Laplace(network, "classification", "all", structure)
        la.fit([(x[:2], y[:2]), (x[2:], y[2:])])
        evidence = la.log_marginal_likelihood()
        probabilities = la(x)
    assert la.n_params == sum(p.numel() for p in network.parameters()) > 3e6
    convolutions = {words for name, words in la.coverage().items() if "conv" in name}
    assert structure != "kron" or {words.split(" → ")[1] for words in convolutions} == {"Kronecker factors"}
    assert bool(evidence.isfinite())
    assert_close(probabilities.sum(1), torch.ones(len(x)), "float32")
    assert bool((la.predict(x).latent_variance > 0).all())
