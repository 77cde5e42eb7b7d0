"""What a calibration chose: kept by states and copies, undone, and dropped by what changes the posterior."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch

from laplace.errors import (
    CalibrationWarning,
    InvalidArgument,
)
from tests import grid
from tests.pairs import nightly
from tests.tuning.test_calibrate import held_out


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_undo_and_twice(likelihood: str) -> None:
    la = grid.fitted("all", "kron", likelihood, prior_precision=2.0)
    assert la.calibration is None
    before, x = [part.clone() for part in grid.predict(la, likelihood)], la.prior_precision.clone()
    first = la.calibrate(held_out(likelihood))
    after, hypers = grid.predict(la, likelihood), la.snapshot().predictive().hypers
    assert repr(first) == repr(la.calibration)
    la.calibrate(held_out(likelihood))
    for again, once in zip(grid.predict(la, likelihood), after, strict=True):
        assert torch.equal(again, once)
    assert torch.equal(la.snapshot().predictive().hypers.temperature, hypers.temperature)
    with pytest.raises(InvalidArgument, match="not the present one"):
        first.undo()
    la.calibration.undo()
    assert la.calibration is None
    assert torch.equal(la.prior_precision, x)
    for again, once in zip(grid.predict(la, likelihood), before, strict=True):
        assert torch.equal(again, once)


@pytest.mark.parametrize("structure", ["kron", *nightly("lowrank", "gp", "full", "diag", "ekfac")])
def test_states_keep_it(structure: str) -> None:
    options: dict[str, Any] = {"n_subset": 9} if structure == "gp" else {}
    la = grid.make("all", structure, "regression", **options)
    la.fit(grid.batches("regression"))
    calibration, x = la.calibrate(held_out("regression")), grid.data()[0]
    expected = la(x)
    other = grid.make("all", structure, "regression", model=la.model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the temperature changes
        other.load_state_dict(la.state_dict())
    buffer = io.BytesIO()
    torch.save(la.state_dict(), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    for same in (other, copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert repr(same.calibration) == repr(calibration)
        for a, b in zip(same(x), expected, strict=True):
            assert torch.equal(a, b)
        same.calibration.undo()
        assert same.temperature == 1
    assert "calibrated on" in repr(la)
    assert pickle.loads(pickle.dumps(calibration)).scale == calibration.scale
    moved = copy.deepcopy(la).to(dtype=torch.float64)
    assert moved.calibration.prior_precision.dtype == torch.float64


@pytest.mark.parametrize(
    "change",
    [
        lambda la: setattr(la, "prior_precision", 2.0),
        lambda la: setattr(la, "sigma_noise", 2.0),
        lambda la: la.log_marginal_likelihood(torch.ones(1)),
        lambda la: la.optimize_prior_precision(),
        *nightly(lambda la: la.optimize_hyperparameters()),
    ],
    ids=["prior", "noise", "evidence", "tuning", "search"],
)
def test_other_hyper_parameters_drop_it(change: Any) -> None:
    la, other = grid.fitted("all", "kron", "regression"), grid.fitted("all", "kron", "regression")
    la.calibrate(held_out("regression"))
    with pytest.warns(CalibrationWarning, match="drops the calibration on 36 validation data"):
        change(la)
    change(other)
    assert la.calibration is None
    assert torch.equal(la(grid.data()[0])[1], other(grid.data()[0])[1])


@pytest.mark.parametrize("how", ["fit", "more", "forget", "refine", "by hand", "H"])
def test_new_data_drop_it(how: str) -> None:
    la = grid.fitted("all", "full", "classification", prior_precision=2.0)
    la.calibrate(held_out())
    with pytest.warns(CalibrationWarning, match="drops the calibration"):
        if how == "fit":
            la.fit(grid.batches())
        elif how == "more":
            la.fit(held_out(), override=False)
        elif how == "forget":
            la.forget(grid.batches()[:1])
        elif how == "refine":
            la.refine(grid.batches())
        elif how == "by hand":
            la.start_fit()
        else:
            la.H = la.H.clone()
    assert la.calibration is None
    assert la.temperature == 1
    assert la.prior_precision.item() == 2
