"""The tables of docs/backends.md, as the backends are found to be: `python -m tests.conformance.backend_table`.

A cell is what `coverage()` says of one tensor of a problem that stands for its family of layers, and it is only written
if the number agrees with the dense truth.
"""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path

import torch

from laplace.errors import UnsupportedError
from tests import problems as catalogue
from tests.conformance.backends import BACKENDS, PRIMITIVES, Backend, computed, engine_of, expected
from tests.conformance.cases import Case
from tests.reference.compare import assert_close

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"

FAMILIES: dict[str, tuple[str, str, str]] = {
    "`Linear`": ("mlp_classification", "all", "0.weight"),
    "`Linear` under GELU": ("wide_mlp", "all", "0.weight"),
    "`Linear` under ReLU in place": ("inplace_relu", "all", "0.weight"),
    "`Linear`, several outputs of `bernoulli`": ("mlp_bernoulli_multi", "all", "0.weight"),
    "`Linear` on positions `[B, T, D]`": ("shared_positions", "all", "lin.weight"),
    "`Linear` on positions, time first": ("time_major", "all", "lin.weight"),
    "last layer": ("mlp_classification", "last_layer", "4.weight"),
    "last layer of a transformer": ("transformer", "last_layer", "head.weight"),
    "entries of a subnetwork": ("mlp_classification", "mixed", "0.weight"),
    "layers of a frozen network (LoRA)": ("lora", "all", "0.down.weight"),
    "residual network": ("residual_cnn", "all", "stem.0.weight"),
    "`Conv2d`": ("conv2d", "all", "0.weight"),
    '`Conv2d`, `padding="same"`': ("conv2d_same", "all", "0.weight"),
    "`Conv2d`, other padding than zeros": ("conv2d_reflect", "all", "0.weight"),
    "`Conv2d` in groups": ("conv2d_grouped", "all", "0.weight"),
    "`Conv1d`": ("conv1d", "all", "0.weight"),
    "`Conv3d`": ("conv3d", "all", "0.weight"),
    "`ConvTranspose2d`": ("conv_transpose2d", "all", "0.weight"),
    "`BatchNorm`": ("batch_norm_1d", "all", "1.weight"),
    "`LayerNorm`": ("layer_norm", "all", "1.weight"),
    "`GroupNorm`": ("group_norm", "all", "1.weight"),
    "`PReLU`": ("prelu", "all", "1.weight"),
    "`Embedding`": ("embedding", "all", "token.weight"),
    "`Embedding` with padding": ("embedding_padding", "all", "token.weight"),
    "attention by hand": ("attention_by_hand", "all", "qkv.weight"),
    "`MultiheadAttention`": ("transformer", "all", "encoder.self_attn.in_proj_weight"),
    "`LSTM`": ("lstm", "all", "rnn.weight_ih_l0"),
    "a layer called twice": ("reused_module", "all", "hidden.weight"),
    "tied layers": ("tied_head", "all", "token.weight"),
    "parametrised weight (weight norm)": ("weight_norm", "all", "0.parametrizations.weight.original0"),
    "bare `nn.Parameter`": ("bare_parameter", "all", "mix"),
    "mappings as inputs": ("dict_input", "all", "net.0.weight"),
    "preferences": ("pair", "all", "net.0.weight"),
}
"""Problem, choice of weights and tensor that stand for a family of layers."""

_ERROR = re.compile(r"(\w+Error): ")
_REASON = re.compile(r"not \w+ \((.*)\)$")
_TENSOR = re.compile(r"^[\w.]+: ")


@cache
def cell(backend: Backend, primitive: str, family: str) -> str:
    """`exact`, `factors` (KFAC), `refused`, or `native` with the reason after a colon."""
    name, weights, tensor = FAMILIES[family]
    case = Case(catalogue.get(name), "full", weights)
    engine = engine_of(backend, case)
    try:
        actual = computed(engine, primitive, case)
    except UnsupportedError:
        return "refused"
    words = engine.coverage()[tensor]
    truth = expected(backend.kind, primitive, case)
    at = engine.problem.layout.slices[engine.problem.layout.names.index(tensor)]
    assert_close(actual[..., at], truth[..., at], "backend", label=f"{backend} {primitive} {family}")
    if words == backend.package:
        return "factors" if primitive == "kron" else "exact"
    found = _REASON.search(words)
    reason = found.group(1) if found else words
    error = _ERROR.match(reason)  # its words differ between versions of PyTorch
    return f"native: {f'it raises {error.group(1)}' if error else _TENSOR.sub('', reason)}"


def section(backend: Backend) -> str:
    """The table of a backend, with the reasons below it."""
    notes: dict[str, int] = {}
    lines = [f"| layer | {' | '.join(PRIMITIVES)} |", "|---" * (len(PRIMITIVES) + 1) + "|"]
    for family in FAMILIES:
        row = []
        for primitive in PRIMITIVES.values():
            what, _, reason = cell(backend, primitive, family).partition(": ")
            number = f" [{notes.setdefault(reason, len(notes) + 1)}]" if reason else ""
            row.append(what + number)
        lines.append(f"| {family} | {' | '.join(row)} |")
    listed = [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join([*lines, "", *listed, ""])


def main() -> None:
    """Writes the tables anew, between the comments that name the backends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    text = PAGE.read_text("utf-8")
    for name, backend in BACKENDS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if begin not in text:
            text += f"\n## {name}\n\n{begin}{end}\n"
        before, _, rest = text.partition(begin)
        text = before + begin + section(backend) + rest[rest.index(end) :]
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
