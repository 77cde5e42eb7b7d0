"""The legacy dotted paths, as one table: module path → {name: where the object lives now}.

A new name is one line here. `TABLE` holds what a module lists in `__all__`; `ALSO` holds what was merely
importable from it. Targets are `"real.module:attribute"` and are imported on first use only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def _at(module: str, names: str | Iterable[str]) -> dict[str, str]:
    """`{name: "module:name"}` for names given as one string or as an iterable."""
    listed = names.split() if isinstance(names, str) else names
    return {name: f"{module}:{name}" for name in listed}


_ENUMS = _at(
    "laplace.enums",
    "SubsetOfWeights FunctionalApproximation HessianStructure Likelihood PredType LinkApprox TuningMethod "
    "PriorStructure",
)
_MATRIX = {
    "Kron": "laplace.compat.kronecker.matrix:Kron",
    "KronDecomposed": "laplace.compat.kronecker.decomposed:KronDecomposed",
}
_METRICS = _at("laplace.metrics", "RunningNLLMetric")
_EXTRACTOR = _at("laplace.weights.feature_extractor", "FeatureExtractor")
_SWAG = _at("laplace.weights.swag", "fit_diagonal_swag_var")
_MASKS = {
    **_at("laplace.weights.masks", "SubnetMask ParamNameSubnetMask ModuleNameSubnetMask LastLayerSubnetMask"),
    **_at(
        "laplace.weights.masks_scored",
        "RandomSubnetMask LargestMagnitudeSubnetMask LargestVarianceDiagLaplaceSubnetMask "
        "LargestVarianceSWAGSubnetMask",
    ),
    **_at("laplace.weights.masks_matching", "RegexSubnetMask ModuleTypeSubnetMask CallableSubnetMask"),
}
_HELPERS = {
    **_at(
        "laplace.compat.helpers",
        "get_nll validate parameters_per_layer expand_prior_precision fix_prior_prec_structure SoDSampler "
        "_is_batchnorm _is_valid_scalar",
    ),
    **_at(
        "laplace.compat.algebra",
        "invsqrt_precision kron diagonal_add_scalar symeig block_diag normal_samples",
    ),
}
_FUNCTIONAL = _at(
    "laplace.compat.functional_utils",
    "batch_size classification_targets concatenate_rows draw_gaussian preserve_model_gradients regression_targets "
    "same_configuration select_rows split_batch subset_loader to_device training_indices",
)

TABLE: dict[str, Mapping[str, str]] = {
    "laplace.laplace": _at("laplace.factory", "Laplace"),
    "laplace.baselaplace": {
        **_at("laplace.base", "BaseLaplace"),
        **_at("laplace.parametric", "ParametricLaplace"),
        **_at("laplace.named", "FullLaplace KronLaplace DiagLaplace LowRankLaplace"),
        **_at("laplace.function_space", "BaseFunctionalLaplace FunctionalLaplace ELLA VaLLA"),
    },
    "laplace.lllaplace": {
        **_at("laplace.named", "LLLaplace FullLLLaplace KronLLLaplace DiagLLLaplace"),
        **_at("laplace.function_space", "FunctionalLLLaplace"),
    },
    "laplace.subnetlaplace": _at(
        "laplace.named", "SubnetLaplace FullSubnetLaplace KronSubnetLaplace DiagSubnetLaplace"
    ),
    "laplace.marglik_training": _at("laplace.training.marglik", "marglik_training"),
    "laplace.curvature.curvature": _at("laplace.curvature.interface", "CurvatureInterface GGNInterface EFInterface"),
    # The module asdfghjkl became asdl, which the package of the old name installs: the names mean its backends.
    "laplace.curvature.asdfghjkl": {
        f"Asdfghjkl{kind}": f"laplace.curvature.asdl:Asdl{kind}" for kind in ("Interface", "GGN", "EF", "Hessian")
    },
    "laplace.utils": {
        **_HELPERS,
        **_EXTRACTOR,
        **_MATRIX,
        **_SWAG,
        **_MASKS,
        **_METRICS,
        **_ENUMS,
        **_FUNCTIONAL,
    },
    "laplace.utils.enums": _ENUMS,
    "laplace.utils.matrix": _MATRIX,
    "laplace.utils.feature_extractor": {**_at("laplace.enums", "FeatureReduction"), **_EXTRACTOR},
    "laplace.utils.metrics": _METRICS,
    "laplace.utils.subnetmask": {**_MASKS, **_at("laplace.weights.masks_scored", "ScoreBasedSubnetMask")},
    "laplace.utils.swag": _SWAG,
    "laplace.utils.utils": _HELPERS,
    "laplace.utils.functional_utils": _FUNCTIONAL,
    # Where this library had its documented names before.
    "laplace.curvature.blocks": _at("laplace.jacobian.blocks", "Block DenseBlock"),
    "laplace.curvature.native": {},
    "laplace.curvature.native.layers": {},
    "laplace.curvature.native.layers.base": {
        **_at("laplace.engines.native.layers.base", "evenly"),
        **_at("laplace.curvature.rules", "LayerRule files"),
    },
    "laplace.posterior.base": _at("laplace.base", "BaseLaplace"),
    "laplace.posterior.parametric": _at("laplace.parametric", "ParametricLaplace"),
    "laplace.predictive.links": _at("laplace.likelihoods.links", "LINKS"),
}

ALSO: dict[str, Mapping[str, str]] = {
    "laplace.laplace": {
        **_at("laplace.compat.helpers", "_all_subclasses"),
        **_at("laplace.base", "BaseLaplace"),
    },
    "laplace.baselaplace": {
        **_at("laplace.enums", "Likelihood LinkApprox PredType PriorStructure TuningMethod"),
        **_MATRIX,
        **_METRICS,
        **_at("laplace.compat.helpers", "SoDSampler validate fix_prior_prec_structure"),
        **_at("laplace.compat.algebra", "invsqrt_precision normal_samples"),
    },
}
