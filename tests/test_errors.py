"""Bad input on purpose: each is refused before it does harm, by a message that names the fault and the mend."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace, errors, marglik_training
from laplace.curvature import CurvatureInterface, NativeEF, NativeGGN
from laplace.errors import (
    ApproximationWarning,
    InvalidArgument,
    InvalidData,
    InvalidType,
    LaplaceError,
    LaplaceWarning,
    NotFittedError,
    TuningWarning,
    UnsupportedError,
    warn,
)
from tests import grid

NAN, INF = float("nan"), float("inf")
X, Y = grid.data()
XR, YR = grid.data("regression")


def poisoned(value: float, tensor: Tensor) -> Tensor:
    return tensor.clone().index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(value))


BAD_DATA: dict[str, tuple[str, Any, str]] = {
    "row without a target": ("regression", (XR, YR.index_fill(0, torch.tensor(1), NAN)), "Targets have NaN"),
    "NaN count": ("poisson", (XR, poisoned(NAN, YR.abs().round())), "Targets have NaN"),
    "infinite target": ("regression", (XR, poisoned(INF, YR)), "Targets have NaN"),
    "label too large": ("classification", (X, Y.index_fill(0, torch.tensor(2), 3)), "Label 3 is out of range"),
    "negative label": ("classification", (X, Y.index_fill(0, torch.tensor(2), -1)), "Label -1 is out of range"),
    "float labels": ("classification", (X, Y.float()), r"y\.long\(\)"),
    "labels of too large a sum": ("classification", (X, 2 * nn.functional.one_hot(Y, 3)), "sum must be 1"),
    "labels [B, 1]": ("classification", (X, Y.unsqueeze(1)), "squeeze"),
    "too few labels": ("classification", (X, Y[:7]), "give a label for every datum"),
    "wide targets": ("regression", (XR, torch.randn(12, 4)), "must be equal"),
    "narrow targets": ("regression", (XR, torch.randn(12, 1)), "nothing is broadcast"),
    "flat targets": ("regression", (XR, torch.randn(12)), "must be equal"),
    "binary targets out of range": ("bernoulli", (X, torch.full((12, 3), 2.0)), "2"),
    "list of labels": ("classification", (X, Y.tolist()), "torch.as_tensor"),
    "array of labels": ("classification", (X, Y.numpy()), "torch.as_tensor"),
    "array of inputs": ("classification", (X.numpy(), Y), "torch.as_tensor"),
    "inputs alone": ("classification", (X,), "pairs"),
    "a tensor": ("classification", X, "pairs"),
    "no targets' key": ("classification", {"x": X, "y": Y}, "dict_key_y"),
    "ranks": ("reward_modeling", (grid.data("reward_modeling")[0], torch.full((12,), 2)), "out of range"),
}


def assert_refused(la: Any, likelihood: str, batch: Any, message: str) -> None:
    """The batch is named, and the former posterior is kept."""
    reference = grid.predict(la, likelihood)
    for number, override in ((0, True), (1, True), (1, False)):
        with pytest.raises(InvalidData, match=f"(?s)batch {number}: .*{message}"):
            la.fit([*grid.batches(likelihood)[:number], batch], override=override)
    assert la.n_data == 12
    assert all(torch.equal(a, b) for a, b in zip(grid.predict(la, likelihood), reference, strict=True))


@pytest.mark.parametrize("fault", BAD_DATA)
@pytest.mark.parametrize(("weights", "structure"), grid.DIAGONAL)
def test_bad_data(weights: str, structure: str, fault: str) -> None:
    likelihood, batch, message = BAD_DATA[fault]
    assert_refused(grid.fitted(weights, structure, likelihood), likelihood, batch, message)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(("weights", "structure"), grid.DIAGONAL)
def test_bad_inputs(weights: str, structure: str, value: float) -> None:
    """An infinite input that the network squashes does the last layer no harm."""
    for likelihood in ("classification", "regression"):
        x, y = grid.data(likelihood)
        la = grid.fitted(weights, structure, likelihood)
        if value == INF and weights == "last_layer":
            la.fit([(poisoned(value, x), y)])
            assert all(part.isfinite().all() for part in grid.predict(la, likelihood))
        else:
            assert_refused(la, likelihood, (poisoned(value, x), y), "NaN or infinit")
            if value != value:
                with pytest.raises(InvalidData, match="NaN or infinite"):
                    la(poisoned(value, x))


def test_flat_targets_with_one_output() -> None:
    """The classic: (N,) against (N, 1) would broadcast to (N, N)."""
    for weights, structure in grid.CELLS:
        options = {"subnetwork_indices": torch.tensor([0, 3])} if weights == "subnetwork" else {}
        la = grid.make(weights, structure, "regression", model=grid.network(n_outputs=1), **options)
        with pytest.raises(ValueError, match=r"unsqueeze\(-1\)"):
            la.fit([(XR, YR[:, 0])])
        assert not la.is_fitted


def test_one_logit_needs_a_bernoulli() -> None:
    for weights, structure in grid.CELLS:
        options = {"subnetwork_indices": torch.tensor([0, 3])} if weights == "subnetwork" else {}
        la = grid.make(weights, structure, model=grid.network(n_outputs=1), **options)
        with pytest.raises(InvalidData, match="bernoulli"):
            la.fit([(X, torch.zeros(12, dtype=torch.long))])
        assert not la.is_fitted


@pytest.mark.parametrize("loader", [[], iter(()), [(X, torch.full((12,), -100))]], ids=["list", "iterator", "ignored"])
@pytest.mark.parametrize("weights", grid.WEIGHTS)
def test_no_data(weights: str, loader: Any) -> None:
    la = grid.make(weights, "kron")
    with pytest.raises(InvalidData, match="at least one datum"):
        la.fit(loader)
    assert not la.is_fitted
    la = grid.fitted(weights, "kron")
    with pytest.raises(InvalidData, match="at least one datum"):
        la.fit([], override=False)
    assert la.n_data == 12


def test_outputs_that_are_no_matrix() -> None:
    class Flat(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze(-1)

    la = Laplace(Flat(3, 1), "regression", "all", "full")
    with pytest.raises(InvalidData, match=r"\[B, C\]"):
        la.fit([(XR, YR[:, :1])])

    class Words(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return "words"

    with pytest.raises(InvalidData, match="forward_fn"):
        Laplace(Words(3, 1), "regression", "all", "full").fit([(XR, YR)])


def test_other_outputs_than_before() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)[:, : 3 if len(x) > 4 else 2]

    with pytest.raises(InvalidData, match="outputs"):
        Laplace(Growing(), "classification", "all", "diag").fit([(X, Y.clamp(max=1)), (X[:4], Y[:4].clamp(max=1))])


@pytest.mark.parametrize("n_noises", [2, 4])
def test_a_noise_for_other_outputs(n_noises: int) -> None:
    for weights, structure in grid.CELLS:
        la = grid.make(weights, structure, "regression", sigma_noise=torch.ones(n_noises))
        with pytest.raises(LaplaceError, match=r"sigma_noise has \d entries|sigma_noise has length"):
            la.fit(grid.batches("regression"))
        assert not la.is_fitted
        fitted = grid.fitted(weights, structure, "regression", sigma_noise=torch.ones(3))
        fitted.sigma_noise = torch.ones(n_noises)
        with pytest.raises(LaplaceError, match="sigma_noise"):
            fitted.log_marginal_likelihood()
        with pytest.raises(LaplaceError, match="sigma_noise"):
            fitted(XR)


# Hyper-parameters.

BAD_HYPER: list[tuple[str, Any, str]] = [
    ("prior_precision", 0.0, "positive"),
    ("prior_precision", -1.0, "positive"),
    ("prior_precision", NAN, "positive and finite"),
    ("prior_precision", INF, "positive and finite"),
    ("prior_precision", torch.tensor([1.0, -1.0, 1.0, 1.0]), "-1 was given"),
    ("prior_precision", torch.ones(7), "length 7; accepted are 1"),
    ("prior_precision", torch.ones(2, 2), r"shape \(2, 2\)"),
    ("prior_precision", torch.ones(0), "shape"),
    ("prior_precision", "1.0", "str"),
    ("prior_precision", None, "NoneType"),
    ("prior_precision", [1.0], "list"),
    ("prior_precision", True, "bool"),
    ("prior_precision", 1j, "complex"),
    ("sigma_noise", 0.0, "positive"),
    ("sigma_noise", -1.0, "positive"),
    ("sigma_noise", NAN, "positive"),
    ("sigma_noise", torch.ones(2, 2), "shape"),
    ("sigma_noise", "1", "str"),
    ("temperature", 0.0, "positive"),
    ("temperature", -1, "positive"),
    ("temperature", INF, "positive"),
    ("temperature", torch.ones(3), "scalar"),
    ("temperature", None, "NoneType"),
    ("prior_mean", NAN, "finite"),
    ("prior_mean", torch.tensor(-INF), "finite"),
    ("prior_mean", torch.zeros(7), "length 7"),
    ("prior_mean", torch.zeros(38, 1), "shape"),
    ("prior_mean", "0", "str"),
]


@cache
def regression(structure: str) -> Any:
    """A posterior that no test changes."""
    return grid.fitted("all", structure, "regression")


@pytest.mark.parametrize(("name", "value", "message"), BAD_HYPER)
def test_bad_hyper_parameters(name: str, value: Any, message: str) -> None:
    """In constructors and setters alike."""
    for structure in grid.STRUCTURES:
        with pytest.raises(ValueError, match=message) as caught:
            grid.make("all", structure, "regression", **{name: value})
        assert isinstance(caught.value, LaplaceError)
        assert name in str(caught.value)
        la = regression(structure)
        former = getattr(la, name)
        with pytest.raises(ValueError, match=message):
            setattr(la, name, value)
        assert getattr(la, name) is former


def test_lengths_of_a_last_layer_are_checked_when_it_is_known() -> None:
    la = Laplace(grid.network(), "classification", prior_precision=torch.ones(5))
    with pytest.raises(InvalidArgument, match=r"1 \(one\), 2 \(parameter tensors\), 18"):
        la.fit(grid.batches())
    assert not la.is_fitted
    la.prior_precision = torch.ones(2)
    la.fit(grid.batches())
    with pytest.raises(InvalidArgument, match="length 4"):
        la.prior_precision = torch.ones(4)
    with pytest.raises(InvalidArgument, match="length 5"):
        Laplace(grid.network(), "classification", last_layer_name="3", prior_precision=torch.ones(5))


@pytest.mark.parametrize("likelihood", ["classification", "bernoulli", "reward_modeling"])
def test_noise_without_a_gaussian(likelihood: str) -> None:
    with pytest.raises(ValueError, match="no observation noise"):
        grid.make("all", "diag", likelihood, sigma_noise=2.0)
    la = grid.fitted("all", "diag", likelihood)
    with pytest.raises(ValueError, match="no observation noise"):
        la.sigma_noise = 2.0
    with pytest.raises(ValueError, match="no observation noise"):
        la.log_marginal_likelihood(sigma_noise=torch.ones(()))
    with pytest.raises(ValueError, match="noise"):
        la(grid.data(likelihood)[0], observation_noise=True)


def test_another_ratio_of_noises_than_at_fit() -> None:
    for weights, structure in grid.CELLS:
        la = grid.fitted(weights, structure, "regression")
        la.sigma_noise = torch.tensor([1.0, 2.0, 3.0])
        for use in (la.log_marginal_likelihood, lambda la=la: la(XR)):
            with pytest.raises(UnsupportedError, match="before fit"):
                use()
        la.sigma_noise = torch.full((3,), 2.0)
        one = la.log_marginal_likelihood()
        torch.testing.assert_close(one, la.log_marginal_likelihood(sigma_noise=2.0))


# Before fit.


@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
@pytest.mark.parametrize("likelihood", grid.LIKELIHOODS)
def test_everything_but_the_density_needs_a_fit(weights: str, structure: str, likelihood: str) -> None:
    la = grid.make(weights, structure, likelihood, **({"last_layer_name": None} if weights == "last_layer" else {}))
    x = grid.data(likelihood)[0]
    unfitted: dict[str, Callable[[], Any]] = {
        "glm": lambda: la(x),
        "nn": lambda: la(x, "nn"),
        "predictive": lambda: la.predictive(x, "glm", "probit", 10),
        "sample": la.sample,
        "functional_samples": lambda: la.functional_samples(x),
        "functional_samples nn": lambda: la.functional_samples(x, "nn"),
        "predictive_samples": lambda: la.predictive_samples(x),
        "functional_variance": lambda: la.functional_variance(torch.zeros(2, 3, 38)),
        "functional_covariance": lambda: la.functional_covariance(torch.zeros(2, 3, 38)),
        "functional_variance_fast": lambda: la.functional_variance_fast(x),
        "evidence": la.log_marginal_likelihood,
        "evidence at": lambda: la.log_marginal_likelihood(2.0),
        "marglik": la.marglik,
        "log_likelihood": lambda: la.log_likelihood,
        "log_det_ratio": lambda: la.log_det_ratio,
        "scatter": lambda: la.scatter,
        "log_det_prior_precision": lambda: la.log_det_prior_precision,
        "log_det_posterior_precision": lambda: la.log_det_posterior_precision,
        "posterior_precision": lambda: la.posterior_precision,
        "posterior_covariance": lambda: la.posterior_covariance,
        "posterior_variance": lambda: la.posterior_variance,
        "posterior_scale": lambda: la.posterior_scale,
        "coverage": la.coverage,
        "state_dict": la.state_dict,
        "tuning": la.optimize_prior_precision,
        "grid": lambda: la.optimize_prior_precision(method="gridsearch", val_loader=grid.batches(likelihood)),
    }
    for name, use in unfitted.items():
        with pytest.raises(NotFittedError, match="fit") as caught:
            use()
        assert isinstance(caught.value, (RuntimeError, AttributeError)), name
    assert la.prior_precision.item() == 1.0


@pytest.mark.parametrize("structure", grid.STRUCTURES)
@pytest.mark.parametrize("weights", ["all", "subnetwork"])
def test_the_density_before_fit_is_the_prior_s(weights: str, structure: str) -> None:
    la = grid.make(weights, structure, prior_precision=2.0, prior_mean=0.3)
    value = torch.randn(la.n_params)
    normal = torch.distributions.Normal(0.3, 2.0**-0.5)
    torch.testing.assert_close(la.log_prob(value), normal.log_prob(value).sum())
    torch.testing.assert_close(la.square_norm(value), 2 * (value - 0.3).square().sum())
    torch.testing.assert_close(la.log_prob(value, normalized=False), -(value - 0.3).square().sum())


# Calls.

BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"pred_type": "gp"}, "'gp' is the predictive of"),
    ({"pred_type": "linear"}, "pred_type='linear'"),
    ({"pred_type": None}, "pred_type"),
    ({"link_approx": "logit"}, "probit.*bridge_norm"),
    ({"link_approx": "Probit"}, "Probit"),
    ({"n_samples": 0, "link_approx": "mc"}, "positive integer"),
    ({"n_samples": -1, "pred_type": "nn"}, "positive integer"),
    ({"n_samples": 2.5, "pred_type": "nn"}, "positive integer"),
    ({"n_samples": True, "pred_type": "nn"}, "positive integer"),
    ({"generator": 0, "link_approx": "mc"}, r"torch\.Generator"),
    ({"generator": "cpu", "pred_type": "nn"}, r"torch\.Generator"),
    ({"attention_mask": None}, "attention_mask"),
    ({"observation_noise": True}, "noise"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CALLS)
@pytest.mark.parametrize("weights", grid.WEIGHTS)
def test_bad_calls(weights: str, options: dict[str, Any], message: str) -> None:
    la = grid.fitted(weights, "kron")
    with pytest.raises(ValueError, match=message) as caught:
        la(X, **options)
    assert isinstance(caught.value, LaplaceError)


def test_bad_inputs_of_predictions() -> None:
    for weights, structure in grid.CELLS:
        la = grid.fitted(weights, structure)
        with pytest.raises(InvalidData, match=r"torch\.as_tensor"):
            la(X.numpy())
        with pytest.raises(InvalidArgument, match=r"\[B, C, P\]"):
            la.functional_variance(torch.zeros(2, 3, 39))
        with pytest.raises(InvalidArgument, match=r"\[B, C, P\]"):
            la.functional_covariance(torch.zeros(3, la.n_params))


def test_one_sample_has_no_variance() -> None:
    la = grid.fitted("all", "diag", "regression")
    with pytest.raises(InvalidArgument, match="at least 2"):
        la(XR, "nn", n_samples=1)
    assert grid.fitted("all", "diag")(X, "nn", n_samples=1).shape == (12, 3)


def test_a_link_without_meaning() -> None:
    la = grid.fitted("all", "diag", "bernoulli")
    with pytest.raises(UnsupportedError, match="accepted are 'probit', 'probit_centred', 'mc'"):
        la(X, link_approx="bridge")


BAD_TUNING: list[tuple[dict[str, Any], str]] = [
    ({"method": "magic"}, "'marglik', 'gridsearch', 'CV' and 'em'"),
    ({"method": "gridsearch"}, "val_loader"),
    ({"method": "CV"}, "val_loader"),
    ({"method": "gridsearch", "val_loader": grid.batches(), "prior_structure": "blocks"}, "layerwise"),
    ({"method": "gridsearch", "val_loader": grid.batches(), "loss": "accuracy"}, "no objective"),
    ({"method": "gridsearch", "val_loader": grid.batches(), "grid_size": 0}, "grid_size"),
    ({"method": "gridsearch", "val_loader": grid.batches(), "pred_type": "gp"}, "pred_type"),
    ({"method": "gridsearch", "val_loader": grid.batches(), "link_approx": "x"}, "link_approx"),
    ({"method": "gridsearch", "val_loader": [(X, Y + 3)]}, "out of range"),
    ({"method": "gridsearch", "val_loader": [(X, Y.tolist())]}, "torch.as_tensor"),
    ({"method": "gridsearch", "val_loader": []}, "no data"),
    ({"prior_structure": "blocks"}, "'scalar', 'layerwise', 'diag'"),
    ({"init_prior_prec": -1.0}, "positive"),
    ({"init_prior_prec": torch.ones(7)}, "length 7"),
    ({"init_prior_prec": "1"}, "str"),
    ({"n_steps": 0}, "n_steps"),
    ({"lr": 0.0}, "lr"),
]


@pytest.mark.parametrize(("options", "message"), BAD_TUNING)
def test_bad_tuning(options: dict[str, Any], message: str) -> None:
    la = grid.fitted("all", "kron", prior_precision=3.0)
    with pytest.raises(ValueError, match=message) as caught:
        la.optimize_prior_precision(**options)
    assert isinstance(caught.value, LaplaceError)
    assert la.prior_precision.item() == 3.0


# Construction.


def test_a_frozen_model() -> None:
    model = grid.network().requires_grad_(False)
    for structure in grid.STRUCTURES:
        with pytest.raises(InvalidArgument, match="last_layer"):
            Laplace(model, "classification", "all", structure)
        with pytest.raises(InvalidArgument, match="trainable"):
            Laplace(model, "classification", "subnetwork", structure, subnetwork_indices=torch.tensor([0]))
        la = Laplace(model, "classification", "last_layer", structure)
        la.fit(grid.batches())
        reference = grid.fitted("last_layer", structure)
        torch.testing.assert_close(la(X), reference(X))
        assert not any(p.requires_grad for p in model.parameters())


def test_a_model_without_parameters() -> None:
    with pytest.raises(InvalidArgument, match="no parameter"):
        Laplace(nn.Sequential(nn.Tanh()), "classification", "all", "diag")
    with pytest.raises(InvalidArgument, match="last_layer_name"):
        Laplace(nn.Sequential(nn.Tanh()), "classification").fit(grid.batches())


@pytest.mark.parametrize(
    ("indices", "error"),
    [
        (None, InvalidType),
        ([0, 1], InvalidType),
        (torch.tensor([0.0]), InvalidType),
        (torch.tensor([0], dtype=torch.int32), InvalidType),
        (torch.tensor([True, False]), InvalidType),
        (torch.zeros(0, dtype=torch.long), InvalidArgument),
        (torch.tensor([[0, 1]]), InvalidArgument),
        (torch.tensor([0, 38]), InvalidArgument),
        (torch.tensor([-1, 0]), InvalidArgument),
        (torch.tensor([2, 2]), InvalidArgument),
    ],
)
def test_bad_indices(indices: Any, error: type[Exception]) -> None:
    for structure in grid.STRUCTURES:
        with pytest.raises(error, match="subnetwork_indices"):
            grid.make("subnetwork", structure, subnetwork_indices=indices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last_layer_name": "fc"}, "not a module.*'0', '3'"),
        ({"last_layer_name": "1"}, "of type Tanh"),
        ({"feature_reduction": "max"}, "pick_first"),
        ({"asdl_fisher_kwargs": {"a": 1}}, "backend_kwargs"),
    ],
)
def test_bad_last_layers(options: dict[str, Any], message: str) -> None:
    for structure in grid.STRUCTURES:
        with pytest.raises(ValueError, match=message):
            grid.make("last_layer", structure, **options)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        (NativeGGN, {"kfac_approx": "sum"}, "'expand' and 'reduce'"),
        (NativeGGN, {"memory_budget": 0}, "memory_budget"),
        (NativeGGN, {"stochastic": True, "num_samples": 0}, "num_samples"),
        (NativeGGN, {"samples": 3}, r"backend_kwargs=\['samples'\]"),
        (NativeEF, {"stochastic": True}, "stochastic"),
    ],
)
def test_bad_backend_options(backend: Any, options: dict[str, Any], message: str) -> None:
    la = grid.make("all", "kron", backend=backend, backend_kwargs=options)
    with pytest.raises((ValueError, TypeError), match=message):
        la.fit(grid.batches())


@pytest.mark.parametrize("backend", ["NativeGGN", NativeGGN.full, 3, nn.Module])
def test_a_backend_that_is_none(backend: Any) -> None:
    with pytest.raises(InvalidType, match="backend"):
        grid.make("all", "kron", backend=backend)


def test_a_backend_that_lacks_a_primitive() -> None:
    class Nothing(CurvatureInterface):
        pass

    first_primitive = {"block": "blocks", "lowrank": "matmul", "ekfac": "kron", "lowrank_kron": "kron"}
    for structure in grid.STRUCTURES:
        la = grid.make("all", structure, backend=Nothing)
        with pytest.raises(UnsupportedError, match=f"'{first_primitive.get(structure, structure)}'.*NativeGGN"):
            la.fit(grid.batches())


def test_a_batch_that_mixes_its_data() -> None:
    la = Laplace(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 3)), "classification", "all")
    with pytest.raises(LaplaceError, match=r"BatchNorm without running statistics.*positions of one datum"):
        la.fit(grid.batches())


def test_pairs_with_a_dimension_too_many() -> None:
    """A network of one reward per item, on the pairs as they are: outputs `[B, 2, 1]`."""
    la = Laplace(nn.Linear(3, 1), "reward_modeling", "all")
    with pytest.raises(InvalidData, match=r"where \[6, 2\] are the outputs.*without the last dimension"):
        la.fit([(torch.randn(6, 2, 3), torch.randint(2, (6,)))])


def test_warnings_point_at_the_user_s_line() -> None:
    """However many calls of the library, and of packages between them, there are on the way."""
    la = grid.make("all", "diag", prior_precision=1e-3)
    la.fit(grid.batches())
    prediction = la.predict(X, link_approx="delta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la(X, link_approx="delta")
        assert prediction.mean.shape == (12, 3)
        marglik_training(grid.network(), grid.batches(), n_epochs=1, optimizer_kwargs={"weight_decay": 0.1})
    assert [warning.category for warning in caught] == [ApproximationWarning, ApproximationWarning, TuningWarning]
    assert [warning.filename for warning in caught] == [__file__] * 3


def shown(action: str, *messages: tuple[str, type[LaplaceWarning]], times: int = 1) -> list[str]:
    """What is shown of warnings at one line, with other code between them that enters `catch_warnings`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter(action)  # pyright: ignore[reportArgumentType]
        for _ in range(times):
            for message in messages:
                warn(*message)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
    return [str(warning.message) for warning in caught]


def numbered(n: int) -> list[tuple[str, type[LaplaceWarning]]]:
    return [(f"of {i} data {1.5 * i:.3g} ± {1e-7 * i} are off in 'conv1.0'", TuningWarning) for i in range(n)]


def test_a_kind_of_warning_is_shown_once_per_line() -> None:
    (first, _), *_ = several = numbered(5)
    assert shown("default", *several) == [first]
    assert shown("default", *several, times=3) == [first]  # in a block of its own it is shown anew
    assert shown("once", *several) == [first]
    assert shown("always", *several) == [text for text, _ in several]
    assert shown("ignore", *several) == []
    other = [("of nan data inf ± -1e+05 are off in 'conv1.0'", TuningWarning), (first, ApproximationWarning)]
    assert shown("default", *several, *other, *other) == [first, first]
    names = [(text.replace("conv1", "conv2"), category) for text, category in several]
    assert shown("default", *several, *names) == [first, names[0][0]]


def test_a_filter_that_is_set_later_counts() -> None:
    (one, two, three) = numbered(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for n, (message, category) in enumerate((one, two, three, one)):
            if n == 2:
                warnings.simplefilter("always")
            warn(message, category)
    assert [str(warning.message) for warning in caught] == [one[0], three[0], one[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message, category in (one, two):
            with pytest.raises(TuningWarning, match="are off"):
                warn(message, category)


def test_lines_and_files_are_told_apart() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for message, category in numbered(3):
            warn(message, category)
            warn(message, category)
            for name in ("one", "another"):
                exec(compile("warn(*given)", name, "exec"), {"warn": warn, "given": (message, category)})
    assert len(caught) == 4 and {warning.filename for warning in caught} == {__file__, "one", "another"}


def test_warnings_that_were_shown_are_remembered_within_bounds() -> None:
    with warnings.catch_warnings(record=True):
        warnings.resetwarnings()
        errors._shown.clear()
        shown("default", *numbered(100))
        assert len(errors._shown) == 1
        for n in range(errors._MOST + 10):
            exec(compile("warn(*given)", f"cell {n}", "exec"), {"warn": warn, "given": numbered(1)[0]})
    assert len(errors._shown) <= errors._MOST


def test_threads_that_warn_together() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()

        def work() -> None:
            for message, category in numbered(200):
                warn(message, category)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 1 <= len(caught) <= 8


def test_a_loop_of_the_user_s_shows_a_warning_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for delta in (1e-3, 2e-3, 5e-3):
            la = grid.make("all", "diag", prior_precision=delta)
            la.fit(grid.batches())
            la(X, link_approx="delta")
    assert [warning.category for warning in caught] == [ApproximationWarning]


def test_errors_have_their_roots() -> None:
    assert issubclass(NotFittedError, (RuntimeError, AttributeError))
    for error in (InvalidArgument, InvalidData, InvalidType, UnsupportedError):
        assert issubclass(error, ValueError)
    assert issubclass(LaplaceWarning, UserWarning)


@pytest.mark.parametrize("loader", [None, 3, X], ids=["None", "a number", "a tensor"])
def test_what_is_no_loader(loader: Any) -> None:
    la = grid.fitted("all", "diag")
    before = la(X)
    with pytest.raises(InvalidType, match=r"train_loader is of type .* DataLoader"):
        la.fit(loader)
    assert torch.equal(la(X), before)


# Answers of a fitted posterior: what they are asked wrongly.

PAIR, PAIR_R = [(X, Y)], [(XR, YR)]
WIDE_X = torch.zeros(3, 7)
Asked = Callable[[Any], Any]
ASKED: dict[str, tuple[str, Asked, type[LaplaceError], str]] = {
    **{
        f"{name} of {kind}": ("classification", ask, InvalidType, f"is of type {kind}")
        for kind, loader in (("NoneType", None), ("int", 3))
        for name, ask in (
            ("leave_one_out", lambda la, loader=loader: la.leave_one_out(loader)),
            ("influence", lambda la, loader=loader: laplace.influence(la, loader, X, Y)),
            ("label_errors", lambda la, loader=loader: laplace.label_errors(la, loader)),
            ("forget", lambda la, loader=loader: la.forget(loader)),
            ("forget_with_mean", lambda la, loader=loader: laplace.forget_with_mean(la, loader)),
            ("projected", lambda la, loader=loader: laplace.projected(la, loader)),
        )
    },
    "report of strangers": (
        "classification", lambda la: laplace.report(la, PAIR, ood=X), InvalidType, "ood is of type Tensor",
    ),
    "report of a number": (
        "classification", lambda la: laplace.report(la, PAIR, train=3), InvalidType, "train is of type int",
    ),
    "report by a name": (
        "classification", lambda la: laplace.report(la, PAIR, generator="0"), InvalidType, "torch.Generator",
    ),
    "split conformal of a number": (
        "regression", lambda la: laplace.conformal(la, val_loader=3), InvalidType, "val_loader",
    ),
    "intervals at NaN": (
        "regression", lambda la: laplace.conformal(la, PAIR_R).interval(XR * NAN), InvalidData, "outputs have NaN",
    ),
    "project NaN": (
        "classification", lambda la: laplace.projected(la, [(X * NAN, Y)]), InvalidData, "outputs have NaN",
    ),
    "project too few labels": (
        "classification", lambda la: laplace.projected(la, [(X, Y[:3])]), InvalidData, "every datum",
    ),
    "project to a word": (
        "classification", lambda la: laplace.projected(la, PAIR, tolerance="small"),
        InvalidArgument, "tolerance='small'",
    ),
    "forget by no weight": (
        "classification", lambda la: la.forget(PAIR, weight=None), InvalidType, "weight must be a number",
    ),
    "merge the same": ("classification", lambda la: laplace.merge([la, la]), InvalidArgument, "twice"),
    "other inputs": (
        "classification", lambda la: laplace.influence(la, PAIR, WIDE_X, Y[:3]), InvalidData, "do not fit",
    ),
    "no optimizer": (
        "classification", lambda la: laplace.from_optimizer(None, la.model, 3), InvalidType, "optimizer is a NoneType",
    ),
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning")
def test_a_wrong_question_changes_nothing(asked: str) -> None:
    likelihood, ask, error, message = ASKED[asked]
    la = grid.fitted("all", "full", likelihood)
    model: Any = la.model
    posterior, state = la._posterior, {name: value.clone() for name, value in model.state_dict().items()}
    modes = [*(tensor.requires_grad for tensor in model.parameters()), *(part.training for part in model.modules())]
    with pytest.raises(error, match=message):
        ask(la)
    assert la._posterior is posterior
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    after = [*(tensor.requires_grad for tensor in model.parameters()), *(part.training for part in model.modules())]
    assert after == modes
