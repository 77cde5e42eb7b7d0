"""Rewards with a penalty for what the data do not say: the closed form against samples, gradients, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace, MixtureLaplace
from laplace.errors import CalibrationWarning, InvalidArgument, InvalidType, UnsupportedError

ITEMS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Rewards(nn.Module):
    """A reward per item: `[B, 1]` of items `[B, D]`, `[B, 2]` of pairs `[B, 2, D]`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def forward(self, items: Tensor) -> Tensor:
        rewards = self.net(items)
        return rewards.squeeze(-1) if items.ndim == 3 else rewards


def fitted(likelihood: Any = "reward_modeling", seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(2)
    if likelihood == "reward_modeling":
        x = torch.randn(20, 2, 3, generator=generator, dtype=torch.float64)
        y = torch.randint(2, (20,), generator=generator)
    else:
        x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
        y = torch.randn(20, 1, generator=generator, dtype=torch.float64)
    la = Laplace(Rewards(seed), likelihood, "all", "full", prior_precision=2.0)
    la.fit([(x, y)])
    return la


def soft_minimum(means: Tensor, variances: Tensor, weights: list[float], tau: float) -> Tensor:
    """−τ log E exp(−r/τ) by sums over a fine grid of r."""
    grid = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    density = torch.zeros(means.shape[1], len(grid), dtype=torch.float64)
    for mean, variance, weight in zip(means, variances, weights, strict=True):
        normal = torch.distributions.Normal(mean.unsqueeze(1), variance.sqrt().unsqueeze(1))
        density += weight * normal.log_prob(grid).exp()
    return -tau * ((density * (-grid / tau).exp()).sum(1) * (grid[1] - grid[0])).log()


@pytest.mark.parametrize("likelihood", ["reward_modeling", "regression"])
def test_closed_form(likelihood: str) -> None:
    prediction = fitted(likelihood).predict(ITEMS)
    mean, variance = prediction.latent_mean.T, prediction.latent_variance.T
    for tau in (0.5, 3.0):
        found = laplace.pessimistic(prediction, tau)
        assert found.shape == (6, 1) and (found < prediction.latent_mean).all()
        torch.testing.assert_close(found[:, 0], soft_minimum(mean, variance, [1.0], tau), rtol=1e-6, atol=1e-6)


def test_monte_carlo() -> None:
    prediction = fitted().predict(ITEMS[:2])
    generator = torch.Generator().manual_seed(3)
    draws = torch.randn(1_000_000, 1, 1, generator=generator, dtype=torch.float64)
    rewards = prediction.latent_mean + prediction.latent_variance.sqrt() * torch.cat([draws, -draws])
    expected = -2.0 * (-rewards / 2.0).exp().mean(0).log()
    torch.testing.assert_close(laplace.pessimistic(prediction, 2.0), expected, rtol=1e-3, atol=1e-3)


def test_of_pairs_and_one_tau_each() -> None:
    prediction = fitted().predict(torch.stack([ITEMS, ITEMS.flip(0)], 1))
    tau = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    expected = prediction.latent_mean - prediction.latent_variance / (2 * tau)
    torch.testing.assert_close(laplace.pessimistic(prediction, tau), expected)


def test_of_a_mixture() -> None:
    parts = [fitted(seed=seed) for seed in (0, 1)]
    prediction = MixtureLaplace(parts, weights=[0.3, 0.7]).predict(ITEMS)
    means, variances = (
        torch.stack([getattr(la.predict(ITEMS), name)[:, 0] for la in parts])
        for name in ("latent_mean", "latent_variance")
    )
    found = laplace.pessimistic(prediction, 1.5)[:, 0]
    torch.testing.assert_close(found, soft_minimum(means, variances, [0.3, 0.7], 1.5), rtol=1e-6, atol=1e-6)


def test_gradients() -> None:
    la = fitted()
    la.enable_backprop = True
    tau = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def value(items: Tensor, tau: Tensor) -> Tensor:
        return laplace.pessimistic(la.predict(items), tau)

    assert torch.autograd.gradcheck(value, (ITEMS[:2].clone().requires_grad_(), tau))


@pytest.mark.parametrize("tau", [0.0, -1.0, float("inf"), float("nan"), torch.tensor([1.0, 0.0])])
def test_tau_is_positive(tau: Any) -> None:
    with pytest.raises(InvalidArgument, match="tau="):
        laplace.pessimistic(fitted().predict(ITEMS), tau)


def test_the_network_alone_has_nothing_to_take_off() -> None:
    la = fitted()
    pairs = torch.randn(60, 2, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert la.calibrate([(pairs, la.model(pairs).argmax(1))]).is_network  # no doubt is warranted here
    with pytest.warns(CalibrationWarning, match=r"calibrate chose the network alone.*la\.calibration = None"):
        lowered = laplace.pessimistic(la.predict(ITEMS), 1.0)
    torch.testing.assert_close(lowered, la.predict(ITEMS).latent_mean, rtol=1e-6, atol=1e-6)
    la.calibration = None
    assert (laplace.pessimistic(la.predict(ITEMS), 1.0) < lowered - 1e-3).all()


def test_other_things_are_refused() -> None:
    with pytest.raises(InvalidType, match=r"la\.predict"):
        laplace.pessimistic(fitted(), 1.0)  # pyright: ignore[reportArgumentType]
    la = Laplace(nn.Linear(3, 2).double(), "classification", "all", "full")
    la.fit([(ITEMS, torch.tensor([0, 1, 0, 1, 0, 1]))])
    with pytest.raises(UnsupportedError, match="classification"):
        laplace.pessimistic(la.predict(ITEMS), 1.0)


def test_the_reward_head_of_transformers_is_a_function_of_texts() -> None:
    transformers = pytest.importorskip("transformers")

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = transformers.BertConfig(
                vocab_size=11,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
                num_labels=1,
            )
            self.network = transformers.AutoModelForSequenceClassification.from_config(config)

        def forward(self, tokens: dict[str, Tensor]) -> Tensor:
            ids = tokens["input_ids"]
            rewards = self.network(input_ids=ids.flatten(0, -2), attention_mask=tokens["mask"].flatten(0, -2)).logits
            return rewards.view(ids.shape[:-1]) if ids.ndim == 3 else rewards

    ids = torch.randint(1, 11, (12, 2, 5), generator=torch.Generator().manual_seed(0))
    pairs = {"input_ids": ids, "mask": torch.ones_like(ids)}
    la = Laplace(Head().eval(), "reward_modeling", "last_layer", "full")
    la.fit([(pairs, torch.tensor([0, 1] * 6))])

    def reward(texts: list[str]) -> list[float]:
        tokens = torch.tensor([[int(word) for word in text.split()] for text in texts])
        prediction = la.predict({"input_ids": tokens, "mask": torch.ones_like(tokens)})
        return laplace.pessimistic(prediction, 1.0).flatten().tolist()

    singles = {name: part[:, 0] for name, part in pairs.items()}
    prediction = la.predict(singles)
    expected = prediction.latent_mean - prediction.latent_variance / 2
    texts = [" ".join(map(str, row)) for row in singles["input_ids"].tolist()]
    assert reward(texts) == pytest.approx(expected.flatten().tolist(), abs=1e-5)
