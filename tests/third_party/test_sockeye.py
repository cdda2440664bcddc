"""Sockeye's own training program, written for contrib.amp, with its import of ``amp`` exchanged."""

from __future__ import annotations

import random
import sys

from mpgluon import amp
from mpgluon.trainer import networks

import pytest

pytest.importorskip("sockeye", reason="Sockeye is not installed (make test WITH=third-party)")
from sockeye import train, training

pytestmark = [
    pytest.mark.third_party,
    # Sockeye's own, on newer versions of NumPy and PyYAML than its.
    pytest.mark.filterwarnings("ignore"),
]

OPTIONS = """
    --use-cpu --amp --amp-scale-interval 10 --encoder transformer --decoder transformer
    --num-layers 1:1 --transformer-model-size 16 --transformer-attention-heads 2
    --transformer-feed-forward-num-hidden 16 --num-embed 16 --batch-size 20 --batch-type sentence
    --checkpoint-interval 20 --max-seq-len 10 --decode-and-evaluate 0 --initial-learning-rate 0.01
    --keep-last-params 5 --quiet
"""


@pytest.fixture
def sentences(tmp_path):
    """Write pairs of sentences, of which one is the other backward."""
    draw = random.Random(0)
    for part, count in (("train", 400), ("dev", 20)):
        words = [[draw.choice("abcdefgh") for _ in range(draw.randint(3, 6))] for _ in range(count)]
        for language, lines in (("src", words), ("trg", [line[::-1] for line in words])):
            text = "".join(f"{' '.join(line)}\n" for line in lines)
            (tmp_path / f"{part}.{language}").write_text(text)
    return tmp_path


def test_sockeye_trains_saves_and_resumes_with_its_import_exchanged(sentences, monkeypatch):
    monkeypatch.setattr(networks, "_requested", None)
    monkeypatch.setattr(train, "amp", amp)
    monkeypatch.setattr(training, "amp", amp)
    files = {"source": "train.src", "target": "train.trg"}
    files |= {"validation-source": "dev.src", "validation-target": "dev.trg", "output": "model"}
    arguments = [
        part for key, name in files.items() for part in (f"--{key}", f"{sentences / name}")
    ]
    perplexities = []
    for updates in (40, 80):  # the second call goes on where the first one stopped
        command = ["sockeye-train", *arguments, *OPTIONS.split(), "--max-updates", str(updates)]
        monkeypatch.setattr(sys, "argv", command)
        train.main()
        rows = (sentences / "model" / "metrics").read_text().splitlines()
        assert len(rows) == updates // 20
        perplexities.append(float(rows[-1].split("perplexity-train=")[1].split("\t")[0]))
    assert perplexities[1] < perplexities[0] < 12
