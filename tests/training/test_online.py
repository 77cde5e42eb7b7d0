"""Online Laplace: the objective is the log joint density, the hyper-parameters climb the evidence."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from laplace import OnlineLaplace, marglik_training
from laplace.curvature import NativeEF, NativeGGN
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, TuningWarning
from laplace.likelihoods import Categorical, LikelihoodFromLoss
from tests import grid
from tests.pairs import nightly
from tests.reference import evidence as truth
from tests.reference.compare import assert_close
from tests.reference.likelihoods import DENSITIES, nll

Batches = list[tuple[Tensor, Tensor]]


def train(likelihood: Any = "classification", structure: str = "diag", **options: Any) -> tuple[Any, ...]:
    """A short training of the grid's network."""
    name = likelihood if isinstance(likelihood, str) else likelihood.name
    model = options.pop("model", None) or grid.network(name)
    defaults: dict[str, Any] = {"n_epochs": 4, "n_hypersteps": 2, "optimizer_kwargs": {"lr": 0.01}}
    return marglik_training(
        model, options.pop("loader", grid.batches(name)), likelihood, structure, **defaults | options
    )


def line(n_data: int = 40, n_inputs: int = 3, n_outputs: int = 1) -> tuple[nn.Module, Tensor, Tensor]:
    """A linear model in float64, whose posterior and evidence are known in closed form."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n_data, n_inputs, dtype=torch.float64, generator=generator)
    weights = torch.randn(n_inputs, n_outputs, dtype=torch.float64, generator=generator)
    noise = 0.3 * torch.randn(n_data, n_outputs, dtype=torch.float64, generator=generator)
    return nn.Linear(n_inputs, n_outputs, dtype=torch.float64), x, x @ weights + 0.5 + noise


# The objective.


def unit_loss(likelihood: str, f: Tensor, y: Tensor) -> Tensor:
    """Summed unit negative log likelihood per output, or as one number."""
    if likelihood == "regression":
        return 0.5 * (f - y).square().sum(0)
    if likelihood == "bernoulli":
        return functional.binary_cross_entropy_with_logits(f, y, reduction="sum")
    if likelihood in DENSITIES:
        return nll(f, y, likelihood).sum()
    return functional.cross_entropy(f, y, reduction="sum")


@pytest.mark.parametrize("likelihood", grid.LIKELIHOODS)
def test_the_objective_is_the_negative_log_joint_per_datum(likelihood: str) -> None:
    model, (x, y) = grid.network(likelihood).double().eval(), grid.data(likelihood)
    x, y = x.double(), y.double() if y.is_floating_point() else y
    sigma = torch.tensor([0.5, 0.8, 1.7], dtype=torch.float64) if likelihood == "regression" else torch.ones(1).double()
    prior = torch.tensor([0.3, 2.0, 5.0, 0.1], dtype=torch.float64)
    online = OnlineLaplace(
        model, [(x, y)], likelihood, "diag", prior_prec_init=prior, sigma_noise_init=sigma, temperature=0.7,
        laplace_kwargs={"prior_mean": 0.2},
    )  # fmt: skip
    weights = 1 / (0.7 * sigma.square())
    scatter = sum(d * (p - 0.2).square().sum() for d, p in zip(prior, model.parameters(), strict=True))
    joint = (weights * unit_loss(likelihood, model(x), y)).sum() + 0.5 * scatter
    parameters = list(model.parameters())
    expected = torch.autograd.grad(joint, parameters)
    parts = [online.loss(model(a), b) * len(a) for a, b in zip(x.split(5), y.split(5), strict=True)]
    found = torch.autograd.grad(sum(parts, torch.zeros(())) * weights.mean(), parameters)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, "algebra")
    assert_close(sum(parts, torch.zeros(())).detach() * weights.mean(), joint.detach(), "algebra")


def test_ignored_labels_count_nowhere() -> None:
    model, (x, y) = grid.network(), grid.data()
    y = y.clone()
    y[::3] = -100
    kept = y != -100
    online = OnlineLaplace(model.eval(), [(x, y)])
    assert online.n_data == int(kept.sum())
    fewer = OnlineLaplace(model, [(x[kept], y[kept])])
    assert_close(online.loss(model(x), y), fewer.loss(model(x[kept]), y[kept]), "float32")
    losses = train(loader=[(x, y), (x[:3], torch.full((3,), -100))])[-1]
    assert losses[-1] < losses[0]


def test_one_hot_labels_are_counted_by_rows() -> None:
    """Their entries are no indices, of which one could be the ignored one; labels of eight bits are indices."""
    model, (x, y) = grid.network().eval(), grid.data()
    one_hot = functional.one_hot(y, 3)
    assert OnlineLaplace(model, [(x, one_hot)], Categorical(ignore_index=0)).n_data == len(x)
    half = one_hot.where(torch.arange(len(x)).unsqueeze(1) < 4, -100)
    assert OnlineLaplace(model, [(x, half)]).n_data == 4
    bytes_ = torch.tensor([156, 3, 199], dtype=torch.uint8)
    assert OnlineLaplace(nn.Linear(2, 200), [(torch.randn(3, 2), bytes_)]).n_data == 3


@pytest.mark.parametrize("single", [True, False])
def test_positions_of_binary_targets_are_data(single: bool) -> None:
    """Targets `[B, T]` of outputs `[B, T, 1]` are B·T data, not B of T labels each, before and after an estimate."""
    model, x = nn.Linear(3, 1), torch.randn(4, 5, 3)
    y = (x[..., 0] > 0).float() if single else (x[..., :1] > 0).float()
    online = OnlineLaplace(model, [(x[:3], y[:3]), (x[3:], y[3:])], "bernoulli", "diag", prior_prec_init=2.0)
    assert online.n_data == 20
    before = online.loss(model(x), y).detach()
    rows = model(x).flatten(0, 1), y.reshape(-1, 1)
    prior = 2.0 * sum(p.detach().square().sum() for p in model.parameters())
    expected = functional.binary_cross_entropy_with_logits(*rows) + prior / 40
    assert_close(before, expected.detach(), "float32")
    online.la.fit(online.train_loader)
    assert online.n_data == 20
    assert_close(online.loss(model(x), y).detach(), before, "float32")


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_training_ends_at_the_posterior_mean_of_a_linear_model(temperature: float) -> None:
    model, x, y = line()
    la, _, margliks, losses = marglik_training(
        model, [(x, y)], "regression", "full", optimizer_cls=torch.optim.LBFGS, n_epochs=20, n_epochs_burnin=99,
        optimizer_kwargs={"max_iter": 40, "tolerance_change": 1e-16, "tolerance_grad": 1e-12},
        prior_prec_init=2.0, sigma_noise_init=0.6, temperature=temperature,
    )  # fmt: skip
    design = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    noise = torch.full((len(x),), 0.6 * math.sqrt(temperature), dtype=torch.float64)
    prior = torch.full((4,), 2.0, dtype=torch.float64)
    mean, covariance, evidence = truth.bayesian_linear_regression(
        design, y[:, 0], noise, prior, torch.zeros_like(prior)
    )
    assert_close(la.mean, mean, "backend")
    assert_close(la.posterior_covariance, covariance, "backend")
    if temperature == 1:
        assert_close(la.log_marginal_likelihood(), evidence, "backend")
    assert margliks == []
    assert losses[-1] < losses[0]


@pytest.mark.nightly
def test_the_evidence_ends_at_its_maximum() -> None:
    """Type-II maximum likelihood of a linear model, by the closed form of the marginal density."""
    model, x, y = line()
    la, *_ = marglik_training(
        model, [(x, y)], "regression", "full", optimizer_kwargs={"lr": 0.03}, n_epochs=500, n_hypersteps=3, lr_hyp=0.05
    )
    design = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    logs = torch.zeros(3, dtype=torch.float64, requires_grad=True)  # log δ of weight and bias, log σ
    optimizer = torch.optim.LBFGS([logs], max_iter=200, line_search_fn="strong_wolfe")

    def negative() -> Tensor:
        optimizer.zero_grad()
        prior = logs[:2].exp().repeat_interleave(torch.tensor([3, 1]))
        noise = logs[2].exp().expand(len(x))
        value = -truth.bayesian_linear_regression(design, y[:, 0], noise, prior, torch.zeros(4, dtype=torch.float64))[2]
        value.backward()
        return value

    optimizer.step(negative)
    best = -negative().item()
    assert best - 1e-3 < la.log_marginal_likelihood().item() <= best + 1e-9
    assert_close(la.sigma_noise.log(), logs[2], "float32_ill")


# What it is for.


class Grouped(nn.Module):
    """Two groups of two inputs, each with weights, and so with a prior, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.useful, self.useless, self.head = nn.Linear(2, 20), nn.Linear(2, 20, bias=False), nn.Linear(20, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.useful(x[:, :2]) + self.useless(x[:, 2:])))


@pytest.mark.parametrize(("structure", "largest_noise"), [("diag", 0.3), *nightly(("full", 0.23), ("kron", 0.23))])
@pytest.mark.nightly
def test_it_recovers_the_noise_and_prunes_useless_inputs(structure: str, largest_noise: float) -> None:
    """The noise is 0.2; the coarser the curvature, the more of the signal is called noise."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(200, 4, generator=generator)
    y = torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:2] + 0.2 * torch.randn(200, 1, generator=generator)
    model = Grouped()
    la, *_ = marglik_training(
        model, list(zip(x.split(50), y.split(50), strict=True)), "regression", structure, n_epochs=200,
        optimizer_kwargs={"lr": 0.01}, n_epochs_burnin=20, marglik_frequency=5, n_hypersteps=30,
    )  # fmt: skip
    assert 0.17 < la.sigma_noise.item() < largest_noise
    priors = dict(zip([name for name, _ in model.named_parameters()], la.prior_precision.tolist(), strict=True))
    assert priors["useless.weight"] > 1000 * priors["useful.weight"]
    assert model.useless.weight.abs().max() < 0.01 * model.useful.weight.abs().max()


@pytest.mark.filterwarnings("ignore::laplace.errors.CalibrationWarning")  # of both, and rightly
@pytest.mark.parametrize("structure", ["diag", *nightly("kron")])
@pytest.mark.nightly
def test_it_beats_a_fixed_prior_on_digits(structure: str) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = map(torch.as_tensor, datasets.load_digits(return_X_y=True))
    x = x.float() / 16 + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    loader = list(zip(x[:400].split(100), y[:400].split(100), strict=True))
    scores = {}
    for burnin in (10, 10**6):  # never estimated: the prior stays at its start
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
        la, *_ = marglik_training(
            model, loader, "classification", structure, optimizer_kwargs={"lr": 0.005}, n_epochs=100,
            n_epochs_burnin=burnin, marglik_frequency=5,
        )  # fmt: skip
        scores[burnin] = functional.nll_loss(la(x[400:]).log(), y[400:]).item()
    assert scores[10] < scores[10**6] - 0.02


class Counts(LikelihoodFromLoss):
    name = "counts"

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.exp() - y * f).sum()

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(f.exp().expand(n, *f.shape), generator=generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f.exp()


@pytest.mark.parametrize("likelihood", [*grid.LIKELIHOODS, pytest.param(Counts(), id="counts")])
@pytest.mark.parametrize("structure", grid.STRUCTURES)
@pytest.mark.parametrize(("backend", "options"), [(NativeGGN, {"stochastic": True}), (NativeEF, {}), (None, {})])
@pytest.mark.turns
def test_every_likelihood_structure_and_backend(likelihood: Any, structure: str, backend: Any, options: Any) -> None:
    own = None if isinstance(likelihood, str) else [(x, y.abs().round()) for x, y in grid.batches("regression")]
    la, _, margliks, losses = train(
        likelihood, structure, backend=backend, laplace_kwargs={"backend_kwargs": options}, prior_structure="scalar",
        loader=own or grid.batches(likelihood if own is None else "regression"),
    )  # fmt: skip
    assert len(margliks) == 8
    assert len(losses) == 4
    assert all(math.isfinite(value) for value in [*margliks, *losses])
    assert la.n_data == grid.N_DATA
    assert la.prior_precision.item() != 1
    assert la._key == ("all", structure)
    if likelihood == "regression":
        assert la.sigma_noise.item() != 1


@pytest.mark.parametrize(("structure", "length"), [("scalar", 1), ("layerwise", 4), ("diag", 38)])
def test_prior_structures(structure: str, length: int) -> None:
    la, *_ = train(prior_structure=structure, prior_prec_init=0.5)
    assert la.prior_precision.shape == (length,)
    assert (la.prior_precision != 0.5).all()


def test_one_noise_per_output() -> None:
    la, *_ = train("regression", sigma_noise_init=torch.ones(3))
    assert la.sigma_noise.unique().numel() == 3


def test_a_fixed_noise_stays() -> None:
    la, *_ = train("regression", sigma_noise_init=0.7, fix_sigma_noise=True)
    assert la.sigma_noise.item() == pytest.approx(0.7)


# The schedule, and the state that is returned.


def test_when_the_evidence_is_estimated() -> None:
    online = OnlineLaplace(grid.network(), grid.batches(), n_epochs_burnin=5, marglik_frequency=3, n_hypersteps=4)
    assert [epoch for epoch in range(1, 13) if online.step(epoch) is not None] == [6, 9, 12]
    assert len(online.margliks) == 12


def test_the_best_state_is_returned() -> None:
    model, loader = grid.network().double(), [(x.double(), y) for x, y in grid.batches()]
    online = OnlineLaplace(model, loader, "classification", "kron", n_hypersteps=3)
    seen = []
    for epoch in range(1, 4):
        seen.append((online.step(epoch), {k: v.clone() for k, v in model.state_dict().items()}))
        with torch.no_grad():  # every state is worse than the one before
            for parameter in model.parameters():
                parameter.mul_(3)
    (first, weights), *later = seen
    assert all(first > value for value, _ in later)
    with pytest.warns(TuningWarning, match="after epoch 1, .* 2 later estimates .* n_epochs_burnin="):
        la = online.finish()
    assert la is online.la
    assert online.best.epoch == 1
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    assert_close(la.log_marginal_likelihood(), first, "algebra")
    assert_close(-la.log_marginal_likelihood(), online.margliks[2], "algebra")


def test_without_an_estimate_the_last_values_are_used() -> None:
    la, model, margliks, _ = train(n_epochs_burnin=99, prior_prec_init=3.0)
    assert margliks == []
    assert (la.prior_precision == 3).all()
    assert torch.equal(la.mean, nn.utils.parameters_to_vector(model.parameters()))


# Manners.


def test_training_is_the_plain_loop_while_nothing_is_estimated() -> None:
    """Counting the data draws no random number, so that dropout and shuffling are those of a loop of one's own."""
    x, y = grid.data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5, shuffle=True)
    torch.manual_seed(3)
    _, trained, _, losses = train(loader=loader, n_epochs_burnin=99, prior_prec_init=1.5)
    torch.manual_seed(3)
    model = grid.network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    means = []
    for _ in range(4):
        total = 0.0
        for a, b in loader:
            optimizer.zero_grad()
            theta = nn.utils.parameters_to_vector(model.parameters())
            loss = functional.cross_entropy(model(a), b) + 1.5 * theta.square().sum() / (2 * len(x))
            loss.backward()
            optimizer.step()
            total += loss.item() * len(a)
        means.append(total / len(x))
    for one, other in zip(trained.parameters(), model.parameters(), strict=True):
        assert_close(one, other, "float32")
    assert_close(losses, means, "float32")


def test_equal_seeds_give_equal_bits() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(4)
        runs.append(train("regression", "kron"))
    (one, _, *lists), (other, _, *others) = runs
    assert torch.equal(one.mean, other.mean)
    assert torch.equal(one.prior_precision, other.prior_precision)
    assert lists == others


class Watched(nn.Module):
    """Remembers the flags that its forward pass saw, in a list of its caller's."""

    def __init__(self, seen: list[tuple[bool, bool]]) -> None:
        super().__init__()
        self.trunk, self.norm, self.head = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.see = lambda: seen.append((self.training, self.norm.training))

    def forward(self, x: Tensor) -> Tensor:
        self.see()
        return self.head(self.norm(self.trunk(x)))


@pytest.mark.parametrize("flags", [(True, True), (False, False), (True, False)])
def test_it_trains_in_train_mode_and_puts_the_flags_back(flags: tuple[bool, bool]) -> None:
    seen: list[tuple[bool, bool]] = []
    model = Watched(seen)
    model.training, model.norm.training = flags
    train(model=model, loader=grid.batches(size=6))
    assert (model.training, model.norm.training) == flags
    during = (True, True) if not flags[0] else flags
    assert set(seen) == {during, (False, False)}
    # In turn: two batches of training, the evidence in eval mode; the last pass is the final fit.
    assert [seen[0], seen[1]] == [during] * 2
    assert seen.count(during) == 8
    assert seen[-1] == (False, False)
    assert all(p.grad is None for p in model.parameters())


def test_flags_are_put_back_after_a_failure() -> None:
    model = grid.network().eval()
    bad = [*grid.batches(), (torch.full((2, 3), math.nan), torch.zeros(2, dtype=torch.long))]
    with pytest.raises(InvalidData):
        train(model=model, loader=bad)
    assert not any(module.training for module in model.modules())


def test_an_estimate_leaves_gradients_and_random_state() -> None:
    model = grid.network()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    online = OnlineLaplace(model, grid.batches(), n_hypersteps=2)
    state = torch.get_rng_state()
    online.step(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "0.weight")
    assert model.training


def test_frozen_parameters_are_not_trained() -> None:
    model = grid.network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    la, *_ = train(model=model)
    assert torch.equal(model[0].weight, before)
    assert la.n_layers == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_trains_inside_of(mode: Any) -> None:
    model, loader = grid.network(), grid.batches()
    before = model[0].weight.detach().clone()
    with mode():
        train(model=model, loader=loader)
    assert not torch.equal(model[0].weight, before)
    assert not model[0].weight.is_inference()


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_weight_decay_is_refused_without_writing_to_the_caller_s(cls: Any) -> None:
    options = {"lr": 0.01, "weight_decay": 0.1}
    torch.manual_seed(0)
    with pytest.warns(TuningWarning, match=r"weight_decay=0\.1.*prior_prec_init"):
        _, model, *_ = train(optimizer_cls=cls, optimizer_kwargs=options)
    assert options == {"lr": 0.01, "weight_decay": 0.1}
    torch.manual_seed(0)
    twin = train(optimizer_cls=cls, optimizer_kwargs={"lr": 0.01, "weight_decay": 0})[1]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_schedulers_step_per_batch() -> None:
    # It raises at step 13, and would end elsewhere than at the smallest rate before step 12.
    rates: list[float] = []

    class Recorded(torch.optim.lr_scheduler.OneCycleLR):
        def step(self, *args: Any) -> None:
            super().step(*args)
            rates.append(self.get_last_lr()[0])

    train(scheduler_cls=Recorded, scheduler_kwargs={"max_lr": 0.02, "total_steps": 13})
    assert len(rates) == 1 + 4 * len(grid.batches())
    assert rates[-1] == pytest.approx(0.02 / 25 / 1e4)


def test_a_schedule_by_the_loss_steps_per_epoch() -> None:
    seen: list[float] = []

    class Recorded(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: int | None = None) -> None:
            seen.append(metrics)
            super().step(metrics)

    losses = train(scheduler_cls=Recorded)[-1]
    assert seen == losses


def test_mappings_tuples_and_calls_of_one_s_own() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = grid.network()

        def forward(self, data: dict[str, Tensor]) -> Tensor:
            return self.net(data["x"])

    mappings = [{"x": x, "t": y} for x, y in grid.batches()]
    plain = train(n_epochs=2)
    torch.manual_seed(0)
    mapped = train(model=Mapped(), loader=mappings, n_epochs=2, dict_key_x="x", dict_key_y="t")
    assert len(mapped[2]) == len(plain[2])
    assert mapped[0].n_data == grid.N_DATA
    triples = [(x, torch.full((len(x), 1), 2.0), y) for x, y in grid.batches()]
    la, *_ = train(loader=triples, n_epochs=2, forward_fn=lambda model, x: model(x[0] * x[1]))
    assert la((triples[0][0], triples[0][1])).shape == (5, 3)


def test_the_progress_bar_shows_loss_and_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    train(progress_bar=True)
    shown = capsys.readouterr().err
    assert "online Laplace" in shown
    assert "log_evidence=" in shown
    train()
    assert capsys.readouterr().err == ""


def test_options_reach_the_posterior() -> None:
    la, *_ = train("regression", "kron", laplace_kwargs={"damping": True, "prior_mean": 0.1}, enable_backprop=True)
    assert la.damping
    assert la.prior_mean.item() == pytest.approx(0.1)
    x = grid.data("regression")[0].requires_grad_()
    la(x)[0].sum().backward()
    assert x.grad is not None


def test_a_diverged_evidence_is_an_error() -> None:
    online = OnlineLaplace(grid.network(), grid.batches(), n_hypersteps=3, lr_hyp=200.0)
    with pytest.raises((CurvatureError, InvalidArgument), match="prior"):
        for epoch in range(1, 5):
            online.step(epoch)


def once() -> Iterator[Any]:
    yield from grid.batches()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_epochs": 0}, "n_epochs=0"),
        ({"n_hypersteps": 0}, "n_hypersteps=0"),
        ({"marglik_frequency": 0}, "marglik_frequency=0"),
        ({"lr_hyp": -1.0}, r"lr_hyp=-1\.0"),
        ({"prior_structure": "rows"}, "prior_structure='rows'"),
        ({"prior_prec_init": 0.0}, "prior_prec_init must be positive"),
        ({"prior_prec_init": torch.ones(3)}, "prior_prec_init has length 3"),
        ({"sigma_noise_init": 0.5}, "has no observation noise"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"loader": once()}, "read only once"),
        ({"structure": "rows"}, "hessian_structure='rows'"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        train(**options)


def test_an_empty_loader_is_an_error() -> None:
    with pytest.raises(InvalidData, match="gave no data"):
        train(loader=[])


def test_the_signature_is_that_of_the_contract() -> None:
    parameters = inspect.signature(marglik_training).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert positional == {
        "model": inspect.Parameter.empty, "train_loader": inspect.Parameter.empty, "likelihood": "classification",
        "hessian_structure": "kron", "backend": None, "optimizer_cls": torch.optim.Adam, "optimizer_kwargs": None,
        "scheduler_cls": None, "scheduler_kwargs": None, "n_epochs": 300, "lr_hyp": 0.1, "prior_structure": "layerwise",
        "n_epochs_burnin": 0, "n_hypersteps": 10, "marglik_frequency": 1, "prior_prec_init": 1.0,
        "sigma_noise_init": 1.0, "temperature": 1.0, "fix_sigma_noise": False, "progress_bar": False,
        "enable_backprop": False, "dict_key_x": "input_ids", "dict_key_y": "labels",
    }  # fmt: skip


def test_the_legacy_path() -> None:
    from laplace.marglik_training import marglik_training as legacy

    import laplace

    assert laplace.marglik_training is marglik_training is legacy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        positional = marglik_training(
            grid.network(), grid.batches(), "classification", "kron", None, torch.optim.Adam, {"lr": 1e-2}, None, None,
            2, 0.1, "layerwise", 0, 3, 1, 1.0, 1.0, 1.0, False, False, False, "input_ids", "labels",
        )  # fmt: skip
    assert len(positional[2]) == 6
