"""Problems with dense networks: shapes, likelihoods, layers between, frozen parts, and odd uses of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.catalogue.problem import add
from tests.models import dense
from tests.models.dense import mlp

_MLP = partial(mlp, 3, 5, 4, 3)


def register() -> None:
    """Adds the problems of this file to the catalogue."""
    _shapes_and_likelihoods()
    _layers_between()
    _frozen_parts()
    _trailing_layers()
    _odd_uses()


def _frozen(model: nn.Module, *names: str) -> nn.Module:
    """The model with these parameters frozen."""
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def _normed(norm: Callable[[int], nn.Module], n_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), norm(6), nn.Tanh(), nn.Linear(6, n_outputs))


def _adapted() -> nn.Sequential:
    return nn.Sequential(dense.Adapter(4, 5), nn.Tanh(), dense.Adapter(5, 3))


def _with_tail(layer: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*mlp(3, 5, 3), layer())


def _weight_normed() -> nn.Sequential:
    return nn.Sequential(weight_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 3))


def _shapes_and_likelihoods() -> None:
    add("mlp_classification", _MLP, (3,), 3, tags="kfac mlp", head="4")
    add("mlp_regression", partial(mlp, 3, 6, 2), (3,), 2, "regression", "kfac mlp", head="2", n_data=7)
    add("mlp_regression_single", partial(mlp, 2, 8, 1), (2,), 1, "regression", "kfac mlp", head="2", n_data=7)
    add("mlp_bernoulli_single", partial(mlp, 3, 6, 1), (3,), 1, "bernoulli", "kfac mlp", head="2")
    add("mlp_bernoulli_multi", partial(mlp, 3, 6, 3), (3,), 3, "bernoulli", "kfac mlp", head="2")
    add("mlp_poisson", partial(mlp, 3, 6, 2), (3,), 2, "poisson", "kfac mlp", head="2")
    add("mlp_heteroscedastic", partial(mlp, 3, 6, 4), (3,), 4, "heteroscedastic", "kfac mlp", head="2", n_data=7)
    add("mlp_mean_log_variance", partial(mlp, 3, 6, 4), (3,), 4, "mean_log_variance", "kfac mlp", head="2", n_data=7)
    add("mlp_ignored_labels", _MLP, (3,), 3, tags="kfac mlp ignored_labels", head="4", n_data=7, ignored=(1, 4))
    add("mlp_soft_labels", _MLP, (3,), 3, tags="kfac mlp soft_labels", head="4", soft=True)
    add("mlp_saturated", _MLP, (3,), 3, tags="kfac mlp saturated", head="4", spread=2.0)
    add("deep_mlp", partial(mlp, 3, 4, 4, 4, 4, 4, 1), (3,), 1, "regression", "kfac mlp deep", head="10")
    add("wide_mlp", partial(mlp, 4, 48, 3, activation=nn.GELU), (4,), 3, tags="kfac mlp wide", head="2")
    add("one_layer_regression", partial(nn.Linear, 4, 3), (4,), 3, "regression", "kfac mlp linear", head="")
    add("one_layer_classification", partial(nn.Linear, 4, 3), (4,), 3, tags="kfac mlp linear", head="")
    add("no_bias", partial(mlp, 3, 5, 3, bias=False), (3,), 3, tags="kfac mlp", head="2")
    add("one_by_one", partial(nn.Linear, 1, 1, bias=False), (1,), 1, "regression", "kfac mlp linear", head="")


def _layers_between() -> None:
    inplace = partial(mlp, 3, 6, 3, activation=partial(nn.ReLU, inplace=True))
    add("inplace_relu", inplace, (3,), 3, tags="kfac mlp inplace", head="2")
    add("prelu", partial(mlp, 3, 5, 3, activation=partial(nn.PReLU, 5)), (3,), 3, tags="prelu", head="2")
    add("layer_norm", partial(_normed, nn.LayerNorm, 3), (3,), 3, tags="norm", head="3")
    add("batch_norm_1d", partial(_normed, nn.BatchNorm1d, 2), (3,), 2, "regression", "norm", head="3")
    add("weight_norm", _weight_normed, (3,), 3, tags="parametrized", head="2")


def _frozen_parts() -> None:
    add("frozen_first_layer", lambda: _frozen(_MLP(), "0.weight", "0.bias"), (3,), 3, tags="kfac mlp frozen", head="4")
    add("frozen_bias", lambda: _frozen(_MLP(), "2.bias"), (3,), 3, tags="kfac mlp frozen", head="4")
    add("frozen_weight", lambda: _frozen(_MLP(), "2.weight"), (3,), 3, tags="kfac mlp frozen", head="4")
    add("frozen_head", lambda: _frozen(_MLP(), "4.weight", "4.bias"), (3,), 3, tags="kfac mlp frozen", head="4")
    add("lora", _adapted, (4,), 3, tags="kfac frozen adapter", head=None)


def _trailing_layers() -> None:
    layers = {"flatten": nn.Flatten, "dropout": nn.Dropout, "softmax": partial(nn.Softmax, dim=1)}
    for name, layer in layers.items():
        likelihood = "regression" if name == "softmax" else "classification"
        add(f"trailing_{name}", partial(_with_tail, layer), (3,), 3, likelihood, "kfac mlp trailing", head="2")


def _odd_uses() -> None:
    add("reused_module", dense.ReusedTwice, (3,), 3, tags="reused")
    add("functional_reuse", dense.FunctionalReuse, (3,), 2, "regression", "reused bypassed")
    add("functional_only", dense.FunctionalOnly, (3,), 2, tags="bypassed")
    add("bare_parameter", dense.BareParameter, (3,), 3, tags="bare_parameter", head=None)
    add("row_view", dense.RowView, (4, 3), 3, tags="kfac shared view")
    add("shared_positions", dense.SharedPositions, (4, 3), 3, tags="kfac shared")
    add("shared_positions_regression", dense.SharedPositions, (4, 3), 3, "regression", "kfac shared")
    add("time_major", dense.TimeMajor, (4, 3), 3, tags="kfac shared time_major")
    add("time_major_square", dense.TimeMajor, (6, 3), 3, tags="kfac shared time_major square")
    for name, model in {"pair": dense.PairReward, "pair_view": dense.PairView, "pair_cat": dense.PairCat}.items():
        add(name, model, (2, 3), 2, "reward_modeling", "kfac shared pair", head=None)
    add("dict_input", dense.DictInput, {"input_ids": (3,), "extra": (2,)}, 3, tags="kfac dict_input", head="net.2")
    add("logits_object", dense.LogitsObject, (3,), 3, tags="kfac logits_object", head="net.2")
