"""The last layer: the head on fixed features, also where its weight is tied to the trunk's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import ApproximationWarning
from tests.problems import get
from tests.reference.compare import assert_close
from tests.reference.curvature import output_hessian


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_a_tied_head_is_random_in_the_head_alone(pred_type: str) -> None:
    problem = get("tied_head")
    model = problem.make_model()
    la = Laplace(model, problem.likelihood, "last_layer", "full", last_layer_name=problem.head)
    la.fit(problem.batches(3))
    assert all(rule.startswith("linear") for rule in la.coverage().values())
    head = model.get_submodule(str(problem.head))
    seen: list[torch.Tensor] = []
    handle = head.register_forward_hook(lambda module, args, output: seen.append(args[0].detach()))
    f = model(problem.x).detach()
    handle.remove()
    curvature = output_hessian(f, problem.likelihood, problem.y)
    jacobian = torch.einsum("cd,bi->bcdi", torch.eye(f.shape[1], dtype=f.dtype), seen[0]).flatten(2)
    if jacobian.shape[2] < la.H.shape[0]:
        jacobian = torch.cat([jacobian, torch.eye(f.shape[1], dtype=f.dtype).expand(len(f), -1, -1)], 2)
    assert_close(la.H, torch.einsum("bcp,bcd,bdq->pq", jacobian, curvature, jacobian), "backend")
    samples = la.functional_samples(problem.x, pred_type, n_samples=4000, generator=torch.Generator().manual_seed(0))
    variance = torch.einsum("bcp,pq,bcq->bc", jacobian, la.posterior_covariance, jacobian)
    assert_close(samples.mean(0), f, "mc", standard_error=(variance / 4000).sqrt())


def test_a_trunk_that_mixes_the_data_of_a_batch_is_warned_of() -> None:
    trunk = [nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Tanh()]
    la = Laplace(nn.Sequential(*trunk, nn.Linear(6, 3)), "classification")
    with pytest.warns(ApproximationWarning, match="'1' normalises by the batch"):
        la.fit([(torch.randn(8, 4), torch.randint(0, 3, (8,)))])
