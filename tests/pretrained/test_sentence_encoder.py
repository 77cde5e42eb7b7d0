"""Decisions on a real text encoder, with real ratings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from examples import pretrained_data
from laplace.integrations.decision import decision, load
from tests.pretrained.loading import lent, loaded


def test_sixty_labels_decide_and_the_encoder_stays_as_it_is(tmp_path: Path) -> None:
    model, tokenizer = loaded(pretrained_data.sentence_encoder)
    texts, ratings = loaded(pretrained_data.ratings, "films")
    sure = (ratings.abs() > 2).nonzero().flatten()
    sure = sure[torch.randperm(len(sure), generator=torch.Generator().manual_seed(0))[:160]].tolist()
    texts, labels = [texts[i] for i in sure], [int(ratings[i] > 0) for i in sure]
    with lent(model):
        head = decision(model, tokenizer, ["bad", "good"]).fit(texts[:60], labels[:60])
        probabilities = head(texts[60:])
    expected = torch.tensor(labels[60:])
    assert float((probabilities.argmax(1) == expected).double().mean()) > 0.7
    assert float(torch.nn.functional.nll_loss(probabilities.log(), expected)) < 0.6
    alone = torch.cat([head([text]) for text in texts[60:63]])
    assert_close(alone, probabilities[:3], rtol=1e-3, atol=1e-4)  # without the pads of a batch
    head.save(tmp_path / "head")
    assert_close(load(tmp_path / "head", model, tokenizer)(texts[60:]), probabilities, rtol=0, atol=1e-6)


def test_topics_are_named() -> None:
    texts, labels, names = loaded(pretrained_data.topics)
    assert len(texts) == len(labels) and len(names) == int(labels.max()) + 1 == 21


@pytest.mark.parametrize("domain", ["tweets", "films", "products"])
def test_ratings_are_means_of_people(domain: str) -> None:
    texts, ratings = loaded(pretrained_data.ratings, domain)
    assert len(texts) == len(ratings) > 3000 and float(ratings.abs().max()) <= 4
