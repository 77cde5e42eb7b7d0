"""Every line of `python -m benchmarks`: what is measured, what it is compared with, and its target.

A `Setting` is a network with random weights and its data. Functions of a setting make a `Job` on a device, and
`all_cases` is the table: a name, a target, its unit and one of these functions with its arguments.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

import laplace
from benchmarks import models, several_processes, work
from benchmarks.models import Batches
from benchmarks.timing import Case, Job
from laplace import Laplace, ParametricLaplace, curvature
from laplace.engines.at_weights import outputs_at
from laplace.engines.engine import MEMORY_BUDGET
from laplace.errors import TuningWarning
from laplace.extensions.drawn import DrawnFunction
from laplace.grid import from_names
from laplace.large_structures import krylov as cg
from laplace.weights.masks import RandomSubnetMask


@dataclass(frozen=True)
class Setting:
    """A network and its data.

    Attributes:
        make: The network.
        shape: Of one input.
        n_data: N.
        batch: Inputs per batch.
        n_classes: C.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    n_data: int = 1024
    batch: int = 256
    n_classes: int = 10

    def __call__(self, device: torch.device) -> tuple[nn.Module, Batches]:
        """The network in evaluation mode, and its batches."""
        model = self.make().to(device).eval()
        return model, models.data(self.shape, self.n_classes, self.n_data, self.batch, device)


def mlp(*widths: int, n_data: int = 1024, batch: int = 256) -> Setting:
    """A ReLU network of these widths with data of its first and classes of its last."""
    return Setting(partial(models.mlp, *widths), widths[:1], n_data, batch, widths[-1])


LENET = Setting(models.lenet, (1, 28, 28))
DIGITS = Setting(models.digits_lenet, (1, 8, 8))
MLP = mlp(784, 1024, 512, 256, 128, 10)
ENCODER = Setting(partial(models.Encoder, 64, 5), (32, 64), 512, 32, 5)
RESIDUAL = Setting(partial(models.wide_resnet, 10, depth=10, width=1), (3, 32, 32), 128, 32)
WRN = Setting(models.wide_resnet, (3, 32, 32), 256, 128)
WIDE = mlp(1024, 2048, 2048, 2048, 10, n_data=512, batch=128)
TRUNCATED = mlp(784, 1024, 1024, 10)


# Fits and predictions beside plain passes: a forward pass, or R, one forward pass and one gradient per output.

BESIDE: dict[str, Callable[[nn.Module, Batches], Callable[[], object]]] = {
    "× forward": work.forward,
    "× R": work.per_output_gradients,
}


def fit(setting: Setting, weights: str, structure: str, unit: str, device: torch.device) -> Job:
    """Construction and fit against plain passes over the same batches."""
    model, batches = setting(device)
    return Job(lambda _: work.fitted(model, batches, weights, structure), BESIDE[unit](model, batches))


def probit(setting: Setting, weights: str, structure: str, unit: str, device: torch.device) -> Job:
    """Probit predictions against plain passes over the same batches; the factorisation comes first."""
    model, batches = setting(device)
    la = work.fitted(model, batches, weights, structure)
    note = work.factorised(la, batches[0][0])
    return Job(lambda _: work.predict(la, batches), BESIDE[unit](model, batches), note=note)


def fit_and_probit(setting: Setting, structure: str, device: torch.device) -> Job:
    """Of a last layer, for its memory."""
    model, batches = setting(device)
    return Job(lambda _: work.predict(work.fitted(model, batches, "last_layer", structure), batches))


def subnetwork(structure: str, size: int, predict: bool, device: torch.device) -> Job:
    """Single entries at random, the worst case, against R, which sees all weights."""
    model, batches = MLP(device)
    indices = RandomSubnetMask(model, size, torch.Generator(device).manual_seed(0)).select()
    fitted = partial(work.fitted, model, batches, "subnetwork", structure, subnetwork_indices=indices)
    reference = work.per_output_gradients(model, batches)
    if not predict:
        return Job(lambda _: fitted(), reference)
    la = fitted()
    note = work.factorised(la, batches[0][0])
    return Job(lambda _: work.predict(la, batches), reference, note=note)


def one_input(n_calls: int, device: torch.device) -> Job:
    """Predictions of one input, of which the forward pass takes a fiftieth."""
    model, batches = mlp(64, 256, 256, 10, n_data=512, batch=128)(device)
    la = work.fitted(model, batches, "last_layer", "kron")
    x = batches[0][0][:1]
    note = work.factorised(la, x)

    def run(_: object) -> None:
        for _ in range(n_calls):
            la(x, link_approx="probit")

    return Job(run, note=note)


def full_ggn(device: torch.device) -> Job:
    """Σ JᵀΛJ of 1,257 points, against one GEMM [P, N·C] × [N·C, P]."""
    model, batches = mlp(64, 50, 50, 10, n_data=1257)(device)
    factor = torch.randn(1257 * 10, _n_params(model), device=device)
    return Job(lambda _: work.fitted(model, batches, "all", "full"), lambda: factor.T @ factor)


def full_probit(device: torch.device) -> Job:
    """Probit predictions of 256 inputs, against one float32 product [B·C, P] × [P, P] of the Jacobian and a root."""
    model, batches = mlp(64, 50, 50, 10)(device)
    la = work.fitted(model, batches, "all", "full")
    note = work.factorised(la, batches[0][0])
    rows, root = (torch.randn(n, _n_params(model), device=device) for n in (256 * 10, _n_params(model)))
    return Job(lambda _: work.predict(la, batches[:1]), lambda: rows @ root, note=note)


def _n_params(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# The network at sampled weights, against a plain loop that writes every sample into a copy of it.


def sampled(setting: Setting, n_data: int, structure: str, n_samples: int, device: torch.device) -> Job:
    """Means over samples; both draw the weights."""
    model, batches = setting(device)
    la, x, other = work.fitted(model, batches, "all", structure), batches[0][0][:n_data], copy.deepcopy(model)

    def plain() -> Tensor:
        outputs: list[Tensor] = []
        with torch.no_grad():
            for theta in la.sample(n_samples):
                vector_to_parameters(theta, other.parameters())
                outputs.append(other(x))
            return torch.stack(outputs).softmax(-1).mean(0)

    return Job(lambda _: la(x, pred_type="nn", link_approx="mc", n_samples=n_samples), plain)


def passes(setting: Setting, n_data: int, n_samples: int, device: torch.device) -> Job:
    """Outputs at weights that were drawn before."""
    model, batches = setting(device)
    la, x = work.fitted(model, batches, "all", "diag"), batches[0][0][:n_data]
    thetas, parameters = la.sample(n_samples), dict(model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]

    def plain() -> Tensor:
        outputs: list[Tensor] = []
        with torch.no_grad():
            for theta in thetas:
                pairs = zip(parameters.items(), theta.split(sizes), strict=True)
                tensors = {name: values.view_as(p) for (name, p), values in pairs}
                outputs.append(functional_call(model, tensors, (x,)))
        return torch.stack(outputs)

    def run(_: object) -> Tensor:
        with torch.no_grad():
            return outputs_at(la.problem, x, thetas, MEMORY_BUDGET)

    return Job(run, plain)


def drawn_functions(setting: Setting, n: int, weights: str, device: torch.device) -> Job:
    """Functions drawn from the posterior, evaluated together, against as many passes of the network."""
    model, batches = setting(device)
    la, x = work.fitted(model, batches, weights, "diag"), batches[0][0]
    functions = laplace.draw(la, n)
    return Job(lambda _: DrawnFunction.stacked(functions, x), torch.no_grad()(lambda: [model(x) for _ in range(n)]))


def influences(setting: Setting, n_queries: int, device: torch.device) -> Job:
    """Influence of all data of a fit on the loss at some of them."""
    model, batches = setting(device)
    la = work.fitted(model, batches, "all", "ekfac")
    x, y = (torch.cat(column)[:n_queries] for column in zip(*batches, strict=True))
    return Job(lambda _: laplace.influence(la, batches, x, y))


# Evidence and tuning.


def evidence_steps(la: ParametricLaplace, n_steps: int = 100) -> None:
    """Gradient ascent on log δ; an optimiser of torch would take a fifth of the time for itself."""
    log_prior = torch.zeros(1, device=la.expansion_point.device, requires_grad=True)
    for _ in range(n_steps):
        (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(log_prior.exp()), log_prior)
        with torch.no_grad():
            log_prior += 1e-4 * gradient


def evidence_of_few_data(device: torch.device) -> Job:
    """Fit and evidence of 64 inputs, whose factors of 784 and 256 inputs are held by their eigenpairs."""
    model, batches = mlp(784, 256, 128, 64, 10, n_data=64, batch=32)(device)
    matrix = torch.randn(784, 784, dtype=torch.float64, device=device)
    run = partial(work.fitted, model, batches, "all", "kron")
    return Job(lambda _: run().log_marginal_likelihood(), lambda: torch.linalg.eigh(matrix @ matrix.T))


def evidence_of_a_full_head(device: torch.device) -> Job:
    """P = 1,290; the factorisation counts, so every run has a fresh fit."""
    model, batches = mlp(64, 128, 128, 10)(device)
    return Job(evidence_steps, prepare=partial(work.fitted, model, batches, "last_layer", "full"))


def full_head_of_few_data(device: torch.device) -> Job:
    """Fit, evidence and probit predictions of P = 5,130 weights between the 900 rows of 100 inputs."""
    model, batches = mlp(64, 512, 10, n_data=100, batch=50)(device)
    rows = torch.randn(900, 900, dtype=torch.float64, device=device)
    square = rows @ rows.T

    def run(_: object) -> None:
        la = work.fitted(model, batches, "last_layer", "full")
        evidence_steps(la)
        work.predict(la, batches)

    return Job(run, lambda: torch.linalg.eigvalsh(square))


def evidence_of_lenet(structure: str, device: torch.device) -> Job:
    """All layers, P = 61,706; the factorisation comes first."""
    model, batches = LENET(device)
    la = work.fitted(model, batches, "all", structure)
    start = time.perf_counter()
    la.log_marginal_likelihood()
    note = f"factorisation {time.perf_counter() - start:.3f} s, not counted"
    return Job(lambda _: evidence_steps(la), note=note)


def evidence_of_many_weights(structure: str, device: torch.device) -> Job:
    """P = 1,462,538: beside the same steps by operations on whole tensors, which leave the cache."""
    model, batches = mlp(784, 1024, 512, 256, 10, n_data=256, batch=128)(device)
    la = work.fitted(model, batches, "all", structure)
    la.log_marginal_likelihood()
    eigenvalues, theta = torch.rand_like(la.expansion_point), la.expansion_point

    def plain() -> None:
        log_prior = torch.zeros(1, device=device, requires_grad=True)
        for _ in range(100):
            delta = log_prior.exp()
            value = -0.5 * ((eigenvalues / delta).log1p().sum() + (delta * theta.square().sum()).sum())
            torch.autograd.grad(value, log_prior)

    return Job(lambda _: evidence_steps(la), plain)


def candidates(setting: Setting, structure: str, device: torch.device) -> Job:
    """A grid of a hundred prior precisions on validation data, against a grid of one.

    By the negative log predictive density of probit predictions; random data may put the best on an edge.
    """
    model, batches = setting(device)
    la = work.fitted(model, batches, "last_layer", structure)

    def search(n: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TuningWarning)
            la.optimize_prior_precision(method="gridsearch", val_loader=batches, grid_size=n)

    return Job(lambda _: search(100), partial(search, 1))


# One structure beside another one on all layers.


def both_fits(setting: Setting, structures: tuple[str, str], device: torch.device) -> Job:
    """Fits alone."""
    model, batches = setting(device)
    run, other = (partial(work.fitted, model, batches, "all", name) for name in structures)
    return Job(lambda _: run(), other)


def both_fits_and_first(setting: Setting, structures: tuple[str, str], first: int, device: torch.device) -> Job:
    """Fits with the first prediction, which brings the factorisation; what both hold then is a note."""
    model, batches = setting(device)
    x = batches[0][0][:first]

    def run(name: str) -> ParametricLaplace:
        la = work.fitted(model, batches, "all", name)
        la(x)
        return la

    sizes = [work.held_bytes((la.fitted().curvature, la.posterior())) / 2**20 for la in map(run, structures)]
    note = f"held: {sizes[0]:.0f} MiB, {structures[1]} {sizes[1]:.0f} MiB, {sizes[0] / sizes[1]:.2f} of it"
    return Job(lambda _: run(structures[0]), partial(run, structures[1]), note=note)


def corrected(setting: Setting, device: torch.device) -> Job:
    """Truncated and corrected, against `ekfac`, whose eigenvalues they are; what both hold is a note."""
    model, batches = setting(device)
    low = partial(work.fitted, model, batches, "all", "lowrank_kron", structure_kwargs={"corrected": True})
    whole = partial(work.fitted, model, batches, "all", "ekfac")
    sizes = [work.held_bytes(run().fitted().curvature) / 2**20 for run in (low, whole)]
    return Job(lambda _: low(), whole, note=f"held: {sizes[0]:.0f} MiB, ekfac's {sizes[1]:.0f} MiB")


def both_calls(
    setting: Setting,
    structures: tuple[str, str],
    call: Callable[[ParametricLaplace, Batches], object],
    device: torch.device,
) -> Job:
    """A call on fits that are factorised already."""
    model, batches = setting(device)
    run, other = (work.fitted(model, batches, "all", name) for name in structures)
    for la in (run, other):
        call(la, batches)
    return Job(lambda _: call(run, batches), partial(call, other, batches))


def evidence_step(la: ParametricLaplace, _: Batches) -> None:
    """The evidence with its gradient."""
    evidence_steps(la, 1)


# Other packages' backends, where they compute a quantity themselves: below 1 the native one is faster. Every fit is by
# the public interface, the package's own share of it included: its copy of the network, its hooks, its conversions.

BACKEND_SETTINGS = {
    name: Setting(setting.make, setting.shape, 512, 128, setting.n_classes)
    for name, setting in {
        "MLP 50-100-10": mlp(50, 100, 10), "MLP 784-…-10": MLP, "LeNet 8×8": DIGITS, "LeNet 28×28": LENET,
        "MLP 20-10-3": mlp(20, 10, 3),
    }.items()
}  # fmt: skip
ALL = ("MLP 50-100-10", "MLP 784-…-10", "LeNet 8×8", "LeNet 28×28")
SMALL = ("MLP 50-100-10",)
BACKEND_WORK: list[tuple[str, str, tuple[str, ...]]] = [
    ("CurvlinopsGGN", "full", SMALL),
    ("CurvlinopsGGN", "kron", ALL),
    ("CurvlinopsGGN", "lowrank", ALL),
    ("CurvlinopsEF", "full", SMALL),
    ("CurvlinopsEF", "kron", ALL),
    ("CurvlinopsHessian", "full", ("MLP 20-10-3",)),
    ("BackPackGGN", "diag", ALL),
    ("BackPackGGN", "full", SMALL),
    ("BackPackGGN", "kron", ALL[:2]),
    ("BackPackEF", "diag", ALL),
    ("AsdlGGN", "diag", ALL),
    ("AsdlGGN", "full", SMALL),
    ("AsdlGGN", "kron", ALL),
    ("AsdlEF", "diag", ALL),
    ("AsdlEF", "kron", ALL),
    ("AsdlHessian", "full", ("MLP 20-10-3",)),
]


def backend_fit(name: str, structure: str, setting: Setting, device: torch.device) -> Job:
    """The native fit against that of a package's class."""
    model, batches = setting(device)
    kind = next(kind for kind in ("GGN", "EF", "Hessian") if name.endswith(kind))
    options: dict[str, Any] = {"structure_kwargs": {"indefinite": "clamp"}} if kind == "Hessian" else {}

    def run(cls: str) -> None:
        work.fitted(model, batches, "all", structure, backend=getattr(curvature, cls), **options)

    return Job(lambda _: run(f"Native{kind}"), partial(run, name))


def backend_cases() -> list[Case]:
    """The lines of the packages that are installed."""
    packages = {"Curvlinops": "curvlinops", "BackPack": "backpack", "Asdl": "asdl"}
    lines: list[Case] = []
    for cls, structure, names in BACKEND_WORK:
        package = next(package for prefix, package in packages.items() if cls.startswith(prefix))
        if importlib.util.find_spec(package) is not None:
            for name in names:
                job = partial(backend_fit, cls, structure, BACKEND_SETTINGS[name])
                lines.append(Case(f"{cls}, {structure} fit, {name}", 1.0, f"× {package}", job))
    return lines


# Adapters of low rank (LoRA; Hu et al., 2022) beside wide layers. Networks and data are random; what the posterior
# holds, and its first evidence, depend on their shapes alone.


def _with_adapters(model: nn.Module, targets: list[str], device: torch.device, **options: Any) -> nn.Module:
    """The model with adapters as if trained, of which no factor is zero; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own
        config = LoraConfig(r=8, target_modules=targets, init_lora_weights=False, **options)
        return get_peft_model(model, config).to(device).eval()


def gpt2_with_adapters(device: torch.device) -> nn.Module:
    """124 million weights, of which 294,912 are those of adapters of the attention's inputs."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    network = GPT2ForSequenceClassification(GPT2Config(pad_token_id=0))
    return _with_adapters(network, ["c_attn"], device, fan_in_fan_out=True)


def _llama(device: torch.device) -> nn.Module:
    """One layer with the attention of Llama-2-7B, adapters of queries and values; nothing else of it is as wide."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(num_hidden_layers=1, intermediate_size=64, vocab_size=100, pad_token_id=0)
    return _with_adapters(LlamaForSequenceClassification(config), ["q_proj", "v_proj"], device)


def _adapters(model: nn.Module) -> ParametricLaplace:
    """What a model with adapters gets by default, without the warning that says so."""
    return Laplace(model, "classification", "all", "lowrank_kron")


def _fitted_adapters(model: nn.Module, device: torch.device) -> ParametricLaplace:
    tokens = torch.randint(1, 100, (4, 32), generator=torch.Generator().manual_seed(0)).to(device)
    la = _adapters(model)
    la.fit([{"input_ids": tokens, "labels": torch.tensor([0, 1, 1, 0], device=device)}])
    return la


def gpt2_first_evidence(device: torch.device) -> Job:
    """Of a posterior that was loaded, and has computed nothing yet."""
    model = gpt2_with_adapters(device)
    state = _fitted_adapters(model, device).state_dict()

    def loaded() -> ParametricLaplace:
        fresh = _adapters(model)
        fresh.load_state_dict(state)
        return fresh

    return Job(lambda fresh: fresh.log_marginal_likelihood(), prepare=loaded)


def gpt2_state(device: torch.device) -> Job:
    """Bytes of the state."""
    model = gpt2_with_adapters(device)
    return Job(lambda _: _fitted_adapters(model, device), held=lambda la: work.held_bytes(la.state_dict()))


def llama_held(device: torch.device) -> Job:
    """The curvature of all 32 layers, of which one is measured."""
    model = _llama(device)

    def held(la: ParametricLaplace) -> int:
        return 32 * work.held_bytes(la.fitted().curvature.state())

    return Job(lambda _: _fitted_adapters(model, device), held=held, note="the curvature, 32 × one layer")


# The full curvature without its matrix. Networks are trained for a moment on labels that depend on the inputs: of a
# network at random the curvature is nothing that a preconditioner could miss.

_RESIDUAL = 1e-2


def _learnable(shape: tuple[int, ...], n_data: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs, and labels that a linear function of them says."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_data, *shape, generator=generator)
    return x.to(device), (x.flatten(1) @ torch.randn(x[0].numel(), 10, generator=generator)).argmax(1).to(device)


def _trained(model: nn.Module, x: Tensor, y: Tensor, n_steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(n_steps):
        part = slice(64 * step % len(x), 64 * step % len(x) + 64)
        optimizer.zero_grad()
        functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return model


def _matrix_free(model: nn.Module, x: Tensor, y: Tensor, size: int, **options: Any) -> ParametricLaplace:
    batches = list(zip(x.split(size), y.split(size), strict=True))
    return work.fitted(model, batches, "all", "matrix_free", structure_kwargs=options)


class _Reached(Exception):
    """Signal of a residual that is small enough."""


def products_to(product: cg.Linear, right: Tensor, precondition: cg.Linear, residual: float, most: int) -> int:
    """Products with blocks after which every residual ‖b − P x‖ is this share of ‖b‖; `most` if it takes as many."""
    norms: list[float] = []

    def noted(vectors: Tensor) -> Tensor:
        norms.append(float((vectors.norm(dim=1) / right.norm(dim=1)).max()))
        if norms[-1] <= residual:
            raise _Reached
        return precondition(vectors)

    with contextlib.suppress(_Reached):
        cg.solve(product, right, noted, relative=1e-30, max_iterations=most, verified=False)
    return len(norms) - 2  # the first two are of the right-hand side


def preconditioned(delta: float, device: torch.device) -> Job:
    """Not a time: the products that both take, as a note; the times are those of the same solutions."""
    x, y = _learnable((1, 8, 8), 100, device)
    la = _matrix_free(_trained(models.digits_lenet().to(device), x, y, 100), x, y, 50)
    la.prior_precision = delta
    precision: Any = la.posterior()
    ((jacobian, _),) = la.snapshot().engine.jacobian(x[:1])
    rows = jacobian.dense().flatten(0, 1)[:2].contiguous()
    sketched = partial(products_to, precision.product, rows, precision._preconditioned, _RESIDUAL)
    plain = partial(products_to, precision.product, rows, lambda v: v.clone(), _RESIDUAL)
    counts = sketched(600), plain(600)
    note = f"{counts[0]} products, {counts[1]} without a preconditioner: {counts[0] / counts[1]:.2f}"
    return Job(lambda _: sketched(counts[0]), lambda: plain(counts[1]), note=note)


def resnet_answers(device: torch.device) -> Job:
    """Four samples, and the variances of two inputs: 24 right-hand sides."""
    x, y = _learnable((3, 32, 32), 512, device)
    model = _trained(models.resnet20(10).to(device), x, y, 60)
    la = _matrix_free(model, x, y, 64, tolerance=_RESIDUAL, kept_bytes=int(2.4 * 2**30))

    def run(_: object) -> None:
        la.sample(4)
        la(x[:2])

    return Job(run, note=f"{_n_params(model):,} weights, prior precision 1")


def large_iterations(n_data: int, n_iterations: int, device: torch.device) -> Job:
    """A few products with two right-hand sides, and what is made of them: nothing converges."""
    x, y = _learnable((3, 32, 32), n_data, device)
    options = {"tolerance": _RESIDUAL, "max_iterations": n_iterations, "kept_bytes": 0, "rank": 0}
    la = _matrix_free(models.resnet20(102).to(device), x, y, 16, **options)
    rows = torch.randn(2, la.n_params or 0, generator=torch.Generator().manual_seed(0)).to(device)

    def run(_: object) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return la.posterior().solve(rows)

    return Job(run, note=f"{la.n_params:,} weights")


# Memory of a fit, against what `la.plan` says before it.


def planned_fit(setting: Setting, structure: str, device: torch.device) -> Job:
    """A fit of all layers; low rank without power iterations, which take time and no memory."""
    model, batches = setting(device)
    options: dict[str, Any] = {"structure_kwargs": {"power_iterations": 0}} if structure == "lowrank" else {}
    made = partial(from_names, model, "classification", "all", structure, **options)
    return Job(lambda _: made().fit(batches), planned=lambda: made().plan(batches).peak_bytes)


def vocabulary(structure: str, device: torch.device) -> Job:
    """The head of a GPT-2 with 50,257 outputs at each of 4 × 64 positions, of which no matrix between outputs is made.

    The fit, and predictions: probabilities of all tokens, and of ten with their covariances.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config())
    model.to(device).eval()
    ids = torch.randint(model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0)).to(device)
    batch = {"input_ids": ids, "labels": ids}
    made = partial(from_names, model, "classification", "last_layer", structure)

    def run() -> None:
        la = made()
        la.fit([batch])
        la({"input_ids": ids})
        la({"input_ids": ids}, link_approx="mc", outputs=10)

    def planned() -> int:
        plan = made().plan([batch])
        return max(plan.peak_bytes, plan.kept_bytes + plan.predict_bytes)

    return Job(lambda _: run(), planned=planned)


# The import of the library, and a first fit, beside the import of torch, each in a process of its own.

# Both go through the objects that torch leaves once, as Python does sooner or later: within the library's import or
# after it, whichever module comes next.
_TORCH = "import gc, torch; gc.collect()"
_IMPORT = "from laplace import Laplace"
_FIT = f"""{_IMPORT}
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
x = torch.randn(100, 16)
la = Laplace(model, "classification")
la.fit([(x, torch.arange(100) % 10)])
la(x)
"""


def beside_torch(script: str, device: torch.device) -> Job:
    """Bytecode is there from the run that does not count."""
    del device

    def python(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)

    return Job(lambda _: python(f"{_TORCH}; {script}"), partial(python, _TORCH))


# The table.


def all_cases() -> list[Case]:
    """Every line, in order."""
    return [
        *_last_layers(),
        *_all_layers(),
        *_evidence_and_tuning(),
        *backend_cases(),
        *_pairs_of_structures(),
        *_large(),
        *several_processes.cases(),
        *_memory(),
        *(
            Case(name, target, "× import torch", partial(beside_torch, script), in_other_processes=True)
            for name, target, script in (
                ("import laplace", 1.08, _IMPORT),
                ("import, first fit, prediction", 1.25, _FIT),
            )
        ),
    ]


def _last_layers() -> list[Case]:
    lines: list[Case] = []
    unit = "× forward"

    def add(name: str, target: float, make: Any, setting: Setting, structure: str) -> None:
        lines.append(Case(name, target, unit, partial(make, setting, "last_layer", structure, unit)))

    for structure in ("kron", "diag"):
        add(f"last layer, WRN-16-4, {structure} fit", 1.1, fit, WRN, structure)
        add(f"last layer, WRN-16-4, {structure} probit", 1.1, probit, WRN, structure)
    add("last layer, C=200, kron fit", 4, fit, mlp(64, 512, 512, 200, n_data=4096), "kron")
    for structure in ("kron", "diag"):
        add(f"last layer, C=200, {structure} probit", 3, probit, mlp(64, 512, 512, 200), structure)
    for structure in ("kron", "diag"):
        job = partial(fit_and_probit, mlp(64, 768, 3100), structure)
        lines.append(Case(f"last layer, C=3100, {structure} fit and probit", 1, "GiB", job))
    small = mlp(64, 256, 256, 10, n_data=4096)
    add("full last layer, MLP 64-256-256-10, fit", 25, fit, small, "full")
    add("full last layer, MLP 64-256-256-10, probit", 8, probit, small, "full")
    return lines


def _all_layers() -> list[Case]:
    lines: list[Case] = []

    def add(name: str, target: float, make: Any, setting: Setting, structure: str, unit: str = "× R") -> None:
        lines.append(Case(name, target, unit, partial(make, setting, "all", structure, unit)))

    names = {"LeNet 28×28": LENET, "LeNet 8×8": DIGITS, "MLP 784-…-10": MLP}
    for structure, lenet in (("kron", 1.5), ("diag", 2.0)):
        for (name, setting), target in zip(names.items(), (lenet, lenet, 1.1), strict=True):
            add(f"all layers, {name}, {structure} fit", target, fit, setting, structure)
    for structure, target in (("kron", 1.3), ("diag", 1.6)):
        add(f"all layers, encoder, {structure} fit", target, fit, ENCODER, structure)
        add(f"all layers, residual, {structure} fit", 1.2, fit, RESIDUAL, structure)
    many = Setting(MLP.make, MLP.shape, 4096, 128)
    add("all layers, MLP 784-…-10, batches of 128", 8.5, fit, many, "diag", "× forward")
    for structure in ("kron", "diag"):
        for (name, setting), target in zip(names.items(), (2.5, 2.5, 2.0), strict=True):
            add(f"all layers, {name}, {structure} probit", target, probit, setting, structure)
    lines.append(Case("all layers, MLP 64-50-50-10, full fit", 0.15, "× GEMM", full_ggn))
    lines.append(Case("all layers, MLP 64-50-50-10, full probit", 0.2, "× GEMM", full_probit))
    for structure in ("kron", "diag"):
        small = Setting(ENCODER.make, (8, 64), 800, 8, 5)
        add(f"small batches, encoder, {structure} fit", 2.0, fit, small, structure)
    lines.append(Case("200 predictions of one datum", 0.18, "s", partial(one_input, 200)))
    for structure, size, target in (
        ("diag", 100, 1.0), ("diag", 1000, 1.0), ("diag", 10_000, 1.0), ("full", 100, 1.0), ("full", 1000, 2.0),
    ):  # fmt: skip
        for what, predict in (("fit", False), ("probit", True)):
            job = partial(subnetwork, structure, size, predict)
            lines.append(Case(f"subnetwork, {size} of 1.5 M, {structure} {what}", target, "× R", job))
    small, wide = mlp(16, 32, 32, 10, n_data=64, batch=64), mlp(784, 256, 128, 64, 10, n_data=64, batch=64)
    digits = Setting(models.digits_lenet, (1, 8, 8), 64, 64)
    lines.append(
        Case("nn, 1000 samples, small MLP, 10 data, passes", 0.05, "× calls", partial(passes, small, 10, 1000))
    )
    for name, setting, n_data, structure, n_samples, target in (
        ("small MLP, 10 data", small, 10, "kron", 1000, 0.5),
        ("small MLP, 10 data", small, 10, "diag", 1000, 0.3),
        ("LeNet 8×8, 64 data", digits, 64, "kron", 50, 1.1),
        ("LeNet 8×8, 64 data", digits, 64, "diag", 50, 1.1),
        ("MLP 784-…, 32 data", wide, 32, "kron", 50, 1.1),
    ):
        job = partial(sampled, setting, n_data, structure, n_samples)
        lines.append(Case(f"nn, {n_samples} samples, {name}, {structure}", target, "× loop", job))
    for n, batch, weights, target in ((1, 4096, "all", 3.2), (1, 4096, "last_layer", 1.2), (16, 32, "all", 3.0)):
        job = partial(drawn_functions, mlp(784, 256, 128, 64, 10, n_data=batch, batch=batch), n, weights)
        name = "drawn function" if n == 1 else f"{n} drawn functions, {batch} data"
        lines.append(Case(f"{name}, MLP 784-…, {weights}", target, "× pass", job))
    pairs = partial(influences, mlp(784, 256, 10, n_data=5000, batch=250), 500)
    lines.append(Case("influence of 5,000 data on 500 queries, MLP 784-256-10, ekfac", 60.0, "s", pairs))
    return lines


def _evidence_and_tuning() -> list[Case]:
    small = mlp(64, 512, 512, 10)
    return [
        Case("Kron fit and evidence, MLP 784-…-10, 64 data", 0.5, "× eigh of 784²", evidence_of_few_data),
        Case("100 evidence steps, full last layer, P=1290", 0.4, "s", evidence_of_a_full_head),
        Case(
            "full last layer, P=5130, 100 data: fit, evidence, probit", 6, "× eigvalsh of 900²", full_head_of_few_data
        ),
        Case("100 evidence steps, LeNet 28×28, kron", 0.02, "s", partial(evidence_of_lenet, "kron")),
        Case("100 evidence steps, LeNet 28×28, diag", 0.023, "s", partial(evidence_of_lenet, "diag")),
        Case(
            "100 evidence steps, MLP 784-1024-512-256-10, diag",
            0.5,
            "× whole tensors",
            partial(evidence_of_many_weights, "diag"),
        ),
        Case(
            "100 evidence steps, MLP 784-1024-512-256-10, kron",
            0.5,
            "× whole tensors",
            partial(evidence_of_many_weights, "kron"),
        ),
        *(
            Case(f"100 candidates, last layer, WRN-16-4, {name}", 2, "× one", partial(candidates, WRN, name))
            for name in ("kron", "diag", "full")
        ),
        Case("100 candidates, last layer, small MLP, kron", 5, "× one", partial(candidates, small, "kron")),
    ]


def _pairs_of_structures() -> list[Case]:
    wide, low = "MLP 1024-2048-2048-2048-10", "lowrank_kron, MLP 784-1024-1024-10"
    lines: list[Case] = []
    for name in ("lowrank_kron", "diag"):
        pair = (name, "kron")
        lines += [
            Case(f"{wide}, {name} fit", 1, "× kron", partial(both_fits_and_first, WIDE, pair, 1)),
            Case(f"{wide}, {name} probit", 1, "× kron", partial(both_calls, WIDE, pair, work.predict)),
        ]
    pair = ("lowrank_kron", "kron")
    return [
        *lines,
        Case(f"{wide}, lowrank_kron evidence", 20, "× kron", partial(both_calls, WIDE, pair, evidence_step)),
        Case(f"{low}, fit", 1.0, "× kron", partial(both_fits, TRUNCATED, pair)),
        Case(f"{low}, fit and first probit", 1.0, "× kron", partial(both_fits_and_first, TRUNCATED, pair, 256)),
        Case(f"{low}, probit", 1.0, "× kron", partial(both_calls, TRUNCATED, pair, work.predict)),
        Case(f"{low}, evidence step", 5.0, "× kron", partial(both_calls, TRUNCATED, pair, evidence_step)),
        Case("lowrank_kron corrected, MLP 784-1024-1024-10, fit", 1.0, "× ekfac", partial(corrected, TRUNCATED)),
    ]


def _large() -> list[Case]:
    return [
        Case("GPT-2 with LoRA, first evidence", 2.0, "s", gpt2_first_evidence),
        Case("GPT-2 with LoRA, state", 10.0, "MiB", gpt2_state),
        Case("Llama-2-7B with LoRA, held", 80.0, "MiB", llama_held),
        *(
            Case(f"solutions, LeNet 8×8, 100 data, δ = {delta}, time", 1, "× plain CG", partial(preconditioned, delta))
            for delta in (0.01, 1)
        ),
        Case("4 samples and variances at 2 inputs, ResNet 0.1 M, 512 images", 600, "s", resnet_answers),
        Case("2 right-hand sides, 3 iterations, ResNet 11 M, 64 images", 8, "GiB", partial(large_iterations, 64, 3)),
    ]  # fmt: skip


def _memory() -> list[Case]:
    small = {"block": mlp(100, 60, 10, n_data=256, batch=64), "full": mlp(48, 80, 15, 10, n_data=256, batch=64)}
    lines = [
        Case(f"small MLP, {name} fit", 6.0, "GiB", partial(planned_fit, setting, name))
        for name, setting in small.items()
    ]
    for structure in ("diag", "kron", "lowrank", "ekfac", "lowrank_kron"):  # low rank of a single batch
        setting = Setting(models.resnet50, (3, 32, 32), 8 if structure == "lowrank" else 16, 8, 100)
        lines.append(Case(f"ResNet-50, C=100, {structure} fit", 6.0, "GiB", partial(planned_fit, setting, structure)))
    for structure, target in (("diag", 2.0), ("lowrank_kron", 6.0)):
        name = f"GPT-2, C=50,257, last-layer {structure}"
        lines.append(Case(name, target, "GiB added", partial(vocabulary, structure)))
    return lines
