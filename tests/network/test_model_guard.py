"""The user's model is lent, not given: bit-identical after every call, also after one that fails."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, MixtureLaplace, curvature
from laplace.errors import (
    ApproximationWarning,
    CurvatureError,
    GradientWarning,
    ModelChangedError,
    TuningWarning,
    UnsupportedError,
)
from laplace.network.model_guard import private_copy, users_own
from laplace.structures.kron import KronPrecision
from tests import grid
from tests.conformance.backends import BACKENDS

HOOKS = [name for name in vars(nn.Module()) if name.endswith("hooks")]
BAD = 99.0


class Nasty(nn.Module):
    """Everything that a forward pass can leave behind: counters, activations, random numbers, a failure."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.head = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("largest", None)
        self.register_forward_hook(lambda module, args, output: None)
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.largest = x.detach().abs().max()
        self.times += 1
        self.h = self.trunk(x)
        torch.rand(1)
        self.head.seen = True
        if bool((x == BAD).any()):
            raise RuntimeError("this batch is bad")
        return self.head(self.h)


class Recurrent(nn.Module):
    """Holds its weights twice: as parameters and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(-1))[0][:, -1])


def prepared(make: Callable[[], nn.Module]) -> nn.Module:
    """A model in the middle of its use: mixed modes, gradients on some parameters, some of them frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = make()
        x, y = grid.data()
        model.train()
        nn.functional.cross_entropy(model(x), y).backward()
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    first, *_ = model.parameters()
    first.grad = None
    return model


def picture(model: nn.Module) -> dict[str, Any]:
    """All that must not change, values and identities."""
    found: dict[str, Any] = {"random state": torch.get_rng_state().clone()}
    for name, module in model.named_modules():
        found[f"{name} attributes"] = {key: id(value) for key, value in vars(module).items()}
        found[f"{name} hooks"] = {key: list(vars(module)[key].items()) for key in HOOKS}
        found[f"{name} members"] = {k: id(v) for part in ("_parameters", "_buffers", "_modules")
                                    for k, v in vars(module)[part].items()}  # fmt: skip
        found[f"{name} training"] = module.training
        found[f"{name} flat"] = [id(w) for w in getattr(module, "_flat_weights", [])]
    for name, parameter in model.named_parameters():
        found[f"{name} gradient"] = None if parameter.grad is None else parameter.grad.clone()
        found[f"{name} flags"] = (parameter.requires_grad, parameter.is_leaf, parameter.dtype, parameter.device)
    return found | {key: value.clone() for key, value in model.state_dict().items()}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return [key for key in before.keys() | after.keys() if not same(before.get(key), after.get(key))]


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def loader() -> torch.utils.data.DataLoader:
    dataset = torch.utils.data.TensorDataset(*grid.data())
    return torch.utils.data.DataLoader(dataset, batch_size=5, shuffle=True)


def evidence(la: Any) -> None:
    prior = torch.ones(1, requires_grad=True)
    la.log_marginal_likelihood(prior).backward()


def tuned(la: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        la.optimize_prior_precision(n_steps=3, grid_size=3, n_samples=3, **options)


def refined(la: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)
        la.refine(loader(), max_steps=2, **options)
    la.fit(grid.batches())  # what follows is of the network again


def forgotten(la: Any) -> None:
    with contextlib.suppress(UnsupportedError):  # not every structure is a sum over data
        la.forget(grid.batches()[:1])


def read(la: Any, *args: Any, **options: Any) -> None:
    prediction = la.predict(X, *args, n_samples=3, generator=seed(), **options)
    _ = prediction.mean, prediction.latent_covariance, prediction.decomposition, prediction.interval()
    prediction.distribution()


X = grid.data()[0]
CALLS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda la: la.fit(loader()),
    "fit more": lambda la: la.fit(loader(), override=False),
    "probit": lambda la: la(X),
    "mc": lambda la: la(X, link_approx="mc", generator=seed()),
    "joint": lambda la: la(X, link_approx="mc", joint=True, generator=seed()),
    "bridge": lambda la: la(X, link_approx="bridge"),
    "nn": lambda la: la(X, "nn", n_samples=3, generator=seed()),
    "nn samples": lambda la: la.functional_samples(X, "nn", n_samples=3, generator=seed()),
    "glm samples": lambda la: la.predictive_samples(X, n_samples=3, generator=seed()),
    "weights": lambda la: la.sample(3, generator=seed()),
    "one datum": lambda la: la(X[:1]),
    "evidence": evidence,
    "marglik": lambda la: tuned(la),
    "grid": lambda la: tuned(la, method="gridsearch", val_loader=loader()),
    "nn grid": lambda la: tuned(la, method="gridsearch", pred_type="nn", val_loader=loader()),
    "mc grid": lambda la: tuned(la, method="CV", link_approx="mc", val_loader=loader()),
    "state": lambda la: la.load_state_dict(la.state_dict()),
    "moments": lambda la: (la.posterior_precision, la.posterior_variance, la.posterior_scale, la.posterior_covariance),
    "words": lambda la: (repr(la), la.coverage()),
    "predict": read,
    "predict nn": lambda la: read(la, "nn"),
    "predict delta": lambda la: read(la, link_approx="delta"),
    "fit of a subset": lambda la: la.fit(loader(), subset=7, generator=seed()),
    "refine": refined,
    "forget": forgotten,
}
MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": grid.network, "nasty": Nasty, "recurrent": Recurrent}


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
@pytest.mark.parametrize("backprop", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
@pytest.mark.turns
def test_the_model_is_left_as_it_was(weights: str, structure: str, name: str, backprop: bool) -> None:
    model = prepared(MODELS[name])
    before = picture(model)
    la = grid.make(weights, structure, model=model, enable_backprop=backprop)
    assert not differences(before, picture(model))
    for call, run in CALLS.items():
        if backprop and ("grid" in call or call in ("fit more", "weights", "state", "words", "marglik")):
            continue
        result = run(la)
        assert not differences(before, picture(model)), call
        del result


@pytest.mark.parametrize("make", [grid.network, Nasty])
def test_variational_refinement(make: Callable[[], nn.Module]) -> None:
    for weights in grid.WEIGHTS:
        model = prepared(make)
        before = picture(model)
        la = grid.make(weights, "diag", "bernoulli", model=model)
        la.fit(grid.batches("bernoulli"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ApproximationWarning)
            la.refine(grid.batches("bernoulli"), method="variational", max_steps=1)
        assert not differences(before, picture(model)), weights


MIXTURES: dict[str, Callable[[list[nn.Module]], MixtureLaplace]] = {
    "last layers": lambda models: MixtureLaplace(models, "classification", weights="evidence"),
    "all weights": lambda models: MixtureLaplace(models, "classification", "all", "diag"),
}


@pytest.mark.parametrize("make", MIXTURES.values(), ids=MIXTURES)
def test_the_networks_of_a_mixture_are_left_as_they_were(make: Callable[[list[nn.Module]], MixtureLaplace]) -> None:
    models = [prepared(grid.network), prepared(Nasty)]
    before = [picture(model) for model in models]
    mixture: Any = make(models)
    for call in ("fit", "probit", "mc", "nn", "glm samples", "weights", "evidence", "marglik", "grid", "state"):
        CALLS[call](mixture)
        assert not any(differences(a, picture(model)) for a, model in zip(before, models, strict=True)), call
    reference, random = mixture(X), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="this batch is bad"):
        mixture.fit(Fresh(lambda: bad_batches(1)))
    torch.set_rng_state(random)  # numbers that the call drew before it failed
    assert not any(differences(a, picture(model)) for a, model in zip(before, models, strict=True))
    assert torch.equal(mixture(X), reference)


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("name", ["NativeGGN", "NativeEF", "NativeHessian", *BACKENDS])
@pytest.mark.turns
def test_the_model_is_left_as_it_was_by_every_backend(name: str, weights: str, structure: str) -> None:
    backend = BACKENDS[name].cls if name in BACKENDS else getattr(curvature, name)
    structure = "full" if backend.kind == "hessian" else structure
    sampled = [{}, {"stochastic": True}] if backend.kind == "ggn" else [{}]
    model = prepared(Nasty)
    before = picture(model)
    for options in sampled:
        la = grid.make(weights, structure, model=model, backend=backend, backend_kwargs=options, prior_precision=1e3)
        la.fit(loader())
        la(X)
        assert not differences(before, picture(model))
    assert torch.backends.mha.get_fastpath_enabled(), "a switch of PyTorch was left off"


def bad_batches(k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of which number k makes the forward pass fail."""
    for i, (x, y) in enumerate(grid.batches(size=4)):
        yield (x.index_fill(0, torch.tensor([1]), BAD) if i == k else x), y


class Fresh:
    """A loader that can be read again: every reading calls a generator."""

    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        return self.read()


FAILING: dict[str, Callable[[Any, int], Any]] = {
    "fit": lambda la, k: la.fit(bad_batches(k)),
    "fit more": lambda la, k: la.fit(bad_batches(k), override=False),
    "grid": lambda la, k: tuned(la, method="gridsearch", val_loader=bad_batches(k)),
    "nn grid": lambda la, k: tuned(la, method="gridsearch", pred_type="nn", val_loader=bad_batches(k)),
    "glm": lambda la, k: la(next(x for x, _ in bad_batches(0))),
    "nn": lambda la, k: la(next(x for x, _ in bad_batches(0)), "nn", n_samples=3),
    "samples": lambda la, k: la.functional_samples(next(x for x, _ in bad_batches(0)), "nn", n_samples=3),
    "predict": lambda la, k: la.predict(next(x for x, _ in bad_batches(0))).probabilities,
    "fit of a subset": lambda la, k: la.fit(Fresh(lambda: bad_batches(k)), subset=7, generator=seed()),
    "refine": lambda la, k: la.refine(bad_batches(k)),
}


@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("call", FAILING)
@pytest.mark.parametrize("weights", grid.WEIGHTS)
@pytest.mark.turns
def test_a_failing_forward_pass_changes_nothing(weights: str, call: str, batch: int) -> None:
    """Neither the model nor the former posterior, nor the lock on the model."""
    model = prepared(Nasty)
    la = grid.make(weights, "kron", model=model, prior_precision=2.0)
    la.fit(grid.batches())
    reference, log_evidence = la(X), la.log_marginal_likelihood()
    before = picture(model)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="this batch is bad") as caught:
        FAILING[call](la, batch)
    torch.set_rng_state(state)  # numbers that the call drew before it failed
    assert not differences(before, picture(model))
    assert la.n_data == 12
    assert la.prior_precision.item() == 2.0
    assert torch.equal(la(X), reference)
    assert torch.equal(la.log_marginal_likelihood(), log_evidence)
    del caught


@pytest.mark.parametrize("batch", [0, 1])
def test_a_first_fit_that_fails_leaves_no_posterior(batch: int) -> None:
    for weights, structure in grid.CELLS:
        la = grid.make(weights, structure, model=prepared(Nasty))
        with pytest.raises(RuntimeError, match="this batch is bad"):
            la.fit(Fresh(lambda: bad_batches(batch)))
        assert not la.is_fitted
        assert la.n_data == 0
        la.fit(grid.batches())


def test_a_model_is_free_while_the_error_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of an error keeps the frames alive in which the model was lent; it is given back before."""
    model = prepared(grid.network)
    la = grid.make("all", "kron", model=model)
    la.fit(grid.batches())
    before = picture(model)

    def fails(*_: Any, **__: Any) -> None:
        raise CurvatureError("no variance")

    monkeypatch.setattr(KronPrecision, "variance", fails)
    for link in ("probit", "bridge"):
        with pytest.raises(CurvatureError):
            la(X, link_approx=link)
        assert not differences(before, picture(model))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_fit_keeps_the_former_posterior(stop: type[BaseException]) -> None:
    def interrupted() -> Iterator[Any]:
        yield grid.batches()[0]
        raise stop

    for weights, structure in grid.CELLS:
        model = prepared(grid.network)
        la = grid.make(weights, structure, model=model)
        la.fit(grid.batches())
        reference, before = la(X), picture(model)
        for override in (True, False):
            with pytest.raises(stop):
                la.fit(Fresh(interrupted), override=override)
        with pytest.raises(stop):
            tuned(la, method="gridsearch", val_loader=interrupted())
        assert not differences(before, picture(model))
        assert la.n_data == 12
        assert torch.equal(la(X), reference)


def test_a_failing_evidence_keeps_the_hyper_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    la = grid.fitted("all", "diag", "regression", prior_precision=2.0, sigma_noise=0.5)
    for arguments in ((3.0, -1.0), (-3.0, 1.0), (torch.ones(7), 1.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match=r"positive|length"):
            la.log_marginal_likelihood(*arguments)
        assert (la.prior_precision.item(), la.sigma_noise.item()) == (2.0, 0.5)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(la), "evidence", interrupted)
    with pytest.raises(KeyboardInterrupt):
        la.log_marginal_likelihood(3.0, 1.0)
    assert (la.prior_precision.item(), la.sigma_noise.item()) == (2.0, 0.5)


@pytest.mark.parametrize("structure", grid.REREAD)
def test_an_interrupt_in_a_later_reading_keeps_the_former_posterior(structure: str) -> None:
    model = prepared(grid.network)
    la = grid.make("all", structure, model=model)
    la.fit(grid.batches())
    reference, before, readings = la(X), picture(model), []

    def interrupted() -> Iterator[Any]:
        readings.append(len(readings))
        yield grid.batches()[0]
        if len(readings) > 1:
            raise KeyboardInterrupt
        yield from grid.batches()[1:]

    with pytest.raises(KeyboardInterrupt):
        la.fit(Fresh(interrupted), override=False)
    assert readings == [0, 1]
    assert not differences(before, picture(model))
    assert la.n_data == 12
    assert torch.equal(la(X), reference)


# The user's other things.


def test_the_user_s_arguments_are_not_written_to() -> None:
    for weights, structure in grid.CELLS:
        options: dict[str, Any] = {"kfac_approx": "reduce"}
        noise = torch.full((3,), 0.5)
        la = grid.make(weights, structure, "regression", backend_kwargs=options, sigma_noise=noise)
        la.fit(grid.batches("regression"))
        la.backend_kwargs["stochastic"] = True
        assert options == {"kfac_approx": "reduce"}


def test_batches_are_not_written_to() -> None:
    batch = {"input_ids": X.clone(), "labels": grid.data()[1].clone(), "extra": "a word"}
    copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in batch.items()}

    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = grid.network()

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            inputs["mark"] = inputs["input_ids"]
            return self.net(inputs["input_ids"])

    la = Laplace(Taking(), "classification", "all", "kron")
    la.fit([batch])
    la(batch)
    la(batch, "nn", n_samples=2)
    assert batch.keys() == copies.keys()
    for key, value in copies.items():
        assert torch.equal(batch[key], value) if isinstance(value, Tensor) else batch[key] == value
    assert not batch["input_ids"].requires_grad


def test_no_gradient_reaches_the_inputs_but_the_asked_one() -> None:
    x = X.clone().requires_grad_()
    la = grid.fitted("all", "kron", enable_backprop=True)
    la.fit([(x, grid.data()[1])])
    la(x).sum()
    assert x.grad is None
    with pytest.warns(GradientWarning, match="enable_backprop"):
        assert not grid.fitted("all", "kron")(x).requires_grad


def test_arguments_of_the_evidence_keep_no_graph_alive() -> None:
    held, graphs = [], []
    for weights, structure in grid.CELLS:
        la = grid.fitted(weights, structure, "regression")
        prior, sigma = torch.ones(1, requires_grad=True), torch.ones((), requires_grad=True)
        inner = prior * 2
        value = la.log_marginal_likelihood(inner, sigma)
        value.backward()
        assert not la.prior_precision.requires_grad
        assert not la.sigma_noise.requires_grad
        assert (la.prior_precision.item(), la.sigma_noise.item()) == (2.0, 1.0)
        held.append(la)
        graphs.append(weakref.ref(inner))
        del inner, value
    gc.collect()  # once: it takes longer than all the rest
    assert all(graph() is None for graph in graphs)


def test_hyper_parameters_are_not_the_user_s_tensors() -> None:
    """A later step of an optimiser must not move what was assigned before."""
    prior = torch.ones(1, requires_grad=True)
    noise = torch.tensor(0.5)
    la = grid.fitted("all", "kron", "regression", sigma_noise=noise)
    la.prior_precision = prior
    la.log_marginal_likelihood().backward()
    assert prior.grad is not None
    reference = grid.predict(la, "regression")
    with torch.no_grad():
        prior += 1
        noise += 1
    assert (la.prior_precision.item(), la.sigma_noise.item()) == (1.0, 0.5)
    la.log_marginal_likelihood(prior)
    with torch.no_grad():
        prior += 1
    assert la.prior_precision.item() == 2.0
    la.prior_precision = 1.0
    assert torch.equal(reference[1], grid.predict(la, "regression")[1])


# A network that was trained further.


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(X), grid.data()[1]).backward()
    optimizer.step()


def through_data(model: nn.Module) -> None:
    model[0].weight.data.add_(0.1)


def by_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() + 0.1, model.parameters())


def other_weight(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() + 0.1)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({key: value + 0.1 for key, value in model.state_dict().items()})


def other_shape(model: nn.Module) -> None:
    model[3] = nn.Linear(5, 4)


def permuted(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.flip(0))


CHANGES = [step, through_data, by_vector, other_weight, loaded, other_shape, permuted]
USES: dict[str, Callable[[Any], Any]] = {
    "glm": lambda la: la(X),
    "nn": lambda la: la(X, "nn", n_samples=2),
    "functional_samples": lambda la: la.functional_samples(X, n_samples=2),
    "functional_samples nn": lambda la: la.functional_samples(X, "nn", n_samples=2),
    "predictive_samples": lambda la: la.predictive_samples(X, n_samples=2),
    "functional_variance_fast": lambda la: la.functional_variance_fast(X),
    "grid": lambda la: tuned(la, method="gridsearch", val_loader=grid.batches()),
    "nn grid": lambda la: tuned(la, method="gridsearch", pred_type="nn", val_loader=grid.batches()),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("weights", grid.WEIGHTS)
def test_a_changed_network_is_noticed(weights: str, change: Callable[[nn.Module], None]) -> None:
    """And its new weights are never overwritten by old ones."""
    la = grid.fitted(weights, "diag")
    log_evidence = la.log_marginal_likelihood()
    model = la.weights.model
    change(model)
    new = {key: value.clone() for key, value in model.state_dict().items()}
    for name, use in USES.items():
        with pytest.raises(ModelChangedError, match="fit again"):
            use(la)
        assert all(torch.equal(value, new[key]) for key, value in model.state_dict().items()), name
    if weights == "subnetwork":
        with pytest.raises(ModelChangedError):
            la.sample(2)
    assert torch.equal(la.log_marginal_likelihood(), log_evidence)


class Buffers(nn.Module):
    """Buffers of one shape, of which some are written to, and of every kind."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {f"like{i}": torch.full((3,), float(i)) for i in range(4)}
        kinds |= {f"count{i}": torch.tensor(i) for i in range(3)}
        kinds |= {
            "turned": torch.arange(6.0).view(2, 3).T,
            "flat": torch.arange(6.0).view(3, 2),
            "mask": torch.eye(3) > 0,
        }
        kinds |= {"none": torch.zeros(0), "wide": torch.ones(3, dtype=torch.float64), "phase": torch.ones(3) * 1j}
        kinds |= {"sparse": torch.eye(3).to_sparse(), "rows": torch.eye(3).to_sparse_csr()}
        for name, buffer in kinds.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        for name in ("like1", "like3", "count2", "turned", "wide", "phase", "sparse"):
            self.get_buffer(name).mul_(2)
        self.get_buffer("like2").data.mul_(2)  # which autograd does not count
        self.get_buffer("flat").numpy()[:] += 1
        self.get_buffer("mask").logical_not_()
        return x


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_buffers_of_every_kind_are_put_back() -> None:
    model = nn.Sequential(Buffers(), nn.Linear(3, 3), Buffers())
    before = {name: (buffer, buffer.to_dense().clone()) for name, buffer in model.named_buffers()}
    with private_copy(model) as own:
        own(X)
        assert not torch.equal(own.get_buffer("2.like3"), before["2.like3"][1])
    with users_own(model):
        model(X)
        assert not torch.equal(model[2].like3, before["2.like3"][1])
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0]
        assert torch.equal(buffer.to_dense(), before[name][1]), name


def test_a_changed_buffer_is_noticed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    la = Laplace(model, "classification")
    la.fit(grid.batches())
    model.train()(X)
    with pytest.raises(ModelChangedError, match="running statistics"):
        la(X)


def test_a_network_moved_without_its_posterior_is_noticed() -> None:
    la = grid.fitted("all", "kron")
    la.model.double()
    with pytest.raises(ModelChangedError, match=r"la\.to"):
        la(X.double())
    la.model.float()
    la(X)


def test_a_network_that_is_put_back_is_accepted() -> None:
    la = grid.fitted("last_layer", "kron")
    reference, model = la(X), la.model.model
    state = {key: value.clone() for key, value in model.state_dict().items()}
    loaded(model)
    with pytest.raises(ModelChangedError):
        la(X)
    model.load_state_dict(state)
    assert torch.equal(la(X), reference)
    step(model)
    la.fit(grid.batches())
    assert not torch.equal(la(X), reference)


def test_a_last_layer_uses_the_network_as_it_is_at_fit() -> None:
    """No copy is made at construction."""
    model = grid.network()
    la = Laplace(model, "classification", last_layer_name="3")
    step(model)
    la.fit(grid.batches())
    assert torch.equal(la.mean, torch.cat([p.detach().flatten() for p in model[3].parameters()]))
    assert la.model.model is model
    la(X)


class _Told(nn.Module):
    """Learns of evaluation mode by its own `__setattr__`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.factor = 3.0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "training":
            super().__setattr__("factor", 3.0 if value else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.layer(x)


def test_modules_are_told_of_evaluation_mode() -> None:
    model, x = _Told().train(), torch.randn(5, 3)
    la = Laplace(model, "regression", "all")
    la.fit([(x, torch.randn(5, 2))])
    torch.testing.assert_close(la(x)[0], model.layer(x).detach())
    assert model.training and model.factor == 3.0
