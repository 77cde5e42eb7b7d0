"""Networks trained as people train them: Adam, mini-batches, and the weights of the best epoch on validation data."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.quality.data import Pair, Split, rotated

Made = Callable[[Split, float], nn.Module]
"""A network for the data, with this rate of dropout."""


def mlp(split: Split, dropout: float = 0.0, width: int = 64) -> nn.Module:
    """Two hidden layers of ReLU units."""
    n_inputs = split.train[0].shape[1]
    drop = [nn.Dropout(dropout)] if dropout else []
    hidden = [nn.Linear(n_inputs, width), nn.ReLU(), *drop, nn.Linear(width, width), nn.ReLU(), *drop]
    return nn.Sequential(*hidden, nn.Linear(width, split.n_outputs))


def small_mlp(split: Split, dropout: float = 0.0) -> nn.Module:
    """Two hidden layers of 32 ReLU units: few enough weights for their full covariance."""
    return mlp(split, dropout, width=32)


def cnn(split: Split, dropout: float = 0.0) -> nn.Module:
    """Two convolutions with batch normalisation and pooling, then one hidden layer of 64."""
    size = split.train[0].shape[-1] // 4
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * size**2, 64), nn.ReLU(), *drop, nn.Linear(64, split.n_outputs),
    )  # fmt: skip


def head(split: Split, dropout: float = 0.0) -> nn.Module:
    """A last layer on features that are given."""
    linear = nn.Linear(split.train[0].shape[1], split.n_outputs)
    return nn.Sequential(nn.Dropout(dropout), linear) if dropout else nn.Sequential(linear)


def loss_of(split: Split) -> nn.Module:
    """Cross entropy, or the mean square error of a regression."""
    return nn.MSELoss() if split.is_regression else nn.CrossEntropyLoss()


def trained(
    make: Made,
    split: Split,
    seed: int,
    *,
    dropout: float = 0.0,
    augment: bool = False,
    weight_decay: float = 1e-4,
    lr: float = 3e-3,
    batch_size: int = 64,
    epochs: int = 150,
    patience: int = 15,
    begin: nn.Module | None = None,
    after_epoch: Callable[[nn.Module], object] = lambda model: None,
) -> nn.Module:
    """A network with the weights of the epoch with the smallest validation loss, in evaluation mode.

    Args:
        make: Makes the network.
        split: The data.
        seed: Of the first weights, of the batches and of dropout; the global generator is left as it was.
        dropout: Rate of dropout, 0 for none.
        augment: Whether images are shifted by a pixel and turned by up to 10 degrees at random.
        weight_decay: Of Adam, added to the gradient.
        lr: Learning rate of Adam.
        batch_size: Data of a step.
        epochs: The most epochs.
        patience: Epochs without a smaller loss before training ends; 0 for the weights of the last epoch.
        begin: The network as it is at the start, which is trained; None for one that `make` makes.
        after_epoch: Called with the network after every epoch.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = make(split, dropout) if begin is None else begin
        loss = loss_of(split)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
        x, y = split.train
        best, kept, waited = float("inf"), copy.deepcopy(model.state_dict()), 0
        for _ in range(epochs):
            model.train()
            for batch in torch.randperm(len(x)).split(batch_size):
                if len(batch) == 1:  # batch normalisation needs two
                    continue
                optimizer.zero_grad()
                loss(model(_moved(x[batch]) if augment else x[batch]), y[batch]).backward()
                optimizer.step()
            after_epoch(model)
            if not patience:
                continue
            now = _validation(model.eval(), loss, split.val)
            waited = 0 if now < best else waited + 1
            if now < best:
                best, kept = now, copy.deepcopy(model.state_dict())
            if waited == patience:
                break
    if patience:
        model.load_state_dict(kept)
    return model.eval()


def _validation(model: nn.Module, loss: nn.Module, val: Pair) -> float:
    with torch.no_grad():
        return float(loss(model(val[0]), val[1]))


def _moved(images: Tensor) -> Tensor:
    """A batch of images, moved by a pixel and turned by up to 10 degrees, the same for the batch."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    turned = rotated(images, float(torch.empty(()).uniform_(-10, 10)))
    return torch.roll(turned, (down, right), (2, 3))
