"""Influence of training inputs, checked by retraining: the linear datamodelling score of several structures.

An influence s(q, i) = g_qᵀ P⁻¹ g_i says how much larger the loss at q would be without the training input i. So the
loss of a network that was trained on a half S of the data should fall with Σ_{i ∈ S} s(q, i): the score is Spearman's
correlation of both over many random halves, averaged over queries (Park et al., 2023). "identity" is P = δ I, that is
the scalar product of gradients. Then 10 % of the labels are flipped, and looked for by self-influence and by loss.

    python examples/influence.py            # 100 halves of 600 digits, some minutes
    python examples/influence.py --small    # to try it out
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import laplace
from laplace import Laplace, ParametricLaplace
from laplace.extensions.plotting import COLOURS, new_figure

DELTA = 1.0  # prior precision, which is the weight decay of the training


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))


def trained(x: Tensor, y: Tensor, weights: Tensor, n_steps: int) -> dict[str, Tensor]:
    """Weights of networks `[M, …]` from one start, trained at once, each on data that count so often, `[M, N]`."""
    torch.manual_seed(0)
    start = network()
    parameters, _ = stack_module_state([start] * len(weights))
    tensors = {name: value.detach().clone().requires_grad_() for name, value in parameters.items()}
    optimizer = torch.optim.Adam(tensors.values(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)

    def objective(tensors: dict[str, Tensor], weights: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(functional_call(start, tensors, (x,)), y, reduction="none")
        return weights @ losses + 0.5 * DELTA * sum(value.square().sum() for value in tensors.values())

    for _ in range(n_steps):
        optimizer.zero_grad()
        vmap(objective)(tensors, weights).sum().backward()
        optimizer.step()
        schedule.step()
    return {name: value.detach() for name, value in tensors.items()}


def losses(tensors: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Losses of all networks at all queries, `[M, B]`."""
    model = network()
    outputs = vmap(lambda weights: functional_call(model, weights, (x,)))(tensors)
    return nn.functional.cross_entropy(outputs.mT, y.expand(len(outputs), -1), reduction="none")


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Rank correlation over the first dimension, for every column."""
    ranks = torch.stack([values.argsort(0).argsort(0).float() for values in (first, second)])
    centred = ranks - ranks.mean(1, keepdim=True)
    return (centred[0] * centred[1]).sum(0) / centred.square().sum(1).prod(0).sqrt()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="fewer data and halves")
    parser.add_argument("--output", type=Path, default=Path("outputs/influence.png"), help="where the plot goes")
    options = parser.parse_args()
    n_data, n_queries, n_halves, n_steps = (100, 20, 8, 60) if options.small else (600, 200, 100, 600)

    pixels, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels, labels = pixels[order].float() / 16, labels[order]
    x, y = pixels[:n_data], labels[:n_data]
    queries, targets = pixels[n_data : n_data + n_queries], labels[n_data : n_data + n_queries]
    make: Any = Laplace

    def fitted(y: Tensor, structure: str) -> ParametricLaplace:
        tensors = trained(x, y, torch.ones(1, n_data), n_steps)
        model = network()
        model.load_state_dict({name: value[0] for name, value in tensors.items()})
        la = make(model, "classification", "all", structure, prior_precision=DELTA)
        la.fit([(x, y)])
        return la

    source = torch.Generator().manual_seed(1)
    halves = torch.stack([(torch.randperm(n_data, generator=source) < n_data // 2).float() for _ in range(n_halves)])
    actual = losses(trained(x, y, halves, n_steps), queries, targets)
    scores: dict[str, float] = {}
    for name, structure, damping in (
        ("identity", "diag", 1e9), ("diag", "diag", None), ("kron", "kron", None), ("ekfac", "ekfac", None),
        ("full", "full", None),
    ):  # fmt: skip
        found = laplace.influence(fitted(y, structure), [(x, y)], queries, targets, damping=damping).scores
        scores[name] = float(spearman(actual, -halves @ found.T).mean())
        print(f"{name:10s} linear datamodelling score {scores[name]:.3f}")

    flipped = torch.randperm(n_data, generator=source)[: n_data // 10]
    wrong = y.clone()
    wrong[flipped] = (wrong[flipped] + 1) % 10
    errors = laplace.label_errors(fitted(wrong, "ekfac"), [(x, wrong)])
    is_flipped = torch.zeros(n_data).index_fill(0, flipped, 1.0)
    figure, (left, right) = new_figure(n_columns=2)
    left.bar(list(scores), list(scores.values()), color=COLOURS[1])
    left.set(ylabel="linear datamodelling score")
    for name, ranked in (
        ("self-influence", errors.indices), ("training loss", errors.loss.argsort(descending=True)),
    ):  # fmt: skip
        shares = is_flipped[ranked].cumsum(0) / len(flipped)
        print(f"flipped labels among the 20 % of largest {name}: {float(shares[n_data // 5 - 1]):.0%}")
        right.plot((torch.arange(1, n_data + 1) / n_data).tolist(), shares.tolist(), label=name)
    right.set(xlabel="share of labels looked at", ylabel="share of flipped labels found")
    right.legend(frameon=False)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output)


if __name__ == "__main__":
    main()
