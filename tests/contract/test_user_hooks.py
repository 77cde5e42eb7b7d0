"""Users' own methods take effect wherever the library needs what they compute; what would be ignored is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import (
    BaseLaplace,
    DiagLaplace,
    FullLaplace,
    FullLLLaplace,
    FunctionalLaplace,
    KronLaplace,
    LowRankLaplace,
    MixtureLaplace,
    ParametricLaplace,
)
from laplace.core.overrides import MOMENTS
from laplace.curvature import NativeGGN
from laplace.curvature.interface import GGNInterface
from laplace.errors import InvalidArgument, LaplaceError, ReadOnlyError, TuningWarning, UnsupportedError
from tests import problems as catalogue
from tests.conformance.cases import Case, few
from tests.reference.compare import assert_close

PROBLEM = catalogue.get("mlp_regression")
X = PROBLEM.x


def fitted(cls: Any, problem: catalogue.Problem = PROBLEM, **options: Any) -> Any:
    la = cls(problem.make_model(), problem.likelihood, **options)
    la.fit(problem.batches(4))
    return la


def derived(case: Case, **members: Any) -> ParametricLaplace:
    """A fitted posterior whose class is a user's."""
    la = case.fit()
    cls = type(la)
    la.__class__ = type(f"Users{cls.__name__}", (cls,), members)
    return la


def scaled(name: str, factor: float) -> dict[str, Any]:
    """A property that is that of the library times a factor."""

    def own(self: Any) -> Any:
        return factor * getattr(super(type(self), self), name)

    return {name: property(own)}


class Constant(FullLaplace):
    def functional_variance(self, Js: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert isinstance(Js, Tensor) and Js.shape[1:] == (2, self.n_params)
        return 7 * torch.eye(2, dtype=Js.dtype).expand(len(Js), 2, 2)


# Covariances.


def test_functional_variance_is_that_of_every_prediction() -> None:
    la, sevens = fitted(Constant), torch.full((len(X), 2), 7.0, dtype=torch.float64)
    assert torch.equal(la(X)[1].diagonal(dim1=1, dim2=2), sevens)
    assert torch.equal(la(X, diagonal_output=True)[1], sevens)
    assert torch.equal(la.functional_variance_fast(X)[1], sevens)
    assert torch.equal(la.predict(X).latent_variance, sevens)
    assert torch.equal(la.predict(X).variance, sevens + 1)
    samples = la.functional_samples(X, n_samples=4000, generator=torch.Generator().manual_seed(0))
    assert_close(samples.var(0), sevens, "mc", standard_error=7 * (2 / 4000) ** 0.5)
    mixture = MixtureLaplace([la, fitted(Constant)])
    assert_close(mixture(X, diagonal_output=True)[1], sevens, "algebra")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_regression"]))
def test_covariances_with_the_library_s_own_in_them(case: Case) -> None:
    def twice(name: str) -> Callable[[Any, Tensor], Tensor]:
        return lambda self, Js: 2 * getattr(super(type(self), self), name)(Js)

    plain = case.fit()
    one = derived(case, functional_variance=twice("functional_variance"))
    assert_close(one(X)[1], 2 * plain(X)[1], "algebra")
    assert_close(one(X, joint=True)[1], plain(X, joint=True)[1], "algebra", label="another method")
    other = derived(case, functional_covariance=twice("functional_covariance"))
    assert_close(other(X, joint=True)[1], 2 * plain(X, joint=True)[1], "algebra")
    assert_close(other(X)[1], plain(X)[1], "algebra", label="another method")


def test_functional_variance_fast() -> None:
    class Fast(KronLaplace):
        def functional_variance_fast(self, X: Any) -> tuple[Tensor, Tensor]:
            mean, variance = super().functional_variance_fast(X)
            return mean + 1, 3 * variance

    la, plain = fitted(Fast), fitted(KronLaplace)
    mean, variance = plain(X, diagonal_output=True)
    assert_close(la(X, diagonal_output=True)[1], 3 * variance, "algebra")
    assert_close(la.predict(X, diagonal_output=True).latent.mean, mean + 1, "algebra")
    assert_close(la(X)[1], plain(X)[1], "algebra", label="another method")


def test_what_a_method_gives_is_checked() -> None:
    for method, error in ((lambda la, Js: Js, r"a tensor of shape .* \["), (lambda la, Js: None, "a NoneType")):
        la = fitted(type("Own", (FullLaplace,), {"functional_variance": method}))
        with pytest.raises(InvalidArgument, match=f"functional_variance of class Own gave {error}"):
            la(X)


def test_a_prediction_is_that_of_its_call() -> None:
    """Quantities that are read after a prior was assigned are of the prior at the time of the call."""

    class Own(DiagLaplace):
        def functional_variance(self, Js: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().functional_variance(Js)

    la, plain = fitted(Own), fitted(DiagLaplace)
    prediction = la.predict(X)
    la.prior_precision = 100.0
    assert_close(prediction.latent_variance, plain.predict(X).latent_variance, "algebra")


# Moments.


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_regression"]))
def test_prior_precision_diag(case: Case) -> None:
    """The prior of everything that follows: predictions, samples, evidence."""
    la, plain = derived(case, **scaled("prior_precision_diag", 3.0)), case.fit(prior_precision=3.0)
    assert_close(la(X)[1], plain(X)[1], "backend")
    assert_close(la(X, joint=True)[1], plain(X, joint=True)[1], "backend")
    assert_close(la.posterior_variance, plain.posterior_variance, "backend")
    assert_close(la.log_marginal_likelihood(), plain.log_marginal_likelihood(), "backend")
    assert_close(la.log_marginal_likelihood(2.0), plain.log_marginal_likelihood(6.0), "backend")
    assert_close(la.prior.quad(la.mean), plain.scatter, "backend")
    la.prior_precision, plain.prior_precision = 0.2, 0.6
    assert_close(la(X)[1], plain(X)[1], "backend", label="assigned anew")


OWN = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
"""What users' methods below are differentiable in."""


def own_factor(name: str) -> dict[str, Any]:
    """A property, or a covariance of outputs, that is that of the library times `OWN`."""
    if not name.startswith("functional"):
        return {name: property(lambda self: OWN * getattr(super(type(self), self), name))}
    return {name: lambda self, Js: OWN * getattr(super(type(self), self), name)(Js)}


@pytest.mark.parametrize(
    ("name", "joint"),
    [
        ("prior_precision_diag", False),
        ("prior_precision_diag", True),
        ("posterior_precision", False),
        ("posterior_scale", True),
        ("posterior_covariance", False),
        ("functional_variance", False),
        ("functional_covariance", True),
    ],
)
def test_gradients_of_what_users_own_methods_compute_from(name: str, joint: bool) -> None:
    """Predictions and samples are differentiable in it, as in the library's own hyper-parameters."""
    la = derived(Case(PROBLEM, "full", "all"), **own_factor(name))

    def read() -> Tensor:
        drawn = la.sample(2, generator=torch.Generator().manual_seed(3)) if name in MOMENTS else OWN
        return la(X[:3], joint=joint)[1].square().sum() + drawn.square().sum()

    (found,) = torch.autograd.grad(read(), OWN)
    sides: list[Tensor] = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            OWN.add_(step)
            sides.append(read())
    with torch.no_grad():
        OWN.add_(1e-5)
        assert not la(X[:3])[1].requires_grad
    assert_close(found, (sides[0] - sides[1]) / 2e-5, "finite_difference")


def test_covariances_of_a_given_posterior_are_summed_as_wide_as_the_library_s() -> None:
    """Where samples are to be drawn, by one root of whatever precision."""
    la = type("Scaled", (FullLaplace,), scaled("posterior_scale", 2.0))(PROBLEM.make_model().float(), "regression")
    la.fit([(x.float(), y.float()) for x, y in PROBLEM.batches(4)])
    jacobian, _ = next(la.engine.jacobian(X[:3].float()))
    rows = jacobian.dense().double().flatten(0, 1) @ la.posterior_scale.double()
    exact, precision, wide = rows @ rows.T, la.predictive_posterior(), replace(jacobian, wide=True)
    blocks = torch.stack([exact.view(3, 2, 3, 2)[i, :, i] for i in range(3)])
    for found, expected in (
        (precision.variance(wide, "joint"), exact),
        (precision.variance(wide, "full"), blocks),
    ):
        assert found.dtype == torch.float64
        assert_close(found, expected, "float32")


@pytest.mark.parametrize("cls", [FullLaplace, DiagLaplace, KronLaplace, LowRankLaplace])
def test_posterior_precision(cls: Any) -> None:
    """Twice the precision: half the covariance, and log det P larger by P log 2."""
    plain = fitted(cls)
    P = plain.posterior().to_dense()

    def twice(self: Any) -> Tensor:
        return 2 * (P.diagonal() if cls is DiagLaplace else P)

    la = fitted(type("Own", (cls,), {"posterior_precision": property(twice)}))
    n = la.n_params * torch.tensor(2.0, dtype=torch.float64).log()
    assert_close(la(X)[1], plain(X)[1] / 2, "backend")
    assert_close(la(X, joint=True)[1], plain(X, joint=True)[1] / 2, "backend")
    assert_close(la.posterior_covariance, plain.posterior_covariance / 2, "backend")
    assert_close(la.posterior_variance, plain.posterior_variance / 2, "backend")
    assert_close(la.square_norm(la.mean + 1), 2 * plain.square_norm(la.mean + 1), "backend")
    assert_close(la.log_det_posterior_precision, plain.log_det_posterior_precision + n, "backend")
    assert_close(la.log_marginal_likelihood(), plain.log_marginal_likelihood() - 0.5 * n, "backend")
    assert_close(la.log_prob(la.mean), plain.log_prob(la.mean) + 0.5 * n, "backend")
    samples = la.sample(20000, generator=torch.Generator().manual_seed(0))
    error = plain.posterior_variance / 2 * (2 / 20000) ** 0.5
    assert_close(samples.var(0), plain.posterior_variance / 2, "mc", standard_error=error)


def test_the_library_s_posterior_precision_as_it_is() -> None:
    for cls in (FullLaplace, DiagLaplace, KronLaplace, LowRankLaplace):
        own = type(
            "Own",
            (cls,),
            {"posterior_precision": property(lambda self, cls=cls: super(type(self), self).posterior_precision)},
        )
        assert_close(fitted(own)(X)[1], fitted(cls)(X)[1], "backend", label=cls.__name__)


@pytest.mark.parametrize("cls", [FullLaplace, KronLaplace, DiagLaplace])
def test_scale_and_covariance(cls: Any) -> None:
    plain = fitted(cls)
    scale, covariance = (
        fitted(type("Own", (cls,), scaled(name, 2.0))) for name in ("posterior_scale", "posterior_covariance")
    )
    assert_close(scale(X)[1], 4 * plain(X)[1], "backend")
    assert_close(scale.posterior_covariance, 4 * plain.posterior_covariance, "backend")
    assert_close(scale.sample(3, torch.Generator().manual_seed(0)) - scale.mean,
                 2 * (plain.sample(3, torch.Generator().manual_seed(0)) - plain.mean), "backend")  # fmt: skip
    assert_close(covariance(X)[1], 2 * plain(X)[1], "backend")
    assert_close(covariance.posterior_variance, 2 * plain.posterior_variance, "backend")
    assert_close(covariance.log_marginal_likelihood(), plain.log_marginal_likelihood(), "algebra", label="evidence")


def test_variances_of_a_diagonal_posterior() -> None:
    la, plain = fitted(type("Own", (DiagLaplace,), scaled("posterior_variance", 2.0))), fitted(DiagLaplace)
    assert_close(la(X)[1], 2 * plain(X)[1], "backend")


# Samples.


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_regression"], structures=["diag"]))
def test_sample_is_what_sampled_predictions_draw(case: Case) -> None:
    def sample(self: Any, n_samples: int = 100) -> Tensor:
        return super(type(self), self).sample(1).mul(0).repeat(n_samples, 1)

    la = derived(case, sample=sample)
    zeros = torch.zeros(len(case.columns), dtype=torch.float64)
    problem = la.problem
    expected = problem.run(problem.substituted(zeros), X)
    assert_close(la(X, pred_type="nn", n_samples=2)[0], expected, "backend")
    assert_close(la.predict(X, pred_type="nn", n_samples=2).latent_mean, expected, "backend")
    assert_close(MixtureLaplace([la])(X, pred_type="nn", n_samples=2)[0], expected, "backend")


def test_samples_without_a_generator_follow_one_all_the_same() -> None:
    class Own(DiagLaplace):
        def sample(self, n_samples: int = 100) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.mean + torch.randn(n_samples, len(self.mean), dtype=torch.float64)

    la = fitted(Own)
    before = torch.random.get_rng_state()
    first, second = (la(X, "nn", n_samples=3, generator=torch.Generator().manual_seed(1))[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(before, torch.random.get_rng_state())


def test_functional_and_predictive_samples() -> None:
    problem = catalogue.get("mlp_classification")

    class Latents(KronLaplace):
        def functional_samples(self, x: Any, pred_type: Any = "glm", n_samples: int = 100) -> Tensor:  # pyright: ignore
            f = torch.zeros(n_samples, len(x), self.n_outputs, dtype=torch.float64)
            f[..., 0] = 2.0 if pred_type == "glm" else 3.0
            return f

    la, link = fitted(Latents, problem), torch.tensor([2.0] + [0.0] * (fitted(Latents, problem).n_outputs - 1)).double()
    expected = link.softmax(0).expand(len(problem.x), -1)
    assert_close(la(problem.x, link_approx="mc"), expected, "algebra")
    assert_close(la.predictive_samples(problem.x, n_samples=2)[0], expected, "algebra")
    assert_close(la.predict(problem.x).latent_samples[0, 0], link, "algebra")
    assert_close(la(problem.x, pred_type="nn")[0], (1.5 * link).softmax(0), "algebra")

    class Targets(KronLaplace):
        def predictive_samples(self, *args: Any, **options: Any) -> Tensor:
            return super().predictive_samples(*args, **options) * 0 + 0.25

    la = fitted(Targets, problem)
    assert bool((la(problem.x, link_approx="mc") == 0.25).all())
    assert bool((la.predict(problem.x).probability_samples == 0.25).all())


# Evidence.


@pytest.mark.parametrize(
    ("name", "share"), [("log_likelihood", 1.0), ("scatter", -0.5), ("log_det_ratio", -0.5),
                        ("log_det_posterior_precision", -0.5), ("log_det_prior_precision", 0.5)],
)  # fmt: skip
def test_terms_of_the_evidence(name: str, share: float) -> None:
    def own(self: Any) -> Tensor:
        return getattr(super(type(self), self), name) + 10 * self.prior_precision.log().sum()

    la = fitted(type("Own", (FullLaplace,), {name: property(own)}))
    plain = fitted(FullLaplace)

    def expected(prior: float) -> Tensor:
        return plain.log_marginal_likelihood(prior) + share * 10 * torch.tensor(prior).double().log()

    assert_close(la.log_marginal_likelihood(2.0), expected(2.0), "algebra")
    assert_close(la.marglik(3.0), expected(3.0), "algebra")
    la.prior_precision = 1.0
    found = la.optimize_hyperparameters().prior_precision.item()
    values = [expected(found * factor) for factor in (0.9, 1.0, 1.1)]
    assert max(values) == values[1], "tuning climbs another function"
    mixture = MixtureLaplace([la, plain], weights="evidence")
    la.prior_precision = plain.prior_precision = 2.0
    odds = share * 10 * torch.tensor(2.0).double().log()
    assert_close(mixture.weights.log().diff(), -odds.unsqueeze(0), "backend")


def test_log_marginal_likelihood_is_what_tuning_calls() -> None:
    class Own(FullLaplace):
        def log_marginal_likelihood(self, prior_precision: Any = None, sigma_noise: Any = None) -> Tensor:
            super().log_marginal_likelihood(prior_precision, sigma_noise)
            return -(self.prior_precision.log() - 1).square().sum()

    la = fitted(Own)
    la.optimize_hyperparameters()
    assert_close(la.prior_precision.log(), torch.ones(1), "float32")
    la.optimize_prior_precision(n_steps=200)
    assert abs(la.prior_precision.log().item() - 1) < 0.05


def test_setters_of_hyper_parameters() -> None:
    """Where users assign, in the constructor, and by the arguments of the evidence, which a failure leaves alone."""

    class Floored(FullLaplace):
        @property
        def prior_precision(self) -> Tensor:
            return super().prior_precision

        @prior_precision.setter
        def prior_precision(self, value: Any) -> None:
            value = torch.as_tensor(value).clamp(min=0.5)
            FullLaplace.prior_precision.__set__(self, value)  # pyright: ignore[reportAttributeAccessIssue]

    la, plain = fitted(Floored, prior_precision=0.1), fitted(FullLaplace, prior_precision=0.5)
    assert_close(la.prior_precision, plain.prior_precision, "exact")
    assert_close(la(X)[1], plain(X)[1], "exact")
    value = la.log_marginal_likelihood(prior_precision=torch.tensor(0.2))
    assert_close(value, plain.log_marginal_likelihood(), "exact")
    la.prior_precision = 3.0
    with pytest.raises(InvalidArgument):
        la.log_marginal_likelihood(prior_precision=2.0, sigma_noise=-1.0)
    assert la.prior_precision.item() == 3


@pytest.mark.parametrize("name", ["forward_fn", "likelihood_object"])
def test_what_is_fixed_says_where_it_is_given(name: str) -> None:
    with pytest.raises(ReadOnlyError, match="to the constructor"):
        setattr(fitted(FullLaplace), name, None)


def test_loss_and_number_of_data() -> None:
    class Own(DiagLaplace):
        @property
        def loss(self) -> Any:
            return 2 * super().loss

        @property
        def n_data(self) -> float:
            return 2 * super().n_data

    assert_close(fitted(Own).log_likelihood, 2 * fitted(DiagLaplace).log_likelihood, "algebra")


def test_curvature() -> None:
    for cls in (FullLaplace, DiagLaplace):
        la, plain = fitted(type("Own", (cls,), scaled("H", 2.0))), fitted(cls, temperature=0.5)
        assert_close(la(X)[1], plain(X)[1], "backend")
    with pytest.raises(UnsupportedError, match="override posterior_precision"):
        fitted(type("Own", (KronLaplace,), {"H": property(lambda self: 3)}))(X)


# Tuning on validation data.


@pytest.mark.parametrize("method", ["grid", "lbfgs"])
@pytest.mark.parametrize("problem", ["mlp_regression", "mlp_classification"])
def test_tuning_sees_what_is_overridden(problem: str, method: str) -> None:
    """A prior of 3 δ, and covariances of a likelihood with temperature 2, by overriding and by assigning."""
    case = Case(catalogue.get(problem), "kron", "all")

    def half(self: Any, Js: Tensor) -> Tensor:
        return super(type(self), self).functional_variance(Js) / 2

    def tuned(la: ParametricLaplace, values: list[float]) -> Any:
        grid = {"grid": {"prior_precision": values}} if method == "grid" else {}
        data = case.problem.batches(3)
        warnings.simplefilter("ignore", TuningWarning)  # the best value may lie anywhere
        return la.optimize_hyperparameters(objective="nll", method=method, val_loader=data, **grid)

    own, plain = derived(case, **scaled("prior_precision_diag", 3.0)), case.fit(prior_precision=3.0)
    kind = "backend" if method == "grid" else "float32"
    assert_close(tuned(own, [0.1, 0.2, 0.4]).values[:3], tuned(plain, [0.3, 0.6, 1.2]).values[:3], kind)
    # J (H / T + δ)⁻¹ Jᵀ / 2 = J (H / (T/2) + 2 δ)⁻¹ Jᵀ
    own, plain = derived(case, functional_variance=half), case.fit(temperature=0.5, prior_precision=2.0)
    assert_close(tuned(own, [0.1, 0.2, 0.4]).values[:3], tuned(plain, [0.2, 0.4, 0.8]).values[:3], kind)


def test_a_grid_calls_what_predicts_by_itself() -> None:
    problem = catalogue.get("mlp_classification")

    class Own(KronLaplace):
        def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
            wrong = self.prior_precision.log().square()  # a loss that is smallest at δ = 1
            probabilities = torch.full((len(x), self.n_outputs), 1.0).double() * (-wrong).exp()
            return probabilities

    la = fitted(Own, problem)
    values = torch.tensor([0.1, 1.0, 10.0]).double()
    la.optimize_hyperparameters(objective="nll", val_loader=problem.batches(3), grid={"prior_precision": values})
    assert la.prior_precision.item() == 1
    with pytest.raises(InvalidArgument, match="method='grid'"):
        la.optimize_hyperparameters(objective="nll", method="lbfgs", val_loader=problem.batches(3))


def test_a_grid_of_sampled_weights() -> None:
    class Own(DiagLaplace):
        def sample(self, n_samples: int = 100, generator: Any = None) -> Tensor:
            return super().sample(n_samples, generator) * 0 + self.prior_precision

    la = fitted(Own)
    val = PROBLEM.batches(4)
    grid: dict[str, Any] = {"prior_precision": [0.1, 0.5, 2.0]}
    warnings.simplefilter("ignore", TuningWarning)
    result = la.optimize_hyperparameters(
        objective=lambda mean, variance, y: (mean - y).square().mean(), val_loader=val, pred_type="nn", grid=grid,
        n_samples=2,
    )  # fmt: skip
    for prior, value in zip(grid["prior_precision"], result.values, strict=True):
        outputs = la.problem.run(la.problem.substituted(torch.full_like(la.mean, prior)), X)
        assert_close(value, nn.functional.mse_loss(outputs, PROBLEM.y), "backend")


# Objects and classes of the library that are changed.


@pytest.mark.parametrize("name", ["functional_variance", "sample", "_curv_closure", "log_marginal_likelihood"])
def test_functions_in_place_of_methods_that_the_library_calls_are_refused(name: str) -> None:
    la = fitted(FullLaplace)
    with pytest.raises(ReadOnlyError, match=rf"{name} is assigned.*class Mine\(FullLaplace\)"):
        setattr(la, name, lambda *args: None)
    assert name not in vars(la)


def test_a_fit_in_place_of_that_of_an_object() -> None:
    """What users call by themselves, and mixtures call of their components."""
    la = fitted(FullLaplace)
    calls: list[int] = []

    def fit(self: Any, train_loader: Any, override: bool = True, progress_bar: bool = False) -> None:
        calls.append(1)
        FullLaplace.fit(self, train_loader, override, progress_bar)

    la.fit = fit.__get__(la)
    MixtureLaplace([la]).fit(PROBLEM.batches(4))
    assert calls == [1]


def test_classes_of_the_library_that_are_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = 2 * fitted(KronLaplace)(X)[1]
    original = KronLaplace.functional_variance
    monkeypatch.setattr(KronLaplace, "functional_variance", lambda self, Js: 2 * original(self, Js))
    assert_close(fitted(KronLaplace)(X)[1], expected, "algebra")


def test_a_mixin_before_the_library_s_class() -> None:
    class Doubled:
        def functional_variance(self, Js: Tensor) -> Tensor:
            return 2 * super().functional_variance(Js)  # pyright: ignore

    class Own(Doubled, FullLLLaplace): ...

    assert_close(fitted(Own)(X)[1], 2 * fitted(FullLLLaplace)(X)[1], "algebra")


def test_a_posterior_over_functions() -> None:
    class Own(FunctionalLaplace):
        def functional_variance(self, Js: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * super().functional_variance(Js)

    assert_close(fitted(Own, n_subset=5)(X)[1], 2 * fitted(FunctionalLaplace, n_subset=5)(X)[1], "backend")


# What is refused.


def test_classes_without_a_structure() -> None:
    with pytest.raises(TypeError, match="abstract"):
        type("Own", (BaseLaplace,), {})(PROBLEM.make_model(), "regression")
    with pytest.raises(UnsupportedError, match=r"has no structure.*bind one"):
        type("Own", (ParametricLaplace,), {})(PROBLEM.make_model(), "regression")


READ_ONLY = ("posterior_precision", "posterior_covariance", "log_likelihood", "prior_precision_diag", "backend",
             "params", "n_params", "damping")  # fmt: skip


@pytest.mark.parametrize("name", [*READ_ONLY, "_device", "_H_factor", "model", "likelihood", "__call__"])
def test_assignments_without_an_effect_are_refused(name: str) -> None:
    la = fitted(KronLaplace)
    with pytest.raises(ReadOnlyError, match=name) as caught:
        setattr(la, name, torch.ones(3))
    assert isinstance(caught.value, LaplaceError | AttributeError)
    assert name not in vars(la) or name in ("model", "likelihood")


def test_assignments_of_the_same_and_of_what_counts() -> None:
    la = fitted(KronLaplace)
    la.model, la.likelihood = la.model.double(), "regression"
    la.enable_backprop, la.prior_precision, la.sigma_noise = True, 2.0, 0.5
    with pytest.raises(InvalidArgument, match="prior_precision"):
        la.prior_precision = -1.0


def test_properties_of_users_keep_python_s_error() -> None:
    class Own(KronLaplace):
        @property
        def mine(self) -> int:
            return 3

    with pytest.raises(AttributeError, match="mine") as caught:
        fitted(Own).mine = 4  # pyright: ignore[reportAttributeAccessIssue]
    assert not isinstance(caught.value, LaplaceError)


def test_the_loss_of_a_backend() -> None:
    la = fitted(KronLaplace)
    with pytest.raises(ReadOnlyError, match="likelihood object"):
        la.backend.factor = 1.0

    class Own(GGNInterface): ...

    own = Own(PROBLEM.make_model(), "regression")
    own.lossfunc = nn.MSELoss(reduction="sum")
    assert NativeGGN(PROBLEM.make_model(), "regression").factor == 0.5
