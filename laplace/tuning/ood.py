"""How far inputs are from the data, as one number each: what tells data of another kind apart from those of the fit.

Probabilities are best from a narrow posterior, as `la.calibrate` chooses it, and inputs are ranked best by a wide one:
scores are of the posterior with the hyper-parameters that the evidence chose, whatever probabilities are of. Where no
evidence was asked, it is once, and what it chose is kept with the data, as are the statistics of training features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.arguments import check_counts
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.gaussian import Gaussian, covariance_root
from laplace.core.overrides import PREDICTIONS
from laplace.core.positions import OutputRows, rows_of, unrolled
from laplace.core.precision_policy import widened
from laplace.core.progress import DataBar
from laplace.core.random_numbers import check_generator, drawn_seed, standard_normal
from laplace.engines.engine import outputs
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.network import next_token
from laplace.network.model_guard import apart, autograd_mode, reading
from laplace.posterior.features import FeatureStatistics, FeatureSums
from laplace.posterior.posterior import Posterior
from laplace.predictive.latent import GaussianSource, Pieces, gaussian_of, jacobians, shifted
from laplace.predictive.options import PredictOptions
from laplace.predictive.predict import in_parts
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

DEFAULT: OodMethod = "confidence"
"""The score of class labels, and of other labels with probabilities; chosen in docs/which_method.md, by measurement."""

DEFAULT_OF_NUMBERS: OodMethod = "latent_variance"
"""The score of targets without probabilities."""

_MOST_AT_ONCE = 500
"""Inputs that are scored at once."""

_ENTRIES = 2**24
"""Entries of covariances or samples that are held at once."""


# Scores of what was seen of some inputs.


@dataclass(frozen=True, eq=False)
class Seen:
    """What networks and posteriors say at R rows of inputs; of what no score asked for, nothing."""

    network: list[Tensor]  # Outputs of every network, `[R, C]`
    prediction: Prediction  # At the hyper-parameters of the evidence
    distances: list[Callable[[str], Tensor]]  # From the training features, by the name of the method


def _network(group: PosteriorGroup, seen: Seen) -> Tensor:
    return _doubt(group, seen.prediction.average([group.likelihood.inverse_link(f) for f in seen.network]))


def _energy(group: PosteriorGroup, seen: Seen) -> Tensor:
    return seen.prediction.average([-f.logsumexp(1) for f in seen.network])


def _doubt(group: PosteriorGroup, probabilities: Tensor) -> Tensor:
    """1 − the largest probability, of several labels the mean."""
    likelihood, hypers = group.likelihood, group.first.hypers
    confidence = likelihood.target.scores["confidence"]
    return 1 - confidence(likelihood, probabilities, probabilities, hypers.sigma_noise)


def _distance(method: str, group: PosteriorGroup, seen: Seen) -> Tensor:
    return seen.prediction.average([distance(method) for distance in seen.distances])


@dataclass(frozen=True)
class _Method:
    """A score, and what it takes."""

    score: Callable[[PosteriorGroup, Seen], Tensor]
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


def ood_score(
    la: Any, x: Any, method: Any, train_loader: Iterable[Any] | None, n_samples: int,
    generator: torch.Generator | None, *, progress_bar: bool,
) -> Tensor | dict[str, Tensor]:  # fmt: skip
    """Scores of all inputs, of a posterior or a mixture, which keeps what it took; arguments: see `la.ood_score`."""
    check_counts(n_samples=n_samples)
    check_generator(generator)
    group = la._group
    names = checked_methods(group, default_method(group) if method is None else method)
    ranking = Ranking.of(group, names, train_loader, n_samples, generator, progress_bar=progress_bar)
    parts: list[tuple[dict[str, Tensor], tuple[int, ...]]] = []
    bar = DataBar("ood_score", x, shown=progress_bar)
    for number, some in enumerate(in_parts(x, "x", ranking.at_once)):
        with named(f"part {number} of x"):
            parts.append(ranking.scores(some))
        bar.add(batches.size(some, ""))
    bar.close()
    if not parts:
        raise InvalidData("x holds no inputs.")
    if ranking.known is not group:
        la._take_over(ranking.known.posteriors)
    found = {name: torch.cat([unrolled(scores[name], positions) for scores, positions in parts]) for name in names}
    return found[names[0]] if method is None or isinstance(method, str) else found


@dataclass(frozen=True, eq=False)
class Ranking:
    """Scores of inputs under posteriors that were tuned, and whose features are known, as far as these take it."""

    names: tuple[str, ...]
    known: PosteriorGroup  # The posteriors with what was found out for the scores; they predict as before
    wide: PosteriorGroup  # At the hyper-parameters of the evidence
    weights: Tensor  # Of a mixture, `[K]`
    n_samples: int
    seed: int

    @classmethod
    def of(
        cls, group: PosteriorGroup, names: tuple[str, ...], train_loader: Iterable[Any] | None, n_samples: int,
        generator: torch.Generator | None, *, progress_bar: bool = False,
    ) -> Ranking:  # fmt: skip
        methods = [METHODS[name] for name in names]
        known = group
        with group.same_random_states():
            for posterior in group.posteriors:
                posterior.check_unchanged()
            if train_loader is not None and not any(method.features for method in methods):
                raise InvalidArgument(
                    f"train_loader= is read for distances of features, not for method={', '.join(names)}; leave it out."
                )
            if any(method.features for method in methods):
                classwise = any(method.classwise for method in methods)
                known = _with_features(known, train_loader, classwise=classwise, progress_bar=progress_bar)
            if any(method.tuned for method in methods):
                known = _with_evidence(known)
        wide = replace(known, posteriors=tuple(map(_wide, known.posteriors)))
        seed = 0 if generator is None else drawn_seed(generator)
        with torch.no_grad():
            return cls(names, known, wide, wide.weights(), n_samples, seed)

    @property
    def at_once(self) -> int:
        """Inputs that are scored at once: few, where covariances or samples of many outputs are held."""
        width = self.wide.first.map_fit.n_outputs
        held = width * max(width, self.n_samples) if any(METHODS[name].covariances for name in self.names) else width
        return max(1, min(_MOST_AT_ONCE, _ENTRIES // max(1, held)))

    def scores(self, x: Inputs) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        """Scores of the rows of some inputs, `[R]` by name, and the positions that are rows of an input."""
        with self.wide.same_random_states(), autograd_mode(), torch.no_grad():
            parts = [self._seen(posterior, x) for posterior in self.wide.posteriors]
            draws = self._draws
            prediction = Prediction(
                tuple(part.prediction for part in parts if part.prediction is not None),
                self.weights.to(parts[0].network),
                choice=lambda: torch.multinomial(self.weights.cpu(), self.n_samples, True, generator=draws()),
                as_rows=True,
            )
            distances = [part.distance for part in parts if part.distance is not None]
            seen = Seen([part.network for part in parts], prediction, distances)
            found = {name: METHODS[name].score(self.wide, seen) for name in self.names}
        for name, values in found.items():
            if not bool(values.isfinite().all()):
                raise InvalidData(
                    f"the score {name!r} is not finite: look at the inputs, at which the network may be NaN."
                )
        return found, parts[0].positions

    def _draws(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _seen(self, posterior: Posterior, x: Inputs) -> _SeenByOne:
        methods = [METHODS[name] for name in self.names]
        posterior.check_unchanged()
        x = batches.to_device(x, posterior.hypers.device)
        with_features = any(method.features for method in methods)
        features: Tensor | None = None
        prediction: PosteriorOutputs | None = None
        if any(method.posterior for method in methods):
            covariances = any(method.covariances for method in methods)
            covariances |= "entropy" in self.names and not has_probabilities(self.wide)
            network, features, gaussian = _linearised(posterior, x, covariances=covariances)
            prediction = self._outputs(posterior, gaussian, covariances=covariances)
            rows = OutputRows(network, gaussian.positions)
        elif not with_features:
            rows = outputs(posterior.engine, x)
        else:
            f, features = _features(posterior, x, _statistics(posterior).layer)
            rows = rows_of(f, posterior.channel_dim)
        if with_features and features is None:
            _, features = _features(posterior, x, _statistics(posterior).layer)
        distance = None
        if with_features and features is not None:
            distance = partial(_of_features, posterior, widened(_checked_features(features, len(rows.values))))
        return _SeenByOne(widened(rows.values), rows.positions, prediction, distance)

    def _outputs(self, posterior: Posterior, gaussian: Gaussian, *, covariances: bool) -> PosteriorOutputs:
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
        return PosteriorOutputs(_Known(gaussian), posterior.likelihood, sigma, options, self._draws, draw)


@dataclass(frozen=True, eq=False)
class _SeenByOne:
    """What one network and its posterior say."""

    network: Tensor
    positions: tuple[int, ...]
    prediction: PosteriorOutputs | None
    distance: Callable[[str], Tensor] | None


@dataclass(frozen=True, eq=False)
class _Known(GaussianSource):
    """Outputs whose Gaussian is known already."""

    known: Gaussian
    create_graph = False

    def mean(self) -> OutputRows:
        return OutputRows(self.known.mean)

    def gaussian(self, form: str, *, wide: bool = False) -> Gaussian:
        return self.known if form != "diagonal" else Gaussian(self.known.mean, self.known.variance)


def _linearised(posterior: Posterior, x: Inputs, *, covariances: bool) -> tuple[Tensor, Tensor | None, Gaussian]:
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


# Posteriors as they are ranked by.


def _wide(posterior: Posterior) -> Posterior:
    """The posterior at the hyper-parameters of the evidence, where these are known."""
    chosen = posterior.require_fitted().by_evidence
    return posterior if chosen is None or not _has_evidence(posterior) else posterior.at(chosen)


def _has_evidence(posterior: Posterior) -> bool:
    """False of covariances that users assigned, or that were trained: they are taken as they are."""
    return posterior.root is None and posterior.choices.structure.weighed


def _with_evidence(group: PosteriorGroup) -> PosteriorGroup:
    """Posteriors that know what the evidence chooses: one prior precision, found where none was asked for before."""
    if all(not _has_evidence(one) or one.require_fitted().by_evidence is not None for one in group.posteriors):
        return group
    start = replace(group, posteriors=tuple(posterior.uncalibrated() for posterior in group.posteriors))
    now = start.hypers(("prior_precision",))
    prior = prior_in_structure(1.0, "scalar", start.layout, now.prior_precision)
    coordinates = Coordinates(("prior_precision",), replace(now, prior_precision=prior))
    options = SearchOptions("lbfgs", tolerance=1e-4, label="evidence")
    result = Search(EvidenceObjective(start), coordinates, options).run()
    report(result)
    tuned = start.assigned(**result.values_of(("prior_precision",)))
    found = (
        one if one.require_fitted().by_evidence is not None else one.knowing(by_evidence=at.hypers.detached())
        for one, at in zip(group.posteriors, tuned, strict=True)
    )  # fmt: skip
    return replace(group, posteriors=tuple(found))


# Features of the last layer.


def _with_features(
    group: PosteriorGroup, loader: Iterable[Any] | None, *, classwise: bool, progress_bar: bool
) -> PosteriorGroup:
    """Posteriors with the statistics of their training features: kept ones, or by a pass over the training data."""
    if loader is None:
        for posterior in group.posteriors:
            _statistics(posterior, classwise=classwise)
        return group
    batches.require_loader(loader, "train_loader")
    loader = list(loader) if isinstance(loader, Iterator) else loader
    read = partial(_read_features, loader=loader, classwise=classwise, progress_bar=progress_bar)
    return replace(group, posteriors=tuple(one.knowing(features=read(one)) for one in group.posteriors))


def _statistics(posterior: Posterior, *, classwise: bool = False) -> FeatureStatistics:
    found = posterior.require_fitted().features
    if found is None or (classwise and not found.by_class):
        what = "no statistics" if found is None else "no statistics by class"
        raise InvalidArgument(
            f"{what} of the training features are known, from which distances are; give train_loader=, the data of the "
            "fit, once: they are kept with the posterior."
        )
    return found


def _read_features(
    posterior: Posterior, loader: Iterable[Any], *, classwise: bool, progress_bar: bool
) -> FeatureStatistics:
    likelihood, choices, sums = posterior.likelihood, posterior.choices, FeatureSums(classwise)
    device, layer = posterior.hypers.device, posterior.problem.head
    bar = DataBar("features", loader, shown=progress_bar)
    with autograd_mode(), torch.no_grad():
        for number, batch in enumerate(reading(loader)):
            with named(f"batch {number} of train_loader"):
                data = next_token.counted(batch, choices.dict_key_y, device, likelihood, posterior.model)
                if data is None:
                    continue
                x, y = data
                if layer is None:
                    with apart(posterior.model, posterior.call) as model:
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
                bar.add(len(y))
    bar.close()
    return sums.statistics(layer or "")


def _features(posterior: Posterior, x: Inputs, layer: str | None) -> tuple[Tensor, Tensor]:
    """Outputs as users see them, and the inputs of the last layer; by a pass of the network."""
    reduction = getattr(posterior.weights, "reduction", None)
    with apart(posterior.model, posterior.call) as model:
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


def _of_features(posterior: Posterior, features: Tensor, method: str) -> Tensor:
    statistics, hypers = _statistics(posterior), posterior.hypers
    if method != "classwise_leverage":
        return getattr(statistics, method)(features)
    noise = widened(hypers.sigma_noise).square() * widened(hypers.temperature)
    return statistics.classwise_leverage(features, (noise * widened(hypers.prior_precision).mean()).mean())
