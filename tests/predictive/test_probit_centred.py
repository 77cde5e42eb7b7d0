"""The centred probit wherever a link is given: structures, chosen outputs, mixtures, users' classes, scores."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from laplace import FullLaplace, FunctionalLaplace, Laplace, MixtureLaplace
from laplace.jacobian.blocks import Block
from laplace.jacobian.heads import RotatedHeadBlock
from laplace.training.forecast import losses_without_each
from laplace.tuning.held_out import held_out_losses
from tests.reference import predictive
from tests.reference.compare import assert_close

N, D, C = 60, 4, 3


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, dtype=torch.float64, generator=draws)
    return x, (x[:, :C] + torch.randn(N, C, dtype=torch.float64, generator=draws)).argmax(1)


def network(n_outputs: int = C) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, n_outputs)).double()


def expected(la: Any, x: Tensor, **options: Any) -> Tensor:
    latent = la.predict(x, **options)
    return predictive.probit_centred(latent.latent_mean, latent.latent_covariance)


@pytest.mark.parametrize(
    "structure", ["full", "kron", "diag", "lowrank", "block", "ekfac", "lowrank_kron", "matrix_free"]
)
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_every_structure(weights: str, structure: str) -> None:
    x, y = data()
    la = cast("Any", Laplace)(network(), "classification", weights, structure, prior_precision=0.3)
    la.fit([(x, y)])
    x = data(1)[0]
    assert_close(la(x, link_approx="probit_centred"), expected(la, x), "backend")
    prediction = la.predict(x, link_approx="probit_centred", diagonal_output=True)
    assert_close(prediction.mean, expected(la, x), "backend")
    assert_close(prediction.latent_mean, la.predict(x).latent_mean, "backend")


@pytest.mark.parametrize("independent", [False, True])
def test_gaussian_processes(independent: bool) -> None:
    x, y = data()
    la = FunctionalLaplace(network(), "classification", n_subset=20, independent_outputs=independent)
    la.fit([(x, y)])
    assert_close(la(x, link_approx="probit_centred"), expected(la, x), "backend")


def test_it_is_closer_to_sampled_outputs_than_the_plain_one_under_a_flat_prior() -> None:
    x, y = data()
    la = Laplace(nn.Linear(D, C).double(), "classification", "all", "full", prior_precision=1e-3)
    la.fit([(x[:12], y[:12])])
    exact = la(x, link_approx="mc", n_samples=4000, generator=torch.Generator().manual_seed(0))
    plain, centred = ((la(x, link_approx=link) - exact).abs().max() for link in ("probit", "probit_centred"))
    assert centred < 0.9 * plain


def test_some_outputs() -> None:
    """The mean that is taken away is that of the chosen outputs, of which the probabilities are."""
    x, y = data()
    la = cast("Any", Laplace)(network(5), "classification", "last_layer", "kron")
    la.fit([(x, y)])
    found = la.predict(x, outputs=[4, 1], link_approx="probit_centred").mean
    assert_close(found, expected(la, x, outputs=[4, 1]), "backend")


def test_many_classes_need_no_covariances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head Π meets the basis of its outputs, not covariances `[B, C, C]`."""
    n_classes, x = 200, data()[0]
    la = cast("Any", Laplace)(nn.Linear(D, n_classes).double(), "classification", "all", "kron")
    la.fit([(x, torch.arange(N))])
    monkeypatch.setattr(Block, "dense", None)
    monkeypatch.setattr(RotatedHeadBlock, "weighted_gram", None)
    monkeypatch.setattr(RotatedHeadBlock, "dense", None)
    found = la(x[:2], link_approx="probit_centred")
    monkeypatch.undo()
    assert_close(found, expected(la, x[:2]), "backend")


def test_a_users_covariance_is_read() -> None:
    class Users(FullLaplace):
        def functional_variance(self, Js: Any) -> Tensor:
            return super().functional_variance(Js) + torch.diag(torch.arange(1.0, 1.0 + Js.shape[1], dtype=Js.dtype))

    x, y = data()
    la = Users(network(), "classification")
    la.fit([(x, y)])
    assert_close(la(x, link_approx="probit_centred"), expected(la, x), "backend")


def test_sampled_networks_and_independent_labels() -> None:
    """Of samples a link says nothing; labels that are independent share no shift, so that it is probit."""
    x, y = data()
    la = cast("Any", Laplace)(network(), "bernoulli", "all", "kron")
    la.fit([(x, nn.functional.one_hot(y).double())])
    assert torch.equal(la(x, link_approx="probit_centred"), la(x))
    seeded = {"pred_type": "nn", "n_samples": 5}
    same = [
        la(x, link_approx=link, generator=torch.Generator().manual_seed(0), **seeded)
        for link in ("probit", "probit_centred")
    ]
    assert torch.equal(*same)


def test_mixtures() -> None:
    x, y = data()
    mixture = MixtureLaplace([network(), network()], "classification", "last_layer", "kron")
    mixture.fit([(x, y)])
    parts = [expected(la, x) for la in mixture.components]
    assert_close(mixture(x, link_approx="probit_centred"), 0.5 * (parts[0] + parts[1]), "backend")


def softmax_regression(prior: float, x: Tensor, y: Tensor) -> nn.Module:
    """At the mode of its prior."""
    model = nn.Linear(D, C).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum") + 0.5 * prior * penalty
        loss.backward()
        return loss

    optimizer.step(cast("Any", closure))
    model.zero_grad()
    return model


def test_a_flat_prior_is_no_doubt() -> None:
    """The shift of all logits has the prior's variance alone: with a flat prior, probit knows nothing any more."""
    x, y = data()
    la = cast("Any", Laplace)(softmax_regression(1e-3, x, y), "classification", "all", "full", prior_precision=1e-3)
    la.fit([(x, y)])
    x = data(1)[0]
    exact = la(x, link_approx="mc", n_samples=1000, generator=torch.Generator().manual_seed(0))
    distance = {
        link: (la(x, link_approx=link) - exact).abs().sum(1).mean() / 2 for link in ("probit", "probit_centred")
    }
    assert distance["probit"] > 0.25 and distance["probit_centred"] < 0.03


def test_it_can_be_calibrated_compared_and_left_out() -> None:
    x, y = data()
    la = cast("Any", Laplace)(
        softmax_regression(1.0, x, y), "classification", "last_layer", "full", prior_precision=1.0
    )
    la.fit([(x, y)])
    left = la.leave_one_out([(x, y)], link_approx="probit_centred")
    p = predictive.probit_centred(left.mean, left.covariance)
    assert_close(left.log_score, p[torch.arange(N), y].log(), "algebra")
    options = {"link_approx": "probit_centred"}
    compared = la.compare([data(1)], **options).rows["nll"].posterior
    assert compared == pytest.approx(
        float(nn.functional.nll_loss(la(data(1)[0], **options).log(), data(1)[1])), rel=1e-6
    )
    calibrated = la.calibrate([data(1)], **options)
    found = nn.functional.nll_loss(la(data(1)[0], **options).log(), data(1)[1])
    assert float(found) == pytest.approx(calibrated.posterior_nll, rel=1e-6)


def test_forecasts_can_score_by_it() -> None:
    x, y = data()
    la = cast("Any", Laplace)(network(), "classification", "last_layer", "kron", prior_precision=1e-3)
    la.fit([(x, y)])
    losses = [held_out_losses(la.snapshot(), link) for link in ("probit", "probit_centred")]
    assert losses[0] is not None and losses[1] is not None
    assert torch.equal(losses[0][1], losses[1][1]) and (losses[1][0] - losses[0][0]).abs().max() > 0.01
    assert losses_without_each(la, torch.tensor(1.0), [(x, y)], "probit_centred") is not None
