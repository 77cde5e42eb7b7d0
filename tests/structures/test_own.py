"""Classes of users that derive from the bases, and choose no structure."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from laplace import BaseLaplace, DiagLaplace, DiagLLLaplace, LLLaplace, ParametricLaplace
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.weights.last_layer import LastLayer
from tests import grid
from tests.reference.compare import assert_close

X, Y = (part.double() for part in grid.data("regression"))


class Prior(BaseLaplace):
    """The prior's variance around the network's outputs."""

    def fit(self, train_loader, override: bool = True, progress_bar: bool = False) -> None:
        self.n_seen = sum(len(y) for _, y in train_loader)

    def __call__(self, x: Tensor, pred_type: str = "glm", **options) -> tuple[Tensor, Tensor]:
        f = self._outputs(x)
        return f, (1 / self.prior_precision).expand_as(f)

    def _outputs(self, x: Tensor) -> Tensor:
        return self.backend.jacobians(x)[1]


class Summed(Prior):
    """A curvature that its own fit sums by hooks, which nobody else calls."""

    def fit(self, train_loader, override: bool = True, progress_bar: bool = False) -> None:
        self._init_H()
        for x, y in train_loader:
            self.diagonal = self.diagonal + self._curv_closure(x, y)

    def _init_H(self) -> None:
        self.diagonal = torch.zeros(self.n_params, dtype=X.dtype)

    def _curv_closure(self, x: Tensor, y: Tensor) -> Tensor:
        return self.backend.diag(x, y)[1]

    def log_marginal_likelihood(self, prior_precision=None, sigma_noise=None) -> Tensor:
        return -self.diagonal.sum()


class OfLastLayer(Prior):
    weights_type = LastLayer


def made(cls: type = Prior, **options):
    la = cls(grid.network("regression").double(), "regression", **options)
    la.fit([(X, Y)])
    return la


def test_a_class_of_two_methods() -> None:
    la = made(prior_precision=4.0, sigma_noise=0.5)
    assert la.n_seen == len(X)
    mean, variance = la.predictive(X, "glm", "mc", 3)
    assert_close(mean, copy.deepcopy(la.model).eval()(X), "algebra")
    assert_close(variance, torch.full_like(mean, 0.25), "exact")
    assert (la.n_params, la.n_layers, la.is_subset_params) == (38, 4, False)
    for again in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        again.prior_precision = 2.0
        assert_close(again(X)[1], torch.full_like(mean, 0.5), "exact")
    assert_close(la(X)[1], variance, "exact")


@pytest.mark.parametrize(("name", "value"), [("prior_precision", -1.0), ("sigma_noise", 0.0), ("temperature", -2.0)])
def test_hyperparameters_are_checked(name: str, value: float) -> None:
    la = made()
    with pytest.raises(InvalidArgument, match=name):
        setattr(la, name, value)
    with pytest.raises(InvalidArgument, match=name):
        made(**{name: value})


@pytest.mark.parametrize(
    "read",
    [
        lambda la: la.log_marginal_likelihood(),
        lambda la: la.marglik(2.0),
        lambda la: la.evidence(),
        lambda la: la.log_likelihood,
        lambda la: la.log_det_ratio,
        lambda la: la.scatter,
    ],
)
def test_an_evidence_that_is_not_defined(read) -> None:
    la = made()
    with pytest.raises(UnsupportedError, match="class Prior has no evidence; define log_marginal_likelihood"):
        read(la)
    assert float(la.prior_precision) == 1.0
    with pytest.raises(UnsupportedError, match="class Prior has no posterior; define __call__"):
        la.posterior()


def test_methods_that_its_own_fit_calls() -> None:
    la = made(Summed)
    assert_close(la.marglik(), -la.diagonal.sum(), "exact")
    assert (la.diagonal >= 0).all()


def test_a_class_of_the_last_layer() -> None:
    la = OfLastLayer(grid.network("regression").double(), "regression")
    la.model.find_last_layer(X)
    assert la.n_params == 18
    assert la.backend.jacobians(X)[0].shape == (12, 3, 18)


def test_private_names_of_the_library_stay_refused() -> None:
    with pytest.raises(UnsupportedError, match="_assign, which is private to this library"):
        type("Own", (Prior,), {"_assign": lambda self, **given: None})


# Weight space.


class Diagonal(ParametricLaplace):
    """A diagonal posterior, as one who knows no structure writes it."""

    def curvature_of(self, x: Tensor, y: Tensor, n_data: int) -> tuple[Tensor, Tensor]:
        return self.backend.diag(x, y)

    @property
    def posterior_precision(self) -> Tensor:
        return self.H / (self.sigma_noise**2 * self.temperature) + self.prior_precision_diag


class Blocks(LLLaplace):
    """One number per tensor of the last layer, summed by the hooks of older scripts."""

    def _init_H(self) -> None:
        self.H = torch.zeros(self.n_layers, dtype=X.dtype)

    def _curv_closure(self, X: Tensor, y: Tensor, N: int) -> tuple[Tensor, Tensor]:
        assert len(Y) == N
        loss, diagonal = self.backend.diag(X, y)
        return loss, torch.stack([part.mean() for part in diagonal.split(self._sizes())])

    def _sizes(self) -> list[int]:
        return [p.numel() for p in self.params]

    @property
    def posterior_precision(self) -> Tensor:
        return self.H.repeat_interleave(torch.tensor(self._sizes())) + self.prior_precision


class Variances(ParametricLaplace):
    """Covariances of outputs, and nothing of the weights."""

    def curvature_of(self, x: Tensor, y: Tensor, n_data: int) -> tuple[Tensor, Tensor]:
        loss, diagonal = self.backend.diag(x, y)
        return loss, diagonal.sum()

    def functional_variance(self, Js: Tensor) -> Tensor:
        return Js @ Js.mT / (self.H + 1)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        return Js.flatten(0, 1) @ Js.flatten(0, 1).T / (self.H + 1)


def pair(**options) -> tuple[Diagonal, DiagLaplace]:
    options = {"sigma_noise": 0.7, "prior_precision": 2.0} | options
    return tuple(fitted(cls, **options) for cls in (Diagonal, DiagLaplace))


def fitted(cls: type, batch_size: int = 5, **options):
    la = cls(grid.network("regression").double(), "regression", **options)
    la.fit(DataLoader(TensorDataset(X, Y), batch_size))
    return la


USES = {
    "H": lambda la: la.H,
    "loss": lambda la: la.loss,
    "glm": lambda la: torch.cat([part.flatten() for part in la(X)]),
    "joint": lambda la: la(X, joint=True)[1],
    "nn": lambda la: la(X, "nn", link_approx="mc", n_samples=3, generator=torch.Generator().manual_seed(0))[1],
    "predict": lambda la: la.predict(X).variance,
    "moments": lambda la: la.predictive_moments(X, diagonal_output=True)[1],
    "sample": lambda la: la.sample(3, generator=torch.Generator().manual_seed(0)),
    "evidence": lambda la: la.log_marginal_likelihood(),
    "evidence elsewhere": lambda la: la.log_marginal_likelihood(torch.tensor(3.0), torch.tensor(0.5)),
    "log_prob": lambda la: la.log_prob(0.1 + la.mean),
    "posterior_variance": lambda la: la.posterior_variance,
    "posterior_scale": lambda la: la.posterior_scale,
    "posterior_covariance": lambda la: la.posterior_covariance,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_follows_from_a_precision(use) -> None:
    own, reference = pair()
    assert_close(use(own), use(reference), "backend")


def test_copies_states_and_more_data() -> None:
    own, reference = pair()
    for again in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert_close(again(X)[1], reference(X)[1], "backend")
    loaded = Diagonal(grid.network("regression").double(), "regression", sigma_noise=0.7, prior_precision=2.0)
    loaded.load_state_dict(own.state_dict())
    assert_close(loaded(X)[1], reference(X)[1], "backend")
    assert loaded.n_data == 12
    for la in (own, reference):
        la.fit([(X[:4], Y[:4])], override=False, decay=0.5)
    assert_close(own(X)[1], reference(X)[1], "backend")
    for la in (own, reference):
        la.forget([(X[:4], Y[:4])])
    assert_close(own.log_marginal_likelihood(), reference.log_marginal_likelihood(), "backend")
    with pytest.raises(InvalidData):
        own.fit([(X[:4], Y[:4]), (X.log(), Y)])
    assert_close(own.log_marginal_likelihood(), reference.log_marginal_likelihood(), "backend")


@pytest.mark.filterwarnings("ignore::laplace.errors.TuningWarning")  # the best candidate is on the edge
def test_tuning() -> None:
    own, reference = pair()
    for la in (own, reference):
        la.optimize_prior_precision(method="marglik", n_steps=5)
    assert_close(own.prior_precision, reference.prior_precision, "backend")
    for la in (own, reference):
        la.optimize_prior_precision(
            method="gridsearch", val_loader=[(X, Y)], grid_size=4, log_prior_prec_min=-1, log_prior_prec_max=2
        )
    assert_close(own.prior_precision, reference.prior_precision, "backend")


def test_hooks_of_a_last_layer() -> None:
    la = fitted(Blocks)
    (weight, bias), sizes = la.H, [p.numel() for p in la.params]
    reference = fitted(DiagLLLaplace)
    assert_close(weight, reference.H[: sizes[0]].mean(), "backend")
    assert_close(bias, reference.H[sizes[0] :].mean(), "backend")
    J = la.backend.jacobians(X)[0]
    assert_close(la(X)[1], (J / la.posterior_precision) @ J.mT, "backend")


def test_covariances_alone() -> None:
    la = fitted(Variances)
    J = la.backend.jacobians(X)[0]
    assert_close(la(X)[1], J @ J.mT / (la.H + 1), "backend")
    assert la(X, joint=True)[1].shape == (36, 36)
    assert la.H.shape == ()
    for name, use in {
        "sample": lambda: la.sample(2),
        "log_det_posterior_precision": lambda: la.log_marginal_likelihood(),
        "square_norm": lambda: la.log_prob(la.mean),
        "posterior_variance": lambda: la.posterior_variance,
        "posterior_precision": lambda: la.posterior_precision,
    }.items():
        with pytest.raises(UnsupportedError, match=f"{name} is not known of a class without a structure"):
            use()


def test_a_fit_by_hand() -> None:
    own, reference = pair()
    own.start_fit()
    assert own.H == 0
    for start in (0, 6):
        loss, H = own.curvature_of(X[start : start + 6], Y[start : start + 6], 12)
        own.loss += loss
        own.H += H
    own.n_data, own.n_outputs = 12, 3
    assert_close(own.log_marginal_likelihood(), reference.log_marginal_likelihood(), "backend")
    with pytest.raises(InvalidArgument, match="H is a str"):
        own.H = "diagonal"
    with pytest.raises(InvalidArgument, match="H holds NaN"):
        own.H = own.H * torch.nan


def test_classes_that_leave_something_open() -> None:
    with pytest.raises(UnsupportedError, match=r"has no structure.*define curvature_of and posterior_precision"):
        type("Own", (ParametricLaplace,), {})(grid.network("regression").double(), "regression")
    alone = type("Own", (ParametricLaplace,), {"posterior_precision": Diagonal.posterior_precision})
    with pytest.raises(UnsupportedError, match="define curvature_of"):
        fitted(alone)
    with pytest.raises(UnsupportedError, match="define curvature_of"):
        alone(grid.network("regression").double(), "regression").curvature_of(X, Y, 12)
