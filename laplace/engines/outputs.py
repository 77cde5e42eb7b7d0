"""Outputs of the network at the weights of a fit, without Jacobians."""

from __future__ import annotations

import torch

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import require, where_not_finite
from laplace.core.positions import OutputRows
from laplace.engines.engine import CurvatureEngine, detached
from laplace.errors import InvalidData
from laplace.network.model_guard import preserve_model


def outputs(engine: CurvatureEngine, x: Inputs, *, create_graph: bool = False) -> OutputRows:
    """f(x, θ*), `[B, C]`, by one forward pass.

    Args:
        engine: Knows the network and the parameters.
        x: Inputs.
        create_graph: Keep the graph that leads to `x`.

    Raises:
        InvalidData: Outputs that are not finite.
    """
    problem = engine.problem
    x = batches.to_device(x, problem.device)
    with preserve_model(problem.module):
        f = problem.run(problem.detached(), x if create_graph else detached(x))
    rows = OutputRows.of(f.to(torch.promote_types(f.dtype, torch.float32)))
    require(
        rows.values.isfinite(),
        lambda: InvalidData(
            f"the network's outputs are NaN or infinite{where_not_finite(rows.values)}; look at the inputs and at the "
            "network's weights."
        ),
    )
    return rows
