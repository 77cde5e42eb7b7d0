"""Tables B4 and B5 of Immer et al. (2021), of FMNIST, where MAP is overconfident, as on the images of `images.py`."""

from __future__ import annotations

METHODS = ("MAP", "BNN diag", "BNN KFAC", "BNN damped", "GLM diag", "GLM KFAC", "GP")


def _row(numbers: str) -> dict[str, str]:
    """Mean and standard error by method, from a column of the paper."""
    return dict(zip(METHODS, numbers.split(), strict=True))


TABLE_B4 = {
    "MLP": {
        "accuracy": _row("0.881±0.001 0.831±0.001 0.820±0.003 0.833±0.001 0.875±0.002 0.886±0.003 0.880±0.001"),
        "NLL": _row("0.347±0.005 0.602±0.002 0.842±0.009 0.518±0.003 0.418±0.004 0.340±0.006 0.338±0.003"),
        "ECE": _row("0.026±0.004 0.170±0.002 0.319±0.004 0.094±0.002 0.110±0.002 0.021±0.004 0.010±0.001"),
        "AUROC": _row("0.869±0.006 0.906±0.009 0.919±0.009 0.949±0.006 0.910±0.003 0.907±0.020 0.889±0.006"),
    },
    "CNN": {
        "accuracy": _row("0.914±0.001 0.844±0.001 0.844±0.001 0.912±0.001 0.895±0.001 0.923±0.001 0.914±0.001"),
        "NLL": _row("0.258±0.004 0.809±0.002 0.942±0.016 0.265±0.004 0.397±0.002 0.244±0.003 0.250±0.004"),
        "ECE": _row("0.017±0.001 0.340±0.002 0.411±0.008 0.024±0.002 0.136±0.002 0.012±0.003 0.007±0.001"),
        "AUROC": _row("0.864±0.014 0.924±0.007 0.945±0.002 0.947±0.006 0.944±0.007 0.955±0.006 0.918±0.010"),
    },
}
"""By network, measure and method; the damped posterior is that of Ritter et al. (2018)."""

TABLE_B5 = {
    "MLP": {
        "accuracy": {"BNN damped": "0.833±0.001", "GLM damped": "0.888±0.003"},
        "NLL": {"BNN damped": "0.518±0.003", "GLM damped": "0.337±0.003"},
        "ECE": {"BNN damped": "0.094±0.002", "GLM damped": "0.022±0.004"},
        "AUROC": {"BNN damped": "0.949±0.006", "GLM damped": "0.922±0.020"},
    },
    "CNN": {
        "accuracy": {"BNN damped": "0.912±0.001", "GLM damped": "0.922±0.001"},
        "NLL": {"BNN damped": "0.265±0.004", "GLM damped": "0.242±0.004"},
        "ECE": {"BNN damped": "0.024±0.002", "GLM damped": "0.016±0.001"},
        "AUROC": {"BNN damped": "0.947±0.006", "GLM damped": "0.905±0.010"},
    },
}
