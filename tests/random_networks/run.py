"""Seeds that are run: what they found, the smallest case that still fails, and a script of it that stands alone."""

from __future__ import annotations

import ast
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from laplace.errors import LaplaceError
from tests.random_networks.case import Case, draw
from tests.random_networks.checks import CHECKS, Wrong
from tests.random_networks.layers import LAYERS

MODULES = ("layers", "oracle", "case", "checks")


@dataclass
class Outcome:
    """What some seeds found.

    Attributes:
        passed: Numbers of checks that passed, by name.
        refusals: Numbers of refusals, by their message without numbers and quoted names.
        failures: Check, smallest case and error of every seed that failed.
    """

    passed: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[int, str, Case, str]] = field(default_factory=list)

    def report(self) -> str:
        """Refusals by kind, and numbers."""
        lines = [f"  {count:5d} × {kind}   (seed {self.examples[kind]})" for kind, count in self.refusals.most_common()]
        passed = ", ".join(f"{name} {count}" for name, count in self.passed.items())
        return "\n".join(
            [f"passed: {passed}", f"refused: {self.refusals.total()}", *lines, f"failed: {len(self.failures)}"]
        )


def checks_of(seed: int) -> list[str]:
    """The oracle, and two others that a seed draws."""
    return ["oracle", *random.Random(seed).sample([name for name in CHECKS if name != "oracle"], 2)]


def result(name: str, case: Case) -> LaplaceError | str | None:
    """None of a check that passed, the error of one that was refused, and the report of one that failed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            CHECKS[name](case)
        except LaplaceError as error:
            return error
        except Wrong as error:
            return f"{name}: {error}"
        except Exception:
            return f"{name}: {traceback.format_exc(limit=-6)}"
    return None


def run(seeds: Iterable[int], *, shrink: bool = True) -> Outcome:
    """Runs the checks of some seeds."""
    found = Outcome()
    for seed in seeds:
        case = draw(seed)
        for name in checks_of(seed):
            said = result(name, case)
            if said is None:
                found.passed[name] += 1
            elif isinstance(said, LaplaceError):
                kind = kind_of(said)
                found.refusals[kind] += 1
                found.examples.setdefault(kind, seed)
            else:
                smallest = shrunk(name, case) if shrink else case
                said = result(name, smallest)
                found.failures.append((seed, name, smallest, str(said)))
                break
    return found


def kind_of(error: LaplaceError) -> str:
    """The beginning of a message, without numbers and names."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", str(error))
    text = re.sub(r"\[[^\]]*\]|\d[\d.e+-]*", "#", text)
    return f"{type(error).__name__}: {' '.join(text.split())[:150]}"


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler by one choice."""
    for i in range(len(case.layers)):
        if len(case.layers) > 1:
            yield replace(case, layers=case.layers[:i] + case.layers[i + 1 :])
        yield replace(case, layers=(*case.layers[:i], "linear", *case.layers[i + 1 :]))
    plain = Case(case.seed)
    for name in (item.name for item in fields(Case)):
        if name not in ("seed", "layers", "sizes"):
            yield replace(case, **{name: getattr(plain, name)})
    for i in range(len(case.sizes)):
        if len(case.sizes) > 1:
            yield replace(case, sizes=case.sizes[:i] + case.sizes[i + 1 :])
        if case.sizes[i] > 1:
            yield replace(case, sizes=(*case.sizes[:i], case.sizes[i] - 1, *case.sizes[i + 1 :]))


def shrunk(name: str, case: Case) -> Case:
    """The simplest case in which a check still fails."""
    for other in smaller(case):
        if other != case and isinstance(result(name, other), str):
            return shrunk(name, other)
    return case


def script(name: str, case: Case) -> str:
    """A program without this folder: what a check needs of it, in the order in which it stands there."""
    imports: list[str] = []
    parts: dict[str, ast.stmt] = {}
    for module in MODULES:
        for statement in ast.parse((Path(__file__).parent / f"{module}.py").read_text("utf-8")).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                text = ast.unparse(statement)
                if "random_networks" not in text and text not in imports:
                    imports.append(text)
            for defined in names_of(statement):
                parts[defined] = statement
    check = CHECKS[name].__name__
    table = ", ".join(f"{n!r}: {maker(n)}" for n in dict.fromkeys(("linear", *case.layers)) if n in LAYERS)
    needed, todo = set(), [check, "Case", *re.findall(r"\w+", table)]
    while todo:
        used = todo.pop()
        if used in parts and used not in needed and used != "LAYERS":
            needed.add(used)
            todo += [node.id for node in ast.walk(parts[used]) if isinstance(node, ast.Name)]
    texts = list(dict.fromkeys(ast.unparse(part) for used, part in parts.items() if used in needed))
    body = [*imports, *texts, f"LAYERS = {{{table}}}", f"{check}({case!r})"]
    return "\n\n".join(sorted(body, key=lambda text: not text.startswith("from __future__")))


def names_of(statement: ast.stmt) -> list[str]:
    """Names that a statement of a module defines."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def maker(layer: str) -> str:
    """The expression of a layer in the table."""
    tree = ast.parse((Path(__file__).parent / "layers.py").read_text("utf-8"))
    table = next(part.value for part in tree.body if names_of(part) == ["LAYERS"])
    assert isinstance(table, ast.Dict)
    return next(
        ast.unparse(v)
        for k, v in zip(table.keys, table.values, strict=True)
        if k is not None and ast.literal_eval(k) == layer
    )
