"""Backends that users derive from the public base classes, written for the older interface, work unedited."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from laplace.utils import FeatureExtractor, Kron
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import laplace
from laplace import Laplace, ParametricLaplace
from laplace.curvature import CurvatureInterface, EFInterface, GGNInterface, NativeEF, NativeGGN, NativeHessian
from laplace.errors import InvalidArgument, LaplaceError, UnsupportedError
from tests.reference import curvature as reference
from tests.reference.compare import assert_close

X = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = {
    "classification": torch.randint(3, (11,), generator=torch.Generator().manual_seed(2)),
    "regression": torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
}
LIKELIHOODS = tuple(Y)
SUBNET = torch.tensor([0, 3, 4, 15, 25, 30])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(likelihood: str) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(4), Y[likelihood].split(4), strict=True))


def fitted(backend: Any, likelihood: str, weights: str = "all", structure: str = "full", **options: Any) -> Any:
    if weights == "subnetwork":
        options["subnetwork_indices"] = SUBNET
    la = Laplace(network(), likelihood, weights, structure, backend=backend, **options)
    la.fit(batches(likelihood))
    return la


def same(one: ParametricLaplace, other: ParametricLaplace) -> None:
    assert_close(one.loss, other.loss, "backend", label="loss")
    assert one.n_data == other.n_data == len(X) and one.n_outputs == other.n_outputs
    assert_close(one.log_marginal_likelihood(), other.log_marginal_likelihood(), "backend", label="evidence")
    assert_close(one.posterior_variance, other.posterior_variance, "backend", label="variance")
    for a, b in zip(parts(one(X)), parts(other(X)), strict=True):
        assert_close(a, b, "backend", label="prediction")


def parts(prediction: Any) -> list[Tensor]:
    return [prediction] if isinstance(prediction, Tensor) else list(prediction)


# Written as scripts for the older interface write them.


class Legacy(GGNInterface):
    """Everything by torch.func on `self._model`, with the constructor of the older interface."""

    def __init__(
        self, model, likelihood, last_layer=False, subnetwork_indices=None, dict_key_x="input_ids",
        dict_key_y="labels", stochastic=False,
    ):  # fmt: skip
        super().__init__(model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y, stochastic)

    def jacobians(self, x, enable_backprop=False):
        def once(params, datum):
            return functional_call(self._model, (params, self.buffers_dict), (datum.unsqueeze(0),)).squeeze(0)

        found = vmap(jacrev(once), in_dims=(None, 0))(self.params_dict, x)
        Js = torch.cat([J.flatten(2) for J in found.values()], 2)
        if self.subnetwork_indices is not None:
            Js = Js[:, :, self.subnetwork_indices]
        return Js, self._model(x)

    def last_layer_jacobians(self, x, enable_backprop=False):
        f, phi = self.model.forward_with_features(x)
        eye = torch.eye(f.shape[1], dtype=f.dtype).expand(len(f), -1, -1)
        weight = torch.einsum("kp,kij->kijp", phi, eye).flatten(2)
        return torch.cat([weight, eye], 2), f.detach()


class LegacyCurvature(Legacy):
    """Full, diagonal and Kronecker curvature by hand."""

    def _inner(self, f):
        if self.likelihood == "regression":
            return torch.eye(f.shape[1], dtype=f.dtype).expand(len(f), -1, -1)
        p = f.softmax(1)
        return torch.diag_embed(p) - torch.einsum("bc,bd->bcd", p, p)

    def full(self, x, y, **kwargs):
        Js, f = self.last_layer_jacobians(x) if self.last_layer else self.jacobians(x)
        H = torch.einsum("bcp,bcd,bdq->pq", Js, self._inner(f), Js)
        return self.factor * self.lossfunc(f, y).detach(), H.detach()

    def diag(self, x, y, **kwargs):
        loss, H = self.full(x, y)
        return loss, H.diagonal()

    def kron(self, x, y, N, **kwargs):
        layers = [self._model] if self.last_layer else [m for m in self._model if isinstance(m, nn.Linear)]
        seen: list[tuple[Tensor, Tensor]] = []
        hooks = [m.register_forward_hook(lambda m, a, z: seen.append((a[0], z))) for m in layers]
        f = self.model(x)
        for hook in hooks:
            hook.remove()
        inner = self._inner(f.detach())
        factors = []
        for a, z in seen:
            g = torch.stack([torch.autograd.grad(f[:, c].sum(), z, retain_graph=True)[0] for c in range(f.shape[1])])
            B = torch.einsum("cbo,bcd,dbp->op", g, inner, g)
            factors += [[B, a.T @ a / len(x) * (len(x) / N)], [B]]
        return self.factor * self.lossfunc(f, y).detach(), Kron([[f.detach() for f in block] for block in factors])


class LegacyEF(EFInterface):
    def gradients(self, x, y):
        rows, total = [], 0.0
        for datum, target in zip(x, y, strict=True):
            self._model.zero_grad()
            loss = self.lossfunc(self.model(datum.unsqueeze(0)), target.unsqueeze(0))
            loss.backward()
            rows.append(torch.cat([p.grad.flatten() for p in self.params]))
            total = total + loss.detach()
        return torch.stack(rows), total


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("weights", ["all", "last_layer", "subnetwork"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("backend", [Legacy, LegacyCurvature])
def test_equals_the_native_backend(backend: type, likelihood: str, weights: str, structure: str) -> None:
    if backend is LegacyCurvature and structure == "kron" and weights == "subnetwork":
        structure = "diag"  # a `kron` of the whole network is refused for a part of it, see below
    same(fitted(backend, likelihood, weights, structure), fitted(NativeGGN, likelihood, weights, structure))


@pytest.mark.parametrize(
    ("method", "structure"), [("full", "full"), ("full", "block"), ("full", "diag"), ("diag", "diag")]
)
def test_what_a_user_s_method_keeps_is_not_added_to(method: str, structure: str) -> None:
    """A method may return one tensor for every batch; batches are added to a sum of the library's own."""
    kept = 2 * torch.eye(38, dtype=torch.float64)
    given = kept if method == "full" else kept.diagonal()
    own = type("Own", (GGNInterface,), {method: lambda self, x, y, **options: (torch.zeros(()), given)})
    la = fitted(own, "classification", structure=structure, prior_precision=0.5)
    assert torch.equal(kept, 2 * torch.eye(38, dtype=torch.float64))
    assert_close(la.posterior_variance, torch.full((38,), 1 / (3 * 2 + 0.5), dtype=torch.float64), "backend")


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_gradients_of_a_user_make_an_empirical_fisher(likelihood: str, structure: str) -> None:
    same(fitted(LegacyEF, likelihood, "all", structure), fitted(NativeEF, likelihood, "all", structure))


@pytest.mark.parametrize(
    ("structure", "weights"),
    [
        (s, w)
        for s in ("full", "diag", "kron")
        for w in ("all", "last_layer", "subnetwork")
        if s + w != "kronsubnetwork"
    ],
)
def test_a_method_of_the_user_may_call_the_library_s(structure: str, weights: str) -> None:
    class Doubled(NativeGGN):
        calls = 0

        def full(self, x, y, **kwargs):
            Doubled.calls += 1
            loss, H = super().full(x, y)
            return loss, 2 * H

        def diag(self, x, y, **kwargs):
            Doubled.calls += 1
            loss, H = super().diag(x, y)
            return loss, 2 * H

        def kron(self, x, y, N, **kwargs):
            Doubled.calls += 1
            loss, kron = super().kron(x, y, N)
            return loss, 2.0 * kron

    doubled, plain = (fitted(b, "classification", weights, structure) for b in (Doubled, NativeGGN))
    assert Doubled.calls == 3
    # Half the temperature doubles the curvature.
    plain.temperature = 0.5
    assert_close(doubled.log_det_ratio, plain.log_det_ratio, "backend")
    assert_close(doubled.posterior_variance, plain.posterior_variance, "backend")


def test_the_user_s_jacobians_are_those_of_the_predictions() -> None:
    class Doubled(GGNInterface):
        def jacobians(self, x, enable_backprop=False):
            Js, f = super().jacobians(x, enable_backprop)
            return 2 * Js, f

    one, two = fitted(NativeGGN, "regression"), fitted(Doubled, "regression")
    assert_close(two.H, 4 * one.H, "backend")
    two.load_state_dict(two.state_dict() | {"H": one.state_dict()["H"]})
    assert_close(two(X)[1], 4 * one(X)[1], "backend")


def test_call_time_options_reach_the_user_s_methods() -> None:
    class Takes(GGNInterface):
        seen: list[Any] = []  # noqa: RUF012

        def diag(self, x, y, scale=1.0, **kwargs):
            Takes.seen.append((scale, kwargs))
            loss, H = super().diag(x, y)
            return loss, scale * H

    la = fitted(Takes, "regression", structure="diag", asdl_fisher_kwargs={"scale": 3.0, "other": "x"})
    assert Takes.seen == [(3.0, {"other": "x"})] * 3
    assert_close(la.H, 3 * fitted(NativeGGN, "regression", structure="diag").H, "backend")


def test_reward_modelling_is_a_classification_to_users() -> None:
    names = []

    class Notes(GGNInterface):
        def __init__(self, model, likelihood, **kwargs):
            names.append(likelihood)
            super().__init__(model, likelihood, **kwargs)

    class Rewards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.reshape(-1, 3)).view(*x.shape[:-1], 1).squeeze(-1)

    la = Laplace(Rewards(), "reward_modeling", "all", "diag", backend=Notes)
    la.fit([(X[:10].reshape(5, 2, 3), torch.tensor([0, 1, 1, 0, 1]))])
    assert set(names) == {"classification"}


class Incomplete(CurvatureInterface):
    pass


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_what_a_backend_lacks_is_refused_by_name(structure: str) -> None:
    with pytest.raises(UnsupportedError, match=f"Interface.*{structure}.*NativeGGN"):
        fitted(Incomplete, "classification", structure=structure)


def test_wrong_shapes_are_refused() -> None:
    class Wrong(GGNInterface):
        def diag(self, x, y, **kwargs):
            return super().diag(x, y)[0], torch.ones(3)

        def kron(self, x, y, N, **kwargs):
            return torch.zeros(()), Kron([[torch.eye(2)]] * 4)

    for structure in ("diag", "kron"):
        with pytest.raises(InvalidArgument, match=f"Wrong.{structure} returned"):
            fitted(Wrong, "classification", structure=structure)
    with pytest.raises(LaplaceError, match="LegacyCurvature"):
        fitted(LegacyCurvature, "classification", "subnetwork", "kron")
    with pytest.raises(UnsupportedError, match="one noise"):
        fitted(LegacyCurvature, "regression", sigma_noise=torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(InvalidArgument, match=r"Legacy.*\['colour'\].*colour"):
        fitted(Legacy, "classification", backend_kwargs={"colour": "red"})


def test_the_model_is_left_as_it_was_also_by_users_backends() -> None:
    class Nasty(LegacyEF):
        def gradients(self, x, y):
            found = super().gradients(x, y)
            self.model.note = "kept"
            self.model[0].register_forward_hook(lambda *args: None)
            if len(x) < 4:
                raise RuntimeError("a bad batch")
            return found

    model = network().train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(model.state_dict())
    la = Laplace(model, "classification", "all", "full", backend=Nasty)
    with pytest.raises(RuntimeError, match="a bad batch"):
        la.fit(batches("classification"))
    assert not la.is_fitted and model.training and "note" not in vars(model)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    assert not model[0]._forward_hooks


# The public methods, called directly.


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("backend", [NativeGGN, NativeEF, NativeHessian, GGNInterface, EFInterface])
def test_public_methods_equal_the_oracle(backend: type, likelihood: str) -> None:
    model, y = network(), Y[likelihood]
    names = reference.trainable_names(model)
    truths = {"ggn": reference.ggn, "ef": reference.empirical_fisher, "hessian": reference.exact_hessian}
    H = truths[backend.kind](model, X, y, names, likelihood)
    J, f = reference.flat_jacobian(model, X, names)
    interface = backend(model, likelihood)
    loss, full = interface.full(X, y)
    assert_close(full, H, "backend")
    assert_close(loss, reference.loss(f, y, likelihood), "backend")
    assert_close(interface.diag(X, y)[1], H.diagonal(), "backend")
    assert_close(interface.jacobians(X)[0], J, "backend")
    assert_close(interface.functorch_jacobians(X)[1], f, "backend")
    chosen = torch.tensor([0, 2, 1] * 3 + [1, 0])
    assert_close(interface.selected_output_jacobians(X, chosen)[0][:, 0], J[torch.arange(11), chosen], "backend")
    Gs, total = interface.gradients(X, y)
    r = reference.residual(f, y, likelihood)
    assert_close(interface.factor * Gs, torch.einsum("bcp,bc->bp", J, r), "backend")
    assert_close(interface.factor * total, reference.loss(f, y, likelihood), "backend")
    head = J[:, :, -18:]
    assert_close(interface.last_layer_jacobians(X)[0], head, "backend")
    last = backend(FeatureExtractor(model, "2"), likelihood, last_layer=True)
    assert_close(last.jacobians(X)[0], head, "backend")
    assert_close(last.full(X, y)[1], H[-18:, -18:], "backend")
    part = backend(model, likelihood, subnetwork_indices=SUBNET)
    assert_close(part.full(X, y)[1], H[SUBNET][:, SUBNET], "backend")


@pytest.mark.parametrize("backend", [NativeGGN, NativeEF])
def test_public_kronecker_factors_of_batches_add_up(backend: type) -> None:
    interface = backend(network(), "classification")
    pieces = [interface.kron(x, y, N=len(X))[1] for x, y in batches("classification")]
    total = pieces[0] + pieces[1] + pieces[2]
    whole = interface.kron(X, Y["classification"], N=len(X))[1]
    assert_close(total.to_matrix(), whole.to_matrix(), "backend")
    assert_close(
        total.to_matrix(), Kron(fitted(backend, "classification", structure="kron").H.kfacs).to_matrix(), "backend"
    )


def test_direct_calls_draw_anew() -> None:
    interface = NativeGGN(network(), "classification", stochastic=True)
    y = Y["classification"]
    assert not torch.equal(interface.diag(X, y)[1], interface.diag(X, y)[1])


@pytest.mark.parametrize("weights", ["all", "last_layer", "subnetwork"])
def test_the_backend_of_a_posterior_is_the_public_one(weights: str) -> None:
    la = fitted(NativeGGN, "classification", weights)
    assert la.backend is la.backend
    assert_close(la.functional_variance(la.backend.jacobians(X)[0]), la._latent(X, "full").covariance, "backend")
    assert_close(la.backend.full(X, Y["classification"])[1], la.H, "backend")


def test_forward_fn_reaches_users_backends() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model(2 * x)

    for weights in ("all", "last_layer"):
        one, two = (fitted(b, "classification", weights, forward_fn=forward) for b in (Legacy, NativeGGN))
        same(one, two)


def test_names() -> None:
    assert laplace.curvature.CurvatureInterface is CurvatureInterface
    assert issubclass(NativeGGN, GGNInterface) and issubclass(NativeEF, EFInterface)
