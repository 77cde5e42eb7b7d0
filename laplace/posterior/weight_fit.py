"""Which weights are random, and the fit of their curvature to data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laplace import fitting
from laplace.core import batch as batches
from laplace.core import hyperparameters as hyper
from laplace.core.arguments import checked
from laplace.core.checks import named
from laplace.core.overrides import is_ours
from laplace.curvature import CurvatureInterface
from laplace.engines.engine import CurvatureEngine
from laplace.errors import InvalidArgument, NotFittedError
from laplace.fitting import FirstBatch, FirstPass, Fit, ReadOptions, subsampling
from laplace.fitting.subsampling import Subset
from laplace.network.fingerprint import Fingerprint
from laplace.network.model_guard import own_mode, same_random_state, undisturbed
from laplace.posterior import first_outputs
from laplace.posterior.base import BaseLaplace
from laplace.refinement.result import Refinement
from laplace.structures.announced import bars
from laplace.weights.problem import Problem


class WeightFit(BaseLaplace):
    """A choice of weights with what data say of them; `WeightPosterior` adds evidence and moments."""

    # What was chosen.

    @property
    def problem(self) -> Problem:
        """What backends see.

        Raises:
            NotFittedError: The last layer is found at `fit`, or by `last_layer_name=`.
        """
        if self.weights.problem is None:
            raise NotFittedError(
                "the last layer is not known before fit; call fit(train_loader) first, or pass last_layer_name=."
            )
        return self.weights.problem

    @property
    def backend(self) -> CurvatureInterface:
        """The curvature backend as users call it: `la.backend.jacobians(x)`, `la.backend.diag(x, y)`."""
        if self._backend is None:
            self._backend = self._make_backend(self.problem)
        return self._backend

    @property
    def engine(self) -> CurvatureEngine:
        """What computes Jacobians and curvature, made on first use."""
        if self._engine is None:
            self._engine = self._make_engine(self.problem, split_outputs=False)
        return self._engine

    def _make_backend(self, problem: Problem) -> CurvatureInterface:
        """An object of the backend's class, for direct calls and for methods of users' classes.

        A class of the user's sees the names "regression" and "classification" only, and is called with
        `asdl_fisher_kwargs`, which the library's take in the constructor.

        Raises:
            InvalidArgument: The constructor does not know an option.
        """
        backend, ours = self.backend_cls, is_ours(self.backend_cls)
        model, choice = self.weights.for_backend(problem)
        options = {**choice, **self.backend_kwargs, **(self.asdl_fisher_kwargs if ours else {})}
        name = self.likelihood if ours else self.likelihood_object.peer_name
        try:
            return backend(model, name, dict_key_x=self.dict_key_x, dict_key_y=self.dict_key_y, **options)
        except TypeError as error:
            raise InvalidArgument(
                f"backend={backend.__name__} could not be made with "
                f"backend_kwargs={sorted(self.backend_kwargs)}: {error}"
            ) from error

    def _make_engine(self, problem: Problem, *, split_outputs: bool) -> CurvatureEngine:
        backend, likelihood = self.backend_cls, self.likelihood_object
        if is_ours(backend):
            given = {**self.backend_kwargs, **self.asdl_fisher_kwargs}
            return backend.engine_for(problem, likelihood, given, split_outputs=split_outputs)
        own = self._make_backend(problem)
        return own.engine(problem, likelihood, split_outputs=split_outputs, **self.asdl_fisher_kwargs)

    def _fitting_engine(self, problem: Problem, *, go_on: bool) -> CurvatureEngine:
        """An engine for a fit: one that keeps a term per output under a vector noise.

        Args:
            problem: What it sees.
            go_on: Whether data are added, with the former fit's engine, whose random draws go on.
        """
        split = self.sigma_noise.numel() > 1
        former = self._engine
        if go_on and former is not None and former.split_outputs == split:
            return former
        engine = self._make_engine(problem, split_outputs=split)
        draws, own = self._fit.draws if go_on and self._fit else None, "generator" not in self.backend_kwargs
        if draws is not None and own and engine.generator and engine.generator.get_state().shape == draws.shape:
            engine.generator.set_state(draws)  # of a copied or loaded posterior, whose engine was left behind
        return engine

    @property
    def params(self) -> list[Tensor]:
        """The treated tensors of the model, in order."""
        return [self.problem.tensor(slot.name) for slot in self.problem.slots]

    @property
    def is_subset_params(self) -> bool:
        """Whether some parameter of the model is frozen."""
        with undisturbed(self.weights.model):
            return any(not p.requires_grad for p in self.model.parameters())

    @property
    def n_params(self) -> int | None:
        """P, or None while the last layer is unknown."""
        return None if self.weights.problem is None else self.weights.problem.layout.n_params

    @property
    def n_layers(self) -> int | None:
        """Number of treated tensors, or None while the last layer is unknown."""
        return None if self.weights.problem is None else self.weights.problem.layout.n_tensors

    def coverage(self) -> dict[str, str]:
        """Which layer rule or fallback explains every treated tensor, and in which form its curvature is held.

        Raises:
            NotFittedError: Before `fit`.
        """
        return dict(self.fitted().coverage)

    # Fit.

    @checked
    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        decay: float = 1.0,
        subset: int | None = None,
        generator: torch.Generator | None = None,
        check_memory: bool = True,
    ) -> None:
        """Fits the Gaussian to the curvature of the data at the model's present weights.

        Args:
            train_loader: Batches `(x, y)`, tuples `(x1, …, y)` or mappings with `dict_key_y`.
            override: Start anew; False adds the data to those of the former fit.
            progress_bar: Show one.
            decay: With `override=False`, how often every datum of the former fit counts from now on, in (0, 1]: it
                multiplies the former curvature, loss and number of data, so that old data fade exponentially. The
                prior does not fade.
            subset: M: take the curvature of M data drawn at random, times N/M, which is unbiased (Immer et al., 2021,
                appendix A.3.1); loss and number are those of all N. The data are read once more.
            generator: Source of that choice; None for the global one, which leads to another choice each time.
            check_memory: Whether to refuse a fit that by the shapes of its first batch takes more memory than there is;
                asked of fits above 1 GiB, on CPUs under Linux and on CUDA.

        Raises:
            OutOfMemory: Memory does not hold the fit; the message names choices that take less.
            InvalidData: A batch cannot be used; the former posterior is kept, as after every error.
            InvalidArgument: A hyper-parameter's length does not fit the treated parameters or the outputs, or a decay
                or a subset that is not accepted.
            InvalidType: What is given for the loader cannot be iterated over, or targets are given beside it.
            UnsupportedError: The structure is no sum over data, and the former fit cannot fade.

        Warns:
            ApproximationWarning: Random outputs, several heads with a last layer, one of several processes, or many
                weights that Kronecker factors could not hold.
        """
        self._fit_by(
            None, train_loader, override, progress_bar, decay=decay, subset=subset, generator=generator,
            check_memory=check_memory,
        )  # fmt: skip

    def _fit_by(
        self,
        first_pass: FirstPass | None,
        train_loader: Iterable[Any],
        override: bool,
        progress_bar: bool,
        *,
        decay: float = 1.0,
        subset: int | None = None,
        generator: torch.Generator | None = None,
        check_memory: bool = True,
    ) -> None:
        """Fits by a first pass over the data that depends on the call; None for that of the structure."""
        fitting.check_override(override)
        fitting.check_decay(decay, override=override)
        batches.require_loader(train_loader, "train_loader")
        part = None if subset is None else Subset.drawn(subset, generator)
        first = FirstBatch(self.weights.model, self.weights.forward_fn)
        reading = ReadOptions(self.dict_key_y, progress_bar, first, check_memory, first_pass)
        new, engine = self.measured(train_loader, reading, go_on=not override, subset=part)
        with torch.inference_mode(False), torch.no_grad(), bars(progress_bar):
            fit = new if override or self._fit is None else self._fit.scaled(decay) + new
            if progress_bar:
                fit.curvature.decompose(**self.precision_options)
            mean = self.problem.mean().to(self._like.dtype)
            self.adopt(fit, mean, Fingerprint.of(self.weights.model, first.witness), engine)
        fitting.warn_of_diagonals(new, self.problem)

    def measured(
        self,
        train_loader: Iterable[Any],
        reading: ReadOptions,
        *,
        go_on: bool = True,
        subset: Subset | None = None,
    ) -> tuple[Fit, CurvatureEngine]:
        """What data say at the model's present weights, and the engine that found it; the posterior stays as it is.

        Args:
            train_loader: Batches, as of `fit`.
            reading: How they are read.
            go_on: Whether to use the former fit's engine, whose random draws go on.
            subset: Of how many data the curvature is; None for all.

        Raises:
            OutOfMemory: Memory does not hold the fit.
            InvalidData: A batch cannot be used.
            InvalidArgument: A hyper-parameter's length does not fit the treated parameters or the outputs, or the
                structure reads the data several times and the loader can be read only once.
        """
        fitting.require_rereadable(train_loader, self.structure)
        if self.weights.problem is not None:
            self.structure.check(self.weights.problem.layout, self.structure_options)
        if subset is not None:
            batches.require_rereadable(train_loader, f"subset={subset.size} reads the data twice")
        fitting.warn_of_shards()
        with own_mode(), torch.no_grad(), same_random_state(self.weights.model), bars(reading.progress_bar):
            x, y, train_loader = fitting.begin_reading(train_loader, self.dict_key_y, self._like.device)
            with named("batch 0"):
                problem = first_outputs.problem_of(self, x, y)
            # Their lengths could not be checked while the last layer was unknown.
            self._prior_precision = self._checked_prior("prior_precision", self._prior_precision)
            self._prior_mean = self._checked_mean(self._prior_mean)
            engine = self._fitting_engine(problem, go_on=go_on)
            # A noise that this kind of curvature cannot take is refused before the data are read, not after.
            self.likelihood_object.curvature_scale(self.backend_cls.kind, self.sigma_noise, self.temperature)
            what = (train_loader, engine, self.structure, self.structure_options)
            if subset is None:
                new = fitting.accumulate(*what, reading)
            else:
                new = subsampling.accumulate(*what, subset, reading)
            hyper.check_length("sigma_noise", self.sigma_noise, {"one": 1, "outputs": new.n_outputs})
            return new, engine

    def adopt(
        self,
        fit: Fit,
        mean: Tensor,
        fingerprint: Fingerprint,
        engine: CurvatureEngine | None = None,
        refinement: Refinement | None = None,
    ) -> None:
        """Takes over a posterior as a whole, so that a failure before this point leaves the former one."""
        self._fit, self._mean, self.fingerprint = fit, mean, fingerprint
        self._engine, self._posterior, self._refinement = engine, None, refinement

    def rebase(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Moves everything that the posterior holds to where the model is now."""
        self._like = self._like.to(device=device, dtype=dtype)
        for name in ("_sigma_noise", "_temperature", "_prior_precision", "_prior_mean"):
            setattr(self, name, getattr(self, name).detach().to(self._like))
        if self._fit is None or self._mean is None or self.fingerprint is None:
            self._engine = None
            return
        fit, mean = self._fit.moved(device, dtype), self._mean.to(self._like)
        refined = None if self._refinement is None else self._refinement.moved(device, dtype)
        self.adopt(fit, mean, self.fingerprint.moved(self.weights.model, device, dtype), refinement=refined)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: nothing derived, and hyper-parameters without their graph."""
        hypers = ("_sigma_noise", "_temperature", "_prior_precision", "_prior_mean")
        plain = {name: getattr(self, name).detach() for name in hypers}
        return self.__dict__ | plain | {"_backend": None, "_engine": None, "_posterior": None}

    @property
    def is_fitted(self) -> bool:
        """Whether `fit` or `load_state_dict` gave a posterior."""
        return self._fit is not None

    def fitted(self) -> Fit:
        """What the data say; after `refine`, at the outputs of the linearised network.

        Raises:
            NotFittedError: Before `fit`.
        """
        fit = self.unrefined()
        return fit if self._refinement is None else self._refinement.fit

    def unrefined(self) -> Fit:
        """What the data say at the network's own outputs.

        Raises:
            NotFittedError: Before `fit`.
        """
        if self._fit is None:
            raise NotFittedError(f"this {type(self).__name__} is not fitted; call fit(train_loader) first.")
        return self._fit

    def check_unchanged(self) -> None:
        """Raises `ModelChangedError` if the network's weights, or its outputs at data of the fit, are not as then."""
        if self.fingerprint is not None:
            self.fingerprint = self.fingerprint.check(self.weights.model)

    def _checked_prior(self, name: str, value: Tensor) -> Tensor:
        problem = self.weights.problem
        if problem is None or value.numel() == 1:
            return value
        value = self.weights.restrict_prior(value)
        layout = problem.layout
        accepted = {"one": 1, "parameter tensors": layout.n_tensors, "treated parameters": layout.n_params}
        hyper.check_length(name, value, accepted)
        return value

    def _checked_mean(self, value: Tensor) -> Tensor:
        problem = self.weights.problem
        if problem is not None and value.numel() > 1:
            value = self.weights.restrict_prior(value)
            hyper.check_length("prior_mean", value, {"one": 1, "treated parameters": problem.layout.n_params})
        return value
