"""Predictions whose width follows the input, against dense oracles."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.reference import tilt as reference
from tests.reference.compare import assert_close
from tests.tuning.test_tilting import (
    N_NEW,
    N_TRAIN,
    N_VAL,
    calibrated,
    data,
    fitted,
    inputs_of,
    network,
    new_inputs,
    true_distances,
)

CELLS = [("all", "kron", False), ("last_layer", "kron", False), ("last_layer", "full", False), ("all", "diag", True),
         ("all", "gp", True), ("last_layer", "diag", False), ("last_layer", "diag", True),
         ("last_layer", "kron", True)]  # fmt: skip


@pytest.mark.parametrize("scale", [0.0, 0.1])
@pytest.mark.parametrize(("weights", "structure", "given"), CELLS)
def test_probabilities(weights: str, structure: str, given: bool, scale: float) -> None:
    options = {"n_subset": N_TRAIN} if structure == "gp" else {}
    la, x = fitted(weights, structure, **options), new_inputs()
    variances = scale * la.predict(x).latent_variance
    calibrated(la, 2.0, 3.0, scale, [data(N_TRAIN, 0)] if given else None)
    # With the training data the layer that the network begins with counts beside a last layer.
    read = "all" if given else weights
    r = true_distances(la, read, x)[1]
    assert bool((r > 3).any() & (r < 3).any())
    expected = reference.probabilities(network()(x).detach(), r, 2.0, 3.0, variances)
    assert_close(la(x), expected, "algebra")
    assert_close(la.predict(x).probabilities, expected, "algebra")
    if not scale:  # then every link, and every sample, says the softmax of the tempered logits
        for link in ("probit_centred", "mc", "delta"):
            assert_close(la(x, link_approx=link), expected, "algebra")
    assert torch.equal(la(x).argmax(1), network()(x).argmax(1)) or scale
    tilt = la.calibration.tilt
    assert tilt.layers == (("0", "2") if read == "all" else ("2",))


@pytest.mark.parametrize("scale", [0.0, 0.1])
@pytest.mark.parametrize(("weights", "structure"), [("all", "kron"), ("last_layer", "full")])
def test_variances(weights: str, structure: str, scale: float) -> None:
    la, x = fitted(weights, structure, "regression", sigma_noise=0.7), new_inputs()
    calibrated(la, 2.0, 3.0, scale)
    found = la.calibration
    r = true_distances(la, weights, x)[1]
    variances = 0.0
    if scale:
        plain = fitted(weights, structure, "regression", sigma_noise=float(found.network_noise))
        variances = scale * plain.predict(x).latent_variance
    prediction = la.predict(x)
    expected = reference.variance(found.sigma_noise, r, 2.0, 3.0, variances)
    assert_close(prediction.variance, expected.expand(-1, 3), "algebra")
    observed = la(x, observation_noise=True)[1].diagonal(dim1=1, dim2=2)
    assert_close(observed, expected.expand(-1, 3), "algebra")
    assert_close(prediction.mean, network()(x).detach(), "algebra")
    assert_close(prediction.sigma_noise, found.sigma_noise / 3**0.5, "algebra")
    low, high = prediction.interval(0.9)
    assert_close((high - low) / 2 / 1.6448536269514722, prediction.variance.sqrt(), "algebra")
    assert la.sigma_noise == 0.7


def test_labels_with_several_classes() -> None:
    la, x = calibrated(fitted("all", "kron", "bernoulli"), 2.0, 3.0, 0.0), new_inputs()
    train, held_out = (data(n, seed, "bernoulli")[0] for n, seed in ((N_TRAIN, 0), (N_VAL, 1)))
    parts = [inputs_of(part, "all") for part in (train, held_out, x)]
    ours = [[reference.leverages(a, b) for a, b in zip(parts[0], each, strict=True)] for each in parts[1:]]
    r = reference.distances(*ours)[1]
    temperature = reference.squared_temperature(r, 2.0, 3.0).sqrt()
    assert_close(la(x), (network()(x).detach() / temperature[:, None]).sigmoid(), "algebra")


def test_forms_of_one_gaussian_and_samples() -> None:
    """Covariances of rows, groups and all inputs agree; samples have them, and say what the link says."""
    la, x = calibrated(fitted("all", "kron"), 2.0, 3.0, 0.1), new_inputs()
    full = la.predict(x).latent
    assert_close(la.predict(x, diagonal_output=True).latent.covariance, full.variance, "algebra")
    joint = la.predict(x, joint=True).latent_covariance
    for b in range(len(x)):
        assert_close(joint[3 * b : 3 * b + 3, 3 * b : 3 * b + 3], full.covariance[b], "algebra")
    groups = la.predict(x, joint=True, group_size=3).latent_covariance
    assert_close(groups[1], joint[9:18, 9:18], "algebra")
    some = la.predict(x, outputs=[0, 2]).latent
    assert_close(some.covariance, full.covariance[:, [0, 2]][:, :, [0, 2]], "algebra")
    mean, covariance = la.predictive_moments(x)
    assert_close(mean, full.mean, "algebra")
    assert_close(covariance, full.covariance, "algebra")
    generator = torch.Generator().manual_seed(0)
    samples = la.predictive_samples(x, n_samples=20_000, generator=generator)
    exact = la(x, link_approx="mc", n_samples=20_000, generator=generator)
    assert float((samples.mean(0) - exact).abs().max()) < 0.01


@pytest.mark.parametrize("width", [1.0, 100.0])
def test_samples_are_no_surer_than_the_width_says(width: float) -> None:
    """Of weights too: at the scale 0 they are the tempered network itself, whatever the width."""
    la, x = calibrated(fitted("all", "kron"), width, 3.0, 0.0), new_inputs()
    assert_close(la(x, pred_type="nn", link_approx="mc", n_samples=3), la(x), "algebra")
    assert_close(la.predictive_samples(x, n_samples=4).mean(0), la(x), "algebra")


@pytest.mark.parametrize(
    ("link", "likelihood", "scale"),
    [("bridge", "classification", 0.1), ("delta", "classification", 0.1), ("delta", "classification", 0.0),
     ("delta", "bernoulli", 0.1)],
)  # fmt: skip
def test_links_for_narrow_gaussians_have_tempered_logits(link: str, likelihood: str, scale: float) -> None:
    """A wide Gaussian around stretched logits, the same by probit, is beyond an expansion: it said one class."""
    la, x = calibrated(fitted("all", "kron", likelihood), 100.0, 3.0, scale), data(N_NEW, 5)[0]
    _, r = true_distances(la, "all", x)
    calibration = la.calibration
    la.calibration = dataclasses.replace(calibration, tilt=None)
    latent = la.predict(x).latent
    logits = latent.mean / reference.squared_temperature(r, 100.0, 3.0).sqrt()[:, None]
    expected = la.likelihood_object.predict(logits, latent.covariance, link)
    la.calibration = calibration
    assert_close(la(x, link_approx=link), expected, "algebra")
    if not scale and link == "delta":
        assert_close(la(x, link_approx=link), la(x), "algebra")
    if link == "bridge":
        alpha = la.predict(x, link_approx=link).distribution("probabilities").concentration
        assert_close(alpha / alpha.sum(1, keepdim=True), expected, "algebra")
