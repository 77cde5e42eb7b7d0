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
    """An object whose data can be assigned, part by part; `fit` makes all of them at once.

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
        "θ*, `[P]`; before `fit` the prior's mean, or None while the last layer is unknown; θ̂ after `refine`. One that "
        "is assigned is the mean of samples, densities and the evidence; linearised predictions stay as they are. "
        "Every reading is a copy, so that `la.mean += …` leaves θ* and the prior's mean.",
    )
    loss = Part["float | Tensor"](
        lambda now: 0.0 if now.data is None else now.data.present.loss_terms.sum(),
        "Summed unit negative log likelihood of the data, 0-dim; the number 0 before `fit`.",
    )
    n_data = Part[float](
        lambda now: 0 if now.data is None else now.data.source.n_data,
        "Data seen that count, a sum of weights where some faded; 0 before `fit`.",
    )
    n_outputs = Part[int](lambda now: 0 if now.data is None else now.data.source.n_outputs, "C; 0 before `fit`.")
    H = Part[Any](
        lambda now: now.H,
        "The unit curvature: `[P, P]`, `[P]`, or a `KronDecomposed`; zero before `fit`. One that is assigned is used "
        "as it is until something is computed of it: a loop of `la.H += …` copies nothing.",
    )

    @checked
    def start_fit(self) -> None:
        """Starts a fit by hand: no data, H, loss and numbers zero, around the network's present weights.

        Raises:
            NotFittedError: The last layer is found at `fit`, or by `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        self._posterior = without_data(self._posterior)

    @checked
    def restart_H(self) -> None:
        """Sets H alone to zero, around the network's present weights; loss, numbers and `la.H_facs` stay as they are.

        From then on `la.H_facs` is apart from H, for loops that add new factors to those of former data.

        Raises:
            NotFittedError: The last layer is found at `fit`, or by `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        former = self._posterior.data
        self.start_fit()
        self._posterior = restarted(self._posterior, former)

    @checked
    def curvature_of(self, x: Inputs, y: Tensor, n_data: int) -> tuple[Tensor, Any]:
        """Loss and curvature of one batch, as `fit` computes them, which add up over the batches of N data.

        Args:
            x: Inputs of the batch.
            y: Its targets.
            n_data: N, the number of rows of all targets, of which a batch's Kronecker factors on the input side are a
                share; positions and ignored labels make no difference.

        Returns:
            The unit negative log likelihood, 0-dim, and H of the form of `la.H` (a `Kron` for Kronecker factors).

        Raises:
            InvalidData: A batch that cannot be used.
            NotFittedError: The last layer is found at `fit`, or by `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        check_counts(n_data=n_data)
        self._posterior = with_channels_of(with_backend_loss(self._posterior), x, y)
        return batch_of(self._posterior, x, y, n_data)


overrides.check_class(FittedByHand, FittedByHand)
