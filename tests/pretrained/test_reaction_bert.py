"""A BERT that read chemical reactions, on measured hydration energies: a head alone, and adapters (PEFT)."""

from __future__ import annotations

import pytest
from torch import Tensor

from examples.pretrained_data import _as_smiles, freesolv, reaction_bert, reactions, smiles_tokens
from laplace import Laplace, LowRankKronLaplace
from tests.pretrained import pages
from tests.pretrained.loading import lent, loaded

Batch = dict[str, Tensor]


@pytest.fixture
def batches() -> list[Batch]:
    """Two batches of eight molecules with energies of mean 0 and variance 1, and one without energies."""
    pytest.importorskip("transformers")
    smiles, energies = loaded(freesolv)
    energies = (energies - energies.mean()) / energies.std()
    tokens = loaded(smiles_tokens, smiles[:24])
    rows = [slice(0, 8), slice(8, 16), slice(16, 24)]
    found = [{name: value[row] for name, value in tokens.items()} for row in rows]
    return [found[i] | {"labels": energies[rows[i]].unsqueeze(1)} for i in range(2)] + found[2:]


def test_molecules_have_no_unknown_tokens():
    smiles, energies = loaded(freesolv)
    tokens = loaded(smiles_tokens, smiles)
    assert tokens["input_ids"].shape == tokens["attention_mask"].shape
    assert energies.shape == (642,)
    assert not bool((tokens["input_ids"] == 11).any())  # [UNK]
    assert bool(((tokens["input_ids"] != 0) == tokens["attention_mask"].bool()).all())


def test_a_head_on_frozen_layers(batches):
    model = loaded(reaction_bert, 1).requires_grad_(False)
    model.classifier.requires_grad_(True)
    with lent(model):
        la = Laplace(model, "regression")
        la.fit(batches[:2])
        prediction = la.predict(batches[2])
    assert la.n_params == 257
    assert prediction.mean.shape == (8, 1)
    assert bool((prediction.variance > 0).all())


@pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning")  # which says what the default is
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # transformers', which peft causes
def test_adapters(batches):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = peft.get_peft_model(loaded(reaction_bert, 1), lora).eval()
    with lent(model):
        la = Laplace(model, "regression")
        la.fit(batches[:2])
        prediction = la.predict(batches[2])
    assert isinstance(la, LowRankKronLaplace)
    assert la.n_params == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert bool((prediction.variance > 0).all())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_the_tutorial_runs(monkeypatch, capsys):
    pytest.importorskip("peft")
    loaded(freesolv), loaded(reaction_bert)
    assert not [text for text in pages.SMALL["lora"] if text not in pages.text_of("lora")]
    monkeypatch.syspath_prepend(str(pages.ROOT / "examples"))
    pages.run("lora", small=True)
    assert "90 % interval" in capsys.readouterr().out


def test_templates_are_written_as_smiles():
    template = "[N;H2;D1;+0:1]-[c;H0;D3;+0:2](:[n;H1;D2;+0:3]):[c;H1;D2;+0:4].[O;H0;D1;-1:5]-[N;H0;D3;+1:6]>>[Cl;+0:7]"
    assert _as_smiles(template) == "Nc([nH])c.[O-][N+]>>Cl"


def test_reactions_have_words_and_classes():
    found, classes = loaded(reactions)
    assert len(found) == len(set(found)) == len(classes) == 21250
    assert int(classes.min()) == 0 and int(classes.bincount().min()) > 400
    assert all(text.count(">>") == 1 for text in found)
    tokens = smiles_tokens(found[:500])["input_ids"]
    unknown = smiles_tokens(["?"])["input_ids"][0, 1]
    assert not (tokens == unknown).any()
