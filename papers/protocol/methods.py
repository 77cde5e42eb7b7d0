"""The methods that Daxberger et al. (2021, 4.2) compare, at the settings of their appendix C.2."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import NativeEF
from laplace.errors import TuningWarning
from laplace.metrics import accuracy
from protocol.baselines.csghmc import CyclicalSettings, sample_networks
from protocol.baselines.ensemble import deep_ensemble, mean_probabilities
from protocol.baselines.flipout import FlipoutSettings, fit_flipout
from protocol.baselines.hmc import HmcSettings, hmc, log_posterior, networks, predictions, split_r_hat, start_of
from protocol.baselines.swag import RATES, SwagSettings, choose_rate, renew_batch_norm
from protocol.data import Split
from protocol.training import Training

Predict = Callable[[Tensor], Tensor]
BY_VALIDATION = "LA, δ by validation"
PRECISIONS = {"prior_precision": torch.logspace(-2, 4, 61)}


@dataclass(frozen=True)
class MethodSettings:
    """Of all methods.

    Attributes:
        training: Of MAP, the members of the ensemble, and variational Bayes but for the prior.
        variational: Training of variational Bayes.
        flipout: Its objective.
        swag: Its iterates; the learning rate is chosen out of `swag_rates`.
        swag_rates: By the paper's threshold on the mean confidence: MAP's accuracy less a hundredth.
        cyclical: Of the cyclical stochastic chain; None leaves it out.
        hmc: Of the chains, of which one starts at every member of the ensemble; None leaves them out.
        n_members: Of the ensemble.
        n_samples: Networks of SWAG and of variational Bayes.
        n_hmc_samples: Networks of HMC.
    """

    training: Training = field(default_factory=Training)
    variational: Training = field(default_factory=Training)
    flipout: FlipoutSettings = field(default_factory=FlipoutSettings)
    swag: SwagSettings = field(default_factory=SwagSettings)
    swag_rates: tuple[float, ...] = RATES
    cyclical: CyclicalSettings | None = None
    hmc: HmcSettings | None = None
    n_members: int = 5
    n_samples: int = 30
    n_hmc_samples: int = 100


@dataclass(frozen=True)
class Fitted:
    """What predicts, by the name of the method, and numbers of interest besides: rates, precisions, checks."""

    predict: dict[str, Predict]
    checks: dict[str, dict[str, float]]


def averaged(models: list[nn.Module]) -> Predict:
    """The mean prediction of networks."""
    return lambda x: mean_probabilities(models, x)


def fit_all(make: Callable[[int], nn.Sequential], parts: Split, how: MethodSettings, seed: int) -> Fitted:
    """All methods, from the same MAP network where they start at one."""
    members = deep_ensemble(make, parts.train, how.training, seed, how.n_members)
    model = members[0]
    fitted = Fitted({"MAP": averaged([model]), "DE": averaged(members)}, {})
    _add_variational(fitted, make, parts, how, seed)
    _add_swag(fitted, model, parts, how, seed)
    if how.cyclical is not None:
        fitted.predict["CSGHMC"] = averaged(sample_networks(make(seed), parts.train, how.cyclical, seed))
    if how.hmc is not None:
        _add_hmc(fitted, members, parts, how, how.hmc, seed)
    _add_laplace(fitted, model, parts)
    return fitted


def fit_laplace(make: Callable[[int], nn.Sequential], parts: Split, how: MethodSettings, seed: int) -> Fitted:
    """MAP and Laplace approximations alone, from the same MAP network as `fit_all`'s."""
    (model,) = deep_ensemble(make, parts.train, how.training, seed, 1)
    fitted = Fitted({"MAP": averaged([model])}, {})
    _add_laplace(fitted, model, parts)
    return fitted


def _add_variational(
    fitted: Fitted, make: Callable[[int], nn.Sequential], parts: Split, how: MethodSettings, seed: int
) -> None:
    posterior = fit_flipout(make(seed), parts.train, how.variational, how.flipout, seed)
    models = posterior.networks(how.n_samples)
    for model in models:  # as SWAG's: sampled weights shift the means of all channels
        renew_batch_norm(model, parts.train)
    fitted.predict["VB"] = averaged(models)


def _add_swag(fitted: Fitted, model: nn.Module, parts: Split, how: MethodSettings, seed: int) -> None:
    p = mean_probabilities([model], parts.validation.x)
    threshold = float(accuracy(p, parts.validation.y)) - 0.01
    rate, networks = choose_rate(
        model, parts.train, parts.validation, how.swag, seed, threshold, how.swag_rates, how.n_samples
    )
    fitted.predict["SWAG"] = averaged(networks)
    fitted.checks["SWAG"] = {"learning rate": rate}


def _add_hmc(
    fitted: Fitted, members: list[nn.Module], parts: Split, how: MethodSettings, settings: HmcSettings, seed: int
) -> None:
    """With the prior of MAP: weight decay is a precision per datum."""
    model, prior_precision = members[0], how.training.weight_decay * len(parts.train)
    chains = hmc(log_posterior(model, parts.train, prior_precision), start_of(members), settings, seed)
    r_hat = split_r_hat(predictions(model, chains, parts.validation.x)).flatten()
    fitted.predict["HMC"] = averaged(networks(model, chains, how.n_hmc_samples))
    fitted.checks["HMC"] = {
        "acceptance": chains.acceptance,
        "R̂ of the log density": float(split_r_hat(chains.log_density)),
        "R̂ of predictions, 95 % quantile": float(r_hat.quantile(0.95)),
    }


def _add_laplace(fitted: Fitted, model: nn.Module, parts: Split) -> None:
    """LA, the library's default, and LA*, by the evidence; and LA by the NLL of validation data, to compare with."""
    data, validation = ([(part.x, part.y)] for part in (parts.train, parts.validation))
    posteriors = {
        "LA": Laplace(model, "classification"),
        "LA*": Laplace(model, "classification", "last_layer", "full", backend=NativeEF),
        BY_VALIDATION: Laplace(model, "classification"),
    }
    for name, la in posteriors.items():
        la.fit(data)
        if name == BY_VALIDATION:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TuningWarning)  # an end of so wide a grid will do
                la.optimize_hyperparameters(objective="nll", val_loader=validation, grid=PRECISIONS)
        else:
            la.optimize_hyperparameters()
        fitted.predict[name] = la
        fitted.checks[name] = {"prior precision": float(la.prior_precision)}
