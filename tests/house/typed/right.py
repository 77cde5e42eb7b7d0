"""Calls that a type checker has nothing to say about."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import laplace
from laplace import (
    ELLA,
    DiagSubnetLaplace,
    EkfacLLLaplace,
    FullLaplace,
    FunctionalLLLaplace,
    HessianStructure,
    KronLaplace,
    KronLLLaplace,
    Laplace,
    Likelihood,
    LinkApprox,
    LLLaplace,
    LLVaLLA,
    LowRankKronLaplace,
    MatrixFreeLaplace,
    ParametricLaplace,
    PredType,
    SubsetOfWeights,
    marglik_training,
)
from laplace.curvature import NativeEF
from laplace.grid import from_names
from laplace.likelihoods import Bernoulli
from laplace.structures import STRUCTURES, DiagCurvature

x, y = torch.randn(20, 3), torch.randint(2, (20,))
loader = DataLoader(TensorDataset(x, y), batch_size=10)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

# The class that names stand for, in strings, members and classes.
default: KronLLLaplace = Laplace(model, "classification")
kron: KronLaplace = Laplace(model, "classification", "all", prior_precision=2, damping=True)
full: FullLaplace = Laplace(model, Likelihood.REGRESSION, SubsetOfWeights.ALL, HessianStructure.FULL, sigma_noise=0.1)
ekfac: EkfacLLLaplace = Laplace(model, "classification", hessian_structure="ekfac", last_layer_name="2")
again: EkfacLLLaplace = Laplace(model, "classification", "last_layer", "ekfac", backend=NativeEF)
named: EkfacLLLaplace = Laplace(
    model, likelihood="classification", subset_of_weights="last_layer", hessian_structure="ekfac"
)
subnet: DiagSubnetLaplace = Laplace(model, "classification", "subnetwork", "diag", subnetwork_indices=torch.arange(3))
low_rank: LowRankKronLaplace = Laplace(model, "classification", "all", "lowrank_kron", structure_kwargs={"rank": 5})
products: MatrixFreeLaplace = Laplace(model, "classification", "all", "matrix_free", channel_dim=-1)
process: FunctionalLLLaplace = Laplace(model, Bernoulli(), hessian_structure="gp", n_subset=10)
ella: ELLA = Laplace(
    model, "regression", "all", "gp", functional_approximation="nystrom", subsample_size=10, n_eigenvalues=5
)
valla: LLVaLLA = Laplace(
    model, "regression", hessian_structure="gp", functional_approximation="variational", inducing_locations=x
)


@STRUCTURES.register("mine")
class Mine(DiagCurvature):
    """A structure of the user's own."""


own: ParametricLaplace = Laplace(model, "classification", "all", Mine, prior_precision=2.0)
own_head: LLLaplace = Laplace(model, "classification", hessian_structure=Mine, last_layer_name="2")
for structure in STRUCTURES:
    from_names(model, "classification", "all", structure)

# Fits, tuning and predictions.
la = Laplace(model, "classification", prior_precision=torch.ones(1))
la.fit(loader, progress_bar=True)
la.fit([(x, y)], override=False, decay=0.9)
la.optimize_prior_precision()
la.optimize_prior_precision(method="gridsearch", val_loader=loader, pred_type="nn", link_approx="mc")
la.optimize_prior_precision("glm", laplace.TuningMethod.MARGLIK, prior_structure="layerwise")
la.optimize_hyperparameters(["prior_precision", "temperature"], "nll", val_loader=loader)
la.optimize_hyperparameters("prior_precision", "ece", method="grid", val_loader=loader)
la.optimize_hyperparameters(objective=lambda probs, labels: -probs[labels].mean(), val_loader=loader)
la.refine(loader, "map")
la.prior_precision = 3.0
la.sigma_noise = torch.tensor(0.1)
evidence: float = la.log_marginal_likelihood(prior_precision=torch.tensor(2.0)).item()
confidence = la(x).amax(1).mean()
mean, variance = full(x)
probabilities: Tensor = la.predict(x, link_approx="bridge").probabilities
samples: Tensor = la.predictive_samples(x, PredType.NN, n_samples=10)
probs = la(x, pred_type=PredType.GLM, link_approx=LinkApprox.MC, generator=torch.Generator().manual_seed(0))
epistemic: Tensor = la.predict(x).decomposition.mutual_information
low, high = la.predict(x).interval(0.9)
standard_error: float = la.compare(loader, link_approx="mc").rows["nll"].standard_error
state: dict[str, Any] = la.state_dict()
la.load_state_dict(state)
la.to("cpu").fit(loader)
damping, layer = la.damping, la.last_layer_name
trained, network, margliks, losses = marglik_training(model, loader, "classification", "kron", n_epochs=2)
trained.fit(loader)
