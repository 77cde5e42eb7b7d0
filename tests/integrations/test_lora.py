"""Adapters of low rank: the default for them, what it holds, and how far it is from exact Kronecker factors."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace import KronLaplace, KronLLLaplace, Laplace, LowRankKronLaplace
from laplace.errors import ApproximationWarning, InvalidArgument
from tests import grid
from tests.reference.compare import assert_close

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the packages' own, on import
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

VOCABULARY = 11


def adapted(n_labels: int = 3, width: int = 32, rank: int = 4) -> Any:
    """A GPT-2 of one layer, frozen but for adapters of its attention that have learnt something."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=width, n_layer=1, n_head=2, num_labels=n_labels, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    lora = peft.LoraConfig(r=rank, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about an attribute that peft reads
        return peft.get_peft_model(transformers.GPT2ForSequenceClassification(config), lora).double().eval()


def batch(n_data: int, n_tokens: int, n_labels: int = 3) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (n_data, n_tokens), generator=source)
    return {"input_ids": tokens, "labels": torch.randint(n_labels, (n_data,), generator=source)}


def fitted(model: nn.Module, data: Any, structure: str, **options: Any) -> Any:
    la = Laplace(model, "classification", "all", structure, **options)
    la.fit([data])
    return la


def exact_blocks(model: nn.Module, data: Any) -> list[Tensor]:
    """The Kronecker product of every tensor, multiplied out."""
    return [torch.kron(left, right) for left, right in fitted(model, data, "kron").H_facs.kfacs]


# The default.


@pytest.mark.parametrize("native", [False, True])
def test_the_default_of_a_model_with_adapters(native: bool) -> None:
    """Whether PEFT wraps the model or transformers itself adds the adapters."""
    if native:
        model = adapted().base_model.model
        assert not isinstance(model, peft.PeftModel)
    else:
        model = adapted()
    with pytest.warns(ApproximationWarning, match="all trainable weights.*'lowrank_kron'") as said:
        la = Laplace(model, "classification")
    assert len(said) == 1
    assert type(la) is LowRankKronLaplace
    la.fit([batch(5, 4)])  # no further warning
    assert la.n_params == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert all("lora" in name for name in la.coverage())


def test_what_is_given_is_taken_literally() -> None:
    model = adapted()
    assert type(Laplace(model, "classification", "all")) is KronLaplace
    assert type(Laplace(model, "classification", subset_of_weights="last_layer")) is KronLLLaplace
    assert type(Laplace(model, "classification", hessian_structure="kron")) is KronLLLaplace


def test_other_models_have_the_default_of_before() -> None:
    assert type(Laplace(grid.network(), "classification")) is KronLLLaplace
    merged = adapted().merge_and_unload()
    assert type(Laplace(merged, "classification")) is KronLLLaplace


def test_adapters_that_were_loaded_for_inference_say_how_to_train_them() -> None:
    model = adapted().requires_grad_(False)
    with pytest.warns(ApproximationWarning), pytest.raises(InvalidArgument, match="is_trainable=True"):
        Laplace(model, "classification")


def test_idle_adapters_are_refused_by_the_default() -> None:
    """Merged into their layers or switched off they have no gradients: variances would lack them in silence."""
    model = adapted()
    model.merge_adapter()
    with pytest.raises(InvalidArgument, match="merged into their layers"):
        Laplace(model, "classification")
    assert type(Laplace(model, "classification", "all")) is KronLaplace
    model.unmerge_adapter()
    with model.disable_adapter(), pytest.raises(InvalidArgument, match="switched off"):
        Laplace(model, "classification")
    with pytest.warns(ApproximationWarning):
        Laplace(model, "classification")


# Against exact Kronecker factors.


@pytest.mark.parametrize(("oversampling", "accuracy"), [(100, 1e-8), (10, 0.02)])
def test_what_is_kept_is_the_dominant_part_of_the_exact_product(oversampling: int, accuracy: float) -> None:
    """What is left out are the eigenvalues that are cut; wide sides, which are never formed, are searched."""
    model, data, rank = adapted(), batch(20, 6), 4
    options = {"rank": rank, "oversampling": oversampling}
    held = fitted(model, data, "lowrank_kron", structure_kwargs=options).fitted().curvature
    for columns, exact in zip(held.columns, exact_blocks(model, data), strict=True):
        eye = torch.eye(len(columns), dtype=torch.float64)
        vectors = columns.combined(eye)
        assert_close(vectors @ vectors.T, eye, "backend")
        cut = torch.linalg.eigvalsh(exact - (vectors.T * columns.values[0]) @ vectors)
        values = torch.linalg.eigvalsh(exact).flip(0)
        assert values[rank] > 0.1 * values[0]  # much is cut
        assert cut[0] > -accuracy * values[0]
        assert cut[-1] < (1 + accuracy) * values[rank]
        assert abs(cut.sum() / values[rank:].sum() - 1) < accuracy


@pytest.mark.parametrize("rank", [2, 5, 10])
def test_predictions_and_evidence_differ_by_what_is_cut(rank: int) -> None:
    """Of one token Kronecker factors are exact: with C = K − K_k, ‖H − K‖ = ‖diag C − C‖ ≤ λ_(k+1), at most 2 tr C."""
    n_labels, delta = 8, 0.5
    model, data = adapted(n_labels), batch(1, 1, n_labels)
    options = {"prior_precision": delta}
    exact = fitted(model, data, "kron", **options)
    la = fitted(model, data, "lowrank_kron", structure_kwargs={"rank": rank}, **options)
    values = [torch.linalg.eigvalsh(block).flip(0) for block in exact_blocks(model, data)]
    x = {"input_ids": data["input_ids"]}
    jacobian = la.backend.jacobians(x)[0]
    pieces = jacobian.split([len(v) for v in values], -1)
    bound = sum(v[rank] * piece.square().sum(-1) / delta**2 for v, piece in zip(values, pieces, strict=True))
    moved = [one.functional_variance(jacobian).diagonal(dim1=1, dim2=2) for one in (la, exact)]
    rounding = 1e-8 * moved[1].max()
    assert ((moved[0] - moved[1]).abs() <= bound + rounding).all()
    evidence = [one.log_marginal_likelihood() for one in (la, exact)]
    left_out = sum(v[rank:].clamp(min=0).sum() for v in values)
    assert (evidence[0] - evidence[1]).abs() <= left_out / delta + 1e-8
    if rank >= n_labels:  # nothing is cut
        assert_close(moved[0], moved[1], "backend")
        assert_close(evidence[0], evidence[1], "backend")
    else:
        assert (moved[0] - moved[1]).abs().max() > rounding


# What is held.


class Adapters(nn.Module):
    """Two adapters as wide as the queries and values of Llama-2-7B; the frozen layers beside them add nothing here."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(2))
        self.head = nn.Linear(width, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for down, up in zip(self.down, self.up, strict=True):
            x = x + torch.tanh(up(down(x)))
        return self.head(x.mean(1))


class Largest(TorchDispatchMode):
    """Notes the number of entries of the largest tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            self.numel = max(self.numel, value.numel() if isinstance(value, Tensor) else 0)
        return result


def n_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(n_bytes, value.values())) if isinstance(value, dict) else 0


def test_llama_holds_eighty_megabytes_and_no_factor_is_formed() -> None:
    """Of one of 32 layers: 4 tensors of 8 × 4,096, whose wide factors would be 4,096². Sums are kept in float64."""
    width, n_layers = 4096, 32
    torch.manual_seed(0)
    model, x = Adapters(width, 8), torch.randn(4, 8, width)
    with Largest() as largest:
        la = fitted(model, (x, torch.tensor([0, 1, 1, 0])), "lowrank_kron")
        la.log_marginal_likelihood()
        la(x)
    assert largest.numel < width**2 / 16
    state = la.fitted().curvature.state()
    held = n_layers * n_bytes(state)
    assert held <= 80 * 2**20
    planned = n_layers * la.plan([(x, torch.tensor([0, 1, 1, 0]))]).kept_bytes
    assert 0.9 * held <= planned <= 1.5 * held


def test_a_posterior_of_adapters_is_saved_and_loaded() -> None:
    model, data = adapted(), batch(6, 5)
    la = fitted(model, data, "lowrank_kron")
    with pytest.warns(ApproximationWarning):
        other = Laplace(copy.deepcopy(model), "classification")
    other.load_state_dict(la.state_dict())
    assert torch.equal(la(data), other(data))
