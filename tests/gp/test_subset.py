"""The Gaussian process on a subset of the data, against dense kernels and against the full Laplace approximation."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from laplace import FunctionalLaplace, FunctionalLLLaplace, Laplace
from laplace.curvature import NativeEF
from laplace.errors import InvalidArgument, InvalidData, NotFittedError, TuningWarning, UnsupportedError
from laplace.jacobian import blocks, jacobian, outer
from laplace.jacobian.blocks import Block
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.outer import OuterBlock
from laplace.large_structures import dual
from tests import problems as catalogue
from tests.reference import curvature as reference
from tests.reference import evidence, gaussian_process
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable

HYPER = {"prior_precision": 0.3, "prior_mean": 0.1, "temperature": 1.6}
ALL = [
    "mlp_classification", "mlp_regression", "mlp_bernoulli_multi", "mlp_poisson", "mlp_heteroscedastic",
    "mlp_ignored_labels", "mlp_saturated", "prelu",
    "layer_norm", "weight_norm", "frozen_bias", "reused_module", "functional_reuse", "bare_parameter",
    "shared_positions", "time_major_square", "pair_view", "dict_input", "logits_object", "conv2d_grouped",
    "conv_transpose2d", "transformer", "lstm", "embedding_padding", "tied_head",
]  # fmt: skip
LAST = ["mlp_classification", "mlp_regression", "mlp_bernoulli_multi", "frozen_head", "shared_positions", "tied_head"]


def hyper(problem: catalogue.Problem) -> dict[str, float]:
    return HYPER | ({"sigma_noise": 0.45} if problem.likelihood == "regression" else {})


def fitted(problem: catalogue.Problem, weights: str, structure: str, size: int = 4, **options):
    la = Laplace(problem.make_model(), problem.likelihood, weights, structure, **(hyper(problem) | options))
    la.fit(problem.batches(size))
    return la


class Truth:
    """Dense quantities of a problem, of some of its data."""

    def __init__(self, problem: catalogue.Problem, chosen: list[int] | None = None, factor: float = 1.0) -> None:
        model = problem.make_model()
        names = reference.trainable_names(model)
        self.star, self.f = reference.flat_jacobian(model, problem.x, names)
        inner = reference.output_hessian(self.f, problem.likelihood, problem.y)
        counted = [n for n, y in enumerate(problem.y) if y.ndim or y != reference.IGNORED]
        self.chosen = chosen or counted
        self.train, self.inner = self.star[self.chosen], inner[self.chosen]
        self.scale = 1 / (hyper(problem).get("sigma_noise", 1.0) ** 2 * HYPER["temperature"])
        self.prior = factor * HYPER["prior_precision"] * torch.ones(self.star.shape[2], dtype=torch.float64)
        theta = reference.flat_parameters(model, names)
        loss = reference.loss(self.f[self.chosen], problem.y[self.chosen], problem.likelihood)
        likelihood = evidence.log_likelihood(
            loss, len(self.chosen), self.f.shape[1], hyper(problem).get("sigma_noise", 1.0), HYPER["temperature"],
            problem.likelihood,
        )  # fmt: skip
        ratio = gaussian_process.log_det_ratio(self.train, self.inner, self.prior, self.scale)
        scatter = (self.prior * (theta - HYPER["prior_mean"]).square()).sum()
        self.evidence = likelihood - 0.5 * (ratio + scatter)
        self.covariance = gaussian_process.posterior_covariance(
            self.star, self.train, self.inner, self.prior, self.scale
        )


@pytest.mark.parametrize("name", ALL)
def test_all_data_are_the_dense_gaussian_process(name: str) -> None:
    problem = catalogue.get(name)
    truth = Truth(problem)
    la = fitted(problem, "all", "gp", n_subset=len(truth.chosen))
    mean, covariance = la.predictive_moments(problem.x, joint=True)
    assert_close(mean, truth.f.flatten(), "backend")
    assert_close(covariance, truth.covariance, "backend")
    n_data, n_outputs = truth.f.shape
    blocks = truth.covariance.view(n_data, n_outputs, n_data, n_outputs).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    assert_close(la.predictive_moments(problem.x)[1], blocks, "backend")
    assert_close(la.functional_variance_fast(problem.x)[1], blocks.diagonal(dim1=1, dim2=2), "backend")
    assert_close(la.log_marginal_likelihood(), truth.evidence, "backend")


@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("named", [True, False])
def test_a_last_layer_is_the_full_posterior_of_it(name: str, named: bool) -> None:
    problem = catalogue.get(name)
    options = {"last_layer_name": problem.head} if named else {}
    full = fitted(problem, "last_layer", "full", **options)
    la = fitted(problem, "last_layer", "gp", n_subset=len(problem.y), **options)
    assert type(la) is FunctionalLLLaplace
    assert la.last_layer_name == full.last_layer_name
    assert la.mean.shape == full.mean.shape
    assert_close(la._latent(problem.x, "joint").covariance, full._latent(problem.x, "joint").covariance, "backend")
    assert_close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), "backend")


@pytest.mark.parametrize("selection", ["top", "leverage"])
def test_a_subset_by_score(selection: str) -> None:
    """The M data of the largest scores, their kernel at δ·N/M, and the evidence of them."""
    problem = catalogue.get("mlp_classification")
    whole = Truth(problem)
    scores = whole.inner.diagonal(dim1=1, dim2=2).sum(1)
    if selection == "leverage":
        scores = torch.einsum("ncd,ncp,ndp->n", whole.inner, whole.train, whole.train)
    chosen = sorted(scores.topk(4).indices.tolist())
    truth = Truth(problem, chosen, len(problem.y) / 4)
    for size in (1, 4, 6):
        la = fitted(problem, "all", "gp", size, n_subset=4, selection=selection)
        assert (la.n_data, la.n_subset) == (6, 4)
        assert_close(la.loss, reference.loss(truth.f[chosen], problem.y[chosen], "classification"), "backend")
        assert_close(la.predictive_moments(problem.x, joint=True)[1], truth.covariance, "backend")
        assert_close(la.log_marginal_likelihood(), truth.evidence, "backend")
        assert_close(la.log_det_posterior_precision - la.log_det_prior_precision, la.log_det_ratio, "backend")
    given = fitted(problem, "all", "gp", n_subset=4, selection=selection, prior_factor=1.0)
    assert_close(given.predictive_moments(problem.x, joint=True)[1], Truth(problem, chosen).covariance, "backend")


def test_random_subsets_are_uniform_and_follow_the_seed() -> None:
    x = torch.arange(8.0).unsqueeze(1)
    model = nn.Linear(1, 1, bias=False)
    loader = [(x[:3], x[:3]), (x[3:], x[3:])]
    counts = torch.zeros(8)
    for seed in range(160):
        la = FunctionalLaplace(model, "regression", 2, seed=seed)
        la.fit(loader)
        inputs = torch.cat([part.blocks[0].features[:, 0] for part in la.fitted().curvature.dual.parts])
        assert len(inputs) == 2
        counts[inputs.long()] += 1
    # 160 draws of 2 of 8: 40 expected of each, with a standard deviation of √(160 · ¼ · ¾) = 5.5.
    assert (counts - 40).abs().max() < 5 * 5.5
    again = FunctionalLaplace(model, "regression", 2, seed=159)
    again.fit(iter(loader))
    assert torch.equal(again.K_MM, la.K_MM)


def test_a_linear_regression_has_its_exact_evidence() -> None:
    """Closed form of the marginal likelihood of M data, N(Φμ, Φ δ⁻¹ Φᵀ + σ²)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(9, 1, dtype=torch.float64, generator=generator)
    sigma, delta = 0.4, 0.7
    one = torch.ones(9, dtype=torch.float64)
    mean, covariance, exact = evidence.bayesian_linear_regression(
        x, y[:, 0], sigma * one, delta * one[:3], torch.zeros(3, dtype=torch.float64)
    )
    model = nn.Linear(3, 1, bias=False).double()
    model.weight.data.copy_(mean.unsqueeze(0))
    la = FunctionalLaplace(model, "regression", 9, sigma_noise=sigma, prior_precision=delta)
    la.fit([(x[:5], y[:5]), (x[5:], y[5:])])
    assert_close(la.log_marginal_likelihood(), exact, "algebra")
    assert_close(la(x)[1][:, 0, 0], ((x @ covariance) * x).sum(1), "algebra")
    assert_close(la.posterior_covariance, covariance, "algebra")


@pytest.mark.parametrize("name", ["mlp_regression", "mlp_classification", "shared_positions"])
def test_weights_are_those_of_the_full_posterior(name: str) -> None:
    problem = catalogue.get(name)
    full = fitted(problem, "all", "full")
    la = fitted(problem, "all", "gp", n_subset=len(problem.y))
    for quantity in ("posterior_covariance", "posterior_variance", "posterior_precision", "log_det_ratio", "scatter"):
        assert_close(getattr(la, quantity), getattr(full, quantity), "backend", label=quantity)
    assert_close(la.log_prob(la.mean + 0.1), full.log_prob(full.mean + 0.1), "backend")


@pytest.mark.parametrize("independent", [False, True])
def test_hyper_parameters_set_after_a_fit_count_everywhere(independent: bool) -> None:
    problem = catalogue.get("mlp_regression")
    options = {"n_subset": 5, "independent_outputs": independent}
    la = fitted(problem, "all", "gp", **options)
    before = la(problem.x)[1]
    for name, value in {"prior_precision": 2.0, "sigma_noise": 0.2, "temperature": 0.7, "prior_mean": -0.2}.items():
        setattr(la, name, value)
        present = {k: getattr(la, k).item() for k in (*HYPER, "sigma_noise")}
        changed = fitted(problem, "all", "gp", **options, **present)
        if name != "prior_mean":
            assert not torch.allclose(la(problem.x)[1], before)
        before = la(problem.x)[1]
        assert_close(before, changed(problem.x)[1], "algebra")
        assert_close(la.log_marginal_likelihood(), changed.log_marginal_likelihood(), "algebra")


def test_a_second_fit_starts_anew() -> None:
    problem = catalogue.get("mlp_classification")
    la = fitted(problem, "all", "gp", n_subset=5)
    loss, covariance = la.loss, la.predictive_moments(problem.x)[1]
    la.fit(problem.batches(4))
    assert torch.equal(la.loss, loss)
    assert la.n_data == 6
    assert torch.equal(la.predictive_moments(problem.x)[1], covariance)


def test_more_data_are_added() -> None:
    problem = catalogue.get("mlp_classification")
    batches = problem.batches(3)
    la = Laplace(problem.make_model(), "classification", "all", "gp", n_subset=3, **HYPER)
    la.fit(batches[:1])
    la.fit(batches[1:], override=False)
    assert la.n_data == 6
    assert_close(la.predictive_moments(problem.x, joint=True)[1], Truth(problem).covariance, "backend")
    assert_close(la.log_marginal_likelihood(), Truth(problem).evidence, "backend")


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_prior_per_tensor_and_a_noise_per_output(weights: str) -> None:
    problem = catalogue.get("mlp_regression")
    n_tensors = 4 if weights == "all" else 2
    options = {
        "prior_precision": torch.linspace(0.2, 3.0, n_tensors, dtype=torch.float64),
        "sigma_noise": torch.linspace(0.3, 0.9, problem.y.shape[1], dtype=torch.float64),
        "last_layer_name": problem.head,
    }
    if weights == "all":
        options.pop("last_layer_name")
    full = fitted(problem, weights, "full", **options)
    la = fitted(problem, weights, "gp", n_subset=len(problem.y), **options)
    assert_close(la._latent(problem.x, "joint").covariance, full._latent(problem.x, "joint").covariance, "backend")
    assert_close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), "backend")
    assert_close(la.posterior_covariance, full.posterior_covariance, "backend")


def test_a_prior_per_parameter_is_refused() -> None:
    problem = catalogue.get("mlp_regression")
    la = fitted(problem, "all", "gp", n_subset=4)
    la.prior_precision = torch.ones(la.n_params)
    with pytest.raises(UnsupportedError, match="per parameter tensor"):
        la(problem.x)


@pytest.mark.parametrize("noise", [0.45, [0.3, 0.9]])
def test_independent_outputs(noise: float | list[float]) -> None:
    """Every output is a Gaussian process of its own, with the diagonal of Λ."""
    problem = catalogue.get("mlp_regression")
    truth = Truth(problem)
    given = torch.as_tensor(noise, dtype=torch.float64)
    sigma = given.expand(2)
    la = fitted(problem, "all", "gp", n_subset=7, independent_outputs=True, sigma_noise=given)
    joint = la.predictive_moments(problem.x, joint=True)[1].view(7, 2, 7, 2)
    total = 0.0
    for c in range(2):
        scale = 1 / (sigma[c] ** 2 * HYPER["temperature"]).item()
        arguments = truth.star[:, c : c + 1], truth.inner[:, c : c + 1, c : c + 1], truth.prior, scale
        expected = gaussian_process.posterior_covariance(truth.star[:, c : c + 1], *arguments)
        assert_close(joint[:, c, :, c], expected, "backend")
        total += gaussian_process.log_det_ratio(*arguments)
        assert not joint[:, c, :, 1 - c].any()
    assert_close(la.log_det_ratio, total, "backend")
    assert_close(la(problem.x)[1], joint.diagonal(dim1=0, dim2=2).permute(2, 0, 1), "algebra")
    with pytest.raises(UnsupportedError, match="independent_outputs"):
        la.sample(2)


def test_independent_outputs_keep_the_diagonal_of_lambda() -> None:
    problem = catalogue.get("mlp_classification")
    truth = Truth(problem)
    la = fitted(problem, "all", "gp", n_subset=6, independent_outputs=True)
    variances = la.functional_variance_fast(problem.x)[1]
    for c in range(truth.f.shape[1]):
        rows, inner = truth.star[:, c : c + 1], truth.inner[:, c : c + 1, c : c + 1]
        expected = gaussian_process.posterior_covariance(rows, rows, inner, truth.prior, truth.scale)
        assert_close(variances[:, c], expected.diagonal(), "backend")


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("shape", ["scalar", "vector"])
def test_gradients_of_the_evidence(independent: bool, shape: str) -> None:
    problem = catalogue.get("mlp_regression")
    start = {"scalar": ([0.3], [0.4], [1.4]), "vector": ([0.3, 0.5, 0.2, 0.9], [0.4, 0.6], [0.7])}[shape]
    values = [torch.tensor(value, dtype=torch.float64) for value in start]
    la = fitted(problem, "all", "gp", n_subset=5, independent_outputs=independent, sigma_noise=values[1])
    leaves = [value.clone().requires_grad_() for value in values]
    gradients = torch.autograd.grad(la.log_marginal_likelihood(*leaves), leaves)
    for i, (leaf, gradient) in enumerate(zip(values, gradients, strict=True)):
        for k in range(len(leaf)):
            step = torch.zeros_like(leaf)
            step[k] = 1e-5
            ends = [[*values[:i], leaf + sign * step, *values[i + 1 :]] for sign in (1, -1)]
            up, down = (la.log_marginal_likelihood(*end).item() for end in ends)
            assert_close(gradient[k], (up - down) / 2e-5, "finite_difference")


def test_tuning_by_the_evidence_of_a_subset_cancels_its_factor() -> None:
    """Whatever the factor, the product with the tuned prior precision is the same; a warning says so."""
    problem, products = catalogue.get("mlp_regression"), []
    for factor in (1.5, 4.0):
        la = fitted(problem, "all", "gp", n_subset=4, prior_factor=factor)
        with pytest.warns(TuningWarning, match="cancels the factor"):
            la.optimize_hyperparameters(tolerance=1e-6)
        products.append(factor * la.prior_precision)
    assert_close(products[0], products[1], "finite_difference")


def test_tuning_is_that_of_the_full_posterior() -> None:
    problem = catalogue.get("mlp_regression")
    full, la = fitted(problem, "all", "full"), fitted(problem, "all", "gp", n_subset=7)
    full.optimize_prior_precision(n_steps=5)
    la.optimize_prior_precision(n_steps=5)
    assert_close(la.prior_precision, full.prior_precision, "backend")
    for options in (
        {"tune": ("prior_precision", "sigma_noise"), "n_steps": 4, "method": "adam", "prior_structure": "layerwise"},
        {"objective": "nll", "method": "adam", "n_steps": 4, "val_loader": problem.batches(4)},
        {"objective": "nll", "method": "grid", "val_loader": problem.batches(4),
         "grid": {"prior_precision": [0.1, 1.0, 10.0, 100.0]}},
    ):  # fmt: skip
        found = []
        for model, name in ((full, "glm"), (la, "gp")):
            with pytest.warns(TuningWarning):
                found.append(model.optimize_hyperparameters(pred_type=name, **options))
        assert_close(found[1].values, found[0].values, "backend")


def test_independent_outputs_are_tuned_on_a_grid() -> None:
    problem = catalogue.get("mlp_classification")
    la = fitted(problem, "all", "gp", n_subset=4, independent_outputs=True)
    options = {"objective": "nll", "val_loader": problem.batches(4), "grid": {"prior_precision": [0.1, 1.0, 10.0]}}
    with pytest.warns(TuningWarning, match="edge"):
        values = la.optimize_hyperparameters(method="grid", **options).values
    for delta, value in zip([0.1, 1.0, 10.0], values, strict=True):
        la.prior_precision = delta
        expected = nn.functional.nll_loss(la(problem.x).log(), problem.y)
        assert_close(value, expected, "algebra")
    with pytest.raises(InvalidArgument, match="pred_type"):
        la.optimize_hyperparameters(pred_type="nn", **options)
    with pytest.raises(UnsupportedError, match="grid"):
        la.optimize_hyperparameters(objective="nll", val_loader=problem.batches(4), method="adam")


@pytest.mark.parametrize("independent", [False, True])
def test_a_state_with_as_many_columns_as_outputs_joins_later_data(independent: bool) -> None:
    """A root of Λ has fewer columns where rows of Λ sum to zero; older states hold one with all of them."""
    problem = catalogue.get("mlp_classification")
    batches, options = problem.batches(3), HYPER | {"n_subset": 3, "independent_outputs": independent}
    la = Laplace(problem.make_model(), "classification", "all", "gp", **options)
    la.fit(batches[:1])
    state = la.state_dict()
    roots = state["H"]["roots"]
    values, vectors = torch.linalg.eigh(roots @ roots.mT)
    state["H"]["roots"] = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    del state["shapes"]
    older = Laplace(problem.make_model(), "classification", "all", "gp", **options)
    older.load_state_dict(state)
    for posterior in (la, older):
        posterior.fit(batches[1:], override=False)
    assert roots.shape[2] < roots.shape[1] == older.state_dict()["H"]["roots"].shape[2]
    assert_close(older.predictive_moments(problem.x)[1], la.predictive_moments(problem.x)[1], "backend")
    assert_close(older.log_marginal_likelihood(), la.log_marginal_likelihood(), "backend")


@pytest.mark.parametrize("name", ["mlp_classification", "tied_head", "embedding_padding", "bare_parameter"])
@pytest.mark.parametrize("independent", [False, True])
def test_a_state_needs_no_data(name: str, independent: bool) -> None:
    problem = catalogue.get(name)
    la = fitted(problem, "all", "gp", n_subset=5, independent_outputs=independent)
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    other = FunctionalLaplace(problem.make_model(), problem.likelihood, 5, temperature=1.6)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(problem.x), la(problem.x))
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert "subset of 5 of 6 data" in repr(other)


def test_samples_are_joint_and_follow_the_generator() -> None:
    problem = catalogue.get("mlp_regression")
    la = fitted(problem, "all", "gp", n_subset=5)
    draws = [
        la.functional_samples(problem.x, n_samples=4000, joint=True, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    ]
    assert torch.equal(*draws)
    expected = la.predictive_moments(problem.x, joint=True)[1]
    centred = draws[0].flatten(1) - la.predictive_moments(problem.x)[0].flatten()
    variances = expected.diagonal()
    error = ((variances[:, None] * variances + expected.square()) / 4000).sqrt()
    assert_close(centred.T @ centred / 4000, expected, "mc", standard_error=error)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_every_way_of_predicting_knows_its_name(weights: str) -> None:
    problem = catalogue.get("mlp_classification")
    la = fitted(problem, weights, "gp", n_subset=5)
    probabilities = la(problem.x)
    for pred_type in ({}, {"pred_type": "gp"}, {"pred_type": "glm"}):
        seed = {"n_samples": 3, "generator": torch.Generator().manual_seed(3)}
        assert torch.equal(la.predict(problem.x, **pred_type).probabilities, probabilities)
        latents = la.functional_samples(problem.x, **pred_type, **seed)
        seed["generator"] = torch.Generator().manual_seed(3)
        assert torch.equal(la.predictive_samples(problem.x, **pred_type, **seed), latents.softmax(-1))
    for method in (la.predict, la.functional_samples, la.predictive_samples):
        with pytest.raises(InvalidArgument, match="the predictive 'gp'"):
            method(problem.x, pred_type="nn")


def test_a_prediction_is_one_pass_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass over the subset, and no Jacobian `[M, C, P]` or `[B, C, P]`."""
    problem = catalogue.get("mlp_classification")
    model = problem.make_model()
    la = Laplace(model, "classification", "all", "gp", n_subset=5, **HYPER)
    monkeypatch.setattr(jacobian, "_multiplied_out", multiplied_out)
    la.fit(problem.batches(4))
    kinds = OuterBlock | HeadBlock
    assert all(isinstance(block, kinds) for part in la.fitted().curvature.dual.parts for block in part.blocks)
    la(problem.x[:3])  # the probe of a new shape multiplies a bias out
    monkeypatch.setattr(OuterBlock, "dense", multiplied_out)
    monkeypatch.setattr(HeadBlock, "dense", multiplied_out)
    sizes: list[int] = []
    handle = model.register_forward_hook(lambda module, x, f: sizes.append(len(f)))
    la(problem.x[:3])
    la.prior_precision = 2.0
    la(problem.x[:3], link_approx="mc", joint=True, n_samples=3)
    handle.remove()
    assert sizes == [3, 3]


def multiplied_out(*blocks: Block) -> Tensor:
    raise AssertionError("a block was multiplied out")


@pytest.mark.parametrize("name", ["mlp_classification", "shared_positions", "embedding_padding", "conv2d_grouped"])
def test_results_do_not_depend_on_the_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = catalogue.get(name)
    expected = fitted(problem, "all", "gp", n_subset=5).predictive_moments(problem.x, joint=True)[1]
    for module in (blocks, outer, dual):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1500)
    found = fitted(problem, "all", "gp", n_subset=5).predictive_moments(problem.x, joint=True)[1]
    assert_close(found, expected, "algebra")


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_duplicates_and_tiny_priors_in_float32(likelihood: str) -> None:
    problem = catalogue.get(f"mlp_{likelihood}")
    x, y = problem.x.float().repeat(4, 1), problem.y.repeat(4, *(1,) * (problem.y.ndim - 1))
    y = y.float() if likelihood == "regression" else y
    model = problem.make_model().float()
    for prior in (1e-8, 1e-2, 1e4):
        la = Laplace(model, likelihood, "all", "gp", n_subset=len(y), prior_precision=prior)
        la.fit([(x, y)])
        truth = Laplace(problem.make_model(), likelihood, "all", "full", prior_precision=prior)
        truth.fit([(x.double(), y.double() if likelihood == "regression" else y)])
        mean, variance = la.functional_variance_fast(problem.x.float())
        assert mean.dtype == variance.dtype == torch.float32
        assert (variance > 0).all()
        assert la.log_marginal_likelihood().isfinite()
        if prior > 1e-8:
            assert_close(variance, truth.functional_variance_fast(problem.x)[1], "float32_ill")
            assert_close(la.log_marginal_likelihood(), truth.log_marginal_likelihood(), "float32_ill")


def test_predictions_can_be_differentiated() -> None:
    problem = catalogue.get("mlp_regression")
    gradients = []
    for structure, options in (("full", {}), ("gp", {"n_subset": 7})):
        la = fitted(problem, "all", structure, enable_backprop=True, **options)
        x = problem.x.clone().requires_grad_()
        _, variance = la(x)
        gradients.append(torch.autograd.grad(variance.sum(), x)[0])
    assert_close(gradients[1], gradients[0], "backend")


def test_a_stream_of_varying_shapes() -> None:
    """Tokens of other lengths in every batch are kept apart."""
    problem = catalogue.get("embedding_padding")
    batches = problem.batches(2)
    x, y = batches[-1]
    batches[-1] = (x[:, :-1], y)
    la = Laplace(problem.make_model(), "classification", "all", "gp", n_subset=6, **HYPER)
    la.fit(iter(batches))
    full = Laplace(problem.make_model(), "classification", "all", "full", **HYPER)
    full.fit(batches)
    assert_close(la._latent(x, "joint").covariance, full._latent(x, "joint").covariance, "backend")


def test_a_loader_may_reuse_its_tensors() -> None:
    problem = catalogue.get("mlp_classification")
    x, y = torch.empty_like(problem.x[:3]), torch.empty_like(problem.y[:3])

    def refilled():
        for part in (slice(0, 3), slice(3, 6)):
            x.copy_(problem.x[part])
            y.copy_(problem.y[part])
            yield x, y

    la = Laplace(problem.make_model(), "classification", "all", "gp", n_subset=6, **HYPER)
    la.fit(refilled())
    assert_close(la.predictive_moments(problem.x, joint=True)[1], Truth(problem).covariance, "backend")


def test_what_is_refused() -> None:
    model = nn.Linear(2, 2)
    x, y = torch.randn(5, 2), torch.randint(2, (5,))
    for options, match in (
        ({"n_subset": 0}, "n_subset"),
        ({"n_subset": 2.5}, "n_subset"),
        ({"n_subset": 2, "selection": "best"}, "selection"),
        ({"n_subset": 2, "prior_factor": -1.0}, "prior_factor"),
        ({"n_subset": 2, "backend": NativeEF}, "'ef'"),
        ({"n_subset": 2, "backend_kwargs": {"stochastic": True}}, "stochastic"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            FunctionalLaplace(model, "classification", **options)
    with pytest.raises(TypeError):
        Laplace(model, "classification", "all", "gp")
    la = FunctionalLaplace(model, "classification", 6)
    with pytest.raises(NotFittedError):
        la(x)
    with pytest.raises(InvalidData, match="only 5"):
        la.fit([(x, y)])
    assert not la.is_fitted
    la = FunctionalLaplace(model, "classification", 5)
    with pytest.raises(InvalidData, match=r"batches \[0\]"):
        la.fit([(x, y + 7)])
    la.fit([(x, y)])
    for pred_type in ("glm", "nn"):
        with pytest.raises(InvalidArgument, match="'gp'"):
            la(x, pred_type=pred_type)
    with pytest.raises(InvalidArgument, match="'gp'"):
        la.optimize_prior_precision("nn")
    with pytest.raises(InvalidArgument, match="constant"):
        FunctionalLaplace(model, "regression", 2, selection="top").fit([(x, x)])
    assert replace(la.structure_options, seed=1).seed == 1


def test_a_refined_process_is_the_refined_full_posterior() -> None:
    """And its mean the mode of the Gaussian process itself, f = m + K (y − softmax(f))."""
    problem = catalogue.get("mlp_classification")
    options = {"prior_precision": 0.3, "prior_mean": 0.1}
    full = Laplace(problem.make_model(), "classification", "all", "full", **options)
    la = Laplace(problem.make_model(), "classification", "all", "gp", len(problem.y), **options)
    for posterior in (full, la):
        posterior.fit(problem.batches(4))
        posterior.refine(problem.batches(4))
    mean, covariance = la.predictive_moments(problem.x, joint=True)
    expected = full._latent(problem.x, "joint")
    assert_close(mean, expected.mean.flatten(), "backend")
    assert_close(covariance, expected.covariance, "backend")
    assert_close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), "backend")
    model = problem.make_model()
    names = reference.trainable_names(model)
    jacobian, f = reference.flat_jacobian(model, problem.x, names)
    prior_mean = f + jacobian @ (0.1 - reference.flat_parameters(model, names))
    rows = jacobian.flatten(0, 1)
    mode = mean.view_as(prior_mean)
    residuals = nn.functional.one_hot(problem.y, mode.shape[1]) - mode.softmax(1)
    expected_mode = prior_mean.flatten() + rows @ (rows.T @ residuals.flatten()) / 0.3
    assert_close(mode.flatten(), expected_mode, "backend")


def test_a_warning_of_a_tuning_points_at_the_caller() -> None:
    problem = catalogue.get("mlp_regression")
    la = fitted(problem, "all", "gp", n_subset=4)
    with pytest.warns(TuningWarning) as caught:
        la.optimize_prior_precision(
            val_loader=problem.batches(4), grid_size=3, log_prior_prec_min=8, log_prior_prec_max=9
        )
    assert [w.filename for w in caught if w.category is TuningWarning] == [__file__]


def test_a_prior_per_tensor_of_single_weights() -> None:
    """Two tensors of one entry each: a prior per tensor is one per weight, and both are known to the kernel."""
    model = nn.Linear(1, 1).double()
    x = torch.linspace(-1, 1, 5, dtype=torch.float64).unsqueeze(1)
    prior = torch.tensor([0.5, 3.0], dtype=torch.float64)
    full, la = (Laplace(model, "regression", "all", *rest, prior_precision=prior) for rest in (("full",), ("gp", 5)))
    for posterior in (full, la):
        posterior.fit([(x, x.square())])
    assert_close(la(x)[1], full(x)[1], "backend")
    assert_close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), "backend")
