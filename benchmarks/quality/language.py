"""Language models that answer: adapters (LoRA) that were trained until the network is too sure, and their posterior.

- Questions: a GPT-2 of two layers learns here to read a few words, and to name the letter before the kind that most of
  them are of. Its adapters then learn 200 questions by heart whose words are mostly of other kinds than the answer's.
- Reactions: adapters in the last two layers of a BERT that read chemical reactions learn 400 of them and their class.
  It needs the packages of `make pretrained`. The layers before have no adapters, and run once.

Beside the network are a temperature, and the posterior of the adapters that `la.calibrate` chooses, on the same 200
validation data: with the probit link, which reads variances of single logits, with samples of all logits, and with the
one of the two links that has the smaller loss on the validation data, which the targets are about.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.methods import CALIBRATE, NETWORK, TEMPERATURE, best_temperature, in_words
from benchmarks.quality.scores import losses, paired, scores
from benchmarks.quality.targets import Target, difference, mean_and_error, values
from laplace import Laplace, metrics
from laplace.errors import LaplaceWarning

Batch = dict[str, Tensor]
Outputs = Callable[[Any, Batch], Tensor]
N_VAL, LEAST_GAP, N_SAMPLES = 200, 0.1, 200
N_TEST = {"questions": 1000, "reactions": 500}
TITLES = {"calibrate": "calibrate, the link with the smaller validation NLL"}
LINKS = {"probit": "calibrate, probit", "mc": "calibrate, mc"}
NAMES = QUESTIONS, REACTIONS = "questions", "reactions"
N_SEEDS = {QUESTIONS: 5, REACTIONS: 3}
NETWORKS = {QUESTIONS: "GPT-2 of two layers, LoRA", REACTIONS: "BERT of reactions, LoRA"}

KINDS, N_WORDS, LONGEST = ("animal", "tool", "food", "plant"), 12, 9
LETTERS = ("A", "B", "C", "D")
WORDS = ("[pad]", *(f"{kind}{i}" for kind in KINDS for i in range(N_WORDS)), *KINDS, *LETTERS, "which?", "answer:")
N_QUESTIONS, N_REACTIONS, KEPT_LAYERS = 200, 400, 2


class Words:
    """A tokenizer of whole words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Numbers of the words of a text."""
        return [WORDS.index(word) for word in text.split()]


def questions(n: int, purity: float, generator: torch.Generator) -> Batch:
    """Questions with their answers: words of the asked kind with this probability, of any kind otherwise."""
    kind = torch.randint(len(KINDS), (n, 1), generator=generator)
    of_any = torch.randint(len(KINDS), (n, LONGEST), generator=generator)
    shown = torch.where(torch.rand(n, LONGEST, generator=generator) < purity, kind, of_any)
    words = 1 + shown * N_WORDS + torch.randint(N_WORDS, (n, LONGEST), generator=generator)
    order = torch.stack([torch.randperm(len(KINDS), generator=generator) for _ in range(n)])
    letters = torch.arange(len(KINDS)).expand(n, -1) + WORDS.index(LETTERS[0])
    choices = torch.stack([letters, order + WORDS.index(KINDS[0])], 2).flatten(1)
    asked, answer = (torch.full((n, 1), WORDS.index(word)) for word in ("which?", "answer:"))
    tokens = torch.cat([words, asked, choices, answer], 1)
    length = torch.randint(5, LONGEST + 1, (n, 1), generator=generator)
    mask = (torch.arange(tokens.shape[1]) >= LONGEST - length).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": (order == kind).long().argmax(1)}


def language_model(n_steps: int) -> nn.Module:
    """Trained to predict every next word of clear questions, the answer at last."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=64, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model, generator = GPT2LMHeadModel(config), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(n_steps, 2))
    for _ in range(n_steps):
        batch = questions(128, 0.9, generator)
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        following = torch.cat([tokens[:, 1:], batch["labels"].unsqueeze(1) + WORDS.index(LETTERS[0])], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.where(mask == 1, -100).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def parts(data: Batch, n_train: int) -> tuple[Batch, Batch, Batch]:
    """Training, validation and test data."""
    sizes = (n_train, N_VAL, len(data["labels"]) - n_train - N_VAL)
    pieces = {key: value.split(sizes) for key, value in data.items()}
    first, second, third = ({key: value[i] for key, value in pieces.items()} for i in range(3))
    return first, second, third


def batches(data: Batch, size: int = 50, order: Tensor | None = None) -> Iterator[Batch]:
    """Batches as long as their longest text."""
    for where in (torch.arange(len(data["labels"])) if order is None else order).split(size):
        batch = {key: value[where] for key, value in data.items()}
        used = batch["attention_mask"].any(0)
        yield {key: value if key == "labels" else value[:, used] for key, value in batch.items()}


def adapted(
    model: nn.Module, task: str, layers: list[str], *, outputs: Outputs, wrap: Callable[[nn.Module], nn.Module],
    train: Batch, epochs: int, lr: float,
) -> nn.Module:  # fmt: skip
    """The network with adapters that have learnt the training data."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type=task, r=8, lora_alpha=16, target_modules=layers, fan_in_fan_out=task == "CAUSAL_LM"
    )  # fmt: skip
    network = wrap(get_peft_model(model, config)).eval()  # type: ignore[arg-type]
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    for _ in range(epochs):
        for batch in batches(train, order=torch.randperm(len(train["labels"]))):
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs(network, batch), batch["labels"]).backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
    return network


def columns(network: nn.Module, outputs: Outputs, train: Batch, val: Batch, test: Batch) -> list[dict[str, Any]]:
    """Network, temperature and posterior on the test data: scores, and the paired difference of each from each."""
    with torch.no_grad():
        val_logits, logits = (torch.cat([outputs(network, batch) for batch in batches(part)]) for part in (val, test))
    temperature = best_temperature(nn.Identity(), (val_logits, val["labels"]))
    la: Any = Laplace(network, "classification", "all", "lowrank_kron")
    la.fit(list(batches(train)))
    predicted = {
        NETWORK: (logits.softmax(1), ""),
        TEMPERATURE: ((logits / temperature).softmax(1), f"T = {temperature:.3g}"),
    }
    forecasts: dict[str, float] = {}
    for link, method in LINKS.items():
        options: Any = {"link_approx": link, "n_samples": N_SAMPLES}
        chosen = la.calibrate(list(batches(val)), **options)
        source = torch.Generator().manual_seed(0)
        probs = torch.cat([la(batch, generator=source, **options) for batch in batches(test)])
        predicted[method] = (probs.detach(), in_words(chosen))
        forecasts[method] = chosen.posterior_nll
        chosen.undo()
    best = min(forecasts, key=lambda method: forecasts[method])
    predicted[CALIBRATE] = (predicted[best][0], f"{best}: {predicted[best][1]}")
    lost = {method: losses(probs, test["labels"]) for method, (probs, _) in predicted.items()}
    return [
        {
            "method": method,
            "posterior": "LoRA, lowrank_kron" if method.startswith(CALIBRATE) else "",
            "chosen": words,
            **scores(probs, test["labels"]),
            "confidence": float(metrics.mean_confidence(probs)),
            "paired": paired(lost[method], lost[NETWORK]),
            "to temperature": paired(lost[method], lost[TEMPERATURE]),
            "shifts": {},
        }
        for method, (probs, words) in predicted.items()
    ]


def of_questions(seed: int, language: nn.Module, *, quick: bool) -> list[dict[str, Any]]:
    """The columns on questions of one seed."""
    import copy

    from laplace.integrations.transformers import answers

    source = torch.Generator().manual_seed(100 + seed)
    data = questions(N_QUESTIONS + N_VAL + (50 if quick else N_TEST[QUESTIONS]), 0.5, source)
    train, val, test = parts(data, N_QUESTIONS)
    torch.manual_seed(seed)

    def outputs(network: Any, batch: Batch) -> Tensor:
        return network(batch)

    network = adapted(
        copy.deepcopy(language), "CAUSAL_LM", ["c_attn"], outputs=outputs, train=train, epochs=2 if quick else 60,
        lr=5e-3, wrap=lambda model: answers(model, Words(), LETTERS),
    )  # fmt: skip
    return columns(network, outputs, train, val, test)


class Given(nn.Module):
    """Stands where a network has embeddings: what it is given has passed them, and the first layers, before."""

    def forward(self, inputs_embeds: Tensor, **rest: Any) -> Tensor:
        """The same."""
        return inputs_embeds


def of_reactions(seed: int, *, quick: bool) -> list[dict[str, Any]]:
    """The columns on reactions of one seed."""
    from examples import pretrained_data

    reactions, classes = pretrained_data.reactions()
    order = torch.randperm(len(reactions), generator=torch.Generator().manual_seed(seed))
    order = order[: N_REACTIONS + N_VAL + (50 if quick else N_TEST[REACTIONS])]
    tokens = pretrained_data.smiles_tokens([reactions[i] for i in order.tolist()])
    torch.manual_seed(seed)
    model: Any = pretrained_data.reaction_bert(int(classes.max()) + 1)
    size = tokens["input_ids"].shape[1]
    with torch.no_grad():
        hidden = [
            model.bert(**batch, output_hidden_states=True).hidden_states[-1 - KEPT_LAYERS]
            for batch in (
                {key: value for key, value in each.items() if key != "labels"}
                for each in batches({**tokens, "labels": classes[order]})
            )
        ]
    embeddings = torch.cat([nn.functional.pad(part, (0, 0, 0, size - part.shape[1])) for part in hidden])
    data = {"inputs_embeds": embeddings, "attention_mask": tokens["attention_mask"], "labels": classes[order]}
    model.bert.embeddings = Given()
    model.bert.encoder.layer = model.bert.encoder.layer[-KEPT_LAYERS:]
    train, val, test = parts(data, N_REACTIONS)

    def outputs(network: Any, batch: Batch) -> Tensor:
        return network(inputs_embeds=batch["inputs_embeds"], attention_mask=batch["attention_mask"]).logits

    network = adapted(
        model, "SEQ_CLS", ["query", "value"], outputs=outputs, train=train, epochs=1 if quick else 30, lr=3e-3,
        wrap=lambda adapted_model: adapted_model,
    )  # fmt: skip
    return columns(network, outputs, train, val, test)


def run(name: str, *, quick: bool) -> dict[str, Any]:
    """One row, with the seconds of processor time that it took."""
    torch.set_num_threads(1)
    start, splits = time.process_time(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)
        warnings.simplefilter("ignore", FutureWarning)  # of transformers
        language = language_model(2 if quick else 2000) if name == QUESTIONS else nn.Identity()
        for seed in range(1 if quick else N_SEEDS[name]):
            found = of_questions(seed, language, quick=quick) if name == QUESTIONS else of_reactions(seed, quick=quick)
            splits.append(found)
            print(f"{name}, seed {seed}: {time.process_time() - start:.0f} s", flush=True)
    n_train = N_QUESTIONS if name == QUESTIONS else N_REACTIONS
    return {
        "name": name, "network": NETWORKS[name], "sizes": [n_train, N_VAL, N_TEST[name]], "splits": splits,
        "seconds": time.process_time() - start,
    }  # fmt: skip


def table(row: dict[str, Any] | None) -> str:
    """Means and standard errors over the seeds."""
    if row is None:
        return "Not run."
    first = f"{row['network']}, {len(row['splits'])} seeds"
    lines = [
        f"| {first} | NLL | less the temperature's | ECE (floor) | confidence | accuracy |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for method in (NETWORK, TEMPERATURE, *LINKS.values(), CALIBRATE):
        nll, ece, floor, sure, right = (
            mean_and_error(values(row, method, score))
            for score in ("nll", "ece", "ece_floor", "confidence", "accuracy")
        )
        gap, error = against_temperature(row, method)
        lines.append(
            f"| {TITLES.get(method, method)} | {nll[0]:.3f} ± {nll[1]:.3f} | {gap:+.3f} ± {error:.3f} | "
            f"{ece[0]:.3f} ({floor[0]:.3f}) | "
            f"{sure[0]:.3f} | {right[0]:.3f} ± {right[1]:.3f} |"
        )
    return "\n".join(lines)


def against_temperature(row: dict[str, Any], method: str) -> tuple[float, float]:
    """Mean difference of the NLL from the temperature's over all seeds, and its paired standard error."""
    pairs = [line["to temperature"] for split in row["splits"] for line in split if line["method"] == method]
    n = len(pairs)
    return sum(mean for mean, _ in pairs) / n, sum(error**2 for _, error in pairs) ** 0.5 / n


def targets(row: dict[str, Any] | None, name: str) -> list[Target]:
    """The premise, and what the posterior is to reach."""
    texts = [
        f"{name}: the premise, confidence above accuracy by {LEAST_GAP}",
        f"{name}: ECE of the posterior 60 % below the network's, or at most its noise floor",
        f"{name}: NLL of the posterior at most the temperature's + 1 paired standard error",
        f"{name}: accuracy of the posterior at least the network's − 0.5 points",
    ]
    if row is None:
        return [Target(text, "no row", None) for text in texts]
    sure, right = (mean_and_error(values(row, NETWORK, score))[0] for score in ("confidence", "accuracy"))
    ece, ours, floor = (
        mean_and_error(values(row, method, score))[0]
        for method, score in ((NETWORK, "ece"), (CALIBRATE, "ece"), (CALIBRATE, "ece_floor"))
    )
    gap, error = against_temperature(row, CALIBRATE)
    change, _ = difference(row, CALIBRATE, "accuracy")
    found = [
        (f"{sure - right:.3f}", sure - right >= LEAST_GAP),
        (f"{ece:.3f} → {ours:.3f}, {ours / ece - 1:+.0%}; floor {floor:.3f}", ours <= max(0.4 * ece, floor)),
        (f"{gap:+.4f} ± {error:.4f}", gap <= error),
        (f"{100 * change:+.2f} points", change >= -0.005),
    ]
    return [Target(text, *each) for text, each in zip(texts, found, strict=True)]
