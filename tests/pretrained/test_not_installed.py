"""Where a package is missing, the message says which, and the line to type."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from examples import pretrained_data as data

PINNED = re.compile(r"[\w-]+==[\w.]+")


@pytest.mark.parametrize(
    "load",
    [
        data.efficientnet,
        data.mnist,
        data.efficientnet_features,
        data.reaction_bert,
        data.freesolv,
        data.reactions,
        data.crepe,
        data.sentence_encoder,
        data.topics,
    ],
    ids=lambda load: load.__name__,
)
def test_a_missing_package_is_named(load, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(data.NotInstalled, match=r"could not import '\w+', which is not installed: pip install "):
        load()


def test_a_missing_archive_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "ARCHIVES", tmp_path)
    with pytest.raises(data.NotInstalled, match=r"could not find vaderSentiment-3\.3\.2\.tar\.gz .* pip download "):
        data.ratings("tweets")


def test_versions_are_those_of_the_makefile_and_of_the_extra():
    root = Path(data.__file__).parents[1]
    written = (root / "Makefile").read_text() + (root / "pyproject.toml").read_text()
    assert not [
        each
        for text in (data.VISION, data.CHEMISTRY, data.AUDIO, data.TEXTS)
        for each in PINNED.findall(text)
        if each not in written
    ]
