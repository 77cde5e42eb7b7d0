"""A small language model is trained here, adapted by LoRA until it knows its few examples by heart, and calibrated.

The text is Python's own reference, which comes with every Python (`pydoc_data.topics`): nothing is downloaded. A GPT-2
of two layers learns to predict its words. Then adapters of rank 8 beside its attention (PEFT), and a head, learn from
400 windows of 24 words which page of the reference they are from, far beyond the point where all of them are right: the
network is certain where it should not be. Its Laplace approximation is the default for models with adapters, all
trainable weights with Kronecker factors of low rank on the wide sides (Yang et al., 2024). Its prior is chosen by the
NLL of 100 further windows. Beside it are the network at a temperature that these windows choose (`cooled`), `kron` with
the whole factors, and the default with the prior that maximises the evidence, which needs no further data. The language
model is one for all seeds; the split, the head and the adapters are every seed's own.

    python examples/lora.py [--seeds N]
"""

from __future__ import annotations

import argparse
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from laplace import Laplace
from laplace.errors import ApproximationWarning
from laplace.extensions.plotting import new_figure, reliability_diagram
from laplace.metrics import accuracy, expected_calibration_error, nll

PAGES = ("specialnames", "compound", "formatstrings", "string-methods", "debugger")
LENGTH, N_WORDS, BLOCK = 24, 1000, 10
PAD, UNKNOWN, N_VALIDATION = 0, 1, 100
Batch = dict[str, Tensor]
Scores = dict[str, list[float]]
Probabilities = tuple[dict[str, Tensor], Tensor]


def read() -> dict[str, Tensor]:
    """Words of every page as numbers, the rarer ones all the same."""
    pages = {name: re.findall(r"[a-z]+", text.lower()) for name, text in topics.items()}
    common = Counter(word for words in pages.values() for word in words).most_common(N_WORDS - 2)
    numbers = {word: i + 2 for i, (word, _) in enumerate(common)}
    return {name: torch.tensor([numbers.get(word, UNKNOWN) for word in words]) for name, words in pages.items()}


def windows(pages: dict[str, Tensor], n_train: int, seed: int) -> tuple[list[Batch], list[Batch], Batch]:
    """Windows of the pages to be told apart, for training, for the choice of the prior, and for the test.

    Windows that follow each other, ten at a time, are all for training or all for the rest.
    """
    generator = torch.Generator().manual_seed(seed)
    parts: tuple[list[Batch], list[Batch]] = ([], [])
    for label, name in enumerate(PAGES):
        found = pages[name][: len(pages[name]) // LENGTH * LENGTH].view(-1, LENGTH)
        for block in found.split(BLOCK):
            part = parts[int(torch.rand((), generator=generator) < 0.6)]
            part.extend({"input_ids": row, "labels": torch.tensor(label)} for row in block)
    train, rest = ([part[i] for i in torch.randperm(len(part), generator=generator).tolist()] for part in parts)
    return train[:n_train], rest[:N_VALIDATION], stacked(rest[N_VALIDATION:])


def stacked(rows: list[Batch]) -> Batch:
    """Rows as one batch."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def minimise(model: nn.Module, data: list[Batch], n_epochs: int, rate: float) -> nn.Module:
    """Trains what requires gradients, by the model's own loss; the models are too small for dropout."""
    model.eval()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    for _ in range(n_epochs):
        for batch in DataLoader(data, batch_size=64, shuffle=True, collate_fn=stacked):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return model


def language_model(pages: dict[str, Tensor], n_epochs: int) -> GPT2LMHeadModel:
    """Trained to predict the next word of all pages."""
    config = GPT2Config(
        vocab_size=N_WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, num_labels=len(PAGES),
        pad_token_id=PAD, bos_token_id=PAD, eos_token_id=PAD, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    text = torch.cat(list(pages.values()))
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    language = GPT2LMHeadModel(config)
    minimise(language, [{"input_ids": row, "labels": row} for row in rows], n_epochs, 3e-3)
    return language


def adapted(language: GPT2LMHeadModel) -> nn.Module:
    """Its layers, frozen, with a head for classes and adapters that have learnt nothing yet."""
    model = GPT2ForSequenceClassification(language.config)
    model.transformer.load_state_dict(language.transformer.state_dict())
    lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about an attribute that PEFT reads
        return get_peft_model(model, lora)


@torch.no_grad()
def cooled(model: nn.Module, validation: list[Batch], logits: Tensor) -> Tensor:
    """The network's probabilities at the temperature of the least NLL of the validation data."""
    data = stacked(validation)
    f, candidates = model(**data).logits, torch.logspace(-0.5, 1.5, 41).tolist()
    return (logits / min(candidates, key=lambda t: float(nll((f / t).softmax(-1), data["labels"])))).softmax(-1)


def posteriors(model: nn.Module, train: list[Batch], validation: list[Batch]) -> Iterator[tuple[str, Any]]:
    """Posteriors by name, with the prior of the least NLL of the validation data; then with that of most evidence."""
    data, others = (DataLoader(part, batch_size=100, collate_fn=stacked) for part in (train, validation))
    for name, choice in {"kron": {"subset_of_weights": "all", "hessian_structure": "kron"}, "default": {}}.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ApproximationWarning)  # which says what the default is
            la = Laplace(model, "classification", **choice)
        la.fit(data)
        la.optimize_prior_precision(method="gridsearch", val_loader=others)
        yield name, la
    la.optimize_prior_precision(method="marglik")
    yield "evidence", la


def run(seed: int, language: GPT2LMHeadModel, pages: dict[str, Tensor], *, small: bool) -> tuple[Scores, Probabilities]:
    """Scores of one seed (NLL, ECE, accuracy), and the probabilities with the labels."""
    torch.manual_seed(seed)
    train, validation, test = windows(pages, 60 if small else 400, seed)
    if small:
        test = {key: value[:50] for key, value in test.items()}
    model = minimise(adapted(language), train, 15 if small else 150, 5e-3)
    with torch.no_grad():
        logits = model(**test).logits
    predicted = {"network": logits.softmax(-1), "cooled": cooled(model, validation, logits)}
    for name, la in posteriors(model, train, validation):
        predicted[name] = la({"input_ids": test["input_ids"]})
    metrics = (nll, expected_calibration_error, accuracy)
    scores = {name: [float(score(p, test["labels"])) for score in metrics] for name, p in predicted.items()}
    return scores, (predicted, test["labels"])


def main(n_seeds: int = 5, small: bool = False, output: Path = Path("outputs/lora.png")) -> list[Scores]:
    """Runs all seeds, prints the scores of each and their means, and returns them.

    Args:
        n_seeds: Number of splits, each with adapters of its own.
        small: One seed and hardly any training, to try the script out.
        output: Where the plot goes, of the first seed.
    """
    torch.manual_seed(0)
    pages = read()
    language = language_model(pages, 0 if small else 15)
    rows: list[Scores] = []
    figure, (axis,) = new_figure(n_columns=1, width=3.6, height=3.4)
    print(f"{'seed':<6}{'':<10}{'NLL':>8}{'ECE':>8}{'accuracy':>10}")
    for seed in range(1 if small else n_seeds):
        scores, predicted = run(seed, language, pages, small=small)
        rows.append(scores)
        for name, row in scores.items():
            print(f"{seed:<6}{name:<10}{row[0]:>8.3f}{row[1]:>8.3f}{row[2]:>10.3f}")
        if not seed:
            reliability_diagram(axis, *predicted)
    for name in rows[0]:
        means = [statistics.mean(scores[name][i] for scores in rows) for i in range(3)]
        print(f"{'mean':<6}{name:<10}{means[0]:>8.3f}{means[1]:>8.3f}{means[2]:>10.3f}")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one seed, hardly any training")
    parser.add_argument("--seeds", type=int, default=5, help="how often all of it is done")
    parser.add_argument("--output", type=Path, default=Path("outputs/lora.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.seeds, arguments.small, arguments.output)
