"""Mistakes that a type checker finds before the program runs: one on every line that says so."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace import KronLLLaplace, Laplace, marglik_training
from laplace.structures import KronCurvature

x, y = torch.randn(20, 3), torch.randint(2, (20,))
loader = DataLoader(TensorDataset(x, y), batch_size=10)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

# Names.
Laplace(model, likelihood="clasification")  # mistake
Laplace(model, "classification", subset_of_weights="lastlayer")  # mistake
Laplace(model, "classification", "all", "krone")  # mistake
Laplace(model, "classification", hessian_structure="diagonal")  # mistake
Laplace(model, "regression", "all", "gp", n_subset=5, functional_approximation="nystroem")  # mistake
KronLLLaplace(model, "clasification")  # mistake

# Arguments of the class that the names choose.
Laplace(model, "classification", prior_precisionn=1)  # mistake
Laplace(model, "classification", prior_precision="1.0")  # mistake
Laplace(model, "classification", "all", last_layer_name="2")  # mistake
Laplace(model, "classification", "all", "diag", damping=True)  # mistake
Laplace(model, "classification", "subnetwork")  # mistake
Laplace(model, "regression", "all", "gp", n_subset="all")  # mistake
Laplace(model, "classification", structure_kwargs={"rank": 5})  # mistake
Laplace(model, "classification", "all", KronCurvature, prior_precisionn=1)  # mistake
KronLLLaplace(model, "classification", prior_precisionn=1)  # mistake

# Methods.
la = Laplace(model, "classification", "all", "kron")
la.ftt(loader)  # mistake
la.fit(loader, progres_bar=True)  # mistake
la.optimize_prior_precision(method="margilk")  # mistake
la.optimize_prior_precision(prior_structure="layer")  # mistake
la.optimize_hyperparameters("noise")  # mistake
la.optimize_hyperparameters(objective="nlll", val_loader=loader)  # mistake
la.optimize_hyperparameters(method="lbgfs")  # mistake
la.refine(loader, "variation")  # mistake
la(x, link_approx="probbit")  # mistake
la(x, pred_type="glmm")  # mistake
la(x, n_samples="100")  # mistake
la.predictive_samples(x, pred_type="gml")  # mistake
la.predict(x).distribution("targets")  # mistake
marglik_training(model, loader, likelihood="regresion")  # mistake
marglik_training(model, loader, hessian_structure="kronecker")  # mistake
marglik_training(model, loader, prior_structure="layers")  # mistake

# What they return.
la.fit(loader)(x)  # mistake
wrong = la.predict(x).probabilites  # mistake
la.log_marginal_likelihood().itm()  # mistake
mean, variance = la.predict(x)  # mistake
wrong = la.damping_  # mistake
wrong = Laplace(model, "classification", "last_layer", "diag").damping  # mistake
