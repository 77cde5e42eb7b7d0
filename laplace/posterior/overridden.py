"""The posterior as users' classes make it: one place where their methods meet those of the library.

What a user overrides changes all that follows from it, as in the chain

    prior_precision_diag → posterior_precision → posterior_scale → posterior_covariance → functional_variance, sample, …

A method of the library reads the chain up to its own link, so that `super().functional_variance(Js)` is what would
be computed without the override.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.curvature.jacobian import Jacobian
from laplace.enums import PredType
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.fitting import Fit
from laplace.gaussian import Gaussian, covariance_root
from laplace.kronecker import Kron, KronDecomposed
from laplace.noise import drawn_seed
from laplace.overrides import COVARIANCES, MOMENTS, is_overridden
from laplace.positions import OutputRows, rows_of
from laplace.predictive.quantities import Draw, GaussianSource, OwnSamples, Quantities
from laplace.prior import GaussianPrior
from laplace.structures import algebra
from laplace.structures.base import Precision

if TYPE_CHECKING:
    from laplace.batch import Inputs
    from laplace.posterior.weight_posterior import WeightPosterior


def posterior_before(la: WeightPosterior, name: str) -> Precision:
    """The posterior with what users override of the moments that come before `name`.

    Args:
        la: A fitted posterior.
        name: One of `MOMENTS`, or what follows from all of them.
    """
    links = MOMENTS[: MOMENTS.index(name)] if name in MOMENTS else MOMENTS
    for link in reversed(links):
        # Variances say everything of a diagonal posterior only.
        if is_overridden(la, link) and (link != "posterior_variance" or la.structure.name == "diag"):
            return _given(la, link, _read(la, link))
    return la.posterior()


def own_diagonal(la: WeightPosterior, prior: GaussianPrior) -> Tensor:
    """A user's `prior_precision_diag`, `[P]`.

    Raises:
        InvalidArgument: It has another shape, or is not positive.
    """
    found, n = la.prior_precision_diag, prior.layout.n_params
    return _positive(la, "prior_precision_diag", _checked(la, "prior_precision_diag", found, (n,)).to(prior.precision))


def own_fit(la: WeightPosterior, fit: Fit) -> Fit:
    """A fit with what a user's class overrides of it.

    Raises:
        UnsupportedError: A loss where a fit keeps one per output, or a curvature of a structure that is no tensor.
    """
    if is_overridden(la, "loss"):
        if fit.loss_terms.numel() > 1:
            raise UnsupportedError(
                f"class {type(la).__name__} overrides loss, of which a fit with one noise per output keeps one per "
                "output; use one noise, or override log_likelihood."
            )
        fit = replace(fit, loss_terms=torch.as_tensor(la.loss).to(fit.loss_terms).reshape(fit.loss_terms.shape))
    if is_overridden(la, "n_data"):
        fit = replace(fit, n_data=la.n_data)
    if is_overridden(la, "n_outputs"):
        fit = replace(fit, n_outputs=la.n_outputs)
    if is_overridden(la, "H"):
        if la.structure.name not in ("full", "diag"):
            raise UnsupportedError(
                f"class {type(la).__name__} overrides H, which is no tensor for hessian_structure="
                f"{la.structure.name!r}; override posterior_precision, or write a structure."
            )
        n = la.problem.layout.n_params
        shape = (n, n) if la.structure.name == "full" else (n,)
        values = _checked(la, "H", la.H, shape).to(la.prior_precision.detach())
        fit = replace(fit, curvature=la.structure.from_state({"values": values.unsqueeze(0)}))
    return fit


def predictive_posterior(la: WeightPosterior) -> Precision:
    """The posterior as predictions see it, with all that users override."""
    posterior = posterior_before(la, "functional_variance")
    return UsersPosterior(la, posterior) if is_overridden(la, *COVARIANCES) else posterior


def users_samples(la: WeightPosterior, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """Samples of the treated weights `[S, P]` by a user's own `sample`."""
    samples: Any = _seeded(_method(la, "sample"), generator)(n_samples)
    layout = la.problem.layout
    if not isinstance(samples, Tensor) or samples.ndim != 2 or len(samples) != n_samples:
        raise _wrong_shape(la, "sample", samples, f"[{n_samples}, P]")
    samples = samples.to(la.mean)
    if samples.shape[1] != layout.n_params:  # of a subnetwork: of all trainable parameters
        samples = torch.stack([la.weights.restrict_prior(sample) for sample in samples])
    if samples.shape[1] != layout.n_params:
        raise _wrong_shape(la, "sample", samples, f"[{n_samples}, P], P = {layout.n_params}")
    return samples


def own_quantities(
    la: WeightPosterior, rows: Quantities, x: Inputs, kind: PredType, model_kwargs: dict[str, Any]
) -> Quantities:
    """A prediction with users' own samples, and their own variances of the linearised outputs.

    Args:
        la: A fitted posterior.
        rows: The prediction as the library makes it.
        x: Inputs.
        kind: Linearised or sampled.
        model_kwargs: Further arguments of the model.
    """
    source = rows.source
    if isinstance(source, GaussianSource) and is_overridden(la, "functional_variance_fast"):
        source = OwnVariances(la, source, x)
    samples = {
        name: own_samples(la, name, x, kind, rows.options.form, model_kwargs)
        for name in ("functional_samples", "predictive_samples")
        if is_overridden(la, name)
    }
    own = OwnSamples(samples.get("functional_samples"), samples.get("predictive_samples"))
    return replace(rows, source=source, own=own)


def own_samples(
    la: WeightPosterior, name: str, x: Inputs, kind: PredType, form: str, model_kwargs: dict[str, Any]
) -> Draw:
    """A user's own `functional_samples` or `predictive_samples` at x.

    Args:
        la: A fitted posterior.
        name: Which of them.
        x: Inputs.
        kind: Linearised or sampled.
        form: Covariance of the latents: `"full"`, `"diagonal"` or `"joint"`.
        model_kwargs: Further arguments of the model.
    """
    method, options = _method(la, name), dict(model_kwargs)
    # What has its default value is not passed on: a user's method need not know it.
    options |= {"full": {}, "diagonal": {"diagonal_output": True}, "joint": {"joint": True}}[form]
    pred_type = PredType.GP if la.structure.name == PredType.GP else kind

    def draw(n: int, generator: torch.Generator | None) -> OutputRows:
        found = _seeded(method, generator)(x, pred_type=pred_type, n_samples=n, **options)
        if not isinstance(found, Tensor) or found.ndim < 3 or len(found) != n:
            raise _wrong_shape(la, name, found, f"[{n}, B, C]")
        return rows_of(found, la.channel_dim, 1)

    return draw


@dataclass(frozen=True, eq=False)
class OwnVariances(GaussianSource):
    """Linearised outputs whose variances are those of a user's own `functional_variance_fast`.

    Attributes:
        la: Whose method is called.
        source: The rest.
        x: Inputs.
    """

    la: WeightPosterior
    source: GaussianSource
    x: Inputs

    @property
    def create_graph(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.source.create_graph

    def mean(self) -> OutputRows:
        return self.source.mean()

    def latent(self, form: str) -> Gaussian:
        if form != "diagonal":
            return self.source.latent(form)
        mean, variance = (rows_of(part, self.la.channel_dim) for part in self._found())
        return Gaussian(mean.values, variance.values, mean.positions)

    def _found(self) -> tuple[Tensor, Tensor]:
        found = _method(self.la, "functional_variance_fast")(self.x)
        if not isinstance(found, tuple) or len(found) != 2 or found[0].shape != found[1].shape:
            raise InvalidArgument(
                f"functional_variance_fast of class {type(self.la).__name__} must return mean and variances, [B, C] "
                "each."
            )
        return found


def _seeded(method: Callable[..., Any], generator: torch.Generator | None) -> Callable[..., Any]:
    """A user's method with a source of randomness: as an argument if it takes one, else as the global seed."""
    if generator is None:
        return method
    known = inspect.signature(method).parameters.values()
    if any(p.name == "generator" or p.kind is p.VAR_KEYWORD for p in known):
        return partial(method, generator=generator)

    def seeded(*args: Any, **options: Any) -> Any:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(drawn_seed(generator))
            return method(*args, **options)

    return seeded


@dataclass(frozen=True)
class UsersPosterior(Precision):
    """A posterior whose covariances of outputs are users' own; they are given dense Jacobians, a few data at a time.

    Attributes:
        la: Whose methods are called.
        posterior: The rest.
    """

    la: WeightPosterior
    posterior: Precision

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        if not is_overridden(self.la, "functional_variance"):
            return self.posterior.functional_variance(jacobian)
        method, shape = _method(self.la, "functional_variance"), (jacobian.n_cotangents, jacobian.n_cotangents)
        parts = [(len(piece), method(piece)) for piece in jacobian.pieces()]
        return torch.cat([_checked(self.la, "functional_variance", found, (n, *shape)) for n, found in parts])

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        if not is_overridden(self.la, "functional_variance"):
            return self.posterior.functional_diagonal(jacobian)
        return self.functional_variance(jacobian).diagonal(dim1=1, dim2=2)

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        if not is_overridden(self.la, "functional_covariance"):
            return self.posterior.functional_covariance(jacobian)
        n = jacobian.n_data * jacobian.n_cotangents
        found = _method(self.la, "functional_covariance")(jacobian.dense())
        return _checked(self.la, "functional_covariance", found, (n, n))

    def logdet(self) -> Tensor:
        return self.posterior.logdet()

    def logdet_ratio(self) -> Tensor:
        return self.posterior.logdet_ratio()

    def quad(self, vectors: Tensor) -> Tensor:
        return self.posterior.quad(vectors)

    def sample(self, noise: Tensor) -> Tensor:
        return self.posterior.sample(noise)

    def diagonal_of_inverse(self) -> Tensor:
        return self.posterior.diagonal_of_inverse()

    def to_dense(self) -> Tensor:
        return self.posterior.to_dense()

    @property
    def public(self) -> Any:
        return self.posterior.public

    @property
    def covariance(self) -> Tensor:
        return self.posterior.covariance

    @property
    def scale(self) -> Tensor:
        return self.posterior.scale


@dataclass(frozen=True)
class GivenPosterior(Precision):
    """A posterior that is known by a root of its covariance, with the graph that leads to it.

    Attributes:
        root: L with L Lᵀ = P⁻¹, `[P, P]`, or standard deviations `[P]`.
    """

    root: Tensor

    @property
    def _is_diagonal(self) -> bool:
        return self.root.ndim == 1

    def logdet(self) -> Tensor:
        root = self.root.double()
        return -2 * (root.log().sum() if self._is_diagonal else torch.linalg.slogdet(root).logabsdet)

    def logdet_ratio(self) -> Tensor:
        """Of the prior nothing is known here: as if it were N(0, I)."""
        return self.logdet()

    def quad(self, vectors: Tensor) -> Tensor:
        return self._whitened(vectors).square().sum(-1)

    def _whitened(self, vectors: Tensor) -> Tensor:
        """L⁻¹ v of vectors `[..., P]`."""
        if self._is_diagonal:
            return vectors / self.root
        rows = vectors.reshape(-1, vectors.shape[-1])
        return torch.linalg.solve(self.root.double(), rows.double().T).T.to(vectors).view_as(vectors)

    def _coloured(self, rows: Tensor) -> Tensor:
        """J L of rows `[..., P]`."""
        return rows * self.root if self._is_diagonal else rows @ self.root

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        roots = (self._coloured(piece) for piece in jacobian.pieces())
        return torch.cat([root @ root.mT for root in roots])

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        return torch.cat([self._coloured(piece).square().sum(2) for piece in jacobian.pieces()])

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        root = self._coloured(jacobian.dense().flatten(0, 1))
        return root @ root.T

    def sample(self, noise: Tensor) -> Tensor:
        return noise * self.root if self._is_diagonal else noise @ self.root.T

    def diagonal_of_inverse(self) -> Tensor:
        return self.root.square() if self._is_diagonal else self.root.square().sum(1)

    def to_dense(self) -> Tensor:
        if self._is_diagonal:
            return torch.diag(self.root.square().reciprocal())
        inverse = torch.linalg.inv(self.root.double())
        return (inverse.T @ inverse).to(self.root)

    @property
    def public(self) -> Tensor:
        return self.root.square().reciprocal() if self._is_diagonal else self.to_dense()

    @property
    def covariance(self) -> Tensor:
        return torch.diag(self.root.square()) if self._is_diagonal else self.root @ self.root.T

    @property
    def scale(self) -> Tensor:
        return self.root


def _given(la: WeightPosterior, name: str, value: Any) -> Precision:
    """The posterior with one of its moments as a user computes it.

    Raises:
        InvalidArgument: It is none, or has another shape than the treated parameters ask for.
    """
    if isinstance(value, Precision):
        return value
    if isinstance(value, Kron | KronDecomposed):
        value = value.to_matrix()
    n = la.problem.layout.n_params
    square = name == "posterior_covariance"
    accepted = ((n, n),) if square else ((n,),) if name == "posterior_variance" else ((n, n), (n,))
    if not isinstance(value, Tensor) or tuple(value.shape) not in accepted:
        raise _wrong_shape(la, name, value, " or ".join(str(list(shape)) for shape in accepted))
    value = value.to(la.prior_precision.dtype)
    if name == "posterior_scale":
        return GivenPosterior(value)
    if name == "posterior_variance":
        return GivenPosterior(_positive(la, name, value).sqrt())
    if square:
        return GivenPosterior(covariance_root(value.unsqueeze(0))[0])
    if value.ndim == 1:
        return GivenPosterior(_positive(la, name, value).rsqrt())
    root = algebra.covariance_factor(0.5 * (value + value.T).double())
    if root is None:
        raise InvalidArgument(f"{name} of class {type(la).__name__} is not positive definite.")
    return GivenPosterior(root.to(value.dtype))


def _positive(la: object, name: str, value: Tensor) -> Tensor:
    if not bool((value > 0).all()):
        raise InvalidArgument(f"{name} of class {type(la).__name__} holds values that are not positive.")
    return value


def _read(la: object, name: str) -> Any:
    return getattr(la, name)


def _method(la: object, name: str) -> Callable[..., Any]:
    return getattr(la, name)


def _checked(la: object, name: str, found: Any, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(found, Tensor) or tuple(found.shape) != shape:
        raise _wrong_shape(la, name, found, str(list(shape)))
    return found


def _wrong_shape(la: object, name: str, found: Any, expected: str) -> InvalidArgument:
    given = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    return InvalidArgument(f"{name} of class {type(la).__name__} gave {given}; it must be {expected}.")
