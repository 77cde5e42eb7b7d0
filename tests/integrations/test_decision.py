"""Decisions on frozen models: features of texts and batches, labels, own answers, thresholds, files, bad input."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import laplace
from laplace.errors import (
    DataWarning,
    InvalidArgument,
    InvalidData,
    InvalidType,
    ModelChangedError,
    NotFittedError,
    StateError,
    UnsupportedError,
)
from laplace.integrations.decision import Decision, _certified, decision, load

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

NAMES = ["bad", "good"]
GOOD, BAD, OTHER = "fine great lovely".split(), "awful poor dull".split(), "film plot cast the a of . :".split()
LETTERS = list("ABCDE")
WORDS = ["[unk]", *GOOD, *BAD, *OTHER, *LETTERS, "Answer:", "so?", *NAMES]


def tokenizer() -> Any:
    """Of whole words, without a token for pads."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[unk]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[unk]")


def bert(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def reviews(n: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Texts of three to six words, and what they say."""
    source = np.random.default_rng(seed)
    labels = source.integers(2, size=n)
    texts = [
        " ".join([*source.choice(OTHER, source.integers(1, 4)), *source.choice(GOOD if y else BAD, 2)]) for y in labels
    ]
    return texts, [NAMES[y] for y in labels]


def X(n: int = 20) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def fitted() -> Decision:
    texts, labels = reviews(40)
    return decision(bert(), tokenizer(), NAMES).fit(texts, labels)


# Features.


@pytest.mark.parametrize(("make", "pool"), [(bert, None), (bert, "last"), (gpt2, None), (gpt2, "mean")])
def test_features_are_the_hidden_states_of_each_text_alone(make: Any, pool: str | None) -> None:
    """In batches with pads they are the same; models that write have their last token, others the mean."""
    model, own = make(), tokenizer()
    texts, _ = reviews(7)
    head = decision(model, own, NAMES, pool=pool, batch_size=3)
    base = model if make is bert else model.transformer
    for text, found in zip(texts, head.features([*texts, texts[0]]), strict=False):
        states = base(input_ids=torch.tensor([own(text)["input_ids"]])).last_hidden_state[0]
        expected = states.mean(0) if (pool or ("mean" if make is bert else "last")) == "mean" else states[-1]
        assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_pads_on_the_left_change_nothing(make: Any) -> None:
    texts, _ = reviews(6)
    head, own = decision(make(), tokenizer(), NAMES), tokenizer()
    tokens = [own(text)["input_ids"] for text in texts]
    longest = max(map(len, tokens))
    batch = {
        "input_ids": torch.tensor([[0] * (longest - len(row)) + row for row in tokens]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in tokens]),
    }
    assert_close(head.features(batch), head.features(texts), rtol=1e-4, atol=1e-5)
    assert_close(head.features([batch, batch])[6:], head.features(texts), rtol=1e-4, atol=1e-5)


def test_modules_and_features_are_taken_as_they_are() -> None:
    network = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    of_network = decision(network, None, NAMES).fit(x, y)
    of_batches = decision(network, None, NAMES).fit(list(zip(x.split(8), y.split(8), strict=True)))
    of_features = decision(None, None, NAMES).fit(network(x), y)
    assert_close(of_network(x), of_features(network(x)), rtol=1e-4, atol=1e-5)
    assert_close(of_batches(x), of_network(x), rtol=1e-4, atol=1e-5)
    assert_close(of_features(network(x).detach().numpy()), of_features(network(x)))


def test_long_texts_are_cut_to_what_the_model_reads() -> None:
    head = decision(bert(), tokenizer(), NAMES)
    assert_close(head.features([" ".join(GOOD * 20)]), head.features([" ".join((GOOD * 20)[:32])]))


def test_a_model_in_training_mode_is_put_back() -> None:
    model = bert()
    expected = decision(model, tokenizer(), NAMES).features(["a fine film"])
    model.train()
    model.pooler.eval()
    modes = [module.training for module in model.modules()]
    head = decision(model, tokenizer(), NAMES)
    assert torch.equal(head.features(["a fine film"]), expected)
    assert [module.training for module in model.modules()] == modes


def test_a_question_is_read_after_the_text() -> None:
    head = decision(gpt2(), tokenizer(), NAMES, question="so?")
    plain = decision(gpt2(), tokenizer(), NAMES)
    assert_close(head.features(["a fine film"]), plain.features(["a fine film\n\nso?"]))


def test_a_question_is_read_after_the_texts_of_batches() -> None:
    texts, labels = reviews(40)
    whole = decision(gpt2(), tokenizer(), NAMES, question="so?").fit(texts, labels)
    batches = [(texts[:25], labels[:25]), (texts[25:], labels[25:])]
    parts = decision(gpt2(), tokenizer(), NAMES, question="so?").fit(batches)
    assert_close(parts(texts), whole(texts))
    assert_close(whole.features(batches), whole.features(texts))
    assert_close(whole.features([texts[:9], texts[9:]]), whole.features(texts))


def test_batches_may_hold_more_than_tensors() -> None:
    texts, labels = reviews(12)
    batch = decision(bert(), tokenizer(), NAMES)._encoder.padded([{"input_ids": [k % 5, 1, 2]} for k in range(12)])
    given = {**batch, "text": texts, "labels": labels}
    plain = decision(bert(), tokenizer(), NAMES).fit([batch], labels)
    assert_close(decision(bert(), tokenizer(), NAMES).fit([given])([given]), plain(batch))


def test_frames_and_series_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    texts, labels = reviews(20)
    head = decision(bert(), tokenizer(), NAMES).fit(pandas.Series(texts), pandas.Series(labels))
    assert torch.equal(head(pandas.Series(texts)), head(texts))
    frame = pandas.DataFrame(X().numpy(), columns=["a", "b", "c"])
    of_frame, of_tensor = (decision(None, None, NAMES).fit(x, [0, 1] * 10) for x in (frame, X()))
    assert torch.equal(of_frame(frame), of_tensor(X()))


def test_a_question_is_read_after_a_long_text() -> None:
    """BERT's 32 tokens, of which the question is one and its specials none here."""
    head = decision(bert(), tokenizer(), NAMES, question="so?")
    plain = decision(bert(), tokenizer(), NAMES)
    long = " ".join((GOOD + OTHER) * 9)
    assert_close(head.features([long, "film"]), plain.features([" ".join([*long.split()[:31], "so?"]), "film so?"]))
    short = decision(gpt2(), tokenizer(), NAMES, question="so? the plot", max_length=2)
    assert_close(short.features(["fine"]), decision(gpt2(), tokenizer(), NAMES).features(["the plot"]))


def test_the_last_token_is_the_last_that_is_attended_to() -> None:
    tokens, model = torch.tensor([[1, 2, 3, 4]]), gpt2()
    mask = torch.tensor([[1, 1, 0, 1]])
    expected = model.transformer(input_ids=tokens, attention_mask=mask).last_hidden_state[:, 3].detach()
    found = decision(model, None, NAMES).features({"input_ids": tokens, "attention_mask": mask})
    assert_close(found, expected)


def test_embeddings_go_to_the_left_with_their_mask() -> None:
    model = gpt2()
    tokens, mask = torch.tensor([[0, 0, 1, 2, 3]]), torch.tensor([[0, 0, 1, 1, 1]])
    given = {"inputs_embeds": model.transformer.wte(tokens).detach(), "attention_mask": mask}
    expected = model.transformer(input_ids=tokens[:, 2:]).last_hidden_state[:, -1].detach()
    assert_close(decision(model, None, NAMES).features(given), expected, rtol=1e-4, atol=1e-5)


# Labels.


def test_probabilities_and_all_that_follows(fitted: Decision) -> None:
    texts, labels = reviews(30, seed=5)
    probabilities = fitted(texts)
    assert probabilities.dtype == torch.float32 and probabilities.shape == (30, 2)
    assert_close(probabilities.sum(1), torch.ones(30))
    assert np.mean([a == b for a, b in zip(fitted.choose(texts), labels, strict=True)]) > 0.9
    prediction = fitted.predict(texts, generator=torch.Generator().manual_seed(0))
    assert_close(prediction.probabilities.float(), probabilities)
    assert bool((prediction.decomposition.mutual_information > 0).all())
    pool = fitted.features(texts)
    assert len(laplace.acquire(fitted.la, pool, 3).indices) == 3
    assert laplace.ood_score(fitted.la, pool).shape == (30,)
    assert "40 labels" in repr(fitted)


@pytest.mark.parametrize("kind", ["indices", "tensor", "array"])
def test_labels_may_be_indices(fitted: Decision, kind: str) -> None:
    texts, labels = reviews(40)
    numbers = [NAMES.index(label) for label in labels]
    given: Any = {"indices": numbers, "tensor": torch.tensor(numbers), "array": np.array(labels)}[kind]
    again = decision(bert(), tokenizer(), NAMES).fit(texts, given)
    assert torch.equal(again(texts), fitted(texts))


def test_numbers_that_are_choices_are_no_indices() -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    stars = [1, 2] * 10
    head = decision(None, None, [1, 2, 3])
    with pytest.warns(DataWarning, match="no label is 3"):
        head.fit(x, stars)
    assert head.fitted.targets.tolist() == [0, 1] * 10
    with pytest.raises(InvalidData, match="0"):
        head.fit(x, [0, 1] * 10)


def test_a_choice_without_a_label_is_said_and_rare() -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(DataWarning, match="no label is 'c'"):
        head = decision(None, None, "a b c".split()).fit(x, [0, 1] * 15)
    assert 0 < float(head(x)[:, 2].mean()) < 0.1


def test_classes_may_count_more() -> None:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    y = [0] * 34 + [1] * 6
    plain, even = (decision(None, None, NAMES, class_weight=w).fit(x, y) for w in (None, "balanced"))
    assert float(even(x)[:, 1].mean()) > 2 * float(plain(x)[:, 1].mean())
    by_name = decision(None, None, NAMES, class_weight={"bad": 40 / 68, "good": 40 / 12}).fit(x, y)
    assert_close(by_name(x), even(x))


def test_many_classes() -> None:
    source = torch.Generator().manual_seed(0)
    y = torch.arange(100).repeat(2)
    x = 3 * torch.randn(100, 16, generator=source)[y] + 0.3 * torch.randn(200, 16, generator=source)
    head = decision(None, None, list(range(100))).fit(x[:150], y[:150].tolist())
    assert float((head(x[150:]).argmax(1) == y[150:]).float().mean()) > 0.8


def test_ten_labels_are_enough_of_more_choices_than_labels() -> None:
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(DataWarning, match="and 7 more"):
        head = decision(None, None, list(range(20))).fit(x, list(range(10)))
    assert_close(head(x).sum(1), torch.ones(10))


def test_ratings_have_means_and_intervals() -> None:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(260, 5, generator=source)
    y = 3 + 2 * x[:, 0] + torch.randn(260, generator=source)
    head = decision(None, None, None).fit(x[:60], y[:60])
    mean, variance = head(x[60:])
    assert mean.shape == variance.shape == (200, 1) and mean.dtype == torch.float32
    lower, upper = head.predict(x[60:]).interval(0.9)
    inside = ((lower.squeeze(1) <= y[60:]) & (y[60:] <= upper.squeeze(1))).double().mean()
    assert abs(float(inside) - 0.9) < 2 * math.sqrt(0.09 / 200) + 0.03
    with pytest.raises(UnsupportedError, match="interval"):
        head.threshold(0.1)


# Without labels.


def test_own_answers_are_averaged_over_rotations() -> None:
    """Of every order of the choices the probabilities of the letters, by the model itself."""
    model, own = gpt2(), tokenizer()
    choices = ["a fine film", "a poor film", "a plot"]  # of several tokens, two of which begin alike
    head = decision(model, own, choices, question="so?")
    found = head(["the cast", "of lovely plot"])
    expected = torch.zeros(2, 3)
    for row, text in enumerate(["the cast", "of lovely plot"]):
        for turn in range(3):
            order = [(k + turn) % 3 for k in range(3)]
            listed = "\n".join(f"{letter}. {choices[k]}" for letter, k in zip("ABC", order, strict=True))
            tokens = torch.tensor([own(f"{text}\n\nso?\n{listed}\nAnswer:")["input_ids"]])
            logits = model(input_ids=tokens).logits[0, -1, [WORDS.index(letter) for letter in "ABC"]]
            expected[row, order] += logits.softmax(0).detach() / 3
    assert_close(found.float(), expected, rtol=1e-4, atol=1e-5)


def test_own_answers_do_not_depend_on_the_order_of_choices() -> None:
    model = gpt2()
    one = decision(model, tokenizer(), ["fine", "poor", "dull"])(["the film"])
    other = decision(model, tokenizer(), ["poor", "dull", "fine"])(["the film"])
    assert_close(one[:, [1, 2, 0]], other)


def test_own_answers_stay_below_ten_labels() -> None:
    texts, labels = reviews(9)
    head = decision(gpt2(), tokenizer(), NAMES)
    own = head(texts)
    with pytest.warns(DataWarning, match="9 labels are fewer than 10"):
        head.fit(texts, labels)
    assert not head.is_fitted and torch.equal(head(texts), own)
    with pytest.raises(NotFittedError, match="10 or more"):
        _ = head.la
    head.fit(*reviews(12))
    assert head.is_fitted and not torch.equal(head(texts), own.float())


def test_models_that_do_not_write_have_no_answers() -> None:
    head = decision(bert(), tokenizer(), NAMES)
    with pytest.raises(NotFittedError, match="writes no text"):
        head(["a film"])
    with pytest.raises(UnsupportedError, match="writes no text"):
        head.fit(*reviews(9))
    with pytest.raises(NotFittedError, match=r"head\.fit"):
        decision(None, None, NAMES)(torch.zeros(3, 2))


# Answer or pass on.


def test_a_threshold_holds_its_risk_with_its_confidence() -> None:
    """Of probabilities that are right, 400 draws: violations at most as often as said, up to two standard errors."""
    source = torch.Generator().manual_seed(0)
    violated, answered = 0, 0.0
    for _ in range(400):
        p = 0.5 + 0.5 * torch.rand(200, generator=source, dtype=torch.float64)
        wrong = (torch.rand(200, generator=source, dtype=torch.float64) > p).long()
        found = _certified(torch.stack([p, 1 - p], 1), wrong, 0.1, 0.9, "")
        risk = (1 - found.value) / 2 if found.value < 1 else 0.0
        violated += risk > 0.1
        answered += found.coverage / 400
    assert violated / 400 <= 0.1 + 2 * math.sqrt(0.09 / 400)
    assert 0.08 < answered < 0.4  # 40 % could be answered


def test_a_threshold_of_left_out_and_of_held_out_data() -> None:
    texts, labels = reviews(120)
    head = decision(bert(), tokenizer(), NAMES).fit(texts, labels)
    left, held = head.threshold(0.1, 0.9), head.threshold(0.1, 0.9, inputs=reviews(90, 3)[0], labels=reviews(90, 3)[1])
    assert "left out" in left.guarantee and "held-out" in held.guarantee
    assert 0.5 <= float(left) <= 1 and left.coverage > 0.5 and held.n_data == 90
    chosen = head.choose(texts, left)
    assert [answer is not None for answer in chosen] == left.answers(head(texts)).tolist()
    few = decision(bert(), tokenizer(), NAMES).fit(*reviews(12)).threshold(0.05, 0.9)
    assert float(few) == math.inf and few.coverage == 0


def test_a_threshold_needs_a_label_for_every_input(fitted: Decision) -> None:
    for labels in (["good"], ["good"] * 5):
        with pytest.raises(InvalidData, match="30 inputs and"):
            fitted.threshold(0.1, inputs=reviews(30)[0], labels=labels)


def test_a_risk_below_what_the_data_can_show_answers_nothing(fitted: Decision) -> None:
    assert float(fitted.threshold(1e-12)) == math.inf


@pytest.mark.parametrize("wrong", [{"risk": 0.0}, {"risk": 1.0}, {"risk": 0.1, "confidence": 1.0}])
def test_thresholds_of_other_numbers_are_refused(fitted: Decision, wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match=r"\(0, 1\)"):
        fitted.threshold(**wrong)


# Files.


@pytest.mark.parametrize("weight", [None, "balanced", {"good": 2.0}, np.array([1.0, 2.0])])
def test_a_file_predicts_the_same(tmp_path: Path, weight: Any) -> None:
    pytest.importorskip("safetensors")
    texts, labels = reviews(30)
    head = decision(bert(), tokenizer(), NAMES, question="so?", class_weight=weight).fit(texts, labels)
    head.save(tmp_path / "head.safetensors")
    again = load(tmp_path / "head.safetensors", bert(), tokenizer())
    assert torch.equal(again(texts), head(texts))
    assert again.choices == head.choices and float(again.threshold(0.2)) == float(head.threshold(0.2))
    assert_close(again.la(again.features(texts)), head.la(head.features(texts)))
    with pytest.raises(ModelChangedError, match="not those of the fit"):
        load(tmp_path / "head.safetensors", bert(seed=1), tokenizer())(texts)
    with pytest.raises(InvalidArgument, match="with a model"):
        load(tmp_path / "head.safetensors")
    size = (tmp_path / "head.safetensors").stat().st_size
    assert size < 400_000


def test_files_of_features_of_modules_and_of_ratings(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    network = nn.Linear(5, 4)
    heads = {
        "features": (decision(None, None, [np.int64(1), np.int64(2)]).fit(x, [1, 2] * 15), None),
        "module": (decision(network, None, NAMES).fit(x, [0, 1] * 15), copy.deepcopy(network)),
        "ratings": (decision(None, None, None).fit(x, x[:, 0]), None),
    }
    for name, (head, model) in heads.items():
        head.save(tmp_path / name)
        assert_close(load(tmp_path / name, model)(x), head(x), rtol=0, atol=0)


def test_other_files_are_refused(tmp_path: Path, fitted: Decision) -> None:
    pytest.importorskip("safetensors")
    fitted.la.save(tmp_path / "la")
    with pytest.raises(StateError, match="no decision"):
        load(tmp_path / "la")
    with pytest.raises(NotFittedError):
        decision(None, None, NAMES).save(tmp_path / "x")


# What changed since the fit.


def test_another_model_or_tokenizer_is_noticed() -> None:
    texts, labels = reviews(20)
    model = bert()
    head = decision(model, tokenizer(), NAMES).fit(texts, labels)
    expected = head(texts)
    head.model = copy.deepcopy(model)
    assert torch.equal(head(texts), expected)
    head.model = bert(seed=1)
    for _ in range(2):
        with pytest.raises(ModelChangedError, match="changed"):
            head(texts)
    head.model = model
    assert torch.equal(head(texts), expected)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.mul_(1.5)
    with pytest.raises(ModelChangedError):
        head(texts)
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[unk]": 0}, "[unk]"))
    other.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    unlike = decision(bert(), tokenizer(), NAMES).fit(texts, labels)
    unlike.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=other, unk_token="[unk]")
    with pytest.raises(ModelChangedError):
        unlike(texts)


def test_new_layers_in_the_model_are_noticed() -> None:
    """As adapters that are put in the place of layers: no former tensor changed."""
    texts, labels = reviews(20)
    for change in ("layer", "weight", "state"):
        model = bert()
        head = decision(model, tokenizer(), NAMES).fit(texts, labels)
        if change == "layer":
            model.encoder = bert(seed=1).encoder
        elif change == "weight":
            model.embeddings.word_embeddings.weight = bert(seed=1).embeddings.word_embeddings.weight
        else:
            model.load_state_dict(bert(seed=1).state_dict(), assign=True)
        with pytest.raises(ModelChangedError):
            head(texts)


def test_features_of_another_width_are_refused() -> None:
    head = decision(None, None, NAMES).fit(torch.randn(12, 3), [0, 1] * 6)
    with pytest.raises(InvalidData, match=r"\[N, 3\]"):
        head(torch.randn(4, 5))


# Bad input.


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (["bad"] * 19 + ["great"], "1 labels are none of the choices, e.g. 'great'"),
        ([0] * 19 + [2], "none of the choices"),
        ([0.5] * 20, "none of the choices"),
        ([True] * 20, "none of the choices"),
        ([[0]] * 20, r"labels of shape \[20, 1\]; one for every input, .*reshape\(-1\)"),
        (torch.zeros(20, 1).long(), r"labels of shape \[20, 1\]"),
        ([np.zeros(2)] * 20, r"labels of shape \[20, 2\]; .*argmax\(1\)"),
        (["bad"] * 20, "all 20 labels are 'bad'"),
        (["bad", "good"] * 5, "20 inputs and 10 labels"),
        (["bad", "good"], "2 labels; give 10 or more"),
        (None, "holds no labels|no labels"),
        ("bad", "labels are 'bad'"),
    ],
)
def test_labels_that_cannot_be(labels: Any, says: str) -> None:
    with pytest.raises(InvalidData, match=says):
        decision(None, None, NAMES).fit(X(), labels)


@pytest.mark.parametrize(
    ("ratings", "says"),
    [
        ([1.0] * 17 + [math.nan, 2.0, math.inf], "2 ratings are not finite, the first is nan of input 17; leave"),
        (torch.zeros(20, 2), r"ratings of shape \[20, 2\]; one for every input"),
        (["good"] * 20, "ratings are numbers"),
    ],
)
def test_ratings_that_cannot_be(ratings: Any, says: str) -> None:
    with pytest.raises(InvalidData, match=says):
        decision(None, None, None).fit(X(), ratings)


def test_features_whose_sum_alone_is_too_large() -> None:
    x = X()
    x[:, 0] = torch.where(x[:, 0] > 0, 3e38, 1e38)
    head = decision(None, None, NAMES).fit(x, [0, 1] * 10)
    assert bool(head(x).isfinite().all())


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (torch.full((20, 3), torch.nan), "not finite, the first is input 0"),
        (torch.zeros(20), r"\[N, D\]"),
        (torch.zeros(20, 3, 2), r"\[N, D\]"),
        (["a text"] * 20, "without a model"),
        ("a text", "give a list"),
        (X() + 1j, "complex64"),
        (7, "type int"),
    ],
)
def test_features_that_cannot_be(inputs: Any, says: str) -> None:
    with pytest.raises(InvalidData, match=says):
        decision(None, None, NAMES).fit(inputs, [0, 1] * 10)


@pytest.mark.parametrize("text", ["", "  \n"])
def test_empty_texts_are_refused(fitted: Decision, text: str) -> None:
    for head in (fitted, decision(gpt2(), tokenizer(), NAMES), decision(gpt2(), tokenizer(), NAMES, question="so?")):
        with pytest.raises(InvalidData, match="empty"):
            head(["a film", text])


@pytest.mark.parametrize(("inputs", "says"), [([], "no inputs"), (["a film", None], "one text, 'a film'")])
def test_lists_that_hold_no_texts(fitted: Decision, inputs: Any, says: str) -> None:
    with pytest.raises(InvalidData, match=says):
        fitted(inputs)


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(InvalidArgument, match="tokenizer"):
        decision(bert(), None, NAMES).fit(*reviews(20))


def test_batches_without_tokens_or_features_are_refused() -> None:
    batch = {"input_ids": torch.ones(12, 3).long(), "attention_mask": torch.zeros(12, 3).long()}
    with pytest.raises(InvalidData, match="no token"):
        decision(bert(), None, NAMES).fit(batch, [0, 1] * 6)
    with pytest.raises(InvalidData, match=r"features \[B, D\]"):
        decision(nn.Flatten(0), None, NAMES).fit(X(), [0, 1] * 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_features_of_any_precision(dtype: torch.dtype) -> None:
    x = (8 * X(40)).to(dtype)
    head = decision(None, None, NAMES).fit(x, (x[:, 0] > 0).long())
    assert float((head(x).argmax(1) == (x[:, 0] > 0)).float().mean()) > 0.8
    assert head(x).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_constant_features_do_no_harm() -> None:
    x = torch.cat([X(), torch.full((20, 1), 7.0)], 1)
    assert_close(
        decision(None, None, NAMES).fit(x, [0, 1] * 10)(x), decision(None, None, NAMES).fit(X(), [0, 1] * 10)(X())
    )
    same = decision(None, None, NAMES).fit(torch.ones(20, 3), [0] * 5 + [1] * 15)(torch.ones(2, 3))
    assert_close(same[:, 1], torch.full((2,), 0.75), rtol=0.1, atol=0.0)


def test_texts_with_two_labels_are_undecided() -> None:
    texts, labels = reviews(30)
    other = [NAMES[1 - NAMES.index(label)] for label in labels]
    head = decision(bert(), tokenizer(), NAMES).fit(texts + texts, labels + other)
    assert_close(head(texts), torch.full((30, 2), 0.5), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((None, None, ["a"]), InvalidArgument, "1 choices; 2 to 100"),
        ((None, None, list(range(101))), InvalidArgument, "101 choices"),
        ((None, None, ["a", "a"]), InvalidArgument, "'a' twice"),
        ((None, None, "ab"), InvalidArgument, "a list"),
        ((None, None, [[1], [2]]), InvalidArgument, "with a hash"),
        (("gpt2", None, NAMES), InvalidType, "a module"),
    ],
)
def test_choices_that_cannot_be(arguments: tuple[Any, ...], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        decision(*arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"pool": "first"}, {"class_weight": "even"}, {"class_weight": [1.0]}, {"class_weight": {"ugly": 1.0}},
        {"class_weight": [1.0, -1.0]}, {"batch_size": 0}, {"max_length": 0},
    ],
)  # fmt: skip
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"{next(iter(options))}"):
        decision(None, None, NAMES, **options)


def test_features_that_are_written_over_do_not_change_the_posterior() -> None:
    x = X()
    head, other = (decision(None, None, NAMES).fit(x, [0, 1] * 10) for _ in range(2))
    expected = other.la(X())
    x.mul_(3).add_(1)
    assert torch.equal(head.la(X()), expected)


def test_a_fit_that_fails_keeps_the_former_one() -> None:
    head = decision(None, None, NAMES).fit(X(), [0, 1] * 10)
    before = head(X())
    with pytest.raises(InvalidData):
        head.fit(X(), [0] * 20)
    assert torch.equal(head(X()), before)
