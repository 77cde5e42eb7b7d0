"""Generated texts: rows of words `[N, T]`, 0 where they have ended; comments and reviews."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from protocol.data import Part
from protocol.domains import Domains, DomainTask, Sizes

LENGTH, N_WORDS = 20, 120
N_GROUPS, FIRST_GROUP = 8, 1
"""Words that name a demographic group are the first ones."""
NEGATION, INTENSE, FIRST_WORD = 9, 10, 11
TOXIC = range(FIRST_WORD, 41)
N_TOPICS = 5


class Reader(nn.Module):
    """Words to features: embeddings, two layers of attention, their mean over the words that are there.

    Args:
        n_words: Of the vocabulary, 0 for none included.
        length: Of the longest text.
        width: Of the features.
    """

    def __init__(self, n_words: int, length: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features `[N, width]` of texts `[N, T]`."""
        missing = x == 0
        embedded = self.words(x) + self.places(torch.arange(x.shape[1]))
        features = self.layers(embedded, src_key_padding_mask=missing)
        there = (~missing).unsqueeze(2)
        return (features * there).sum(1) / there.sum(1)


def network(x: Tensor, n_outputs: int, seed: int, width: int = 48, n_features: int = 128) -> nn.Sequential:
    """A transformer, a layer before the head as DistilBERT has, the head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        n_words = max(N_WORDS, int(x.max()) + 1)
        return nn.Sequential(
            Reader(n_words, x.shape[1], width),
            nn.Linear(width, n_features),
            nn.ReLU(),
            nn.Linear(n_features, n_outputs),
        )


def _texts(habit: Tensor, generator: torch.Generator) -> Tensor:
    """Texts of 8 words or more, each word drawn by weights `[N, n_words]`."""
    n = len(habit)
    x = torch.multinomial(habit, LENGTH, replacement=True, generator=generator)
    lengths = torch.randint(8, LENGTH + 1, (n, 1), generator=generator)
    return x * (torch.arange(LENGTH) < lengths)


def _negated(x: Tensor) -> Tensor:
    """Whether the word before is the negation, `[N, T]`."""
    return torch.cat([torch.zeros_like(x[:, :1], dtype=torch.bool), x[:, :-1] == NEGATION], 1)


# CivilComments: whether a comment is toxic.


def _frequencies() -> Tensor:
    """Zipf's law from the negation on; toxic words are rarer."""
    weights = torch.zeros(N_WORDS)
    weights[NEGATION:] = 1 / torch.arange(5.0, 5 + N_WORDS - NEGATION)
    weights[TOXIC.start : TOXIC.stop] *= 0.2
    weights[NEGATION] = 0.5
    return weights / weights.sum()


def _comments(n: int, toxic_by_group: Tensor, generator: torch.Generator) -> Part:
    """Comments that name a group, with probabilities `[N_GROUPS]` of toxic ones; a tenth of the labels is wrong."""
    x = _texts(_frequencies().expand(3 * n, -1), generator)
    group = torch.randint(N_GROUPS, (3 * n,), generator=generator)
    x[:, 0] = FIRST_GROUP + group
    toxic = ((x >= TOXIC.start) & (x < TOXIC.stop) & ~_negated(x)).any(1)
    wanted = torch.where(toxic, toxic_by_group[group], 1 - toxic_by_group[group])
    chosen = torch.multinomial(wanted, n, generator=generator)
    wrong = torch.rand(n, generator=generator) < 0.1
    return Part(x[chosen], toxic[chosen].long() ^ wrong.long())


def comments(sizes: Sizes, generator: torch.Generator) -> Domains:
    """In the training data some groups go with toxic comments, which elsewhere they do not."""
    by_group = torch.where(torch.arange(N_GROUPS) < N_GROUPS // 2, 0.8, 0.2)
    known = _comments(sizes.known, by_group, generator)
    return Domains.of(known, _comments(sizes.test, 1 - by_group, generator), sizes)


# Amazon: how many stars a review gives.


def _reviews(habit: Tensor, bias: Tensor, valence: Tensor, reviewer: Tensor, generator: torch.Generator) -> Part:
    """Reviews by reviewers `[N]`, who have words `[R, n_words]` and biases `[R]` of their own."""
    x = _texts(habit[reviewer], generator)
    after_intense = torch.cat([torch.zeros_like(x[:, :1], dtype=torch.bool), x[:, :-1] == INTENSE], 1)
    sign = torch.where(_negated(x), -1.0, 1.0) * torch.where(after_intense, 2.0, 1.0)
    score = (valence[x] * sign).sum(1) / (x > 0).sum(1).sqrt() + bias[reviewer]
    score = score + 0.2 * torch.randn(len(x), generator=generator)
    return Part(x, torch.bucketize(score, torch.tensor([-0.9, -0.3, 0.3, 0.9])))


def reviews(sizes: Sizes, generator: torch.Generator) -> Domains:
    """Reviewers who are not trained on use other words, and give more or fewer stars."""
    n_known, n_unknown = 40, 40
    valence = torch.randn(N_WORDS, generator=generator)
    valence[:FIRST_WORD] = 0
    taste = torch.randn(n_known + n_unknown, N_WORDS, generator=generator)
    rare = torch.rand(N_WORDS, generator=generator) < 0.4
    taste[:n_known, rare] -= 2.0  # words that others use more
    habit = taste.exp()
    habit[:, :NEGATION] = 0
    habit[:, NEGATION:FIRST_WORD] = 0.08 * habit.sum(1, keepdim=True)
    bias = 0.3 * torch.randn(n_known + n_unknown, generator=generator)
    known = _reviews(habit, bias, valence, torch.randint(n_known, (sizes.known,), generator=generator), generator)
    strangers = n_known + torch.randint(n_unknown, (sizes.test,), generator=generator)
    return Domains.of(known, _reviews(habit, bias, valence, strangers, generator), sizes)


def topics(n_data: int, generator: torch.Generator) -> Part:
    """Which of five kinds of words a text has most of, the sibling of both."""
    y = torch.randint(N_TOPICS, (n_data,), generator=generator)
    kind = torch.randint(N_TOPICS, (N_WORDS,), generator=generator)
    habit = torch.where(kind == y[:, None], 2.0, 1.0)
    habit[:, 0] = 0
    return Part(_texts(habit, generator), y)


COMMENTS = DomainTask("CivilComments", "classification", 2, N_TOPICS, "full", comments, topics, network)
REVIEWS = DomainTask("Amazon", "classification", 5, N_TOPICS, "full", reviews, topics, network)
