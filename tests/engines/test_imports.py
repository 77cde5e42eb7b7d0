"""A fit asks for shapes on PyTorch's meta device, where some operations import its compiler: 0.8 s of a first fit."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIT = """
import sys
import torch
from torch import nn
from laplace import Laplace

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))

layers = (nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.PReLU(), nn.Flatten(), nn.Linear(64, 3))
model, x = (Encoder(), torch.randn(6, 5, 8)) if {encoder} else (nn.Sequential(*layers).eval(), torch.randn(6, 2, 4, 4))
for structure in ("diag", "kron"):
    la = Laplace(model, "classification", "all", structure)
    la.fit([(x, torch.arange(6) % 3)])
    la(x)
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.parametrize("encoder", [True, False])
def test_a_fit_imports_no_compiler(encoder: bool) -> None:
    subprocess.run([sys.executable, "-c", FIT.replace("{encoder}", str(encoder))], check=True)
