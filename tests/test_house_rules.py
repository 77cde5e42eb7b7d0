"""The house rules, checked by reading the source of the package.

A rule that has exceptions keeps them in a table here: an exception is a line in a diff, and has a reason beside it.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "laplace"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FILE, MAX_FUNCTION, MEDIAN_FUNCTION, MAX_METHODS = 400, 60, 10, 15

# Classes that carry the names of the contract and may have more public methods.
LONG_CLASSES = {"BaseLaplace", "ParametricLaplace"}

# Who may import whom: a module imports from its own rank and from lower ones.
RANKS = {
    0: ["errors", "enums"],
    1: ["core", "metrics"],
    2: ["network", "likelihoods"],
    3: ["weights", "compat"],
    4: ["jacobian"],
    5: ["engines"],
    6: ["curvature"],
    7: ["structures"],
    8: ["predictive"],
    9: ["fitting", "evidence"],
    10: ["tuning", "refinement"],
    11: ["posterior"],
    12: ["named", "function_space"],
    13: ["factory"],
    14: ["mixture", "plotting", "training"],
    15: ["integrations"],
}  # fmt: skip
RANK = {name: rank for rank, names in RANKS.items() for name in names}

# Packages of other people's curvature, each at home in one file.
CURVATURE_PACKAGES = {
    "backpack": "curvature/backpack.py",
    "asdl": "curvature/asdl.py",
    "asdfghjkl": "curvature/asdfghjkl.py",
    "curvlinops": "curvature/curvlinops.py",
}
# What a module may import at its top level besides the standard library and itself.
ALWAYS_THERE = {"torch", "numpy", "tqdm"}

# Where the names of likelihoods are compared, and where mappings are told from pairs.
LIKELIHOOD_HOMES = ("likelihoods/", "enums.py", "compat/")
# The last four hold named tensors, state dicts and tables of hooks, not batches.
MAPPING_HOMES = (
    "core/batch.py",
    "compat/",
    "core/layout.py",
    "structures/fields.py",
    "posterior/state.py",
    "network/model_guard.py",
)

# Concrete methods that may be overridden: defaults that are right for every subclass, replaced where one has a
# cheaper or a more special way. All else is abstract or final.
DEFAULTS = {
    # Contractions of the dense pieces are right for every block; blocks of factors need no pieces.
    "Contractions": {
        "apply",
        "bound",
        "contracts_factors",
        "entries",
        "pull",
        "sum_of_squares",
        "weighted_norms",
        "weighted_gram",
    },
    # So is a dense block in the place of one whose factors would be selected, folded, rotated or stored.
    "Block": {
        "add",
        "cast",
        "detached",
        "fold_cotangents",
        "fold_positions",
        "from_state",
        "in_basis",
        "join",
        "kernel_by_factors",
        "product",
        "product_index",
        "select_entries",
        "select_outputs",
        "shape",
        "state",
        "terms",
    },
    # A backend that lacks a primitive refuses by an error that names it; none is required of all backends.
    # A sketch follows from whole factors.
    "CurvatureEngine": {
        "full",
        "kron",
        "diag",
        "sketch",
        "blocks",
        "matmul",
        "jacobian",
        "head_jacobian",
        "outline",
        "coverage",
        "survey",
    },
    # None, "only cotangents are known", is right for every kind; the exact GGN saves a root by saying more.
    "OuterEngine": {"output_hessian"},
    # Curvature that is no sum of outer products has no columns; positions share a pass if they are random draws.
    "NativeEngine": {"n_columns", "apart"},
    # Most rules hold for every module of their class.
    "LayerRule": {"accepts"},
    # PyTorch has a loss module for some likelihoods only, and users' backends know some names only.
    # Few say how y is distributed given f beyond what their target knows; regression needs no link.
    "Likelihood": {"count", "loss", "torch_loss", "peer_name", "conditional", "links"},
    # What a target does not say is refused; of most the link is E[y], and losses read it alone.
    "Target": {
        "by_rows",
        "decompose",
        "decomposition",
        "distribution",
        "entropy",
        "interval",
        "mixed_entropy",
        "of",
        "probability_distribution",
        "reads_variances",
        "require_probabilities",
        "scores",
        "summary",
        "summary_of_samples",
        "variance",
    },
    # Samples serve every target; moments of some are known, and other scores than those of the moments.
    "SampledTarget": {"variance", "decompose", "interval"},
    "MomentTarget": {"summary", "summary_of_samples"},
    # Samples serve all labels; some have closed forms, or quadrature.
    "LabelTarget": {"decompose", "interval", "scores"},
    # A single reward is its own mean; an expansion of a sigmoid may leave [0, 1].
    "NoiseFreeLikelihood": {"predict", "links"},
    # Only a last layer has a name, and a choice of all weights nothing to remember.
    "Weights": {"named", "state", "for_backend"},
    # Most structures have no limit of size; one that does not say what it takes cannot be planned for; one that is no
    # sum over data refuses to be weighted anew and to be subtracted from; few keep factorisations that are long, are
    # of a part of the data, or have something to say of themselves. Without data there is the prior. Many priors are
    # asked for one by one unless a basis is known in which they rescale; a state is that of the fields.
    "Curvature": {
        "check",
        "footprint",
        "before_data",
        "scaled",
        "minus",
        "n_terms",
        "share",
        "prior_factor",
        "decompose",
        "scan",
        "state",
        "from_state",
        "note",
        "forms",
        "public",
    },
    # Batches are summed apart and then added, unless an engine adds to a running sum; a matrix is as finite as its
    # diagonal.
    "AdditiveCurvature": {"with_batch", "is_finite"},
    # Whoever reads every batch's loss has it summed; a subset knows its own at the end, and is no sum.
    "DataPass": {"counted", "sums"},
    # Posteriors over functions have another default predictive, and its name; one takes a list of candidates.
    "ParametricLaplace": {"functional_samples", "predictive_samples"},
    "Tunable": {"optimize_prior_precision", "optimize_hyperparameters"},
    "BaseFunctionalLaplace": {"optimize_hyperparameters"},
    "WeightPredictor": {"predict"},
    # The gradient of a quadratic form is right for every precision; most have a cheaper product. The evidence of a
    # posterior that is no Laplace approximation of all data is a lower bound, which lacks something. Moments and
    # determinants follow from each other, and some know them more directly; users see P dense, or as it is held.
    "Precision": {"product", "slack", "logdet", "public", "covariance", "scale"},
    # What follows from dense matrices alone is what a structure may have a faster way for.
    "DenseDefaults": {"precision", "scan", "scaled", "minus", "footprint"},
    "PrecisionFromDense": {
        "logdet",
        "logdet_ratio",
        "quad",
        "product",
        "functional_variance",
        "functional_diagonal",
        "functional_covariance",
        "sample",
        "diagonal_of_inverse",
        "to_dense",
        "scale",
    },
    # A head is multiplied with a root without its Jacobian.
    "RootPrecision": {"coloured", "functional_diagonal", "covariance"},
    # Most posteriors are sums over data; one that is trained takes the options of its training.
    "WeightFit": {"fit"},
}


@cache
def tree(path: Path) -> ast.Module:
    """Syntax tree of a file whose nodes know their parent (attribute `up`)."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(module):
        for child in ast.iter_child_nodes(node):
            child.up = node
    return module


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def where(path: Path, node: ast.AST) -> str:
    return f"laplace/{name_of(path)}:{getattr(node, 'lineno', 1)}"


def nodes(*types: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, types):
                yield path, node


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    yield from nodes(ast.FunctionDef, ast.AsyncFunctionDef)


def ancestors(node: ast.AST) -> Iterator[ast.AST]:
    while (node := getattr(node, "up", None)) is not None:
        yield node


def in_function(node: ast.AST) -> bool:
    return any(isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) for up in ancestors(node))


def for_type_checkers(node: ast.AST) -> bool:
    return any(isinstance(up, ast.If) and "TYPE_CHECKING" in ast.unparse(up.test) for up in ancestors(node))


def calls(name: str) -> Iterator[tuple[Path, ast.Call]]:
    for path, node in nodes(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == name:
            yield path, node


def imports() -> Iterator[tuple[Path, ast.AST, str]]:
    """Every imported dotted name, relative ones made absolute."""
    for path, node in nodes(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield path, node, alias.name
        elif node.level:
            base = ["laplace", *path.relative_to(PACKAGE).parts[: -node.level]]
            yield path, node, ".".join([*base, node.module or ""]).rstrip(".")
        elif node.module == "laplace":
            for alias in node.names:
                yield path, node, f"laplace.{alias.name}"
        else:
            yield path, node, node.module


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from `def` to its end without the docstring, so that documentation is never trimmed."""
    docstring = 0
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0].end_lineno - function.body[0].lineno + 1
    return function.end_lineno - function.lineno + 1 - docstring


def is_public(name: str) -> bool:
    return not name.startswith("_")


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    return {ast.unparse(decorator).split("(")[0].rsplit(".", 1)[-1] for decorator in node.decorator_list}


# 1. Short files, functions and classes.


def test_files_are_short() -> None:
    long = [f"{name_of(p)}: {n}" for p in FILES if (n := len(p.read_text("utf-8").splitlines())) > MAX_FILE]
    assert not long


def test_functions_are_short() -> None:
    lengths = [(code_lines(node), where(path, node), node.name) for path, node in functions()]
    assert not [entry for entry in lengths if entry[0] > MAX_FUNCTION]
    assert statistics.median(length for length, *_ in lengths) < MEDIAN_FUNCTION


def test_classes_have_few_public_methods() -> None:
    many = []
    for path, node in nodes(ast.ClassDef):
        methods = {
            item.name
            for item in node.body
            if isinstance(item, ast.FunctionDef)
            and is_public(item.name)
            and not decorators(item) & {"property", "cached_property", "setter", "deleter", "overload"}
        }
        if len(methods) > MAX_METHODS and node.name not in LONG_CLASSES:
            many.append(f"{where(path, node)} {node.name}: {len(methods)}")
    assert not many


# 2. No probing: types say what an object can do.


@pytest.mark.parametrize("name", ["hasattr", "exit", "exec", "eval"])
def test_unwanted_builtins_are_not_called(name: str) -> None:
    assert not [where(path, node) for path, node in calls(name)]


def test_no_class_asks_what_it_is() -> None:
    found = [
        where(path, node)
        for builtin in ("isinstance", "issubclass")
        for path, node in calls(builtin)
        if node.args and ast.unparse(node.args[0]) in {"self", "type(self)", "self.__class__", "cls"}
    ]
    found += [
        where(path, node)
        for path, node in nodes(ast.Compare)
        if any(isinstance(part, ast.Attribute) and part.attr == "__name__" for part in [node.left, *node.comparators])
    ]
    assert not found


def test_no_assert_and_no_stub() -> None:
    found = [where(path, node) for path, node in nodes(ast.Assert)]
    found += [where(path, node) for path, node in nodes(ast.Name) if node.id == "NotImplementedError"]
    assert not found


def test_errors_are_the_library_s_own() -> None:
    builtin = {"Exception", "ValueError", "TypeError", "RuntimeError", "KeyError", "ImportError", "SystemExit"}
    found = []
    for path, node in nodes(ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if isinstance(raised, ast.Name) and raised.id in builtin:
            found.append(f"{where(path, node)} {raised.id}")
    assert not found


def test_warnings_go_through_one_function() -> None:
    """`laplace.errors.warn` knows which line of the user's code they belong to."""
    found = []
    for path, node in nodes(ast.Call):
        called = ast.unparse(node.func)
        if called == "warnings.warn" and path.name != "errors.py":
            found.append(where(path, node))
        if called == "warn" and len(node.args) != 2:
            found.append(f"{where(path, node)} without a category")
    assert not found


def test_a_concrete_method_is_not_overridden() -> None:
    """Read from the source: a method found in a base class of the package must be abstract there."""
    found = []
    bases = {node.name: node for _, node in nodes(ast.ClassDef)}
    for path, node in nodes(ast.ClassDef):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and not (item.name.startswith("__") and item.name.endswith("__")):
                for base, original in overridden(node, item.name, bases):
                    if "abstractmethod" not in decorators(original) and item.name not in DEFAULTS.get(base, ()):
                        found.append(f"{where(path, item)} {node.name}.{item.name} overrides {base}.{item.name}")
    assert not found


def overridden(
    node: ast.ClassDef, method: str, known: dict[str, ast.ClassDef]
) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Definitions of a method in the bases of a class, nearest first."""
    for base in node.bases:
        name = ast.unparse(base).split("[")[0].rsplit(".", 1)[-1]
        if name in known and known[name] is not node:
            for item in known[name].body:
                if isinstance(item, ast.FunctionDef) and item.name == method:
                    yield name, item
            yield from overridden(known[name], method, known)


# 3. One place for each question.


def test_likelihoods_are_told_apart_in_one_place() -> None:
    names = {"regression", "classification"}
    members = {"Likelihood.REGRESSION", "Likelihood.CLASSIFICATION"}
    found = []
    for path, node in nodes(ast.Compare, ast.match_case):
        if name_of(path).startswith(LIKELIHOOD_HOMES):
            continue
        parts = list(ast.walk(node.pattern if isinstance(node, ast.match_case) else node))
        literal = any(isinstance(part, ast.Constant) and part.value in names for part in parts)
        if literal or any(isinstance(part, ast.Attribute) and ast.unparse(part) in members for part in parts):
            found.append(where(path, node))
    assert not found


def test_mappings_are_told_from_pairs_in_one_place() -> None:
    found = [
        where(path, node)
        for path, node in calls("isinstance")
        if len(node.args) > 1
        and {"Mapping", "MutableMapping", "dict"}
        & {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
        and not name_of(path).startswith(MAPPING_HOMES)
    ]
    assert not found


def test_no_optional_import_at_module_level() -> None:
    found = [
        where(path, node)
        for path, node in nodes(ast.Import, ast.ImportFrom)
        if not in_function(node) and any(isinstance(up, ast.Try) for up in ancestors(node))
    ]
    assert not found


def test_modules_need_only_what_is_always_there() -> None:
    allowed = ALWAYS_THERE | set(sys.stdlib_module_names) | {"laplace"}
    found = [
        f"{where(path, node)} {module}"
        for path, node, module in imports()
        if module.split(".")[0] not in allowed and not in_function(node) and not for_type_checkers(node)
    ]
    assert not found


def test_every_curvature_package_has_one_home() -> None:
    found = []
    for path, node, module in imports():
        home = CURVATURE_PACKAGES.get(module.split(".")[0])
        if home is not None and (name_of(path) != home or not in_function(node)):
            found.append(f"{where(path, node)} {module}")
    assert not found


# 4. Imports run one way.


def component(module: str) -> str:
    """`laplace.weights.problem` → `weights`."""
    return [*module.split("."), ""][1]


def test_every_module_has_a_rank() -> None:
    components = {name_of(path).split("/")[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert not components - RANK.keys()


def test_imports_run_one_way() -> None:
    found = []
    for path, node, module in imports():
        importer = name_of(path).split("/")[0].removesuffix(".py")
        if not module.startswith("laplace.") or importer == "__init__" or for_type_checkers(node):
            continue
        imported = component(module)
        if RANK.get(imported, 99) > RANK.get(importer, 99):
            found.append(f"{where(path, node)} {importer} imports {imported}")
    assert not found


_IMPORT_COST = """
import sys
import numpy, torch, torch.func, torch.utils.data
before = set(sys.modules)
import laplace
print(*sorted(set(sys.modules) - before))
"""


def test_import_is_light() -> None:
    """Counted, not timed: beside torch nothing but the package itself, tqdm and some of the standard library."""
    command = [sys.executable, "-c", _IMPORT_COST]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    new = [module for module in done.stdout.split() if module.split(".")[0] != "laplace"]
    light = ALWAYS_THERE | set(sys.stdlib_module_names)
    assert not [module for module in new if module.split(".")[0] not in light]
    assert not [module for module in new if module.startswith(("torch._dynamo", "torch._inductor", "torch.onnx"))]
    assert len(new) < 80


# 6. Documentation.


def test_public_names_are_documented() -> None:
    """An implementation of what a base class documents, a method or an attribute, needs no docstring of its own."""
    bases = {node.name: node for _, node in nodes(ast.ClassDef)}
    found = [where(path, tree(path)) for path in FILES if tree(path).body and ast.get_docstring(tree(path)) is None]
    for path, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
        hidden = not is_public(node.name) or in_function(node) or decorators(node) & {"overload", "setter"}
        inside_private = any(isinstance(up, ast.ClassDef) and not is_public(up.name) for up in ancestors(node))
        inherited = isinstance(node.up, ast.ClassDef) and (
            any(ast.get_docstring(original) for _, original in overridden(node.up, node.name, bases))
            or ("property" in decorators(node) and described(node.up, node.name, bases))
        )
        if not hidden and not inside_private and not inherited and ast.get_docstring(node) is None:
            found.append(f"{where(path, node)} {node.name}")
    assert not found


def described(node: ast.ClassDef, attribute: str, known: dict[str, ast.ClassDef]) -> bool:
    """Whether a base class declares an attribute and describes it in its docstring."""
    for base in node.bases:
        name = ast.unparse(base).split("[")[0].rsplit(".", 1)[-1]
        if name in known and known[name] is not node:
            declared = any(
                isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == attribute for item in known[name].body
            )
            if declared and f"\n    {attribute}:" in (ast.get_docstring(known[name]) or ""):
                return True
            if described(known[name], attribute, known):
                return True
    return False


def test_modules_postpone_annotations() -> None:
    assert not [
        name_of(path)
        for path in FILES
        if path.name != "__init__.py" and "from __future__ import annotations" not in path.read_text("utf-8")
    ]


def test_every_function_is_annotated() -> None:
    found = []
    for path, node in functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if node.args.vararg is not None:
            arguments.append(node.args.vararg)
        if node.args.kwarg is not None:
            arguments.append(node.args.kwarg)
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in {"self", "cls"}]
        if bare or node.returns is None:
            found.append(f"{where(path, node)} {node.name} {bare}")
    assert not found


def test_every_directory_is_a_package() -> None:
    """Without `__init__.py` a directory works here and is missing from a wheel."""
    assert not {name_of(path.parent) for path in FILES if not (path.parent / "__init__.py").exists()}
