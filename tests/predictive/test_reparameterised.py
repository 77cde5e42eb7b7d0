"""Noise on pre-activations against sampled weights: the same distribution of every datum's outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import UnsupportedError
from tests import grid
from tests import problems as catalogue
from tests.conformance.cases import Case
from tests.network.test_manners import picture
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Without positions the outputs of a datum have exactly the distribution that sampled weights give.
# A layer that is called twice is no layer with noise: it takes one sample of its weights.
@pytest.mark.parametrize(
    ("name", "weights"),
    [("mlp_classification", "random"), ("layer_norm", "all"), ("frozen_bias", "last_layer"), ("reused_module", "all")],
)
def test_moments_are_those_of_sampled_weights(name: str, weights: str) -> None:
    la = Case(catalogue.get(name), "diag", weights).fit(prior_precision=5.0)
    x, n = catalogue.get(name).x, 500
    found = la.predict(x, "nn", n_samples=n, generator=seeded(), local_reparameterization=True).latent_samples
    expected = la.functional_samples(x, "nn", n, generator=seeded(1))
    error = ((found.var(0) + expected.var(0)) / n).sqrt()
    assert_close(found.mean(0), expected.mean(0), "mc", standard_error=error, label="mean")
    fourth = (found - found.mean(0)).pow(4).mean(0) + (expected - expected.mean(0)).pow(4).mean(0)
    assert_close(found.var(0), expected.var(0), "mc", standard_error=(fourth / n).sqrt(), label="variance")


class OnePosition(nn.Module):
    """A convolution whose output has one position, so that nothing is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, groups=2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x)).flatten(1))


def test_convolutions() -> None:
    torch.manual_seed(0)
    model = OnePosition()
    x, y, n = torch.randn(6, 2, 3, 3), torch.randint(2, (6,)), 600
    la = Laplace(model, "classification", "all", "diag", prior_precision=5.0)
    la.fit([(x, y)])
    before = picture(model)
    prediction = la.predict(x, "nn", n_samples=n, generator=seeded(), local_reparameterization=True)
    found, expected = prediction.latent_samples, la.functional_samples(x, "nn", n, generator=seeded(1))
    assert picture(model).keys() == before.keys()
    assert all(torch.equal(picture(model)[k], v) for k, v in before.items() if isinstance(v, Tensor))
    error = ((found.var(0) + expected.var(0)) / n).sqrt()
    assert_close(found.mean(0), expected.mean(0), "mc", standard_error=error)
    fourth = (found - found.mean(0)).pow(4).mean(0) + (expected - expected.mean(0)).pow(4).mean(0)
    assert_close(found.var(0), expected.var(0), "mc", standard_error=(fourth / n).sqrt())
    # data do not share their noise, as they do with sampled weights
    same = la.predict(x[:1].repeat(2, 1, 1, 1), "nn", n_samples=2, generator=seeded(), local_reparameterization=True)
    assert not torch.equal(same.latent_samples[:, 0], same.latent_samples[:, 1])
    again = la.predict(x, "nn", n_samples=n, generator=seeded(), local_reparameterization=True)
    assert torch.equal(again.latent_samples, found)


def test_what_it_cannot_do_is_refused() -> None:
    x = grid.data()[0]
    for structure, pred_type in (("kron", "nn"), ("diag", "glm")):
        la = Laplace(grid.network(), "classification", "all", structure)
        la.fit(grid.batches())
        with pytest.raises(UnsupportedError, match="diag"):
            la.predict(x, pred_type, local_reparameterization=True)


class Repeated(nn.Module):
    """Calls a layer once, for more than eight data twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 if len(x) <= 8 else 2):
            x = torch.tanh(self.inner(x))
        return self.head(x)


def test_a_layer_that_is_called_again_is_refused() -> None:
    model, (x, y) = Repeated(), grid.data()
    la = Laplace(model, "classification", "all", "diag")
    la.fit(list(zip(x.split(4), (y % 2).split(4), strict=True)))
    with pytest.raises(UnsupportedError, match="'inner' is called 2 times"):
        _ = la.predict(x, "nn", local_reparameterization=True).mean
