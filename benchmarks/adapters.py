"""Adapters of low rank (LoRA; Hu et al., 2022) beside wide layers: GPT-2 small, and one layer of Llama-2-7B.

Networks and data are random; what the posterior holds, and its first evidence, depend on their shapes alone.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import work
from benchmarks.timing import Case, Job
from laplace import Laplace, ParametricLaplace

_RANK, _LLAMA_LAYERS = 8, 32
Batch = dict[str, Tensor]


def _with_adapters(model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    """The model with trained-like adapters, of which no factor is zero; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own
        return get_peft_model(model, LoraConfig(r=_RANK, target_modules=targets, init_lora_weights=False, **options))


def _gpt2(device: torch.device) -> nn.Module:
    """124 million weights, of which 294,912 are those of adapters of the attention's inputs."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    network = GPT2ForSequenceClassification(GPT2Config(pad_token_id=0))
    return _with_adapters(network, ["c_attn"], fan_in_fan_out=True).to(device).eval()


def _llama(device: torch.device) -> nn.Module:
    """One layer with the attention of Llama-2-7B, adapters of queries and values; nothing else of it is as wide."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(num_hidden_layers=1, intermediate_size=64, vocab_size=100, pad_token_id=0)
    return _with_adapters(LlamaForSequenceClassification(config), ["q_proj", "v_proj"]).to(device).eval()


def _batch(n_tokens: int, device: torch.device) -> Batch:
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 100, (4, n_tokens), generator=source).to(device)
    return {"input_ids": tokens, "labels": torch.tensor([0, 1, 1, 0], device=device)}


def _new(model: nn.Module) -> ParametricLaplace:
    """What a model with adapters gets by default, without the warning that says so."""
    return Laplace(model, "classification", "all", "lowrank_kron")


def _fitted(model: nn.Module, device: torch.device) -> ParametricLaplace:
    la = _new(model)
    la.fit([_batch(32, device)])
    return la


def _first_evidence(device: torch.device) -> Job:
    """Of a posterior that was loaded, and has computed nothing yet."""
    model = _gpt2(device)
    state = _fitted(model, device).state_dict()

    def loaded() -> ParametricLaplace:
        fresh = _new(model)
        fresh.load_state_dict(state)
        return fresh

    return Job(lambda fresh: fresh.log_marginal_likelihood(), prepare=loaded)


def _gpt2_state(device: torch.device) -> Job:
    model = _gpt2(device)
    return Job(lambda _: _fitted(model, device), held=lambda la: work.held_bytes(la.state_dict()))


def _llama_held(device: torch.device) -> Job:
    """The curvature of all layers, of which one is measured."""
    model = _llama(device)

    def held(la: ParametricLaplace) -> int:
        return _LLAMA_LAYERS * work.held_bytes(la.fitted().curvature.state())

    return Job(lambda _: _fitted(model, device), held=held, note="the curvature, 32 × one layer")


def cases() -> list[Case]:
    """The lines of the table."""
    return [
        Case("GPT-2 with LoRA, first evidence", 2.0, "s", _first_evidence),
        Case("GPT-2 with LoRA, state", 10.0, "MiB", _gpt2_state),
        Case("Llama-2-7B with LoRA, held", 50.0, "MiB", _llama_held),
    ]
