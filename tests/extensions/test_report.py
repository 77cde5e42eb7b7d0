"""Reports on predictions: verdicts of simulated cases, files that need no other, the command."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laplace
from laplace import Laplace, MixtureLaplace, metrics
from laplace.errors import InvalidArgument, InvalidData, NotFittedError, UnsupportedError
from laplace.extensions import report, report_of_file, verdicts
from laplace.extensions.document import Report
from tests.pairs import nightly

TEMPERATURES = {"calibrated": 1.0, "over-confident": 0.6, "under-confident": 1.6}
"""By which logits are divided that are calibrated as they are."""

SCALES = {"calibrated": 1.0, "over-confident": 0.8, "under-confident": 1.25}
"""Factors of the right standard deviations."""


def classes(kind: str, n: int = 1000, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, 5, generator=source, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), 1, generator=source)[:, 0]
    return (logits / TEMPERATURES[kind]).softmax(1), y


def targets(kind: str, n: int = 1000, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, 1, generator=source, dtype=torch.float64)
    deviation = 0.3 + torch.rand(n, 1, generator=source, dtype=torch.float64)
    y = mean + deviation * torch.randn(n, 1, generator=source, dtype=torch.float64)
    return mean, (SCALES[kind] * deviation).square(), y


@pytest.mark.parametrize("kind", ["calibrated", *nightly("over-confident", "under-confident")])
def test_verdicts_of_classes_are_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 95 of 100 cases; 300 draws of the labels decide as 1,000 do, but for p values of about 1 %."""
    monkeypatch.setattr(verdicts, "N_DRAWS", 300)
    found = [verdicts.Predictions("model", classes(kind, seed=seed)[:1]) for seed in range(100)]
    kinds = [
        verdicts.verdict_of_classes(
            model, classes(kind, seed=seed)[1], torch.arange(1000), torch.Generator().manual_seed(seed)
        ).kind
        for seed, model in enumerate(found)
    ]
    assert kinds.count(kind) >= 95


@pytest.mark.parametrize("kind", SCALES)
def test_verdicts_of_targets_are_right(kind: str) -> None:
    cases = [targets(kind, seed=seed) for seed in range(100)]
    kinds = [
        verdicts.verdict_of_targets(verdicts.Predictions("m", (m, v)), y, torch.arange(len(y))).kind
        for m, v, y in cases
    ]
    assert kinds.count(kind) >= 95


def test_predictions_that_are_wrong_both_ways_are_uneven() -> None:
    """Half of the inputs are over-confident, the other half under-confident by as much."""
    source = torch.Generator().manual_seed(0)
    right = torch.rand(4000, generator=source, dtype=torch.float64)
    confidence = torch.where(torch.arange(4000) % 2 == 0, 0.9, 0.6).double()
    y = (right > 0.75).long()
    probs = torch.stack([confidence, 1 - confidence], 1)
    assert report.of_probabilities(probs, y).verdicts[0].kind == "uneven"


def test_a_bias_is_no_overconfidence() -> None:
    mean, variance, y = targets("calibrated", 2000)
    assert report.of_gaussians(mean + 0.1 * variance.sqrt(), variance, y).verdicts[0].kind == "biased"


def test_numbers_are_those_of_the_metrics() -> None:
    (probs, y), network = classes("calibrated"), classes("over-confident")[0]
    found = report.of_probabilities(probs, y, network=network, ood=(network[:200], probs[:100]))
    rows = found.comparison.rows
    assert rows["nll"].posterior == pytest.approx(float(metrics.nll(probs, y)))
    assert rows["ece"].network == pytest.approx(float(metrics.ece(network, y)))
    assert found.ood["posterior"]["auroc"] == pytest.approx(float(metrics.auroc(probs.amax(1), probs[:100].amax(1))))
    assert found.ood["network"]["fpr95"] == pytest.approx(float(metrics.fpr95(network.amax(1), network[:200].amax(1))))
    assert [verdict.kind for verdict in found.verdicts] == ["calibrated", "over-confident"]
    assert found.classes[0].p_value <= found.classes[-1].p_value
    mean, variance, targets_ = targets("calibrated")
    mean, variance, targets_ = (torch.cat([values, values.flip(0)], 1) for values in (mean, variance, targets_))
    scores = report.of_gaussians(mean, variance, targets_).comparison.rows
    assert scores["nll"].network == pytest.approx(float(metrics.gaussian_nll(mean, variance, targets_)))
    assert scores["crps"].network == pytest.approx(float(metrics.gaussian_crps(mean, variance, targets_)))


class Addresses(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.found += [name for name, _ in attrs if name.startswith("on")]


def reports() -> dict[str, Report]:
    pytest.importorskip("matplotlib")
    (probs, y), network = classes("over-confident"), classes("under-confident")[0]
    mean, variance, values = targets("over-confident")
    return {
        "one model": report.of_probabilities(probs, y, classes=list("<&>\"'")),
        "two": report.of_probabilities(probs, y, network=network, ood=(network[:50], probs[:50])),
        "regression": report.of_gaussians(
            mean, variance, values, network=(mean, 2 * variance), ood=(variance, variance)
        ),
    }


def test_pages_need_no_other_file(tmp_path: Path) -> None:
    for name, found in reports().items():
        path = tmp_path / f"{name}.html"
        found.save(path)
        text = path.read_text()
        page = Addresses()
        page.feed(text)
        assert page.found and all(address.startswith("data:image/png;base64,") for address in page.found)
        assert not page.tags & {"script", "link", "iframe", "object"} and "url(" not in text and "@import" not in text
        assert len(text) < 1e6
        found.save(tmp_path / "report.png")
        found.save(tmp_path / "report.json")
        assert json.loads((tmp_path / "report.json").read_text()) == found.to_dict()
        assert found.verdict in repr(found)


def test_ignored_labels_do_not_count() -> None:
    probs, y = classes("calibrated", 200)
    marked = torch.cat([y, torch.full((5,), -100)])
    first, second = report.of_probabilities(probs, y), report.of_probabilities(torch.cat([probs, probs[:5]]), marked)
    assert first.to_dict() == second.to_dict()


def test_equal_seeds_give_equal_reports() -> None:
    probs, y = classes("calibrated")
    first, second = (report.of_probabilities(probs, y, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.to_dict() == second.to_dict()


def written(path: Path, head: str, rows: list[list[float]]) -> str:
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    probs, y = classes("over-confident")
    rows = [[*p, k] for p, k in zip(probs.tolist(), y.tolist(), strict=True)]
    given = written(tmp_path / "p.csv", "a,b,c,d,e,label", rows)
    other = written(tmp_path / "o.csv", "a,b,c,d,e", probs[:30].tolist())
    out = tmp_path / "report.html"
    assert report_of_file.main([given, "--ood", other, "--out", str(out)]) == 0
    assert "over-confident" in capsys.readouterr().out and out.exists()
    mean, variance, targets_ = targets("calibrated")
    columns = torch.cat([mean, variance.sqrt(), targets_], 1).tolist()
    given = written(tmp_path / "r.csv", "mean,std,y", columns)
    assert report_of_file.main([given, "--out", str(tmp_path / "r.json")]) == 0
    assert "no miscalibration" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("head", "rows", "words"),
    [
        ("a,b", [[0.5, 0.5]], "with a column"),
        ("a,b,label", [[0.5, 0.5, 3]], ""),
        ("a,b,label", [[0.5, 0.5, 0.5]], "labels are indices"),
        ("a,b,label", [[0.5, 0.5]], "2 values for 3 columns"),
        ("mean,std,y", [[0.5, 0.0, 1.0]], "not positive"),
    ],
)
def test_files_that_cannot_be_read_are_refused(
    head: str, rows: list[list[float]], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        report_of_file.main([written(tmp_path / "p.csv", head, rows), "--out", str(tmp_path / "r.json")])
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_wrong_arguments_are_refused() -> None:
    probs, y = classes("calibrated", 50)
    mean, variance, values = targets("calibrated", 50)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (InvalidData, "class probabilities", lambda: report.of_probabilities(probs[:, 0], y)),
        (InvalidArgument, "5 classes", lambda: report.of_probabilities(probs, y, classes=["a"])),
        (InvalidArgument, "pair", lambda: report.of_probabilities(probs, y, ood=(probs, probs))),
        (InvalidData, "shape", lambda: report.of_probabilities(probs, y, ood=probs[:, :2])),
        (InvalidArgument, "two different", lambda: report.of_probabilities(probs, y, names=("a", "a"))),
        (InvalidData, "same shape", lambda: report.of_gaussians(mean, variance, values[:3])),
        (InvalidData, "not positive", lambda: report.of_gaussians(mean, 0 * variance, values)),
        (InvalidData, "not finite", lambda: report.of_gaussians(mean / 0, variance, values)),
        (InvalidArgument, "saved as", lambda: report.of_gaussians(mean, variance, values).save("report.pdf")),
    ]
    for kind, words, call in wrong:
        with pytest.raises(kind, match=words):
            call()
    assert report.of_probabilities(probs[:10], y[:10]).verdicts[0].kind == "unknown"


# Reports of posteriors.


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


def test_rows_that_are_no_probabilities_are_refused(tmp_path: Path) -> None:
    """Sigmoids and logits of a softmax network, and what has digits missing; rows without a label may be anything."""
    probs, y = classes("calibrated", 200)
    for rows in (probs.logit().sigmoid() * 1.1, probs.log(), probs * probs.isfinite().logical_not() + torch.nan):
        with pytest.raises(InvalidData, match=r"row 0 is no distribution over the classes"):
            report.of_probabilities(rows, y)
    with pytest.raises(InvalidData, match="network: row 7 is no"):
        report.of_probabilities(probs, y, network=probs.index_add(0, torch.tensor([7]), probs[:1]))
    with pytest.raises(InvalidData, match="ood: row 0 is no"):
        report.of_probabilities(probs, y, ood=2 * probs)
    unlabelled = torch.cat([probs, torch.zeros(1, 5)]), torch.cat([y, torch.tensor([-100])])
    assert str(report.of_probabilities(*unlabelled)) == str(report.of_probabilities(probs, y))
    report.of_probabilities(probs.to(torch.bfloat16), y)
    report.of_probabilities((probs * 1e4).round() / 1e4, y)


def test_columns_are_distinct_and_printable(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    heads = {"a,a,label": "'a' more than once", "a,b,y,label": "both name the labels", f"a,{'b' * 200_000},y": "field"}
    for head, message in heads.items():
        path.write_text(f"{head}\n0.5,0.5,0,0\n"[: -3 if head.count(",") == 2 else None] + "\n")
        with pytest.raises((InvalidData, InvalidArgument), match=message):
            report_of_file._of_file(str(path), None, "model")
    path.write_text("\x1b[31ma,b,label\n" + "0.5,0.5,0\n0.1,0.9,1\n" * 20)
    assert "\x1b" not in str(report_of_file._of_file(str(path), None, "model"))
    with pytest.raises(InvalidArgument, match="more than once"):
        report.of_probabilities(*classes("calibrated"), classes=["a", "a", "b", "c", "d"])


# Several labels of one datum.


@pytest.mark.parametrize("kind", ["classes", "targets"])
def test_pixels_of_one_image_are_no_evidence_each(kind: str) -> None:
    """Labels that all pixels of an image share: calibrated, and only the images are independent of each other."""
    draws, n, size = torch.Generator().manual_seed(5), 60, 100
    datum = torch.arange(n).repeat_interleave(size)
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(0)}
    if kind == "classes":
        y = (torch.rand(n, generator=draws) > 0.8).long()[datum]
        probs = torch.tensor([[0.8, 0.2]]).expand(n * size, 2)
        apart, together = (report.of_probabilities(probs, y, datum=of, **options) for of in (None, datum))
        share = (y == 0).double().view(n, size).mean(1)
    else:
        y = torch.randn(n, generator=draws)[datum]
        nothing, one = torch.zeros(n * size), torch.ones(n * size)
        apart, together = (report.of_gaussians(nothing, one, y, datum=of, **options) for of in (None, datum))
        share = (y.abs() <= 1.6449).double().view(n, size).mean(1)
    assert together.n_data == n and apart.n_data == n * size
    assert together.verdicts[0].kind == "calibrated" and apart.verdicts[0].kind != "calibrated"
    assert f"{100 * float(share.mean()):.1f} ± {100 * float(share.std() / n**0.5):.1f} %" in together.verdict
    with pytest.raises(InvalidArgument, match="datum of shape"):
        report.of_gaussians(torch.zeros(3), torch.ones(3), torch.zeros(3), datum=torch.zeros(2))


@pytest.mark.parametrize("share", [0.6, 0.95])
def test_pixels_that_are_miscalibrated_are_found(share: float) -> None:
    draws, n, size = torch.Generator().manual_seed(4), 200, 30
    y = (torch.rand(n * size, generator=draws) > share).long()
    probs = torch.tensor([[0.8, 0.2]]).expand(n * size, 2)
    found = report.of_probabilities(probs, y, datum=torch.arange(n).repeat_interleave(size))
    assert found.verdicts[0].kind == ("over-confident" if share < 0.8 else "under-confident")
