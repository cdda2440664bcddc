"""Translation and spoken digits: data, scores worked out by hand, networks, words of the page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import groupby, product

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from study.experiments import listener, sequences, translator
from study.experiments.experiment import Outcome
from study.experiments.listener import BLANK, ListenerSettings, read_off
from study.experiments.loop import LoopSettings, fit, start
from study.experiments.number_words import (
    ENGLISH,
    ENGLISH_LENGTH,
    GERMAN,
    GERMAN_LENGTH,
    draw_numbers,
    english,
    german,
    groups_of,
)
from study.experiments.number_words import encode as encode_words
from study.experiments.sequence_scores import bleu, edit_distance
from study.experiments.spoken_digits import (
    BANDS,
    FRAMES,
    MOST_DIGITS,
    draw_strings,
    frames_of,
    record,
)
from study.experiments.spoken_digits import encode as encode_digits
from study.experiments.translator import TranslatorSettings, translate

FORMATS = pytest.mark.parametrize("dtype", sequences.FORMATS)
TRANSLATOR = TranslatorSettings(
    training_numbers=60, test_numbers=10, epochs=2, batch_size=10, embedding=8, hidden=8
)
LISTENER = ListenerSettings(
    training_strings=100, test_strings=10, epochs=3, batch_size=10, hidden=4, init_scale=2.0**4
)
TINY = {"translation": TRANSLATOR, "digits": LISTENER}


# --- number words ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "in_english", "in_german"),
    [
        (1, "one", "eins"),
        (12, "twelve", "zwölf"),
        (16, "sixteen", "sechzehn"),
        (21, "twenty one", "einundzwanzig"),
        (30, "thirty", "dreißig"),
        (77, "seventy seven", "siebenundsiebzig"),
        (100, "one hundred", "einhundert"),
        (101, "one hundred and one", "einhunderteins"),
        (342, "three hundred and forty two", "dreihundertzweiundvierzig"),
        (1000, "one thousand", "eintausend"),
        (1001, "one thousand and one", "eintausendeins"),
        (21_100, "twenty one thousand one hundred", "einundzwanzigtausendeinhundert"),
        (101_000, "one hundred and one thousand", "einhunderteintausend"),
        (342_017, "three hundred and forty two thousand and seventeen",
         "dreihundertzweiundvierzigtausendsiebzehn"),
    ],
)  # fmt: skip
def test_numbers_are_written_as_in_a_grammar_of_each_language(number, in_english, in_german):
    assert " ".join(english(number)) == in_english
    assert "".join(german(number)) == in_german


def test_every_group_of_digits_has_a_text_of_its_own_that_fits_into_its_line():
    numbers = [*range(1, 1000), *(1001 * one for one in range(1, 1000))]
    for write, vocabulary, longest in (
        (english, ENGLISH, ENGLISH_LENGTH),
        (german, GERMAN, GERMAN_LENGTH - 1),  # the last place is for the end
    ):
        texts = [tuple(write(one)) for one in numbers]
        assert len(set(texts)) == len(texts)
        assert max(map(len, texts)) == longest
        assert {word for text in texts for word in text} | {""} == set(vocabulary)


def test_numbers_of_the_test_have_groups_of_digits_that_the_training_has_not():
    training, test = draw_numbers(400, 100, seed=3)
    assert (training, test) == draw_numbers(400, 100, seed=3)
    assert (training, test) != draw_numbers(400, 100, seed=4)
    assert len({*training, *test}) == 500
    assert all(0 < one < 10**6 for one in (*training, *test))
    learned = set().union(*map(groups_of, training))
    assert all(groups_of(one) - learned for one in test)


def test_words_become_their_places_in_the_vocabulary_with_zeros_after_them():
    assert encode_words([["b"], ["a", "b"]], ("", "a", "b"), 3).tolist() == [[2, 0, 0], [1, 2, 0]]


# --- spoken digits --------------------------------------------------------------------------


def test_no_string_of_digits_is_in_both_training_and_test():
    training, test = draw_strings(300, 200, seed=3)
    assert (training, test) == draw_strings(300, 200, seed=3)
    assert len({*training, *test}) == 500
    for strings in (training, test):
        assert {len(one) for one in strings} == {2, 3, 4, 5}
        assert set("".join(strings)) == set("0123456789")


def test_a_recording_is_made_again_by_its_seed_and_fits_whatever_the_voice():
    one, same, other = (record("90", np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert (one == same).all()
    assert not np.allclose(one, other)
    rng = np.random.default_rng(0)
    for _ in range(100):
        frames = frames_of(record("9" * MOST_DIGITS, rng))
        assert frames.shape == (FRAMES, BANDS)
        assert np.isfinite(frames).all()


def test_a_tone_is_loudest_in_the_band_of_its_frequency():
    # 1000 Hz are 1000 mel. 4000 Hz are 2146, and 20 bands have centres 2146 / 21 = 102.2 apart:
    # the tenth is at 1022.
    time = np.arange(12800) / 8000
    frames = frames_of(np.sin(2 * np.pi * 1000 * time))
    assert (frames.argmax(axis=1) == 9).all()


def test_a_digit_is_a_glide_and_the_one_five_above_it_goes_the_other_way(monkeypatch):
    # The second formant falls from 1840 to 1090 Hz in a 1, and rises in a 6.
    monkeypatch.setattr("study.experiments.spoken_digits.SIGNAL_TO_NOISE", (40, 40))
    rng = np.random.default_rng(0)
    for digit, sign in (("1", -1), ("6", 1)):
        for _ in range(10):
            frames = frames_of(record(digit, rng))
            spoken = np.flatnonzero(frames.max(axis=1) > frames.max() - 3)
            second = frames[:, 9:].argmax(axis=1)  # bands above 940 Hz
            assert sign * (second[spoken[-2]] - second[spoken[1]]) > 0


def test_labels_are_digits_with_minus_one_after_them():
    labels = encode_digits(["90", "12345"])
    assert labels.tolist() == [[9, 0, -1, -1, -1], [1, 2, 3, 4, 5]]
    assert labels.dtype == np.int32


# --- scores ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "translation", "by_hand"),
    [
        ("a b c d e", "a b c d e", 1),
        # 5 of 6 words, 3 of 5 pairs, 2 of 4 triples, 1 of 3 quadruples
        ("a b c d e f", "a b c d x f", (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** (1 / 4)),
        ("a b c d e", "a b c d", math.exp(1 - 5 / 4)),  # too short
        # A word counts as often as the reference has it: 4 of 5, 3 of 4, 2 of 3, 1 of 2.
        ("a b c d", "a b c d d", (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)),
        ("a b c d", "d c b a", 0),
        ("a b c", "a b c", 0),  # no quadruple
    ],
)
def test_bleu_by_hand(reference, translation, by_hand):
    assert bleu([reference.split()], [translation.split()]) == pytest.approx(by_hand)


def test_bleu_counts_over_all_texts_together():
    references, translations = ["abcdef", "gh"], ["abcdef", "gx"]
    # 7 of 8 letters, 5 of 6 pairs, 4 of 4 triples, 3 of 3 quadruples
    assert bleu(references, translations) == pytest.approx((7 / 8 * 5 / 6) ** (1 / 4))


@pytest.mark.parametrize(
    ("one", "other", "by_hand"),
    [("kitten", "sitting", 3), ("flaw", "lawn", 2), ("", "abc", 3), ("12", "12", 0)],
)
def test_edit_distance_by_hand(one, other, by_hand):
    assert edit_distance(one, other) == edit_distance(other, one) == by_hand


# --- networks -------------------------------------------------------------------------------


@FORMATS
def test_both_networks_begin_with_the_seeds_weights_and_return_fp32_logits(dtype):
    words = mx.nd.array(encode_words([english(7)], ENGLISH, ENGLISH_LENGTH), dtype="int32")
    before = mx.nd.zeros((1, GERMAN_LENGTH), dtype="int32")
    sounds = mx.nd.array(frames_of(record("12", np.random.default_rng(0)))[np.newaxis])
    for module, settings, inputs, shape in (
        (translator, TRANSLATOR, (words, before), (1, GERMAN_LENGTH, len(GERMAN))),
        (listener, LISTENER, (sounds,), (1, FRAMES, BLANK + 1)),
    ):
        net, of_other_seed, in_fp32 = (
            module.make_network(replace(settings, **changes))
            for changes in ({"dtype": dtype}, {"dtype": dtype, "seed": 1}, {})
        )
        logits = net(*inputs)
        assert logits.shape == shape
        assert logits.dtype == np.float32
        same, other = (one.out.weight.data().asnumpy() for one in (in_fp32, of_other_seed))
        ours = net.out.weight.data().asnumpy()
        assert (ours == same.astype(ours.dtype)).all()
        assert (ours != other).any()


@pytest.mark.parametrize("attention", [True, False])
def test_without_attention_no_gradient_reaches_what_compares_words(attention):
    net = translator.make_network(replace(TRANSLATOR, attention=attention))
    words = mx.nd.array(encode_words([english(342)], ENGLISH, ENGLISH_LENGTH), dtype="int32")
    with autograd.record():
        loss = net(words, mx.nd.ones((1, GERMAN_LENGTH), dtype="int32")).square().sum()
    loss.backward()
    assert (net.key.weight.grad().asnumpy() != 0).any() == attention
    assert (net.reader.l0_i2h_weight.grad().asnumpy() != 0).any()


def test_a_translation_goes_on_from_its_own_morphemes_up_to_its_end():
    def net(words, before):  # writes 1, 2, 3, …, up to the first English word
        following = before.asnumpy() + 1
        following[following > words.asnumpy()[:, :1]] = 0
        return mx.nd.one_hot(mx.nd.array(following), len(GERMAN))

    words = np.zeros((2, ENGLISH_LENGTH), dtype=np.int32)
    words[:, 0] = 3, 5
    expected = np.zeros((2, GERMAN_LENGTH), dtype=np.int32)
    expected[0, :3], expected[1, :5] = range(1, 4), range(1, 6)
    assert (translate(net, words) == expected).all()


def test_digits_are_read_off_without_repetitions_and_blanks():
    path = np.array([[BLANK, 1, 1, BLANK, 1, 2, 2, BLANK], [BLANK] * 8])
    assert read_off(np.eye(BLANK + 1)[path]) == ["112", ""]


@FORMATS
@pytest.mark.parametrize("task", sequences.TASKS)
def test_each_task_learns_in_each_format_and_comes_out_the_same_again(task, dtype):
    about, settings = sequences.TASKS[task], replace(TINY[task], dtype=dtype)
    outcome = about.train(settings)
    assert outcome.curves["loss"][-1] < outcome.curves["loss"][0]
    assert set(about.scores.values()) < set(outcome.figures)
    assert len(outcome.curves[about.score]) == 1 + settings.epochs
    assert outcome.figures["skipped_steps"] < outcome.figures["steps"]
    again = about.train(settings)
    texts = (json.dumps([one.figures, one.curves], allow_nan=False) for one in (outcome, again))
    assert len(set(texts)) == 1


def test_steps_in_float16_are_skipped_until_the_scale_fits_a_ctc_loss():
    # A gradient sums over frames and recordings: far above one, and 2**24 times it overflows.
    settings = replace(LISTENER, dtype="float16", init_scale=2.0**24)
    outcome = listener.train(settings)
    skipped = outcome.figures["skipped_steps"]
    assert 2 < skipped < outcome.figures["steps"]
    assert outcome.figures["final_scale"] == settings.init_scale / 2**skipped


class WithCtcLoss(gluon.HybridBlock):
    """A Dense layer and the CTC loss of its logits, which are returned too."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.out = gluon.nn.Dense(3, flatten=False, in_units=2)
            self.loss = gluon.loss.CTCLoss()

    def hybrid_forward(self, F, x, labels):
        logits = self.out(x)
        return self.loss(logits, labels), logits


@FORMATS
def test_a_ctc_loss_is_fp32_in_every_format_and_sums_over_all_paths(dtype):
    net = WithCtcLoss()
    start(net, LoopSettings(dtype=dtype))
    x = mx.nd.array([[[3, 1], [-2, 4], [1, 1], [0.5, -3]]])
    with autograd.record():
        loss, logits = net(x, mx.nd.array([[1, 0]], dtype="int32"))
    loss.backward()
    assert loss.dtype == np.float32
    exponentials = np.exp(logits.asnumpy()[0].astype(np.float64))
    chances = exponentials / exponentials.sum(axis=1, keepdims=True)
    right = {
        path: np.prod(chances[range(4), path])
        for path in product(range(3), repeat=4)  # the blank is 2
        if [one for one, _ in groupby(path) if one != 2] == [1, 0]
    }
    assert loss.asscalar() == pytest.approx(-math.log(sum(right.values())), rel=4 * 2.0**-23)
    share = sum(one * np.eye(3)[list(path)] for path, one in right.items()) / sum(right.values())
    gradient = (chances - share).sum(axis=0)
    # One rounding of each frame's gradient and some of their sum, in the format's precision.
    bound = 4 * {"float32": 2.0**-22, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert np.abs(net.out.bias.grad().asnumpy() - gradient).max() <= bound


def test_settings_that_fit_no_run_are_refused():
    with pytest.raises(ValueError, match=r"dtype must be one of float32, .*; received 'float8'"):
        LoopSettings(dtype="float8")
    with pytest.raises(ValueError, match="multiple of batch_size, received 12 and 25"):
        fit(gluon.nn.Dense(1), LoopSettings(), [np.zeros(12)], lambda x: x, dict)


# --- the page -------------------------------------------------------------------------------


@pytest.fixture
def records(record_of):
    """Return made-up records: 90 % right, and one translation less for each seed."""
    made = {}
    for one in sequences.GROUP.experiments:
        _, _, row, seed = one.name.split("/")
        few = {"float16": 0.01, "bfloat16": -0.01}.get(row, 0) * (-1) ** int(seed[-1])
        right = 0.9 + few if row in sequences.FORMATS else 0.004
        figures = {
            "sequence_accuracy": right, "token_accuracy": 0.95, "bleu": 0.8,
            "label_error_rate": 1 - right, "final_loss": 0.25, "steps": 40, "skipped_steps": 2,
            "final_scale": 64.0,
        }  # fmt: skip
        made[one.name] = record_of(one, Outcome(figures))
    return made


def cells_of(text, beginning):
    """Return the cells of the only row of tables that begins with these."""
    rows = [[one.strip() for one in row.split("|")[1:-1]] for row in text.splitlines()]
    (row,) = [row for row in rows if row[: len(beginning)] == beginning]
    return row[len(beginning) :]


def test_the_pages_words_and_tables_are_what_the_records_say(records, page_of):
    finding = page_of(records, "Translation and speech in every format", "docs/results.md")
    assert "as far as 5 seeds can tell**" in finding
    assert "in float32 90.0 of 100 numbers are translated without a fault" in finding
    assert "and 10.00 of 100 digits are wrong" in finding
    # Differences of +1, -1, +1, -1, +1: mean 0.2, standard deviation sqrt(1.2), and 2.776 is
    # Student's t of 4 degrees of freedom: 0.2 ± 1.36.
    row = ["translation", "right translations", "float16"]
    assert cells_of(finding, row) == ["90.20 ± 1.10", "+0.20 (-1.16 to +1.56)"]
    row = ["digits", "wrong digits", "float16"]
    assert cells_of(finding, row) == ["9.80 ± 1.10", "-0.20 (-1.56 to +1.16)"]
    details = page_of(records, "Translation and speech")
    assert "corrected for 4 comparisons after Holm" in details
    assert "translates 0.4 of 100 numbers (one seed)" in details
    expected = ["95.00 ± 0.00", "80.00 ± 0.00", "0.250 ± 0.000", "2 of 40", "64"]
    assert cells_of(details, ["float16", "90.20 ± 1.10"])[1:-1] == expected
    assert cells_of(details, ["bfloat16", "10.20 ± 1.10"])[-2] == "none"  # no loss scale


def test_rows_that_differ_do_not_support_the_conclusion(records, supported):
    worse = {
        name: replace(one, outcome=Outcome({**one.outcome.figures, "label_error_rate": 0.2 + rate}))
        for name, one in records.items()
        for rate in [int(name[-1]) / 1000]
        if name.startswith("sequences/digits/float16")
    }
    words = "learn in 16 bits as in float32, as far as 5 seeds can tell"
    assert supported(records, words)
    assert not supported({**records, **worse}, words)
