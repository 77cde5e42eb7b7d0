"""A network with a posterior as an estimator of scikit-learn, and conformal intervals of MAPIE around it.

The progress of diabetes is predicted from ten features. `GridSearchCV` chooses the prior precision and the structure
of the curvature, as of any other estimator, in a pipeline. The 90 % intervals of the posterior hold about 90 % of new
patients where noise and prior are right; MAPIE widens or narrows intervals until they hold as many of the data that
were held back, whatever the model.

    python examples/with_scikit_learn.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from mapie.regression import SplitConformalRegressor
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from laplace.extensions.plotting import new_figure
from laplace.integrations.sklearn import LaplaceRegressor

LEVEL, QUANTILE = 0.9, 1.645


def search(x: Any, y: Any, small: bool) -> GridSearchCV:
    """A pipeline at the best of its arguments."""
    regressor = LaplaceRegressor(hidden_layer_sizes=(16,), max_epochs=5 if small else 60, random_state=0)
    choices: dict[str, list[Any]] = {
        "regressor__prior_precision": [1.0, 10.0] if small else [1.0, 10.0, 100.0],
        "regressor__hessian_structure": ["kron", "full"],
    }
    pipeline = Pipeline([("scaler", StandardScaler()), ("regressor", regressor)])
    return GridSearchCV(pipeline, choices, cv=2 if small else 5, scoring="neg_root_mean_squared_error").fit(x, y)


def main(small: bool = False, output: Path = Path("outputs/with_scikit_learn.png")) -> dict[str, tuple[float, float]]:
    """Searches, prints and returns how much of new data intervals hold, and their mean width.

    Args:
        small: Train for a few epochs only, to try the script out.
        output: Where the plot goes.
    """
    x, y = load_diabetes(return_X_y=True, as_frame=True)
    x_train, x_rest, y_train, y_rest = train_test_split(x, y, test_size=0.6, random_state=0)
    x_held, x_test, y_held, y_test = train_test_split(x_rest, y_rest, test_size=0.5, random_state=0)
    found = search(x_train, y_train, small)
    print(f"best: {found.best_params_}, RMSE of the folds {-found.best_score_:.1f}")

    mean, deviation = found.best_estimator_.predict(x_test, return_std=True)
    conformal = SplitConformalRegressor(found.best_estimator_, confidence_level=LEVEL, prefit=True)
    _, ends = conformal.conformalize(x_held, y_held).predict_interval(x_test)
    intervals: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {
        "posterior": (mean - QUANTILE * deviation, mean + QUANTILE * deviation),
        "MAPIE": (ends[:, 0, 0], ends[:, 1, 0]),
    }
    target = y_test.to_numpy()
    scores = {
        name: (float(((low <= target) & (target <= high)).mean()), float((high - low).mean()))
        for name, (low, high) in intervals.items()
    }
    print(f"{'':<11}{'holds':>8}{'width':>8}   ({LEVEL:.0%} intervals of {len(y_test)} patients)")
    for name, (held, width) in scores.items():
        print(f"{name:<11}{held:>8.3f}{width:>8.1f}")
    figure, axes = new_figure(n_columns=2, width=4.0, height=3.2)
    order = np.argsort(mean)
    for axis, (name, (low, high)) in zip(axes, intervals.items(), strict=True):
        axis.fill_between(np.arange(len(order)), low[order], high[order], alpha=0.3, color="C0")
        axis.plot(mean[order], color="C0")
        axis.plot(target[order], ".", color="0.2", markersize=3)
        axis.set(title=name, xlabel="patient, by prediction", ylabel="progress")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="hardly any training")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/with_scikit_learn.png"), help="where the plot goes"
    )
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
