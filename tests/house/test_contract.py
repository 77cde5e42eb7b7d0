"""The public surface: names, paths, constructors, attributes, the factory and its errors."""

from __future__ import annotations

import gc
import importlib
import inspect

import pytest
import torch
from torch import nn

import laplace
from laplace import (
    ELLA,
    LLELLA,
    BaseLaplace,
    BlockLaplace,
    BlockLLLaplace,
    BlockSubnetLaplace,
    DiagLaplace,
    DiagLLLaplace,
    DiagSubnetLaplace,
    EkfacLaplace,
    EkfacLLLaplace,
    EkfacSubnetLaplace,
    FullLaplace,
    FullLLLaplace,
    FullSubnetLaplace,
    FunctionalLaplace,
    FunctionalLLLaplace,
    HessianStructure,
    KronLaplace,
    KronLLLaplace,
    KronSubnetLaplace,
    Laplace,
    LLLaplace,
    LLVaLLA,
    LowRankKronLaplace,
    LowRankKronLLLaplace,
    LowRankKronSubnetLaplace,
    LowRankLaplace,
    LowRankLLLaplace,
    LowRankSubnetLaplace,
    MatrixFreeLaplace,
    MatrixFreeLLLaplace,
    MatrixFreeSubnetLaplace,
    ParametricLaplace,
    SubnetLaplace,
    SubsetOfWeights,
    VaLLA,
)
from laplace.curvature import NativeEF, NativeGGN
from laplace.enums import FeatureReduction, Likelihood, LinkApprox, PredType, PriorStructure, TuningMethod
from laplace.errors import InvalidType, NotFittedError
from laplace.likelihoods import Bernoulli, Gaussian
from tests import grid

HYPER = "sigma_noise prior_precision prior_mean temperature"
KEYS = "dict_key_x dict_key_y"
COMMON = f"{HYPER} enable_backprop {KEYS} backend"
LAST = f"{HYPER} enable_backprop feature_reduction {KEYS} backend last_layer_name"
PLACES = "inducing_locations num_inducing inducing_classes"
LAST_GP = f"{HYPER} enable_backprop feature_reduction {KEYS} last_layer_name backend"
SUBNET = f"subnetwork_indices {HYPER} backend backend_kwargs asdl_fisher_kwargs"
TAIL = "backend_kwargs asdl_fisher_kwargs"

# Positional order after (model, likelihood), then what is keyword-only here.
CONSTRUCTORS = {
    BaseLaplace: (f"{COMMON} {TAIL}", None),
    ParametricLaplace: (f"{COMMON} {TAIL}", None),
    DiagLaplace: (f"{COMMON} {TAIL}", None),
    BlockLaplace: (f"{COMMON} {TAIL}", None),
    EkfacLaplace: (f"{COMMON} {TAIL}", None),
    LowRankKronLaplace: (f"{COMMON} {TAIL}", None),
    MatrixFreeLaplace: (f"{COMMON} {TAIL}", None),
    FullLaplace: (f"{COMMON} backend_kwargs", "forward_fn structure_kwargs channel_dim"),
    KronLaplace: (f"{COMMON} damping {TAIL}", "forward_fn channel_dim"),
    LowRankLaplace: (
        f"backend {COMMON.removesuffix(' backend')} backend_kwargs",
        "forward_fn structure_kwargs channel_dim",
    ),
    LLLaplace: (f"{LAST} {TAIL}", "forward_fn structure_kwargs channel_dim"),
    FullLLLaplace: (f"{LAST} {TAIL}", "forward_fn structure_kwargs channel_dim"),
    DiagLLLaplace: (f"{LAST} {TAIL}", "forward_fn structure_kwargs channel_dim"),
    BlockLLLaplace: (f"{LAST} {TAIL}", "forward_fn structure_kwargs channel_dim"),
    EkfacLLLaplace: (f"{LAST} {TAIL}", "forward_fn structure_kwargs channel_dim"),
    LowRankKronLLLaplace: (f"{LAST} {TAIL}", "forward_fn structure_kwargs channel_dim"),
    MatrixFreeLLLaplace: (f"{LAST} {TAIL}", "forward_fn structure_kwargs channel_dim"),
    KronLLLaplace: (f"{LAST} damping {TAIL}", "forward_fn channel_dim"),
    LowRankLLLaplace: (f"{LAST} {TAIL}", "forward_fn structure_kwargs channel_dim"),
    FunctionalLaplace: (
        f"n_subset {COMMON} backend_kwargs independent_outputs seed",
        "selection prior_factor forward_fn",
    ),
    FunctionalLLLaplace: (
        f"n_subset {LAST_GP} backend_kwargs independent_outputs seed",
        "selection prior_factor forward_fn",
    ),
    ELLA: (f"subsample_size n_eigenvalues {COMMON} backend_kwargs seed", "forward_fn"),
    VaLLA: (f"{PLACES} {COMMON} backend_kwargs seed alpha mc_softmax_samples", "forward_fn weights_options"),
    LLVaLLA: (f"{PLACES} {LAST_GP} backend_kwargs seed alpha mc_softmax_samples", "forward_fn"),
    LLELLA: (f"subsample_size n_eigenvalues {LAST_GP} backend_kwargs seed", "forward_fn"),
    SubnetLaplace: (SUBNET, "enable_backprop dict_key_x dict_key_y damping forward_fn structure_kwargs channel_dim"),
    FullSubnetLaplace: (
        SUBNET,
        "enable_backprop dict_key_x dict_key_y damping forward_fn structure_kwargs channel_dim",
    ),
    KronSubnetLaplace: (
        SUBNET,
        "enable_backprop dict_key_x dict_key_y damping forward_fn structure_kwargs channel_dim",
    ),
    LowRankSubnetLaplace: (
        SUBNET,
        "enable_backprop dict_key_x dict_key_y damping forward_fn structure_kwargs channel_dim",
    ),
    DiagSubnetLaplace: (
        SUBNET,
        "enable_backprop dict_key_x dict_key_y damping forward_fn structure_kwargs channel_dim",
    ),
    BlockSubnetLaplace: (
        SUBNET,
        "enable_backprop dict_key_x dict_key_y damping forward_fn structure_kwargs channel_dim",
    ),
    EkfacSubnetLaplace: (
        SUBNET,
        "enable_backprop dict_key_x dict_key_y damping forward_fn structure_kwargs channel_dim",
    ),
    MatrixFreeSubnetLaplace: (
        SUBNET,
        "enable_backprop dict_key_x dict_key_y damping forward_fn structure_kwargs channel_dim",
    ),
    LowRankKronSubnetLaplace: (
        SUBNET,
        "enable_backprop dict_key_x dict_key_y damping forward_fn structure_kwargs channel_dim",
    ),
}
DEFAULTS = {
    "sigma_noise": 1.0,
    "prior_precision": 1.0,
    "prior_mean": 0.0,
    "temperature": 1.0,
    "enable_backprop": False,
    "dict_key_x": "input_ids",
    "dict_key_y": "labels",
    "backend": None,
    "backend_kwargs": None,
    "asdl_fisher_kwargs": None,
    "damping": False,
    "feature_reduction": None,
    "last_layer_name": None,
    "forward_fn": None,
    "structure_kwargs": None,
    "subnetwork_indices": inspect.Parameter.empty,
}
CONCRETE = {
    ("all", "full"): FullLaplace,
    ("all", "kron"): KronLaplace,
    ("all", "diag"): DiagLaplace,
    ("last_layer", "full"): FullLLLaplace,
    ("last_layer", "kron"): KronLLLaplace,
    ("last_layer", "diag"): DiagLLLaplace,
    ("subnetwork", "full"): FullSubnetLaplace,
    ("subnetwork", "kron"): KronSubnetLaplace,
    ("subnetwork", "diag"): DiagSubnetLaplace,
    ("all", "block"): BlockLaplace,
    ("last_layer", "block"): BlockLLLaplace,
    ("subnetwork", "block"): BlockSubnetLaplace,
    ("all", "lowrank"): LowRankLaplace,
    ("last_layer", "lowrank"): LowRankLLLaplace,
    ("subnetwork", "lowrank"): LowRankSubnetLaplace,
    ("all", "ekfac"): EkfacLaplace,
    ("last_layer", "ekfac"): EkfacLLLaplace,
    ("subnetwork", "ekfac"): EkfacSubnetLaplace,
    ("all", "lowrank_kron"): LowRankKronLaplace,
    ("last_layer", "lowrank_kron"): LowRankKronLLLaplace,
    ("subnetwork", "lowrank_kron"): LowRankKronSubnetLaplace,
    ("all", "matrix_free"): MatrixFreeLaplace,
    ("last_layer", "matrix_free"): MatrixFreeLLLaplace,
    ("subnetwork", "matrix_free"): MatrixFreeSubnetLaplace,
}


@pytest.mark.parametrize("cls", CONSTRUCTORS, ids=lambda cls: cls.__name__)
def test_constructor_arguments(cls) -> None:
    """Names, order and defaults."""
    positional, extra = CONSTRUCTORS[cls]
    parameters = inspect.signature(cls).parameters.values()
    ordered = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ordered == ["model", "likelihood", *positional.split()]
    if extra is not None:
        assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == extra.split()
    assert {p.name: p.default for p in parameters if p.name in DEFAULTS} == {
        p.name: DEFAULTS[p.name] for p in parameters if p.name in DEFAULTS
    }


@pytest.mark.parametrize("cls", CONCRETE.values(), ids=lambda cls: cls.__name__)
def test_constructor_arguments_can_be_given_by_position_and_read_back(cls) -> None:
    linear = nn.Linear(2, 1)
    model = nn.Sequential(linear, nn.Tanh(), nn.Linear(1, 1))
    given = {
        "sigma_noise": 0.5,
        "prior_precision": 2.0,
        "prior_mean": 0.1,
        "temperature": 0.7,
        "enable_backprop": True,
        "feature_reduction": "average",
        "dict_key_x": "x",
        "dict_key_y": "y",
        "backend": NativeEF,
        "last_layer_name": "2",
        "damping": True,
        "backend_kwargs": {"kfac_approx": "reduce"},
        "asdl_fisher_kwargs": None,
        "subnetwork_indices": torch.tensor([3, 1]),
    }
    positional, extra = CONSTRUCTORS[cls]
    names = positional.split()
    keywords = {name: given[name] for name in (extra or "").split() if name in given}
    if cls.structure.name != "kron":
        keywords.pop("damping", None)
        if "damping" in (extra or ""):
            with pytest.raises(ValueError, match="damping"):
                cls(model, "regression", *[given[name] for name in names], damping=True)
    la = cls(model, "regression", *[given[name] for name in names], **keywords, forward_fn=forward)
    assert (la.model.model if "last_layer_name" in names else la.model) is model
    assert la.likelihood == "regression"
    assert la.forward_fn is forward
    for name in [*names, *keywords]:
        found = getattr(la, name)
        if name == "backend":
            assert isinstance(found, NativeEF)
        elif name == "asdl_fisher_kwargs":
            assert not found
        elif isinstance(found, torch.Tensor):
            torch.testing.assert_close(found.reshape(-1), torch.as_tensor(given[name]).reshape(-1))
        else:
            assert found == given[name], name


def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def test_attributes_of_the_contract() -> None:
    """What users read off an object, before and after a fit."""
    model = grid.network()
    la = Laplace(model, "classification", "all", "kron")
    assert (la.n_params, la.n_layers, la.n_data, la.n_outputs, la.loss) == (38, 4, 0, 0, 0.0)
    assert la.is_subset_params is False
    assert [p is q for p, q in zip(la.params, model.parameters(), strict=True)] == [True] * 4
    assert la.mean == la.prior_mean
    assert la.prior_precision.shape == (1,)
    assert la.prior_mean.shape == la.sigma_noise.shape == la.temperature.shape == ()
    assert isinstance(la.backend, NativeGGN)
    la.fit(grid.batches())
    assert (la.n_data, la.n_outputs) == (12, 3)
    expected = nn.functional.cross_entropy(model.eval()(grid.data()[0]), grid.data()[1], reduction="sum")
    torch.testing.assert_close(la.loss, expected.detach())
    assert la.loss.item() == float(la.loss)
    torch.testing.assert_close(la.mean, nn.utils.parameters_to_vector(model.parameters()).detach())
    assert [len(factors) for factors in la.H_facs.kfacs] == [2, 1, 2, 1]
    assert la.H_facs.kfacs[0][0].shape == (5, 5)
    assert la.H_facs.kfacs[0][1].shape == (3, 3)
    assert la.damping is False
    assert la.prior_precision_diag.shape == (38,)


def test_attributes_of_a_last_layer() -> None:
    la = Laplace(grid.network(), "classification")
    assert (la.last_layer_name, la.n_params, la.n_layers) == (None, None, None)
    for name in ("params", "backend", "problem", "prior", "prior_precision_diag"):
        with pytest.raises(NotFittedError, match="last_layer_name"):
            getattr(la, name)
    la.fit(grid.batches())
    assert (la.last_layer_name, la.n_params, la.n_layers, la.mean.shape) == ("3", 18, 2, (18,))
    assert la.feature_reduction is None


def test_attributes_of_a_subnetwork() -> None:
    la = grid.fitted("subnetwork", "full")
    assert la.n_params_subnet == len(grid.INDICES)
    whole = nn.utils.parameters_to_vector(la.model.parameters()).detach()
    torch.testing.assert_close(la.mean_subnet, whole[grid.INDICES])
    samples = la.assemble_full_samples(torch.zeros(4, len(grid.INDICES)))
    assert samples.shape == la.sample(4).shape == (4, 38)
    assert (samples[:, grid.INDICES] == 0).all()
    rest = torch.ones(38, dtype=torch.bool).index_fill(0, grid.INDICES, False)
    torch.testing.assert_close(samples[:, rest], whole[rest].expand(4, -1))


@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_fast_functional_variance_is_the_diagonal(weights: str, structure: str) -> None:
    la = grid.fitted(weights, structure, "regression", sigma_noise=0.5)
    x = grid.data("regression")[0]
    mean, variance = la.functional_variance_fast(x)
    whole_mean, whole = la(x)
    torch.testing.assert_close(mean, whole_mean)
    torch.testing.assert_close(variance, whole.diagonal(dim1=1, dim2=2))


# The factory.


@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_factory(weights: str, structure: str) -> None:
    """Strings and enum members alike, in any mixture."""
    expected = CONCRETE[weights, structure]
    options = {"subnetwork_indices": grid.INDICES} if weights == "subnetwork" else {}
    pairs = [
        (weights, structure),
        (SubsetOfWeights(weights), HessianStructure(structure)),
        (SubsetOfWeights(weights), structure),
    ]
    for pair in pairs:
        la = Laplace(grid.network(), Likelihood.CLASSIFICATION, *pair, **options)
        assert type(la) is expected
    assert (weights, structure) == expected._key == (SubsetOfWeights(weights), HessianStructure(structure))


def test_factory_default_and_positional_arguments() -> None:
    la = Laplace(grid.network(), "regression", "all", "diag", 0.5, 2.0)
    assert (la.sigma_noise.item(), la.prior_precision.item()) == (0.5, 2.0)
    assert type(Laplace(grid.network(), "classification")) is KronLLLaplace
    assert inspect.isfunction(Laplace)
    parameters = inspect.signature(Laplace).parameters
    assert parameters["subset_of_weights"].default is SubsetOfWeights.LAST_LAYER
    assert parameters["hessian_structure"].default is HessianStructure.KRON


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("classification", "all", "fulll"), {}, ValueError, "hessian_structure='fulll'; .*'all' accepted are .*diag"),
        (("classification", "al", "full"), {}, ValueError, "subset_of_weights='al'; accepted are .*'all'"),
        (("classification", "most", "full"), {}, ValueError, "subset_of_weights='most'"),
        (("classification", "subnetwork", "gp"), {}, ValueError, "subnetwork"),
        (("classification", "all", "full"), {"functional_approximation": "magic"}, ValueError, "sod"),
        (("classification", "all", "full"), {"functional_approximation": "nystrom"}, ValueError, "needs hess"),
        (("classification", "subnetwork", "full"), {}, TypeError, "subnetwork_indices"),
        (("classification", "all", "full"), {"asdl_fisher_kwargs": {}}, TypeError, "asdl_fisher_kwargs"),
        (("classification", "all", "full"), {"damping": True}, TypeError, "damping"),
        (("classification", "last_layer", "kron"), {"asdl_fisher_kwargs": {"a": 1}}, ValueError, "backend_kwargs"),
        (("classifcation", "all", "full"), {}, ValueError, "accepted are 'regression', 'classification'"),
        ((Gaussian, "all", "full"), {}, ValueError, "add parentheses"),
        ((None, "all", "full"), {}, ValueError, "likelihood=None"),
    ],
)
def test_factory_errors(arguments, options, error, message) -> None:
    with pytest.raises(error, match=message):
        Laplace(grid.network(), *arguments, **options)


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(InvalidType, match=r"nn\.Module"):
        Laplace(lambda x: x, "classification", "all", "full")
    with pytest.raises(InvalidType, match=r"nn\.Module"):
        Laplace(lambda x: x, "classification")


def test_a_likelihood_object_is_accepted() -> None:
    la = Laplace(grid.network(), Bernoulli(), "all", "diag")
    assert isinstance(la.likelihood, Bernoulli)
    la.fit(grid.batches("bernoulli"))
    twin = Laplace(grid.network(), "bernoulli", "all", "diag")
    twin.fit(grid.batches("bernoulli"))
    assert torch.equal(la.H, twin.H)


def test_a_user_s_class_is_found_by_its_key() -> None:
    class Mine(DiagLaplace):
        _key = ("all", "mine")

    class Inheriting(FullLaplace):
        pass

    class Replacing(FullLaplace):
        _key = ("all", "diag")

    try:
        assert type(Laplace(grid.network(), "classification", "all", "mine")) is Mine
        assert type(Laplace(grid.network(), "classification", "all", "full")) is FullLaplace
        assert type(Laplace(grid.network(), "classification", "all", "diag")) is Replacing
    finally:
        del Mine, Inheriting, Replacing
        gc.collect()
    assert type(Laplace(grid.network(), "classification", "all", "diag")) is DiagLaplace


def test_hierarchy() -> None:
    for (weights, structure), cls in CONCRETE.items():
        assert issubclass(cls, ParametricLaplace)
        assert issubclass(cls, CONCRETE["all", structure])
        assert issubclass(cls, LLLaplace) is (weights == "last_layer")
        assert issubclass(cls, SubnetLaplace) is (weights == "subnetwork")
    assert issubclass(ParametricLaplace, BaseLaplace)
    assert not issubclass(KronLLLaplace, (FullLaplace, DiagLaplace))
    with pytest.raises(TypeError, match="abstract"):
        BaseLaplace(grid.network(), "classification")


# Names and paths.

ALL = (
    "Laplace BaseLaplace ParametricLaplace FullLaplace KronLaplace DiagLaplace LLLaplace FullLLLaplace KronLLLaplace "
    "DiagLLLaplace SubnetLaplace FullSubnetLaplace KronSubnetLaplace DiagSubnetLaplace SubsetOfWeights "
    "FunctionalApproximation HessianStructure Likelihood PredType LinkApprox TuningMethod PriorStructure "
    "marglik_training"
).split()
ENUMS = (
    "SubsetOfWeights FunctionalApproximation HessianStructure Likelihood PredType LinkApprox TuningMethod "
    "PriorStructure"
)
MASKS = (
    "SubnetMask RandomSubnetMask LargestMagnitudeSubnetMask LargestVarianceDiagLaplaceSubnetMask "
    "LargestVarianceSWAGSubnetMask ParamNameSubnetMask ModuleNameSubnetMask LastLayerSubnetMask"
)
HELPERS = (
    "get_nll validate parameters_per_layer invsqrt_precision kron diagonal_add_scalar symeig block_diag "
    "normal_samples expand_prior_precision fix_prior_prec_structure SoDSampler _is_batchnorm _is_valid_scalar"
)
FUNCTIONAL = (
    "batch_size classification_targets concatenate_rows draw_gaussian preserve_model_gradients regression_targets "
    "same_configuration select_rows split_batch subset_loader to_device training_indices"
)
PATHS = {
    "laplace.laplace": "Laplace _all_subclasses",
    "laplace.baselaplace": (
        "BaseLaplace ParametricLaplace FullLaplace KronLaplace DiagLaplace Likelihood LinkApprox PredType "
        "PriorStructure TuningMethod Kron KronDecomposed RunningNLLMetric SoDSampler validate invsqrt_precision "
        "normal_samples fix_prior_prec_structure"
    ),
    "laplace.lllaplace": "LLLaplace FullLLLaplace KronLLLaplace DiagLLLaplace",
    "laplace.subnetlaplace": "SubnetLaplace FullSubnetLaplace DiagSubnetLaplace",
    "laplace.curvature": "CurvatureInterface NativeGGN NativeEF",
    "laplace.utils": f"{HELPERS} FeatureExtractor Kron KronDecomposed fit_diagonal_swag_var {MASKS} "
    f"RunningNLLMetric {ENUMS} {FUNCTIONAL}",
    "laplace.utils.enums": ENUMS,
    "laplace.utils.matrix": "Kron KronDecomposed",
    "laplace.utils.feature_extractor": "FeatureReduction FeatureExtractor",
    "laplace.utils.metrics": "RunningNLLMetric",
    "laplace.utils.subnetmask": f"{MASKS} ScoreBasedSubnetMask",
    "laplace.utils.swag": "fit_diagonal_swag_var",
    "laplace.utils.utils": HELPERS,
    "laplace.utils.functional_utils": FUNCTIONAL,
}


def test_all() -> None:
    assert set(laplace.__all__) >= set(ALL)
    assert set(laplace.__all__) <= set(dir(laplace))
    namespace: dict[str, object] = {}
    exec("from laplace import *", namespace)
    assert set(laplace.__all__) <= namespace.keys()


@pytest.mark.parametrize("path", PATHS)
def test_dotted_paths(path: str) -> None:
    module = importlib.import_module(path)
    assert not [name for name in PATHS[path].split() if getattr(module, name, None) is None]


def test_one_object_behind_every_path() -> None:
    from laplace.baselaplace import FullLaplace as Old
    from laplace.lllaplace import KronLLLaplace as OldLL
    from laplace.utils import RunningNLLMetric
    from laplace.utils.enums import PredType as OldEnum

    assert Old is FullLaplace
    assert OldLL is KronLLLaplace
    assert OldEnum is PredType
    assert callable(laplace.utils.kron)
    assert laplace.laplace.Laplace is Laplace
    assert RunningNLLMetric is laplace.utils.metrics.RunningNLLMetric


ENUM_VALUES = {
    SubsetOfWeights: "all last_layer subnetwork",
    HessianStructure: "full kron diag lowrank block ekfac lowrank_kron matrix_free gp",
    laplace.FunctionalApproximation: "sod nystrom variational",
    Likelihood: "regression classification reward_modeling bernoulli poisson heteroscedastic mean_log_variance",
    PredType: "glm nn gp",
    LinkApprox: "mc probit probit_centred bridge bridge_norm delta",
    TuningMethod: "marglik gridsearch CV em",
    PriorStructure: "scalar diag layerwise",
    FeatureReduction: "pick_first pick_last average",
}


@pytest.mark.parametrize("enum", ENUM_VALUES, ids=lambda enum: enum.__name__)
def test_enums(enum) -> None:
    values = ENUM_VALUES[enum].split()
    assert [member.value for member in enum] == values
    for member in enum:
        assert isinstance(member, str)
        assert member == member.value == str(member)
        assert hash(member) == hash(member.value)
        assert getattr(enum, member.value.upper()) is member


@pytest.mark.parametrize("link", LinkApprox)
def test_members_and_strings_are_interchangeable_in_calls(link: LinkApprox) -> None:
    la = grid.fitted("all", "kron")
    x = grid.data()[0]
    seed = torch.Generator().manual_seed(0)
    by_member = la(x, PredType.GLM, link_approx=link, generator=seed)
    seed = torch.Generator().manual_seed(0)
    assert torch.equal(by_member, la(x, "glm", link_approx=link.value, generator=seed))


def test_predictive_takes_all_options_by_position() -> None:
    la = grid.fitted("all", "diag")
    x = grid.data()[0]
    assert torch.equal(la.predictive(x, "glm", "bridge", 10), la(x, link_approx="bridge"))
