"""Helper functions of the legacy interface: linear algebra, metrics and priors, batches and loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

from laplace.compat.kron import eigh
from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.gaussian import GaussianOutputs
from laplace.enums import LinkApprox, PredType, PriorStructure
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, InvalidType, StateError
from laplace.metrics import AccumulatingMetric, accepted_by
from laplace.network import next_token
from laplace.network.model_guard import gradients_set_aside, unwrap
from laplace.weights.last_layer import network_of

Method = TypeVar("Method", bound=Callable[..., Any])

# Linear algebra.


def invsqrt_precision(M: Tensor) -> Tensor:
    """Lower-triangular L with L Lᵀ = M⁻¹, the Cholesky factor of a covariance from its precision M `[..., P, P]`.

    With J the flip of both axes and C the Cholesky factor of J M J, the factor U = J C J is upper-triangular and
    M = U Uᵀ; so L = U⁻ᵀ. Nothing is inverted twice.
    """
    flipped, info = torch.linalg.cholesky_ex(M.flip(-2, -1))
    if bool((info != 0).any()) or not bool(torch.isfinite(flipped).all()):
        raise CurvatureError(
            f"the precision of shape {list(M.shape)} is not positive definite; "
            "raise the prior precision, or use float64."
        )
    upper = flipped.flip(-2, -1)
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(M)
    return torch.linalg.solve_triangular(upper, eye, upper=True).mT


def kron(t1: Tensor, t2: Tensor) -> Tensor:
    """Dense Kronecker product of `[a, b]` and `[c, d]`, `[a·c, b·d]`."""
    return torch.kron(t1.contiguous(), t2.contiguous())


def diagonal_add_scalar(X: Tensor, value: float | Tensor) -> Tensor:
    """X + value · I for square matrices `[..., P, P]`; a new tensor."""
    return X + value * torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


def symeig(M: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[P]`, at least 0, and eigenvectors `[P, P]` of a positive semi-definite matrix, by float64."""
    return eigh(M)


def block_diag(blocks: Sequence[Tensor]) -> Tensor:
    """Dense block-diagonal matrix of square blocks, `[P, P]`."""
    return torch.block_diag(*blocks)


def normal_samples(mean: Tensor, var: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws `[S, B, C]` from Gaussians with means `[B, C]` and variances `[B, C]` or covariances `[B, C, C]`."""
    return GaussianOutputs(mean, var).sample(n_samples, generator)


# Metrics, priors and modules.


def get_nll(out_dist: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log likelihood, in nats, of labels `[B]` under probabilities `[B, C]`; 0-dim."""
    return nn.functional.nll_loss(out_dist.log(), targets)


@torch.no_grad()
def validate(
    laplace: Any,
    val_loader: Iterable[Any],
    loss: AccumulatingMetric | Callable[..., Any],
    pred_type: str = PredType.GLM,
    link_approx: str = LinkApprox.PROBIT,
    n_samples: int = 100,
    dict_key_y: str = "labels",
) -> float:
    """Scores the predictions on a loader: the metric's value, summed over outputs, or the function's.

    The loss is a running metric, updated batch by batch and not reset; or a function of all predictions and targets,
    `loss(probabilities, y)` or `loss(means, variances, y)`.
    """
    options = {"pred_type": pred_type, "link_approx": link_approx, "n_samples": n_samples, "fitting": True}
    network, device = unwrap(network_of(laplace.model)), next(laplace.model.parameters()).device
    running = isinstance(loss, AccumulatingMetric)
    rows: list[tuple[Tensor, ...]] = []
    seen = False
    for batch in val_loader:
        x, y = next_token.split(batch, dict_key_y, network)
        predicted = laplace(batches.to_device(x, device), **options)
        parts = predicted if isinstance(predicted, tuple) else (predicted,)
        row = (*parts, y.to(parts[0].device))  # (probabilities, y) or (means, variances, y)
        seen = True
        if running:
            loss.update(*accepted_by(loss, row))
        else:
            rows.append(row)
    if not seen:
        raise InvalidData("the validation loader is empty; give at least one batch.")
    value = loss.compute() if running else loss(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    return float(value.sum() if isinstance(value, Tensor) else value)


def parameters_per_layer(model: nn.Module) -> list[int]:
    """Number of entries of every parameter tensor, in order."""
    return [parameter.numel() for parameter in model.parameters()]


def expand_prior_precision(prior_prec: Tensor, model: nn.Module) -> Tensor:
    """Prior precisions of all trainable parameters, `[P]`, with the graph of `[1]`, one per tensor `[L]`, or `[P]`."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    sizes = [p.numel() for p in trainable]
    vector = prior_prec.reshape(-1).to(trainable[0].device) if trainable else prior_prec
    if prior_prec.ndim <= 1 and len(vector) == 1:
        return vector.expand(sum(sizes))
    if prior_prec.ndim == 1 and len(vector) == sum(sizes):
        return vector
    if prior_prec.ndim == 1 and len(vector) == len(sizes):
        return torch.repeat_interleave(vector, torch.tensor(sizes, device=vector.device))
    raise InvalidArgument(
        f"the prior precision has shape {list(prior_prec.shape)}; accepted are [1], [{len(sizes)}] (one per trainable "
        f"tensor) and [{sum(sizes)}] (one per trainable parameter)."
    )


def fix_prior_prec_structure(
    prior_prec_init: float,
    prior_structure: str,
    n_layers: int,
    n_params: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A constant prior precision of a structure: `[1]`, `[n_layers]` or `[n_params]`."""
    lengths: dict[str, int] = {
        PriorStructure.SCALAR: 1,
        PriorStructure.LAYERWISE: n_layers,
        PriorStructure.DIAG: n_params,
    }
    if prior_structure not in lengths:
        raise InvalidArgument(f"prior_structure={prior_structure!r}; accepted are {[str(key) for key in lengths]}.")
    return torch.full((lengths[prior_structure],), prior_prec_init, device=device, dtype=dtype)


class SoDSampler(Sampler[int]):
    """Draws M of N indices without replacement, the same at every iteration."""

    def __init__(self, N: int, M: int, seed: int = 0) -> None:
        if not 1 <= M <= N:
            raise InvalidArgument(f"M={M} of N={N} data were asked for; accepted is 1 to N.")
        import numpy as np

        self.indices: list[int] = np.random.default_rng(seed).choice(N, M, replace=False).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def _is_batchnorm(module: nn.Module) -> bool:
    """True if a module is a batch normalisation of any dimension."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _all_subclasses(cls: type) -> set[type]:
    """All subclasses of a class, of any depth."""
    direct = set(cls.__subclasses__())
    return direct.union(*(_all_subclasses(child) for child in direct))


# Batches, loaders and samples of the legacy function-space classes.

_DEFAULT_BATCH = 128  # Where a loader's own batch size is unknown (a custom batch sampler).


def split_batch(batch: Inputs, dict_key_y: str = "labels") -> tuple[Inputs, Tensor]:
    """Inputs and targets of a batch, a pair or a mapping (which is its own input)."""
    return batches.split(batch, dict_key_y)


def batch_size(x: Inputs, dict_key_x: str = "input_ids") -> int:
    """Number of rows of a tensor, or of a mapping of tensors."""
    return batches.size(x, dict_key_x)


def to_device(x: Inputs, device: torch.device | str, dtype: torch.dtype | None = None) -> Inputs:
    """Moves every tensor among the inputs, and casts the floating-point ones to `dtype` if one is given."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return batches.transform(x, move)


def select_rows(x: Inputs, indices: Tensor | slice | Sequence[int]) -> Inputs:
    """Rows of a tensor, or of every tensor of a mapping."""
    rows = indices if isinstance(indices, slice) else torch.as_tensor(indices)
    return batches.transform(x, lambda tensor: tensor[rows.to(tensor.device) if isinstance(rows, Tensor) else rows])


def concatenate_rows(parts: Sequence[Inputs]) -> Inputs:
    """One tensor, or one mapping, of the rows of several with the same keys."""
    if not parts:
        raise InvalidData("there are no rows to concatenate; give at least one batch.")
    if isinstance(parts[0], Tensor) and all(isinstance(part, Tensor) for part in parts):
        return torch.cat(list(parts))
    if not all(isinstance(part, Mapping) and set(part) == set(parts[0]) for part in parts):
        raise InvalidData(
            "batches of different kinds or keys cannot be concatenated; give all as tensors or alike mappings."
        )
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def regression_targets(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets on the device and in the dtype of the outputs."""
    if targets.shape != outputs.shape:
        raise InvalidData(
            f"regression targets have shape {list(targets.shape)} and outputs {list(outputs.shape)}; they must be "
            "equal. Reshape the targets, for instance by y.unsqueeze(-1)."
        )
    return targets.to(outputs)


def classification_targets(targets: Tensor, n_outputs: int) -> Tensor:
    """Class indices `[B]`, int64, from indices `[B]` or `[B, 1]`, or from one-hot rows `[B, C]`."""
    if targets.ndim == 2 and targets.shape[1] == n_outputs and n_outputs > 1:
        one_hot = ((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all()
        if not bool(one_hot):
            raise InvalidData("targets [B, C] must be one-hot rows; give class indices [B] instead.")
        return targets.argmax(1)
    flat = targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets
    integral = not (flat.is_floating_point() or flat.is_complex())
    if flat.ndim != 1 or not integral or bool(((flat < 0) | (flat >= n_outputs)).any()):
        raise InvalidData(
            f"class targets of shape {list(targets.shape)} and dtype {targets.dtype}; accepted are integers from 0 to "
            f"{n_outputs - 1} of shape [B] or [B, 1], or one-hot rows [B, {n_outputs}]."
        )
    return flat.long()


def training_indices(loader: DataLoader[Any]) -> list[int]:
    """Indices of the data that one pass over the loader sees (samplers and `drop_last` respected), ascending.

    The global random state is left as it was.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise InvalidType("the loader's dataset is an iterable without indices; give one with __getitem__.")
    with torch.random.fork_rng(devices=[]):
        if loader.batch_sampler is None:
            return sorted(set(loader.sampler))
        return sorted({index for batch in loader.batch_sampler for index in batch})


def subset_loader(loader: DataLoader[Any], indices: Sequence[int] | Tensor) -> DataLoader[Any]:
    """A loader over some data of another loader's dataset, in the order of `indices`, batched and collated alike."""
    chosen = indices.tolist() if isinstance(indices, Tensor) else list(indices)
    return DataLoader(
        Subset(loader.dataset, chosen),
        batch_size=loader.batch_size or _DEFAULT_BATCH,
        shuffle=False,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
    )


def draw_gaussian(mean: Tensor, covariance: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws `[S, B, C]` or `[S, D]` from Gaussians whose covariance may be singular.

    Means are `[B, C]` with covariances `[B, C, C]`, `[B, C]` or joint `[B·C, B·C]`, or `[D]` with `[D, D]`.
    """
    if mean.ndim == 1:
        return GaussianOutputs(mean.unsqueeze(0), covariance.unsqueeze(0)).sample(n_samples, generator).squeeze(1)
    return GaussianOutputs(mean, covariance).sample(n_samples, generator)


def same_configuration(first: object, second: object) -> bool:
    """True if two nested configurations are equal, tensors compared entry by entry with shape and dtype."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first.cpu(), second.cpu())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_configuration(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same_configuration, first, second))
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return False
    return bool(first == second)


def _individual_reward_inputs(inputs: Inputs, dict_key_x: str) -> Inputs:
    """Items `[2·B, …]` of pairs `[B, 2, …]`, one pair after the other; what has one row for a pair is repeated."""
    x = inputs if isinstance(inputs, Tensor) else batches.tensors(inputs)[0]
    if isinstance(inputs, Mapping) and isinstance(inputs.get(dict_key_x), Tensor):
        x = inputs[dict_key_x]
    if x.ndim < 2 or x.shape[1] != 2:
        raise InvalidData(f"inputs of shape {list(x.shape)} are no pairs; give [B, 2, …], two items for every datum.")

    def items(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or len(tensor) != len(x):
            return tensor
        return tensor.flatten(0, 1) if tensor.shape[1:2] == (2,) else tensor.repeat_interleave(2, 0)

    return batches.transform(inputs, items)


def _model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Copies of a network's parameters and buffers, its trainable parameters, and its modules."""
    return {
        "state_dict": {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()},
        "active_parameters": [
            (name, tuple(p.shape), p.dtype) for name, p in model.named_parameters() if p.requires_grad
        ],
        "module_structure": [
            (name, type(module).__module__, type(module).__qualname__, module.extra_repr())
            for name, module in model.named_modules()
        ],
    }


def _check_model_fingerprint(model: nn.Module, fingerprint: Mapping[str, Any]) -> None:
    """Refuses another network than that of a fingerprint."""
    now = _model_fingerprint(model)
    differ = [part for part in now if part not in fingerprint or not same_configuration(now[part], fingerprint[part])]
    if differ:
        raise StateError(f"the network is not that of the fingerprint, whose {' and '.join(differ)} differ.")


def preserve_model_gradients(method: Method) -> Method:
    """Decorates a method of an object with a `model`: the model's `.grad` are after the call as they were before it."""

    @wraps(method)
    def wrapped(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with gradients_set_aside(self.model):
            return method(self, *args, **kwargs)

    return cast("Method", wrapped)
