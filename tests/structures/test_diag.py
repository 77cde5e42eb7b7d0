"""Diagonal curvature of a linear regression: the diagonal of the dense precision, and nothing else."""

from __future__ import annotations

import torch

from tests.structures.test_full import fitted


def test_precision_variances_and_evidence_are_those_of_the_diagonal() -> None:
    la, precision, _ = fitted("diag")
    full, _, _ = fitted("full")
    diagonal = precision.diagonal()
    torch.testing.assert_close(la.posterior_precision, diagonal)
    torch.testing.assert_close(la.posterior_variance, 1 / diagonal)
    x = torch.randn(2, 3).double()
    rows = torch.cat([x, torch.ones(2, 1).double()], 1)
    torch.testing.assert_close(la(x)[1].flatten(), rows.square() @ (1 / diagonal))
    # Evidences differ by half the log determinants alone: Hadamard's inequality.
    assert la.log_marginal_likelihood() < full.log_marginal_likelihood()
