"""States that laplace-torch saved: what is read of them, what is refused, and that a refusal loses nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from laplace import ELLA, FunctionalLaplace, Laplace, VaLLA
from laplace.errors import InvalidData, StateError, StateWarning
from tests.downstream.problems import Truth, classes, loader, network, new_inputs
from tests.downstream.test_states_and_differences import NAMES, saved_there
from tests.reference.compare import assert_close

State = dict[str, Any]


def state_of(structure: str = "kron", weights: str = "all", **others: Any) -> State:
    """A state of `network()` on `classes()`."""
    names = ("2.weight", "2.bias") if weights == "last_layer" else None
    truth = Truth(network(), *classes(), "classification", structure, names, prior=2.0)
    return saved_there(truth, NAMES[weights, structure], structure) | others


def without(key: str) -> State:
    return {name: value for name, value in state_of().items() if name != key}


def changed(structure: str, change: Callable[[Any], Any]) -> State:
    """A state with another curvature."""
    state = state_of(structure)
    return state | {"H": change(state["H"])}


REFUSED: dict[str, tuple[str, Callable[[], State], str]] = {
    "another structure": ("kron", lambda: state_of("diag"), "state of a DiagLaplace.*load it into a DiagLaplace"),
    "other weights": ("kron", lambda: state_of("kron", "last_layer"), "load it into a KronLLLaplace"),
    "low rank": ("kron", lambda: state_of(cls_name="LowRankLaplace"), "LowRankLaplace; only.*fit again"),
    "a subnetwork": ("full", lambda: state_of("full", cls_name="FullSubnetLaplace"), "FullSubnetLaplace.*fit again"),
    "a class of a user": ("kron", lambda: state_of(cls_name="Stable"), "Stable; only those of FullLaplace.*fit again"),
    "likelihood": ("kron", lambda: state_of(likelihood="bernoulli"), "likelihood='bernoulli'.*'classification'"),
    "truncated": ("kron", lambda: without("H"), r"lacks \['H'\]"),
    "not fitted": ("kron", lambda: state_of(mean=0.0, n_data=0), "before a fit"),
    "short mean": ("kron", lambda: state_of(mean=torch.zeros(5)), "of 5 parameters"),
    "another network": ("kron", lambda: state_of(mean=torch.ones(27).double()), "other weights.*load the weights"),
    "NaN in the mean": ("kron", lambda: state_of(mean=torch.full((27,), torch.nan).double()), "other weights"),
    "prior": ("kron", lambda: state_of(prior_precision=-torch.ones(1)), "does not fit.*positive"),
    "prior per tensor": ("kron", lambda: state_of(prior_precision=torch.ones(3)), "prior_precision"),
    "loss": ("kron", lambda: state_of(loss=torch.tensor(torch.nan)), "loss"),
    "number of outputs": ("kron", lambda: state_of(n_outputs=2.5), "n_outputs"),
    "no outputs": ("kron", lambda: state_of(n_outputs=0), "before a fit"),
    "flag": ("kron", lambda: state_of(enable_backprop=3), "enable_backprop=3"),
    "number of data": ("kron", lambda: state_of(n_data="many"), "many"),
    "too few blocks": ("kron", lambda: changed("kron", lambda H: H[:2]), "H has 2 blocks"),
    "factors of another size": ("kron", lambda: changed("kron", lambda H: [H[2], *H[1:]]), "factors of shapes"),
    "factors exchanged": ("kron", lambda: changed("kron", lambda H: [H[0][::-1], *H[1:]]), "first dimension.*exchange"),
    "a matrix for factors": ("kron", lambda: changed("full", lambda H: H) | {"cls_name": "KronLaplace"}, "H is"),
    "another length": ("diag", lambda: changed("diag", lambda H: H[:-1]), "H is a tensor of shape"),
    "asymmetry": ("full", lambda: changed("full", lambda H: H.triu()), "symmetric"),
    "infinite entries": ("diag", lambda: changed("diag", lambda H: H / 0), "finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_lost(case: str) -> None:
    structure, make_state, message = REFUSED[case]
    la = Laplace(network(), "classification", "all", structure, prior_precision=3.0)
    with pytest.raises(StateError, match=rf"(?s)\Alaplace-torch .*{message}"):
        la.load_state_dict(make_state())
    assert not la.is_fitted
    la.fit(loader(*classes()))
    before = copy.deepcopy(la)
    with pytest.raises(StateError, match=rf"(?s)\Alaplace-torch .*{message}"):
        la.load_state_dict(make_state())
    assert torch.equal(la(new_inputs()), before(new_inputs()))
    assert torch.equal(la.log_marginal_likelihood(), before.log_marginal_likelihood())
    assert la.prior_precision.item() == 3.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: FunctionalLaplace(network(), "classification", 8),
        lambda: ELLA(network(), "classification", 8, 4),
        lambda: VaLLA(network(), "classification", "random", 4),
        lambda: Laplace(network(), "classification", "all", "lowrank"),
        lambda: Laplace(network(), "classification", "subnetwork", "full", subnetwork_indices=torch.arange(4)),
    ],
)
def test_other_posteriors_do_not_read_them(make: Callable[[], Any]) -> None:
    la = make()
    with pytest.raises(StateError, match=r"\Alaplace-torch saved the state of a \w+; only those of .*fit again"):
        la.load_state_dict(state_of(cls_name=type(la).__name__))
    with pytest.raises(StateError, match=r"\Alaplace-torch .*load it into a KronLaplace"):
        la.load_state_dict(state_of())
    assert not la.is_fitted


def test_the_last_layer_is_the_one_that_the_state_names() -> None:
    state = state_of("diag", "last_layer")
    named = Laplace(network(), "classification", "last_layer", "diag", last_layer_name="0")
    with pytest.raises(StateError, match=r"\Alaplace-torch .*last layer '2'.*'0'"):
        named.load_state_dict(state)
    for name in ("1", "nowhere"):
        la = Laplace(network(), "classification", "last_layer", "diag")
        with pytest.raises(StateError, match=rf"\Alaplace-torch .*{name}"):
            la.load_state_dict(state | {"_last_layer_name": name})
    with pytest.raises(StateError, match=r"\Alaplace-torch .*without the name of the last layer"):
        la.load_state_dict(state | {"_last_layer_name": None})
    la.load_state_dict(state)
    assert la.mean.shape == state["mean"].shape


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_a_loaded_posterior_goes_on(structure: str, weights: str) -> None:
    """It has the numbers of a fit, is saved as every other, and takes further data."""
    (x, y), new = classes(), new_inputs()
    fitted = Laplace(network(), "classification", weights, structure, prior_precision=2.0)
    fitted.fit(loader(x, y))
    la = Laplace(network(), "classification", weights, structure)
    la.load_state_dict(state_of(structure, weights))
    for prior in (2.0, 0.3):
        la.prior_precision = fitted.prior_precision = prior
        assert_close(la(new), fitted(new), "backend")
        assert_close(la.log_marginal_likelihood(), fitted.log_marginal_likelihood(), "backend")
    again = Laplace(network(), "classification", weights, structure)
    again.load_state_dict(la.state_dict())
    assert_close(again(new), la(new), "algebra")


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_further_data_are_added(structure: str) -> None:
    la = Laplace(network(), "classification", "all", structure)
    la.load_state_dict(state_of(structure))
    once = la.H.clone()
    la.fit(loader(*classes()), override=False)
    assert_close(la.H, 2 * once, "backend")
    assert la.n_data == 2 * len(classes()[0])


def test_factors_of_a_state_are_not_added_to_those_of_a_fit() -> None:
    """They may be normalised in another way; nothing is lost by the attempt."""
    la = Laplace(network(), "classification", "all", "kron")
    la.load_state_dict(state_of())
    before = la(new_inputs())
    with pytest.raises(InvalidData, match=r"saved by laplace-torch.*by hand"):
        la.fit(loader(*classes()), override=False)
    assert torch.equal(la(new_inputs()), before)


def test_a_former_fit_gives_way_as_a_whole() -> None:
    x, y = classes()
    la = Laplace(network(), "classification", "all", "diag")
    la.fit([(x[:4], y[:4])])
    la.refine([(x[:4], y[:4])])
    la.load_state_dict(state_of("diag"))
    fresh = Laplace(network(), "classification", "all", "diag")
    fresh.load_state_dict(state_of("diag"))
    assert_close(la.mean, fresh.mean, "exact")
    assert_close(la(new_inputs()), fresh(new_inputs()), "exact")


def test_hyper_parameters_of_every_form() -> None:
    per_tensor = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    priors: list[Any] = [2.0, torch.tensor(2.0), torch.tensor([2.0]), per_tensor]
    for prior in priors:
        la = Laplace(network(), "classification", "all", "kron")
        la.load_state_dict(state_of(prior_precision=prior, prior_mean=torch.zeros(27), sigma_noise=torch.ones(1)))
        assert la.prior_precision.tolist() == (per_tensor.tolist() if prior is per_tensor else [2.0])
    with pytest.warns(StateWarning, match="temperature changes from 1.0 to 2.0"):
        la.load_state_dict(state_of(temperature=2.0))
    with pytest.warns(StateWarning, match="enable_backprop changes from False to True"):
        la.load_state_dict(state_of(temperature=2.0, enable_backprop=True))
    assert la.enable_backprop


def test_a_network_in_another_precision() -> None:
    """Its weights are those of the state, rounded."""
    state = state_of("diag")
    la = Laplace(network().float(), "classification", "all", "diag")
    la.load_state_dict(state)
    assert la.mean.dtype == torch.float32
    assert_close(la.posterior_variance, 1 / (state["H"] + 2.0), "float32")
    wider = Laplace(network().float().double(), "classification", "all", "diag")
    wider.load_state_dict(state | {"mean": state["mean"].float()})
    assert_close(wider.posterior_variance, 1 / (state["H"] + 2.0), "algebra")


def test_convolutions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    x, y = torch.randn(7, 1, 3, 3).double(), torch.randint(3, (7,))
    truth = Truth(model, x, y, "classification", "kron")
    la = Laplace(model, "classification", "all", "kron")
    la.load_state_dict(saved_there(truth, "KronLaplace", "kron"))
    assert_close(la(x), truth.probit(x), "backend")
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")


def test_states_of_this_library_are_not_taken_for_theirs() -> None:
    la = Laplace(network(), "classification", "all", "kron")
    la.fit(loader(*classes()))
    for key in ("version", "layout", "model_sums", "weights"):
        state = {name: value for name, value in la.state_dict().items() if name != key}
        with pytest.raises(StateError, match=rf"\Athe state lacks \['{key}'\]"):
            la.load_state_dict(state)
