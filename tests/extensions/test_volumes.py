"""Sums over positions: against the dense covariance between positions, by draws, of odd shapes, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace, MixtureLaplace, totals
from laplace.errors import CalibrationWarning, InvalidArgument, InvalidData, UnsupportedError
from laplace.extensions.volumes import Totals, standardised_errors
from tests.reference import volumes as oracle
from tests.reference.compare import assert_close

PRIOR = 0.8
SHAPES = {"image": (5, 4), "volume": (3, 2, 4)}


def network(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    conv: Any = nn.Conv2d if kind == "image" else nn.Conv3d
    return nn.Sequential(conv(2, 3, 3, padding=1), nn.Tanh(), conv(3, 3, 1)).double()


def data(kind: str, n: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, *SHAPES[kind], generator=generator, dtype=torch.float64)
    y = torch.randint(3, (n, *SHAPES[kind]), generator=generator)
    y[0, 1:] = -100
    return x, y


def fitted(kind: str = "image", subset: Any = "last_layer", structure: Any = "full", seed: int = 0) -> Any:
    la = Laplace(network(kind, seed), "classification", subset, structure, prior_precision=PRIOR)
    la.fit([data(kind)])
    return la


def names(la: Any) -> list[str]:
    return [slot.name for slot in la.problem.slots]


@pytest.mark.parametrize("kind", ["image", "volume"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_dense(kind: str, subset: str) -> None:
    la, (x, y) = fitted(kind, subset), data(kind)
    counts = (y != -100).double().flatten(1)
    covariance = oracle.precision(la.problem.module, x, counts, names(la), PRIOR).inverse()
    numbers = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, -1.0]], dtype=torch.float64)
    volume = 0.3 * (y != -100)
    mean, between = oracle.totals(la.problem.module, x, names(la), covariance, numbers, volume.double().flatten(1))
    found = totals(la, x, of=numbers, weights=volume)
    assert_close(found.mean, mean, "algebra")
    assert_close(found.covariance, between, "backend")
    one = totals(la, x, of=1, weights=volume)
    assert_close(one.mean, mean[:, 0], "algebra")
    assert_close(one.std, between[:, 0, 0].sqrt(), "backend")


@pytest.mark.parametrize("structure", ["kron", "diag"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_other_structures(structure: str, subset: str) -> None:
    la, (x, _) = fitted("image", subset, structure), data("image")
    covariance = la.snapshot().precision().solve(torch.eye(la.n_params, dtype=torch.float64))
    numbers, ones = torch.eye(3, dtype=torch.float64)[[0, 2]], torch.ones(3, 20, dtype=torch.float64)
    mean, between = oracle.totals(la.problem.module, x, names(la), covariance, numbers, ones)
    found = totals(la, x, of=[0, 2])
    assert_close(found.mean, mean, "algebra")
    assert_close(found.covariance, between, "backend")


def test_a_sum_over_all_classes_is_certain() -> None:
    found = totals(fitted(), data("image")[0], of=torch.ones(3))
    assert_close(found.mean, torch.full((3,), 20.0, dtype=torch.float64), "algebra")
    assert float(found.std.max()) < 1e-7


def test_functions_are_sums_where_they_are_linear() -> None:
    la, (x, y) = fitted(), data("image")
    expected = totals(la, x, of=1, weights=(y != -100))
    found = totals(la, x, of=lambda p, mask: (p[:, 1] * mask).sum((1, 2)), weights=(y != -100))
    assert_close(found.mean, expected.mean, "algebra")
    assert_close(found.covariance, expected.covariance, "algebra")
    share = totals(la, x, of=lambda p: 1 - p[:, 1].mean((1, 2)))
    assert_close(share.std, totals(la, x, of=1, weights=1 / 20).std, "algebra")


def dice(p: Tensor, mask: Tensor) -> Tensor:
    return 2 * (p[:, 1] * mask).sum((1, 2)) / (p[:, 1] + mask).sum((1, 2))


def test_other_functions_are_drawn() -> None:
    la, (x, y) = fitted(), data("image")
    with pytest.raises(InvalidArgument, match="of=dice is not linear"):
        totals(la, x, of=dice, weights=(y == 1))
    found = totals(la, x, of=dice, weights=(y == 1), n_samples=20, generator=torch.Generator().manual_seed(0))
    functions = laplace.draw(la, 20, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([dice(function(x).softmax(1), (y == 1).double()) for function in functions])
    assert_close(found.mean, expected.mean(0), "algebra")
    assert_close(found.std, expected.std(0), "algebra")


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_draws_of_a_narrow_posterior_are_the_linear_sums(subset: str) -> None:
    la, (x, _) = fitted("image", subset), data("image")
    la.prior_precision, la.temperature = 1e6 * la.prior_precision, 1e-6
    drawn = totals(la, x, of=[0, 1], n_samples=400, generator=torch.Generator().manual_seed(0))
    linear = totals(la, x, of=[0, 1])
    assert_close(drawn.mean, linear.mean, "mc", standard_error=linear.std / 20)
    assert_close(drawn.std, linear.std, "mc", standard_error=linear.std / 800**0.5)


def test_mixtures() -> None:
    parts, (x, _) = [fitted(seed=seed) for seed in (0, 1)], data("image")
    found = totals(MixtureLaplace(parts, weights=[0.25, 0.75]), x, of=2)
    a, b = (totals(la, x, of=2) for la in parts)
    mean = 0.25 * a.mean + 0.75 * b.mean
    second = 0.25 * (a.std.square() + a.mean.square()) + 0.75 * (b.std.square() + b.mean.square())
    assert_close(found.mean, mean, "algebra")
    assert_close(found.std, (second - mean.square()).sqrt(), "backend")
    errors = standardised_errors(MixtureLaplace(parts, weights=[0.25, 0.75]), [data("image")], of=2)
    assert errors.shape == (3,)


def test_draws_of_mixtures() -> None:
    parts, (x, y) = [fitted(seed=seed) for seed in (0, 1)], data("image")
    for la in parts:
        la.prior_precision, la.temperature = 1e6 * la.prior_precision, 1e-6
    la, dices = (
        MixtureLaplace(parts, weights=[0.25, 0.75]),
        [dice(one.problem.module(x).softmax(1), y == 1) for one in parts],
    )
    found = totals(la, x, of=dice, weights=(y == 1), n_samples=200, generator=torch.Generator().manual_seed(0))
    spread = (dices[0] - dices[1]).abs() * (0.25 * 0.75) ** 0.5
    assert_close(found.mean, 0.25 * dices[0] + 0.75 * dices[1], "mc", standard_error=spread / 200**0.5)


def test_sizes_one_after_another() -> None:
    """Rules are proven once: what follows is as of a posterior that was asked for nothing before."""
    la, generator = fitted(), torch.Generator().manual_seed(2)
    numbers = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    for n, *size in ((1, 5, 4), (3, 5, 4), (1, 2, 6)):
        x = torch.randn(n, 2, *size, generator=generator, dtype=torch.float64)
        mask = torch.zeros(n, *size) if n == 1 else torch.ones(n, *size)
        for of in (numbers, [0, 1]):
            for weights in (2.0, mask):
                found, expected = (totals(one, x, of=of, weights=weights) for one in (la, fitted()))
                assert_close(found.mean, expected.mean, "algebra")
                assert_close(found.covariance, expected.covariance, "algebra")
    totals(la, x, of=1)
    with pytest.raises(InvalidArgument, match="of=True"):
        totals(la, x, of=True)


def test_asked_again_it_takes_one_forward_pass() -> None:
    la, x, calls = fitted(), data("image")[0][:1], list[int]()
    totals(la, x, of=1)
    la.problem.module.register_forward_hook(lambda *_: calls.append(1))
    totals(la, x, of=1)
    assert len(calls) == 1


def test_a_question_that_failed_leaves_no_trace() -> None:
    la, (x, y) = fitted(), data("image")
    with pytest.raises(InvalidData, match="weights have shape"):
        totals(la, x, of=1, weights=torch.ones(3, 5))
    assert totals(la, x, of=1, weights=torch.ones(y.shape)).mean.shape == (3,)


def test_held_out_images_of_unequal_sizes() -> None:
    """One by one, or padded to a common size with labels that are ignored."""
    la, generator = fitted(), torch.Generator().manual_seed(2)
    sizes = ((5, 4), (3, 6))
    pairs = [
        (
            torch.randn(1, 2, *size, generator=generator, dtype=torch.float64),
            torch.randint(3, (1, *size), generator=generator),
        )
        for size in sizes
    ]
    errors = standardised_errors(la, pairs, of=[1, 2])
    for error, (x, y) in zip(errors, pairs, strict=True):
        found = totals(la, x, of=[1, 2])
        truth = torch.stack([(y == k).sum() for k in (1, 2)])
        assert_close(error, ((truth - found.mean) / found.std).abs()[0], "algebra")
    local = Laplace(nn.Conv2d(2, 3, 1).double(), "classification", "all", "full")
    local.fit([data("image")])
    padded = [nn.functional.pad(x, (0, 6 - x.shape[3], 0, 5 - x.shape[2])) for x, _ in pairs]
    labels = [nn.functional.pad(y, (0, 6 - y.shape[2], 0, 5 - y.shape[1]), value=-100) for _, y in pairs]
    together = standardised_errors(local, [(torch.cat(padded), torch.cat(labels))], of=1)
    assert_close(together, standardised_errors(local, pairs, of=1), "algebra")


def test_posteriors_over_functions() -> None:
    """Where outputs have no positions, which they take no others of, a sum is a probability."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double(), torch.randn(6, 2).double()
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    weights = Laplace(model, "classification", "all", "full")
    functions = Laplace(model, "classification", "all", "gp", n_subset=6)
    weights.fit([(x, y)])
    functions.fit([(x, y)])
    found, expected = totals(functions, x, of=1), totals(weights, x, of=1)
    assert_close(expected.mean, model(x).softmax(1)[:, 1].detach(), "algebra")
    assert_close(found.mean, expected.mean, "algebra")
    assert_close(found.std, expected.std, "backend")
    images = Laplace(network("image"), "classification", "all", "gp", n_subset=3)
    with pytest.raises(UnsupportedError, match="Posteriors over weights take them"):
        images.fit([data("image")])


def test_other_likelihoods_and_layouts() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 6, 2, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    counts = Laplace(model, "poisson", "all", "full")
    counts.fit([(x, torch.randint(4, (3, 6, 1), generator=generator).double())])
    found = totals(counts, x, of=0)
    assert_close(found.mean, model(x).exp().sum((1, 2)).detach(), "algebra")
    inputs = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    gradient = torch.einsum("btk,btd->bd", model(x).exp().detach(), inputs)
    covariance = counts.snapshot().precision().solve(torch.eye(3, dtype=torch.float64))
    assert_close(found.std, ((gradient @ covariance) * gradient).sum(1).sqrt(), "backend")


def test_inputs_in_mappings_and_tuples() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network("image")

        def forward(self, image: Tensor, shift: Tensor) -> Tensor:
            return self.net(image + shift)

    (x, y), la = data("image"), fitted()
    shift, mask = torch.zeros(3, 1, 1, 1, dtype=torch.float64), (y != -100)
    expected = totals(la, x, of=1, weights=mask)
    for inputs in ((x, shift), {"image": x, "shift": shift}):
        other = Laplace(Two(), "classification", "last_layer", "full", prior_precision=PRIOR)
        other.fit([(*inputs, y)] if isinstance(inputs, tuple) else [{**inputs, "labels": y}])
        found = totals(other, inputs, of=1, weights=mask)
        assert_close(found.mean, expected.mean, "algebra")
        assert_close(found.std, expected.std, "backend")


def test_after_calibrate() -> None:
    la, batch = fitted(), data("image")
    before = totals(la, batch[0], of=1)
    with pytest.warns(CalibrationWarning, match="3 data"):
        la.calibrate([batch])
    after = totals(la, batch[0], of=1)
    assert_close(after.mean, before.mean, "algebra")
    with pytest.warns(CalibrationWarning, match="the network itself"):
        assert not torch.allclose(after.std, before.std)


def test_errors_of_held_out_data() -> None:
    la, (x, y) = fitted(), data("image")
    errors = standardised_errors(la, [(x[:1], y[:1]), (x[1:], y[1:])], of=1, weights=0.5)
    found = totals(la, x, of=1, weights=0.5 * (y != -100))
    assert_close(errors, ((0.5 * (y == 1).sum((1, 2)) - found.mean) / found.std).abs(), "algebra")
    low, high = found.interval(0.5, errors)  # the second of three: ⌈4 · 0.5⌉
    assert_close((high - low) / 2, found.std * errors.median(), "algebra")
    assert found.interval(0.95, errors)[1].isinf().all()
    assert_close((found.interval(0.95)[1] - found.mean) / found.std, torch.full((3,), 1.959964), "float32")


def test_a_network_that_calibrate_chose_has_no_width() -> None:
    found = Totals(torch.ones(2), 1e-14 * torch.ones(2, 1, 1), of_network=True)
    with pytest.warns(CalibrationWarning, match="the network itself"):
        found.interval()
    with pytest.warns(CalibrationWarning, match="la.calibration = None"):
        assert_close(found.std, torch.full((2,), 1e-7), "float32")
    low, high = found.interval(0.5, torch.tensor([1e6, 2e6, 3e6]))
    assert_close((high - low) / 2, torch.full((2,), 0.2), "float32")


@pytest.mark.parametrize("of", [3, -1, True, [], [0, 5], 1.5, torch.ones(2), torch.ones(1, 1, 3)])
def test_other_classes_are_refused(of: Any) -> None:
    with pytest.raises(InvalidArgument, match="of="):
        totals(fitted(), data("image")[0], of=of)


def test_bad_input() -> None:
    la, (x, y) = fitted(), data("image")
    with pytest.raises(InvalidData, match="weights have shape"):
        totals(la, x, of=1, weights=torch.ones(3, 5))
    with pytest.raises(InvalidData, match="NaN"):
        totals(la, x, of=1, weights=torch.full(y.shape, torch.nan))
    with pytest.raises(InvalidArgument, match="weights is a str"):
        totals(la, x, of=1, weights="ml")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgument, match="of=<lambda> returns"):
        totals(la, x, of=lambda p: p.sum())
    with pytest.raises(InvalidArgument, match="n_samples"):
        totals(la, x, of=1, n_samples=1)
    with pytest.raises(InvalidArgument, match="level="):
        totals(la, x, of=1).interval(95)
    with pytest.raises(InvalidArgument, match="errors have shape"):
        totals(la, x, of=1).interval(0.9, torch.ones(4, 2))
    with pytest.raises(InvalidData, match="no data"):
        standardised_errors(la, [], of=1)
    with pytest.raises(InvalidData, match="standard deviation of zero"):
        standardised_errors(la, [(x, torch.full_like(y, -100))], of=1)
