"""Samples of equal seeds of every posterior: the numbers that must be the same on every machine."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.function_space import BaseFunctionalLaplace
from tests import grid
from tests.pairs import ALL
from tests.robustness.faults import Large, Memory

FUNCTIONAL: dict[str, dict[str, Any]] = {
    "gp": {"n_subset": 8},
    "gp nystrom": {"subsample_size": 8, "n_eigenvalues": 4, "functional_approximation": "nystrom"},
}
CELLS = [(weights, structure) for weights in grid.WEIGHTS for structure in grid.STRUCTURES]
CELLS += [(weights, name) for weights in ("all", "last_layer") for name in FUNCTIONAL]
"""Every choice of weights with every structure, and the posteriors over functions."""

N_SAMPLES = 40
ROOT = Path(__file__).parents[2]


def even(values: Tensor) -> Tensor:
    """Values of which every machine has the same bits: random numbers are rounded by the machine that draws them."""
    return (values.double() * 2**12).round() / 2**12


def with_even_weights(model: nn.Module) -> nn.Module:
    """The model, its weights rounded in the same way."""
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(even(tensor))
    return model


def inputs(dtype: torch.dtype) -> Tensor:
    """Fourteen data, two of them twice: 42 outputs of as few as 6 weights."""
    x = even(grid.data(seed=8)[0]).to(dtype)
    return torch.cat([x, x[:2]])


def fitted(weights: str, structure: str, dtype: torch.dtype) -> tuple[Any, Memory]:
    """A posterior, and the memory of its network."""
    memory, kind = Memory(), structure.split(maxsplit=1)[0]
    options = {"subnetwork_indices": grid.INDICES} if weights == "subnetwork" else {}
    model = with_even_weights(Large(grid.network(), memory).to(dtype))
    la = Laplace(model, "classification", weights, kind, **options, **FUNCTIONAL.get(structure, {}))
    la.fit([(even(x).to(dtype), y) for x, y in grid.batches()])
    return la, memory


def samples(la: Any, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Samples `[S, ...]` of each kind, with the mean and the standard deviation that they have."""
    x = inputs(dtype)
    known = la.predict(x)
    deviation, mean = known.latent_variance.sqrt(), known.latent_mean

    def source() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def outputs(**options: bool) -> tuple[Tensor, Tensor, Tensor]:
        return la.functional_samples(x, n_samples=N_SAMPLES, generator=source(), **options), mean, deviation

    found = {
        "outputs": outputs(),
        "joint outputs": outputs(joint=True),
        "single outputs": outputs(diagonal_output=True),
    }
    if not isinstance(la, BaseFunctionalLaplace):
        theta = la.sample(N_SAMPLES, source())
        some = grid.INDICES if theta.shape[1] > len(la.mean) else slice(None)  # around a subnetwork nothing varies
        found["weights"] = theta[:, some], la.mean, la.posterior_variance.sqrt()
    return found


def everything(dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)) -> dict[str, Any]:
    """All samples by posterior and kind, in dtypes by turns; in all of them where LAPLACE_TEST_ALL is set."""
    warnings.simplefilter("ignore")
    n = len(grid.STRUCTURES)
    chosen = [dtypes if ALL else dtypes[(i + i // n) % 2 :][:1] for i in range(len(CELLS))]
    return {
        f"{weights} {structure} {dtype} {kind}": values
        for (weights, structure), some in zip(CELLS, chosen, strict=True)
        for dtype in some
        for kind, values in samples(fitted(weights, structure, dtype)[0], dtype).items()
    }


def elsewhere(folder: Path, threads: int, **environment: str) -> dict[str, Any]:
    """The same in a process of its own, with other instructions and another number of threads."""
    target = folder / "drawn.pt"
    threading = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}  # no core is kept busy by waiting
    settings = {**os.environ, **threading, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "tests.robustness.drawn", str(target), str(threads)]
    subprocess.run(command, env=settings, cwd=ROOT, check=True, timeout=280)
    return torch.load(target)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """How far samples are apart, in units of what they may be: 1e-6, in float32 1e-5 deviations and 10 eps of f."""
    for name, (drawn, mean, deviation) in expected.items():
        apart = (found[name][0] - drawn).abs()
        if drawn.dtype == torch.float64:
            allowed = 1e-6 * deviation
        else:
            allowed = 1e-5 * deviation + 10 * torch.finfo(drawn.dtype).eps * mean.abs()
        yield name, float((apart / allowed).max())


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    torch.save(everything(), sys.argv[1])
