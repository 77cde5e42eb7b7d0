"""What must run wherever the wheel is installed, beside PyTorch alone: a script that imports nothing of the tests.

python tests/smoke.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import laplace
from laplace import Laplace


def main() -> None:
    """Fits the common structures, predicts, tunes, calibrates, compares, saves and loads."""
    torch.manual_seed(0)
    x = torch.randn(120, 3)
    y = x.argmax(1)
    train, held_out, test = [(x[:30], y[:30]), (x[30:40], y[30:40])], [(x[40:80], y[40:80])], [(x[80:], y[80:])]
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:40]), y[:40]).backward()
        optimizer.step()
    for structure in ("full", "block", "kron", "ekfac", "diag"):
        la = Laplace(model, "classification", "all", structure)
        la.fit(train)
        la.optimize_prior_precision()
        assert torch.allclose(la(x).sum(1), torch.ones(120), atol=1e-4), structure
    la = Laplace(model, "classification")
    la.fit(train)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(la.state_dict(), Path(folder) / "state.pt")
        again = Laplace(model, "classification")
        again.load_state_dict(torch.load(Path(folder) / "state.pt", weights_only=True))
    assert torch.equal(again(x), la(x))
    la.calibrate(held_out)
    assert "NLL" in str(la.compare(test))
    regression = Laplace(nn.Linear(3, 1), "regression", "all", "full")
    regression.fit([(x, x[:, :1])])
    regression.optimize_hyperparameters(("prior_precision", "sigma_noise"))
    mean, variance = regression(x)
    assert mean.shape == variance.shape[:2] and (variance > 0).all()
    print(f"laplace {laplace.__version__} of {Path(laplace.__file__).parent} works with torch {torch.__version__}")


if __name__ == "__main__":
    main()
