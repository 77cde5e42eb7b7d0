"""Why predictions of sampled weights underfit and those of the linearised network do not: six points, two weights.

Appendix B.1 of Immer et al. (2021), figures B.1 and B.2: inputs −6, −4, −2 of class 0 and 2, 4, 6 of class 1, the
network f = 5 tanh(wx + b), the prior N(0, 1) of w and b. Gaussian posteriors put mass on slopes w < 0, which the data
rule out. Networks with such weights predict the other class, and a mean over sampled weights underfits ("nn"); the
linearised network of the same posterior does not ("glm"). The truth is had by quadrature over (w, b) on a grid.

The damping of Ritter et al. (2018), (Q + √δ) ⊗ (W + √δ), is taken three times. Of the exact GGN, which with one row of
weights is Q ⊗ W with Q = 1, so that with δ = 1 the precision is 2 GGN + 2. Of Kronecker factors that are means over
the data, `damping="mean"`, as Ritter et al. have it: a product that exceeds the GGN, since it takes inputs and
gradients for independent. Of two sums, `damping="sum"`, as the paper's equations A.2 and A.4 have it.

    python papers/tanh.py            # 5 seeds, of the start of the training and of the samples
    python papers/tanh.py --small    # a coarse grid and few samples, to try it out
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from laplace import KronLaplace, Laplace, ParametricLaplace
from laplace.curvature import NativeHessian
from laplace.extensions.plotting import COLOURS, new_figure
from protocol.claims import Claim, higher, lower
from protocol.method import Method
from protocol.options import parse
from protocol.records import Scores
from protocol.report import finish, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

X = torch.tensor([-6.0, -4.0, -2.0, 2.0, 4.0, 6.0], dtype=torch.float64).unsqueeze(1)
Y = (X > 0).double()
X_QUERY = 3.0
REACH = 7.0  # the posterior is below exp(-18) of its mode outside
N_DECILES = 10
CONDITION = "six points"
PROTOCOL = """As the paper's; the true posterior is had by quadrature, the paper's by 100,000 samples of HMC. "distance"
is the mean of |p − truth| over x in [−8, 8], "gap at 3" the same at x = 3, "p in [0, 0.1]" the mass of p(y = 1 | x = 3)
there, the second mode of figure B.1. Seeds are those of the start of the training and of the samples; the paper prints
no numbers."""


@dataclass(frozen=True)
class Settings:
    """How fine everything is.

    Attributes:
        n_grid: Nodes per axis of the quadrature.
        n_samples: Of weights and outputs.
        n_inputs: Of the plot, in [−8, 8].
    """

    n_grid: int = 561
    n_samples: int = 20_000
    n_inputs: int = 161


SMALL = Settings(241, 1_000, 17)


class Feature(nn.Module):
    """f = 5 tanh(wx + b); both weights form one row, so that damping acts on both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[B, 1]` of inputs `[B, 1]`."""
        return 5 * torch.tanh(self.linear(torch.cat([x, torch.ones_like(x)], 1)))


METHODS = {
    "Laplace, nn": Method("full", "nn", {"backend": NativeHessian}),
    "GGN, nn": Method("full", "nn", {}),
    "GGN, glm": Method("full", "glm", {}),
    "damped GGN, nn": Method("full", "nn", {"prior_precision": 2.0, "temperature": 0.5}),
    "damped Kron, nn": Method("kron", "nn", {"damping": "mean"}),
    "damped Kron (sums), nn": Method("kron", "nn", {"damping": "sum"}),
}


@dataclass(frozen=True)
class Outcome:
    """What is known of one predictive distribution.

    Attributes:
        weights: Samples of (w, b), `[S, 2]`.
        logits: Samples of f at the inputs of the plot, `[S, B]`.
        mean: p(y = 1 | x) there, `[B]`.
        numbers: By name.
    """

    weights: Tensor
    logits: Tensor
    mean: Tensor
    numbers: dict[str, float]


def find_map(seed: int) -> Feature:
    """The network at the mode of its posterior, from a random start with w > 0."""
    model = Feature().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.linear.weight.copy_(torch.rand(1, 2, generator=generator))
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        misfit = nn.functional.binary_cross_entropy_with_logits(model(X), Y, reduction="sum")
        value = misfit + 0.5 * model.linear.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return model


def true_posterior(n: int) -> tuple[Tensor, Tensor]:
    """A grid of (w, b), `[n², 2]`, and the posterior's weight of every node, `[n²]`."""
    line = torch.linspace(-REACH, REACH, n, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    f = logits_at(grid, X.flatten())
    log_joint = -nn.functional.softplus(torch.where(Y.flatten() > 0, -f, f)).sum(1) - 0.5 * grid.square().sum(1)
    return grid, torch.softmax(log_joint, 0)


def logits_at(weights: Tensor, x: Tensor) -> Tensor:
    """Outputs at B inputs for S pairs (w, b), `[S, B]`."""
    return 5 * torch.tanh(weights[:, :1] * x + weights[:, 1:])


def summary(p: Tensor, weight: Tensor | None = None) -> dict[str, float]:
    """Mean and density in tenths of samples `[S]` of p(y = 1 | x), with a weight each."""
    share = torch.full_like(p, 1 / len(p)) if weight is None else weight
    tenths = torch.zeros(N_DECILES, dtype=p.dtype).index_add_(0, (p * N_DECILES).long().clamp(max=N_DECILES - 1), share)
    return {
        "p(y=1|x=3)": float(share @ p),
        "p in [0, 0.1]": float(tenths[0]),
        "p in [0.4, 0.5]": float(tenths[4]),
        "p in [0.9, 1]": float(tenths[-1]),
    }


def truth(x: Tensor, n_grid: int, n_samples: int, generator: torch.Generator) -> Outcome:
    """By quadrature; samples are drawn from the nodes for the plot alone."""
    grid, weight = true_posterior(n_grid)
    mean = torch.cat([weight @ logits_at(grid, part).sigmoid() for part in x.split(4)])
    drawn = grid[torch.multinomial(weight, n_samples, replacement=True, generator=generator)]
    drawn = drawn + (torch.rand(drawn.shape, generator=generator, dtype=drawn.dtype) - 0.5) * (grid[1] - grid[0]).sum()
    at_query = logits_at(grid, torch.tensor([X_QUERY], dtype=torch.float64)).sigmoid().flatten()
    centred = grid - weight @ grid
    numbers = {
        "p(w<0)": float(weight[grid[:, 0] < 0].sum()),
        "log det": float(torch.logdet(centred.T @ (centred * weight.unsqueeze(1)))),
        "distance": 0.0,
        **summary(at_query, weight),
    }
    return Outcome(drawn, logits_at(drawn, x), mean, numbers)


def covariance(la: ParametricLaplace) -> Tensor:
    """Of w and b, `[2, 2]`."""
    if isinstance(la, KronLaplace):
        return torch.linalg.inv(la.posterior_precision.to_matrix())
    return la.posterior_covariance


def approximate(
    method: Method, model: Feature, x: Tensor, exact: Tensor, n_samples: int, generator: torch.Generator
) -> Outcome:
    """Fits a posterior and predicts; `exact` is the true p(y = 1 | x), `[B]`."""
    la = Laplace(model, "bernoulli", "all", method.structure, **method.options)
    la.fit([(X, Y)])
    inputs = torch.cat([x, x.new_tensor([X_QUERY])]).unsqueeze(1)
    prediction = la.predict(inputs, method.pred_type, n_samples=n_samples, link_approx="mc", generator=generator)
    probabilities = prediction.probability_samples.squeeze(2)
    cov = covariance(la)
    mean = probabilities.mean(0)[:-1]
    numbers = {
        "p(w<0)": float(torch.special.ndtr(-la.mean[0] / cov[0, 0].sqrt())),
        "log det": float(torch.logdet(cov)),
        "distance": float((mean - exact).abs().mean()),
        **summary(probabilities[:, -1]),
    }
    weights = la.sample(n_samples, generator=generator)
    return Outcome(weights, prediction.latent_samples.squeeze(2)[:, :-1], mean, numbers)


def outcomes(settings: Settings, x: Tensor, seed: int) -> dict[str, Outcome]:
    """All methods with one seed, of the start of the training and of the samples."""
    generator = torch.Generator().manual_seed(seed)
    model = find_map(seed)
    exact = truth(x, settings.n_grid, settings.n_samples, generator)
    found = {
        name: approximate(method, model, x, exact.mean, settings.n_samples, generator)
        for name, method in METHODS.items()
    }
    return {**found, "truth": exact}


def scores_of(found: dict[str, Outcome]) -> Scores:
    """The numbers of all methods, with their distance from the truth at x = 3."""
    scores = Scores()
    exact = found["truth"].numbers["p(y=1|x=3)"]
    for name, outcome in found.items():
        gap = abs(outcome.numbers["p(y=1|x=3)"] - exact)
        scores.add(CONDITION, name, {**outcome.numbers, "gap at 3": gap})
    return scores


# What the paper claims.

DAMPED = ("damped GGN, nn", "damped Kron, nn", "damped Kron (sums), nn")
SAMPLED = ("Laplace, nn", "GGN, nn", *DAMPED)
NARROWER = (
    "The Kronecker product of factors takes inputs and gradients for independent: it exceeds the GGN here, and that of "
    "two sums is N times larger, so that these posteriors are narrower than damping alone would make them."
)


def has_mass(name: str, present: bool) -> Claim:
    """A posterior puts mass on w < 0, or none: more or less than 0.001."""
    sign = 1 if present else -1
    text = f"{name} puts {'' if present else 'no '}mass on w < 0"
    note = NARROWER if "Kron" in name else ""
    return Claim("figure B.2, top", text, lambda scores: sign * (scores[CONDITION, name, "p(w<0)"] - 1e-3), note=note)


def has_second_mode(name: str, present: bool) -> Claim:
    """The density of p(y = 1 | x = 3) is larger in [0, 0.1] than in [0.4, 0.5], or smaller."""
    sign = 1 if present else -1
    text = f"{name}: {'a' if present else 'no'} second mode of p(y = 1 | x = 3), at 0"

    def statistic(scores: Scores) -> float:
        return sign * (scores[CONDITION, name, "p in [0, 0.1]"] - scores[CONDITION, name, "p in [0.4, 0.5]"])

    return Claim("figure B.1, right", text, statistic)


def claims() -> list[Claim]:
    """Those of appendix B.1."""
    found = [has_mass("truth", False), *(has_mass(name, True) for name in SAMPLED)]
    for name in DAMPED:
        note = NARROWER if "Kron" in name else ""
        found.append(lower("figure B.2, top", CONDITION, "log det", name, "Laplace, nn", note=note))
    found.append(lower("figure B.2, top", CONDITION, "log det", "Laplace, nn", "GGN, nn"))
    for measure in ("distance", "gap at 3"):
        for name in SAMPLED:
            note = NARROWER if "Kron" in name else ""
            found.append(lower("figure B.2, bottom", CONDITION, measure, "GGN, glm", name, note=note))
        pairs = [*((name, "Laplace, nn") for name in DAMPED), ("Laplace, nn", "GGN, nn")]
        found += [lower("figure B.2, bottom", CONDITION, measure, better, worse) for better, worse in pairs]
    found += [has_second_mode("GGN, nn", True), has_second_mode("GGN, glm", False), has_second_mode("truth", False)]
    found.append(higher("figure B.1, right", CONDITION, "p in [0.9, 1]", "GGN, glm", "GGN, nn"))
    return found


COLUMNS = ("p(y=1|x=3)", "distance", "gap at 3", "p(w<0)", "log det", "p in [0, 0.1]", "p in [0.9, 1]")


def bands(axes: Axes, x: Tensor, samples: Tensor, mean: Tensor | None = None) -> None:
    """The innermost 50 % and 66 % of samples `[S, B]`, their median and a mean."""
    for share, alpha in ((0.66, 0.2), (0.5, 0.35)):
        ends = samples.new_tensor([0.5 - share / 2, 0.5 + share / 2])
        low, high = torch.quantile(samples, ends, dim=0).tolist()
        axes.fill_between(x.tolist(), low, high, color=COLOURS[1], alpha=alpha, linewidth=0)
    axes.plot(x.tolist(), samples.median(0).values.tolist(), color=COLOURS[1])
    if mean is not None:
        axes.plot(x.tolist(), mean.tolist(), color=COLOURS[0], linestyle="--")


def draw(found: dict[str, Outcome], x: Tensor, output: Path) -> None:
    """Saves figure B.2, and the right part of figure B.1 as its last row."""
    figure, axes = new_figure(n_columns=len(found), n_rows=4, width=2.1, height=1.8)
    rows = [axes[i : i + len(found)] for i in range(0, len(axes), len(found))]
    at_query = int((x - X_QUERY).abs().argmin())
    for panels, (name, outcome) in zip(zip(*rows, strict=True), found.items(), strict=True):
        extent = [[-2, 4], [-3, 3]]
        panels[0].hist2d(*outcome.weights.T.tolist(), bins=60, range=extent, cmap="Blues")
        panels[0].axvline(0, color="0.6", linewidth=0.8)
        panels[0].set(title=name, xlabel="w", ylabel="b")
        bands(panels[1], x, outcome.logits)
        panels[1].set(ylabel="f", ylim=(-16, 16))
        bands(panels[2], x, outcome.logits.sigmoid(), outcome.mean)
        panels[2].plot(X.flatten().tolist(), Y.flatten().tolist(), ".", color="0.2")
        panels[2].set(xlabel="x", ylabel="p(y = 1)")
        panels[3].hist(outcome.logits[:, at_query].sigmoid().tolist(), bins=30, range=(0, 1), density=True)
        panels[3].set(xlabel=f"p(y = 1 | x = {X_QUERY:g})", ylabel="density", yscale="log")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=70)


def main() -> None:
    """Runs the experiment."""
    options = parse(__doc__, "tanh")
    settings = SMALL if options.small else Settings()
    x = torch.linspace(-8, 8, settings.n_inputs, dtype=torch.float64)

    def one_seed(seed: int) -> Scores:
        found = outcomes(settings, x, seed)
        if seed == options.seeds[0]:
            draw(found, x, options.output)
        return scores_of(found)

    records = options.run(settings, one_seed)
    shown = table(records, CONDITION, "Six points, two weights (figures B.1 and B.2)", COLUMNS)
    finish(
        options, records, script="tanh", paper="Immer et al. (2021), B.1", protocol=PROTOCOL, tables=[shown],
        claims=claims(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
