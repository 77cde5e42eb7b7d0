"""A posterior at the end of training by the `Trainer` of transformers, by a callback.

A small vision transformer learns the digits of scikit-learn, seen through a noisy sensor. `LaplaceCallback` fits the
posterior of its last layer to the trainer's own data when training ends, chooses the prior by the evidence, and saves
`la.state_dict()` beside the checkpoints; a wrong argument would have stopped training before its first step.

    python examples/with_trainer.py
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from laplace.extensions.plotting import new_figure, reliability_diagram
from laplace.integrations.transformers import LaplaceCallback
from laplace.metrics import accuracy, expected_calibration_error, nll

NOISE, N_TRAIN = 0.4, 500


def digits() -> tuple[Tensor, Tensor]:
    """Images `[N, 1, 8, 8]` with noise, and labels `[N]`, in an order at random."""
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    source = torch.Generator().manual_seed(0)
    x = x.float() / 16 + NOISE * torch.randn(x.shape, generator=source)
    order = torch.randperm(len(x), generator=source)
    return x[order].view(-1, 1, 8, 8), y[order]


def train(x: Tensor, y: Tensor, callback: LaplaceCallback, n_epochs: int, folder: Path) -> Any:
    """A network that the `Trainer` has trained."""
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=2,
        num_channels=1, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    rows = [{"pixel_values": image, "labels": label} for image, label in zip(x, y, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own, about workers and pinned memory
        arguments = TrainingArguments(
            output_dir=str(folder), num_train_epochs=n_epochs, per_device_train_batch_size=50, learning_rate=3e-3,
            use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(ViTForImageClassification(config), arguments, train_dataset=rows, callbacks=[callback])
        trainer.train()
    return trainer.model.eval()


def main(small: bool = False, output: Path = Path("outputs/with_trainer.png")) -> dict[str, list[float]]:
    """Trains, prints and returns NLL, ECE and accuracy by model.

    Args:
        small: Train for an epoch only, to try the script out.
        output: Where the plot goes.
    """
    torch.manual_seed(0)
    x, y = digits()
    callback = LaplaceCallback("classification", tuning={}, dict_key_x="pixel_values")
    with tempfile.TemporaryDirectory() as folder:
        model = train(x[:N_TRAIN], y[:N_TRAIN], callback, 1 if small else 80, Path(folder))
        saved = sorted(path.name for path in Path(folder).glob("*.pt"))
    print(f"the trainer's folder holds {', '.join(saved)}; fitted to {callback.la.n_data} data")

    inputs, labels = {"pixel_values": x[N_TRAIN:]}, y[N_TRAIN:]
    with torch.no_grad():
        predicted = {"network": model(**inputs).logits.softmax(1), "laplace": callback.la(inputs)}
    metrics = (nll, expected_calibration_error, accuracy)
    scores = {name: [float(score(p, labels)) for score in metrics] for name, p in predicted.items()}
    print(f"{'':<10}{'NLL':>8}{'ECE':>8}{'accuracy':>10}")
    for name, row in scores.items():
        print(f"{name:<10}{row[0]:>8.3f}{row[1]:>8.3f}{row[2]:>10.3f}")
    figure, (axis,) = new_figure(n_columns=1, width=3.6, height=3.4)
    reliability_diagram(axis, predicted, labels)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="hardly any training")
    parser.add_argument("--output", type=Path, default=Path("outputs/with_trainer.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
