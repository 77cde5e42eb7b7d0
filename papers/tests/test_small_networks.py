"""Networks trained side by side, mean-field inference, and the posteriors of the tables of Immer et al. (2021)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import distributions, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from laplace import FunctionalLaplace, Laplace
from protocol.baselines.mean_field import MeanField, mean_field
from protocol.claims import orders
from protocol.data import Part, Split, waveform
from protocol.linearised import SMALL, Candidates, Posteriors, Settings, Task, make_split
from protocol.records import Scores
from protocol.stacked import Steps, losses, map_networks, probabilities, stacked_outputs, stacked_start


def points(n_data: int, n_classes: int, seed: int = 0) -> Part:
    """Classes in three dimensions that overlap."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n_data) % n_classes
    x = torch.randn(n_data, 3, generator=generator, dtype=torch.float64)
    return Part(x + torch.eye(3)[y % 3], y)


def test_networks_side_by_side_are_at_the_modes_of_their_posteriors() -> None:
    data, precisions = points(40, 3), [0.5, 5.0]
    for model, delta in zip(map_networks((3, 4, 3), data, precisions, Steps(800, 3e-2), 0), precisions, strict=True):
        misfit = nn.functional.cross_entropy(model(data.x), data.y, reduction="sum")
        (misfit + 0.5 * delta * sum(p.square().sum() for p in model.parameters())).backward()
        assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) < 5e-2


def test_losses_are_sums_of_log_probabilities() -> None:
    f, y = torch.randn(2, 5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 0])
    expected = -probabilities(f)[:, torch.arange(5), y].log().sum(1)
    torch.testing.assert_close(losses(f, y), expected)
    f, y = f[:, :, :1], torch.tensor([0, 1, 1, 0, 1])
    p = probabilities(f).squeeze(2)
    torch.testing.assert_close(losses(f, y), -torch.where(y == 1, p, 1 - p).log().sum(1))


def test_mean_field_outputs_and_divergence_are_those_of_gaussians() -> None:
    generator = torch.Generator().manual_seed(0)
    means = [torch.randn(2, 3, 1, generator=generator), torch.randn(2, 1, 1, generator=generator)]
    scales = [torch.rand(2, 3, 1, generator=generator) + 0.1, torch.rand(2, 1, 1, generator=generator) + 0.1]
    q, precisions = MeanField(means, scales), torch.tensor([0.5, 2.0])
    expected = torch.zeros(2)
    for mean, scale in zip(means, scales, strict=True):
        prior = distributions.Normal(0.0, precisions.rsqrt().view(2, 1, 1).expand_as(mean))
        expected += distributions.kl_divergence(distributions.Normal(mean, scale), prior).sum((1, 2))
    torch.testing.assert_close(q.divergence(precisions), expected)
    x = torch.tensor([[1.0, -2.0, 0.5]]).expand(200_000, 3)
    f = q.outputs(x, generator).squeeze(2)
    torch.testing.assert_close(f.mean(1), (x[0] @ means[0] + means[1][:, 0]).flatten(), atol=0.02, rtol=0)
    variance = x[0].square() @ scales[0].square() + scales[1][:, 0].square()
    torch.testing.assert_close(f.var(1), variance.flatten(), atol=0.05, rtol=0.02)


def test_mean_field_is_the_prior_where_there_are_no_data() -> None:
    data = Part(torch.zeros(20, 3), torch.arange(20) % 2)  # no input says anything of its weight
    q = mean_field((3, 1), data, [1.0, 4.0], Steps(2000, 3e-2), 0)
    torch.testing.assert_close(q.means[0], torch.zeros(2, 3, 1), atol=0.1, rtol=0)
    expected = torch.tensor([1.0, 0.5]).view(2, 1, 1).expand(2, 3, 1)
    torch.testing.assert_close(q.scales[0], expected, atol=0.05, rtol=0)


def small_posteriors(n_hidden: int) -> Posteriors:
    data = points(24, 3)
    model = map_networks((3, n_hidden, 3), data, [1.0], Steps(50, 1e-2), 0)[0]
    task = Task(lambda seed: data, 3)
    return Posteriors(model, 1.0, task, Split(data, data[:4], data[4:8]), replace(SMALL, n_networks=5), 0)


def test_full_posterior_is_the_same_over_weights_and_over_functions() -> None:
    there = small_posteriors(20)  # 143 weights, 72 outputs
    over_functions = there.fitted("full")
    assert isinstance(over_functions, FunctionalLaplace)
    over_weights = Laplace(there.model, "classification", "all", "full", prior_precision=1.0)
    over_weights.fit(there.loader())
    torch.testing.assert_close(over_functions(there.inputs), over_weights(there.inputs))
    assert not isinstance(small_posteriors(4).fitted("full"), FunctionalLaplace)  # 31 weights


def test_sampled_networks_are_those_of_the_sampled_weights() -> None:
    there = small_posteriors(4)
    la = there.fitted("diag")
    expected = torch.zeros(8, 3, dtype=torch.float64)
    start = parameters_to_vector(there.model.parameters()).detach().clone()
    for theta in la.sample(5, generator=torch.Generator().manual_seed(0)):
        vector_to_parameters(theta.to(start), there.model.parameters())
        with torch.no_grad():
            expected += there.model(there.inputs).softmax(1) / 5
    vector_to_parameters(start, there.model.parameters())
    torch.testing.assert_close(there.sampled(la).double(), expected, atol=1e-5, rtol=0)


def test_stacked_networks_are_copies_of_one() -> None:
    tensors = stacked_start((3, 4, 2), 3, 0)
    f = stacked_outputs(tensors, torch.randn(5, 3))
    assert f.shape == (3, 5, 2) and torch.equal(f[0], f[2])


def test_candidate_with_the_smallest_validation_loss_is_kept() -> None:
    data = points(20, 2)
    split, found = Split(data, data[:4], data[4:8]), Candidates()
    for chance, precision in ((0.5, 1.0), (0.9, 10.0), (0.6, 100.0)):
        found.add(torch.where(data.y[:8] == 1, chance, 1 - chance).unsqueeze(1), split, precision)
    measures = found.measures(split.test.y)
    assert measures["log10 δ"] == 1 and measures["accuracy"] == 1
    assert abs(measures["NLL"] + torch.tensor(0.9).log()) < 1e-6


def test_split_is_stratified_and_standardised() -> None:
    split = make_split(Task(lambda seed: points(100, 4), 4), replace(SMALL, n_data=100), 0)
    assert [len(part) for part in (split.train, split.validation, split.test)] == [70, 15, 15]
    assert split.train.y.bincount().tolist() in ([17, 18, 17, 18], [18, 17, 18, 17], [18, 18, 17, 17], [17, 17, 18, 18])
    torch.testing.assert_close(split.train.x.std(0, correction=0), torch.ones(3, dtype=torch.float64))


def test_data_that_are_no_part_of_the_set_are_for_tests() -> None:
    data = points(100, 4)
    task = Task(lambda seed: data, 4, n_data=40)
    split = make_split(task, Settings(), 0)
    assert [len(part) for part in (split.train, split.validation, split.test)] == [28, 6, 6]
    more = make_split(replace(task, tests_on_rest=True), Settings(), 0)
    assert [len(part) for part in (more.train, more.validation, more.test)] == [28, 6, 66]
    torch.testing.assert_close(more.test.x[:6], split.test.x)
    assert len(torch.cat([more.train.x, more.validation.x, more.test.x]).unique(dim=0)) == 100


def test_waves_are_means_of_two_triangles() -> None:
    data = waveform(60_000, torch.Generator().manual_seed(0))
    place = torch.arange(1.0, 22.0)
    one, two, three = ((6 - (place - centre).abs()).clamp(min=0) for centre in (11, 15, 7))
    for label, expected in enumerate(((one + two) / 2, (one + three) / 2, (two + three) / 2)):
        torch.testing.assert_close(data.x[data.y == label].mean(0), expected, atol=0.06, rtol=0)


def test_orders_are_the_papers_where_they_are_beyond_its_errors() -> None:
    cells = {"NLL": {"a": "0.5±0.1", "b": "0.9±0.1", "c": "0.6±0.1"}, "accuracy": {"a": "0.5±0.1", "b": "0.9±0.1"}}
    found = orders("table", "here", {"NLL": cells["NLL"]}, [("b", "a"), ("a", "c")])
    found += orders("table", "here", {"accuracy": cells["accuracy"]}, [("a", "b")])
    assert [claim.text for claim in found] == ["here: NLL of a < b", "here: accuracy of b > a"]
    assert [claim.theirs for claim in found] == ["0.5±0.1 < 0.9±0.1", "0.9±0.1 > 0.5±0.1"]
    scores = Scores()
    scores.add("here", "a", {"NLL": 1.0, "accuracy": 0.7})
    scores.add("here", "b", {"NLL": 3.0, "accuracy": 0.8})
    assert [round(claim.statistic(scores), 6) for claim in found] == [2.0, 0.1]
