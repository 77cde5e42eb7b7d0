"""The house rules, checked by reading the source of the package.

A rule that has exceptions keeps them in a table here: an exception is a line in a diff, and has a reason beside it. An
exception that nothing needs any more fails too, so that the tables can only shrink.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from laplace.likelihoods import LIKELIHOODS
from tests.source import (
    FILES,
    ROOT,
    Class,
    Function,
    ancestors,
    bases,
    body_of,
    calls,
    circles,
    classes,
    decorators,
    for_type_checkers,
    functions,
    house,
    import_graph,
    imports,
    in_function,
    is_public,
    name_of,
    nodes,
    overridden,
    tree,
    where,
)

# Packages of other people's curvature, each at home in one file.
CURVATURE_PACKAGES = {
    "backpack": "curvature/backpack.py",
    "asdl": "curvature/asdl.py",
    "curvlinops": "curvature/curvlinops.py",
}
# What a module may import at its top level besides the standard library and itself.
ALWAYS_THERE = {"torch", "numpy", "tqdm"}

# Files whose classes derive from another package's, which they import at their top level; nothing imports them.
BRIDGES = {
    "integrations/botorch.py": "botorch",
    "integrations/lightning.py": "lightning",
    "integrations/sklearn.py": "sklearn",
    "integrations/transformers.py": "transformers",
}

# Where mappings are told from pairs: batches, and after the first two named tensors, state dicts and tables of hooks.
MAPPINGS = {
    "core/batch.py",
    "compat/functional_utils.py",
    "core/layout.py",
    "network/settings.py",
    "structures/fields.py",
    "state.py",
    "training/task_memory.py",
    "network/model_guard.py",
}

# Kinds of targets, which the likelihood alone tells apart.
TARGET_KINDS = {"class", "binary", "real", "other"}

# Where the namespace of an object is read or written, and why its attributes do not do.
NAMESPACES = {
    "compat/kronecker/decomposed.py": "the state that is copied and pickled",
    "compat/finder.py": "modules of the older interface, whose names are looked up when they are asked for",
    "core/lazy.py": "names of a package, which are imported when they are asked for",
    "core/overrides.py": "what a user's class or object defines itself",
    "curvature/backpack.py": "attributes that the package leaves on modules",
    "network/attributes.py": "attributes of the user's modules",
    "network/fingerprint.py": "attributes of the user's modules",
    "network/model_guard.py": "attributes of the user's modules",
    "predictive/posterior_outputs.py": "values that are computed when they are read, and that were read already",
    "likelihoods/base.py": "what a user's class defines itself",
    "parametric.py": "the cell of the grid that a class itself declares",
    "saving.py": "the cell of the grid that a class itself declares",
    "base.py": "the state that is copied and pickled",
    "network/settings.py": "attributes of objects that users give modules",
    "posterior/account.py": "numbers of a likelihood of a user, whose names nobody knows",
}


class Defaults(NamedTuple):
    """Methods of a class that compute something, and may be overridden all the same: some, or all of them (None)."""

    reason: str
    methods: set[str] | None = None


DEFAULTS = {
    "engines/engine.py:CurvatureEngine": Defaults(
        "a sketch follows from whole factors, a head from its blocks, a running sum from a batch's matrices",
        {"add_blocks", "add_diag", "add_full", "head_jacobian", "sketch"},
    ),
    "jacobian/blocks.py:Block": Defaults("a dense block may stand for every block, one of factors or not"),
    "jacobian/outer.py:FactoredBlock": Defaults("output gradients in patches cannot be folded", {"fold_positions"}),
    "likelihoods/base.py:Likelihood": Defaults("likelihoods at other outputs count as the ones behind them", {"count"}),
    "likelihoods/base.py:NoiseFreeLikelihood": Defaults(
        "a single reward is its own mean; an expansion of a sigmoid may leave [0, 1]; moments have links of their own",
        {"links", "predict"},
    ),
    "likelihoods/label_targets.py:LabelTarget": Defaults(
        "samples serve all labels; some have closed forms, or quadrature"
    ),
    "likelihoods/moment_target.py:MomentTarget": Defaults(
        "some scores read more than moments", {"summary_of_samples", "_summary_without_link"}
    ),
    "likelihoods/sampled_target.py:SampledTarget": Defaults("some moments and intervals have closed forms"),
    "likelihoods/target.py:Target": Defaults("what a target does not say is refused, or follows from its samples"),
    "parametric.py:ParametricLaplace": Defaults("one that is trained takes the options of its training", {"fit"}),
    "posterior/posterior.py:Posterior": Defaults("members of a user's class take effect in place of the library's"),
    "structures/additive.py:AdditiveCurvature": Defaults(
        "batches are summed apart and then added, unless an engine adds to a running sum", {"is_finite", "with_batch"}
    ),
    "structures/base.py:Curvature": Defaults(
        "states are those of the fields; priors are tried one by one unless a basis is known in which they rescale",
        {"before_data", "from_state", "moved", "n_terms", "scan", "state"},
    ),
    "structures/precision.py:Precision": Defaults(
        "moments and determinants follow from each other, and some know them more directly; processes have shares",
        {"covariance", "logdet", "product", "public", "scale", "solve", "summed"},
    ),
    "tuning/tunable.py:Tunable": Defaults(
        "posteriors over functions have another default predictive, and its name",
        {"optimize_hyperparameters", "optimize_prior_precision"},
    ),
}

_CLAUSE = re.compile(r"(What|Whether|How|Which|Where|When|Why|Who|Of|By|For|Between|In which)\b")
_PARTICIPLE = {"found", "taken", "kept", "held"}
# A position is a token or a pixel; of a tensor among others it is an index.
_OWN_WORD = re.compile(
    r"\b(treated|lent|rungs?|foreign inputs?|int64 positions|positions of (the |all )*(treated )?(tensors|slots))\b",
    re.IGNORECASE,
)


# 2. No probing: types say what an object can do.


@pytest.mark.parametrize("name", ["hasattr", "exit", "exec", "eval"])
def test_unwanted_builtins_are_not_called(name: str) -> None:
    assert not [where(path, node) for path, node in calls(name)]


def test_no_class_asks_what_it_is() -> None:
    wrong = [
        where(path, node)
        for builtin in ("isinstance", "issubclass")
        for path, node in calls(builtin)
        if node.args and ast.unparse(node.args[0]) in {"self", "type(self)", "self.__class__", "cls"}
    ]
    wrong += [
        where(path, node)
        for path, node in nodes(ast.Compare)
        if any(isinstance(part, ast.Attribute) and part.attr == "__name__" for part in [node.left, *node.comparators])
    ]
    assert not wrong


def test_no_assert_and_no_stub() -> None:
    wrong = [where(path, node) for path, node in nodes(ast.Assert)]
    wrong += [where(path, node) for path, node in nodes(ast.Name) if node.id == "NotImplementedError"]
    assert not wrong


def test_errors_are_the_library_s_own() -> None:
    """But for the `ImportError` of a name that is imported when it is read, as an import statement would raise it."""
    builtin = {"Exception", "ValueError", "TypeError", "RuntimeError", "KeyError", "ImportError", "SystemExit"}
    wrong = []
    for path, node in nodes(ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if isinstance(raised, ast.Name) and raised.id in builtin:
            wrong.append((path.name, raised.id))
    assert wrong == [("lazy.py", "ImportError")]


def test_warnings_go_through_one_function() -> None:
    """`laplace.errors.warn` knows which line of the user's code they belong to."""
    wrong = []
    for path, node in nodes(ast.Call):
        called = ast.unparse(node.func)
        if called == "warnings.warn" and path.name != "errors.py":
            wrong.append(where(path, node))
        if called == "warn" and len(node.args) != 2:
            wrong.append(f"{where(path, node)} without a category")
    assert not wrong


def test_a_concrete_method_is_not_overridden() -> None:
    """A method that a base class of the package has is abstract there, or computes nothing."""
    wrong, needed = [], set()
    for path, node in classes():
        for item in node.body:
            if not isinstance(item, ast.FunctionDef) or (item.name.startswith("__") and item.name.endswith("__")):
                continue
            for (base_path, base), original in overridden(path, node, item.name):
                key = f"{name_of(base_path)}:{base.name}"
                if "abstractmethod" in decorators(original) or computes_nothing(original):
                    continue
                allowed = DEFAULTS[key].methods if key in DEFAULTS else set()
                if allowed is None or item.name in allowed:
                    needed.add((key, item.name if allowed else None))
                else:
                    wrong.append(f"{where(path, item)} {node.name}.{item.name} overrides {key}.{item.name}")
    assert not wrong
    assert needed == {(key, method) for key, entry in DEFAULTS.items() for method in entry.methods or {None}}


def computes_nothing(function: Function) -> bool:
    """True if a method does nothing, refuses, or returns a constant or what it was given."""
    rest = [statement for statement in body_of(function) if not isinstance(statement, ast.Delete | ast.Pass)]
    if len(rest) != 1:
        return not rest
    (only,) = rest
    plain = (ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.Dict, ast.expr_context)
    returned = list(ast.walk(only.value)) if isinstance(only, ast.Return) and only.value is not None else []
    return isinstance(only, ast.Raise | ast.Return) and all(isinstance(part, plain) for part in returned)


# 3. One place for each question.


def compared() -> Iterator[tuple[Path, ast.AST, set[object]]]:
    """Constants, and attributes as they are written, of every comparison, pattern and table of cases."""
    for path, node in nodes(ast.Compare, ast.match_case, ast.Dict):
        roots = node.keys if isinstance(node, ast.Dict) else [getattr(node, "pattern", node)]
        parts = [part for root in roots if root is not None for part in ast.walk(root)]
        constants = {part.value for part in parts if isinstance(part, ast.Constant)}
        yield path, node, constants | {ast.unparse(part) for part in parts if isinstance(part, ast.Attribute)}


def test_likelihoods_are_told_apart_by_their_registry() -> None:
    names = set(LIKELIHOODS) | {f"Likelihood.{name.upper()}" for name in LIKELIHOODS}
    assert not {name_of(path) for path, _, said in compared() if said & names}


def test_kinds_of_targets_are_told_apart_by_the_likelihood() -> None:
    """What depends on the kind of target is a method of an object that the likelihood has."""
    telling = [
        where(path, node)
        for path, node, said in compared()
        if said & TARGET_KINDS or any(str(part).endswith(".target_kind") for part in said)
    ]
    assert not telling


def test_objects_are_changed_by_their_attributes() -> None:
    """No state is put aside and put back past what an object says of itself."""
    reading = {name_of(path) for path, _ in calls("vars")}
    reading |= {name_of(path) for path, node in nodes(ast.Attribute) if node.attr == "__dict__"}
    assert reading == NAMESPACES.keys()


def test_mappings_are_told_from_pairs_in_one_place() -> None:
    telling = {
        name_of(path)
        for path, node in calls("isinstance")
        if len(node.args) > 1
        and {"Mapping", "MutableMapping", "dict"}
        & {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
    }
    assert telling == MAPPINGS


def test_no_optional_import_at_module_level() -> None:
    wrong = [
        where(path, node)
        for path, node in nodes(ast.Import, ast.ImportFrom)
        if not in_function(node) and any(isinstance(up, ast.Try) for up in ancestors(node))
        if name_of(path) not in BRIDGES
    ]
    assert not wrong


def test_modules_need_only_what_is_always_there() -> None:
    allowed = ALWAYS_THERE | set(sys.stdlib_module_names) | {"laplace"}
    wrong = [
        f"{where(path, node)} {module}"
        for path, node, module in imports()
        if module.split(".")[0] not in allowed and not in_function(node) and not for_type_checkers(node)
        if module.split(".")[0] != BRIDGES.get(name_of(path))
    ]
    assert not wrong


def test_every_curvature_package_has_one_home() -> None:
    homes = defaultdict(set)
    for path, node, module in imports():
        package = module.split(".")[0]
        if package in CURVATURE_PACKAGES:
            assert in_function(node), where(path, node)
            homes[package].add(name_of(path))
    assert homes == {package: {home} for package, home in CURVATURE_PACKAGES.items()}


# 4. Imports run one way.


def folder(file: str) -> str:
    """`weights/problem.py` → `weights`, `named.py` → `named`."""
    return file.split("/", maxsplit=1)[0].removesuffix(".py")


def ranks() -> dict[str, int]:
    """A place of its own for every folder and single module, as docs/design.md lists them, then the package itself."""
    names = [folder(entry.removesuffix("/")) for entry in house()]
    return {name: place for place, name in enumerate([*names, "__init__"])}


def test_imports_run_one_way() -> None:
    """From a folder to those below it, none of which shares its place; imports for type checkers are imports."""
    rank = ranks()
    assert not [
        f"{file} imports {other}"
        for file, others in import_graph().items()
        for other in others
        if folder(file) != folder(other) and rank[folder(file)] < rank[folder(other)]
    ]


def test_imports_have_no_circles() -> None:
    assert not circles(import_graph())


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
    wrong = [where(path, tree(path)) for path in FILES if tree(path).body and ast.get_docstring(tree(path)) is None]
    for path, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
        hidden = not is_public(node.name) or in_function(node) or decorators(node) & {"overload", "setter"}
        inside_private = any(isinstance(up, ast.ClassDef) and not is_public(up.name) for up in ancestors(node))
        inherited = isinstance(node.up, ast.ClassDef) and (
            any(ast.get_docstring(original) for _, original in overridden(path, node.up, node.name))
            or ("property" in decorators(node) and described((path, node.up), node.name))
        )
        if not hidden and not inside_private and not inherited and ast.get_docstring(node) is None:
            wrong.append(f"{where(path, node)} {node.name}")
    assert not wrong


def described(owner: Class, attribute: str) -> bool:
    """True if a base class declares an attribute and describes it in its docstring."""
    for path, base in bases(*owner):
        declared = any(isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == attribute for item in base.body)
        if declared and f"\n    {attribute}:" in (ast.get_docstring(base) or ""):
            return True
        if described((path, base), attribute):
            return True
    return False


def clauses() -> Iterator[tuple[str, str]]:
    """Docstrings that begin with a question word, or with a preposition: of what, and not what."""
    for path, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module):
        if _CLAUSE.match(ast.get_docstring(node) or ""):
            yield name_of(path), where(path, node)


def participles() -> Iterator[tuple[str, str]]:
    """Locals and arguments that are named by what was done to them."""
    for path, node in nodes(ast.Name, ast.arg):
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node.ctx, ast.Store) else ""
        if name in _PARTICIPLE:
            yield name_of(path), where(path, node)


def own_words() -> Iterator[tuple[str, str]]:
    """Words that nobody outside of this library uses in this way."""
    for path in FILES:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if _OWN_WORD.search(line):
                yield name_of(path), f"laplace/{name_of(path)}:{number}"


@pytest.mark.parametrize("rule", [clauses, participles, own_words])
def test_words(rule: Callable[[], Iterator[tuple[str, str]]]) -> None:
    """Docstrings begin with a noun or a verb, locals are called by what they are, and words are the field's."""
    assert not [place for _, place in rule()]


def test_modules_postpone_annotations() -> None:
    assert not [
        name_of(path)
        for path in FILES
        if path.name != "__init__.py" and "from __future__ import annotations" not in path.read_text("utf-8")
    ]


def test_every_function_is_annotated() -> None:
    wrong = []
    for path, node in functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if node.args.vararg is not None:
            arguments.append(node.args.vararg)
        if node.args.kwarg is not None:
            arguments.append(node.args.kwarg)
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in {"self", "cls"}]
        if bare or node.returns is None:
            wrong.append(f"{where(path, node)} {node.name} {bare}")
    assert not wrong


def test_every_directory_is_a_package() -> None:
    """Without `__init__.py` a directory works here and is missing from a wheel."""
    assert not {name_of(path.parent) for path in FILES if not (path.parent / "__init__.py").exists()}
