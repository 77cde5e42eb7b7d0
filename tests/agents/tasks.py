"""What users ask an assistant for: a task, a solution by the calls of AGENTS.md, and a check of what it returns.

A solution is given what its parameters name, see `GIVEN`; its docstring is the task.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

Solution = Callable[..., Any]
Check = Callable[[Any], bool]


class Task(NamedTuple):
    solution: Solution
    check: Check

    def solve(self, folder: Path) -> Any:
        """What the solution returns of fresh networks and data."""
        given = GIVEN | {"path": lambda: folder / "posterior.safetensors"}
        torch.manual_seed(0)
        return self.solution(**{name: given[name]() for name in inspect.signature(self.solution).parameters})


TASKS: list[Task] = []


def task(check: Check) -> Callable[[Solution], Solution]:
    """Adds a task: its solution is decorated."""

    def add(solution: Solution) -> Solution:
        TASKS.append(Task(solution, check))
        return solution

    return add


def network(n_in: int, n_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out))


def inputs(n: int = 30) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(n))


def labelled(n: int = 30) -> list[tuple[Tensor, Tensor]]:
    x = inputs(n)
    return [(part, part[:, :3].argmax(1)) for part in x.split(15)]


def line() -> list[tuple[Tensor, Tensor]]:
    x = torch.linspace(-3, 3, 40).unsqueeze(1)
    return [(x, x.sin())]


def trained(n_out: int = 1) -> nn.Module:
    """A network that was trained on the line a little; of two outputs the second is left as it was."""
    ((x, y),) = line()
    return after_training(network(1, n_out), x, lambda f: nn.functional.mse_loss(f[:, :1], y))


def classifier() -> nn.Module:
    (x, y), *_ = labelled()
    return after_training(network(4, 3), x, lambda f: nn.functional.cross_entropy(f, y))


def after_training(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(20):
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
    return model


class Two(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network(8, 3)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.body(torch.cat([one, other], 1))


def words(n: int = 8) -> Tensor:
    return torch.randint(1, 20, (n, 5), generator=torch.Generator().manual_seed(n))


def bert(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=20, num_labels=3, **sizes, **options)
    return transformers.BertForSequenceClassification(config)


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))


def batch() -> dict[str, Tensor]:
    return {"input_ids": words(), "attention_mask": torch.ones_like(words()), "labels": words()[:, 0] % 3}


GIVEN: dict[str, Callable[[], Any]] = {
    "model": classifier,
    "another": classifier,
    "small": lambda: nn.Linear(4, 3),
    "x": inputs,
    "labels": lambda: labelled()[0][1],
    "train_loader": labelled,
    "val_loader": lambda: labelled(60),
    "test_loader": lambda: labelled(45),
    "more_data": lambda: labelled(15),
    "regressor": trained,
    "regression_loader": line,
    "line": lambda: line()[0][0],
    "noisy": lambda: trained(2),
    "counts": lambda: [(line()[0][0], torch.arange(40.0).unsqueeze(1) % 4)],
    "answers": lambda: [(part, (part[:, :2] > 0).float()) for part, _ in labelled()],
    "yes_or_no": lambda: network(4, 2),
    "two": Two,
    "pairs": lambda: [(part, part, y) for part, y in labelled()],
    "tagger": lambda: nn.Sequential(nn.Embedding(20, 6), nn.Tanh(), nn.Linear(6, 3)),
    "tokens": words,
    "tagged": lambda: [(words(), words() % 3)],
    "peft_model": adapted,
    "transformer": bert,
    "batch": batch,
}
"""What solutions may ask for, by the names of their parameters."""


def probabilities(*shape: int) -> Check:
    return lambda p: p.shape == shape and bool(torch.allclose(p.sum(-1), torch.ones(()), atol=1e-5))
