"""Small scripts, each of one number that laplace-torch gets wrong, and what the number is.

`measure` runs under either package. `truth` knows neither: it is a closed form, or dense algebra of `tests.reference`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import laplace
from laplace import Laplace
from tests.parity.work import Data, data, load


@dataclass(frozen=True)
class Probe:
    """One number.

    Attributes:
        name: What is done, and what of it is looked at.
        measure: The number by the package that is installed, from the file of weights and data. Its name is the key of
            the truth in `truths.py`.
        digits: To how many decimals the number means something.
    """

    name: str
    measure: Callable[[Path], Any]
    digits: int = 6

    @property
    def key(self) -> str:
        """Name of the measurement."""
        return self.measure.__name__


class Twice(nn.Module):
    """A network that calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 3]` -> `[B, 3]`."""
        return self.head(torch.tanh(self.again(torch.tanh(self.again(torch.tanh(self.first(x)))))))


class Rewards(nn.Module):
    """Rewards of single items `[B, 3]` -> `[B, 1]`, or of pairs `[B, 2, 3]` -> `[B, 2]`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Rewards."""
        return self.body(x) if x.ndim == 2 else self.body(x).squeeze(-1)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A float64 network in evaluation mode with weights of one seed, whatever the default dtype."""
    network, generator = build().double().eval(), torch.Generator().manual_seed(5)
    for parameter in network.parameters():
        parameter.data.normal_(0.0, 0.6, generator=generator)
    return network


def reflecting() -> nn.Module:
    """A convolution that pads by reflection."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.Tanh(), nn.Flatten(), nn.Linear(50, 3)
    )


def loader(x: Tensor, y: Tensor, size: int = 3, **options: Any) -> DataLoader:
    """The data in order."""
    return DataLoader(TensorDataset(x, y), batch_size=size, **options)


def mlp(state: Path, likelihood: str = "classification") -> tuple[nn.Module, Data]:
    """The dense network and its data."""
    return load(state, "mlp"), data(state, "mlp", likelihood)


def on_mlp(state: Path, structure: str, likelihood: str = "classification", subset: str = "all", **options: Any) -> Any:
    """A fitted posterior of the dense network."""
    model, found = mlp(state, likelihood)
    la = Laplace(model, likelihood, subset, structure, **options)
    la.fit(found.loader())
    return la


def trace(la: Any) -> Tensor:
    """Trace of the curvature: that of P at δ = 1, less P."""
    held = la.posterior_precision
    if isinstance(held, Tensor):
        return held.sum() - len(held) if held.ndim == 1 else held.trace() - len(held)
    return held.diag().sum() - la.n_params


def trace_of(model: nn.Module, x: Tensor, y: Tensor, structure: str, **options: Any) -> Tensor:
    """Trace of the curvature of a classifier."""
    la = Laplace(model, "classification", "all", structure, **options)
    la.fit(loader(x, y))
    return trace(la)


def backend(name: str) -> Any:
    """A curvature backend."""
    return getattr(laplace.curvature, name)


def damping(state: Path) -> Tensor:
    return on_mlp(state, "kron", damping=True, prior_precision=0.7).log_marginal_likelihood()


def correlation(state: Path) -> Tensor:
    la = on_mlp(state, "full")
    x = mlp(state)[1].test[:1].repeat(2, 1)
    draws = la.functional_samples(x, n_samples=20_000)[:, :, 0]
    return torch.corrcoef(draws.T)[0, 1]


def generator(state: Path) -> Tensor:
    la, x = on_mlp(state, "full"), mlp(state)[1].test
    once, again = (la(x, link_approx="mc", n_samples=10, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    return (once - again).abs().max()


def overflow(state: Path) -> Tensor:
    model, found = mlp(state)
    model[4].weight.data *= 1e4
    la = Laplace(model, "classification", "all", "diag")
    la.fit(found.loader())
    return la(found.test, link_approx="bridge").sum(1).max()


def dropped(state: Path) -> int:
    model, found = mlp(state)
    la = Laplace(model, "classification", "all", "diag")
    la.fit(loader(found.x, found.y, drop_last=True))
    return la.n_data


def stale(state: Path) -> Tensor:
    la, x = on_mlp(state, "full", "regression"), mlp(state)[1].test
    la(x)
    la.temperature = 4.0
    return la(x)[1][0, 0, 0]


def stale_process(state: Path) -> Tensor:
    la, x = on_mlp(state, "gp", "regression", n_subset=8), mlp(state)[1].test
    la(x)
    la.sigma_noise = 2.0
    return la(x)[1][0, 0, 0]


def process_loss(state: Path) -> float:
    la, found = on_mlp(state, "gp", "regression", n_subset=8), mlp(state, "regression")[1]
    first = float(la.loss)
    la.fit(found.loader())
    return float(la.loss) / first


def reused(state: Path) -> Tensor:
    found = mlp(state)[1]
    return trace_of(seeded(Twice), found.x, found.y, "kron")


def ignored(state: Path) -> Tensor:
    model, found = mlp(state)
    labels = found.y.clone()
    labels[:4] = -100
    return trace_of(model, found.x, labels, "diag")


def single_logit(state: Path) -> Tensor:
    """Curvature of one logit by the likelihood that is offered for it."""
    found = mlp(state)[1]
    labels = (found.y % 2)[:, None]
    model = seeded(lambda: nn.Linear(3, 1))
    try:
        la = Laplace(model, "bernoulli", "all", "full")
        la.fit(loader(found.x, labels.double()))
    except ValueError:
        la = Laplace(model, "classification", "all", "full")
        la.fit(loader(found.x, labels[:, 0] * 0))
    return trace(la)


def rewards(state: Path) -> Tensor:
    found = mlp(state)[1]
    pairs = torch.stack([found.x, found.x.flip(0)], 1)
    la = Laplace(seeded(Rewards), "reward_modeling", "all", "diag", prior_precision=1e24)
    la.fit(loader(pairs, found.y % 2))
    return la.predictive_samples(found.test, n_samples=10).mean(0)[0, 0]


def sampled_curvature(state: Path) -> int:
    """Different traces of the sampled curvature of the head's bias, in 30 batches of the same datum."""
    model, found = mlp(state)
    sampled = {"backend": backend("CurvlinopsGGN"), "backend_kwargs": {"stochastic": True}}
    la = Laplace(model, "classification", "all", "kron", **sampled)
    total, traces = 0.0, set()
    for _ in range(30):
        la.fit(loader(found.x[:1], found.y[:1], size=1), override=False)
        before, total = total, float(la.posterior_precision.diag()[-3:].sum() - 3)
        traces.add(round(total - before, 6))
    return len(traces)


def searched(la: Any, validation: DataLoader) -> Tensor:
    """What a grid search over nine powers of ten chooses by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bounds = {"log_prior_prec_min": -4, "log_prior_prec_max": 4, "grid_size": 9}
        la.optimize_prior_precision(method="gridsearch", val_loader=validation, **bounds)
    return la.prior_precision


def held_out(state: Path) -> tuple[Tensor, Tensor]:
    """Inputs and labels that the dense network, its logits eight times as large, has right but for four."""
    model, found = mlp(state)
    x = torch.cat([found.x, found.test])
    labels = model(x).argmax(1)
    labels[:4] = (labels[:4] + 1) % 3
    return x, labels


def confident(state: Path) -> nn.Module:
    """The dense network, its logits eight times as large."""
    model = load(state, "mlp")
    for parameter in model[4].parameters():
        parameter.data *= 8.0
    return model


def chosen(state: Path) -> Tensor:
    la = Laplace(confident(state), "classification", "last_layer", "full")
    x, labels = held_out(state)
    la.fit(loader(x, labels))
    return searched(la, loader(x, labels))


def chosen_regression(state: Path) -> Tensor:
    """Of a network of zeros, so that the squared errors of the mean are the same to the last bit."""
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    x = mlp(state)[1].x
    targets = torch.full((len(x), 1), 0.55, dtype=torch.float64)
    la = Laplace(model.double(), "regression", "all", "full", sigma_noise=0.5)
    la.fit(loader(x, targets))
    return searched(la, loader(x, targets))


def digits(state: Path) -> Tensor:
    """Correct digits of the full curvature of a float64 network, if floats are float32 by default; 12 at most."""
    torch.set_default_dtype(torch.float32)
    try:
        low = on_mlp(state, "full").posterior_precision
    finally:
        torch.set_default_dtype(torch.float64)
    high = on_mlp(state, "full").posterior_precision
    return (-((low - high).abs().max() / high.abs().max()).clamp(min=1e-12).log10()).floor()


def one_by_one(state: Path) -> Tensor:
    x = mlp(state)[1].x[:, :1]
    la = Laplace(seeded(lambda: nn.Linear(1, 1, bias=False)), "regression", "all", "kron", backend=backend("AsdlGGN"))
    la.fit(loader(x, torch.zeros_like(x)))
    return trace(la)


def tokens(state: Path) -> Tensor:
    found = data(state, "transformer", "classification")
    return trace_of(load(state, "transformer"), found.x, found.y, "diag", backend=backend("AsdlGGN"))


def reflection(state: Path) -> Tensor:
    found = data(state, "residual", "classification")
    return trace_of(seeded(reflecting), found.x, found.y, "diag", backend=backend("BackPackGGN"))


def mode(state: Path) -> int:
    model, found = mlp(state)
    model.train()
    Laplace(model, "classification", "all", "diag").fit(found.loader())
    return int(model.training)


PROBES = (
    Probe("`kron`, `damping=True`: evidence", damping),
    Probe("GLM samples at two rows that are drawn on their own: their correlation", correlation, digits=1),
    Probe("`la(x, generator=…)` twice with one seed: the greatest difference", generator),
    Probe("`bridge`, where exponentials overflow: the greatest sum of a row", overflow),
    Probe("8 data in batches of 3, `drop_last=True`: `n_data`", dropped),
    Probe("`full`, temperature set to 4 after a prediction: the variance", stale),
    Probe("`gp`, σ set to 2 after a prediction: the variance", stale_process),
    Probe("`gp`, a second fit: its loss by that of the first", process_loss),
    Probe("`kron`, a layer that is called twice: trace of the curvature", reused),
    Probe("4 of 8 labels are −100: trace of the curvature", ignored),
    Probe('one logit: trace of the curvature (this library: `likelihood="bernoulli"`)', single_logit),
    Probe("reward modelling, `predictive_samples` of one item, its posterior a point", rewards, digits=4),
    Probe("sampled curvature of one datum, 30 batches: how many different ones", sampled_curvature),
    Probe("grid search over 10⁻⁴, …, 10⁴, classification: the chosen δ", chosen, digits=4),
    Probe("grid search over 10⁻⁴, …, 10⁴, regression: the chosen δ", chosen_regression, digits=4),
    Probe("`full`, float64 network, float32 by default: correct digits of the curvature, counted to 12", digits),
    Probe("`AsdlGGN`, `kron`, a layer of one weight: its curvature", one_by_one),
    Probe("`AsdlGGN`, `diag`, linear layers on tokens: trace of the curvature", tokens),
    Probe("`BackPackGGN`, `diag`, padding by reflection: trace of the curvature", reflection),
    Probe("a network in training mode, after `fit`: `model.training`", mode),
)
