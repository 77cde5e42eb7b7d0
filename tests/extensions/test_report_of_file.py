"""The command that reports on a file of predictions: columns that it reads, and files that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from laplace.errors import InvalidArgument, InvalidData
from laplace.extensions import report, report_of_file
from tests.extensions.test_verdicts import classes, targets


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
