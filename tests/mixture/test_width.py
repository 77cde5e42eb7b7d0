"""A width that follows the input for mixtures: one c, of every network its own r, against dense oracles."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace, MixtureLaplace
from laplace.errors import InvalidArgument
from laplace.tuning import calibrate as search
from laplace.tuning import tilting
from tests.reference import tilt as reference
from tests.reference.compare import assert_close
from tests.tuning.test_tilting import N_TRAIN, N_VAL, data, network, new_inputs

WEIGHTS = [0.3, 0.7]
Part = tuple[Tensor, Tensor, float]


def networks() -> list[nn.Sequential]:
    """Two that differ in every layer."""
    other = copy.deepcopy(network())
    with torch.no_grad():
        other[0].weight.mul_(torch.linspace(0.6, 1.3, other[0].weight.numel()).view_as(other[0].weight))
        other[2].weight.mul_(0.7)
    return [network(), other]


def mixture_of(likelihood: str, weights: str = "all", structure: str = "kron") -> MixtureLaplace:
    parts = [Laplace(model, likelihood, weights, structure, prior_precision=3.0) for model in networks()]
    mixture = MixtureLaplace(parts, weights=WEIGHTS)
    mixture.fit([data(N_TRAIN, 0, likelihood)])
    return mixture


def true_parts(likelihood: str, weights: str, held_out: Tensor, new: Tensor) -> list[tuple[Part, Part]]:
    """Outputs, r and r_far of both networks, at held-out and at new inputs."""
    train, found = data(N_TRAIN, 0, likelihood)[0], list[tuple[Part, Part]]()
    for model in networks():
        layers = [[x, model[:2](x).detach()][weights == "last_layer" :] for x in (train, held_out, new)]
        each = [
            [reference.leverages(a.unsqueeze(1), b.unsqueeze(1)) for a, b in zip(layers[0], part, strict=True)]
            for part in layers[1:]
        ]
        r, of_new = reference.distances(*each)
        far = tilting.FAR * (1 + 4 / math.sqrt(N_VAL)) * float(r.max())
        found.append(((model(held_out).detach(), r, far), (model(new).detach(), of_new, far)))
    return found


def float64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_one_width_is_chosen_by_what_the_mixture_says(likelihood: str, weights: str) -> None:
    mixture, (x, y), new = mixture_of(likelihood, weights), data(N_VAL, 1, likelihood), new_inputs()
    found = mixture.calibrate([(x[:25], y[:25]), (x[25:], y[25:])])
    held_out, at_new = (list(parts) for parts in zip(*true_parts(likelihood, weights, x, new), strict=True))

    def losses(width: float) -> Tensor:
        if likelihood == "regression":
            mean, variance = reference.mixed_moments(held_out, WEIGHTS, found.network_noise, width)
            return 0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi)).sum(1)
        p = reference.mixed_probabilities(held_out, WEIGHTS, width)
        return nn.functional.nll_loss(p.log(), y, reduction="none")

    by_width = {width: losses(width) for width in tilting.WIDTHS}
    expected = reference.widest(by_width, losses(0.0), tilting.WIDTHS, search.caution(N_VAL))
    tilts = [found.tilt, *found.others]
    assert expected > 0
    assert [tilt.width for tilt in tilts if tilt] == [expected] * 2
    assert [tilt.far for tilt in tilts if tilt] == pytest.approx([far for _, _, far in held_out])
    assert_close(float64(found.network_nll), losses(0.0).mean(), "algebra")
    assert_close(float64(found.tilt.nll), by_width[expected].mean(), "algebra")
    assert "of each of 2 networks" in found.sentence

    mixture.calibration = dataclasses.replace(
        found, scale=0.0, tilt=dataclasses.replace(found.tilt, width=2.0),
        others=(dataclasses.replace(found.others[0], width=2.0),),
    )  # fmt: skip
    if likelihood == "regression":
        prediction = mixture.predict(new)
        mean, variance = reference.mixed_moments(at_new, WEIGHTS, found.sigma_noise, 2.0)
        assert_close(prediction.mean, mean, "algebra")
        assert_close(prediction.variance, variance, "algebra")
        assert_close(mixture(new, observation_noise=True)[1].diagonal(dim1=1, dim2=2), variance, "algebra")
    else:
        p = reference.mixed_probabilities(at_new, WEIGHTS, 2.0)
        assert_close(mixture(new), p, "algebra")
        assert_close(mixture.predict(new).probabilities, p, "algebra")


@pytest.mark.parametrize("rule", ["given", "evidence"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_scales_are_scored_on_top_of_it(likelihood: str, rule: str) -> None:
    mixture, (x, y) = mixture_of(likelihood), data(N_VAL, 1, likelihood)
    if rule == "evidence":  # which says more of some prior precisions than of others, and of the present one counts
        parts = [Laplace(network(), likelihood, "last_layer", each, prior_precision=3.0) for each in ("kron", "diag")]
        mixture = MixtureLaplace(parts, weights="evidence")
        mixture.fit([data(N_TRAIN, 0, likelihood)])
        assert 0.01 < float(mixture.weights[0]) < 0.99
    found = mixture.calibrate([(x, y)])
    assert found.tilt.width > 0
    i, j, k = 2, 6, len(found.table["sigma_noise"]) // 2
    sigma = found.table["sigma_noise"][k]
    prior = float(found.table["factors"][i]) * found.before.prior_precision

    def nll(scale: float, sigma: Tensor) -> Tensor:
        mixture.calibration = dataclasses.replace(
            found, scale=scale, prior_precision=prior, sigma_noise=sigma.to(found.sigma_noise)
        )
        if likelihood == "regression":
            prediction = mixture.predict(x)
            square = (y - prediction.mean).square() / prediction.variance
            return 0.5 * (square + prediction.variance.log() + math.log(2 * math.pi)).sum(1)
        return nn.functional.nll_loss(mixture(x).log(), y, reduction="none")

    gap = nll(float(found.table["scales"][j]), sigma) - nll(0.0, found.network_noise)
    assert_close(found.table["differences"][i, j, k], gap.mean(), "algebra")
    assert_close(found.table["standard_errors"][i, j, k], gap.std() / math.sqrt(N_VAL), "algebra")


def test_it_is_saved_exported_and_undone() -> None:
    mixture, x = mixture_of("classification"), new_inputs()
    plain = mixture(x)
    found = mixture.calibrate([data(N_VAL, 1)])
    calibrated = mixture(x)
    assert not torch.equal(calibrated, plain)
    other = MixtureLaplace([Laplace(model, "classification", "all", "kron") for model in networks()], weights=WEIGHTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.load_state_dict(mixture.state_dict())
    assert torch.equal(other(x), calibrated)
    assert repr(other.calibration) == repr(found)
    assert_close(laplace.export(mixture, x)(x[:4]), calibrated[:4], "algebra")
    found.undo()
    assert torch.equal(mixture(x), plain)
    mixture.calibration = other.calibration
    assert torch.equal(mixture(x), calibrated)
    other.calibration.undo()
    assert torch.equal(other(x), plain)


def test_a_width_of_other_networks_is_refused() -> None:
    mixture, x = mixture_of("classification"), new_inputs()
    la: Any = mixture.components[0]
    found = mixture.calibrate([data(N_VAL, 1)])
    before = la(x)
    with pytest.raises(InvalidArgument, match="the width of 2 networks"):
        la.calibration = found
    with pytest.raises(InvalidArgument, match=r"the width of 1 network, .* the object has 2"):
        mixture.calibration = la.calibration
    assert torch.equal(la(x), before)
    assert not la.calibration.others


def test_components_that_were_calibrated_alone_have_no_calibration_in_common() -> None:
    mixture, x = mixture_of("classification"), new_inputs()
    plain = mixture(x)
    for n, la in zip((N_VAL, 30), mixture.components, strict=True):
        la.calibrate([data(n, 1)])
    expected = sum(weight * la(x) for weight, la in zip(WEIGHTS, mixture.components, strict=True))
    assert_close(mixture(x), expected, "algebra")
    assert mixture.calibration is None
    mixture.calibration = None
    assert torch.equal(mixture(x), plain)


def test_loaders_that_can_be_read_once_serve_all_networks() -> None:
    mixture = mixture_of("classification", "last_layer")
    batches = [data(N_TRAIN, 0)]
    found = mixture.calibrate(iter([data(N_VAL, 1)]), train_loader=iter(batches))
    assert [tilt.layers for tilt in (found.tilt, *found.others) if tilt] == [("0", "2")] * 2
    again = mixture.calibrate([data(N_VAL, 1)], train_loader=batches)
    assert repr(again) == repr(found)


def test_samples_say_what_the_mixture_says() -> None:
    mixture, x = mixture_of("classification"), new_inputs()
    mixture.calibrate([data(N_VAL, 1)])
    generator = torch.Generator().manual_seed(0)
    samples = mixture.predictive_samples(x, n_samples=20_000, generator=generator)
    exact = mixture(x, link_approx="mc", n_samples=20_000, generator=generator)
    assert float((samples.mean(0) - exact).abs().max()) < 0.015
