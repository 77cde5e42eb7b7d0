"""A fine-tuned transformer: adapters (LoRA) in a BERT that read chemical reactions, for measured energies of hydration.

It needs the packages of `make pretrained`. Training takes one and a half minutes a seed on one core; the adapters are
kept in the system's folder for temporary files.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.methods import CALIBRATE, EVIDENCE, NETWORK, Column, in_words, with_noise
from benchmarks.quality.scores import losses, paired, scores
from laplace import Laplace
from laplace.errors import LaplaceWarning

Batch = dict[str, Tensor]
N_TRAIN, N_VAL, N_SEEDS, EPOCHS = 400, 100, 5, 12
NAME, MODEL = "FreeSolv", "BERT of reactions, LoRA"


def split(seed: int) -> tuple[Batch, Batch, Batch]:
    """Training, validation and test molecules with standardised energies `[N, 1]`."""
    from examples import pretrained_data

    smiles, energies = pretrained_data.freesolv()
    order = torch.randperm(len(smiles), generator=torch.Generator().manual_seed(seed))
    tokens = pretrained_data.smiles_tokens(smiles)
    train = energies[order[:N_TRAIN]]
    rows = {**tokens, "labels": ((energies - train.mean()) / train.std()).unsqueeze(1)}
    ends = (0, N_TRAIN, N_TRAIN + N_VAL, len(smiles))
    first, second, third = ({key: v[order[a:b]] for key, v in rows.items()} for a, b in pairwise(ends))
    return first, second, third


def batches(data: Batch, order: Tensor | None = None, size: int = 32) -> Iterator[Batch]:
    """Batches as long as their longest molecule."""
    places = torch.arange(len(data["labels"])) if order is None else order
    for where in places.split(size):
        length = int(data["attention_mask"][where].sum(1).max())
        yield {key: v[where] if key == "labels" else v[where, :length] for key, v in data.items()}


def adapted(train: Batch, val: Batch, seed: int, epochs: int) -> Any:
    """The network with the adapters of the epoch with the smallest validation error, in evaluation mode."""
    from examples import pretrained_data

    path = Path(tempfile.gettempdir()) / "laplace-pretrained" / f"freesolv_lora_{seed}_{epochs}.pt"
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")  # the packages' own
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        config = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
        model: Any = get_peft_model(pretrained_data.reaction_bert(1), config)  # type: ignore[arg-type]
        if not path.exists():
            kept = _best_epoch(model, train, val, epochs)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(kept, path)
    model.load_state_dict(torch.load(path, weights_only=True), strict=False)
    return model.eval()


def _best_epoch(model: Any, train: Batch, val: Batch, epochs: int) -> dict[str, Tensor]:
    """Trains, and returns the trained weights of the epoch with the smallest validation error."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, weight_decay=0.01)
    best, kept = float("inf"), {}
    for _ in range(epochs):
        model.train()
        for batch in batches(train, torch.randperm(len(train["labels"]))):
            optimizer.zero_grad()
            nn.functional.mse_loss(outputs(model, batch), batch["labels"]).backward()
            nn.utils.clip_grad_norm_(weights.values(), 1.0)
            optimizer.step()
        model.eval()
        error = float((collected(model, val) - val["labels"]).square().mean())
        if error < best:
            best, kept = error, {name: weight.detach().clone() for name, weight in weights.items()}
    return kept


def outputs(model: Any, batch: Batch) -> Tensor:
    """The network's outputs, `[B, 1]`."""
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


@torch.no_grad()
def collected(model: Any, data: Batch) -> Tensor:
    """The outputs of all data, `[N, 1]`."""
    return torch.cat([outputs(model, batch) for batch in batches(data)])


def _columns(model: Any, train: Batch, val: Batch, test: Batch) -> Iterator[tuple[Column, Any]]:
    """Columns with their predictions of the test data."""
    predict = with_noise(lambda data: [collected(model, data)], (val, val["labels"]))
    yield Column(NETWORK, "", predict), predict(test)
    for method in (EVIDENCE, CALIBRATE):
        la: Any = Laplace(model, "regression")
        la.fit(list(batches(train)))
        if method == EVIDENCE:
            la.optimize_hyperparameters(("prior_precision", "sigma_noise"))
            chosen = f"δ = {float(la.prior_precision):.3g}, σ = {float(la.sigma_noise):.3g}"
        else:
            chosen = in_words(la.calibrate(list(batches(val))))
        found = [la.predict(batch) for batch in batches(test)]
        predicted = torch.cat([part.mean for part in found]), torch.cat([part.variance for part in found])
        yield Column(method, "LoRA, lowrank_kron", predict, chosen), predicted


def measured(seed: int, epochs: int = EPOCHS) -> list[dict[str, Any]]:
    """The columns on one split: method, posterior, what was chosen, and scores."""
    train, val, test = split(seed)
    model = adapted(train, val, seed, epochs)
    found: list[dict[str, Any]] = []
    network: Tensor | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)
        for column, predicted in _columns(model, train, val, test):
            lost = losses(predicted, test["labels"])
            network = lost if network is None else network
            line = {"method": column.method, "posterior": column.posterior, "chosen": column.chosen}
            found.append({**line, **scores(predicted, test["labels"]), "paired": paired(lost, network), "shifts": {}})
    return found


def run(*, quick: bool) -> dict[str, Any]:
    """The row of the table, with the seconds of processor time that it took."""
    torch.set_num_threads(1)
    start = time.process_time()
    splits = []
    for seed in range(1 if quick else N_SEEDS):
        splits.append(measured(seed, 1 if quick else EPOCHS))
        print(f"{NAME}, seed {seed}: {time.process_time() - start:.0f} s", flush=True)
    sizes = [len(part["labels"]) for part in split(0)]
    return {
        "name": NAME, "network": MODEL, "sizes": sizes, "splits": splits, "seconds": time.process_time() - start,
    }  # fmt: skip
