"""The legacy dotted paths, as one table: module path → {name: where the object lives now}.

A new name is one line here. `TABLE` holds what a module lists in `__all__`; `ALSO` holds what was merely
importable from it. Targets are `"real.module:attribute"` and are imported on first use only.
"""

from __future__ import annotations

from collections.abc import Mapping

from laplace.core.lazy import at

_ENUMS = at(
    "laplace.enums",
    "SubsetOfWeights FunctionalApproximation HessianStructure Likelihood PredType LinkApprox TuningMethod "
    "PriorStructure",
)
_MATRIX = {
    "Kron": "laplace.compat.kronecker.matrix:Kron",
    "KronDecomposed": "laplace.compat.kronecker.decomposed:KronDecomposed",
}
_METRICS = at("laplace.metrics", "RunningNLLMetric")
_EXTRACTOR = at("laplace.weights.last_layer", "FeatureExtractor")
_SWAG = at("laplace.weights.masks", "fit_diagonal_swag_var")
_MASKS = at(
    "laplace.weights.masks",
    "SubnetMask ParamNameSubnetMask ModuleNameSubnetMask LastLayerSubnetMask RandomSubnetMask "
    "LargestMagnitudeSubnetMask LargestVarianceDiagLaplaceSubnetMask LargestVarianceSWAGSubnetMask RegexSubnetMask "
    "ModuleTypeSubnetMask CallableSubnetMask",
)
_HELPERS = {
    **at(
        "laplace.compat.helpers",
        "get_nll validate parameters_per_layer expand_prior_precision fix_prior_prec_structure SoDSampler "
        "_is_batchnorm _is_valid_scalar",
    ),
    **at(
        "laplace.compat.algebra",
        "invsqrt_precision kron diagonal_add_scalar symeig block_diag normal_samples",
    ),
}
_FUNCTIONAL = at(
    "laplace.compat.functional_utils",
    "batch_size classification_targets concatenate_rows draw_gaussian preserve_model_gradients regression_targets "
    "same_configuration select_rows split_batch subset_loader to_device training_indices",
)

TABLE: dict[str, Mapping[str, str]] = {
    "laplace.laplace": at("laplace.grid", "Laplace"),
    "laplace.baselaplace": {
        **at("laplace.grid", "BaseLaplace BaseFunctionalLaplace ParametricLaplace"),
        **at("laplace.grid", "FullLaplace KronLaplace DiagLaplace LowRankLaplace"),
        **at("laplace.function_space", "FunctionalLaplace ELLA VaLLA"),
    },
    "laplace.lllaplace": {
        **at("laplace.grid", "LLLaplace FullLLLaplace KronLLLaplace DiagLLLaplace"),
        **at("laplace.function_space", "FunctionalLLLaplace"),
    },
    "laplace.subnetlaplace": at("laplace.grid", "SubnetLaplace FullSubnetLaplace KronSubnetLaplace DiagSubnetLaplace"),
    "laplace.marglik_training": at("laplace.training.online", "marglik_training"),
    "laplace.curvature.curvature": at("laplace.curvature.interface", "CurvatureInterface GGNInterface EFInterface"),
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
    "laplace.utils.feature_extractor": {**at("laplace.enums", "FeatureReduction"), **_EXTRACTOR},
    "laplace.utils.metrics": _METRICS,
    "laplace.utils.subnetmask": {**_MASKS, **at("laplace.weights.masks", "ScoreBasedSubnetMask")},
    "laplace.utils.swag": _SWAG,
    "laplace.utils.utils": _HELPERS,
    "laplace.utils.functional_utils": _FUNCTIONAL,
    # Where this library had its documented names before.
    "laplace.curvature.blocks": at("laplace.jacobian.blocks", "Block DenseBlock"),
    "laplace.curvature.native": {},
    "laplace.curvature.native.layers": {},
    "laplace.curvature.native.layers.base": {
        **at("laplace.curvature.rules", "LayerRule evenly files"),
    },
    "laplace.engines.native.layers": {},
    "laplace.engines.native.layers.base": at("laplace.curvature.rules", "evenly"),
    "laplace.engines.native.ggn": at("laplace.engines.native.kinds", "GGNEngine"),
    "laplace.weights.masks_scored": at("laplace.weights.masks", "ScoreBasedSubnetMask"),
    "laplace.factory": at("laplace.grid", "Laplace from_names"),
    "laplace.likelihoods.decomposition": at("laplace.likelihoods.targets", "Decomposition"),
    "laplace.posterior.base": at("laplace.grid", "BaseLaplace"),
    "laplace.posterior.parametric": at("laplace.grid", "ParametricLaplace"),
    "laplace.predictive.links": at("laplace.likelihoods.links", "LINKS"),
}

ALSO: dict[str, Mapping[str, str]] = {
    "laplace.utils.functional_utils": at(
        "laplace.compat.functional_utils", "_individual_reward_inputs _model_fingerprint _check_model_fingerprint"
    ),
    "laplace.laplace": {
        **at("laplace.compat.helpers", "_all_subclasses"),
        **at("laplace.grid", "BaseLaplace"),
    },
    "laplace.baselaplace": {
        **at("laplace.enums", "Likelihood LinkApprox PredType PriorStructure TuningMethod"),
        **_MATRIX,
        **_METRICS,
        **at("laplace.compat.helpers", "SoDSampler validate fix_prior_prec_structure"),
        **at("laplace.compat.algebra", "invsqrt_precision normal_samples"),
    },
}
