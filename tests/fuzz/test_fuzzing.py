"""The generator of random networks, what compares them, and what reduces them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mpgluon
from mpgluon import amp

import mxnet as mx
import numpy as np
import pytest

from fuzz import __main__ as runner
from fuzz import checking, properties, random_networks
from fuzz.checking import Case, case_of, check
from fuzz.programs import Input, Node, Program
from fuzz.random_networks import random_program
from fuzz.reducing import reduced
from fuzz.workers import WorkerDiedError, Workers

SEEDS = range(300)


def by_hand(expression="F.relu({0})", **changes) -> Program:
    program = Program(
        seed=0,
        values={
            0: Input((4, 6)),
            1: Node("self.layer0({0})", (0,), (4, 6)),
            2: Node(expression, (1,), (4, 6)),
            3: Node("{0} + {1}", (2, 1), (4, 6)),
        },
        layers={"layer0": "nn.Dense(6, in_units=6)"},
        outputs=(3,),
        losses=("out * head",),
    )
    return replace(program, **changes)


def test_a_seed_gives_the_same_source_each_time():
    assert [random_program(7).source() for _ in range(2)] == [random_program(7).source()] * 2
    assert len({random_program(seed).source() for seed in SEEDS}) == len(SEEDS)


def test_every_kind_of_operator_occurs_and_every_source_is_python():
    sources = [random_program(seed).source() for seed in SEEDS]
    for source in sources:
        compile(source, "program", "exec")
    together = "\n".join(sources)
    wanted = """nn.Conv2D( nn.Conv2DTranspose( nn.Dense( nn.BatchNorm( nn.LayerNorm( nn.GroupNorm(
        nn.InstanceNorm( Pool2D( F.concat( .transpose( slice_axis F.split( nn.Embedding( rnn.LSTM(
        Cell( batch_dot params= accumulate( "grad_req", Halved( gluon.loss. Residual(
        set_np() F.np.concatenate F.npx.leaky_relu mx.np.tanh mx.npx. mx.nd.tanh (gluon.Block)
        nn.PReLU() get_constant( 1e-08 1e-8 -np.inf F.np.hstack F.np.dstack topk argsort shape_array
        one_hot SequenceMask 'float64' 'int8' 'bool' .detach() size_array(
        as_nd_ndarray()).as_np_ndarray()"""
    assert [name for name in wanted.split() if name not in together] == []


@pytest.mark.filterwarnings("ignore:ndarray.context has been renamed")  # by MXNet's rnn layers
@pytest.mark.parametrize("seed", range(12))
def test_the_shapes_of_the_generator_are_those_of_mxnet(seed):
    program = random_program(seed)
    everything = replace(
        program,
        outputs=tuple(program.nodes),
        losses=("out * head",) * len(program.nodes),
        packing="tuple",
        wrapper="",
    )
    with properties.executed(everything.source()) as module:
        results = properties.outputs_of(module.network()(*module.inputs(0)))
    expected = [program.values[number].shape for number in program.nodes]
    assert [one.shape for one in results] == expected


@pytest.mark.parametrize("is_plain", [False, True])
def test_each_expression_has_the_same_bits_in_both_interfaces_and_called_by_name(is_plain):
    in_nd = of_all_expressions()
    for interface in ("nd", "np"):
        other = replace(in_nd, interface=interface, is_plain=is_plain)
        results = []
        for program in (in_nd, other):
            with properties.executed(program.source()) as module:
                results.append(properties.run(module, "float32", "imperative"))
        assert properties.differences(*results) == []
        assert results[0].keys() == results[1].keys()


def of_all_expressions() -> Program:
    shape = (4, 6)
    values = {0: Input(shape), 1: Input(shape), 2: Node("self.layer0({0})", (0,), shape)}
    for text in (*random_networks._ELEMENTWISE, *random_networks._OF_TWO):
        values[len(values)] = Node(text, (2, 1), shape)
    layers = {"layer0": "nn.Dense(6, in_units=6)"}
    outputs = tuple(values)[2:]
    return by_hand(
        values=values, layers=layers, outputs=outputs, losses=("out * head",) * len(outputs)
    )


def test_an_operator_of_mx_nd_in_a_numpy_program_takes_and_returns_its_arrays():
    for program in map(random_program, SEEDS):
        if program.interface == "nd":
            continue
        for line in program.source().splitlines():
            if re.search(r"\b(F|mx\.nd)\.(?!npx?\.|NDArray)", line):
                assert ".as_nd_ndarray()" in line
                assert ".as_np_ndarray()" in line


def test_the_interface_is_switched_back_whatever_happens():
    source = by_hand(interface="np").source()
    with properties.executed(source):
        assert mx.util.is_np_array()
    assert not mx.util.is_np_array()
    with pytest.raises(ZeroDivisionError), properties.executed(f"{source}\n1 / 0"):
        pytest.fail("the source has raised no error")
    assert not mx.util.is_np_array()
    assert not mx.util.is_np_shape()


def test_values_and_layers_that_nothing_uses_are_dropped():
    program = by_hand(outputs=(1,)).without_dead_code()
    assert list(program.values) == [0, 1]
    program = by_hand(values={0: Input((4, 6)), 5: Node("F.relu({0})", (0,), (4, 6))}, outputs=(5,))
    assert program.without_dead_code().layers == {}


def test_a_failing_program_is_reduced_to_the_line_that_fails():
    program = replace(random_program(4), wrapper="Halved", adds=True)
    number = program.nodes[-1]
    node = program.values[number]
    values = {**program.values, 99: Node("F.erf({0})", (number,), node.shape)}
    program = replace(program, values=values, outputs=(99,), losses=("out * head",))
    small = reduced(program, lambda candidate: "F.erf(" in candidate.source())
    assert [small.values[n].expression for n in small.nodes] == ["F.erf({0})"]
    assert not small.adds
    assert small.wrapper == ""


def test_a_sum_of_many_uses_loses_those_that_do_not_matter():
    program = by_hand("(-{0}) + (F.zeros_like({0}) + {0}) + ({0} + 0.1) + (F.tanh({0}))")
    small = reduced(program, lambda one: "+ 0.1" in one.source() and "Dense" in one.source())
    compile(small.source(), "program", "exec")
    assert [small.values[n].expression for n in small.nodes][-1] == "({0} + 0.1) + (F.tanh({0}))"


def said_of(change, **changes):
    """Return the findings about a program if a worker's results are changed."""

    class InThisProcess(Workers):
        def run(self, wanted):
            return {name: change(name, properties.trial(*args)) for name, args in wanted.items()}

    case = Case("cast float16", ("native", "fall-back"), (("restores", "hybridized"),))
    return check(InThisProcess(), by_hand(**changes), case)


@pytest.mark.parametrize("interface", ["nd", "np"])
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_network_without_defects_passes(interface, is_plain):
    assert said_of(lambda _, result: result, interface=interface, is_plain=is_plain) is None


@pytest.mark.parametrize("changes", [{"interface": "np"}, {"is_plain": True}])
def test_other_bits_than_those_of_a_hybrid_block_of_mx_nd_are_a_failure(changes):
    def change(name, result):
        weights = result["modes"][checking.COUNTERPART]["value of layer0.weight"]
        if name == "native" and weights.dtype == np.float16:
            weights.view(np.uint16)[2, 3] ^= 1
        return result

    assert said_of(change, **changes).sentence == (
        "native imperative and native imperative, as a HybridBlock of mx.nd differ in "
        "value of layer0.weight"
    )


def test_a_single_other_bit_in_one_mode_is_a_failure():
    def change(name, result):
        if name == "fall-back" and "hybridized" in result["modes"]:
            weights = result["modes"]["hybridized"]["value of layer0.weight"]
            if weights.dtype == np.float16:
                weights.view(np.uint16)[2, 3] ^= 1
        return result

    failure = said_of(change)
    assert failure.sentence == (
        "fall-back imperative and fall-back hybridized differ in value of layer0.weight"
    )


def test_a_difference_that_plain_mxnet_has_too_is_not_blamed_on_a_cast():
    def change(_, result):
        result["modes"].get("hybridized", {}).pop("output 0.0", None)
        for mode, arrays in result["modes"].items():
            arrays["gradient of layer0.weight"] = np.float32([mode == "hybridized"])
        return result

    assert said_of(change).is_mxnets_own


@pytest.mark.parametrize("mode", ["imperative", "hybridized"])
def test_plain_fp32_computes_the_slope_of_prelu_rightly_so_that_no_fault_of_ours_is_excused(mode):
    values = {0: Input((4, 6)), 1: Node("self.layer0({0})", (0,), (4, 6))}
    values[2] = Node("{0} * 0.5", (1,), (4, 6))  # a result behind it: MXNet's own is wrong then
    program = by_hand(values=values, layers={"layer0": "nn.PReLU(in_channels=6)"}, outputs=(2,))
    found = properties.trial(program.sources, "float32", [mode], [])["modes"][mode]
    with properties.executed(program.source()) as module:
        x = module.inputs(0)[0].asnumpy()
        heads = np.random.default_rng(0).standard_normal((4, 6))
    wanted = (np.minimum(x, 0) * heads * 0.5).sum(axis=0)
    np.testing.assert_allclose(found["gradient of layer0.alpha"], wanted, rtol=1e-5)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("interface", ["nd", "np"])
def test_a_constant_and_a_result_of_another_dtype_are_parts_of_a_program(interface, is_plain):
    values = {0: Input((4, 6)), 1: Node("F.broadcast_add({0}, self.layer0.data())", (0,), (4, 6))}
    values[2] = Node("F.argsort({0}, axis=-1, dtype='int64')", (1,), (4, 6), "int64")
    values[3] = Node("self.layer1({0})", (1,), (4, 6))
    layers = {"layer0": "self.params.get_constant('layer0', np.float32(np.ones((1, 6))))"}
    layers["layer1"] = "nn.Dense(6, in_units=6)"
    program = by_hand(values=values, layers=layers, outputs=(3, 2), losses=("out * head",) * 2)
    program = replace(program, interface=interface, is_plain=is_plain)
    assert program.jumps
    with properties.executed(program.source()) as module:
        found = properties.run(module, "cast float16", "imperative")
        np.testing.assert_array_equal(found["value of layer0"], np.ones((1, 6)))
        assert found["output 0.1"].dtype == np.int64


def test_an_error_is_a_failure_unless_plain_mxnet_raises_it():
    def change(_, result):
        if result["modes"]["imperative"]["value of layer0.weight"].dtype == np.float16:
            result["modes"]["imperative"], result["errors"] = {"error": "ValueError: no"}, True
        return result

    failure = said_of(change)
    assert failure.sentence == "native, imperative: ValueError: no"


@pytest.mark.slow
def test_a_process_that_ends_is_replaced_by_another():
    with Workers() as workers:
        crash = ({"": "import os\nos._exit(3)"}, "float32", ["imperative"], [])
        died = workers.run({"native": crash})["native"]
        assert isinstance(died, WorkerDiedError)
        assert str(died) == "the process has ended with 3"
        fine = workers.run({"native": (by_hand().sources, "float32", ["imperative"], [])})
        assert not fine["native"]["errors"]


@pytest.mark.usefixtures("native_operators")
def test_a_forward_pass_that_rounds_more_often_than_it_should_is_not_near_fp32(monkeypatch):
    program = by_hand("F.tanh({0})")
    with (
        properties.executed(program.source()) as module,
        properties.executed(program.source(noisy=True)) as noisy,
    ):
        assert properties.is_near_fp32(module, "cast float16", "hybridized", noisy) == ""
        coarse = mpgluon.Policy.parse("compute=float8_e5m2")
        monkeypatch.setitem(properties.WAYS, "cast float16", lambda net: amp.autocast(net, coarse))
        said = properties.is_near_fp32(module, "cast float16", "hybridized", noisy)
    assert said.startswith("output 0 is ")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("interface", ["nd", "np"])
@pytest.mark.parametrize("way", checking.WAYS)
def test_every_property_holds_for_a_small_network(way, interface):
    names = [*checking.PROPERTIES]
    found = properties.trial(
        by_hand(adds=True, interface=interface).sources,
        way,
        ["imperative"],
        [(name, "hybridized") for name in names],
    )
    assert found["properties"] == dict.fromkeys(names, "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("seed", "interface"), [(0, "nd"), (2, "np")])
def test_a_failing_seed_prints_a_program_that_runs_by_itself(
    monkeypatch, capsys, tmp_path, seed, interface
):
    def fails(_, program, *__):
        erring = any("softmax" in line or "Dense" in line for line in program.layers.values())
        erring &= program.interface == interface
        return checking.Failure("kind", "the sentence") if erring else None

    monkeypatch.setattr(runner, "check", fails)
    assert runner.main(["--seed", str(seed), "--count", "1", "--minutes", "1"]) == 1
    printed = capsys.readouterr().out
    assert f"seed {seed}, " in printed
    assert ("mx.npx.set_np()" in printed) == (interface == "np")
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        printed[printed.index("import mxnet") : printed.index(f"from seed {seed} on")]
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(snippet)],
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "hybridized []" in done.stdout


def test_cases_cover_every_format_setting_and_property():
    cases = [case_of(seed) for seed in SEEDS]
    assert {case.way for case in cases} == set(checking.WAYS)
    assert {name for case in cases for name, _ in case.properties} == set(checking.PROPERTIES)
    assert len({case.settings for case in cases}) == 2
