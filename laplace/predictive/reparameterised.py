"""Local reparameterisation (Kingma, Salimans and Welling, 2015; Immer et al., 2021, A.3.3): noise on pre-activations.

Under a diagonal posterior the output of a layer that is linear in its weights is Gaussian given its input, z ~
N(W a + b, V_W a² + v_b), so that one forward pass draws it for every datum anew: a sample of the network costs no
sample of the weights, and data do not share their noise, which makes averages over data less noisy. Of positions
(tokens, pixels) the noise is drawn for every position, as is usual: each pre-activation has its right distribution,
while positions share no weights any more. Layers without this form (scales, embeddings, recurrent ones) take sampled
weights, shared by the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.output_choice import OutputChoice
from laplace.core.positions import OutputRows
from laplace.core.random_numbers import standard_normal
from laplace.engines.engine import detached
from laplace.engines.native.forward import owners
from laplace.engines.native.rules import rule_for
from laplace.errors import UnsupportedError
from laplace.network.model_guard import preserve_model
from laplace.predictive.latent import SampleSource
from laplace.predictive.sampled import finite, with_arguments
from laplace.weights.problem import Problem

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, eq=False)
class ReparameterisedOutputs(SampleSource):
    """Outputs of the network with noise on the pre-activations of its linear and convolutional layers.

    Attributes:
        problem: The network and its random parameters.
        mean: θ*, `[P]`.
        variances: Of the weights, `[P]`.
        coverage: Which rule was proved to explain a tensor: a layer that is used in another way as well is sampled.
        x: Inputs of B data.
        model_kwargs: Further arguments of the model.
        create_graph: Whether results can be differentiated, with respect to hyper-parameters or x.
        check: Raises where the network is not that of the posterior any more.
        through_x: Whether they can be with respect to x.
        choice: Which outputs; None for all.
    """

    problem: Problem
    mean: Tensor
    variances: Tensor
    coverage: Mapping[str, str]
    x: Inputs
    model_kwargs: dict[str, Any]
    create_graph: bool
    check: Callable[[], None]
    through_x: bool
    choice: OutputChoice | None = None

    def samples(self, n: int, generator: torch.Generator | None) -> OutputRows:
        self.check()
        problem = with_arguments(self.problem, self.model_kwargs)
        layers = self.layers()
        shared = self._shared(layers)
        noise = standard_normal((n, int(shared.sum())), self.mean, generator)
        x = batches.to_device(self.x, problem.device)
        x = x if self.through_x else detached(x)
        drawn: list[Tensor] = []
        with preserve_model(problem.module), ExitStack() as hooks:
            fired = hooks.enter_context(_noisy(layers, generator))
            for row in noise:
                theta = self.mean.clone()
                theta[shared] += self.variances[shared].sqrt() * row
                fired.clear()
                drawn.append(problem.run(problem.substituted(theta), x))
                self._require_once(layers, fired)
        samples = finite(torch.stack(drawn))
        rows = OutputRows.of(samples.to(torch.promote_types(samples.dtype, torch.float32)), 1)
        return rows if self.choice is None else self.choice.picked(rows)

    def layers(self) -> dict[nn.Module, dict[str, Tensor]]:
        """Layers that get noise, with the variances of their weight and bias in the tensors' shapes."""
        noisy: dict[nn.Module, dict[str, Tensor]] = {}
        holders = owners(self.problem)
        parts = self.problem.layout.split(self.variances)
        for owner in holders:
            slot = self.problem.slots[owner.slot]
            rule = rule_for(owner.module)
            alone = sum(other.slot == owner.slot for other in holders) == 1
            proved = rule is not None and self.coverage.get(slot.name, "").split(" →")[0] == rule.name
            if isinstance(owner.module, _LAYERS) and alone and proved:
                values = slot.place(parts[owner.slot].unsqueeze(0))[0].view(slot.shape)
                noisy.setdefault(owner.module, {})[owner.attribute] = values
        for module, variances in noisy.items():  # a weight that is not random does not vary
            variances.setdefault("weight", torch.zeros_like(module.get_parameter("weight").detach()))
        return noisy

    def _shared(self, layers: Mapping[nn.Module, Mapping[str, Tensor]]) -> Tensor:
        """True for the entries that take sampled weights, `[P]`."""
        noisy = {o.slot for o in owners(self.problem) if o.attribute in layers.get(o.module, {})}
        sizes = self.problem.layout.sizes
        each = torch.tensor([i not in noisy for i in range(len(sizes))], device=self.mean.device)
        return each.repeat_interleave(torch.tensor(sizes, device=self.mean.device))

    def _require_once(self, layers: Mapping[nn.Module, Any], fired: list[nn.Module]) -> None:
        """Raises unless every layer was called once: two calls with noise of their own share no weights.

        Raises:
            UnsupportedError: A layer was called several times, or never.
        """
        for module in layers:
            if fired.count(module) != 1:
                name = next(name for name, other in self.problem.module.named_modules() if other is module)
                raise UnsupportedError(
                    f"layer {name!r} is called {fired.count(module)} times in a forward pass; local "
                    "reparameterisation draws noise per call and needs one. Use local_reparameterization=False."
                )


@contextmanager
def _noisy(
    layers: Mapping[nn.Module, Mapping[str, Tensor]], generator: torch.Generator | None
) -> Iterator[list[nn.Module]]:
    """Adds noise to the outputs of layers while it is open; the list says which were called."""
    fired: list[nn.Module] = []

    def perturb(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        fired.append(module)
        variance = _output_variance(module, args[0], layers[module]).clamp(min=torch.finfo(output.dtype).tiny)
        return output + variance.sqrt() * standard_normal(tuple(output.shape), output, generator)

    handles = [module.register_forward_hook(perturb) for module in layers]
    try:
        yield fired
    finally:
        for handle in handles:
            handle.remove()


def _output_variance(module: nn.Module, x: Tensor, variances: Mapping[str, Tensor]) -> Tensor:
    """V_W a² + v_b in the shape of the layer's output."""
    weight = variances["weight"].to(x.dtype)
    bias = variances.get("bias")
    bias = None if bias is None else bias.to(x.dtype)
    if isinstance(module, nn.Linear):
        return functional.linear(x.square(), weight, bias)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return module._conv_forward(x.square(), weight, bias)  # the module's own padding, stride and groups
    raise UnsupportedError(f"no pre-activation noise for {type(module).__name__}.")
