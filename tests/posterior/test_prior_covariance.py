"""A prior with a covariance per layer, in the coordinates of docs/mathematics.md, against dense algebra."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace

_PAGE = Path(__file__).parents[2] / "docs" / "mathematics.md"
DELTA = 0.7


@pytest.fixture(scope="module")
def with_prior_covariance() -> Callable[[nn.Linear, Tensor, Tensor], nn.Sequential]:
    """The function of the page."""
    examples = re.findall(r"^```python\n(.*?)^```$", _PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (code,) = (example for example in examples if "def with_prior_covariance" in example)
    namespace: dict[str, Callable[[nn.Linear, Tensor, Tensor], nn.Sequential]] = {}
    exec(code, namespace)
    return namespace["with_prior_covariance"]


def covariance(n: int, seed: int) -> Tensor:
    root = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T + torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_coordinates_give_the_prior_its_covariance(
    structure: str, with_prior_covariance: Callable[[nn.Linear, Tensor, Tensor], nn.Sequential]
) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=g, dtype=torch.float64), torch.randint(3, (40,), generator=g)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    outputs, inputs = covariance(4, 1), covariance(5, 2)
    same = nn.Sequential(with_prior_covariance(net[0], outputs, inputs), *net[1:])  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(same(x), net(x), rtol=1e-12, atol=1e-12)

    loader = DataLoader(TensorDataset(x, y), 20)
    plain, la = (Laplace(model, "classification", "all", structure, prior_precision=DELTA) for model in (net, same))
    plain.fit(loader)
    la.fit(loader)
    if structure == "kron":
        assert la.coverage()["0.1.weight"] == "linear → Kronecker factors"

    theta = nn.utils.parameters_to_vector(net.parameters()).detach()
    others = torch.eye(len(theta) - 20, dtype=torch.float64)
    prior = DELTA * torch.block_diag(torch.linalg.inv(torch.kron(outputs, inputs)), others)
    precision = plain.posterior().to_dense() - DELTA * torch.eye(len(theta), dtype=torch.float64) + prior
    jacobians = jacrev(lambda parameters: functional_call(net, parameters, (x,)))(dict(net.named_parameters()))
    jacobian = torch.cat([part.flatten(2) for part in jacobians.values()], 2).detach()
    variance = jacobian @ torch.linalg.inv(precision) @ jacobian.mT
    torch.testing.assert_close(la.predict(x).latent_covariance, variance, rtol=1e-8, atol=1e-10)
    ratio = torch.logdet(precision) - torch.logdet(prior) + theta @ prior @ theta
    torch.testing.assert_close(la.log_marginal_likelihood(), plain.log_likelihood - 0.5 * ratio, rtol=1e-8, atol=1e-8)
