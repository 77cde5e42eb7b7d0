"""Problems on tokens: attention, recurrence, embeddings."""

from __future__ import annotations

from functools import partial

from torch import nn

from tests.catalogue.problem import add
from tests.models import sequence


def register() -> None:
    """Adds the problems of this file to the catalogue."""
    add("transformer", sequence.TransformerEncoder, (4, 4), 3, tags="attention norm shared")
    add("attention_time_major", sequence.TimeMajorAttention, (6, 4), 3, tags="attention norm shared time_major square")
    add("attention_by_hand", sequence.HandWrittenAttention, (4, 4), 3, tags="attention norm shared")
    add("lstm", partial(sequence.Recurrent, nn.LSTM), (4, 3), 2, tags="recurrent shared")
    add(
        "lstm_time_major",
        partial(sequence.Recurrent, nn.LSTM, batch_first=False),
        (6, 3),
        2,
        "regression",
        "recurrent shared time_major square",
    )
    add("gru", partial(sequence.Recurrent, nn.GRU), (4, 3), 2, "regression", "recurrent shared")
    add("embedding", partial(sequence.Tokens, positions=False), (5,), 3, tags="embedding norm shared", tokens=9)
    add(
        "embedding_padding",
        partial(sequence.Tokens, padding_idx=0),
        (5,),
        3,
        tags="embedding norm shared positions padding",
        tokens=9,
    )
    add(
        "embedding_positions",
        sequence.Tokens,
        (6,),
        3,
        "regression",
        "embedding norm shared positions square",
        tokens=9,
    )
    add("tied_head", sequence.TiedHead, (5,), 4, tags="embedding tied shared", tokens=4)
    add("stored_by_input", sequence.StoredByInput, (4, 3), 3, tags="shared")
    add("patches", sequence.Patches, (4, 3), 3, tags="attention bare_parameter norm shared")
