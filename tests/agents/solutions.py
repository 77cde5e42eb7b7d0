"""Twenty tasks and more, solved by the calls of AGENTS.md."""

from __future__ import annotations

import torch
from laplace.utils import LargestMagnitudeSubnetMask

import laplace
from laplace import Laplace, MixtureLaplace
from tests.agents.tasks import probabilities, task


@task(probabilities(30, 3))
def fit_a_last_layer(model, train_loader, val_loader, x):
    """Make my trained classifier uncertain, and calibrate it on validation data."""
    la = Laplace(model, "classification")
    la.fit(train_loader)
    la.calibrate(val_loader)
    return la(x)


@task(lambda found: 0 < found[0] < 0.6 and (found[1] > 0).all())
def regression_with_noise(regressor, regression_loader, line):
    """Learn the noise of my regression, without validation data, and give the variance of the function."""
    la = Laplace(regressor, "regression", "all", "full")
    la.fit(regression_loader)
    la.optimize_hyperparameters(("prior_precision", "sigma_noise"))
    mean, variance = la(line)
    return la.sigma_noise, variance, mean


@task(lambda found: (found[0] < found[1]).all() and found[0].shape == (40, 1))
def intervals_of_targets(regressor, regression_loader, line):
    """Give intervals that hold 90 % of new observations."""
    la = Laplace(regressor, "regression", "all", "kron")
    la.fit(regression_loader)
    la.optimize_hyperparameters(("prior_precision", "sigma_noise"))
    return la.predict(line).interval(0.9)


@task(probabilities(8, 3))
def lora_adapters(peft_model, batch):
    """Put a posterior over the LoRA adapters of my language model."""
    la = Laplace(peft_model, "classification", "all", "lowrank_kron")
    la.fit([batch])
    return la(batch)


@task(probabilities(8, 3))
def a_transformer_as_it_is(transformer, batch):
    """Use a model of transformers, with its batches as mappings."""
    la = Laplace(transformer, "classification")
    la.fit([batch])
    return la(batch)


@task(probabilities(8, 5, 3))
def a_class_per_token(tagger, tagged, tokens):
    """My network tags every token; I want probabilities for each."""
    la = Laplace(tagger, "classification")
    la.fit(tagged)
    return la(tokens)


@task(lambda found: torch.equal(*found))
def save_and_load(model, train_loader, x, path):
    """Keep the posterior in a file, and load it for the same network."""
    la = Laplace(model, "classification")
    la.fit(train_loader)
    la.save(path)
    again = laplace.load(path, model)
    return la(x), again(x)


@task(probabilities(30, 3))
def calibrate_without_validation_data(model, train_loader, x):
    """I have no validation data: calibrate all the same."""
    la = Laplace(model, "classification")
    la.fit(train_loader)
    la.calibrate(train_loader=train_loader)
    return la(x)


@task(lambda text: "NLL" in text and "difference" in text)
def compare_with_the_network(model, train_loader, val_loader, test_loader):
    """Does the posterior help at all? Compare it with the network on test data."""
    la = Laplace(model, "classification")
    la.fit(train_loader)
    la.calibrate(val_loader)
    return str(la.compare(test_loader))


@task(probabilities(30, 3))
def more_accurate_variances(model, train_loader, x):
    """Use all weights, with more accurate variances than Kronecker factors give."""
    la = Laplace(model, "classification", "all", "ekfac")
    la.fit(train_loader)
    return la(x)


@task(lambda weights: weights.shape == (5, 67))
def samples_of_weights(model, train_loader):
    """Sample weights of the exact covariance of my small network."""
    la = Laplace(model, "classification", "all", "full")
    la.fit(train_loader)
    return la.sample(5)


@task(probabilities(30, 3))
def a_subnetwork(model, train_loader, x):
    """Only the 20 largest weights shall be random."""
    indices = LargestMagnitudeSubnetMask(model, n_params_subnet=20).select()
    la = Laplace(model, "classification", "subnetwork", "full", subnetwork_indices=indices)
    la.fit(train_loader)
    return la(x)


@task(probabilities(30, 3))
def a_mixture(model, another, train_loader, x):
    """I trained two networks: average them, each with its posterior."""
    mixture = MixtureLaplace([model, another], "classification")
    mixture.fit(train_loader)
    return mixture(x)


@task(lambda evidences: all(torch.isfinite(value) for value in evidences))
def choose_between_networks(model, small, train_loader):
    """Which of two networks does the evidence prefer?"""
    evidences = []
    for network in (model, small):
        la = Laplace(network, "classification", "all", "kron")
        la.fit(train_loader)
        la.optimize_prior_precision()
        evidences += [la.log_marginal_likelihood()]
    return evidences


@task(lambda found: len(found[2]) > 0)
def weight_decay_by_the_evidence(regressor, regression_loader):
    """Choose weight decay and noise while training."""
    return laplace.marglik_training(regressor, regression_loader, "regression", n_epochs=5)


@task(lambda std: std.shape == (40, 1) and (std > 0).all())
def noise_that_depends_on_the_input(noisy, regression_loader, line):
    """My network predicts a mean and a log variance."""
    la = Laplace(noisy, "mean_log_variance", "all", "kron")
    la.fit(regression_loader)
    return la.predict(line).std


@task(lambda variance: variance.shape == (40, 1) and (variance > 0).all())
def counts_of_events(regressor, counts, line):
    """My network predicts the logarithm of a rate of counts."""
    la = Laplace(regressor, "poisson", "all", "kron")
    la.fit(counts)
    return la.predict(line).variance


@task(lambda p: p.shape == (30, 2) and ((p > 0) & (p < 1)).all())
def several_labels(yes_or_no, answers, x):
    """Two labels per input, each yes or no."""
    la = Laplace(yes_or_no, "bernoulli")
    la.fit(answers)
    return la(x)


@task(probabilities(30, 3))
def several_inputs(two, pairs, x):
    """My network takes two inputs."""
    la = Laplace(two, "classification")
    la.fit(pairs)
    return la((x, x))


@task(lambda parts: all((part >= 0).all() for part in parts))
def kinds_of_uncertainty(model, train_loader, x):
    """How much of the uncertainty would more data remove, and how much not?"""
    la = Laplace(model, "classification")
    la.fit(train_loader)
    prediction = la.predict(x)
    return prediction.decomposition.epistemic, prediction.decomposition.aleatoric, prediction.entropy


@task(lambda found: torch.allclose(*found, atol=1e-5))
def data_that_arrive_later(model, train_loader, more_data, x):
    """More data have arrived: add them, without the old ones."""
    la = Laplace(model, "classification", "all", "full")
    la.fit(train_loader)
    la.fit(more_data, override=False)
    at_once = Laplace(model, "classification", "all", "full")
    at_once.fit(train_loader + more_data)
    return la(x), at_once(x)


@task(lambda text: "cheaper" in text or "all / full" in text)
def memory_before_a_fit(model, train_loader):
    """How much memory will it take?"""
    return str(Laplace(model, "classification", "all", "full").plan(train_loader))


@task(lambda functions: functions.shape == (10, 40, 1))
def draws_of_functions(regressor, regression_loader, line):
    """Plot ten functions of the posterior."""
    la = Laplace(regressor, "regression", "all", "full")
    la.fit(regression_loader)
    la.optimize_hyperparameters(("prior_precision", "sigma_noise"))
    return la.functional_samples(line, n_samples=10)


@task(lambda found: (found[0] - found[1]).abs().max() < 0.1)
def without_the_probit(model, train_loader, x):
    """Average over samples of the outputs in place of a formula."""
    la = Laplace(model, "classification")
    la.fit(train_loader)
    return la(x, link_approx="mc", n_samples=2000), la(x)
