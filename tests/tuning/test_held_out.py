"""Held-out data without validation data: refits of a head against penalised fits from nothing, parts of other fits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import (
    InvalidArgument,
    InvalidData,
    InvalidType,
    ModelChangedError,
    NotFittedError,
    UnsupportedError,
)
from laplace.predictive.options import PredictOptions
from laplace.predictive.predict import Predictor
from laplace.tuning.held_out import HeldOut, held_out_part, refits_of_head
from tests.problems import Problem, get
from tests.reference import refits as oracle
from tests.reference.compare import assert_close

N, D, C = 40, 6, 3
OPTIONS = PredictOptions("glm", link_approx="probit")


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(width: int = 4, *, bias: bool = True) -> Any:
    """A trunk of D features with a head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(width, D), nn.Tanh(), nn.Linear(D, C, bias=bias)).double()


def data(n: int = N, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and values."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(n, width, dtype=torch.float64, generator=draws)
    noise = torch.randn(n, C, dtype=torch.float64, generator=draws)
    return x, (x[:, :C] + 0.5 * noise).argmax(1), 3 + x[:, :C] + 0.5 * noise


def features(model: Any, x: Tensor, *, bias: bool = True) -> Tensor:
    phi = model[:-1](x).detach()
    return torch.cat([phi, torch.ones(len(x), 1, dtype=x.dtype)], 1) if bias else phi


def weight_of(posterior: Any, *, bias: bool = True) -> Tensor:
    mean = posterior.mean
    if not bias:
        return mean.view(C, -1)
    return torch.cat([mean[: C * D].view(C, D), mean[C * D :].view(C, 1)], 1)


def held(piece: HeldOut) -> Tensor:
    """Features of what was held out, without the ones."""
    return torch.cat([x for x, _ in piece.loader])


def places(rows: Tensor, among: Tensor) -> Tensor:
    """Indices of rows among others."""
    distances = torch.cdist(rows, among, compute_mode="donot_use_mm_for_euclid_dist")
    assert distances.min(1).values.max() < 1e-10
    return distances.argmin(1)


def loss_of(likelihood: str, y: Tensor) -> Callable[[Tensor], Tensor]:
    if likelihood == "regression":
        return lambda f: 0.5 * (f - y).square().sum()
    return lambda f: nn.functional.cross_entropy(f, y, reduction="sum")


def fitted(model: nn.Module, likelihood: str, x: Tensor, y: Tensor, *, size: int = N, **options: Any) -> Any:
    la = cast("Any", Laplace)(model, likelihood, **options)
    la.fit(list(zip(x.split(size), y.split(size), strict=True)))
    return la


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("n", [N, 5])
def test_refits_are_penalised_fits_from_nothing(likelihood: str, n: int, bias: bool) -> None:
    """Also with fewer data than features, where nothing but the user's head says anything of most directions."""
    model = network(bias=bias)
    x, labels, values = data(n)
    y = values if likelihood == "regression" else labels
    la = fitted(model, likelihood, x, y)
    phi = features(model, x, bias=bias)
    weight = torch.cat([model[-1].weight, model[-1].bias[:, None]], 1) if bias else model[-1].weight
    weight = weight.detach().requires_grad_()
    gradient = torch.autograd.grad(loss_of(likelihood, y)(phi @ weight.T), weight)[0]
    inside = weight.detach() @ torch.linalg.pinv(phi) @ phi
    penalty = oracle.least_residual(gradient, inside)
    floor = 1e-6 * phi.square().sum().item() / phi.shape[1]
    penalty = max(penalty, floor)
    seen: list[int] = []
    for piece in refits_of_head(la.snapshot(), [(x, y)], folds=4, generator=seeded()):
        out = places(held(piece), phi[:, :D])
        seen += out.tolist()
        kept = torch.tensor([i for i in range(n) if i not in out.tolist()])
        got = weight_of(piece.posterior, bias=bias)
        if likelihood == "regression":
            want = oracle.ridge_regression(phi[kept], y[kept], penalty)
        else:
            of_kept = loss_of(likelihood, y[kept])
            want = oracle.minimum(lambda w, rows=kept, of=of_kept: of(phi[rows] @ w.T), (C, D + bias), penalty)
        assert (got - want).norm() <= 1e-4 * want.norm()
        assert (phi @ (got - want).T).abs().max() <= 1e-4 * (phi @ want.T).abs().max()
    assert len(seen) == len(set(seen))
    assert n < N or len(seen) == N


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_a_weight_decay_is_found(likelihood: str) -> None:
    """The head of a training that converged under one is the minimum for all data."""
    from laplace.tuning.held_out import HeadData

    model = network()
    x, labels, values = data()
    y = values if likelihood == "regression" else labels
    phi, decay = features(model, x), 0.7
    best = oracle.minimum(lambda w: loss_of(likelihood, y)(phi @ w.T), (C, D + 1), decay)
    with torch.no_grad():
        model[-1].weight.copy_(best[:, :D])
        model[-1].bias.copy_(best[:, D])
    head = HeadData.read(fitted(model, likelihood, x, y).snapshot(), [(x, y)]).head
    assert head.ridge == pytest.approx(decay, rel=1e-6)
    assert_close(head.refit(torch.arange(N)), best, "float32")


@pytest.mark.parametrize("n", [4, N])
def test_nothing_is_left_of_where_the_search_begins(n: int) -> None:
    """Heads that differ by what the features do not see, or far apart with one penalty, have one refit."""
    from laplace.likelihoods.categorical import Categorical
    from laplace.tuning.held_out import LinearHead

    model = network()
    x, y, _ = data(n)
    phi = features(model, x)
    offset = torch.zeros(C, dtype=x.dtype)
    starts = [torch.randn(C, D + 1, dtype=x.dtype, generator=seeded(seed)) for seed in (1, 2)]
    ends: list[Tensor] = []
    for start in starts:
        head = LinearHead(Categorical(), phi, offset, y, start)
        vars(head)["ridge"] = 0.01
        ends.append(head.refit(torch.arange(n - 1)))
    assert_close(ends[0], ends[1], "float32")


def refit_anew(problem: Problem, la: Any, piece: HeldOut, kept: list[Any], **options: Any) -> Any:
    """The problem's own network with the refitted head, fitted to the data that remain."""
    model = problem.make_model()
    head = model.get_submodule(problem.head or "")
    mean = piece.posterior.mean
    with torch.no_grad():
        start = 0
        for name in [slot.name for slot in la.problem.slots]:
            parameter = dict(model.named_parameters())[name]
            parameter.copy_(mean[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
    assert head is not None
    again = cast("Any", Laplace)(model, problem.likelihood, "last_layer", prior_precision=2.0, **options)
    again.fit(kept)
    return again


def made(problem: Problem, weights: str, **options: Any) -> Any:
    return cast("Any", Laplace)(problem.make_model(), problem.likelihood, weights, **options)


HEADS = [
    "mlp_classification", "mlp_regression", "mlp_bernoulli_multi", "mlp_poisson", "mlp_heteroscedastic",
    "mlp_ignored_labels", "mlp_soft_labels", "one_layer_classification", "no_bias", "dict_input", "logits_object",
]  # fmt: skip


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "ekfac"])
@pytest.mark.parametrize("name", HEADS)
def test_posteriors_are_those_of_the_network_with_the_refitted_head(name: str, structure: str) -> None:
    """By another fit of the whole network, with the refitted head in it, to the data that remain."""
    problem = get(name)
    noise = {"sigma_noise": 0.7} if problem.likelihood == "regression" else {}
    la = made(
        problem, "last_layer", hessian_structure=structure, prior_precision=2.0,
        last_layer_name=problem.head, **noise,
    )  # fmt: skip
    la.fit(problem.batches())
    n = len(problem.y)
    single = [problem.batches(1)[i] for i in range(n)]
    phi = [features_of(la, batch) for batch in single]
    for piece in refits_of_head(la.snapshot(), problem.batches(3), folds=2, generator=seeded()):
        out = {i for i in range(n) for row in held(piece) if torch.allclose(phi[i][:, : row.numel()], row)}
        kept = [batch for i, batch in enumerate(single) if i not in out]
        again = refit_anew(problem, la, piece, kept, hessian_structure=structure, last_layer_name=problem.head, **noise)
        assert_close(piece.posterior.log_evidence(), again.log_marginal_likelihood(), "backend")
        for x, _ in piece.loader:
            mine = Predictor(piece.posterior).call(x, OPTIONS, {})
            theirs = [again(inputs_of(single[i])) for i in order_of(x, phi)]
            for part, parts in zip(*both(mine, theirs), strict=True):
                assert_close(part, torch.cat(list(parts)), "backend")


def features_of(la: Any, batch: Any) -> Tensor:
    parts = la.engine.head_jacobian(inputs_of(batch))
    return parts[0][0].head_features()


def inputs_of(batch: Any) -> Any:
    return {k: v for k, v in batch.items() if k != "labels"} if isinstance(batch, dict) else batch[0]


def order_of(rows: Tensor, phi: list[Tensor]) -> list[int]:
    return places(rows, torch.cat(phi)[:, : rows.shape[1]]).tolist()


def both(mine: Any, theirs: list[Any]) -> tuple[list[Tensor], list[Any]]:
    if isinstance(mine, tuple):
        return list(mine), list(zip(*theirs, strict=True))
    return [mine], [theirs]


def heads_of(pieces: Any) -> Tensor:
    return torch.stack([piece.posterior.mean for piece in pieces])


def test_equal_seeds_give_equal_bits_and_batches_do_not_matter() -> None:
    model = network()
    x, y, _ = data()
    la = fitted(model, "classification", x, y)
    read = partial(refits_of_head, la.snapshot())
    first = list(read([(x, y)], generator=seeded()))
    again = list(read([(x, y)], generator=seeded()))
    assert torch.equal(heads_of(first), heads_of(again))
    assert all(torch.equal(held(a), held(b)) for a, b in zip(first, again, strict=True))
    small = list(read(list(zip(x.split(7), y.split(7), strict=True)), generator=seeded()))
    assert_close(heads_of(small), heads_of(first), "backend")
    other = heads_of(read([(x, y)], generator=seeded(4)))
    assert (other - heads_of(first)).abs().max() > 1e-3


def test_nothing_of_the_user_changes() -> None:
    """The network, the posterior, the random state, and the backend's generator, which sampled curvature draws from."""
    model = network()
    x, y, _ = data()
    draws = seeded(9)
    la = fitted(
        model, "classification", x, y, hessian_structure="full",
        backend_kwargs={"stochastic": True, "num_samples": 3, "generator": draws},
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), draws.get_state(), la.log_marginal_likelihood()
    list(refits_of_head(la.snapshot(), loader))
    held_out_part(la.snapshot(), loader)
    after = model.state_dict(), torch.get_rng_state(), draws.get_state(), la.log_marginal_likelihood()
    assert all(torch.equal(before[0][name], tensor) for name, tensor in after[0].items())
    assert all(torch.equal(a, b) for a, b in zip(before[1:], after[1:], strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_generator_draws_the_parts_and_none_follows_the_seed() -> None:
    model = network()
    x, y, _ = data()
    la = fitted(model, "classification", x, y)
    generator = seeded()
    first, second = (heads_of(refits_of_head(la.snapshot(), [(x, y)], generator=generator)) for _ in range(2))
    assert not torch.equal(first, second)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        third = heads_of(refits_of_head(la.snapshot(), [(x, y)]))
        torch.rand(3)
        assert torch.equal(third, heads_of(refits_of_head(la.snapshot(), [(x, y)])))


def test_classes_are_spread_evenly_and_a_single_datum_stays() -> None:
    model = network()
    x, y, _ = data(23)
    y = torch.tensor([0] * 15 + [1] * 7 + [2])
    la = fitted(model, "classification", x, y, size=23)
    pieces = list(refits_of_head(la.snapshot(), [(x, y)], folds=5, generator=seeded()))
    counts = torch.stack([torch.bincount(torch.cat([t for _, t in piece.loader]), minlength=3) for piece in pieces])
    assert counts.sum(0).tolist() == [15, 7, 0]
    assert (counts.max(0).values - counts.min(0).values).max() <= 1
    part = held_out_part(la.snapshot(), [(x, y)], share=0.4)
    shares = torch.bincount(part.loader[0][1], minlength=3) - 0.4 * torch.tensor([15, 7, 1])
    assert shares.sum() == pytest.approx(-0.2, abs=1e-6) and shares.abs().max() <= 1


class Tokens(nn.Module):
    """Outputs `[B, T, C]` of inputs `[B, T, 4]`."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(x)))


class Pixels(nn.Module):
    """Outputs `[B, C, H, W]` of inputs `[B, H, W, 4]`, by a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, D), nn.Conv2d(D, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(x)).movedim(-1, 1))


@pytest.mark.parametrize("options", [{}, {"backend_kwargs": {"kfac_approx": "reduce"}}], ids=["expand", "reduce"])
@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.parametrize("network_cls", [Tokens, Pixels])
def test_positions_of_a_datum_are_held_out_together(
    network_cls: Callable[[], Any], structure: str, options: dict[str, Any]
) -> None:
    """Rows that are ignored count nowhere; the curvature is that of the whole network with the refitted head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network_cls().double()
    x, y, _ = data(48)
    positions = (4,) if network_cls is Tokens else (3, 2)
    n = 12 if network_cls is Tokens else 8
    x, y = x.view(n, *positions, 4), y.view(n, *positions).clone()
    y[0, 1], y[2] = -100, -100
    la = fitted(model, "classification", x, y, hessian_structure=structure, last_layer_name="head", **options)
    n_rows = 0
    for piece in refits_of_head(la.snapshot(), [(x[:3], y[:3]), (x[3:], y[3:])], folds=2, generator=seeded()):
        phi = torch.tanh(model.trunk(x)).detach().view(-1, D)
        out = set((places(held(piece), phi) // (48 // n)).tolist())
        n_rows += sum(len(t) for _, t in piece.loader)
        assert sum(len(t) for _, t in piece.loader) == (y[list(out)] != -100).sum()
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.head.weight.copy_(piece.posterior.mean[: C * D].view_as(other.head.weight))
            other.head.bias.copy_(piece.posterior.mean[C * D :])
        kept = [i for i in range(n) if i not in out]
        again = fitted(
            other, "classification", x[kept], y[kept], size=n, hessian_structure=structure, last_layer_name="head",
            **options,
        )  # fmt: skip
        assert_close(piece.posterior.log_evidence(), again.log_marginal_likelihood(), "backend")
    assert n_rows == (y != -100).sum()


def test_a_bias_that_is_not_random_stays() -> None:
    model = network()
    model[-1].bias.requires_grad_(False)
    x, y, _ = data()
    la = fitted(model, "classification", x, y, last_layer_name="2")
    for piece in refits_of_head(la.snapshot(), [(x, y)], generator=seeded()):
        assert_close(piece.posterior.model.bias, model[-1].bias, "algebra")
        assert piece.posterior.problem.layout.n_params == C * D


def test_all_weights_of_a_single_layer_are_a_head() -> None:
    x, y, _ = data()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(4, C).double()
    first = fitted(model, "classification", x, y, subset_of_weights="all")
    second = fitted(model, "classification", x, y, subset_of_weights="last_layer")
    heads = [heads_of(refits_of_head(la.snapshot(), [(x, y)], generator=seeded())) for la in (first, second)]
    assert_close(*heads, "backend")


PARTS: dict[str, dict[str, Any]] = {
    "all kron": {"subset_of_weights": "all"},
    "all lowrank_kron": {"subset_of_weights": "all", "hessian_structure": "lowrank_kron"},
    "all ekfac": {"subset_of_weights": "all", "hessian_structure": "ekfac"},
    "last layer": {},
    "subnetwork": {
        "subset_of_weights": "subnetwork", "hessian_structure": "full", "subnetwork_indices": torch.tensor([0, 3, 30]),
    },
    "gp": {"subset_of_weights": "all", "hessian_structure": "gp", "n_subset": N},
}  # fmt: skip


@pytest.mark.parametrize("options", PARTS.values(), ids=PARTS.keys())
def test_a_part_is_held_out_of_a_fit_at_the_same_network(options: dict[str, Any]) -> None:
    model = network()
    x, y, _ = data()
    la = fitted(model, "classification", x, y, size=13, **options)
    piece = held_out_part(la.snapshot(), iter(list(zip(x.split(11), y.split(11), strict=True))), generator=seeded())
    out = places(torch.cat([inputs for inputs, _ in piece.loader]), x)
    assert len(out) == 8 and torch.equal(y[out], torch.cat([targets for _, targets in piece.loader]))
    kept = torch.tensor([i for i in range(N) if i not in out.tolist()])
    options = options | ({"n_subset": 32} if "n_subset" in options else {})
    again = fitted(model, "classification", x[kept], y[kept], **options)
    assert piece.posterior.fit.n_data == 32
    assert_close(piece.posterior.log_evidence(), again.log_marginal_likelihood(), "backend")
    assert piece.posterior.model is la.snapshot().model


def test_mappings_and_ignored_labels_are_held_out() -> None:
    problem = get("dict_input")
    la = made(problem, "all")
    la.fit(problem.batches())
    piece = held_out_part(la.snapshot(), problem.batches(2), share=0.5, generator=seeded())
    x, y = piece.loader[0]
    assert x["input_ids"].shape[0] == x["extra"].shape[0] == len(y)
    ignored = get("mlp_ignored_labels")
    la = made(ignored, "all")
    la.fit(ignored.batches())
    piece = held_out_part(la.snapshot(), ignored.batches(), share=0.4, generator=seeded())
    assert sum(len(targets) for _, targets in piece.loader) == 2
    assert piece.posterior.fit.n_data == 3


def refined(la: Any, loader: Any) -> None:
    la.refine(loader)


def assigned(la: Any, loader: Any) -> None:
    la.mean = la.mean + 1


def weighed(la: Any, loader: Any) -> None:
    la.fit(loader, weight_fn=lambda x, y: torch.ones(len(y)))


@pytest.mark.parametrize(("change", "match"), [(refined, "refine"), (assigned, "mean"), (weighed, "weight_fn")])
def test_posteriors_that_a_fit_alone_does_not_lead_to_are_refused(change: Any, match: str) -> None:
    x, y, _ = data()
    la = fitted(network(), "classification", x, y)
    change(la, [(x, y)])
    for source in (refits_of_head, held_out_part):
        with pytest.raises(UnsupportedError, match=f"{match}.*val_loader"):
            source(la.snapshot(), [(x, y)])


def test_what_is_no_head_is_refused() -> None:
    x, y, _ = data()
    la = fitted(network(), "classification", x, y, subset_of_weights="all")
    with pytest.raises(UnsupportedError, match="a linear layer"):
        refits_of_head(la.snapshot(), [(x, y)])


def test_bad_input_is_refused_at_once() -> None:
    model = network()
    x, y, _ = data()
    before = Laplace(model, "classification", last_layer_name="2")
    la = fitted(model, "classification", x, y)
    posterior, loader = la.snapshot(), [(x, y)]
    for source in (refits_of_head, held_out_part):
        with pytest.raises(NotFittedError):
            source(before.snapshot(), loader)
        with pytest.raises(InvalidType, match="train_loader"):
            source(posterior, x)
        with pytest.raises(InvalidData, match="no data"):
            source(posterior, [])
        with pytest.raises(InvalidData, match="batch 0"):
            source(posterior, [(x, y + 1)]) if source is refits_of_head else source(posterior, [x])
        with pytest.raises(InvalidType, match="generator"):
            source(posterior, loader, generator=cast("Any", 3))
    for folds in (0, 1, 2.0, N + 1):
        with pytest.raises(InvalidArgument, match="folds"):
            refits_of_head(posterior, loader, folds=folds)  # pyright: ignore[reportArgumentType]
    for share in (0.0, 1.0, -1.0, 1e-3):
        with pytest.raises(InvalidArgument, match="share"):
            held_out_part(posterior, loader, share=share)
    with pytest.raises(InvalidData, match="the fit has seen 40"):
        refits_of_head(posterior, [(x[:30], y[:30])])
    with torch.no_grad():
        model[0].weight += 1
    for source in (refits_of_head, held_out_part):
        with pytest.raises(ModelChangedError):
            source(posterior, loader)
