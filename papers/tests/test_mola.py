"""The parts of the experiment on mixtures: corruptions, what is measured on them, the methods' choices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laplace import Laplace, MixtureLaplace
from laplace.metrics import mean_confidence
from protocol.baselines.ensemble import deep_ensemble
from protocol.corruptions import CORRUPTIONS, SEVERITIES, corrupted
from protocol.data import digits
from protocol.measures import classification
from protocol.mola.costs import mebibytes
from protocol.mola.methods import (
    BATCH,
    LARGEST,
    MethodSettings,
    by_number,
    heads,
    last_layers,
    six,
    train_mimo,
    tune,
    variants,
)
from protocol.mola.tasks import DataSettings, Task, corrupted_task, rotated_task
from protocol.networks import cnn
from protocol.training import Training

FEW = MethodSettings(2, 2, 8, n_samples=4, n_swag_samples=2, swag_rates=(0.01,))
SHORT = Training(5, 32, 1e-2)


@pytest.fixture(scope="module")
def task() -> Task:
    return corrupted_task(DataSettings(300, 100, 40, noise=0.05, warp=0.1), 0)


@pytest.fixture(scope="module")
def networks(task: Task) -> list[torch.nn.Module]:
    return deep_ensemble(lambda seed: cnn(10, seed, 4), task.parts.train, SHORT, 0, 2)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_leave_images_and_grow_with_the_severity(name: str) -> None:
    x = digits().x[:300]
    distances = []
    for severity in SEVERITIES:
        changed = corrupted(x, name, severity, torch.Generator().manual_seed(0))
        assert changed.shape == x.shape
        assert float(changed.min()) >= 0 and float(changed.max()) <= 1 + 1e-6
        distances.append(float((changed - x).square().mean()))
    assert distances == sorted(distances) and distances[0] > 0


@pytest.mark.parametrize("make", [rotated_task, corrupted_task])
def test_scores_are_those_of_the_inputs_in_their_order(make) -> None:
    task = make(DataSettings(100, 50, 30), 0)
    x, n_data, y = task.everything(), 30, task.parts.test.y

    def predict(x: Tensor) -> Tensor:
        return (5 * x.flatten(1)[:, 10:20]).softmax(1)

    scores, level = task.scores(predict(x)), list(task.shifts)[-1]
    assert len(x) == n_data * (1 + sum(len(kinds) for kinds in task.shifts.values()) + len(task.ood))
    kinds = [classification(predict(x), y) for x in task.shifts[level]]
    expected = sum(each["NLL"] for each in kinds) / len(kinds)
    assert scores[f"{task.name}, level {level}"]["NLL"] == pytest.approx(expected)
    confidence = float(mean_confidence(predict(task.ood["shuffled"])))
    assert scores[f"{task.name}, shuffled"]["confidence"] == pytest.approx(confidence)
    assert scores[f"{task.name}, test"]["NLL"] == pytest.approx(classification(predict(task.parts.test.x), y)["NLL"])


def test_prior_precision_is_the_smallest_that_is_confident_enough(task: Task, networks) -> None:
    mixture, validation = MixtureLaplace(last_layers(networks, task.parts.train)), task.parts.validation

    def confidence(precision: float) -> float:
        mixture.prior_precision = precision
        return float(mean_confidence(mixture(validation.x)))

    wanted = (confidence(1e-4) + confidence(LARGEST)) / 2
    chosen = tune(mixture, validation, wanted, 8)
    grid = torch.logspace(-4, 3, 8).tolist()
    assert chosen == pytest.approx(min(each for each in grid if confidence(each) >= wanted))
    assert tune(mixture, validation, 0.9999, 8) == LARGEST


def test_factors_are_running_averages_of_all_data(task: Task, networks) -> None:
    data, x = task.parts.train, task.parts.test.x
    (whole,) = last_layers(networks[:1], data, average=1.0)
    once = Laplace(networks[0], "classification", "last_layer", "kron", damping="mean")
    once.fit([(data.x, data.y)])
    torch.testing.assert_close(whole(x), once(x))
    (recent,) = last_layers(networks[:1], data, average=0.5)
    n_late = len(data) - 2 * BATCH  # of three batches
    assert recent.n_data == pytest.approx(0.75 * BATCH + n_late)
    assert float(recent.temperature) == pytest.approx(recent.n_data / len(data))
    outputs = []
    for part in (data[:BATCH], data[BATCH : 2 * BATCH], data[2 * BATCH :]):
        once.fit([(part.x, part.y)])
        outputs.append(once.H.kfacs[0][0])
    torch.testing.assert_close(recent.H.kfacs[0][0], 0.25 * outputs[0] + 0.5 * outputs[1] + outputs[2])


def test_methods_predict_everything(task: Task, networks) -> None:
    x = task.everything()[:70]
    found = six(networks, task.parts, x, FEW, 0)
    assert list(found.p) == ["MAP", "DE", "SWAG", "MSWAG", "LLLA", "MoLA"]
    more = dict(by_number(networks, task.parts, x, FEW))
    torch.testing.assert_close(more[1].p["MoLA"], found.p["LLLA"])
    torch.testing.assert_close(more[2].p["MoLA"], found.p["MoLA"])
    torch.testing.assert_close(more[1].p["DE"], found.p["MAP"])
    torch.testing.assert_close(more[2].p["DE"], found.p["DE"])
    others = variants(networks[0], task.parts, x, FEW, 0)
    torch.testing.assert_close(others.p["kron, probit"], found.p["LLLA"])
    for p in (*found.p.values(), *others.p.values()):
        assert p.shape == (70, 10)
        torch.testing.assert_close(p.sum(1), torch.ones(70))


def test_heads_of_one_network_learn(task: Task) -> None:
    network = train_mimo(8, task.parts.train, Training(40, 32, 0.05, momentum=0.9), FEW, 0)
    found = heads(network, task.parts, task.parts.test.x, FEW)
    for p in found.p.values():
        assert classification(p, task.parts.test.y)["accuracy"] > 0.5


def test_memory_is_that_of_all_tensors() -> None:
    state = {"a": torch.zeros(2**18), "b": [torch.zeros(2**17), {"c": torch.zeros(2**17), "d": "kron"}]}
    assert math.isclose(mebibytes(state), 2.0)
