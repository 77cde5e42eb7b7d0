"""Reports of posteriors and mixtures: those of their probabilities, and what has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import laplace
from laplace import Laplace, MixtureLaplace, metrics
from laplace.errors import NotFittedError, UnsupportedError
from laplace.extensions import report


def trained(likelihood: str, n_outputs: int) -> tuple[Laplace, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(120, 3)
    y = (x @ torch.randn(3, n_outputs)).argmax(1) if likelihood == "classification" else torch.randn(120, n_outputs)
    la = Laplace(torch.nn.Linear(3, n_outputs), likelihood, "all", "kron", prior_precision=3.0)
    la.fit([(x[:60], y[:60])])
    return la, x[60:], y[60:]


def test_the_report_of_a_posterior_is_that_of_its_probabilities_and_the_networks() -> None:
    la, x, y = trained("classification", 3)
    strange = [(3 * x[:10],)]
    found = laplace.report(la, [(x[:40], y[:40]), (x[40:], y[40:])], ood=strange)
    network = la.model(x).softmax(1).detach(), la.model(3 * x[:10]).softmax(1).detach()
    expected = report.of_probabilities(la(x), y, network=network[0], ood=(network[1], la(3 * x[:10])))
    assert found.n_data == 60
    for own, other in zip(found.verdicts, expected.verdicts, strict=True):
        assert own.sentence == other.sentence
    assert found.ood["network"] == pytest.approx(expected.ood["network"])
    inside, outside = laplace.ood_score(la, x), laplace.ood_score(la, 3 * x[:10])
    assert found.ood["posterior"]["auroc"] == pytest.approx(float(metrics.auroc(-inside, -outside)))
    assert found.ood_scores == {"posterior": "confidence of laplace.ood_score", "network": "1 − largest probability"}
    assert "confidence of laplace.ood_score" in repr(found) and found.to_dict()["ood_scores"] == found.ood_scores
    assert found.to_dict()["scores"]["nll"] == pytest.approx(expected.to_dict()["scores"]["nll"])


def test_the_report_of_a_regression_has_the_noise() -> None:
    la, x, y = trained("regression", 2)
    found = laplace.report(la, [(x, y)], ood=[x[:9] + 5])
    mean, variance = la(x, diagonal_output=True, observation_noise=True)
    expected = report.of_gaussians(mean, variance, y, network=(la.model(x).detach(), torch.ones_like(mean)))
    assert [v.sentence for v in found.verdicts] == [v.sentence for v in expected.verdicts]
    assert found.ood_scores == {"posterior": "latent_variance of laplace.ood_score", "network": "predicted variance"}
    inside, outside = laplace.ood_score(la, x), laplace.ood_score(la, x[:9] + 5)
    assert found.ood["posterior"]["fpr95"] == pytest.approx(float(metrics.fpr95(-inside, -outside)))
    assert found.ood["network"]["auroc"] == 0.5


def test_suspicious_labels_of_the_training_data_are_named(tmp_path: Path) -> None:
    la, x, y = trained("classification", 3)
    found = laplace.report(la, [(x[:30], y[:30])], train=[(x[30:], y[30:])])
    errors = laplace.label_errors(la, [(x[30:], y[30:])])
    assert [i for i, _ in found.suspicious] == errors.indices[: report.N_SUSPICIOUS].tolist()
    assert found.suspicious[0][1] == pytest.approx(float(errors.self_influence.max()))
    found.save(tmp_path / "report.html")
    assert "Suspicious labels" in (tmp_path / "report.html").read_text("utf-8") and "Suspicious labels" in repr(found)
    assert len(json.loads(json.dumps(found.to_dict()))["suspicious"]) == report.N_SUSPICIOUS
    with pytest.raises(UnsupportedError, match="train"):
        laplace.report(MixtureLaplace([la, trained("classification", 3)[0]]), [(x, y)], train=[(x, y)])


def test_a_mixture_is_reported_beside_its_ensemble() -> None:
    la, x, y = trained("classification", 3)
    other, _, _ = trained("classification", 3)
    mixture = MixtureLaplace([la, other])
    found = laplace.report(mixture, [(x, y)], ood=[3 * x[:10]])
    assert [verdict.name for verdict in found.verdicts] == ["posterior", "ensemble"]
    inside, outside = laplace.ood_score(mixture, x), laplace.ood_score(mixture, 3 * x[:10])
    assert found.ood["posterior"]["auroc"] == pytest.approx(float(metrics.auroc(-inside, -outside)))
    assert set(found.ood) == {"posterior", "ensemble"}


def test_reports_of_other_likelihoods_are_refused() -> None:
    la = Laplace(torch.nn.Linear(3, 1), "bernoulli", "all", "kron")
    x, y = torch.randn(30, 3), torch.randint(2, (30, 1)).float()
    with pytest.raises(NotFittedError):
        laplace.report(la, [(x, y)])
    la.fit([(x, y)])
    with pytest.raises(UnsupportedError, match="compare"):
        laplace.report(la, [(x + 1, y)])


# Several labels of one datum.
