"""The shifted tasks and the methods of the comparison on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protocol.baselines.csghmc import CyclicalSettings
from protocol.baselines.hmc import HmcSettings
from protocol.baselines.swag import SwagSettings
from protocol.data import digits
from protocol.methods import BY_VALIDATION, MethodSettings, fit_all, fit_laplace
from protocol.networks import cnn_with_batch_norm, mlp
from protocol.shifts import (
    ANGLES,
    LEVELS,
    N_CLASSES,
    ShiftedTask,
    Sizes,
    coloured,
    coloured_digits,
    digit_glyphs,
    rotated_digits,
)  # fmt: skip
from protocol.training import Training

SIZES = Sizes(100, 20, 50, 30)
DATA = digit_glyphs(SIZES, 12, 0.2, 0)


def test_coloured_images_are_colour_before_background() -> None:
    x = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 8, 8)
    image, background = coloured(x, torch.Generator().manual_seed(0))
    torch.testing.assert_close(image[0], background[0])  # no digit
    torch.testing.assert_close(image[1], image[1, :, :1, :1].expand(3, 8, 8))  # nothing but digit
    assert float(image.min()) >= 0 and float(image.max()) <= 1


@pytest.mark.parametrize(
    ("task", "levels", "channels"),
    [(rotated_digits(DATA, SIZES, 0), ANGLES, 1), (coloured_digits(DATA, SIZES, 0), LEVELS, 3)],
    ids=["rotated", "coloured"],
)
def test_tasks_hold_seen_classes_and_shifts_of_the_test_data(
    task: ShiftedTask, levels: tuple[float, ...], channels: int
) -> None:
    parts = task.parts
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [100, 20, 50]
    assert set(parts.train.y.tolist()) == set(range(N_CLASSES))
    assert tuple(task.shifted) == levels
    assert all(x.shape == (30, channels, 12, 12) for kinds in task.shifted.values() for x in kinds)
    assert all(x.shape == (30, channels, 12, 12) for x in task.others.values())


def test_of_few_data_the_parts_are_smaller_in_proportion() -> None:
    parts = rotated_digits(digits(), Sizes(5000, 1000, 3000, 1000), 0).parts
    n_seen = len(digits().of_classes(range(N_CLASSES)))
    assert [len(part) for part in (parts.train, parts.validation)] == [round(n_seen * 5 / 9), round(n_seen / 9)]
    assert len(parts.train) + len(parts.validation) + len(parts.test) == n_seen


def test_a_seed_determines_a_task() -> None:
    first, again, other = (rotated_digits(DATA, SIZES, seed) for seed in (0, 0, 1))
    assert torch.equal(first.parts.train.x, again.parts.train.x)
    assert torch.equal(first.others["noise"], again.others["noise"])
    assert not torch.equal(first.parts.train.x, other.parts.train.x)


def test_all_methods_predict_probabilities() -> None:
    short = Training(2, 32, 1e-2)
    how = MethodSettings(
        short, short, swag=SwagSettings(n_snapshots=2, rank=2), swag_rates=(1e-2,),
        cyclical=CyclicalSettings(2, 2, 1, 1), hmc=HmcSettings(4, 6, 3), n_members=2, n_samples=3, n_hmc_samples=4,
    )  # fmt: skip
    small = rotated_digits(DATA, SIZES, 0).mapped(lambda x: nn.functional.adaptive_avg_pool2d(x, 4))
    fitted = fit_all(lambda seed: mlp((16, 4, N_CLASSES), seed), small.parts, how, 0)
    assert list(fitted.predict) == ["MAP", "DE", "VB", "SWAG", "CSGHMC", "HMC", "LA", "LA*", BY_VALIDATION]
    for predict in fitted.predict.values():
        p = predict(small.parts.test.x)
        torch.testing.assert_close(p.sum(1), torch.ones(len(p)))
    assert fitted.checks["SWAG"] == {"learning rate": 1e-2} and 0 < fitted.checks["HMC"]["acceptance"] <= 1
    alone = fit_laplace(lambda seed: mlp((16, 4, N_CLASSES), seed), small.parts, how, 0).predict
    assert list(alone) == ["MAP", "LA", "LA*", BY_VALIDATION]
    x = small.parts.test.x
    assert all(torch.equal(alone[name](x), fitted.predict[name](x)) for name in alone)  # from the same network
    with_norm = coloured_digits(DATA, SIZES, 0)
    no_chains = MethodSettings(short, short, swag=how.swag, swag_rates=(1e-2,), n_members=2, n_samples=2)
    fitted = fit_all(lambda seed: cnn_with_batch_norm(N_CLASSES, seed, 2), with_norm.parts, no_chains, 0)
    assert "HMC" not in fitted.predict and all(
        bool(f(with_norm.parts.test.x).isfinite().all()) for f in fitted.predict.values()
    )
