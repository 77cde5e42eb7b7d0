"""`la.model` of a last layer: the user's network, with a copy of the head that samples can be loaded into."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from laplace.utils import FeatureExtractor, LastLayerSubnetMask
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from laplace import ELLA, FullLaplace, FullLLLaplace, Laplace, MixtureLaplace, from_mimo, marglik_training
from laplace.curvature import GGNInterface, NativeGGN
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidData, ModelChangedError, NotFittedError
from tests import grid
from tests.reference.compare import assert_close

X, Y = grid.data()


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def fitted(model: nn.Module, **options) -> FullLLLaplace:
    la = FullLLLaplace(model, "classification", **options)
    la.fit([(X.double(), Y)])
    return la


def sampled(la: FullLLLaplace, seed: int = 1) -> Tensor:
    """A sample of the posterior, which is loaded into the head."""
    theta = la.sample(1, generator=torch.Generator().manual_seed(seed))[0]
    vector_to_parameters(theta, la.model.last_layer.parameters())
    return theta


def expected_gradients(model: nn.Module) -> list[Tensor]:
    """Of the sum of squared outputs, by the network's parameters."""
    return list(torch.autograd.grad(model(X.double()).square().sum(), list(model.parameters())))


def with_head(model: nn.Sequential, theta: Tensor, x: Tensor) -> Tensor:
    """Outputs of a copy of the network with these weights in its last layer."""
    other = copy.deepcopy(model)
    vector_to_parameters(theta, other[-1].parameters())
    return other(x)


def test_nothing_is_copied_before_the_head_is_read() -> None:
    la = fitted(network())
    f, _ = la.model.forward_with_features(X.double())
    loss = f.square().sum() + la.model(X.double()).sum()
    assert all(g is not None for g in torch.autograd.grad(loss, list(la.model.model.parameters())))
    head = la.model.last_layer
    assert head is not la.model.model[2]
    assert_close(parameters_to_vector(head.parameters()), la.mean, "exact")


@pytest.mark.parametrize("enable_backprop", [True, False])
def test_features_have_a_graph_where_it_was_asked_for(enable_backprop: bool) -> None:
    la = fitted(network(), enable_backprop=enable_backprop)
    x = X.double().requires_grad_()
    f, features = la.model.forward_with_features(x)
    assert f.requires_grad
    assert features.requires_grad == enable_backprop


def test_gradients_lead_to_the_copy() -> None:
    la = fitted(network())
    head = la.model.last_layer
    la.model(X.double()).square().sum().backward()
    assert_close(head.weight.grad, expected_gradients(la.model.model)[2], "exact")
    for p, expected in zip(la.model.parameters(), expected_gradients(la.model.model), strict=True):
        assert_close(p.grad, expected, "exact")
    la.model.zero_grad(set_to_none=True)
    theta = sampled(la)
    other = copy.deepcopy(la.model.model)
    vector_to_parameters(theta, other[-1].parameters())
    head.zero_grad(set_to_none=True)
    la.model(X.double()).square().sum().backward()
    assert_close(head.weight.grad, expected_gradients(other)[2], "exact")


@pytest.mark.parametrize("features", [False, True])
def test_gradients_of_a_pass_lead_to_a_head_that_is_read_afterwards(features: bool) -> None:
    """As in an explanation of a prediction: the pass comes first, then the question for what."""
    model = network()
    la, before = fitted(model), copy.deepcopy(model.state_dict())
    f = la.model.forward_with_features(X.double())[0] if features else la.model(X.double())
    head = la.model.last_layer
    wanted = [*head.parameters(), *la.model.parameters()]
    found = torch.autograd.grad(f.square().sum(), wanted)
    expected = expected_gradients(model)
    for g, e in zip(found, [*expected[2:], *expected], strict=True):
        assert_close(g, e, "exact")
    assert la.model.last_layer is head
    theta = sampled(la)
    assert_close(la.model(X.double()), with_head(model, theta, X.double()), "exact")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_memory_is_shared_until_the_head_is_read() -> None:
    model = network()
    la = fitted(model)
    with torch.no_grad():
        la.model(X.double())
    assert la.model._head._copy is None
    la.model(X.double())
    shared = la.model._head._copy
    assert shared.weight is not model[2].weight and shared.weight.data_ptr() == model[2].weight.data_ptr()
    with torch.no_grad():  # of what is trained on, nothing is outdated
        model[2].weight.mul_(2)
    assert_close(la.model(X.double()), model(X.double()), "exact")
    assert la.model._head._copy is shared
    model.float()
    assert_close(la.model(X), model(X), "exact")
    assert la.model._head._copy is not shared
    head = la.model.last_layer
    assert head.weight.data_ptr() != model[2].weight.data_ptr()
    head.weight.data.zero_()
    assert model[2].weight.abs().min() > 0


def test_functional_calls_of_users_reach_the_network() -> None:
    la, x = fitted(network()), X.double()
    expected = expected_gradients(la.model.model)
    la.model(x)
    given = {name: p.detach() for name, p in la.model.named_parameters()}
    found = torch.func.grad(lambda p: torch.func.functional_call(la.model, p, (x,)).square().sum())(given)
    for g, e in zip(found.values(), expected, strict=True):
        assert_close(g, e, "algebra")


def test_parameters_and_states_are_those_of_the_network() -> None:
    model = network()
    la = fitted(model)
    sampled(la)
    assert [id(p) for p in la.model.parameters()] == [id(p) for p in model.parameters()]
    assert la.model.state_dict().keys() == {f"model.{key}" for key in model.state_dict()}
    assert all(torch.equal(value, model.state_dict()[key[6:]]) for key, value in la.model.state_dict().items())
    assert la.is_subset_params is False


def test_copies_and_pickles_have_what_was_loaded() -> None:
    model, x = network(), X.double()
    la = fitted(model)
    theta, p = sampled(la), la(x)
    expected = with_head(model, theta, x)
    for again in (copy.deepcopy(la), pickle.loads(pickle.dumps(la)), copy.copy(la)):
        assert_close(again.model(x), expected, "algebra")
        assert_close(again(x), p, "exact")
    other = copy.deepcopy(la)
    sampled(other, seed=2)
    assert_close(la.model(x), expected, "exact")
    vector_to_parameters(theta * 0, copy.deepcopy(la.model).last_layer.parameters())
    assert_close(la.model(x), expected, "exact")


def through_data(model: nn.Module) -> None:
    model[2].weight.data.mul_(1.5)


def by_vector(model: nn.Module) -> None:
    vector_to_parameters(1.5 * parameters_to_vector(model.parameters()).detach(), model.parameters())


def by_step(model: nn.Module) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    model(X.double()).square().sum().backward()
    optimiser.step()


@pytest.mark.parametrize("trained", [through_data, by_vector, by_step])
def test_a_fit_after_training_shows_the_new_head(trained: Callable[[nn.Module], None]) -> None:
    model = network()
    la = fitted(model)
    sampled(la)
    trained(model)
    with pytest.raises(ModelChangedError):
        la(X.double())
    la.fit([(X.double(), Y)])
    assert_close(la.model(X.double()), model(X.double()), "exact")
    assert_close(parameters_to_vector(la.model.last_layer.parameters()), la.mean, "exact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_that_is_moved_shows_its_own_head(dtype: torch.dtype) -> None:
    la = fitted(network())
    sampled(la)
    la.to("cpu", dtype)
    if dtype == torch.float64:  # the same numbers in the same place
        assert not torch.equal(parameters_to_vector(la.model.last_layer.parameters()), la.mean)
    else:
        assert la.model.last_layer.weight.dtype == dtype
        assert_close(parameters_to_vector(la.model.last_layer.parameters()), la.mean, "exact")
    assert la.model(X.to(dtype)).dtype == dtype
    la(X.to(dtype))


def test_samples_of_a_network_in_half_precision() -> None:
    model = network().bfloat16()
    la = FullLLLaplace(model, "classification")
    la.fit([(X.bfloat16(), Y)])
    theta = sampled(la)
    assert theta.dtype == torch.float32
    f = la.model(X.bfloat16())
    assert f.dtype == torch.bfloat16
    assert torch.equal(f, with_head(model, theta.bfloat16(), X.bfloat16()))


class Gated(nn.Module):
    """Takes two inputs, and has the head in a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 3), nn.Flatten())

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(x)) * gate)


def test_the_network_is_called_as_the_posterior_calls_it() -> None:
    torch.manual_seed(0)
    model, x, gate = Gated().double(), X.double(), torch.rand(len(X), 4, dtype=torch.float64)
    la = FullLLLaplace(model, "classification", forward_fn=lambda model, x: model(x, gate[: len(x)]))
    la.fit([(x, Y)])
    features = torch.tanh(model.body(x)) * gate
    assert_close(la.model(x), model(x, gate), "exact")
    theta = sampled(la)
    f, seen = la.model.forward_with_features(x)
    assert_close(seen, features, "exact")
    assert_close(f, features @ theta[:12].view(3, 4).T + theta[12:], "algebra")

    pairs = FullLLLaplace(model, "classification")
    pairs.fit([(x, gate, Y)])
    assert_close(sampled(pairs), theta, "exact")
    assert_close(pairs.model((x, gate)), f, "exact")
    named = FullLLLaplace(model, "classification", dict_key_y="y")
    named.fit([{"x": x, "gate": gate, "y": Y}])
    assert_close(sampled(named), theta, "exact")
    assert_close(named.model({"x": x, "gate": gate}), f, "exact")


def test_a_head_of_pixels_keeps_the_layout_of_the_network() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 1)).double()
    images, labels = torch.randn(5, 2, 4, 6, dtype=torch.float64), torch.randint(4, (5, 4, 6))
    la = FullLLLaplace(model, "classification")
    la.fit([(images, labels)])
    theta = sampled(la)
    f, features = la.model.forward_with_features(images)
    assert_close(features, model[:2](images), "exact")
    weight = theta[:12].view(4, 3)
    assert_close(f, torch.einsum("bihw,oi->bohw", features, weight) + theta[12:].view(4, 1, 1), "algebra")


def test_networks_inside_others() -> None:
    """Data parallelism is what the user gave; a compiled network runs with the copy all the same."""
    inner, x = network(), X.double()
    for model in (nn.DataParallel(inner), torch.compile(inner, backend="eager")):
        la = fitted(model)
        assert la.model.model is model
        theta = sampled(la)
        assert_close(la.model(x), with_head(inner, theta, x), "algebra")


def test_a_network_that_is_one_layer() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    la = fitted(model)
    theta = sampled(la)
    f, features = la.model.forward_with_features(X.double())
    assert_close(features, X.double(), "exact")
    assert_close(f, X.double() @ theta[:9].view(3, 3).T + theta[9:], "algebra")


def test_a_tied_head_is_written_to_in_the_head_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x).mean(1))

    torch.manual_seed(0)
    model, tokens = Tied().double(), torch.randint(5, (6, 4))
    la = FullLLLaplace(model, "classification", last_layer_name="head")
    la.fit([(tokens, torch.randint(5, (6,)))])
    theta = sampled(la)
    f, features = la.model.forward_with_features(tokens)
    assert_close(features, model.table(tokens).mean(1), "exact")
    assert_close(f, features @ theta[:15].view(5, 3).T + theta[15:], "algebra")


@pytest.mark.parametrize("wrapped", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_parametrised_head(wrapped: Callable[[nn.Module], nn.Module]) -> None:
    model = network().eval()
    wrapped(model[2])
    extractor = Laplace(model, "classification", last_layer_name="2").model
    head = extractor.last_layer
    with torch.no_grad():
        head.bias.zero_()
    assert_close(extractor(X.double()), model(X.double()) - model[2].bias, "algebra")


# Which layer it is.


def test_the_layer_that_users_find_is_the_posterior_s() -> None:
    la = FullLLLaplace(network(), "classification")
    with pytest.raises(NotFittedError):
        la.problem  # noqa: B018
    f, _ = la.model.forward_with_features(X.double())
    assert_close(f, la.model.model(X.double()), "exact")
    assert (la.last_layer_name, la.n_params, la.n_layers) == ("2", 18, 2)
    assert la.backend.jacobians(X.double())[0].shape == (12, 3, 18)
    chosen = FullLLLaplace(network(), "classification")
    chosen.model.set_last_layer("0")
    chosen.fit([(X.double(), Y)])
    assert (chosen.last_layer_name, chosen.n_params) == ("0", 20)


def test_the_layer_that_a_fit_finds_is_the_model_s() -> None:
    la = FullLLLaplace(network(), "classification")
    model = la.model
    with pytest.raises(InvalidData):
        la.fit([(X.double(), Y), (X.double().log(), Y)])
    assert la.n_params is None
    assert model.last_layer is None
    la.fit([(X.double(), Y)])
    assert model.last_layer_name == "2"
    for known in (lambda other: other.plan([(X.double(), Y)]), lambda other: other.load_state_dict(la.state_dict())):
        other = FullLLLaplace(network(), "classification")
        held = other.model
        known(other)
        assert_close(parameters_to_vector(held.last_layer.parameters()), la.mean, "exact")


def test_several_heads_are_warned_of() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    with pytest.warns(ApproximationWarning, match="'b'"):
        Laplace(Two(), "classification").model.find_last_layer(X)


# What others do with it.


def test_constructors_take_the_network_of_a_model() -> None:
    model, x = network(), X.double()
    la = fitted(model)
    p, batches = la(x), [(x, Y)]
    sampled(la)
    again = fitted(la.model)
    assert again.model is not la.model
    assert again.model.model is model
    assert_close(again(x), p, "exact")
    assert_close(again.model(x), model(x), "exact")
    whole = FullLaplace(la.model, "classification")
    assert whole.model is model
    assert whole.n_params == 38
    indices = LastLayerSubnetMask(la.model).select([(x, Y)])
    assert torch.equal(indices, torch.arange(20, 38))
    process = ELLA(la.model, "classification", 6, 4)
    assert process.model is model
    assert MixtureLaplace([la.model], "classification", "all", "diag").components[0].model is model
    trained = marglik_training(la.model, batches, hessian_structure="diag", n_epochs=2)[0]
    assert trained.model is model
    with pytest.raises(ModelChangedError):
        la(x)
    mimo = FeatureExtractor(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)))
    parts = from_mimo(mimo, 2, last_layer_name="2").components
    assert [part.model for part in parts] == [mimo.model, mimo.model]


def test_backends_never_see_the_copy() -> None:
    seen = []

    class Mine(GGNInterface):
        def jacobians(self, x, enable_backprop=False):
            seen.append(self.model)
            return super().jacobians(x, enable_backprop)

    model, x = network(), X.double()
    la = fitted(model, backend=Mine)
    J, f = la.backend.jacobians(x)
    sampled(la)
    assert_close(la.backend.jacobians(x)[0], J, "exact")
    assert_close(la.backend.jacobians(x)[1], f, "exact")
    assert all(backend_model.last_layer is model[2] for backend_model in seen)
    assert la.backend.params[0] is model[2].weight
    direct = NativeGGN(la.model, "classification", last_layer=True)
    assert direct.params[0] is model[2].weight
    assert_close(direct.jacobians(x)[1], f, "exact")
    every = NativeGGN(la.model, "classification")
    assert_close(every.jacobians(x)[0][..., 20:], J, "backend")
    own = FeatureExtractor(model, "2")
    assert NativeGGN(own, "classification", last_layer=True).model is own


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
def test_a_fit_a_prediction_and_the_evidence_pass_the_copy_by() -> None:
    x, la = X.double(), fitted(network())
    expected = fitted(network())
    vector_to_parameters(torch.ones(18), la.model.last_layer.parameters())
    la.fit([(x, Y)], override=False)
    expected.fit([(x, Y)], override=False)
    assert_close(la.H, expected.H, "backend")
    assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood(), "backend")


def test_an_unknown_reduction() -> None:
    with pytest.raises(InvalidArgument, match="feature_reduction='pick_middle'"):
        FullLLLaplace(network(), "classification", feature_reduction="pick_middle")
