"""What new users do wrong: each mistake gives the right number, or an error or a warning of the library that says what
to do.

One row a mistake. An error or a warning names the argument (or batch) and the remedy; what is no mistake to the library
is compared with a dense oracle in float64. At most three rows end in an error of PyTorch or Python.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import laplace
from laplace import Laplace, MixtureLaplace, curvature, marglik_training
from laplace.core.memory import Available
from laplace.errors import (
    ApproximationWarning,
    CurvatureError,
    DataWarning,
    GradientWarning,
    InvalidArgument,
    InvalidCall,
    InvalidData,
    InvalidInputs,
    InvalidType,
    LaplaceError,
    LaplaceWarning,
    ModelChangedError,
    NotFittedError,
    OutOfMemory,
    StateError,
    TuningWarning,
    UnsupportedError,
)
from laplace.metrics import nll
from laplace.weights.masks import LargestMagnitudeSubnetMask
from tests.mistaken import (
    IMAGES,
    WIDE,
    XR,
    Y1,
    YR,
    AlwaysDropped,
    B,
    C,
    FixedBody,
    Listed,
    Matrix,
    Net,
    NoGrad,
    OwnLinear,
    R,
    Sines,
    Switched,
    TwoHeads,
    Unused,
    WithLabels,
    X,
    Y,
    conv,
    fit,
    fitted,
    net,
    new,
    tiny_gpt2,
    tiny_t5,
    words,
)
from tests.reference import curvature as reference
from tests.reference import predictive
from tests.reference.compare import assert_close


@dataclass(frozen=True)
class Row:
    """A mistake.

    Attributes:
        run: Makes it.
        outcome: The error or warning.
        words: What the message says: the argument or batch, and the remedy.
    """

    run: Callable[[], Any]
    outcome: type[Exception]
    words: tuple[str, ...]


def row(outcome: type[Exception], run: Callable[[], Any], *words: str) -> Row:
    return Row(run, outcome, words)


def changed(la: Any, change: Callable[[Any], Any]) -> Any:
    """A fitted posterior after a change of its model."""
    with torch.no_grad():
        change(la.model)
    return la


def pair(la: Any, *others: Any) -> Any:
    return la, *others


def switched() -> Any:
    la = fitted(Switched())
    la.model.enabled = False
    return la(X)


def of_two_processes() -> None:
    with (
        mock.patch("torch.distributed.is_available", return_value=True),
        mock.patch("torch.distributed.is_initialized", return_value=True),
        mock.patch("torch.distributed.get_world_size", return_value=2),
        mock.patch("torch.distributed.get_rank", return_value=0),
    ):
        fit(X, Y)


def without_memory() -> None:
    """The curvature of 14,003 weights, of no fewer rows, takes 1.5 GiB; the machine is said to have 1 MiB."""
    wide = nn.Sequential(nn.Linear(3, 2000), nn.Tanh(), nn.Linear(2000, 3))
    with mock.patch("laplace.large_fits.planning.available", return_value=Available(2**20, "a test")):
        fit(X.repeat(600, 1), Y.repeat(600), wide)


def hidden_hook() -> type:
    class Own(laplace.FullLaplace):
        def _check_jacobians(self, Js: Tensor) -> Any:
            return None

    return Own


def without_rule() -> None:
    """Most weights of a Kronecker-factored posterior are held by their diagonal."""
    fit_kron(nn.Sequential(nn.Linear(3, 40), Sines(40), nn.Linear(40, 3)))


def by_name() -> Any:
    """A posterior whose network is given a mapping."""
    la = new(words(), forward_fn=lambda model, x: model(x["ids"]))
    la.fit([{"ids": torch.randint(5, (12, 2)), "labels": Y}])
    return la


def fit_kron(model: nn.Module) -> Any:
    la = new(model, structure="kron")
    la.fit([(X, Y)])
    return la


def of_prompts() -> Any:
    """A prompt of three learned positions before the tokens."""
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that transformers renames
        return peft.get_peft_model(tiny_gpt2(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def ambiguous_layout() -> None:
    model = nn.Conv2d(3, 4, 3, padding=1)
    new(model).fit([(torch.randn(2, 3, 4, 4), torch.randint(4, (2, 4, 4)))])


LOADING: dict[str, Row] = {
    "targets beside the inputs": row(InvalidType, lambda: new().fit(X, Y), "override", "la.fit([(X, Y)])"),
    "targets beside a loader": row(InvalidType, lambda: new().fit([(X, Y)], Y), "override", "DataLoader"),
    "validation data at fit": row(InvalidType, lambda: new().fit([(X, Y)], [(X, Y)]), "override", "val_loader"),
    "None for override": row(InvalidType, lambda: new().fit([(X, Y)], None), "override", "True or False"),
    "targets beside, GP": row(
        InvalidType, lambda: new(structure="gp", n_subset=3).fit(X, Y), "override", "la.fit([(X, Y)])"
    ),
    "a pair for a loader": row(InvalidData, lambda: new().fit((X, Y)), "[(x, y)]"),
    "a tensor for a loader": row(InvalidType, lambda: new().fit(X), "train_loader", "[(x, y)]"),
    "a mapping for a loader": row(InvalidType, lambda: new().fit({"x": X, "y": Y}), "train_loader", "[(x, y)]"),
    "a path for a loader": row(InvalidType, lambda: new().fit("data.csv"), "train_loader", "DataLoader"),
    "a data set for a loader": row(InvalidData, lambda: new().fit(TensorDataset(X, Y)), "DataLoader(dataset"),
    "a data set for a loader, regression": row(
        InvalidData, lambda: new(net(1), R).fit(TensorDataset(XR, Y1)), "batch 0", "DataLoader"
    ),
    "batch_size=None": row(
        InvalidData, lambda: new().fit(DataLoader(TensorDataset(X, Y), batch_size=None)), "batch_size=..."
    ),
    "rows of tensors zipped": row(InvalidData, lambda: new().fit(zip(X, Y, strict=True)), "DataLoader"),
    "an enumerated loader": row(InvalidData, lambda: new().fit(enumerate([(X, Y)])), "targets", "tuple"),
    "an exhausted loader": row(InvalidData, lambda: new().fit(iter(())), "loader", "at least one datum"),
    "no data": row(InvalidData, lambda: new(weights="last_layer").fit([]), "loader", "at least one datum"),
    "an empty batch": row(InvalidData, lambda: fit(X[:0], Y[:0]), "batch 0", "no data"),
    "inputs without targets": row(InvalidData, lambda: new().fit(DataLoader(TensorDataset(X), 5)), "pairs (x, y)"),
    "another key than labels": row(
        InvalidData, lambda: new().fit([{"x": X, "y": Y}]), "batch 0", "dict_key_y", "['x', 'y']"
    ),
    "a mapping for a plain network": row(
        InvalidInputs, lambda: new(dict_key_y="y").fit([{"x": X, "y": Y}]), "batch 0", "['x', 'y']", "model(x['x'])"
    ),
    "a mapping whose targets come first": row(
        InvalidInputs, lambda: new().fit([{"labels": Y, "x": X}]), "batch 0", "['labels', 'x']", "model(x['x'])"
    ),
    "lists of a tokenizer": row(
        InvalidInputs, lambda: by_name()({"ids": [[1, 2], [3, 4]]}), "under ['ids'] are lists", "return_tensors='pt'"
    ),
    "a tensor for a mapping": row(
        InvalidInputs, lambda: by_name()(torch.ones(2, 2).long()), "[2, 2]", "forward_fn takes a part", "la({'x': x})"
    ),
    "a third part in batches": row(
        InvalidInputs, lambda: new().fit([(X, Y, torch.arange(12))]), "batch 0", "forward(input)", "(x1, …, y)"
    ),
    "a later batch of another width": row(
        InvalidInputs, lambda: new().fit([(X, Y), (WIDE, Y)]), "batch 1", "[12, 4]", "[B, …, 3]"
    ),
    "validation data of another width": row(
        InvalidInputs,
        lambda: fitted().optimize_prior_precision(method="gridsearch", val_loader=[(WIDE, Y)]),
        "validation batch 0", "[12, 4]", "[B, …, 3]",
    ),
    "a shard in every process": row(LaplaceWarning, of_two_processes, "process", "shard"),
    "another key, caught as KeyError": row(
        KeyError, lambda: new().fit([{"x": X, "y": Y}]), "batch 0", "dict_key_y"
    ),
    "a plan of targets": row(InvalidCall, lambda: new().plan(X, Y), "plan()", "train_loader"),
}  # fmt: skip

INPUTS: dict[str, Row] = {
    "x of a wrong width": row(
        InvalidInputs, lambda: fit(WIDE, Y), "batch 0", "layer '0'", "in_features=3", "[12, 4]", "[B, …, 3]"
    ),
    "x of a wrong width, last layer": row(
        InvalidInputs, lambda: fit(WIDE, Y, weights="last_layer"), "batch 0", "[12, 4]", "[B, …, 3]"
    ),
    "x of a wrong width, predicted": row(InvalidInputs, lambda: fitted()(WIDE), "[12, 4]", "[B, …, 3]"),
    "x of a wrong width, sampled": row(InvalidInputs, lambda: fitted()(WIDE, "nn"), "[12, 4]", "[B, …, 3]"),
    "x of a wrong width, without layers": row(
        InvalidInputs, lambda: fit(WIDE, Y, Matrix()), "batch 0", "[12, 4]", "size on which the network was trained"
    ),
    "float64 data": row(
        InvalidInputs, lambda: fit(X.double(), Y), "batch 0", "torch.float64", "x.float()", "model.double()"
    ),
    "float64 data, without layers": row(
        InvalidInputs, lambda: fit(X.double(), Y, Matrix()), "batch 0", "torch.float64", "x.float()", "model.double()"
    ),
    "float64 data predicted": row(InvalidInputs, lambda: fitted()(X.double()), "torch.float64", "x.float()"),
    "integer data": row(InvalidInputs, lambda: fit(X.long(), Y), "batch 0", "torch.int64", "x.float()"),
    "bytes of images": row(
        InvalidInputs, lambda: fit(IMAGES.to(torch.uint8), Y, conv()), "batch 0", "torch.uint8", "x.float()"
    ),
    "float32 data, half network": row(
        InvalidInputs, lambda: fit(X, Y, net().half()), "batch 0", "torch.float16", "x.half()", "model.float()"
    ),
    "words as floats": row(
        InvalidInputs, lambda: fit(torch.zeros(12, 2), Y, words()), "batch 0", "Embedding", "x.long()"
    ),
    "words of another vocabulary": row(
        InvalidInputs, lambda: fit(torch.full((12, 2), 7), Y, words()), "batch 0", "Embedding", "from 0 to 4"
    ),
    "channels last": row(
        InvalidInputs, lambda: fit(IMAGES.movedim(1, -1), Y, conv()), "batch 0", "[B, 3, …]", "movedim(-1, 1)"
    ),
    "one image": row(
        InvalidInputs,
        lambda: pair(la := new(conv()), la.fit([(IMAGES, Y)]))[0](IMAGES[0]),
        "[3, 8, 8]", "with the batch first",
    ),
    "one datum": row(InvalidData, lambda: fitted()(X[0]), "inputs of shape [3]", "x.unsqueeze(0)"),
    "a list of numbers": row(InvalidData, lambda: fitted()(X.tolist()), "type list", "torch.as_tensor"),
    "an array": row(InvalidData, lambda: fitted()(X.numpy()), "type ndarray", "torch.as_tensor"),
    "a text": row(InvalidData, lambda: fitted()("text"), "type str", "torch.as_tensor"),
    "nothing": row(InvalidData, lambda: fitted()(None), "type NoneType", "torch.as_tensor"),
    "a loader predicted": row(InvalidData, lambda: fitted()(DataLoader(TensorDataset(X))), "type DataLoader", "tensor"),
    "a pair predicted": row(InvalidInputs, lambda: fitted()((X, Y)), "2 parts", "la(x)"),
    "several inputs beside each other": row(InvalidArgument, lambda: fitted()(X, X), "pred_type", "la((x1, x2))"),
    "targets beside inputs predicted": row(InvalidArgument, lambda: fitted()(X, Y), "pred_type", "without targets"),
    "no data predicted": row(InvalidData, lambda: fitted()(X[:0]), "no data"),
    "NaN": row(InvalidData, lambda: fit(X / 0 * 0, Y), "batch 0", "look at the inputs"),
    "data on the meta device": row(InvalidData, lambda: fit(X.to("meta"), Y), "batch 0", "meta device"),
}  # fmt: skip

TARGETS: dict[str, Row] = {
    "labels from 1": row(InvalidData, lambda: fit(X, Y + 1), "batch 0", "Label 3", "0 to 2"),
    "label -1 for none": row(InvalidData, lambda: fit(X, Y - 1), "batch 0", "Label -1", "-100, which is ignored"),
    "float labels": row(InvalidData, lambda: fit(X, Y.float()), "batch 0", "y.long()"),
    "logits as labels": row(DataWarning, lambda: fit(X, nn.functional.one_hot(Y, 3) - 0.5), "no probabilities"),
    "labels [B, 1]": row(InvalidData, lambda: fit(X, Y[:, None]), "batch 0", "y.squeeze(-1)"),
    "one-hot labels transposed": row(InvalidData, lambda: fit(X, nn.functional.one_hot(Y, 3).T), "batch 0", "give y.T"),
    "too few labels": row(InvalidData, lambda: fit(X, Y[:7]), "batch 0", "a label for every datum"),
    "names for labels": row(InvalidData, lambda: fit(X, ["cat"] * 12), "batch 0", "torch.as_tensor"),
    "labels for regression": row(
        InvalidData, lambda: fit(X, Y, likelihood=R), "batch 0", "likelihood='classification'"
    ),
    "targets [B]": row(InvalidData, lambda: fit(XR, Y1[:, 0], net(1), R), "batch 0", "y.unsqueeze(-1)"),
    "targets transposed": row(InvalidData, lambda: fit(XR, YR.T, likelihood=R), "batch 0", "[3, 12]"),
    "NaN targets": row(InvalidData, lambda: fit(XR, YR / 0 * 0, likelihood=R), "batch 0", "remove those data"),
    "labels -1 and 1": row(
        InvalidData, lambda: fit(X, 2 * (Y1 > 0).float() - 1, net(1), B), "batch 0", "(y + 1) / 2"
    ),
    "one logit as classes": row(InvalidData, lambda: fit(X, (Y1[:, 0] > 0).long(), net(1)), "batch 0", "'bernoulli'"),
    "the tokens themselves": row(
        LaplaceWarning,
        lambda: Laplace(nn.Embedding(5, 5), C, "all", "diag", dict_key_x="input").fit(
            [{"input": (ids := torch.randint(5, (3, 4))), "labels": ids}]
        ),
        "labels", "every position has its own token as target",
    ),
    "channels that may be anywhere": row(InvalidData, ambiguous_layout, "channel_dim=1"),
    "labels without those of a prompt": row(
        InvalidData, lambda: new(of_prompts(), structure="diag").fit([tokens()]), "batch 0", "[3, 9, 11]", "[:, 2:-1]"
    ),
    "next tokens of all outputs": row(
        InvalidData,
        lambda: fit(tokens()["input_ids"], tokens()["labels"][:, 1:], nn.Embedding(11, 11)),
        "batch 0", "[:, :-1] of next tokens",
    ),
}  # fmt: skip

MODELS: dict[str, Row] = {
    "a class": row(InvalidType, lambda: Laplace(nn.Linear, C), "model must be", "type"),  # pyright: ignore
    "parameters": row(InvalidType, lambda: Laplace(net().parameters(), C), "model must be"),  # pyright: ignore
    "a state dict": row(InvalidType, lambda: Laplace(net().state_dict(), C), "model must be"),  # pyright: ignore
    "several networks": row(InvalidType, lambda: Laplace([net(), net()], C), "model must be"),  # pyright: ignore
    "on the meta device": row(
        InvalidArgument, lambda: new(net().to("meta")), "'0.weight'", "meta device", "to_empty", "load_state_dict"
    ),
    "on the meta device, last layer": row(
        InvalidArgument, lambda: new(net().to("meta"), weights="last_layer"), "'0.weight'", "meta device", "to_empty"
    ),
    "a lazy layer": row(
        InvalidArgument, lambda: new(nn.Sequential(nn.LazyLinear(3))), "'0.weight'", "run the network once"
    ),
    "frozen": row(InvalidArgument, lambda: new(net().requires_grad_(False)), "frozen", "last_layer"),
    "without parameters": row(InvalidArgument, lambda: new(nn.Sequential(nn.Tanh())), "no parameter"),
    "layers in a list": row(InvalidArgument, lambda: new(Listed()), "no parameter", "nn.ModuleList"),
    "output squeezed, targets not": row(
        InvalidData, lambda: fit(XR, Y1, Net(lambda f: f.squeeze(-1), 1), R), "batch 0", "targets [B]"
    ),
    "outputs in a tuple": row(InvalidData, lambda: fit(X, Y, Net(lambda f: (f, f))), "batch 0", "forward_fn"),
    "outputs in a dict": row(InvalidData, lambda: fit(X, Y, Net(lambda f: {"out": f})), "batch 0", "forward_fn"),
    "outputs as an array": row(
        InvalidData, lambda: fit(X, Y, Net(lambda f: f.detach().numpy())), "batch 0", "must return a tensor"
    ),
    "returns its loss": row(InvalidData, lambda: fit(X, Y, Net(torch.mean)), "batch 0", "[B, C]"),
    "mixes its data": row(
        CurvatureError, lambda: fit(X, Y, Net(lambda f: f - f.mean(0))), "one datum depends on the others"
    ),
    "forward without gradients": row(
        CurvatureError, lambda: fit(X, Y, NoGrad()), "'body.weight'", "torch.no_grad()", "let gradients through"
    ),
    "features without gradients": row(
        ApproximationWarning, lambda: fit(X, Y, FixedBody()), "'body.weight'", "torch.no_grad()", "requires_grad_("
    ),
    "trained further": row(
        ModelChangedError, lambda: changed(fitted(), lambda m: m[0].weight.add_(1))(X), "changed after fit", "fit again"
    ),
    "another head after fit": row(
        ModelChangedError, lambda: changed(fitted(), lambda m: m.__setattr__("3", nn.Linear(5, 7)))(X), "fit again"
    ),
    "another dtype after fit": row(
        ModelChangedError, lambda: changed(fitted(), lambda m: m.double())(X.double()), "la.to(device=..., dtype=...)"
    ),
    "a name that is no layer": row(
        InvalidArgument, lambda: new(weights="last_layer", last_layer_name="fc"), "'fc'", "last_layer_name"
    ),
    "no linear last layer": row(
        InvalidArgument,
        lambda: new(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), weights="last_layer").fit([(X, Y)]),
        "last layer '1'", "last_layer_name",
    ),
    "forward_fn without the model": row(
        InvalidType, lambda: fitted(forward_fn=lambda x: x), "forward_fn", "lambda model, x"
    ),
    "forward_fn that is none": row(InvalidType, lambda: new(forward_fn="forward"), "forward_fn", "lambda model, x"),
    "a Softmax at the end": row(
        InvalidData, lambda: fit(X, Y, nn.Sequential(net(), nn.Softmax(1))), "softmax", "return logits"
    ),
    "a Softmax at the end, last layer": row(
        InvalidData, lambda: fit(X, Y, nn.Sequential(net(), nn.Softmax(1)), weights="last_layer"), "return logits"
    ),
    "a Sigmoid at the end": row(
        InvalidData,
        lambda: fit(X, (Y1 > 0).float(), nn.Sequential(net(1), nn.Sigmoid()), B),
        "sigmoid", "return logits",
    ),
    "two heads": row(
        ApproximationWarning, lambda: fit(X, Y, TwoHeads(), weights="last_layer"), "'one'", "'two'", "'all'"
    ),
    "an adapter switched after fit": row(LaplaceError, switched, "enabled", "call fit again"),
    "dropout that never ends": row(ApproximationWarning, lambda: fit(X, Y, AlwaysDropped()), "random"),
}  # fmt: skip

CHOICES: dict[str, Row] = {
    "a misspelt likelihood": row(InvalidArgument, lambda: new(likelihood="clasification"), "likelihood", C),
    "binary": row(InvalidArgument, lambda: new(likelihood="binary"), "likelihood", B),
    "a loss for a likelihood": row(
        InvalidArgument,
        lambda: Laplace(net(), nn.CrossEntropyLoss()),  # pyright: ignore
        "likelihood", C,
    ),
    "a loader for a likelihood": row(
        InvalidArgument,
        lambda: new(likelihood=[(X, Y)]),  # pyright: ignore
        "likelihood=", "of type list", C,
    ),
    "a misspelt prior assigned": row(
        LaplaceError, lambda: setattr(fitted(), "prior_prec", 2.0), "'prior_precision'", "nothing reads it"
    ),
    "a misspelt noise assigned": row(LaplaceError, lambda: setattr(fitted(), "sigma", 2.0), "'sigma_noise'"),
    "no likelihood": row(InvalidCall, lambda: Laplace(net()), "likelihood", C),  # pyright: ignore
    "likelihood third": row(InvalidArgument, lambda: Laplace(net(), "all", C), "subset_of_weights", "last_layer"),
    "a misspelt choice of weights": row(
        InvalidArgument, lambda: new(weights="last-layer"), "subset_of_weights", "last_layer"
    ),
    "kfac": row(InvalidArgument, lambda: new(structure="kfac"), "hessian_structure", "kron"),
    "a prior as fifth argument": row(InvalidArgument, lambda: Laplace(net(), C, "all", "diag", 0.5), "sigma_noise"),
    "a noise of classes": row(InvalidArgument, lambda: new(sigma_noise=0.5), "sigma_noise", "leave sigma_noise at 1"),
    "a negative prior": row(InvalidArgument, lambda: new(prior_precision=-1.0), "prior_precision", "positive"),
    "a prior in a list": row(InvalidType, lambda: new(prior_precision=[1.0]), "prior_precision", "tensor"),
    "a prior of another length": row(
        InvalidArgument, lambda: new(prior_precision=torch.ones(5)), "prior_precision", "38 (random parameters)"
    ),
    "a prior as text": row(InvalidType, lambda: setattr(fitted(), "prior_precision", "1"), "prior_precision", "number"),
    "a negative temperature": row(InvalidArgument, lambda: new(temperature=-1), "temperature", "positive"),
    "a noise of zero": row(
        InvalidArgument, lambda: setattr(new(likelihood=R), "sigma_noise", 0.0), "sigma_noise", "positive"
    ),
    "a backend by name": row(InvalidType, lambda: new(backend="AsdlGGN"), "backend", "class", "NativeGGN"),
    "a network for a backend": row(InvalidType, lambda: new(backend=net()), "backend", "class"),
    "a misspelt structure option": row(
        InvalidArgument, lambda: new(structure="lowrank", structure_kwargs={"rnk": 3}), "structure_kwargs", "rank"
    ),
    "a misspelt backend option": row(
        InvalidArgument, lambda: fitted(backend_kwargs={"stochastc": True}), "backend_kwargs", "stochastc"
    ),
    "no indices": row(
        InvalidCall, lambda: new(weights="subnetwork"), "subnetwork_indices", "LargestMagnitudeSubnetMask", ".select()"
    ),
    "no indices, by class": row(
        InvalidCall, lambda: laplace.FullSubnetLaplace(net(), C), "subnetwork_indices", ".select()"  # pyright: ignore
    ),
    "a mask for indices": row(
        InvalidType,
        lambda: new(weights="subnetwork", subnetwork_indices=LargestMagnitudeSubnetMask(net(), n_params_subnet=5)),
        "subnetwork_indices", ".select(",
    ),
    "truth values for indices": row(
        InvalidType,
        lambda: new(weights="subnetwork", subnetwork_indices=torch.ones(38).bool()),
        "subnetwork_indices", "nonzero",
    ),
    "no n_subset": row(InvalidCall, lambda: new(structure="gp"), "n_subset", "n_subset=200"),
    "no n_subset, by class": row(
        InvalidCall, lambda: laplace.FunctionalLaplace(net(), C), "n_subset", "n_subset=200"  # pyright: ignore
    ),
    "more data than there are": row(InvalidData, lambda: fitted(structure="gp", n_subset=50), "12", "n_subset"),
    "prior_prec": row(InvalidCall, lambda: new(prior_prec=1.0), "'prior_prec'", "did you mean 'prior_precision'"),
    "prior_prec, by class": row(
        InvalidCall,
        lambda: laplace.KronLaplace(net(), C, prior_prec=1.0),  # pyright: ignore
        "did you mean 'prior_precision'",
    ),
    "subset": row(InvalidCall, lambda: Laplace(net(), C, subset="all"), "did you mean 'subset_of_weights'"),
    "last_layer_name of all weights": row(
        InvalidCall, lambda: new(last_layer_name="3"), "last_layer_name", "subset_of_weights='last_layer'"
    ),
    "n_params of a mask": row(
        InvalidCall,
        lambda: LargestMagnitudeSubnetMask(net(), n_params=5),  # pyright: ignore
        "did you mean 'n_params_subnet'",
    ),
    "one component": row(InvalidType, lambda: MixtureLaplace(fitted()), "components", "sequence"),
    "diagonals under kron": row(ApproximationWarning, without_rule, "la.coverage()", "diagonal"),
    "more than memory holds": row(OutOfMemory, without_memory, "would take", "hessian_structure='diag'"),
}  # fmt: skip

CALLS: dict[str, Row] = {
    "predicted before fit": row(NotFittedError, lambda: new()(X), "fit(train_loader)"),
    "tuned before fit": row(NotFittedError, lambda: new().optimize_prior_precision(), "fit(train_loader)"),
    "evidence before fit": row(NotFittedError, lambda: new().log_marginal_likelihood(), "fit(train_loader)"),
    "saved before fit": row(NotFittedError, lambda: new().state_dict(), "fit(train_loader)"),
    "fit without data": row(InvalidCall, lambda: new().fit(), "train_loader", "[(x, y)]"),
    "a mapping spread": row(InvalidCall, lambda: fitted()(input_ids=X), "'x'", "la(batch)"),
    "the network before its file": row(InvalidType, lambda: laplace.load(net(), "la"), "laplace.load(path, model)"),  # pyright: ignore
    "a regression for probabilities": row(
        InvalidData, lambda: nll(fitted(likelihood=R)(XR), Y), "probs is a tuple", "la.predict(x)"
    ),
    "a network for a state": row(
        StateError, lambda: new().load_state_dict(net().state_dict()), "lacks ['version'", "model.load_state_dict"
    ),
    "a path for a state": row(StateError, lambda: new().load_state_dict("la.pt"), "type str", "torch.load(path"),
    "prediction without inputs": row(InvalidCall, lambda: fitted()(), "'x'", "[B, …]"),
    "epochs of a fit": row(InvalidCall, lambda: new().fit([(X, Y)], epochs=3), "'epochs'", "train_loader, override"),
    "num_samples predicted": row(
        InvalidCall, lambda: fitted()(X, link_approx="mc", num_samples=3), "'num_samples'", "did you mean 'n_samples'"
    ),
    "num_samples of sampled weights": row(
        InvalidCall, lambda: fitted()(X, "nn", num_samples=3), "'num_samples'", "did you mean 'n_samples'"
    ),
    "num_samples of predict": row(
        InvalidCall, lambda: fitted().predict(X, num_samples=3), "'num_samples'", "did you mean 'n_samples'"
    ),
    "num_samples of sample": row(
        InvalidCall, lambda: fitted().sample(num_samples=3), "'num_samples'", "did you mean 'n_samples'"
    ),
    "num_samples of a mixture": row(
        InvalidCall, lambda: MixtureLaplace([fitted()]).sample(num_samples=3), "did you mean 'n_samples'"
    ),
    "a seed": row(InvalidCall, lambda: fitted().sample(3, seed=0), "'seed'", "generator=torch.Generator()"),
    "a seed for a generator": row(InvalidType, lambda: fitted().sample(3, 0), "generator", "torch.Generator"),
    "steps of tuning": row(
        InvalidCall, lambda: fitted().optimize_prior_precision(steps=3), "'steps'", "did you mean 'n_steps'"
    ),
    "steps of tuning a GP": row(
        InvalidCall, lambda: fitted(structure="gp", n_subset=4).optimize_prior_precision(steps=3), "'n_steps'"
    ),
    "a misspelt val_loader": row(
        InvalidCall, lambda: fitted().optimize_prior_precision(valid_loader=[(X, Y)]), "did you mean 'val_loader'"
    ),
    "epochs of training": row(
        InvalidCall,
        lambda: marglik_training(net(), [(X, Y)], epochs=3),  # pyright: ignore
        "did you mean 'n_epochs'",
    ),
    "prior_prec of the evidence": row(
        InvalidCall, lambda: fitted().log_marginal_likelihood(prior_prec=1.0), "did you mean 'prior_precision'"
    ),
    "fewer samples than none": row(InvalidArgument, lambda: fitted().sample(-1), "n_samples=-1", "at least 0"),
    "a shape of samples": row(InvalidArgument, lambda: fitted().sample((3,)), "n_samples", "integer"),
    "samples as a float": row(InvalidArgument, lambda: fitted().sample(1e2), "n_samples", "integer"),
    "no samples": row(InvalidArgument, lambda: fitted()(X, "nn", n_samples=0), "n_samples=0", "positive integer"),
    "no outputs sampled": row(
        InvalidArgument, lambda: fitted().functional_samples(X, n_samples=0), "n_samples=0", "positive integer"
    ),
    "a predictive in capitals": row(InvalidArgument, lambda: fitted()(X, "GLM"), "pred_type", "'glm'"),
    "a link for a predictive": row(InvalidArgument, lambda: fitted()(X, "probit"), "pred_type", "'glm'"),
    "a misspelt link": row(InvalidArgument, lambda: fitted()(X, link_approx="laplace"), "link_approx", "probit"),
    "noise of classes": row(
        InvalidArgument, lambda: fitted().log_marginal_likelihood(sigma_noise=1.0), "sigma_noise", "no observation"
    ),
    "data for a prior": row(
        InvalidType, lambda: fitted().log_marginal_likelihood([(X, Y)]), "prior_precision", "number or a tensor"
    ),
    "a grid search without data": row(
        InvalidArgument, lambda: fitted().optimize_prior_precision(method="gridsearch"), "val_loader"
    ),
    "a method for a predictive": row(
        InvalidArgument, lambda: fitted().optimize_prior_precision("gridsearch"), "pred_type", "method='gridsearch'"
    ),
    "data for a predictive": row(
        InvalidArgument, lambda: fitted().optimize_prior_precision([(X, Y)]), "pred_type", "val_loader="
    ),
    "an unknown method": row(
        InvalidArgument, lambda: fitted().optimize_prior_precision(method="grid"), "method", "gridsearch"
    ),
    "data that the evidence does not read": row(
        TuningWarning, lambda: fitted().optimize_prior_precision(val_loader=[(X, Y)]), "val_loader", "gridsearch"
    ),
    "weights of another length": row(InvalidArgument, lambda: fitted().log_prob(torch.zeros(1)), "value", "P = 38"),
    "inputs for Jacobians": row(InvalidArgument, lambda: fitted().functional_variance(X), "Js", "[B, C, P]"),
    "sampled weights of a GP": row(
        InvalidArgument, lambda: fitted(structure="gp", n_subset=4)(X, "nn"), "pred_type", "'gp'"
    ),
    "a device that is none": row(InvalidArgument, lambda: fitted().to("gpu"), "device", "'cuda'"),
    "a dtype for a device": row(InvalidArgument, lambda: fitted().to(torch.float64), "device", "dtype="),
    "a dtype as text": row(InvalidArgument, lambda: fitted().to(dtype="float64"), "dtype", "torch.float64"),
    "the network's state": row(StateError, lambda: fitted().load_state_dict(net().state_dict()), "state lacks"),
    "a state of another network": row(
        StateError, lambda: new(net(4)).load_state_dict(fitted().state_dict()), "sizes of the random", "matching"
    ),
    "a state of other weights": row(
        StateError,
        lambda: new(changed(fitted(), lambda m: m[0].weight.add_(1)).model).load_state_dict(fitted().state_dict()),
        "other weights", "load the weights",
    ),
    "data forgotten that were never seen": row(
        InvalidData, lambda: fitted().forget([(X, Y), (X, Y)]), "24 data", "remove only data"
    ),
    "a private hook overridden": row(UnsupportedError, hidden_hook, "_check_jacobians", "functional_variance"),
    "another network assigned": row(
        UnsupportedError, lambda: setattr(fitted(), "model", net()), "model", "make a new one"
    ),
    "a mean of another length": row(InvalidArgument, lambda: setattr(fitted(), "mean", torch.zeros(37)), "mean", "38"),
}  # fmt: skip

MISTAKES = {
    f"{group}: {name}": mistake
    for group, rows in {
        "loading": LOADING, "inputs": INPUTS, "targets": TARGETS, "models": MODELS, "choices": CHOICES, "calls": CALLS,
    }.items()
    for name, mistake in rows.items()
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(name: str) -> None:
    check_mistake(MISTAKES[name])


def check_mistake(mistake: Row) -> None:
    """Requires the outcome of a row, and every one of its words in the message."""
    if issubclass(mistake.outcome, Warning):
        with pytest.warns(mistake.outcome) as caught:
            mistake.run()
        message = " ".join(str(warning.message) for warning in caught)
    else:
        with pytest.raises(mistake.outcome) as raised:
            mistake.run()
        assert isinstance(raised.value, LaplaceError)
        message = str(raised.value)
    assert not [word for word in mistake.words if word not in message], message


# What is no mistake to the library.


def oracle(model: nn.Module, x: Tensor = X, y: Tensor = Y, likelihood: str = C, prior: float = 1.0) -> Tensor:
    """Probabilities by the probit approximation, or variances, of a full posterior in dense float64."""
    network = copy.deepcopy(model).double().eval()
    names = reference.trainable_names(network)
    y = y.double() if likelihood == R else y
    hessian = reference.ggn(network, x.double(), y, names, likelihood)
    jacobian, f = reference.flat_jacobian(network, X.double(), names)
    covariance = (hessian + prior * torch.eye(len(hessian), dtype=hessian.dtype)).inverse()
    variance = predictive.functional_variance(jacobian, covariance)
    return variance if likelihood == R else predictive.probit(f, variance)


def predicted(model: nn.Module, loader: Any = None, likelihood: str = C, **options: Any) -> Tensor:
    la = new(model, likelihood, **options)
    la.fit([(X, Y)] if loader is None else loader)
    found = la(X)
    return found[1] if likelihood == R else found


def of_a_training_network() -> tuple[Tensor, Tensor]:
    """Normalisation and dropout in training mode, as after the last epoch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    model(X)
    return predicted(model), oracle(model)


def of_a_frozen_trunk() -> tuple[Tensor, Tensor]:
    model = net()
    model[0].requires_grad_(False)  # pyright: ignore
    return predicted(model), oracle(model)


def of_unused_weights(backend: str) -> Callable[[], tuple[Tensor, Tensor]]:
    def run() -> tuple[Tensor, Tensor]:
        pytest.importorskip({"Asdl": "asdl", "Back": "backpack", "Curv": "curvlinops"}.get(backend[:4], "torch"))
        model = Unused()
        return predicted(model, backend=getattr(curvature, backend)), oracle(model)

    return run


def of_no_used_weight() -> tuple[Tensor, Tensor]:
    model = Unused()
    model.body.requires_grad_(False)
    model.head.requires_grad_(False)
    return predicted(model), torch.softmax(copy.deepcopy(model).double()(X.double()), 1)


def of_ignored_labels() -> tuple[Tensor, Tensor]:
    y = Y.index_fill(0, torch.tensor([1, 5]), -100)
    return predicted(net(), [(X, y)]), oracle(net(), X[y >= 0], Y[y >= 0])


def in_inference_mode() -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        model = net()
        found = predicted(model)
    return found.clone(), oracle(net())


def without_gradients() -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return predicted(net()), oracle_with_gradients()


def oracle_with_gradients() -> Tensor:
    with torch.enable_grad():
        return oracle(net())


def in_place_prior() -> tuple[Tensor, Tensor]:
    la = fitted()
    la(X)
    la.prior_precision.fill_(20.0)
    return la(X), oracle(net(), prior=20.0)


def fitted_again() -> tuple[Tensor, Tensor]:
    la = fitted()
    changed(la, lambda m: m[0].weight.mul_(1.5))
    la.fit([(X, Y)])
    return la(X), oracle(la.model)


def of_a_causal_model() -> tuple[Tensor, Tensor]:
    model, batch = tiny_gpt2(), tokens()
    labels = batch["labels"]
    labels[0, 4:] = -100
    la = Laplace(model, C, hessian_structure="diag")
    la.fit([batch])
    with torch.no_grad():
        return torch.as_tensor(la.loss), model(**batch).loss * int((labels[:, 1:] != -100).sum())


def of_a_derived_layer() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    own = nn.Sequential(OwnLinear(3, 30), nn.Tanh(), OwnLinear(30, 3))
    plain = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 3))
    plain.load_state_dict(own.state_dict())
    return fit_kron(own).log_marginal_likelihood(), fit_kron(plain).log_marginal_likelihood()


def of_labels_that_say_the_layout() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, padding=1)
    x, y = torch.randn(2, 3, 5, 4), torch.randint(4, (2, 5, 4))
    la = new(model)
    la.fit([(x, y)])
    rows = copy.deepcopy(model).double()(x.double())
    return torch.as_tensor(la.loss), nn.functional.cross_entropy(rows, y, reduction="sum").detach()


def of_a_whole_mapping() -> tuple[Tensor, Tensor]:
    model = WithLabels()
    la = new(model)
    la.fit([{"x": X, "labels": Y}])
    return la({"x": X}), oracle(model.net)


def of_an_override() -> tuple[Tensor, Tensor]:
    class Wider(laplace.FullLaplace):
        def functional_variance(self, Js: Any) -> Tensor:
            return 4 * super().functional_variance(Js)

    la = Wider(net(3), R)
    la.fit([(XR, (y := torch.randn(12, 3)))])
    return la(XR)[1], 4 * oracle(net(3), XR, y, R)  # `oracle` predicts at X: use XR = grid.data("regression")[0]


def of_a_gradient_in_the_prior() -> tuple[Tensor, Tensor]:
    delta = torch.ones(1, requires_grad=True)
    la = fitted(enable_backprop=True)
    la.prior_precision = delta
    (found,) = torch.autograd.grad(la(X)[:, 0].sum(), delta)
    step = 1e-4
    difference = (oracle(net(), prior=1 + step) - oracle(net(), prior=1 - step))[:, 0].sum() / (2 * step)
    return found, difference.reshape(1)


def inside_of_ddp() -> tuple[Tensor, Tensor]:
    """Its constructor needs a process group, its forward pass here does not."""
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = net()
    return predicted(model), oracle(net())


def of_an_adapter_without_task_type() -> tuple[Tensor, Tensor]:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that transformers renames
        model, batch = peft.get_peft_model(tiny_gpt2(), config).eval(), tokens()
    la = new(model, structure="diag")
    la.fit([batch])
    with torch.no_grad():
        return torch.as_tensor(la.loss), model(**batch).loss * 15


def of_a_tensordict() -> tuple[Tensor, Tensor]:
    tensordict = pytest.importorskip("tensordict")
    la = new(WithLabels())
    la.fit([tensordict.TensorDict({"x": X, "labels": Y}, batch_size=[12])])
    return la(tensordict.TensorDict({"x": X}, batch_size=[12])), oracle(WithLabels().net)


def of_prompts_cut_off() -> tuple[Tensor, Tensor]:
    model, batch = of_prompts().eval(), tokens()
    given = ("input_ids", "attention_mask")
    la = new(model, structure="diag", forward_fn=lambda m, x: m(**{key: x[key] for key in given}).logits[:, 2:-1])
    la.fit([batch])
    with torch.no_grad():
        return torch.as_tensor(la.loss), model(**batch).loss * 18


def of_t5_with_labels_alone() -> tuple[Tensor, Tensor]:
    batch = {"input_ids": torch.randint(1, 11, (3, 4)), "labels": torch.randint(1, 11, (3, 5))}
    model = tiny_t5()
    la = Laplace(model, C, last_layer_name="lm_head", hessian_structure="diag")
    la.fit([batch])
    with torch.no_grad():
        return torch.as_tensor(la.loss), model(**batch).loss * 15


RIGHT: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "a network left in training mode": of_a_training_network,
    "a frozen trunk": of_a_frozen_trunk,
    "weights that are not used": of_unused_weights("NativeGGN"),
    "weights that are not used, ASDL": of_unused_weights("AsdlGGN"),
    "weights that are not used, BackPACK": of_unused_weights("BackPackGGN"),
    "weights that are not used, curvlinops": of_unused_weights("CurvlinopsGGN"),
    "no weight that is used": of_no_used_weight,
    "ignored labels": of_ignored_labels,
    "labels as bytes": lambda: (predicted(net(), [(X, Y.byte())]), oracle(net())),
    "targets of another precision": lambda: (
        predicted(net(), [(XR, YR.double())], R), oracle(net(), XR, YR, R)
    ),
    "a smaller last batch": lambda: (predicted(net(), DataLoader(TensorDataset(X, Y), 5)), oracle(net())),
    "a generator": lambda: (predicted(net(), (batch for batch in [(X, Y)])), oracle(net())),
    "a batch as a list": lambda: (predicted(net(), [[X, Y]]), oracle(net())),
    "inputs in a list": lambda: (fitted()([X]), oracle(net())),
    "inputs with gradients": lambda: (predicted(net(), [(X.clone().requires_grad_(), Y)]), oracle(net())),
    "a prior of NumPy": lambda: (predicted(net(), prior_precision=np.float64(3.0)), oracle(net(), prior=3.0)),
    "a prior changed in place": in_place_prior,
    "a LogSoftmax at the end": lambda: (
        predicted(nn.Sequential(net(), nn.LogSoftmax(1)), structure="full"),
        oracle(nn.Sequential(net(), nn.LogSoftmax(1))),
    ),
    "inside of DataParallel": lambda: (predicted(nn.DataParallel(net())), oracle(net())),
    "in inference mode": in_inference_mode,
    "without gradients": without_gradients,
    "fitted again after more training": fitted_again,
    "a causal language model with its collator's labels": of_a_causal_model,
    "layers derived from nn.Linear": of_a_derived_layer,
    "channels said by the labels": of_labels_that_say_the_layout,
    "a mapping for forward(data, labels=None)": of_a_whole_mapping,
    "T5 with labels alone": of_t5_with_labels_alone,
    "an overridden variance": of_an_override,
    "a gradient in the prior": of_a_gradient_in_the_prior,
    "inside of DistributedDataParallel": inside_of_ddp,
    "an adapter without task_type": of_an_adapter_without_task_type,
    "a TensorDict": of_a_tensordict,
    "a learned prompt whose outputs are cut off": of_prompts_cut_off,
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_no_mistake_is_right(name: str) -> None:
    found, expected = RIGHT[name]()
    assert_close(found.detach(), expected.to(found.dtype), "float32")


def test_gradients_of_a_detached_prediction() -> None:
    with pytest.warns(GradientWarning, match="enable_backprop"), pytest.raises(RuntimeError, match="not require grad"):
        fitted()(X.clone().requires_grad_()).sum().backward()


# What is left to PyTorch and Python.

THEIRS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a pickled lambda": (
        lambda: pickle.dumps(fitted(forward_fn=lambda model, x: model(x))),
        AttributeError,
        "pickle",
    ),
    "a method of another library": (lambda: fitted().predict_proba(X), AttributeError, "predict_proba"),
}


@pytest.mark.parametrize("name", THEIRS)
def test_what_is_left_to_others(name: str) -> None:
    run, error, words = THEIRS[name]
    with pytest.raises(error, match=words):
        run()


def test_the_table_is_long_enough() -> None:
    assert len(MISTAKES) + len(RIGHT) >= 60
    assert len(THEIRS) <= 3


# How errors come about.


def test_errors_of_code_without_source_pass_and_comments_are_no_code() -> None:
    names: dict[str, Any] = {"nn": nn}
    own = "raise ValueError('of my own')"
    exec(
        f"class Own(nn.Linear):\n    def forward(self, x):\n        if x.shape[1] != 2: {own}\n        return x", names
    )
    with pytest.raises(ValueError, match=r"^of my own$"):
        Laplace(names["Own"](2, 3), "classification", "all", "full").fit([(torch.randn(6, 4), torch.arange(6) % 3)])

    class Said(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + self.bias  # never to raise an error

    with pytest.raises(InvalidInputs, match="mat1 and mat2"):
        Laplace(Said(2, 3), "classification", "all", "full").fit([(torch.randn(6, 4), torch.arange(6) % 3)])


def test_errors_are_also_what_python_and_pytorch_raise() -> None:
    assert issubclass(InvalidCall, (TypeError, InvalidArgument)) and issubclass(InvalidCall, TypeError)
    assert issubclass(InvalidInputs, RuntimeError) and issubclass(InvalidInputs, TypeError)
    with pytest.raises(InvalidInputs) as raised:
        fit(WIDE, Y)
    assert "mat1 and mat2" in str(raised.value.__cause__)


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError, KeyError])
def test_errors_of_the_user_s_own_code_pass(error: type[Exception]) -> None:
    class Failing(Net):
        def forward(self, x: Tensor) -> Any:
            raise error("of my own")

    for weights in ("all", "last_layer"):
        with pytest.raises(error, match="of my own") as raised:
            fit(X, Y, Failing(), weights=weights)
        assert not isinstance(raised.value, LaplaceError)
    la = fitted(forward_fn=lambda model, x: failing_call(error) if len(x) < 12 else model(x))
    with pytest.raises(error, match="of my own"):
        la(X[:3])


def failing_call(error: type[Exception]) -> None:
    raise error("of my own")


def test_a_hook_of_the_user_is_not_blamed_on_the_inputs() -> None:
    model = net()
    model[0].register_forward_hook(lambda *_: failing_call(RuntimeError))  # pyright: ignore
    with pytest.raises(RuntimeError, match="of my own") as raised:
        fit(X, Y, model)
    assert not isinstance(raised.value, LaplaceError)


def test_layers_of_several_dtypes_are_not_blamed_on_the_inputs() -> None:
    """Neither words nor images of the right dtype are at fault where a part of the network is in half precision."""
    of_words, of_images = words(), conv()
    of_words[2].half()  # pyright: ignore
    of_images[4].half()  # pyright: ignore
    for x, model in ((torch.zeros(12, 2).long(), of_words), (IMAGES, of_images)):
        with pytest.raises(RuntimeError, match="dtype") as raised:
            fit(x, Y, model)
        assert not isinstance(raised.value, LaplaceError)


def test_a_type_error_inside_of_a_method_passes() -> None:
    """Only a call that does not fit the signature is explained."""
    la = fitted()
    with pytest.raises(TypeError, match="of my own") as raised:
        la.optimize_prior_precision(method="gridsearch", val_loader=[(X, Y)], loss=lambda *_: failing_call(TypeError))
    assert not isinstance(raised.value, LaplaceError)


def test_constructors_stay_plain_functions() -> None:
    """Tools read their code object; copies are made without arguments."""
    assert "prior_precision" in laplace.KronLaplace.__init__.__code__.co_varnames
    la = fitted()
    torch.testing.assert_close(copy.deepcopy(la)(X), la(X))
    torch.testing.assert_close(pickle.loads(pickle.dumps(la))(X), la(X))

    class Own(laplace.FullLaplace):
        def __init__(self, model: nn.Module, strength: float) -> None:
            super().__init__(model, C, prior_precision=strength)

    assert Own(net(), strength=2.0).prior_precision.item() == 2.0
    with pytest.raises(InvalidCall, match="did you mean 'strength'"):
        Own(net(), strenght=2.0)  # pyright: ignore


def test_unused_weights_may_be_used_by_a_later_batch() -> None:
    """An expert that sees no datum of a batch has no derivative there, and the outputs do not depend on it."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.rare = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            rare = x[:, :1] > 10
            return torch.where(rare, self.rare(x), self.shared(x)) if bool(rare.any()) else self.shared(x)

    torch.manual_seed(0)
    model = Experts()
    x = X.clone()
    x[0, 0] = 11.0
    la = new(model)
    la.fit([(x[6:], Y[6:]), (x[:6], Y[:6])])
    network = copy.deepcopy(model).double()
    names = reference.trainable_names(network)
    assert_close(la.H, reference.ggn(network, x.double(), Y, names, C).float(), "float32")
