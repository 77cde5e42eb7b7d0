"""Transformers with batches that are mappings: BERT- and GPT-like classifiers, frozen trunks and adapters.

The models are those of the package `transformers`, with random weights (nothing is downloaded), and learn a toy
language: which of two kinds of words a padded sentence has more of. Batches are dicts with input_ids, attention_mask
and labels, as tokenizers and data collators give them; the library takes them as they are. Two usual ways of tuning
such models:

- the trunk frozen and a new head: the posterior of the last layer, with the full covariance;
- adapters beside frozen projections of the attention, W x + B A x with A and B of rank 4 (Hu et al., 2022), and a
  head: the posterior of all weights that are trained, Kronecker-factored (Yang et al., 2024).

Scored are held-out sentences, and the confidence on sentences of words that were never seen.

    python examples/language_models.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

from laplace import Laplace
from laplace.extensions.plotting import new_figure, reliability_diagram
from laplace.metrics import accuracy, auroc, expected_calibration_error, mean_confidence, nll

PAD, N_WORDS, LENGTH, WIDTH = 0, 30, 12, 32
Batch = dict[str, Tensor]
ADAPTED = {"bert": ("query", "value"), "gpt": ("c_attn",)}
"""Layers that get adapters."""


class Adapter(nn.Module):
    """A frozen layer and a trainable one of low rank beside it, which is zero at the start.

    Args:
        layer: A linear layer, of whatever class.
        n_in: Features that it takes.
        n_out: Features that it gives.
        rank: Rank of what is added.
    """

    def __init__(self, layer: nn.Module, n_in: int, n_out: int, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(n_in, rank, bias=False)
        self.up = nn.Linear(rank, n_out, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def sentences(n: int, seed: int, words: range) -> list[Batch]:
    """Sentences of 4 to 12 words, labelled 1 where odd words outnumber even ones; of a tenth the label is flipped."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(words.start, words.stop, (n, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (n, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = ((ids % 2 * 2 - 1) * mask).sum(1).gt(0).long()
    wrong = torch.rand(n, generator=generator) < 0.1
    columns = {"input_ids": ids * mask + PAD * (1 - mask), "attention_mask": mask, "labels": labels ^ wrong.long()}
    return [{key: column[i] for key, column in columns.items()} for i in range(n)]


def make_model(kind: str, *, adapters: bool) -> nn.Module:
    """A random transformer of two layers, frozen but for its head and, on request, adapters."""
    torch.manual_seed(0)
    if kind == "bert":
        model = BertForSequenceClassification(
            BertConfig(vocab_size=N_WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
                       intermediate_size=2 * WIDTH, max_position_embeddings=LENGTH, num_labels=2, pad_token_id=PAD)
        )  # fmt: skip
        head = model.classifier
    else:
        model = GPT2ForSequenceClassification(
            GPT2Config(vocab_size=N_WORDS, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=LENGTH, num_labels=2,
                       pad_token_id=PAD, bos_token_id=PAD, eos_token_id=PAD)
        )  # fmt: skip
        head = model.score
    model.requires_grad_(False)
    head.requires_grad_(True)
    for parent in list(model.modules()) if adapters else []:
        for name, layer in list(parent.named_children()):
            if name in ADAPTED[kind]:
                setattr(parent, name, Adapter(layer, WIDTH, 3 * WIDTH if name == "c_attn" else WIDTH))
    return model


def train(model: nn.Module, data: list[Batch], n_epochs: int) -> nn.Module:
    """Trains what is not frozen, in evaluation mode: the models are too small for dropout."""
    model.eval()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(data, batch_size=50, shuffle=True)
    for _ in range(n_epochs):
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(**batch).logits, batch["labels"]).backward()
            optimizer.step()
    return model


def evaluate(predict: Callable[[Batch], Tensor], test: Batch, unseen: Batch) -> list[float]:
    """NLL, ECE and accuracy on held-out sentences; confidence on unseen words, and how well it tells them apart."""
    probs, foreign, y = predict(test), predict(unseen), test["labels"]
    scores = [float(metric(probs, y)) for metric in (nll, expected_calibration_error, accuracy)]
    return [*scores, float(mean_confidence(foreign)), float(auroc(probs.amax(1), foreign.amax(1)))]


def main(small: bool = False, output: Path = Path("outputs/language_models.png")) -> dict[str, list[float]]:
    """Runs everything and returns the scores by model and way of prediction.

    Args:
        small: Few sentences and one epoch only, to try the script out.
        output: Where the plot goes.
    """
    seen, others = range(1, 21), range(21, N_WORDS)
    data = sentences(60 if small else 600, 0, seen)
    n_test = 50 if small else 500
    test, unseen = default_collate(sentences(n_test, 1, seen)), default_collate(sentences(n_test, 2, others))
    figure, axes = new_figure(n_columns=4, width=3.4, height=3.3)
    rows: dict[str, list[float]] = {}
    print(f"{'':<26}{'weights':>8}{'NLL':>8}{'ECE':>8}{'accuracy':>10}   unseen words: confidence, AUROC")
    for axis, (kind, adapters) in zip(axes, [(k, a) for k in ADAPTED for a in (False, True)], strict=True):
        model = train(make_model(kind, adapters=adapters), data, n_epochs=1 if small else 25)
        weights, structure = ("all", "kron") if adapters else ("last_layer", "full")
        la = Laplace(model, "classification", weights, structure)
        la.fit(DataLoader(data, batch_size=100))
        la.optimize_prior_precision()
        predictors = {"network": torch.no_grad()(lambda x, model=model: model(**x).logits.softmax(1)), "Laplace": la}
        name = f"{kind}, {'adapters' if adapters else 'frozen'}"
        for way, predict in predictors.items():
            row = rows[f"{name}, {way}"] = evaluate(predict, test, unseen)
            numbers = f"{row[0]:>8.3f}{row[1]:>8.3f}{row[2]:>10.3f}{row[3]:>28.3f}{row[4]:>7.3f}"
            print(f"{f'{name}, {way}':<26}{la.n_params:>8}{numbers}")
        reliability_diagram(axis, {way: predict(test) for way, predict in predictors.items()}, test["labels"])
        axis.set(title=name, xlim=(0.5, 1), ylim=(0.3, 1))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few sentences, one epoch")
    parser.add_argument("--output", type=Path, default=Path("outputs/language_models.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
