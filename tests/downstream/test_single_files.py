"""Projects that use laplace-torch: fits by hand, samples in the last layer, single files."""

from __future__ import annotations

import copy
import math
import pickle
from collections import UserDict

import pytest
import torch
from laplace.utils import Kron, KronDecomposed
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from laplace import DiagLaplace, KronLaplace, Laplace, LLLaplace
from laplace.curvature import BackPackEF
from tests.downstream.problems import (
    HEAD,
    Truth,
    classes,
    copied,
    loader,
    network,
    new_inputs,
    numbers,
    untouched,
)
from tests.reference import predictive
from tests.reference.compare import assert_close


def test_bayesdiff_fits_a_convolution_by_hand() -> None:
    pytest.importorskip("backpack")
    torch.manual_seed(0)
    head = nn.Sequential(nn.Conv2d(2, 1, 2), nn.Flatten()).double().eval()
    x, new = torch.randn(8, 2, 3, 3, dtype=torch.float64), torch.randn(3, 2, 3, 3, dtype=torch.float64)
    y = torch.randn(8, 4, dtype=torch.float64)
    la = DiagLaplace(head, "regression", backend=BackPackEF, sigma_noise=1.0, prior_precision=2.0)
    la._init_H()
    la.mean = parameters_to_vector(head.parameters()).detach()
    la.loss, la.n_data, la.n_outputs = 0, 0, 4
    for start in (0, 4):
        X, t = x[start : start + 4].to(la._device), y[start : start + 4].to(la._device)
        loss_batch, H_batch = la._curv_closure(X=X, y=t, N=8)
        la.loss += loss_batch
        la.H += H_batch
    la.n_data += 8
    truth = Truth(head, x, y, "regression", "diag", kind="ef", prior=2.0)
    assert_close(la.H, truth.H.diagonal(), "backend")
    assert_close(la.loss, truth.loss, "backend")
    assert_close(la.posterior_variance, 1 / truth.precision.diagonal(), "backend")
    f_mu, f_var = la(new)
    assert_close(f_mu, truth.latent(new)[0], "backend")
    assert_close(f_var, truth.latent(new)[1], "backend")


def fit_from_mappings(self, train_loader) -> None:
    """A fit of batches `{"data", "label"}` that takes the place of a posterior's own."""
    if isinstance(self, KronLaplace):
        self.H_facs = None
    self._init_H()
    self.mean = parameters_to_vector(self.params).detach()
    self.loss, n_data = 0, sum(len(batch["label"]) for batch in train_loader)
    for batch in train_loader:
        X, y = batch["data"].to(self._device), batch["label"].to(self._device)
        with torch.no_grad():
            self.n_outputs = self.model(X[:1]).shape[-1]
        loss_batch, H_batch = self._curv_closure(X, y, n_data)
        self.loss += loss_batch
        self.H += H_batch
    self.n_data = n_data
    if isinstance(self, KronLaplace):
        self.H_facs = self.H
        self.H = self.H_facs.decompose(damping=self.damping)


def fit_with_factors_apart(self, train_loader, override=True) -> None:
    """A fit whose factors are summed apart from H: new ones are added to those of former data."""
    if override:
        self.H_facs = None
    new = sum(len(batch["label"]) for batch in train_loader)
    former = self.n_data
    if self.H_facs is not None:
        self._init_H()
        self.H_facs = self._rescale_factors(self.H_facs, former / (former + new))
    if override:
        self._init_H()
        self.loss, self.n_data = 0, 0
    self.mean, self.n_outputs = parameters_to_vector(self.params).detach(), 3
    for batch in train_loader:
        loss_batch, H_batch = self._curv_closure(batch["data"], batch["label"], new)
        self.loss += loss_batch
        self.H += H_batch
    self.n_data += new
    if self.H_facs is None:
        self.H_facs = self.H
    else:
        self.H = self._rescale_factors(self.H, new / (new + former))
        self.H_facs += self.H
    self.H = self.H_facs.decompose(damping=self.damping)


def test_factors_are_summed_apart_from_h() -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    parts = [[{"data": x[at], "label": y[at]}] for at in (slice(0, 5), slice(5, 7), slice(7, None))]
    la, plain = (Laplace(model, "classification", "all", "kron", prior_precision=1.5) for _ in range(2))
    for i, part in enumerate(parts):
        fit_with_factors_apart(la, part, override=i == 0)
        plain.fit([(batch["data"], batch["label"]) for batch in part], override=i == 0)
        assert (la.n_data, la.n_outputs) == (plain.n_data, 3)
        assert_close(la.H_facs.to_matrix(), plain.H_facs.to_matrix(), "backend")
        assert_close(la(new), plain(new), "backend")
        assert_close(la.log_marginal_likelihood(), plain.log_marginal_likelihood(), "backend")
    fit_with_factors_apart(la, parts[0])
    plain.fit([(batch["data"], batch["label"]) for batch in parts[0]])
    assert_close(la(new), plain(new), "backend")


def test_openood_replaces_the_fit_of_one_object() -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    batches = [{"data": x[:5], "label": y[:5]}, {"data": x[5:], "label": y[5:]}]
    for weights, names in (("all", None), ("last_layer", HEAD)):
        for structure in ("diag", "kron", "full"):
            options = {"last_layer_name": "2"} if names else {}
            la = Laplace(model, "classification", weights, structure, prior_precision=1.5, **options)
            la.fit = fit_from_mappings.__get__(la)
            la.fit(batches)
            truth = Truth(model, x, y, "classification", structure, names, prior=1.5)
            assert_close(la(new), truth.probit(new), "backend", label=f"{weights} {structure}")
            assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")
    kron = Laplace(model, "classification", "all", "kron")
    assert kron.H_facs is None
    kron.fit(loader(x, y))
    half = kron._rescale_factors(Kron([[f.clone() for f in block] for block in kron.H_facs.kfacs]), 0.5)
    assert_close(half.kfacs[0][1], 0.5 * kron.H_facs.kfacs[0][1], "algebra")
    assert_close(half.kfacs[0][0], kron.H_facs.kfacs[0][0], "algebra")
    assert_close(half.kfacs[1][0], kron.H_facs.kfacs[1][0], "algebra")
    diag = DiagLaplace(model, "classification", prior_precision=4.0)
    diag.fit(loader(x, y))
    diag.H = torch.zeros(diag.n_params, dtype=x.dtype)
    assert_close(diag.posterior_variance, torch.full((diag.n_params,), 0.25, dtype=x.dtype), "algebra")


def test_samples_are_loaded_into_the_last_layer() -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    before = copied(model)
    la = Laplace(model, "classification")
    la.fit(loader(x, y))
    p_before, p = la(new), 0
    thetas = la.sample(5, generator=torch.Generator().manual_seed(4))
    for sample in thetas:
        vector_to_parameters(sample, la.model.last_layer.parameters())
        f, features = la.model.forward_with_features(new.to(la._device))
        p = p + f.softmax(-1).detach() / len(thetas)
    hidden = torch.tanh(model[0](new)).detach()
    outputs = [hidden @ theta[:12].view(3, 4).T + theta[12:] for theta in thetas]
    assert_close(features, hidden, "algebra")
    assert_close(p, torch.stack(outputs).softmax(-1).mean(0), "algebra")
    assert untouched(model, before)
    assert_close(la(new), p_before, "exact")


def test_unlearning_rewrites_an_eigendecomposition() -> None:
    model, (x, y) = network(), classes()
    la = Laplace(model, "classification", "last_layer", "kron", prior_precision=3.0)
    la.fit(loader(x, y))
    truth = Truth(model, x, y, "classification", "kron", HEAD, prior=3.0)
    precision = la.posterior_precision
    assert isinstance(precision, KronDecomposed)
    assert precision.damping is False
    inputs = torch.linalg.eigvalsh(truth.factors["2.weight"][0][1])
    assert_close(precision.eigenvalues[0][1].sort().values, inputs, "backend")
    blocks = []
    for i, (Qs, ls) in enumerate(zip(precision.eigenvectors, precision.eigenvalues, strict=True)):
        for j in range(len(Qs)):
            precision.eigenvectors[i][j] = Qs[j].cpu()
            precision.eigenvalues[i][j] = ls[j].cpu()
        Q = Qs[0] if len(Qs) == 1 else torch.kron(Qs[0], Qs[1])
        values = ls[0] if len(ls) == 1 else torch.outer(ls[0], ls[1]).flatten()
        blocks.append(Q @ torch.diag(values + precision.deltas[i]) @ Q.T)
    precision.deltas = precision.deltas.cpu()
    assert_close(torch.block_diag(*blocks), truth.precision, "backend")
    assert_close(precision.to_matrix(exponent=-1), truth.covariance, "backend")


class Flow(nn.Module):
    """A velocity field v(x, t), called by a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        return self.net(x)


def test_lerobot_copies_the_policy_for_every_sample(tmp_path) -> None:
    torch.manual_seed(3)
    policy = Flow().double().eval()
    x = torch.randn(10, 3, dtype=torch.float64)
    y = torch.randn(10, 2, dtype=torch.float64)
    la = Laplace(policy, likelihood="regression", subset_of_weights="all", hessian_structure="diag")
    la.fit(loader(x, y))
    torch.save(la.state_dict(), tmp_path / "la.bin")
    again = Laplace(policy, likelihood="regression", subset_of_weights="all", hessian_structure="diag")
    again.load_state_dict(torch.load(tmp_path / "la.bin"))
    draws = again.sample(n_samples=2000, generator=torch.Generator().manual_seed(8))
    truth = Truth(policy, x, y, "regression", "diag")
    variance = 1 / truth.precision.diagonal()
    assert_close(draws.mean(0), truth.mean, "mc", standard_error=(variance / 2000).sqrt())
    assert_close(draws.var(0), variance, "mc", standard_error=variance * (2 / 2000) ** 0.5)
    sampled = copy.deepcopy(policy)
    vector_to_parameters(draws[0], sampled.parameters())
    hidden = torch.tanh(x @ draws[0][:12].view(4, 3).T + draws[0][12:16])
    assert_close(sampled(x), hidden @ draws[0][16:24].view(2, 4).T + draws[0][24:], "algebra")


class Tokens(nn.Module):
    """A classifier of tokens with a low-rank update, called by a mapping; its layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lora, self.score = nn.Embedding(7, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
        self.table.requires_grad_(False)

    def forward(self, data):
        h = self.table(data["input_ids"]) * data["attention_mask"].unsqueeze(-1)
        return self.score(torch.tanh(self.lora(torch.tanh(self.lora(h)))).mean(1))


def test_chemberta_reads_variances_of_a_batch_encoding() -> None:
    torch.manual_seed(4)
    model = Tokens().double().eval()
    ids = torch.randint(7, (8, 5))
    mask = torch.ones_like(ids)
    mask[:3, 3:] = 0
    y = torch.randint(2, (8,))
    # What tokenizers return is a UserDict.
    batch = UserDict({"input_ids": ids, "attention_mask": mask, "labels": y})
    la = Laplace(model, "classification", "all", "full")
    la.fit([batch])
    Js, f = la.backend.jacobians(batch)
    names = ["lora.weight", "score.weight", "score.bias"]
    rows = []
    for b in range(len(ids)):
        one = {key: value[b : b + 1] for key, value in batch.items()}
        parameters = [dict(model.named_parameters())[name] for name in names]
        out = model(one)[0]
        rows.append(torch.stack([
            torch.cat([g.flatten() for g in torch.autograd.grad(out[c], parameters, retain_graph=True)]) for c in (0, 1)
        ]))  # fmt: skip
    J, p = torch.stack(rows), model(batch).softmax(-1).detach()
    assert_close(Js, J, "backend")
    assert_close(f, model(batch), "algebra")
    inner = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    precision = torch.einsum("bcp,bcd,bdq->pq", J, inner, J) + torch.eye(la.n_params, dtype=J.dtype)
    f_var = la.functional_variance(Js)
    assert_close(f_var, J @ torch.linalg.inv(precision) @ J.mT, "backend")
    assert_close(la(batch), predictive.probit(model(batch).detach(), f_var), "backend")


class OneColumn:
    """A loss of outputs `[B, 1]` and targets `[B]`."""

    def __init__(self, loss) -> None:
        self.loss = loss

    def __call__(self, outputs, targets):
        return self.loss(outputs, targets.view(-1, 1))


def test_bone_age_wraps_the_loss_of_the_backend() -> None:
    model, (x, y), new = network(n_out=1), numbers(), new_inputs()
    la = Laplace(model, "regression", subset_of_weights="last_layer", hessian_structure="full", sigma_noise=0.5)
    la.model.find_last_layer(x)
    assert sum(p.numel() for p in la.model.last_layer.parameters()) == la.n_params
    assert_close(la.mean, 0.0, "exact")
    la.backend.lossfunc = OneColumn(la.backend.lossfunc)
    la.fit(loader(x, y.squeeze(1)))
    truth = Truth(model, x, y, "regression", names=HEAD, sigma=0.5)
    for fitted in (la, pickle.loads(pickle.dumps(la))):
        f_mu, f_var = fitted(new)
        assert_close(f_mu, truth.latent(new)[0], "backend")
        assert_close(f_var, truth.latent(new)[1], "backend")
        assert_close(fitted.log_marginal_likelihood(), truth.log_evidence, "backend")


def test_loading_is_patched_to_drop_the_stored_batch(monkeypatch) -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    original, seen = LLLaplace.load_state_dict, []

    def load_state_dict(self, state_dict) -> None:
        seen.append(state_dict.get("data"))
        original(self, {key: value for key, value in state_dict.items() if key != "data"})

    monkeypatch.setattr(LLLaplace, "load_state_dict", load_state_dict)
    la = Laplace(model, "classification")
    la.fit(loader(x, y))
    again = Laplace(model, "classification")
    again.load_state_dict({"data": None, **la.state_dict()})
    assert seen == [None]
    assert_close(again(new), Truth(model, x, y, "classification", "kron", HEAD).probit(new), "backend")


def test_active_learning_and_bounds_write_their_own_scores() -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    la = Laplace(model, "classification", "all", "full", prior_precision=0.7)
    la.fit(loader(x, y))
    truth = Truth(model, x, y, "classification", prior=0.7)
    Js, _ = la.backend.jacobians(new)
    traces = la.functional_variance(Js).diagonal(dim1=1, dim2=2).sum(-1)
    assert_close(traces, truth.latent(new)[1].diagonal(dim1=1, dim2=2).sum(-1), "backend")
    # KL(N(θ*, P⁻¹) ‖ N(0, 1/δ)) as bounds write it.
    n, theta, delta = la.n_params, la.mean, la.prior_precision
    kl = 0.5 * (delta * (la.posterior_covariance.trace() + theta @ theta) - n + la.log_det_ratio)
    prior = torch.distributions.MultivariateNormal(0 * truth.mean, precision_matrix=0.7 * torch.eye(n, dtype=x.dtype))
    posterior = torch.distributions.MultivariateNormal(truth.mean, precision_matrix=truth.precision)
    assert_close(kl.squeeze(), torch.distributions.kl_divergence(posterior, prior), "backend")

    draws = la.predictive_samples(new, pred_type="glm", n_samples=4000)
    expected, error = predictive.monte_carlo(*truth.latent(new), 4000, torch.Generator().manual_seed(0))
    assert_close(draws.mean(0), expected, "mc", standard_error=error * math.sqrt(2))
    torch.manual_seed(9)
    p = la._nn_predictive_samples(new, n_samples=64)
    torch.manual_seed(9)
    assert_close(p, la.predictive_samples(new, pred_type="nn", n_samples=64), "exact")
    disagreement = -(p.mean(0) * p.mean(0).log()).sum(-1) + (p * p.log()).sum(-1).mean(0)
    assert bool((disagreement > 0).all())
