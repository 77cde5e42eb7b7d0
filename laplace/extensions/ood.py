"""How far inputs are from the data, as one number each: what tells data of another kind apart from those of the fit.

Probabilities are best from a narrow posterior, as `la.calibrate` chooses it, and inputs are ranked best by a wide one:
scores are of the posterior where the evidence is highest, whatever probabilities are of. It is searched on a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast, overload

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.arguments import check_counts, checked
from laplace.core.batch import Inputs, in_parts
from laplace.core.checks import named
from laplace.core.gaussian import GaussianOutputs, covariance_root
from laplace.core.overrides import PREDICTIONS
from laplace.core.positions import OutputRows, rows_of, unrolled
from laplace.core.precision_policy import widened
from laplace.core.progress import DataBar
from laplace.core.random_numbers import check_generator, drawn_seed, standard_normal
from laplace.engines.engine import outputs
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.extensions.asked import Several, group_of
from laplace.extensions.features import FeatureStatistics, FeatureSums
from laplace.network import next_token
from laplace.network.model_guard import autograd_mode, private_copy
from laplace.posterior.posterior import Posterior
from laplace.predictive.latent import GaussianSource, Pieces, gaussian_of, jacobians, shifted
from laplace.predictive.options import PredictOptions
from laplace.predictive.prediction import PosteriorOutputs, Prediction
from laplace.tuning.group import PosteriorGroup
from laplace.tuning.objectives import EvidenceObjective
from laplace.tuning.search import Coordinates, Search, SearchOptions, prior_in_structure, report
from laplace.weights.last_layer import FeatureExtractor

OodMethod = Literal[
    "network", "energy", "confidence", "entropy", "mutual_information", "latent_variance", "mahalanobis",
    "classwise_mahalanobis", "classwise_leverage",
]  # fmt: skip
"""Scores of distance from the data."""

Scores = TypeVar("Scores", bound=Tensor | dict[str, Tensor])
"""Scores of one method, or of several by name."""

DEFAULT: OodMethod = "confidence"
"""The score of class labels, and of other labels with probabilities; chosen in docs/quality.md, by measurement."""

DEFAULT_OF_NUMBERS: OodMethod = "latent_variance"
"""The score of targets without probabilities."""

_MOST_AT_ONCE = 500
"""Inputs that are scored at once."""

_ENTRIES = 2**24
"""Entries of covariances or samples that are held at once."""

_TOLERANCE = 1e-4
"""Of the search of the evidence; relative to the evidence also what tells no two prior precisions apart."""


@overload
def ood_score(
    la: Several, x: Any, method: OodMethod | None = ..., *, train_loader: Iterable[Any] | None = ...,
    n_samples: int = ..., generator: torch.Generator | None = ..., progress_bar: bool = ...,
) -> Tensor: ...  # fmt: skip


@overload
def ood_score(
    la: Several, x: Any, method: Sequence[OodMethod], *, train_loader: Iterable[Any] | None = ...,
    n_samples: int = ..., generator: torch.Generator | None = ..., progress_bar: bool = ...,
) -> dict[str, Tensor]: ...  # fmt: skip


@checked
def ood_score(
    la: Several,
    x: Any,
    method: OodMethod | Sequence[OodMethod] | None = None,
    *,
    train_loader: Iterable[Any] | None = None,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> Tensor | dict[str, Tensor]:
    """How far every input is from the data, `[B]`, larger is stranger: to tell data of another kind apart.

    The posterior is that of the evidence, whatever `calibrate` chose for probabilities. It is searched on a copy, at
    the present noise, temperature and prior mean, which are those before a calibration: one prior precision of the
    highest evidence. A prior precision `la.prior_precision` (before a calibration) that has as much evidence is taken
    as it is: one that `optimize_prior_precision` or `optimize_hyperparameters` chose by the evidence, in its
    structure. One that was chosen on validation data, or assigned, mostly has less. `la` is not changed, and nothing
    is kept: for several calls make an `ood_scorer`, which searches once.

    | `method` | score |
    |---|---|
    | `"confidence"` | 1 − the posterior's largest probability (the probit link); the default for labels |
    | `"entropy"` | entropy of the posterior's prediction |
    | `"mutual_information"` | of the label and the outputs, by samples: what disagrees between networks |
    | `"latent_variance"` | sum of the variances of the outputs; the default for other targets |
    | `"network"` | 1 − the network's own largest probability |
    | `"energy"` | −log Σ_c exp f_c of the network's outputs (Liu et al., 2020) |
    | `"mahalanobis"` | squared distance of the last layer's features to the nearest class (Lee et al., 2018) |
    | `"classwise_mahalanobis"` | the same with a covariance for every class |
    | `"classwise_leverage"` | smallest φᵀ (Σ φφᵀ + δσ²T)⁻¹ φ over the classes, φ the features and a 1 |

    Distances of features take the training data once; covariances are shrunk (Chen et al., 2010). Where targets are
    no classes, all data are of one. Which score fails when is measured in docs/quality.md. A mixture has the
    score of its prediction, or the mean of its networks'.

    Args:
        la: A fitted posterior or mixture.
        x: Inputs of B data: a tensor, tuple or mapping, or a loader, whose labels are not read.
        method: A score, or several, which take one pass together; None for the default.
        train_loader: The training data, for distances of features.
        n_samples: Number of samples of the outputs, for `"mutual_information"`.
        generator: Random generator of these samples, which are the same for all inputs; None for seed 0.
        progress_bar: Show progress bars.

    Returns:
        `[B]`, float64, or one number per token or pixel; of several scores a dictionary of them by name. Without a
        gradient.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: Another name, no training data where they are needed, or some where they are not; or
            components of a mixture that differ in noise or temperature.
        InvalidType: x is None or a number, or the training data are no loader.
        InvalidData: There are no inputs, or they lead to numbers that are not finite.
        ModelChangedError: The network was trained further after `fit`.
        UnsupportedError: A score that this likelihood does not have; outputs with positions, for distances of
            features; or a class with predictions of its own.

    Warns:
        TuningWarning: The search of the evidence did not converge.
    """
    scorer: OodScorer[Any] = ood_scorer(
        la,
        cast("OodMethod", method),
        train_loader=train_loader,
        n_samples=n_samples,
        generator=generator,
        progress_bar=progress_bar,
    )
    return scorer(x, progress_bar=progress_bar)


@overload
def ood_scorer(
    la: Several, method: OodMethod | None = ..., *, train_loader: Iterable[Any] | None = ..., n_samples: int = ...,
    generator: torch.Generator | None = ..., progress_bar: bool = ...,
) -> OodScorer[Tensor]: ...  # fmt: skip


@overload
def ood_scorer(
    la: Several, method: Sequence[OodMethod], *, train_loader: Iterable[Any] | None = ..., n_samples: int = ...,
    generator: torch.Generator | None = ..., progress_bar: bool = ...,
) -> OodScorer[dict[str, Tensor]]: ...  # fmt: skip


@checked
def ood_scorer(
    la: Several,
    method: OodMethod | Sequence[OodMethod] | None = None,
    *,
    train_loader: Iterable[Any] | None = None,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> OodScorer[Any]:
    """What `laplace.ood_score` takes of a posterior, found once: `scorer(x)` are the scores of inputs.

    It is made by a search of the evidence, and of distances of features by a pass over the training data.

    Args:
        la: A fitted posterior or mixture.
        method: A score, or several, as of `laplace.ood_score`.
        train_loader: The training data, for distances of features.
        n_samples: Number of samples of the outputs, for `"mutual_information"`.
        generator: Random generator of these samples; one number is drawn from it.
        progress_bar: Show a progress bar of the training data.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: As of `laplace.ood_score`.
        InvalidType: The training data are no loader.
        InvalidData: There are no training data, or their features cannot be told apart.
        ModelChangedError: The network was trained further after `fit`.
        UnsupportedError: As of `laplace.ood_score`.

    Warns:
        TuningWarning: The search of the evidence did not converge.
    """
    check_counts(n_samples=n_samples)
    check_generator(generator)
    group = group_of(la)
    names = checked_methods(group, default_method(group) if method is None else method)
    methods = [METHODS[name] for name in names]
    with group.same_random_states():
        for posterior in group.posteriors:
            posterior.check_unchanged()
        statistics = _statistics(group, names, train_loader, progress_bar=progress_bar)
        ranked = _at_evidence(group) if any(method.tuned for method in methods) else group
    seed = 0 if generator is None else drawn_seed(generator)
    several = method is not None and not isinstance(method, str)
    with torch.no_grad():
        return OodScorer(names, ranked, statistics, ranked.weights(), n_samples, seed, several)


# Scores of what was seen of some inputs.


@dataclass(frozen=True, eq=False)
class RowSummary:
    """What networks and posteriors say at R rows of inputs; of what no score asked for, nothing."""

    network: list[Tensor]  # Outputs of every network, `[R, C]`
    prediction: Prediction  # At the hyper-parameters of the evidence
    distances: list[Callable[[str], Tensor]]  # From the training features, by the name of the method


def _network(group: PosteriorGroup, seen: RowSummary) -> Tensor:
    return _doubt(group, seen.prediction.average([group.likelihood.inverse_link(f) for f in seen.network]))


def _energy(group: PosteriorGroup, seen: RowSummary) -> Tensor:
    return seen.prediction.average([-f.logsumexp(1) for f in seen.network])


def _doubt(group: PosteriorGroup, probabilities: Tensor) -> Tensor:
    """1 − the largest probability, of several labels the mean."""
    likelihood, hypers = group.likelihood, group.first.hypers
    confidence = likelihood.target.scores["confidence"]
    return 1 - confidence(likelihood, probabilities, probabilities, hypers.sigma_noise)


def _distance(method: str, group: PosteriorGroup, seen: RowSummary) -> Tensor:
    return seen.prediction.average([distance(method) for distance in seen.distances])


@dataclass(frozen=True)
class _Method:
    """A score, and what it takes."""

    score: Callable[[PosteriorGroup, RowSummary], Tensor]
    posterior: bool = False  # Whether it reads outputs under the posterior
    covariances: bool = False  # Whether it reads covariances between outputs
    features: bool = False  # Whether it reads features of the last layer
    classwise: bool = False  # Whether it takes statistics of every class by itself
    tuned: bool = True  # Whether it depends on hyper-parameters, which are those of the evidence
    needs: Literal["", "probabilities", "classes"] = ""


METHODS: dict[str, _Method] = {
    "network": _Method(_network, tuned=False, needs="probabilities"),
    "energy": _Method(_energy, tuned=False, needs="classes"),
    "confidence": _Method(
        lambda group, seen: _doubt(group, seen.prediction.mean), posterior=True, needs="probabilities"
    ),
    "entropy": _Method(lambda _, seen: seen.prediction.entropy, posterior=True),
    "mutual_information": _Method(
        lambda _, seen: seen.prediction.decomposition.mutual_information, posterior=True, covariances=True
    ),
    "latent_variance": _Method(lambda _, seen: seen.prediction.latent_variance.sum(1), posterior=True),
    "mahalanobis": _Method(partial(_distance, "mahalanobis"), features=True, tuned=False),
    "classwise_mahalanobis": _Method(
        partial(_distance, "classwise_mahalanobis"), features=True, classwise=True, tuned=False
    ),
    "classwise_leverage": _Method(partial(_distance, "classwise_leverage"), features=True, classwise=True),
}


def has_probabilities(group: PosteriorGroup) -> bool:
    """True if targets are labels whose probabilities say how sure a prediction is."""
    return "confidence" in group.likelihood.target.scores


def default_method(group: PosteriorGroup) -> OodMethod:
    """The score that is taken where none is named."""
    return DEFAULT if has_probabilities(group) else DEFAULT_OF_NUMBERS


def checked_methods(group: PosteriorGroup, method: Any) -> tuple[str, ...]:
    """Names of scores that have a meaning for these posteriors."""
    given = (method,) if isinstance(method, str) else tuple(method) if isinstance(method, Sequence) else ()
    if not given or not all(isinstance(name, str) and name in METHODS for name in given):
        raise InvalidArgument(f"method={method!r}; accepted are {', '.join(map(repr, METHODS))}, or several of them.")
    likelihood = group.likelihood
    for name in given:
        needs = METHODS[name].needs
        if needs == "probabilities" and not has_probabilities(group):
            raise UnsupportedError(
                f"method={name!r} with likelihood={likelihood.name!r}, which has no probabilities of labels; use "
                f"{DEFAULT_OF_NUMBERS!r}, or a distance of features."
            )
        if needs == "classes" and not likelihood.class_targets:
            raise UnsupportedError(
                f"method={name!r} with likelihood={likelihood.name!r}: the energy is that of a softmax over classes; "
                f"use {default_method(group)!r}."
            )
    for posterior in group.posteriors:
        posterior.require_fitted()
        if posterior.overrides(*PREDICTIONS):
            raise UnsupportedError(
                f"ood_score of a class that defines one of {', '.join(PREDICTIONS)}: scores read moments of the "
                "outputs, not what it predicts. Take a score of its predictions, or override functional_variance."
            )
    return given


@dataclass(frozen=True, eq=False)
class OodScorer(Generic[Scores]):
    """Scores of inputs, with all that they take of the posterior: `laplace.ood_scorer(la, ...)`.

    It is of the posterior as it was then, whatever becomes of the object; it can be pickled with the network.

    Attributes:
        methods: Names of the scores.
        group: The posterior, or those of a mixture, at the hyper-parameters that inputs are ranked by.
        statistics: Where the training data lie in the features of every network; empty where no score reads them.
        weights: Weights of a mixture, `[K]`.
        n_samples: Number of samples of the outputs.
        seed: That of their random numbers.
        several: Whether a call returns scores by name.
    """

    methods: tuple[str, ...]
    group: PosteriorGroup
    statistics: tuple[FeatureStatistics, ...]
    weights: Tensor
    n_samples: int
    seed: int
    several: bool

    def __call__(self, x: Any, *, progress_bar: bool = False) -> Scores:
        """Scores of all inputs, `[B]`, or one number per token or pixel; of several methods by name.

        Args:
            x: Inputs of B data: a tensor, tuple or mapping, or a loader, whose labels are not read.
            progress_bar: Show a progress bar.

        Raises:
            InvalidType: x is None or a number.
            InvalidData: There are no inputs, or they lead to numbers that are not finite.
            ModelChangedError: The network was trained further after `fit`.
            UnsupportedError: Outputs with positions, for distances of features.
        """
        parts: list[tuple[dict[str, Tensor], tuple[int, ...]]] = []
        bar = DataBar("ood_score", x, shown=progress_bar)
        for number, some in enumerate(in_parts(x, "x", self._at_once)):
            with named(f"part {number} of x"):
                parts.append(self._scores(some))
            bar.add(batches.size(some, ""))
        bar.close()
        if not parts:
            raise InvalidData("x holds no inputs.")
        found = {
            name: torch.cat([unrolled(scores[name], positions) for scores, positions in parts]) for name in self.methods
        }
        return cast("Scores", found if self.several else found[self.methods[0]])

    def __repr__(self) -> str:
        """The scores, and the prior precisions that inputs are ranked by."""
        priors = [prior for one in self.group.posteriors for prior in one.hypers.prior_precision.tolist()]
        least, most = min(priors), max(priors)
        span = f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
        return f"OodScorer({', '.join(map(repr, self.methods))}, prior_precision={span})"

    @property
    def _at_once(self) -> int:
        """Inputs that are scored at once: few, where covariances or samples of many outputs are held."""
        width = self.group.first.map_fit.n_outputs
        held = width * max(width, self.n_samples) if any(METHODS[name].covariances for name in self.methods) else width
        return max(1, min(_MOST_AT_ONCE, _ENTRIES // max(1, held)))

    def _scores(self, x: Inputs) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        """Scores of the rows of some inputs, `[R]` by name, and the positions that are rows of an input."""
        with self.group.same_random_states(), autograd_mode(), torch.no_grad():
            known = self.statistics or (None,) * len(self.group.posteriors)
            parts = [self._seen(*pair, x) for pair in zip(self.group.posteriors, known, strict=True)]
            draws = self._draws
            prediction = Prediction(
                tuple(part.prediction for part in parts if part.prediction is not None),
                self.weights.to(parts[0].network),
                drawn_components=lambda: torch.multinomial(self.weights.cpu(), self.n_samples, True, generator=draws()),
                as_rows=True,
            )
            distances = [part.distance for part in parts if part.distance is not None]
            seen = RowSummary([part.network for part in parts], prediction, distances)
            found = {name: METHODS[name].score(self.group, seen) for name in self.methods}
        for name, values in found.items():
            if not bool(values.isfinite().all()):
                raise InvalidData(
                    f"the score {name!r} is not finite: look at the inputs, at which the network may be NaN."
                )
        return found, parts[0].positions

    def _draws(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _seen(self, posterior: Posterior, statistics: FeatureStatistics | None, x: Inputs) -> _ModelSummary:
        methods = [METHODS[name] for name in self.methods]
        posterior.check_unchanged()
        x = batches.to_device(x, posterior.hypers.device)
        features: Tensor | None = None
        prediction: PosteriorOutputs | None = None
        if any(method.posterior for method in methods):
            covariances = any(method.covariances for method in methods)
            covariances |= "entropy" in self.methods and not has_probabilities(self.group)
            network, features, gaussian = _linearised(posterior, x, covariances=covariances)
            prediction = self._outputs(posterior, gaussian, covariances=covariances)
            rows = OutputRows(network, gaussian.positions)
        elif statistics is None:
            rows = outputs(posterior.engine, x)
        else:
            f, features = _features(posterior, x, statistics.layer)
            rows = rows_of(f, posterior.channel_dim)
        distance = None
        if statistics is not None:
            if features is None:
                _, features = _features(posterior, x, statistics.layer)
            features = widened(_checked_features(features, len(rows.values)))
            distance = partial(_of_features, posterior, statistics, features)
        return _ModelSummary(widened(rows.values), rows.positions, prediction, distance)

    def _outputs(self, posterior: Posterior, gaussian: GaussianOutputs, *, covariances: bool) -> PosteriorOutputs:
        """Outputs that are known by their Gaussian; all rows are drawn by the same numbers, whatever their batch."""

        def draw(n: int, generator: torch.Generator | None) -> OutputRows:
            mean = gaussian.mean
            noise = standard_normal((n, mean.shape[1]), mean, generator)
            if gaussian.is_diagonal:
                steps = noise.unsqueeze(1) * gaussian.covariance.clamp(min=0).sqrt()
            else:
                steps = torch.einsum("bij,sj->sbi", covariance_root(gaussian.covariance), noise)
            return OutputRows(mean + steps)

        options = PredictOptions(diagonal_output=not covariances, n_samples=self.n_samples)
        sigma = widened(posterior.sigma_noise.detach())
        return PosteriorOutputs(_KnownOutputs(gaussian), posterior.likelihood, sigma, options, self._draws, draw)


@dataclass(frozen=True, eq=False)
class _ModelSummary:
    """What one network and its posterior say."""

    network: Tensor
    positions: tuple[int, ...]
    prediction: PosteriorOutputs | None
    distance: Callable[[str], Tensor] | None


@dataclass(frozen=True, eq=False)
class _KnownOutputs(GaussianSource):
    """Outputs whose Gaussian is known already."""

    known: GaussianOutputs
    create_graph = False

    def mean(self) -> OutputRows:
        return OutputRows(self.known.mean)

    def gaussian(self, form: str, *, wide: bool = False) -> GaussianOutputs:
        return self.known if form != "diagonal" else GaussianOutputs(self.known.mean, self.known.variance)


def _linearised(posterior: Posterior, x: Inputs, *, covariances: bool) -> tuple[Tensor, Tensor | None, GaussianOutputs]:
    """Outputs of the network, features where the Jacobian shows them, and outputs under the posterior; one pass."""
    network: list[Tensor] = []
    features: list[Tensor | None] = []

    def noted(pieces: Pieces) -> Pieces:
        with closing(pieces):
            for jacobian, f in pieces:
                network.append(f)
                features.append(jacobian.last_layer_inputs())
                yield jacobian, f

    precision = posterior.predictive_precision()
    pieces = shifted(noted(jacobians(posterior.engine, x, None, create_graph=False)), posterior.refined_step)
    found = gaussian_of(pieces, precision, "full" if covariances else "diagonal", wide=True)
    shown = [part for part in features if part is not None]
    return (
        torch.cat(network),
        torch.cat(shown) if len(shown) == len(features) else None,
        replace(found, mean=widened(found.mean), covariance=widened(found.covariance)),
    )


# Posteriors as inputs are ranked by them.


def _has_evidence(posterior: Posterior) -> bool:
    """False of covariances that users assigned, or that were trained: they are taken as they are."""
    return posterior.root is None and posterior.choices.structure.scaled_by_noise


def _at_evidence(group: PosteriorGroup) -> PosteriorGroup:
    """The posteriors at the one prior precision of the highest evidence, or at their own ones, if these have no less.

    So a prior precision that the evidence chose stays, in the structure in which it was tuned.
    """
    if not any(map(_has_evidence, group.posteriors)):
        return group
    own = replace(group, posteriors=tuple(one.at_hyperparameters(one.hypers.detached()) for one in group.posteriors))
    now = own.hypers(("prior_precision",))
    start = replace(now, prior_precision=prior_in_structure(1.0, "scalar", own.layout, now.prior_precision))
    options = SearchOptions("lbfgs", tolerance=_TOLERANCE, label="evidence")
    result = Search(EvidenceObjective(own), Coordinates(("prior_precision",), start), options).run()
    with torch.no_grad():
        less = result.value - own.log_evidence().to(now.dtype).item()
    if less <= _TOLERANCE * max(1.0, abs(result.value)):
        chosen = own
    else:
        report(result)
        chosen = own.at_hyperparameters(replace(now, prior_precision=result.prior_precision))
    pairs = zip(group.posteriors, chosen.posteriors, strict=True)
    return replace(group, posteriors=tuple(at if _has_evidence(one) else one for one, at in pairs))


# Features of the last layer.


def _statistics(
    group: PosteriorGroup, names: Sequence[str], loader: Iterable[Any] | None, *, progress_bar: bool
) -> tuple[FeatureStatistics, ...]:
    """Statistics of the training features of every network; none where no score reads them."""
    distances = [name for name in names if METHODS[name].features]
    if not distances:
        if loader is not None:
            raise InvalidArgument(
                f"train_loader= is read for distances of features, not for method={', '.join(names)}; leave it out."
            )
        return ()
    if loader is None:
        raise InvalidArgument(
            f"method={', '.join(distances)} is a distance from the training features; give train_loader=, the "
            "data of the fit. laplace.ood_scorer reads them once, for many calls."
        )
    batches.require_loader(loader, "train_loader")
    loader = list(loader) if isinstance(loader, Iterator) else loader
    classwise = any(METHODS[name].classwise for name in distances)
    read = partial(_read_features, loader=loader, classwise=classwise, progress_bar=progress_bar)
    return tuple(read(posterior) for posterior in group.posteriors)


def _read_features(
    posterior: Posterior, loader: Iterable[Any], *, classwise: bool, progress_bar: bool
) -> FeatureStatistics:
    likelihood, choices, sums = posterior.likelihood, posterior.choices, FeatureSums(classwise)
    device, layer = posterior.hypers.device, posterior.problem.head
    with autograd_mode(), torch.no_grad():
        for name, x, y in next_token.read(
            loader, choices.dict_key_y, device, likelihood, posterior.model,
            name="batch {} of train_loader", label="features", progress_bar=progress_bar,
        ):  # fmt: skip
            with named(name):
                if layer is None:
                    with private_copy(posterior.model, posterior.call) as model:
                        extractor = FeatureExtractor(model, forward_fn=posterior.call)
                        extractor.find_last_layer(x)
                        layer = extractor.last_layer_name
                f, features = _features(posterior, x, layer)
                features = _checked_features(features, len(f))
                labels = torch.zeros(len(f), dtype=torch.long, device=device)
                if likelihood.class_targets:
                    checked = likelihood.check_targets(rows_of(f, posterior.channel_dim).values, y)
                    labels = checked.argmax(1) if checked.is_floating_point() else checked
                sums.add(features, labels, f.shape[1] if likelihood.class_targets else 1)
    return sums.statistics(layer or "")


def _features(posterior: Posterior, x: Inputs, layer: str | None) -> tuple[Tensor, Tensor]:
    """Outputs as users see them, and the inputs of the last layer; by a pass of the network."""
    reduction = getattr(posterior.weights, "reduction", None)
    with private_copy(posterior.model, posterior.call) as model:
        extractor = FeatureExtractor(model, layer, feature_reduction=reduction, forward_fn=posterior.call)
        return extractor.forward_with_features(x)


def _checked_features(features: Tensor, n_rows: int) -> Tensor:
    if features.ndim != 2 or len(features) != n_rows:
        raise UnsupportedError(
            f"the last layer's inputs have shape {list(features.shape)} for {n_rows} rows of outputs: distances of "
            "features take one vector [D] for each input. Use a score of the outputs, such as 'confidence'."
        )
    if not bool(features.isfinite().all()):
        raise InvalidData("the features of the last layer are NaN or infinite; look at the inputs.")
    return features


def _of_features(posterior: Posterior, statistics: FeatureStatistics, features: Tensor, method: str) -> Tensor:
    hypers = posterior.hypers
    if method != "classwise_leverage":
        return getattr(statistics, method)(features)
    noise = widened(hypers.sigma_noise).square() * widened(hypers.temperature)
    return statistics.classwise_leverage(features, (noise * widened(hypers.prior_precision).mean()).mean())
