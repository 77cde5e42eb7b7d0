"""Random networks, data and hyper-parameters against dense float64 algebra."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from laplace import Laplace
from tests.reference import curvature as reference
from tests.reference import evidence, predictive
from tests.reference.compare import assert_close

LIKELIHOODS = ("regression", "classification", "bernoulli")


class Attention(nn.Module):
    """Self-attention over two tokens of two features, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(2, 2, bias=i == 2) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (2, 2))
        scores = self.query(tokens) @ self.key(tokens).transpose(1, 2)
        return x + (scores.softmax(-1) @ self.value(tokens)).flatten(1)


class Embedded(nn.Module):
    """Which of four features is the largest, as a row of a table that is added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.detach().argmax(1))


class Bare(nn.Module):
    """A parameter without a layer, used in a way that no rule explains."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sin(self.power * x)


# Pieces that map four features to four.
PIECES = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    "no bias": lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Softplus()),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, (2, 1)), nn.Tanh(), nn.Flatten()),
    "layer norm": lambda: nn.LayerNorm(4),
    "group norm": lambda: nn.GroupNorm(1, 4),  # of a pair the output is ±1: its slope is rounding alone
    "batch norm": lambda: nn.BatchNorm1d(4),
    "prelu": lambda: nn.PReLU(4),
    "embedding": Embedded,
    "attention": Attention,
    "bare": Bare,
}


@dataclass(frozen=True)
class Example:
    """What hypothesis draws; a seed stands for all real numbers but hyper-parameters."""

    pieces: tuple[str, ...]
    seed: int
    likelihood: str
    double: bool
    n_outputs: int
    n_data: int
    split: int
    frozen: int
    weights: str
    prior: str
    scale: float
    sigma: float
    temperature: float

    def network(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = nn.Sequential(*[PIECES[name]() for name in self.pieces], nn.Linear(4, self.n_outputs))
        trainable = list(model[:-1].parameters())
        for i, parameter in enumerate(trainable):  # the bits of a number: any pattern, the head apart
            parameter.requires_grad_(not self.frozen >> i & 1)
        return model.to(torch.float64 if self.double else torch.float32).eval()

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.n_data, 4, dtype=torch.float64, generator=generator)
        x = x if self.double else x.float()
        if self.likelihood == "classification":
            return x, torch.randint(self.n_outputs, (self.n_data,), generator=generator)
        y = torch.randn(self.n_data, self.n_outputs, dtype=x.dtype, generator=generator)
        return x, (y > 0).to(x) if self.likelihood == "bernoulli" else y


PARTS = {
    "pieces": st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=3).map(tuple),
    "seed": st.integers(0, 10**6),
    "likelihood": st.sampled_from(LIKELIHOODS),
    "double": st.booleans(),
    "n_outputs": st.integers(2, 3),
    "n_data": st.integers(1, 7),
    "split": st.integers(1, 7),
    "frozen": st.integers(0, 2**8 - 1),
    "weights": st.sampled_from(["all", "last_layer", "subnetwork"]),
    "prior": st.sampled_from(["scalar", "layerwise", "diag"]),
    "scale": st.floats(0.05, 20),
    "sigma": st.floats(0.3, 3),
    "temperature": st.floats(0.3, 3),
}
# An example that fails is shown as it is: to look for a smaller one would take minutes.
QUICK: dict[str, Any] = {"deadline": None, "derandomize": True, "phases": (Phase.explicit, Phase.generate)}
EXAMPLES = st.builds(Example, **PARTS)


@dataclass(frozen=True)
class Dense:
    """The oracle's numbers of an example: everything `[P]`, float64."""

    names: list[str]
    jacobian: Tensor
    f: Tensor
    mean: Tensor
    hessian: Tensor
    columns: Tensor
    tensor_of: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, example: Example, model: nn.Module, x: Tensor, y: Tensor) -> Dense:
        model = model.double()
        x, y = x.double(), y.double() if y.is_floating_point() else y
        names = [n for n in reference.trainable_names(model) if example.weights != "last_layer" or _in_head(n, model)]
        jacobian, f = reference.flat_jacobian(model, x, names)
        total = jacobian.shape[2]
        columns = torch.arange(total)
        if example.weights == "subnetwork":
            generator = torch.Generator().manual_seed(example.seed)
            columns = torch.randperm(total, generator=generator)[: max(2, total // 2)].sort().values
        bounds = torch.tensor([dict(model.named_parameters())[n].numel() for n in names]).cumsum(0)
        tensor_of = torch.bucketize(columns, bounds, right=True)
        counts = torch.bincount(tensor_of, minlength=len(names))
        inner = reference.output_hessian(f, example.likelihood, y)
        jacobian = jacobian[:, :, columns]
        hessian = torch.einsum("bcp,bcd,bdq->pq", jacobian, inner, jacobian)
        mean = reference.flat_parameters(model, names)[columns]
        return cls(names, jacobian, f, mean, hessian, columns, tensor_of, [int(c) for c in counts if c])


def _in_head(name: str, model: nn.Sequential) -> bool:
    return name.startswith(f"{len(model) - 1}.")


def prior_of(example: Example, dense: Dense) -> Tensor:
    """δ as a user gives it: one, one per tensor, or one per parameter."""
    lengths = {"scalar": 1, "layerwise": len(dense.sizes), "diag": len(dense.mean)}
    generator = torch.Generator().manual_seed(example.seed + 1)
    return example.scale * (0.5 + torch.rand(lengths[example.prior], dtype=torch.float64, generator=generator))


def expanded(prior: Tensor, dense: Dense) -> Tensor:
    if len(prior) == len(dense.sizes) > 1:
        return prior.repeat_interleave(torch.tensor(dense.sizes))
    return prior.expand(len(dense.mean)) if len(prior) == 1 else prior


def fitted(example: Example, structure: str, dense: Dense, prior: Tensor, **more: Any) -> Any:
    x, y = example.data()
    options: dict[str, Any] = {"prior_precision": prior, "prior_mean": 0.2, "temperature": example.temperature} | more
    if example.weights == "subnetwork":
        options["subnetwork_indices"] = dense.columns
    if example.likelihood == "regression":
        options["sigma_noise"] = example.sigma
    la = Laplace(example.network(), example.likelihood, example.weights, structure, **options)  # pyright: ignore
    la.fit(list(zip(x.split(example.split), y.split(example.split), strict=True)))
    return la


@settings(max_examples=25, **QUICK)
@given(EXAMPLES)
def test_full_and_block_and_diagonal(example: Example) -> None:
    """Curvature, evidence, variances and probabilities; block and diagonal are parts of the same matrix."""
    x, y = example.data()
    dense = Dense.of(example, example.network(), x, y)
    prior = prior_of(example, dense)
    delta = expanded(prior, dense)
    kind = "backend" if example.double else "float32_solve"
    regression = example.likelihood == "regression"
    scale = 1 / (example.temperature * (example.sigma**2 if regression else 1))
    loss = reference.loss(dense.f, y.double() if y.is_floating_point() else y, example.likelihood)
    log_likelihood = evidence.log_likelihood(
        loss, example.n_data, example.n_outputs, example.sigma, example.temperature, example.likelihood
    )
    for structure, hessian in (("full", dense.hessian), ("diag", dense.hessian.diag().diag())):
        la = fitted(example, structure, dense, prior)
        held = la.H if structure == "full" else la.H.diag()
        assert_close(held, hessian, kind, label=f"{structure}, curvature")
        assert_close(la.mean, dense.mean, "exact" if example.double else "float32", label="mean")
        expected = evidence.log_marginal_likelihood(hessian, dense.mean, delta, 0.2, scale, log_likelihood)
        assert_close(la.log_marginal_likelihood(), expected, kind, label=f"{structure}, evidence")
        covariance = evidence.posterior_covariance(hessian, delta, scale)
        assert_close(la.posterior_variance, covariance.diag(), kind, label=f"{structure}, variances")
        variance = predictive.functional_variance(dense.jacobian, covariance)
        if regression:
            mean, found = la(x)
            assert_close(mean, dense.f, kind, label="outputs")
            assert_close(found, variance, kind, label=f"{structure}, covariance of outputs")
        else:
            link = predictive.probit if example.likelihood == "classification" else predictive.bernoulli_probit
            assert_close(la(x), link(dense.f, variance), kind, label=f"{structure}, probabilities")


@settings(max_examples=15, **QUICK)
@given(EXAMPLES, st.sampled_from(["block", "kron", "ekfac", "lowrank_kron", "lowrank"]))
def test_what_every_structure_keeps(example: Example, structure: str) -> None:
    """Batches do not matter; evidence and predictions are those of its own P; what it keeps of GGN it keeps exactly."""
    x, y = example.data()
    dense = Dense.of(example, example.network(), x, y)
    more = {"structure_kwargs": {"rank": len(dense.mean)}} if structure == "lowrank" else {}
    prior = prior_of(example, dense)[:1]  # of a Kronecker block a varying prior is approximated
    la = fitted(example, structure, dense, prior, **more)
    kind = "backend" if example.double else "float32_solve"
    regression = example.likelihood == "regression"
    scale = 1 / (example.temperature * (example.sigma**2 if regression else 1))
    precision = la.posterior().to_dense().double()
    covariance = torch.linalg.inv(precision)
    held = precision - prior[0] * torch.eye(len(precision), dtype=torch.float64)
    unit = scale * dense.hessian
    loose = "backend" if example.double else "float32_ill_blocks"
    if structure in ("ekfac", "lowrank_kron"):
        assert_close(held.diag().sum(), unit.diag().sum(), loose, label="trace")
    if structure == "block":  # a block per layer, of its weight and bias
        owners = [name.rpartition(".")[0] for name in dense.names]
        layer = torch.tensor([owners.index(owner) for owner in owners])[dense.tensor_of]
        assert_close(held, unit * (layer[:, None] == layer), loose, label="blocks")
    if structure == "lowrank":
        assert_close(precision, unit + prior[0] * torch.eye(len(unit), dtype=torch.float64), loose, label="precision")
    assert_close(la.posterior_variance, covariance.diag(), loose, label="variances")
    variance = predictive.functional_variance(dense.jacobian, covariance)
    mean, found = la.functional_variance_fast(x)
    assert_close(mean, dense.f, kind, label="outputs")
    assert_close(found, variance.diagonal(dim1=1, dim2=2), loose, label="variances of outputs")
    if structure != "ekfac":  # whose basis depends on nothing but the sums over data, too, up to degenerate ones
        whole = fitted(Example(**{**vars(example), "split": example.n_data}), structure, dense, prior, **more)
        assert_close(la.posterior_variance, whole.posterior_variance, loose, label="another split")
