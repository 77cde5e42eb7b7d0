"""The Gaussian prior in its three forms against torch.distributions, and what hyper-parameters keep."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal

from laplace.core.hyperparameters import GaussianPrior, Hyperparameters
from laplace.core.layout import Layout

LAYOUT = Layout(("a.weight", "a.bias", "b.weight"), (3, 1, 2))
PRECISIONS = {"scalar": [0.7], "layerwise": [0.7, 2.0, 5.0], "diag": [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]}
DENSE = {"scalar": [0.7] * 6, "layerwise": [0.7, 0.7, 0.7, 2.0, 5.0, 5.0], "diag": PRECISIONS["diag"]}


@pytest.mark.parametrize("form", PRECISIONS)
def test_the_density_is_that_of_independent_normals(form: str) -> None:
    mean, theta = torch.linspace(-1, 1, 6).double(), torch.linspace(2, -3, 6).double()
    prior = GaussianPrior(torch.tensor(PRECISIONS[form]).double(), mean, LAYOUT)
    dense = torch.tensor(DENSE[form]).double()
    assert torch.equal(prior.diagonal(), dense)
    assert (prior.is_scalar, prior.is_constant_per_tensor) == (form == "scalar", form != "diag")
    expected = Normal(mean, dense.rsqrt()).log_prob(theta).sum()
    constant = 6 * torch.log(torch.tensor(2 * torch.pi).double())
    torch.testing.assert_close(0.5 * (prior.logdet() - prior.quad(theta) - constant), expected)
    for part, own in zip(prior.per_block(), LAYOUT.split(dense), strict=True):
        assert torch.equal(part.expand(len(own)), own)


def test_one_entry_per_tensor_is_constant_per_tensor() -> None:
    layout = Layout(("a", "b"), (1, 1))
    assert GaussianPrior(torch.tensor([1.0, 2.0]), torch.zeros(()), layout).is_constant_per_tensor


def test_values_keep_their_graph_until_they_are_detached() -> None:
    hypers = Hyperparameters.unit(torch.zeros(2).double())
    assert (hypers.dtype, hypers.prior_precision.shape, hypers.requires_grad) == (torch.float64, (1,), False)
    prior = torch.ones(1, requires_grad=True)
    own = Hyperparameters(prior, *list(hypers.state().values())[1:])
    assert own.requires_grad and not own.detached("prior_precision").requires_grad and not own.detached().requires_grad
    assert own.moved(None, torch.float32).sigma_noise.dtype == torch.float32
    again = Hyperparameters.from_state(own.detached().state(), torch.device("cpu"))
    assert all(torch.equal(value, again.state()[name]) for name, value in own.state().items())
