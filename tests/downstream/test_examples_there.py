"""The examples that come with laplace-torch, in small: the calls of each, and its numbers by dense algebra."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from laplace import Laplace, PredType, marglik_training
from tests.downstream.problems import Truth, loader, network, new_inputs, numbers, sine
from tests.reference import predictive
from tests.reference.compare import assert_close


def regression(tmp_path, *, asserts: bool) -> None:
    """One dimension, hyper-parameters by the evidence, saved and loaded, then predictions; then online."""
    model, X_train, y_train = sine(711)
    X_test = torch.linspace(-5, 13, 500).unsqueeze(-1)
    la = Laplace(model, "regression", subset_of_weights="all", hessian_structure="full")
    la.fit(loader(X_train, y_train, 150))
    log_prior, log_sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    hyper_optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(60):
        hyper_optimizer.zero_grad()
        neg_marglik = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        neg_marglik.backward()
        hyper_optimizer.step()
    torch.save(la.state_dict(), tmp_path / "state_dict.bin")
    la = Laplace(model, "regression", subset_of_weights="all", hessian_structure="full")
    la.load_state_dict(torch.load(tmp_path / "state_dict.bin"))

    f_mu, f_var = la(X_test)
    if asserts:
        evidence_s, la.prior_precision = la.prior_precision, 0.01  # as badly conditioned as by the long training there
        (f_mu_long, f_var_long), (f_mu_joint, f_cov) = la(X_test), la(X_test, joint=True)
        assert torch.allclose(f_mu_long.flatten(), f_mu_joint)
        assert torch.allclose(f_var_long.flatten(), f_cov.diag())
        la.prior_precision = evidence_s
    exact = model.double()
    truth = Truth(
        exact, X_train.double(), y_train.double(), "regression",
        prior=la.prior_precision.double(), sigma=float(la.sigma_noise),
    )  # fmt: skip
    some = slice(None, None, 100)
    assert_close(f_mu[some], truth.latent(X_test[some].double())[0], "float32_solve")
    assert_close(f_var[some], truth.latent(X_test[some].double())[1], "float32_ill")
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "float32_solve")
    assert 0.2 < float(la.sigma_noise) < 0.6

    torch.manual_seed(0)
    fresh = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    la, online, margliks, losses = marglik_training(
        model=fresh, train_loader=loader(X_train.double(), y_train.double(), 150), likelihood="regression",
        hessian_structure="full", n_epochs=12, optimizer_kwargs={"lr": 1e-2}, prior_structure="scalar",
    )  # fmt: skip
    assert (len(margliks), len(losses)) == (120, 12)
    truth = Truth(
        online.eval(), X_train.double(), y_train.double(), "regression",
        prior=la.prior_precision, sigma=float(la.sigma_noise),
    )  # fmt: skip
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")
    assert float(-la.log_marginal_likelihood()) <= margliks[0]


def test_regression(tmp_path) -> None:
    regression(tmp_path, asserts=True)


def test_regression_past_its_assertion(tmp_path) -> None:
    regression(tmp_path, asserts=False)


def test_expectation() -> None:
    model, (x, y), new = network(n_out=1), numbers(), new_inputs()
    la = Laplace(model, "regression", subset_of_weights="last_layer", hessian_structure="full", sigma_noise=0.5)
    la.fit(loader(x, y))
    truth = Truth(model, x, y, "regression", names=("2.weight", "2.bias"), sigma=0.5)
    mean, variance = (part.flatten() for part in truth.latent(new))
    # E sin(f) and its variance for f ~ N(m, v); of a last layer both predictives are this Gaussian.
    expected = torch.sin(mean) * torch.exp(-variance / 2)
    square = 0.5 * (1 - torch.cos(2 * mean) * torch.exp(-2 * variance))
    found = {}
    for pred_type in (PredType.GLM, PredType.NN):
        draws = la.functional_samples(new, pred_type=pred_type, n_samples=4000)
        found[f"{pred_type}"] = draws.sin().mean(0).flatten()
        error = ((square - expected.square()) / 4000).sqrt()
        assert_close(found[f"{pred_type}"], expected, "mc", standard_error=error)
    assert len(found) == 2


def digits(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Small pictures in place of large ones, `[n, 64]`, float64."""
    datasets = pytest.importorskip("sklearn.datasets")
    pictures, labels = datasets.load_digits(return_X_y=True)
    return torch.as_tensor(pictures[:n]).double() / 8 - 1, torch.as_tensor(labels[:n])


def classifier(x: torch.Tensor, y: torch.Tensor, width: int = 12) -> nn.Sequential:
    """A network trained on them until it is too sure."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def by_head(model: nn.Sequential, x: torch.Tensor, new: torch.Tensor, delta: float) -> torch.Tensor:
    """Probit probabilities of a Kronecker-factored last layer, weight and bias apart, `[B, C]`."""
    phi, at = torch.relu(model[0](x)).detach(), torch.relu(model[0](new)).detach()
    p = model(x).softmax(-1).detach()
    B = torch.diag(p.sum(0)) - p.T @ p
    A = phi.T @ phi / len(x)
    n, d = B.shape[0], A.shape[0]
    eye = torch.eye(n * d, dtype=x.dtype)
    weight = torch.linalg.inv(torch.kron(B, A) + delta * eye).view(n, d, n, d)
    bias = torch.linalg.inv(B + delta * torch.eye(n, dtype=x.dtype))
    covariance = torch.einsum("bi,cidj,bj->bcd", at, weight, at) + bias
    return predictive.probit(model(new).detach(), covariance)


@pytest.mark.filterwarnings("ignore::laplace.errors.CalibrationWarning")  # rightly so: the script runs on
def test_calibration() -> None:
    x, y = digits(500)
    x, y, new, labels = x[:200], y[:200], x[200:], y[200:]
    model = classifier(x, y)
    la = Laplace(model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
    la.fit(loader(x, y, 50))
    la.optimize_prior_precision(method="marglik")
    probs_map, probs_la = model(new).softmax(-1).detach(), la(new, link_approx="probit")
    assert_close(probs_la, by_head(model, x, new, float(la.prior_precision)), "backend")
    accuracy = [(probs.argmax(-1) == labels).double().mean() for probs in (probs_map, probs_la)]
    confidence = [probs.max(-1).values.mean() for probs in (probs_map, probs_la)]
    assert min(accuracy) > 0.7
    assert confidence[1] < confidence[0]


def test_calibration_gp() -> None:
    x, y = digits(40)
    x, y, new = x[:24], y[:24], x[24:]
    model = classifier(x, y, width=3)
    truth = Truth(model, x, y, "classification", prior=20.0)
    for m in (8, 24):
        la = Laplace(model, "classification", "all", "gp", n_subset=m, seed=0, prior_precision=20.0)
        la.fit(loader(x, y, 8))
        p = la(new, pred_type="gp", link_approx="probit")
        assert_close(p.sum(-1), torch.ones(len(new)), "algebra")
    # Of all data it is the full Laplace approximation.
    assert_close(p, truth.probit(new), "backend")


def objective(x: torch.Tensor) -> torch.Tensor:
    """What is to be minimised."""
    return torch.sin(2 * x).sum(-1, keepdim=True) + 0.3 * x.square().sum(-1, keepdim=True)


def test_bayesopt() -> None:
    x, _ = numbers()
    y = objective(x)
    best = [float(y.min())]
    for step in range(2):
        torch.manual_seed(step)
        model = network(n_out=1)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
        for _ in range(50):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        la = Laplace(model, "regression", "all", "kron", enable_backprop=True, sigma_noise=0.1)
        la.fit(loader(x, y))
        la.optimize_prior_precision(n_steps=10)
        truth = Truth(model, x, y, "regression", "kron", prior=la.prior_precision.detach(), sigma=0.1)
        candidate = new_inputs(1).requires_grad_()
        ascent = torch.optim.Adam([candidate], lr=5e-2, maximize=True)
        for _ in range(8):
            ascent.zero_grad()
            mean, covariance = la(candidate, joint=True)
            scale = covariance.diagonal().sqrt()
            u = (best[-1] - mean) / scale
            density = torch.exp(-u.square() / 2) / math.sqrt(2 * math.pi)
            (scale * (u * torch.special.ndtr(u) + density)).sum().backward()
            ascent.step()
        at = candidate.detach()
        assert_close(la(at, joint=True)[0], truth.latent(at)[0].flatten(), "backend")
        assert_close(la(at, joint=True)[1], truth.joint(at), "backend")
        x, y = torch.cat([x, at]), torch.cat([y, objective(at)])
        best.append(float(y.min()))
    assert len(x) == 14
    assert best == sorted(best, reverse=True)


class LanguageModel(nn.Module):
    """A wrapper that takes a batch of a collator whole and returns logits."""

    def __init__(self, hf_model: nn.Module) -> None:
        super().__init__()
        self.hf_model = hf_model

    def forward(self, data):
        return self.hf_model(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits


def test_huggingface() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    model = LanguageModel(transformers.GPT2ForSequenceClassification(config)).double().eval()
    ids = torch.randint(1, 16, (10, 6))
    lengths = torch.tensor([6, 6, 5, 4, 3, 6, 5, 4, 3, 6])
    mask = (torch.arange(6) < lengths.unsqueeze(1)).long()
    ids, y = ids * mask, torch.randint(2, (10,))
    batches = [{"input_ids": ids[i], "attention_mask": mask[i], "labels": y[i]} for i in (slice(0, 6), slice(6, 10))]
    test = {"input_ids": ids, "attention_mask": mask}

    # The score reads the last token that is no padding, f = W φ, so that J = I ⊗ φ.
    phi = model.hf_model.transformer(**test).last_hidden_state[torch.arange(10), lengths - 1].detach()
    f = model(test).detach()
    assert_close(f, phi @ model.hf_model.score.weight.T, "algebra")
    p = f.softmax(-1)
    inner = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    J = torch.einsum("cd,bi->bcdi", torch.eye(2, dtype=f.dtype), phi).flatten(2)
    precision = torch.einsum("bcp,bcd,bdq->pq", J, inner, J) + 2 * torch.eye(16, dtype=f.dtype)
    expected = predictive.probit(f, J @ torch.linalg.inv(precision) @ J.mT)

    last = Laplace(
        model, likelihood="classification", subset_of_weights="last_layer", hessian_structure="full",
        feature_reduction="pick_last", prior_precision=2.0,
    )  # fmt: skip
    last.fit(batches)
    assert_close(last(test), expected, "backend")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("score" in name)
    every = Laplace(
        model, likelihood="classification", subset_of_weights="all", hessian_structure="full", prior_precision=2.0
    )
    every.fit(batches)
    assert_close(every(test), expected, "backend")
    assert_close(every.mean, parameters_to_vector(model.hf_model.score.parameters()), "exact")


class Reward(nn.Module):
    """A reward per item: pairs `[B, 2, d]` to `[B, 2]`, items `[B, d]` to `[B, 1]`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        r = self.net(x)
        return r.squeeze(-1) if x.ndim == 3 else r


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_reward_modeling(structure: str) -> None:
    torch.manual_seed(1)
    model = Reward().double().eval()
    pairs, y = torch.randn(12, 2, 2, dtype=torch.float64), torch.randint(2, (12,))
    new = new_inputs()
    la = Laplace(model, likelihood="reward_modeling", subset_of_weights="all", hessian_structure=structure)
    la.fit(loader(pairs, y))
    la.optimize_prior_precision(method="marglik", n_steps=10)
    truth = Truth(model, pairs, y, "reward_modeling", structure, prior=la.prior_precision)
    f_mu, f_var = la(new)
    assert_close(f_mu, truth.latent(new)[0], "backend")
    assert_close(f_var, truth.latent(new)[1], "backend")
