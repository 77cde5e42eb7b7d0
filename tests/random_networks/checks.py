"""What must be true of every case: a table of checks, each a function of a case that raises `Wrong`."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import laplace
import laplace.curvature
from laplace import Laplace
from laplace.errors import LaplaceError
from laplace.likelihoods import LikelihoodFromLoss
from tests.random_networks.case import Case
from tests.random_networks.layers import Switched
from tests.random_networks.oracle import Truth, evidence, hessian

SUMS = ("full", "block", "diag", "kron")
"""Structures whose curvature of all data follows from those of parts, whatever the parts."""
EXACT = ("full", "lowrank", "matrix_free")
"""Structures that hold the whole matrix."""


SOLVED = 1e-5
"""Relative tolerance in float64 where a matrix was inverted."""


class Wrong(AssertionError):
    """A number that is not what it should be."""


def close(case: Case, found: Any, wanted: Any, what: str, tolerance: float = 1e-7) -> None:
    """Raises `Wrong` unless two arrays agree within some digits of the largest entry.

    Args:
        tolerance: Relative, in float64.
    """
    found, wanted = torch.as_tensor(found).detach().double(), torch.as_tensor(wanted).detach().double()
    if found.shape != wanted.shape:
        raise Wrong(f"{what}: shape {list(found.shape)}, not {list(wanted.shape)}")
    if found.numel() == 0:
        return
    double = case.dtype == "float64"
    allowed = (tolerance if double else max(tolerance, 5e-3)) * wanted.abs().max() + (1e-9 if double else 1e-5)
    worst = (found - wanted).abs().max()
    if not worst <= allowed:
        raise Wrong(
            f"{what}: differs by {worst:.3g} where {allowed:.3g} is allowed; largest entry {wanted.abs().max():.4g}"
        )


class LogCosh(LikelihoodFromLoss):
    """A loss of a user's own."""

    name = "log cosh"

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y).cosh().log().sum()

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        return f.expand(n, *f.shape)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f


def made(case: Case, known: Truth, model: nn.Module, **options: Any) -> Any:
    """The posterior of a case, not fitted."""
    backend = getattr(laplace.curvature, case.backend)
    options = case.options(known, model) | {"backend": backend} | options
    likelihood = LogCosh() if case.likelihood == "log cosh" else case.likelihood
    return Laplace(model, likelihood, case.weights, case.structure, **options)


def fitted(case: Case, known: Truth, sizes: tuple[int, ...] | None = None, model: nn.Module | None = None) -> Any:
    """The same, fitted, of a network of its own or of a given one."""
    la = made(case, known, case.network() if model is None else model)
    la.fit(case.batches(sizes))
    return la


def precision(la: Any) -> Tensor:
    """Posterior precision, dense `[P, P]`."""
    return la.posterior().to_dense().detach().double()


def unit(case: Case, la: Any, known: Truth) -> Tensor:
    """Curvature at noise 1 that a posterior holds, dense `[P, P]`."""
    return (precision(la) - torch.diag(case.delta(known)[1])) / case.scale


def moments(la: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return la.predictive_moments(x)


def against_oracle(case: Case) -> None:
    """Mean, curvature, evidence and predictions are those of the oracle, or of the curvature that is held."""
    known, model = case.truth(), case.network()
    la, (x, y) = fitted(case, known), case.data()
    close(case, la.mean, known.theta, "mean")
    held = unit(case, la, known)
    if case.kind == "hessian":
        if case.structure == "full" and "embedding bag" not in case.layers:  # of which PyTorch has no second derivative
            close(case, la.H, hessian(model, x, y, case.likelihood, *case.chosen(model)), "Hessian")
    else:
        exact = known.curvature(case.kind, torch.ones(case.n_data, dtype=torch.float64))
        same = known.tensor_of[:, None] == known.tensor_of
        if case.structure in EXACT:
            close(case, held, exact, "curvature")
        elif case.structure == "block":
            close(case, held, torch.where(same | (held != 0), exact, 0), "blocks")
        elif case.structure == "diag":
            close(case, held, torch.diag(exact.diagonal()), "diagonal")
        elif case.structure == "lowrank_kron":
            close(case, held.diagonal(), exact.diagonal(), "diagonal")
        elif case.structure == "kron" and case.weights != "subnetwork" and case.head != "no bias":
            factored_last_layer(case, known, held)
        elif case.structure == "ekfac":
            for i in known.tensor_of.unique():
                inside = known.tensor_of == i
                close(case, held.diagonal()[inside].sum(), exact.diagonal()[inside].sum(), f"trace of tensor {i}")
    delta = case.delta(known)[1]
    wanted = evidence(known, precision(la), delta, case.mean, case.sigma, case.temperature, case.likelihood)
    if case.structure != "matrix_free":
        close(case, la.log_marginal_likelihood(), wanted, "evidence")
    f, variance = moments(la, x)
    close(case, f, known.f, "outputs")
    covariance = torch.linalg.inv(precision(la))
    close(
        case,
        variance,
        torch.einsum("ncp,pq,ndq->ncd", known.J, covariance, known.J),
        "covariances",
        SOLVED,
    )


def factored_last_layer(case: Case, known: Truth, held: Tensor) -> None:
    """B ⊗ A of the last layer's weight and B of its bias: g is its bias's Jacobian, and its weight's is g ⊗ a."""
    number = [*case.chosen(case.network())[0]].index("last.bias")
    bias, weight = known.tensor_of == number, known.tensor_of == number - 1
    g = known.J[:, :, bias]
    products = known.J[:, :, weight].unflatten(2, (g.shape[2], -1))
    a = torch.einsum("nco,ncoi->ni", g, products) / g.square().sum((1, 2))[:, None]
    inner = known.inner if case.kind == "ggn" else known.gradient[:, :, None] * known.gradient[:, None]
    B = torch.einsum("nco,ncd,ndp->op", g, inner, g).contiguous()
    close(case, held[weight][:, weight], torch.kron(B, a.T @ a / case.n_data), "factors of the last layer's weight")
    close(case, held[bias][:, bias], B, "factor of the last layer's bias")


def over_splits(case: Case) -> None:
    """Neither batches nor the order of data matter, nor what other posteriors of a network have learned of it."""
    known, x, model = case.truth(), case.data()[0], case.network()
    one = fitted(case, known)
    N, rng = case.n_data, random.Random(case.seed)
    others = [fitted(case, known, (1,) * N, model), fitted(case, known, (N,), model)]
    shuffled, order = made(case, known, model), rng.sample(range(N), N)
    shuffled.fit([(x[order], y[order]) for x, y in case.batches((N,))])
    for what, other in zip(("single data", "one batch", "another order"), [*others, shuffled], strict=True):
        close(case, other.log_marginal_likelihood(), one.log_marginal_likelihood(), f"evidence of {what}")
        close(case, moments(other, x)[1], moments(one, x)[1], f"covariances of {what}", SOLVED)


def in_halves(case: Case) -> None:
    """Two fits of parts are one of all, and what is forgotten was not there."""
    if case.structure not in SUMS or len(case.sizes) < 2:
        return
    known = case.truth()
    whole, batches = fitted(case, known), case.batches()
    la = made(case, known, case.network())
    la.fit(batches[:1])
    part = unit(case, la, known)
    la.fit(batches[1:], override=False)
    close(case, unit(case, la, known), unit(case, whole, known), "curvature of halves")
    close(case, la.log_marginal_likelihood(), whole.log_marginal_likelihood(), "evidence of halves")
    if case.structure != "kron":
        la.forget(batches[1:])
        rest = unit(case, whole, known) - part
        close(case, unit(case, whole, known) - unit(case, la, known), rest, "forgotten curvature")


def weighted(case: Case) -> None:
    """Weights of data count them, and zero leaves them out."""
    x, rng = case.data()[0], random.Random(case.seed)
    weights = torch.tensor([rng.choice([0.0, 1.0, 2.0]) for _ in range(case.n_data)]).to(x)
    if case.structure not in ("full", "diag") or case.kind == "hessian" or not weights.any():
        return
    known = case.truth()
    la = made(case, known, case.network())
    la.fit(case.batches(), weight_fn=lambda batch, _: weights[(batch[:, None] == x).all(2).long().argmax(1)])
    exact = known.curvature(case.kind, weights.double())
    held = unit(case, la, known)
    close(case, held, exact if case.structure == "full" else torch.diag(exact.diagonal()), "weighted curvature")


def after_changes(case: Case) -> None:
    """A refit after changes in place is the fit of a fresh object, and one network serves several posteriors."""
    known, model, x = case.truth(), case.network(), case.data()[0]
    la = made(case, known, model)
    la.fit(case.batches())
    moments(la, x)
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and rng.random() < 0.5:
                new = tensor + 0.1 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
                if rng.random() < 0.5:
                    tensor.copy_(new)
                else:
                    tensor.data = new
    for module in model.modules():
        if isinstance(module, Switched):
            module.factor = 1.0
    la.fit(case.batches())
    fresh = made(case, known, copy.deepcopy(model))
    fresh.fit(case.batches())
    changed = case.truth(model)
    close(case, la.mean, changed.theta, "mean after changes")
    close(case, la.log_marginal_likelihood(), fresh.log_marginal_likelihood(), "evidence after changes")
    for what, (found, wanted) in zip(
        ("outputs", "covariances"), zip(moments(la, x), moments(fresh, x), strict=True), strict=True
    ):
        close(case, found, wanted, f"{what} after changes", SOLVED)
    if case.structure in EXACT and case.kind != "hessian":
        exact = changed.curvature(case.kind, torch.ones(case.n_data, dtype=torch.float64))
        close(case, unit(case, la, changed), exact, "curvature after changes")


def after_freezing(case: Case) -> None:
    """Of weights that require no gradient any more, a posterior that is made anew knows nothing."""
    model = case.network()
    made(case, case.truth(), model).fit(case.batches())
    kept = [tensor for tensor in model.parameters() if tensor.requires_grad]
    if len(kept) < 2 or case.weights == "last_layer":
        return
    kept[random.Random(case.seed).randrange(len(kept) - 1)].requires_grad_(False)
    known, x = case.truth(model), case.data()[0]
    la, fresh = made(case, known, model), made(case, known, copy.deepcopy(model))
    la.fit(case.batches())
    fresh.fit(case.batches())
    close(case, la.mean, known.theta, "mean after freezing")
    close(case, la.log_marginal_likelihood(), fresh.log_marginal_likelihood(), "evidence after freezing")
    covariance = torch.linalg.inv(precision(la))
    close(
        case,
        moments(la, x)[1],
        torch.einsum("ncp,pq,ndq->ncd", known.J, covariance, known.J),
        "covariances after freezing",
        SOLVED,
    )


def after_a_new_layer(case: Case) -> None:
    """A layer that is replaced in the network is seen by the next fit."""
    known, model = case.truth(), case.network()
    la = made(case, known, model)
    la.fit(case.batches())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed + 1)
        other = nn.Linear(model.last.in_features, model.last.out_features, bias=case.head != "no bias")
    model.last = other.to(case.data()[0])
    new = case.truth(model)
    la = made(case, new, model)
    la.fit(case.batches())
    f, variance = moments(la, case.data()[0])
    close(case, f, new.f, "outputs of the new layer")
    covariance = torch.linalg.inv(precision(la))
    close(
        case,
        variance,
        torch.einsum("ncp,pq,ndq->ncd", new.J, covariance, new.J),
        "covariances of the new layer",
        SOLVED,
    )


def copies(case: Case) -> None:
    """States and copies predict what the posterior predicts, bit for bit."""
    known, x = case.truth(), case.data()[0]
    la = fitted(case, known)
    loaded = made(case, known, case.network())
    loaded.load_state_dict(la.state_dict())
    for what, other in (("loaded state", loaded), ("copy", copy.deepcopy(la))):
        for found, wanted in zip(moments(other, x), moments(la, x), strict=True):
            close(case, found, wanted, f"predictions of a {what}", 1e-10)
        close(case, other.log_marginal_likelihood(), la.log_marginal_likelihood(), f"evidence of a {what}", 1e-5)


def by_rows(case: Case) -> None:
    """Predictions of a batch are those of its rows, and chosen outputs those of all outputs."""
    known, x = case.truth(), case.data()[0]
    la = fitted(case, known)
    f, variance = moments(la, x)
    single = [moments(la, x[n : n + 1]) for n in range(len(x))]
    tolerance = SOLVED
    close(case, torch.cat([row[0] for row in single]), f, "outputs of rows")
    close(case, torch.cat([row[1] for row in single]), variance, "covariances of rows", tolerance)
    close(
        case,
        la.predictive_moments(x, diagonal_output=True)[1],
        variance.diagonal(dim1=1, dim2=2),
        "variances alone",
        tolerance,
    )
    joint = la.predictive_moments(x, joint=True)[1]
    N, C = f.shape
    within = joint.view(N, C, N, C).diagonal(dim1=0, dim2=2).movedim(2, 0)
    close(case, within, variance, "joint covariances", tolerance)
    if case.likelihood != "heteroscedastic":
        some = [1, 0]
        found = la.predictive_moments(x, outputs=some)
        close(case, found[0], f[:, some], "chosen outputs")
        close(case, found[1], variance[:, some][:, :, some], "covariances of chosen outputs", tolerance)


def gradients(case: Case) -> None:
    """Gradients of the evidence are those of finite differences."""
    if case.structure == "matrix_free" or case.dtype == "float32":
        return
    la = fitted(case, case.truth())
    prior = la.prior_precision.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(la.log_marginal_likelihood(prior_precision=prior), prior)
    step = 1e-5
    ends = [la.log_marginal_likelihood(prior_precision=prior.detach() * (1 + s * step)) for s in (1, -1)]
    close(case, (found * prior).sum(), (ends[0] - ends[1]).detach() / (2 * step), "gradient along the prior", 1e-4)
    if case.likelihood == "regression":
        sigma = la.sigma_noise.detach().clone().requires_grad_()
        (found,) = torch.autograd.grad(la.log_marginal_likelihood(sigma_noise=sigma), sigma)
        ends = [la.log_marginal_likelihood(sigma_noise=sigma.detach() * (1 + s * step)) for s in (1, -1)]
        close(case, (found * sigma).sum(), (ends[0] - ends[1]).detach() / (2 * step), "gradient along the noise", 1e-4)


def exported(case: Case) -> None:
    """A module for deployment predicts what the posterior predicts, for other numbers of data, too."""
    if case.seed % 8 or case.likelihood == "log cosh":  # an export is slow; a user's own link is by samples
        return
    x = case.data()[0]
    la = fitted(case, case.truth())
    module = laplace.export(la, x[:2])
    found, wanted = module(x), la(x)
    pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
    for a, b in pairs:
        close(case, a, b, "exported", SOLVED)


def writes(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    """A forward pre-hook that leaves things behind, in evaluation mode too, some as autograd does not count them."""
    module.get_buffer("counted").add_(1)
    module.get_buffer("uncounted").data.add_(1)
    module.get_buffer("as_array").numpy()[:] += 1
    module.replaced = args[0].detach().mean()
    module.given = args
    module.seen.append(len(args[0]))  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def everything(model: nn.Module) -> dict[str, Any]:
    """Values and identities of all that a network holds, and PyTorch's random state."""
    found: dict[str, Any] = {"random state": torch.get_rng_state()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name} {key}"] = id(value)
            if isinstance(value, dict | list):
                parts = list(value.items()) if isinstance(value, dict) else value
                found[f"{name} {key} holds"] = (
                    [(k, id(v)) for k, v in parts] if isinstance(value, dict) else list(parts)
                )
        found[f"{name} training"] = module.training
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[f"{name} values"], found[f"{name} flags"] = tensor.detach().clone(), (tensor.requires_grad, tensor.grad)
    return found


def untouched(case: Case) -> None:
    """The network and PyTorch's random numbers stay as they were, bit for bit, after calls that are refused, too."""
    known, model, x = case.truth(), case.network(), case.data()[0]
    for name in ("counted", "uncounted", "as_array", "replaced"):
        model.last.register_buffer(name, torch.zeros(2))
    model.last.seen = []
    model.last.register_forward_pre_hook(writes)
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    before = everything(model)
    la = made(case, known, model)
    calls: list[Callable[[], Any]] = [
        lambda: la.fit(case.batches()),
        lambda: moments(la, x),
        lambda: la(x, pred_type="nn", n_samples=9, generator=torch.Generator().manual_seed(0)),
        lambda: la.log_marginal_likelihood(),
        lambda: la(torch.zeros(2, 1, 7, dtype=torch.float16)),
        lambda: la.fit([(x, None)]),
    ]
    for call in calls:
        with contextlib.suppress(LaplaceError, RuntimeError, ValueError, TypeError):
            call()
        after = everything(model)
        for name in before | after:
            a, b = before.get(name), after.get(name)
            if not (torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b):
                raise Wrong(f"{name} of the network changed")


CHECKS: dict[str, Callable[[Case], None]] = {
    "oracle": against_oracle,
    "splits": over_splits,
    "halves": in_halves,
    "weighted": weighted,
    "changes": after_changes,
    "freezing": after_freezing,
    "new layer": after_a_new_layer,
    "copies": copies,
    "rows": by_rows,
    "gradients": gradients,
    "exported": exported,
    "untouched": untouched,
}
