"""What both packages run, whatever `laplace` is there to import: `python -m tests.parity.measure STATE RESULT`.

What a quantity could not be computed for is saved as the name of its exception. Nothing is printed of a traceback.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import laplace
from laplace import Laplace, marglik_training
from tests.parity.deviations import PROBES
from tests.parity.work import (
    NOISE,
    PRIOR,
    PRIOR_MEAN,
    RATE,
    SAMPLES,
    STEPS,
    TEMPERATURE,
    WEIGHT_SAMPLES,
    Data,
    Posterior,
    data,
    load,
    posteriors,
    priors,
    subnetwork,
)


class Results:
    """Arrays and failures, by name."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.failures: dict[str, str] = {}

    def run(self, name: str, compute: Callable[[], Any]) -> Any:
        """Saves what `compute` returns, if it returns tensors or numbers; None if it raises."""
        torch.manual_seed(0)
        try:
            value = compute()
        except Exception as error:  # whatever it is, it is a result
            self.failures[name] = type(error).__name__
            return None
        if isinstance(value, Tensor | float | int):
            self.arrays[name] = torch.as_tensor(value).detach().double().numpy()
        return value

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """One file: the arrays, and the rest as JSON in the array `about`."""
        about = {**about, "failures": self.failures}
        np.savez(path, about=np.array(json.dumps(about)), **self.arrays)


def construct(p: Posterior, state: Path) -> Any:
    """The posterior before its fit."""
    model = load(state, p.model)
    options: dict[str, Any] = {"prior_precision": PRIOR, "prior_mean": PRIOR_MEAN, "temperature": TEMPERATURE}
    if p.likelihood == "regression":
        options["sigma_noise"] = NOISE
    if p.backend is not None:
        options["backend"] = getattr(laplace.curvature, p.backend)
    if p.subset == "subnetwork":
        options["subnetwork_indices"] = subnetwork(sum(w.numel() for w in model.parameters()))
    if p.structure == "gp":
        options["n_subset"] = 8
    return Laplace(model, p.likelihood, p.subset, p.structure, **options)


def fitted(p: Posterior, state: Path, found: Data) -> Any:
    """The posterior after its fit."""
    la = construct(p, state)
    la.fit(found.loader())
    return la


def weights(p: Posterior, la: Any) -> Tensor:
    """Samples of the weights that are random, `[S, P]`."""
    draws = la.sample(SAMPLES)
    return draws[:, subnetwork(draws.shape[1])] if p.subset == "subnetwork" else draws


def precision(la: Any) -> Tensor:
    """P, dense or its diagonal."""
    held = la.posterior_precision
    return held if isinstance(held, Tensor) else held.to_matrix()


def variance(la: Any, p: Posterior, x: Tensor) -> Tensor:
    """Variances of the outputs, `[B, C, C]`, by the methods that users combine for it."""
    if p.structure == "gp":
        return la.predictive_moments(x)[1]
    jacobians = la.backend.last_layer_jacobians if p.subset == "last_layer" else la.backend.jacobians
    return la.functional_variance(jacobians(x)[0])


def gradient(la: Any, of: str) -> Tensor:
    """Derivative of the evidence by the logarithm of a hyper-parameter."""
    log = torch.tensor([PRIOR if of == "prior_precision" else NOISE], dtype=torch.float64).log().requires_grad_()
    value = log.exp()
    evidence = la.log_marginal_likelihood(value) if of == "prior_precision" else la.log_marginal_likelihood(None, value)
    slope = torch.autograd.grad(evidence, log)[0]
    setattr(la, of, value.detach())  # laplace-torch keeps the value that it was asked about, with its graph
    return slope


def layerwise(la: Any) -> Tensor:
    """The evidence under one prior per tensor."""
    return la.log_marginal_likelihood(priors(la.n_layers)).detach()


def tuned(la: Any) -> Tensor:
    """The prior precision after tuning by the evidence."""
    la.optimize_prior_precision(method="marglik", n_steps=STEPS, lr=RATE, init_prior_prec=PRIOR)
    return la.prior_precision.detach()


def quantities(p: Posterior, la: Any, x: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What every posterior is asked, by name; the last ones change it."""
    if p.structure != "gp":
        yield "mean", lambda: la.mean_subnet if p.subset == "subnetwork" else la.mean
        yield "precision", lambda: precision(la)
    yield "loss", lambda: la.loss
    yield "n_data", lambda: la.n_data
    yield "log likelihood", lambda: la.log_likelihood
    if p.structure != "gp":
        yield "log det ratio", lambda: la.log_det_ratio
        yield "scatter", lambda: la.scatter
    yield "evidence", lambda: la.log_marginal_likelihood()
    yield "output variance", lambda: variance(la, p, x)
    yield from predictions(p, la, x)
    if p.structure != "gp":
        yield "evidence gradient: δ", lambda: gradient(la, "prior_precision")
        if p.likelihood == "regression":
            yield "evidence gradient: σ", lambda: gradient(la, "sigma_noise")
        if p.subset == "all":
            yield "evidence, layerwise prior", lambda: layerwise(la)
        yield "tuned δ", lambda: tuned(la)


def predictions(p: Posterior, la: Any, x: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Predictions by formula, and by samples where they are cheap."""
    kind = "gp" if p.structure == "gp" else "glm"
    if p.likelihood == "regression":
        yield "prediction: mean", lambda: la(x, pred_type=kind)[0]
        yield "prediction: variance", lambda: la(x, pred_type=kind)[1]
        yield "prediction: joint covariance", lambda: la(x, pred_type=kind, joint=True)[1]
    else:
        for link in ("probit", "bridge", "bridge_norm"):
            yield f"probabilities: {link}", lambda link=link: la(x, pred_type=kind, link_approx=link)
    if p.structure == "gp" or p.model not in ("mlp", "lenet") or p.backend is not None:
        return
    yield "samples: mean", lambda: weights(p, la).mean(0)
    yield "samples: variance", lambda: weights(p, la).var(0)
    yield "latent samples: mean", lambda: la.functional_samples(x, n_samples=SAMPLES).mean(0)
    yield "latent samples: variance", lambda: la.functional_samples(x, n_samples=SAMPLES).var(0)
    if p.likelihood == "classification":
        yield "probabilities: mc", lambda: la(x, link_approx="mc", n_samples=SAMPLES)
    if p.model == "mlp":
        nn = {"pred_type": "nn", "link_approx": "mc", "n_samples": WEIGHT_SAMPLES}
        yield "nn samples: mean", lambda: la(x, **nn)[0] if p.likelihood == "regression" else la(x, **nn)


def trained(structure: str, state: Path, results: Results) -> None:
    """The posterior, evidences and losses of a short training with tuning."""
    found, model = data(state, "mlp", "classification"), load(state, "mlp")
    options = {"hessian_structure": structure, "backend": laplace.curvature.CurvlinopsGGN, "n_epochs": 4}
    options |= {"n_hypersteps": 3, "lr_hyp": 0.05, "optimizer_kwargs": {"lr": 1e-2}, "prior_structure": "layerwise"}
    name = f"mlp/classification/all/{structure}/CurvlinopsGGN/marglik_training"
    parts = results.run(name, lambda: marglik_training(model, found.loader(), "classification", **options))
    if parts is not None:
        la, _, evidences, losses = parts
        results.run(f"{name}: evidences", lambda: torch.as_tensor(evidences))
        results.run(f"{name}: losses", lambda: torch.as_tensor(losses))
        results.run(f"{name}: δ", lambda: la.prior_precision)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, of which both packages and those below them have many."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main(state: Path, result: Path) -> None:
    """Measures everything and saves it."""
    # laplace-torch computes full curvature in the default dtype, whatever the network's: a row of its own.
    torch.set_default_dtype(torch.float64)
    results, started = Results(), time.perf_counter()
    with quiet():
        for p in posteriors():
            found = data(state, p.model, p.likelihood)
            la = results.run(f"{p}/fit", lambda p=p, found=found: fitted(p, state, found))
            if la is not None:
                for name, compute in quantities(p, la, found.test):
                    results.run(f"{p}/{name}", compute)
        for structure in ("full", "kron", "diag"):
            trained(structure, state, results)
        for probe in PROBES:
            results.run(f"probe/{probe.key}", lambda probe=probe: probe.measure(state))
    versions = {name: _version(name) for name in ("laplace-torch", "torch")}
    results.save(result, {"package": str(laplace.__file__), **versions, "seconds": time.perf_counter() - started})


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
