"""Fits that users put together themselves: parts that are assigned, and batches that are summed in a loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from laplace.core import overrides
from laplace.core.arguments import checked
from laplace.core.batch import Inputs
from laplace.core.hyperparameters import check_counts
from laplace.posterior.assembled import batch_of, restarted, with_backend_loss, without_data
from laplace.posterior.attributes import Part
from laplace.posterior.first_outputs import with_channels_of
from laplace.posterior.posterior import Posterior


class FittedByHand:
    """An object that can be fitted in a loop of your own, instead of by `fit`.

    Example:
        la.start_fit()
        for x, y in loader:
            loss, H = la.curvature_of(x, y, n_data)
            la.loss += loss
            la.H += H
        la.n_data, la.n_outputs = n_data, n_outputs

    A value that is not accepted is an `InvalidArgument`, and the posterior stays as it was.
    """

    _posterior: Posterior

    mean = Part["Tensor | None"](
        lambda now: None if now.weights.problem is None else now.mean.clone(),
        "Mean of the posterior, `[P]`: the trained weights θ*, after `refine` θ̂; before `fit` the prior's mean, or "
        "None while the last layer is not known yet. An assigned mean is used by samples, densities and the evidence, "
        "not by linearised predictions. Reading it gives a copy.",
    )
    loss = Part["float | Tensor"](
        lambda now: 0.0 if now.data is None else now.data.active_fit.loss_terms.sum(),
        "Summed loss of the training data, 0-dim: the negative log likelihood at σ = T = 1, without constants; 0 "
        "before `fit`.",
    )
    n_data = Part[float](
        lambda now: 0 if now.data is None else now.data.source.n_data,
        "Number of training data, without ignored labels; if they have weights, the sum of these. 0 before `fit`.",
    )
    n_outputs = Part[int](
        lambda now: 0 if now.data is None else now.data.source.n_outputs, "Number of outputs, C; 0 before `fit`."
    )
    H = Part[Any](
        lambda now: now.H,
        "Curvature of the training data at σ = T = 1: `[P, P]`, `[P]` (diagonal), or a `KronDecomposed`; zero before "
        "`fit`. It can be assigned, and summed in a loop by `la.H += …`, which makes no copies.",
    )

    @checked
    def start_fit(self) -> None:
        """Starts a fit in a loop of your own: sets H, loss, `n_data` and `n_outputs` to zero, at the present weights.

        Raises:
            NotFittedError: The last layer is not known yet: give `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        self._posterior = without_data(self._posterior.before_new_data("start_fit"))

    @checked
    def restart_H(self) -> None:
        """Sets only H to zero, at the network's present weights; loss, `n_data` and `la.H_facs` keep their values.

        From then on `la.H_facs` is stored apart from H, for loops that add new factors to those of former data.

        Raises:
            NotFittedError: The last layer is not known yet: give `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        former = self._posterior.data
        self.start_fit()
        self._posterior = restarted(self._posterior, former)

    @checked
    def curvature_of(self, x: Inputs, y: Tensor, n_data: int) -> tuple[Tensor, Any]:
        """Loss and curvature of one batch, as in `fit`; sum them over all batches.

        Args:
            x: Inputs of the batch.
            y: Targets of the batch.
            n_data: N, the number of data in all batches together, by which Kronecker factors are normalised: the sum of
                `len(y)`, however many tokens or pixels and ignored labels there are.

        Returns:
            The negative log likelihood at σ = T = 1, 0-dim, and H in the form of `la.H` (a `Kron` for Kronecker
            factors).

        Raises:
            InvalidData: A batch that cannot be used.
            NotFittedError: The last layer is not known yet: give `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        check_counts(n_data=n_data)
        self._posterior = with_channels_of(with_backend_loss(self._posterior), x, y)
        return batch_of(self._posterior, x, y, n_data)


overrides.check_class(FittedByHand, FittedByHand)
