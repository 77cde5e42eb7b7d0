"""Problems with convolutions: padding modes, groups, dimensions, transposition, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tests.catalogue.problem import add
from tests.models.convolution import ResidualCNN, conv_net

_IMAGE = (2, 5, 5)
_CONV = "kfac conv shared"


def register() -> None:
    """Adds the problems of this file to the catalogue."""
    _paddings()
    _groups_and_dimensions()
    _transposed()
    _with_other_layers()


def _net(
    name: str,
    *layers: Callable[[], nn.Module],
    features: int,
    tags: str = _CONV,
    shape: tuple[int, ...] = _IMAGE,
    likelihood: str = "classification",
) -> None:
    def build() -> nn.Module:
        return conv_net(*[layer() for layer in layers], features=features)

    add(name, build, shape, 3, likelihood, tags, head=str(len(layers) + 1), n_data=5)


def _plain(**options: Any) -> tuple[Callable[[], nn.Module], ...]:
    return partial(nn.Conv2d, 2, 3, **options), nn.Tanh, partial(nn.AdaptiveAvgPool2d, 2)


def _paddings() -> None:
    _net("conv2d", *_plain(kernel_size=3), features=12)
    _net("conv2d_regression", *_plain(kernel_size=(2, 3), bias=False), features=12, likelihood="regression")
    _net("conv2d_reflect", *_plain(kernel_size=3, padding=1, padding_mode="reflect"), features=12)
    _net("conv2d_circular", *_plain(kernel_size=3, padding=(1, 2), padding_mode="circular"), features=12)
    _net("conv2d_replicate", *_plain(kernel_size=3, padding=1, padding_mode="replicate", stride=2), features=12)
    _net("conv2d_same", *_plain(kernel_size=3, padding="same", dilation=2), features=12)
    # an even kernel pads unequally, one side more than the other
    _net("conv2d_same_circular", *_plain(kernel_size=2, padding="same", padding_mode="circular"), features=12)


def _groups_and_dimensions() -> None:
    grouped = partial(nn.Conv2d, 4, 6, 3, stride=2, padding=2, dilation=2, groups=2)
    _net("conv2d_grouped", grouped, nn.Tanh, features=54, tags=_CONV + " grouped", shape=(4, 5, 5))
    depthwise = (partial(nn.Conv2d, 3, 3, 3, groups=3), nn.Tanh, partial(nn.Conv2d, 3, 4, 1), nn.Tanh)
    _net("conv2d_depthwise", *depthwise, features=16, tags=_CONV + " grouped", shape=(3, 4, 4))
    _net("conv1d", partial(nn.Conv1d, 2, 3, 3, stride=2, padding=1), nn.Tanh, features=12, shape=(2, 7))
    _net("conv3d", partial(nn.Conv3d, 1, 2, 2, padding=(1, 0, 0)), nn.Tanh, features=32, shape=(1, 3, 3, 3))


def _transposed() -> None:
    up = partial(nn.ConvTranspose2d, 4, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
    pool = partial(nn.AdaptiveAvgPool2d, 3)
    _net("conv_transpose2d", up, nn.Tanh, pool, features=36, tags="conv shared transposed grouped", shape=(4, 3, 3))
    _net(
        "conv_transpose1d",
        partial(nn.ConvTranspose1d, 2, 3, 3, stride=2, dilation=2),
        nn.Tanh,
        features=33,
        tags="conv shared transposed",
        shape=(2, 4),
    )


def _with_other_layers() -> None:
    group_norm = (partial(nn.Conv2d, 2, 4, 3), partial(nn.GroupNorm, 2, 4), nn.Tanh, partial(nn.AdaptiveAvgPool2d, 2))
    _net("group_norm", *group_norm, features=16, tags="conv shared norm")
    prelu = (partial(nn.Conv2d, 2, 3, 3), nn.PReLU, partial(nn.AdaptiveAvgPool2d, 2))
    _net("conv_prelu", *prelu, features=12, tags="conv shared prelu")
    add("residual_cnn", ResidualCNN, (1, 6, 6), 3, tags="conv shared norm residual")
    inplace = partial(ResidualCNN, inplace=True)
    add("residual_cnn_inplace", inplace, (1, 6, 6), 3, "regression", "conv shared norm residual inplace")
