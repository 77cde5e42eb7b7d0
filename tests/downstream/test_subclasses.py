"""Classes of one's own, derived from the library's, whose methods mean what they say."""

from __future__ import annotations

import pytest
import torch

from laplace import BaseLaplace, FullLaplace, ParametricLaplace
from laplace.errors import UnsupportedError
from tests.downstream.problems import Truth, classes, loader, network, new_inputs, numbers
from tests.reference import evidence
from tests.reference.compare import assert_close

# The classes are made by functions: one that is refused is refused when it is made.


def stable() -> type:
    class Stable(FullLaplace):
        def functional_variance(self, Js):
            return 7 + 0 * Js @ Js.mT

    return Stable


def doubled() -> type:
    class Doubled(FullLaplace):
        @property
        def log_likelihood(self):
            return 2 * super().log_likelihood

    return Doubled


def shifted() -> type:
    class Shifted(FullLaplace):
        def sample(self, n_samples=100, generator=None):
            return torch.zeros(n_samples, self.n_params, dtype=torch.float64)

    return Shifted


def test_public_methods_that_are_overridden_are_honoured() -> None:
    model, (x, y), new = network(n_out=1), numbers(), new_inputs()
    truth, data = Truth(model, x, y, "regression"), loader(x, y)
    one, two, three = (cls(model, "regression") for cls in (stable(), doubled(), shifted()))
    for la in (one, two, three):
        la.fit(data)
    assert_close(one(new)[1], torch.full((6, 1, 1), 7.0), "exact")
    log_likelihood = evidence.log_likelihood(truth.loss, truth.n_data, truth.n_outputs)
    assert_close(two.log_marginal_likelihood(), truth.log_evidence + log_likelihood, "backend")
    mean, variance = three(new, pred_type="nn", link_approx="mc", n_samples=3)
    assert_close(mean, torch.zeros(6, 1), "exact")
    assert_close(variance, torch.zeros(6, 1), "exact")


def test_hooks_that_are_overridden_are_honoured_or_refused() -> None:
    model, (x, y) = network(), classes()
    try:

        class Constant(FullLaplace):
            def _curv_closure(self, X, y, N):
                return torch.zeros((), dtype=X.dtype), 5 * torch.eye(self.n_params, dtype=X.dtype) * len(X) / N

    except UnsupportedError as error:
        assert "_curv_closure" in str(error)
        return
    la = Constant(model, "classification")
    la.fit(loader(x, y))
    assert_close(la.H, 5 * torch.eye(la.n_params), "algebra")
    assert_close(la.posterior_variance, torch.full((la.n_params,), 1 / 6, dtype=x.dtype), "algebra")


def own() -> type:
    class Own(BaseLaplace):
        """The prior's predictive, written from the base that is documented for it."""

        def fit(self, train_loader, override=True, progress_bar=False):
            self.n_seen = sum(len(y) for _, y in train_loader)

        def __call__(self, x, pred_type="glm", **options):
            f = self.model(x).detach()
            return f, torch.diag_embed((1 / self.prior_precision).expand_as(f))

    return Own


def test_the_documented_base_of_all_classes() -> None:
    model, (x, y), new = network(n_out=2), numbers(2), new_inputs()
    la = own()(model, "regression", prior_precision=4.0)
    la.fit(loader(x, y))
    assert la.n_seen == len(x)
    la.prior_precision = 2.0
    mean, variance = la.predictive(new, "glm", "mc", 3)
    assert_close(mean, model(new), "exact")
    assert_close(variance, 0.5 * torch.eye(2).expand(6, 2, 2), "exact")
    with pytest.raises(ValueError, match="prior_precision"):
        la.prior_precision = -1.0


def isotropic() -> type:
    class Isotropic(ParametricLaplace):
        """A curvature h·I with h the mean of the diagonal, by the hooks that are documented for it."""

        def _init_H(self):
            self.H = torch.zeros(1, dtype=torch.float64)

        def _curv_closure(self, X, y, N):
            loss, diagonal = self.backend.diag(X, y, N=N)
            return loss, diagonal.mean().reshape(1)

        @property
        def posterior_precision(self):
            return (self._H_factor * self.H + self.prior_precision).expand(self.n_params)

        @property
        def log_det_posterior_precision(self):
            return self.posterior_precision.log().sum()

        def square_norm(self, value):
            return ((value - self.mean).square() * self.posterior_precision).sum(-1)

        def functional_variance(self, Js):
            return (Js / self.posterior_precision) @ Js.mT

        def functional_covariance(self, Js):
            rows = Js.flatten(0, 1)
            return (rows / self.posterior_precision) @ rows.T

        def sample(self, n_samples=100, generator=None):
            noise = torch.randn(n_samples, self.n_params, dtype=torch.float64, generator=generator)
            return self.mean + noise * self.posterior_precision.rsqrt()

    return Isotropic


def test_the_documented_base_of_weight_space() -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    la = isotropic()(model, "classification")
    la.fit(loader(x, y))
    truth = Truth(model, x, y, "classification")
    truth.H = truth.H.trace() / la.n_params * torch.eye(la.n_params, dtype=x.dtype)
    assert_close(la(new), truth.probit(new), "backend")
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")
    normal = torch.distributions.MultivariateNormal(truth.mean, precision_matrix=truth.precision)
    assert_close(la.log_prob(0 * truth.mean), normal.log_prob(0 * truth.mean), "backend")
