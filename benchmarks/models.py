"""The networks of the benchmarks, with seeded random weights, and random data of their input shapes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

Batches = list[tuple[Tensor, Tensor]]


class WideBlock(nn.Module):
    """Pre-activation residual block (Zagoruyko & Komodakis, 2016).

    Args:
        inputs: Channels in.
        outputs: Channels out.
        stride: Of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, outputs, H/stride, W/stride]`."""
        h = functional.relu(self.norm1(x))
        return self.conv2(functional.relu(self.norm2(self.conv1(h)))) + self.shortcut(h)


def wide_resnet(n_classes: int = 10, depth: int = 16, width: int = 4) -> nn.Module:
    """WRN-16-4 on `[B, 3, 32, 32]`."""
    n_blocks = (depth - 4) // 6
    channels = [16, 16 * width, 32 * width, 64 * width]
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    for stage in range(3):
        for block in range(n_blocks):
            inputs = channels[stage + (block > 0)]
            layers.append(WideBlock(inputs, channels[stage + 1], stride=2 if stage > 0 and block == 0 else 1))
    head = [nn.BatchNorm2d(channels[3]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(channels[3], n_classes))


class Bottleneck(nn.Module):
    """Residual block of 1×1, 3×3 and 1×1 convolutions (He et al., 2016), with its stride in the second one.

    Args:
        inputs: Channels in.
        width: Channels of the 3×3 convolution; four times as many leave the block.
        stride: Of the 3×3 convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, 4 · width, H/stride, W/stride]`."""
        return functional.relu(self.residual(x) + self.shortcut(x))


def resnet50(n_classes: int = 100) -> nn.Module:
    """ResNet-50 (He et al., 2016) with 23.7 million parameters at 100 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
    ]  # fmt: skip
    inputs = 64
    for stage, n_blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(n_blocks):
            layers.append(Bottleneck(inputs, width, stride=2 if stage > 0 and block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, n_classes))


class BasicBlock(nn.Module):
    """Two convolutions with batch norm beside the identity, or beside every other pixel and zeros (He et al., 2016).

    Args:
        inputs: Channels in.
        width: Channels out.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        stride = 1 if inputs == width else 2
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.more = width - inputs

    def forward(self, x: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, width, H/s, W/s]`."""
        beside = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.more)) if self.more else x
        return torch.relu(beside + self.inner(x))


def resnet20(width: int, blocks: int = 3) -> nn.Module:
    """A ResNet for images `[B, 3, 32, 32]` with three stages; of 16 channels and three blocks each it is ResNet-20."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(3):
        for _ in range(blocks):
            layers.append(BasicBlock(inputs, width * 2**stage))
            inputs = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)).eval()


def lenet() -> nn.Module:
    """LeNet-5 on `[B, 1, 28, 28]` (LeCun et al., 1998), 61,706 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def digits_lenet() -> nn.Module:
    """A LeNet for images `[B, 1, 8, 8]`, such as scikit-learn's digits."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def mlp(*widths: int) -> nn.Module:
    """ReLU network with these widths, inputs and outputs included."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Encoder(nn.Module):
    """Two transformer encoder layers (Vaswani et al., 2017) with a linear head on the mean of the tokens.

    Args:
        width: Of the tokens.
        n_classes: C.
    """

    def __init__(self, width: int, n_classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, width]` to `[B, C]`."""
        return self.head(self.encoder(x).mean(1))


def data(shape: tuple[int, ...], n_classes: int, n_data: int, batch_size: int, device: torch.device) -> Batches:
    """Random inputs `[b, *shape]` and labels, as a list of batches."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_data, *shape, generator=generator).to(device)
    y = torch.randint(n_classes, (n_data,), generator=generator).to(device)
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))
