"""Legacy dotted paths: one table of module path → {name: where the object lives now}, served by the import system.

A new name is one line here. `TABLE` holds what a module lists in `__all__`; `ALSO` holds what was merely
importable from it. Targets are `"real.module:attribute"` and are imported on first use only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from laplace.core.lazy import attached, lazy_names
from laplace.errors import InstallationWarning, warn

_ENUMS = lazy_names(
    "laplace.enums",
    "SubsetOfWeights FunctionalApproximation HessianStructure Likelihood PredType LinkApprox TuningMethod "
    "PriorStructure",
)
_MATRIX = {
    "Kron": "laplace.compat.kron:Kron",
    "KronDecomposed": "laplace.compat.kron:KronDecomposed",
}
_METRICS = lazy_names("laplace.metrics", "RunningNLLMetric")
_EXTRACTOR = lazy_names("laplace.weights.last_layer", "FeatureExtractor")
_SWAG = lazy_names("laplace.weights.masks", "fit_diagonal_swag_var")
_MASKS = lazy_names(
    "laplace.weights.masks",
    "SubnetMask ParamNameSubnetMask ModuleNameSubnetMask LastLayerSubnetMask RandomSubnetMask "
    "LargestMagnitudeSubnetMask LargestVarianceDiagLaplaceSubnetMask LargestVarianceSWAGSubnetMask RegexSubnetMask "
    "ModuleTypeSubnetMask CallableSubnetMask",
)
_HELPERS = {
    **lazy_names(
        "laplace.compat.helpers",
        "get_nll validate parameters_per_layer expand_prior_precision fix_prior_prec_structure SoDSampler "
        "_is_batchnorm invsqrt_precision kron diagonal_add_scalar symeig block_diag normal_samples",
    ),
    "_is_valid_scalar": "laplace.compat.kron:is_scalar",
}
_FUNCTIONAL = lazy_names(
    "laplace.compat.helpers",
    "batch_size classification_targets concatenate_rows draw_gaussian preserve_model_gradients regression_targets "
    "same_configuration select_rows split_batch subset_loader to_device training_indices",
)

TABLE: dict[str, Mapping[str, str]] = {
    "laplace.laplace": lazy_names("laplace.grid", "Laplace"),
    "laplace.baselaplace": {
        **lazy_names("laplace.grid", "BaseLaplace BaseFunctionalLaplace ParametricLaplace"),
        **lazy_names("laplace.grid", "FullLaplace KronLaplace DiagLaplace LowRankLaplace"),
        **lazy_names("laplace.function_space", "FunctionalLaplace ELLA VaLLA"),
    },
    "laplace.lllaplace": {
        **lazy_names("laplace.grid", "LLLaplace FullLLLaplace KronLLLaplace DiagLLLaplace"),
        **lazy_names("laplace.function_space", "FunctionalLLLaplace"),
    },
    "laplace.subnetlaplace": lazy_names(
        "laplace.grid", "SubnetLaplace FullSubnetLaplace KronSubnetLaplace DiagSubnetLaplace"
    ),
    "laplace.marglik_training": lazy_names("laplace.training.online", "marglik_training"),
    "laplace.curvature.curvature": lazy_names(
        "laplace.curvature.interface", "CurvatureInterface GGNInterface EFInterface"
    ),
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
    "laplace.utils.feature_extractor": {**lazy_names("laplace.enums", "FeatureReduction"), **_EXTRACTOR},
    "laplace.utils.metrics": _METRICS,
    "laplace.utils.subnetmask": {**_MASKS, **lazy_names("laplace.weights.masks", "ScoreBasedSubnetMask")},
    "laplace.utils.swag": _SWAG,
    "laplace.utils.utils": _HELPERS,
    "laplace.utils.functional_utils": _FUNCTIONAL,
    # Where this library had its documented names before.
    "laplace.curvature.blocks": lazy_names("laplace.jacobian.blocks", "Block DenseBlock"),
    "laplace.curvature.native": {},
    "laplace.curvature.native.layers": {},
    "laplace.curvature.native.layers.base": {
        **lazy_names("laplace.curvature.rules", "LayerRule evenly files"),
    },
    "laplace.engines.native.layers": {},
    "laplace.engines.native.layers.base": lazy_names("laplace.curvature.rules", "evenly"),
    "laplace.engines.native.ggn": lazy_names("laplace.engines.native.kinds", "GGNEngine"),
    "laplace.weights.masks_scored": lazy_names("laplace.weights.masks", "ScoreBasedSubnetMask"),
    "laplace.factory": lazy_names("laplace.grid", "Laplace from_names"),
    "laplace.likelihoods.decomposition": lazy_names("laplace.likelihoods.targets", "Decomposition"),
    "laplace.posterior.base": lazy_names("laplace.grid", "BaseLaplace"),
    "laplace.posterior.parametric": lazy_names("laplace.grid", "ParametricLaplace"),
    "laplace.predictive.links": lazy_names("laplace.likelihoods.links", "LINKS"),
}

ALSO: dict[str, Mapping[str, str]] = {
    "laplace.utils.functional_utils": lazy_names(
        "laplace.compat.helpers", "_individual_reward_inputs _model_fingerprint _check_model_fingerprint"
    ),
    "laplace.laplace": {
        **lazy_names("laplace.compat.helpers", "_all_subclasses"),
        **lazy_names("laplace.grid", "BaseLaplace"),
    },
    "laplace.baselaplace": {
        **lazy_names("laplace.enums", "Likelihood LinkApprox PredType PriorStructure TuningMethod"),
        **_MATRIX,
        **_METRICS,
        **lazy_names(
            "laplace.compat.helpers", "SoDSampler validate fix_prior_prec_structure invsqrt_precision normal_samples"
        ),
    },
}


# Modules that exist only as names.

Names = Mapping[str, str]
Table = Mapping[str, Names]


class LegacyFinder(MetaPathFinder, Loader):
    """Finds and fills the modules of a table.

    The attributes of each are looked up on first use (PEP 562) in the modules where they live now, so that making the
    modules imports nothing. The finder stands last on `sys.meta_path`: a real file of the same name is found first.
    """

    def __init__(self, table: Table, also: Table) -> None:
        self.table = table
        self.also = also

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table, None for any other."""
        if fullname not in self.table:
            return None
        is_package = bool(self._children(fullname))
        return ModuleSpec(fullname, self, origin="legacy path", is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Gives the empty module its lazy attributes."""
        name = module.__name__
        public = self.table[name]
        children = self._children(name)
        targets = {**self.also.get(name, {}), **public}
        module.__doc__ = f"Legacy path {name}: the names of an older interface; each refers to where it lives now."
        module.__dict__["__all__"] = list(public)
        module.__dict__["__getattr__"], module.__dict__["__dir__"] = attached(name, targets, children.__contains__)

    def _children(self, name: str) -> list[str]:
        prefix = f"{name}."
        return [path.removeprefix(prefix) for path in self.table if path.startswith(prefix)]


def install(table: Table = TABLE, also: Table = ALSO) -> LegacyFinder:
    """Makes the paths of a table importable, and attributes of their packages; a repeated call does nothing."""
    for finder in sys.meta_path:
        if isinstance(finder, LegacyFinder) and finder.table is table:
            return finder
    finder = LegacyFinder(table, also)
    sys.meta_path.append(finder)
    for path in sorted(table):
        _attach(path, finder)
    return finder


def _attach(path: str, finder: LegacyFinder) -> None:
    """Makes the module now, so that `laplace.utils.Kron` works after a bare `import laplace`.

    Making it early also settles who owns a name: where a module exports a function of its own name, the attribute of
    the package must stay the function, and only the first import of a submodule binds the attribute.
    """
    parent_name, _, leaf = path.rpartition(".")
    parent = import_module(parent_name)
    places = getattr(parent, "__path__", None)
    if places is None or PathFinder.find_spec(path, places) is not None:
        return  # the module is a real file, or its parent is one and no package
    import_module(path)
    if leaf in finder.table[path]:
        parent.__dict__.pop(leaf, None)


# The other package of this import name, in the same environment.

OWN, OTHER = "laplace-bayes", "laplace-torch"
_OF_THEIRS = "laplace/baselaplace.py"
"""A file that every release of laplace-torch has, and this library has not."""


def check_installation() -> None:
    """Warns if files of laplace-torch, which is imported as `laplace` too, lie in this environment.

    One look at the names of the installed distributions; only of one of this name is the list of files read. A stand-in
    of its name has metadata alone, see `laplace.stand_in`.
    """
    if not any(_has_files(found) for found in metadata.distributions(name=OTHER)):
        return
    warn(
        f"{OTHER} is installed in this environment too, and both packages are imported as `laplace`: in one folder "
        "the later install overwrites files of the earlier, which leaves a mixture of both; of two folders, the first "
        f"on sys.path is imported. Run `pip uninstall {OWN} {OTHER}`, then install this library again; for a package "
        f"that requires {OTHER}, `python -m laplace.stand_in` writes one that asks for this library.",
        InstallationWarning,
    )


def _has_files(distribution: metadata.Distribution) -> bool:
    """Whether a distribution brought modules of the name `laplace`."""
    files = distribution.files
    if files is None:  # no list was left
        return Path(str(distribution.locate_file(_OF_THEIRS))).exists()
    return any(file.parts[0] == "laplace" for file in files)
