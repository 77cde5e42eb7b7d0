"""Patches of images, the inputs of a convolution, which are larger than the images by the size of the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from laplace.core.cached import cached_property
from laplace.core.gram import convolutions_are_fast, group_gram
from laplace.core.pieces import bytes_at_once, operations_are_dear

_PART_BYTES = 2**20
"""Bytes of patches that a CPU unfolds at once if they are read once: the size of a cache."""

_COPIED_BYTES = 2**25
"""Bytes of images and gradients that a CPU copies at once for a convolution."""

_MULTIPLIED = 2**22
"""Multiplications from which on a convolution is worth its call."""

_WEIGHT_GRADIENTS: dict[int, Callable[..., Tensor]] = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}


@dataclass(frozen=True, eq=False)
class Patches:
    """Patches that are unfolded when they are read, a few samples at a time or all of them."""

    images: Tensor  # Padded images `[B, T', channels, *space]`, T' of every sample
    kernel: tuple[int, ...]  # Size of a patch
    stride: tuple[int, ...]  # Steps between patches
    dilation: tuple[int, ...]  # Steps within a patch
    groups: int  # G

    @property
    def shape(self) -> torch.Size:
        """Shape `[B, T, G, I]` of the patches, with I = (channels of a group) · (kernel size)."""
        data, images, channels, *space = self.images.shape
        positions = _positions(space, self.kernel, self.stride, self.dilation)
        per_patch = channels // self.groups * prod(self.kernel)
        return torch.Size((data, images * prod(positions), self.groups, per_patch))

    @property
    def n_bytes(self) -> int:
        """Bytes of all patches."""
        return self.shape.numel() * self.images.element_size()

    def map(self, function: Callable[[Tensor], Tensor]) -> Patches:
        """Applies a function of samples or numbers, which keeps space and channels, to the images."""
        return replace(self, images=function(self.images))

    @cached_property
    def rows(self) -> Tensor:
        """All patches, `[B, T, G, I]`, cached."""
        unfolded = unfold(self.images.flatten(0, 1), self.kernel, self.stride, self.dilation, self.groups)
        return unfolded.unflatten(0, self.images.shape[:2]).flatten(1, -3)

    def slices(self, n_bytes: int | None = None) -> Iterator[slice]:
        """Consecutive samples, few enough that their patches (or `n_bytes` of all) stay in a cache."""
        data = len(self.images)
        most = bytes_at_once(_PART_BYTES, self.images.device)
        parts = max(1, min(data, -(-(self.n_bytes if n_bytes is None else n_bytes) // most)))
        for i in range(parts):
            yield slice(data * i // parts, data * (i + 1) // parts)

    def convolves(self, g: Tensor) -> bool:
        """True if `outer_sums` of gradients g `[K, B, T, G, O]` is less work than products of unfolded patches."""
        enough = len(self.kernel) in _WEIGHT_GRADIENTS and g.numel() * self.shape[3] >= _MULTIPLIED
        per_group = self.images.shape[2] // self.groups
        return enough and g.dtype == self.images.dtype and convolutions_are_fast(g, g.shape[2], per_group, g.shape[4])

    def outer_sums(self, g: Tensor) -> Tensor:
        """Σ_t g ⊗ a of every sample, `[K, B, G, O, I]`, for gradients g `[K, B, T, G, O]`; nothing is unfolded.

        It is the gradient of the weight of one convolution with a group for every sample.
        """
        copied = (self.images.numel() * len(g) + g.numel()) * g.element_size()
        parts = max(1, min(len(self.images), -(-copied // bytes_at_once(_COPIED_BYTES, g.device))))
        some = zip(self.images.chunk(parts), g.chunk(parts, 1), strict=True)
        sums = [replace(self, images=images)._outer_sums_at_once(its) for images, its in some]
        return sums[0] if len(sums) == 1 else torch.cat(sums, 1)

    def _outer_sums_at_once(self, g: Tensor) -> Tensor:
        k, b, _, _, n_outputs = g.shape
        n_images, channels, *space = self.images.shape[1:]
        groups, per_group = k * b * self.groups, channels // self.groups
        images = self.images.transpose(0, 1).unsqueeze(1).expand(-1, k, -1, *self.images.shape[2:])
        positions = _positions(space, self.kernel, self.stride, self.dilation)
        outputs = g.unflatten(2, (n_images, *positions)).movedim(2, 0).movedim((-2, -1), (3, 4))
        sums = _WEIGHT_GRADIENTS[len(self.kernel)](
            images.reshape(n_images, groups * per_group, *space),
            torch.Size((groups * n_outputs, per_group, *self.kernel)),
            outputs.reshape(n_images, groups * n_outputs, *positions),
            stride=self.stride, dilation=self.dilation, groups=groups,
        )  # fmt: skip
        return sums.view(k, b, self.groups, n_outputs, -1)

    def gram(self, dtype: torch.dtype | None = None) -> Tensor:
        """Σ a aᵀ over all patches, `[G, I, I]`, multiplied and summed in this dtype; None for their own."""
        if self._repeats:
            sums = (_by_shifts(strips.to(dtype or strips.dtype), self.kernel[0]) for strips in self._strips())
            return _ordered(reduce(torch.add, sums), self.kernel)
        some = (replace(self, images=self.images[part]).rows for part in self.slices())
        return reduce(torch.add, (group_gram(rows, dtype) for rows in some))

    @property
    def _repeats(self) -> bool:
        """True if sums by shifts along the first dimension are less work than half of all products.

        With k of T + k − 1 rows in a patch, these are (k T + k (k − 1) / 2) / (k² T) of them.
        """
        k, rows = self.kernel[0], self.images.shape[3]
        patches = rows - k + 1
        simple = self.stride[0] == self.dilation[0] == self.groups == 1 and patches >= k
        simple = simple and not operations_are_dear(self.images.device)
        return simple and 2 * (patches + (k - 1) / 2) < k * patches

    def _strips(self) -> Iterator[Tensor]:
        """Images unfolded along all dimensions but the first, `[channels · rest, rows, n]`, a few at a time."""
        rest = len(self.kernel) - 1
        for part in self.slices(self.n_bytes // self.kernel[0]):
            x = self.images[part].flatten(0, 1)
            for d in range(1, 1 + rest):
                reach = (self.kernel[d] - 1) * self.dilation[d] + 1
                x = x.unfold(2 + d, reach, self.stride[d])[..., :: self.dilation[d]]
            kernel, positions = range(3 + rest, 3 + 2 * rest), range(3, 3 + rest)
            yield x.permute(1, *kernel, 2, 0, *positions).flatten(0, rest).flatten(2)


def as_tensor(inputs: Tensor | Patches) -> Tensor:
    """Inputs `[B, T, G, I]`, of which patches are unfolded."""
    return inputs.rows if isinstance(inputs, Patches) else inputs


def gram_of(inputs: Tensor | Patches, dtype: torch.dtype | None = None) -> Tensor:
    """Σ a aᵀ of inputs `[..., G, I]`, or of patches, `[G, I, I]`, multiplied and summed in a dtype; None for theirs."""
    return inputs.gram(dtype) if isinstance(inputs, Patches) else group_gram(inputs, dtype)


def _by_shifts(strips: Tensor, k: int) -> Tensor:
    """Σ a aᵀ of patches of k consecutive rows, the upper triangle of `[k · w, k · w]`, from rows `[w, rows, n]`.

    Rows i and j of a patch meet as rows u and u + j − i of the image, u from i to T + i − 1: that depends on i in the
    first and last few rows alone. Only what is there is added, so that nothing cancels.
    """
    width, rows, _ = strips.shape
    patches, upper = rows - k + 1, strips.new_zeros(k, width, k, width)
    for shift in range(k):

        def products(first: int, stop: int, shift: int = shift) -> Tensor:
            return strips[:, first:stop].flatten(1) @ strips[:, first + shift : stop + shift].flatten(1).T

        edge = k - 1 - shift
        before, after = ([products(u, u + 1) for u in range(start, start + edge)] for start in (0, patches))
        inner = products(edge, patches)
        for i in range(edge + 1):
            upper[i, :, i + shift] = sum([*before[i:], *after[:i]], inner)
    return upper.flatten(2).flatten(0, 1)


def _ordered(upper: Tensor, kernel: Sequence[int]) -> Tensor:
    """The matrix of an upper triangle `[rows · channels · rest, same]`, with channels first, `[1, I, I]`."""
    whole = upper.triu() + upper.triu(1).T
    side = (kernel[0], -1, prod(kernel[1:]))
    folded = whole.unflatten(1, side).unflatten(0, side)  # [k, c, r, k, c, r]
    return folded.transpose(0, 1).transpose(3, 4).flatten(3).flatten(0, 2).unsqueeze(0)


def unfold(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    """Patches `[N, *positions, G, channels of a group · kernel size]` of an already padded `[N, channels, *space]`."""
    dims = len(kernel)
    # For shapes on the meta device PyTorch would import its compiler, and on a GPU it unfolds image by image.
    if dims < 3 and prod(kernel) > 1 and not x.is_meta and not operations_are_dear(x.device):
        return _columns(x, kernel, stride, dilation, groups)
    for d in range(dims):
        reach = (kernel[d] - 1) * dilation[d] + 1
        x = x.unfold(2 + d, reach, stride[d])[..., :: dilation[d]]
    x = x.unflatten(1, (groups, -1))  # [N, G, c, *positions, *kernel]
    positions = range(3, 3 + dims)
    return x.permute(0, *positions, 1, 2, *range(3 + dims, 3 + 2 * dims)).flatten(2 + dims)


def _columns(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    """The same in one and two dimensions, by PyTorch's `unfold`, which copies rows of an image at once."""
    positions = _positions(x.shape[2:], kernel, stride, dilation)
    flat = len(kernel) == 1
    image = x.unsqueeze(2) if flat else x
    window, step, apart = ((1, *values) if flat else tuple(values) for values in (kernel, stride, dilation))
    columns = F.unfold(image, window, dilation=apart, stride=step)  # [N, channels · kernel size, T]
    return columns.unflatten(1, (groups, -1)).movedim(-1, 1).unflatten(1, positions)


def _positions(
    space: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    sizes = zip(space, kernel, stride, dilation, strict=True)
    return [(size - (k - 1) * d - 1) // s + 1 for size, k, s, d in sizes]
