"""The comparison of uncertainty methods: one row run small, and a page that says what the results say."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.quality import __main__ as quality
from benchmarks.quality import (
    acquiring,
    atoms,
    data,
    knows,
    language,
    methods,
    page,
    rewards,
    rules,
    scores,
    summary,
    targets,
    texts,
    unlabelled,
    volumes,
)
from benchmarks.quality.rows import CLASSIFICATION, REGRESSION, ROWS
from laplace.tuning import calibrate


def kept(path: Any) -> Any:
    return json.loads(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def quick() -> list[dict[str, Any]]:
    pytest.importorskip("sklearn")
    return quality.run(["iris", "sine with a gap"], quick=True, processes=1)


def test_the_pages_say_what_the_results_say() -> None:
    found = page.pages(*map(kept, page.READ))
    for path, parts in found.items():
        text = path.read_text("utf-8")
        assert page.written(text, parts) == text, path.name


def test_checks_are_kept() -> None:
    assert [row["name"] for row in kept(knows.RESULTS)] == [check.name for check in knows.CHECKS]


@pytest.mark.nightly
def test_a_check_runs() -> None:
    (check,) = (check for check in knows.CHECKS if check.name.startswith("a report"))
    (row,) = knows.run([check], quick=True)
    assert row["seeds"][0]["MB"] < 1 and knows.targets([row])[-1].met is not None


def test_results_are_of_all_rows() -> None:
    rows = kept(page.RESULTS)["rows"]
    assert [row["name"] for row in rows] == list(ROWS)
    assert {len(row["splits"]) for row in rows} == {quality.N_SPLITS}
    assert len(CLASSIFICATION) >= 12 and len(REGRESSION) >= 6


def test_heads_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.Generator().manual_seed(0)

    def given(cache: Path | None = None) -> dict[str, Any]:
        ratings = 8 * torch.rand(1000, generator=source) - 4
        features = torch.randn(1000, 5, generator=source) + ratings[:, None]
        return dict.fromkeys(texts.decisions.DOMAINS, (features, ratings)) | {"topics": (30 * features[:50], ratings)}

    monkeypatch.setattr(texts.decisions, "data", given)
    monkeypatch.setattr(texts, "SIZES", (300,))
    found = texts.run(quick=True)
    assert len(found["rows"]) == len(texts.decisions.DOMAINS) * len(texts.SIZES)
    assert "300 labels, calibrate" in texts.lines(found)
    for row in found["rows"]:
        network, _, calibrated = row["splits"][0]
        assert calibrated["nll"] <= network["nll"] + 0.05 and len(calibrated["shifts"]) == 2


@pytest.mark.nightly
def test_one_row_of_each_kind(quick: list[dict[str, Any]]) -> None:
    for row, columns in zip(quick, (10, 7), strict=True):
        (split,) = row["splits"]
        assert len(split) == columns
        assert all(math.isfinite(line["nll"]) for line in split)
        assert targets.column(split, methods.NETWORK)["paired"] == (0.0, 0.0)  # type: ignore[index]
    assert set(quick[0]["splits"][0][0]["shifts"]) == {"noise 0.5", "noise 1"}


@pytest.mark.nightly
def test_quick_rows_make_a_table(quick: list[dict[str, Any]]) -> None:
    line = page.compared(quick[:1], "nll").splitlines()[-1]
    assert line.startswith("| iris | ") and line.count(" ± .000") == len(page.COLUMNS)
    assert page.unseen(quick[:1]).splitlines()[-1].count(" ± .000") == len(page.SCORES)
    assert len(targets.targets({"rows": quick})) == 11


def test_a_method_of_one_s_own_gets_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """That of docs/quality.md, on one classification and on a regression, which it refuses."""
    pytest.importorskip("sklearn")
    (code,) = re.findall(r"^```python\n(def fit\(.*?)^```$", page.PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "warm.py").write_text(code, "utf-8")
    arguments = ["quality", "--method", str(tmp_path / "warm.py"), "--quick", "--only", "i", "--processes", "1"]
    monkeypatch.setattr(quality, "ROWS", {name: ROWS[name] for name in ("iris", "sine with a gap")})
    monkeypatch.setattr("sys.argv", arguments)
    quality.main()
    *_, opening, rows = capsys.readouterr().out.rstrip().split("\n\n")
    assert opening.splitlines()[-1].startswith("| warm | ") and "| five networks | " in opening
    heading, _, line = rows.splitlines()
    assert heading == "| data | network | warm |" and line.startswith("| iris | ")


def test_the_opening_table_by_hand() -> None:
    """Two rows of two splits each; a posterior that a row lacks is taken by the next one."""

    def line(method: str, posterior: str, nll: float, error: float = 0.1, **more: Any) -> dict[str, Any]:
        scores = {"nll": nll, "brier": nll, "aurc": nll, "ece": nll, "ece_floor": 0.0, "auroc": -nll}
        changed = {"noise": (10 * nll, 0.0, 0.0)}
        return {
            "method": method,
            "posterior": posterior,
            "paired": (nll - 1, error),
            "shifts": changed,
            **scores,
            **more,
        }

    def row(n_val: int, posterior: str, *nlls: float) -> dict[str, Any]:
        runs = [[line(methods.NETWORK, "", 1.0), line(methods.CALIBRATE, posterior, nll)] for nll in nlls]
        return {"name": "row", "sizes": [9, n_val, 9], "splits": runs}

    rows = [row(30, summary.LAST, 0.9, 1.3), row(90, summary.ALL, 0.8, 1.1005)]
    found = summary.Summary.of(rows, methods.CALIBRATE, (summary.ALL, summary.LAST))
    assert found is not None
    assert found.nll == pytest.approx((0.025125, 0.175125))  # −.15 and +.20025 on the two splits
    assert (found.within, found.within_least) == (0.5, 0.75)
    assert (found.worst, found.worst_many) == pytest.approx((1.3, 1.1005))
    assert found.shift == pytest.approx((0.25125, 1.75125))
    assert found.auroc_worst == pytest.approx(-0.1) and found.trainings == 0
    assert summary.Summary.of(rows, methods.SNAPSHOTS, (summary.LAST,)) is None
    assert summary.opening(rows).splitlines()[-1].startswith("| calibrate, all weights | +.025 ± .175 | .50 (.75) |")
    counted = [
        {**one, "splits": [[split[0], {**split[1], "trainings": 1.5}] for split in one["splits"]]} for one in rows
    ]
    assert summary.Summary.of(counted, methods.CALIBRATE, (summary.ALL, summary.LAST)).trainings == 1.5  # type: ignore[union-attr]


def test_questions_are_answered_by_most_of_their_words() -> None:
    batch = language.questions(50, 1.0, torch.Generator().manual_seed(0))
    words, asked = batch["input_ids"][:, : language.LONGEST], language.WORDS.index("which?")
    assert bool((batch["input_ids"][:, language.LONGEST] == asked).all())
    for row, tokens, label in zip(words, batch["input_ids"], batch["labels"].tolist(), strict=True):
        shown = {language.WORDS[i].rstrip("0123456789") for i in row[row > 0].tolist()}
        kind = language.WORDS[int(tokens[language.LONGEST + 2 + 2 * label])]
        assert shown == {kind}


@pytest.mark.nightly
def test_a_language_model_answers_in_a_table() -> None:
    pytest.importorskip("peft")
    row = language.run(language.QUESTIONS, quick=True)
    assert [line["method"] for line in row["splits"][0]] == [
        methods.NETWORK, methods.TEMPERATURE, *language.LINKS.values(), methods.CALIBRATE,
    ]  # fmt: skip
    assert len(language.table(row).splitlines()) == 7
    assert all(target.met is not None for target in language.targets(row, language.QUESTIONS))


@pytest.mark.nightly
def test_labels_that_are_bought() -> None:
    """Of three groups that are easy to tell apart every way ends with the goal, or with the pool."""
    source = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (2000,), generator=source)
    features = nn.functional.one_hot(labels, 3) * 2.0 + torch.randn(2000, 3, generator=source)
    for way in acquiring.WAYS:
        assert acquiring.FIRST <= acquiring.bought(way, features, labels, 0) <= 2000
    row = {"labels": {"random": [900, 1000], "bald": [500, 600], "epig": [800, 900]}}
    assert [target.met for target in acquiring.targets(row)] == [True, False]


def test_labels_to_an_error_are_read_off_a_curve() -> None:
    assert atoms.labels_to([1.0, 0.5, 0.25], 0.5) == atoms.FIRST + atoms.STEP
    assert atoms.labels_to([1.0, 0.5, 0.25], 0.75) == atoms.FIRST + 0.5 * atoms.STEP
    assert atoms.labels_to([1.0, 0.5], 0.1) == atoms.FIRST + atoms.STEP
    crps = [{"drawn": 2.0, "fine-tuned": 1.0, "from scratch": 1.0}]
    errors = {"random": [[1.0, 0.6, 0.5]], "force variance": [[1.0, 0.5, 0.4]]}
    row = {"costs": [[5, 1, 5.0]], "crps": crps, "errors": errors}
    assert [target.met for target in atoms.targets(row)] == [True, False, True]
    assert [target.met for target in atoms.targets(None)] == [None] * 3
    assert "| 10 | 2.000 | 1.000 | 1.000 | 1.000 |" in atoms.table(row)
    assert "| over random's | 0.67 |" in atoms.table(row) and "| passes for 32 members | 5.0 |" in atoms.table(row)


def test_choices_by_a_reward_are_judged_seed_by_seed() -> None:
    plain = [[1.0, 0.0, 0.0]] * len(rewards.SHOWN)

    def seed(gain: float) -> dict[str, Any]:
        ours = {way: [[1.0 + gain, gain, 0.1]] * len(rewards.SHOWN) for way in rewards.WAYS[1:]}
        return {"plain": plain, **ours, "best": [[2.0]] * len(rewards.SHOWN)}

    for worse, met in ((1, True), (2, False)):
        row = {"seeds": [*[seed(0.5)] * (9 - worse), seed(0.1), *[seed(-0.3)] * worse]}
        (target,) = rewards.targets(row)
        assert target.met is met and f"{10 - worse} of 10, {9 - worse} by a paired test" in target.found
        assert f"| {10 - worse} | {9 - worse} | {worse} |" in rewards.table(row)
    assert rewards.targets(None)[0].met is None


@pytest.mark.nightly
def test_rewards_run() -> None:
    assert all(target.met is not None for target in rewards.targets(rewards.run(quick=True)))


@pytest.mark.nightly
def test_a_potential_runs() -> None:
    assert all(target.met is not None for target in atoms.targets(atoms.run(quick=True)))


def test_images_are_ranked_and_memory_is_counted() -> None:
    risk, doubt = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([1.0, 3.0, 2.0])
    assert volumes.area_under_risk(risk, doubt) == pytest.approx((0 + 0.25 + 0.5) / 3)
    with volumes.Held() as held:
        a = torch.zeros(100)
        a = a + 1  # beside which the former is alive until it is there
        del a
    assert (held.now, held.peak) == (0, 800)
    assert [target.met for target in volumes.targets(None)] == [None] * 4


def test_the_widest_scale_is_the_last_one_within_the_tolerance() -> None:
    assert [unlabelled.widest([1.0, 1.05, 1.2], 1.0, tolerance) for tolerance in (0.1, 1.0)] == [1, 2]
    assert unlabelled.widest([1.2, 1.0], 1.0, 0.1) is None


@pytest.mark.nightly
def test_areas_run() -> None:
    assert all(target.met is not None for target in volumes.targets(volumes.run(quick=True)))


def test_splits_do_not_overlap_and_are_repeatable() -> None:
    pytest.importorskip("sklearn")
    one, same, other = data.wine(0), data.wine(0), data.wine(1)
    assert torch.equal(one.train[0], same.train[0]) and not torch.equal(one.train[0], other.train[0])
    rows = [tuple(row) for part in (one.train, one.val, one.test) for row in part[0].tolist()]
    assert len(set(rows)) == len(rows) == 178


def test_turned_images() -> None:
    image = torch.rand(2, 1, 8, 8)
    assert torch.allclose(data.rotated(image, 0.0), image, atol=1e-6)
    assert torch.allclose(data.rotated(image, 90.0), image.rot90(1, (2, 3)), atol=1e-5)


def test_scores_by_hand() -> None:
    probs, y = torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1])
    assert scores.scores(probs, y)["nll"] == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
    mean, variance, target = torch.zeros(4, 1), torch.ones(4, 1), torch.tensor([[0.0], [1.6], [-1.7], [2.0]])
    assert scores.scores((mean, variance), target)["coverage"] == 0.5
    assert scores.paired(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0])) == (2.0, pytest.approx(1.0))


def test_temperature_is_the_best() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2000, 3)
    y = torch.distributions.Categorical(logits=logits / 3).sample()
    assert methods.best_temperature(torch.nn.Identity(), (logits, y)) == pytest.approx(3.0, rel=0.15)


def test_one_datum_alone_does_not_decide() -> None:
    losses = np.zeros((2, 30))
    losses[0, 0] = -9.0  # one of 30 data speaks for the candidate, strongly
    assert rules.bound(0.5)(losses) == 0
    assert rules.bound(1.0, least=1e-3)(losses) == rules.RULES[rules.CHOSEN](losses) == 1


def test_a_candidate_that_is_better_on_most_data_is_chosen() -> None:
    losses = np.stack([np.linspace(-0.3, 0.1, 50), np.linspace(-0.2, 0.1, 50), np.zeros(50)])
    assert rules.RULES[rules.CHOSEN](losses) == 0


def test_the_rule_of_the_study_is_that_of_the_library() -> None:
    assert [calibrate.caution(n) for n in (25, 100)] == pytest.approx([0.5 + 4 / 5, 0.5 + 4 / 10])
    assert calibrate.LEAST_GAIN == 0.001
    assert rules.CHOSEN == "k = 0.5 + 4/√n, at least 0.001 nats"
    grid = calibrate.CalibrationGrid()
    assert (grid.factors, grid.scales) == (pytest.approx(rules.MULTIPLES), pytest.approx(rules.SCALES))


def test_the_rule_is_safe_where_half_a_standard_error_is_not() -> None:
    many, few = kept(page.RULES)["groups"].values()
    for found in (many, few):
        assert found[rules.CHOSEN]["within"] >= 0.97 and found[rules.CHOSEN]["worst"] < 1.02
        assert found["k = 0.5"]["within"] < 0.95 and found["k = 0.5"]["worst"] > 1.06
