"""`FeatureExtractor`: outputs with features, and the network as it was found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace.errors import InvalidArgument, NotFittedError
from laplace.weights.last_layer import FeatureExtractor


class Tokens(nn.Module):
    """[B, T, 3] → [B, T, 2]."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(1, 1)

    def forward(self, x):
        return self.head(input=self.body(x).tanh())


def snapshot(model):
    return [
        (set(vars(m)), m.training, dict(m._forward_hooks), dict(m._forward_pre_hooks), m.__dict__.get("forward"))
        for m in model.modules()
    ]


def test_features_and_output():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Softmax(-1)).train()
    before = snapshot(model)
    extractor = FeatureExtractor(model)
    assert extractor.last_layer is None
    x = torch.randn(5, 3)
    output, features = extractor.forward_with_features(x)
    torch.testing.assert_close(output, model(x))
    torch.testing.assert_close(features, model[:2](x))
    assert not features.requires_grad
    assert extractor.last_layer is model[2]
    assert extractor.last_layer_name == "2"
    assert snapshot(model) == before
    assert {name for name, _ in extractor.named_parameters()} == {f"model.{n}" for n, _ in model.named_parameters()}
    torch.testing.assert_close(extractor(x), model(x))
    with pytest.raises(InvalidArgument, match="known already"):
        extractor.find_last_layer(x)


def test_backprop_reaches_the_input():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = torch.randn(2, 3, requires_grad=True)
    _, features = FeatureExtractor(model, "1", enable_backprop=True).forward_with_features(x)
    features.sum().backward()
    torch.testing.assert_close(x.grad, model[0].weight.sum(0).expand(2, 3))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("reduction", ["pick_first", "pick_last", "average"])
def test_reductions_keep_the_batch(batch, reduction):
    model = Tokens()
    x = torch.randn(batch, 5, 3)
    full = model.body(x).tanh().detach()
    expected = {"pick_first": full[:, 0], "pick_last": full[:, -1], "average": full.mean(1)}[reduction]
    _, features = FeatureExtractor(model, feature_reduction=reduction).forward_with_features(x)
    torch.testing.assert_close(features, expected)
    _, images = FeatureExtractor(model, feature_reduction=reduction).forward_with_features(x.view(batch, 5, 1, 3))
    torch.testing.assert_close(images, expected)
    assert FeatureExtractor(model).forward_with_features(x)[1].shape == (batch, 5, 4)


def test_the_model_is_left_alone_when_it_raises():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            self.head(x)
            raise RuntimeError("inside")

    model = Broken().train()
    before = snapshot(model)
    for extractor in (FeatureExtractor(model), FeatureExtractor(model, "head")):
        with pytest.raises(RuntimeError, match="inside"):
            extractor.forward_with_features(torch.randn(1, 3))
        assert snapshot(model) == before


def test_mappings_and_errors():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)
            self.spare = nn.Linear(3, 2)
            self.norm = nn.LayerNorm(2)

        def forward(self, data):
            return self.head(data["x"])

    model = Takes()
    data = {"x": torch.randn(2, 3)}
    _, features = FeatureExtractor(model).forward_with_features(data)
    torch.testing.assert_close(features, data["x"])
    with pytest.raises(NotFittedError, match="spare"):
        FeatureExtractor(model, "spare").forward_with_features(data)
    with pytest.raises(InvalidArgument, match="not a module of this model"):
        FeatureExtractor(model, "tail")
    with pytest.raises(InvalidArgument, match="LayerNorm"):
        FeatureExtractor(model, "norm")
    with pytest.raises(InvalidArgument, match="pick_first"):
        FeatureExtractor(model, feature_reduction="pick_middle")


def test_compiled_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(2, 3)
    with torch.no_grad():  # Compilation itself warns about non-leaf inputs under gradients.
        compiled(x)
    extractor = FeatureExtractor(compiled)
    output, features = extractor.forward_with_features(x)
    torch.testing.assert_close(features, model[0](x))
    torch.testing.assert_close(output, model(x))
    inner = nn.Sequential(nn.Linear(3, 3), torch.compile(nn.Sequential(nn.Tanh(), nn.Linear(3, 2)), backend="eager"))
    with torch.no_grad():
        inner(x)
    output, features = FeatureExtractor(inner).forward_with_features(x)
    torch.testing.assert_close(features, inner[0](x).tanh())
