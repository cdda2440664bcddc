"""Call every public name of an installed mpgluon, and every command, with the extras it has.

    python every_name.py FOLDER EXTRA ...     # the extras that pip was asked for

It needs mpgluon and nothing else, and trains with both recorders. A tool whose extra is missing
must name it. Python's profile says what was called, so that a new public name needs a use here.
"""

import re
import signal
import subprocess
import sys
import sysconfig
import threading
import urllib.request
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass, unwrap
from pathlib import Path

HERE = Path(__file__).parent
FOLDER, ASKED_FOR = Path(sys.argv[1]).resolve(), sys.argv[2:]
NUMBERS = FOLDER / "numerics"
OURS = ("network:make", "--image-size=8")
RAN = set()  # code objects
COMMAND = Path(sysconfig.get_path("scripts")) / "mpgluon"
PACKAGES = {
    "plots": ["matplotlib"],
    "report": ["matplotlib", "jinja2"],
    "zoo": ["gluoncv"],
    "onnx": ["onnx"],
    "serve": ["flask", "waitress", "PIL"],
    "mpi": ["mpi4py"],
    "recipes": ["PIL", "pooch", "tqdm"],
}
MODULES = [
    "mpgluon",
    "mpgluon.amp",
    "mpgluon.checkpoint",
    "mpgluon.contrib_amp",
    "mpgluon.deployment",
    "mpgluon.diagnostics",
    "mpgluon.distributed",
    "mpgluon.errors",
    "mpgluon.estimator",
    "mpgluon.fp16_utils",
    "mpgluon.tools",
    "mpgluon.tools.onnx",
    "mpgluon.tools.plots",
    "mpgluon.tools.zoo",
]


def note(frame, event, _):
    if event == "call":
        RAN.add(frame.f_code)


sys.setprofile(note)
threading.setprofile(note)

import mpgluon  # noqa: E402
from mpgluon import (  # noqa: E402
    amp,
    checkpoint,
    contrib_amp,
    deployment,
    diagnostics,
    distributed,
    fp16_utils,
    kernels,
)
from mpgluon.formats.loss_scale import as_loss_scale  # noqa: E402
from mpgluon.kernels import processor  # noqa: E402
from mpgluon.tools import onnx, plots, zoo  # noqa: E402

import mxnet as mx  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402
from mxnet.gluon.contrib.estimator import Estimator  # noqa: E402
from network import make  # noqa: E402

cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def images(number=6):
    """Return images of three colours, and which colour is the strongest."""
    labels = mx.nd.arange(number) % 3
    return mx.nd.one_hot(labels, 3).reshape((0, 0, 1, 1)) + mx.nd.zeros((number, 3, 8, 8)), labels


def lacks(name):
    return [package for package in PACKAGES[name] if find_spec(package) is None]


def check_message(name, message):
    """Check that a message names an extra which brings a package that is missing."""
    advice = r"(\w+)('\)| is not installed); install it with pip install 'mpgluon\[(\w+)]'"
    found = re.search(advice, message)
    assert found, f"{name}: {message}"
    package, _, named = found.groups()
    assert package in {*lacks(name)} & {*PACKAGES[named]}, message
    assert named == name or ASKED_FOR, message


def needs(name, use):
    """Call what needs an extra: it returns, or where the extra is missing, raises with its name."""
    if not lacks(name):
        return use()
    try:
        use()
    except (ImportError, ValueError) as error:
        check_message(name, str(error))
    else:
        raise AssertionError(f"{name} is not installed, and nothing says so")


def command(*arguments, extra=None, status=0):
    """Run a console command; one whose extra is missing must name it."""
    done = subprocess.run([COMMAND, *map(str, arguments)], cwd=HERE, capture_output=True, text=True)
    if extra is not None and lacks(extra):
        status = 2
        assert done.stderr.count("\n") == 1, done.stderr
        check_message(extra, done.stderr)
    assert (done.returncode, bool(done.stderr)) == (status, status != 0), (arguments, done)
    return done.stdout + done.stderr


def native_operators():
    """Without a compiler, the wheel's own library computes."""
    values = mx.nd.random.normal(shape=(3, 1001))
    assert kernels.load(), kernels.status()
    rounded = kernels.invoke("_mpgluon_plain_value_11_5", values).asnumpy()
    assert (rounded == values.asnumpy().astype("float16")).all()
    found = kernels.status()
    assert (found.state, found.level) == ("prebuilt", processor.level()), found


def formats():
    for name in ("FLOAT16", "BFLOAT16", "FLOAT8_E4M3", "FLOAT4_E2M1", "TFLOAT32"):
        assert mpgluon.round_to(1 / 3, getattr(mpgluon, name)) != 1 / 3
    assert mpgluon.round_to(1 / 3, mpgluon.FloatFormat("ours", 5, 4)) != 1 / 3
    for text in ("mixed_float8", "mixed_float16", "params=float32,compute=bfloat16,output=float32"):
        assert mpgluon.Policy.parse(text).compute_dtype
    mpgluon.ScaledOperands(mpgluon.FLOAT8_E4M3, mpgluon.FLOAT8_E5M2)
    mpgluon.TensorCoreSums("hopper")
    for name in ("none", 8.0, "dynamic", "measured"):
        as_loss_scale(name).update(grads_finite=True)
    assert mpgluon.errors.did_you_mean("flaot16", ["float16"])


def train():
    """Train with both recorders; the step whose images are too bright for float16 is skipped."""
    net = make()
    scale = mpgluon.DynamicLossScale(1024)
    trainer = mpgluon.prepare(net, "float16", "sgd", {"learning_rate": 0.5}, loss_scale=scale)
    mpgluon.WeightAverage(trainer, 0.9)
    flight = diagnostics.FlightRecorder(net, trainer, FOLDER / "flight", network="network:make")
    numerics = diagnostics.NumericsRecorder(net, trainer, NUMBERS, every=1)
    diagnostics.ExponentRecorder(trainer, every=5)
    losses, skipped = [], []
    for step in range(1, 31):
        x, labels = images()
        x = x * 6e5 if step == 20 else x
        with flight.step(x, labels), numerics.step(x, labels):
            with autograd.record():
                loss = cross_entropy(net(x), labels)
                with amp.scale_loss(loss, trainer) as scaled_loss:
                    autograd.backward(scaled_loss)
            assert amp.unscaled_gradients(trainer)
            amp.clip_global_norm(trainer, 10.0, len(x))
            trainer.step(len(x))
        losses.append(loss.mean().asscalar())
        if amp.step_was_skipped(trainer):
            skipped.append(step)
    assert skipped == [20], skipped
    assert losses[-1] < losses[0] / 2, losses
    assert (amp.skipped_steps(trainer), amp.loss_scale(trainer)) == (1, 512)
    assert amp.gradient_norm(trainer) > 0
    assert amp.step_flags(trainer) is not None
    assert len(list((FOLDER / "flight").glob("*.npz"))) == 1
    assert len(diagnostics.read_numerics(NUMBERS).numbers) == 30
    return net, trainer


def save_and_load(net, trainer):
    path = FOLDER / "checkpoint.npz"
    mpgluon.save_checkpoint(path, net, trainer, epoch=3)
    assert (
        mpgluon.load_checkpoint(path, net, trainer) == checkpoint.read_extra(path) == {"epoch": 3}
    )
    values = checkpoint.read_parameters(path)
    checkpoint.check_parameters(path, make()._collect_params_with_prefix(), values)


def fp32_gradients():
    """Unscale in place, which FP32 parameters allow."""
    net = make()
    amp.autocast(net, "bfloat16")
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer, 8)
    x, labels = images()
    with autograd.record():
        loss = cross_entropy(net(x), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    amp.unscale(trainer)
    trainer.step(len(x))
    amp.restore(net)
    mpgluon.cast_block(net)
    mpgluon.restore(net)


def by_hand():
    net = fp16_utils.network_to_half(make())
    for function in (fp16_utils.bn_to_float32, fp16_utils.BN_convert_float):
        assert function(make()) is not None
    parameters, masters = fp16_utils.prep_param_lists(net)
    x, labels = images()
    with autograd.record():
        loss = cross_entropy(net(x), labels)
    loss.backward()
    fp16_utils.model_grads_to_master_grads(parameters, masters)
    fp16_utils.master_params_to_model_params(parameters, masters)


def estimate():
    net = make()
    trainer = mpgluon.prepare(net, "mixed_float16", "sgd")
    processor = mpgluon.estimator.BatchProcessor()
    options = {"train_metrics": mx.metric.Accuracy(), "trainer": trainer}
    one = Estimator(net, cross_entropy, batch_processor=processor, **options)
    one.logger.disabled = True
    one.fit(gluon.data.DataLoader(gluon.data.ArrayDataset(*images()), batch_size=6), epochs=1)


def names_of_contrib_amp():
    for name in contrib_amp.__all__:
        if name.startswith("list_"):
            assert getattr(amp, name)() is not None
    net = make()
    net.hybridize()
    net(images()[0])
    net.export(str(FOLDER / "symbol"))
    symbol, arguments, auxiliary = mx.model.load_checkpoint(str(FOLDER / "symbol"), 0)
    amp.convert_symbol(symbol)
    amp.convert_model(symbol, arguments, auxiliary)
    amp.convert_hybrid_block(net)
    amp.init()


def deploy(net):
    inference = deployment.inference_network(net, "float16")
    batches = [images()]
    assert deployment.agreement(net, inference, batches).same_category == 6
    deployment.export_mxnet(net, FOLDER / "exported")
    deployment.import_mxnet(FOLDER / "exported")
    program = deployment.export_torch(net, FOLDER / "torch", [(1, 3, 8, 8)])
    assert "class Network" in (program / "model.py").read_text()
    assert deployment.record_layers(net, program / "layers.npz", images()[0]).exists()
    metadata = onnx.ServingMetadata("net", 8, ("red", "green", "blue"))
    needs("onnx", lambda: onnx.export_onnx(net, FOLDER / "net.onnx", metadata))
    needs("onnx", lambda: onnx.read_metadata(FOLDER / "net.onnx"))


def examine():
    net = make()
    batch = diagnostics.Batch(*images(), cross_entropy)
    for name in ("range_report", "batch_exponents", "compare_with_fp32"):
        assert getattr(diagnostics, name)(net, batch) is not None
    assert diagnostics.alignment_report(net, (1, 3, 8, 8)) is not None
    assert diagnostics.check_network(net, (6, 3, 8, 8)) is not None
    assert diagnostics.suggest_keep_fp32(net, batch) is not None
    assert diagnostics.operator_formats(net, batch) is not None
    assert diagnostics.locate_overflow(net, batch) is None
    assert not diagnostics.check_machine().has_errors
    trainer = mpgluon.prepare(net, "float16", "sgd")
    assert diagnostics.check_training(net, trainer) is not None
    diagnostics.OverflowLocator(net, trainer)
    assert diagnostics.compare_numerics(NUMBERS, NUMBERS).step is None
    (recorded,) = (FOLDER / "flight").glob("*.npz")
    assert diagnostics.replay(recorded, make()).same_bits
    needs("report", lambda: diagnostics.diagnose(make(), batch, title="every name"))


def draw():
    steps = [
        {"step": step, "epoch": 0, "loss": 1.0, "loss_scale": 8.0, "skipped": step == 1,
         "gradient_norm": 1.0, "images": 4, "images_per_second": 9.0}
        for step in (1, 2)
    ]  # fmt: skip
    epochs = [{"step": 2, "train_loss": 1.0, "train_accuracy": 0.5, "test_accuracy": 0.5}]
    histogram = diagnostics.exponent_histogram([mx.nd.array([0.5, 2.0])])
    for one in (
        lambda axes: plots.draw_accuracy(axes, epochs),
        lambda axes: plots.draw_loss(axes, steps, epochs),
        lambda axes: plots.draw_loss_scale(axes, steps),
        lambda axes: plots.draw_gradient_norm(axes, steps),
        lambda axes: plots.draw_speed(axes, steps),
        lambda axes: plots.draw_exponents(axes, {"weights": histogram}),
        lambda axes: plots.draw_exponent_heatmap(axes, ["dense"], [histogram]),
    ):
        needs("plots", lambda one=one: plots.png(one))
    needs("plots", lambda: plots.png(lambda axes: plots.draw_training(axes.figure, steps, epochs)))
    path = FOLDER / "curves.png"
    needs("plots", lambda: plots.save_training_curves(path, steps, epochs, title="every name"))


def networks():
    name, of_gluoncv = "resnet18_v1", "resnet18_v1b"
    assert (zoo.is_in_mxnet(name), zoo.is_in_mxnet(of_gluoncv)) == (True, False)
    options = {"classes": 3, "image_size": 32, "devices": [mx.cpu()]}
    net = zoo.build_network(name, **options)
    zoo.refuse_image_size(net, name, 32, mx.cpu())
    needs("zoo", lambda: zoo.refuse_unknown_network(of_gluoncv))
    needs("zoo", lambda: zoo.build_network(of_gluoncv, **options))


def processes(net, trainer):
    one = distributed.OneProcess()
    assert one.gather("mine", "a word") == ["mine"]
    distributed.check_agreement(one, net)
    distributed.average_batch_norm(one, net)
    distributed.begin(trainer)
    distributed.share_state(one, net, trainer)
    assert len(distributed.synchronize_batch_norm(make(), 1)) == 1
    assert distributed.devices_of_process("cpu", one) == [mx.cpu()]
    distributed.MpiKVStore(one)

    def enter():
        with distributed.MpiProcesses() as found:
            assert (found.rank, found.world_size) == (0, 1)

    needs("mpi", enter)


def commands():
    assert "0." in command("--version")
    doctor = command("doctor", "network:make")
    assert "Native operators: prebuilt" in " ".join(doctor.split())
    assert "\nnetwork:make\n" in doctor
    times = command("bench", *OURS, "--rounds=2")
    assert "bfloat16, autocast" in times
    command("bench", "step-00000004.npz", extra="recipes", status=2)
    assert "30 recorded steps" in command("numerics", NUMBERS)
    command("numerics", NUMBERS, f"--html={FOLDER}/numbers.html", extra="report")
    (recorded,) = (FOLDER / "flight").glob("*.npz")
    assert "overflow" in command("replay", recorded, "--network=network:make")
    command("diagnose", *OURS, f"--output={FOLDER}/page.html", extra="report")
    command("export", *OURS, f"--output={FOLDER}/net.onnx", extra="onnx")
    assert "check.py" in command("export", *OURS, "--to=torch", f"--output={FOLDER}/program")
    serve()


def finetune():
    """Train on photographs from random weights, and open the run."""
    photographs, weights, run = (FOLDER / name for name in ("photographs", "net.params", "run"))
    arguments = ["finetune", photographs, f"--weights={weights}", f"--output-dir={run}"]
    if lacks("recipes"):
        command(*arguments, extra="recipes")
        needs("recipes", lambda: mpgluon.load_classifier(run))
        return
    from PIL import Image

    for number in range(8):
        path = photographs / ("red" if number % 2 else "blue") / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50, 40), path.parent.name).save(path)
    net = zoo.build_network("efficientnet_lite0", classes=3, image_size=160, devices=[mx.cpu()])
    net.save_parameters(str(weights))
    done = subprocess.run(
        [COMMAND, *map(str, arguments), "--epochs=1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "6 photographs for training, 2 for testing" in done.stdout
    assert (run / "predictions.csv").read_text().count("\n") == 3
    command("bench", run, "--batch-size=2", "--rounds=1", "--no-memory")
    classify = mpgluon.load_classifier(run)
    assert sorted(name for name, _ in classify(photographs / "red" / "1.jpg")) == ["blue", "red"]
    done = subprocess.run(
        [COMMAND, "predict", run, photographs / "red" / "1.jpg"], capture_output=True, text=True
    )
    assert done.stdout.count("\n") == 1, done.stderr


def serve():
    """Serve a page, and look at it."""
    arguments = [COMMAND, "serve", *OURS, "--port=0"]
    if lacks("serve"):
        command(*arguments[1:], extra="serve")
        return
    with subprocess.Popen(arguments, cwd=HERE, stdout=subprocess.PIPE, text=True) as server:
        address = next(line for line in server.stdout if line.startswith("http")).split()[0]
        page = urllib.request.urlopen(address).read().decode()
        server.send_signal(signal.SIGINT)
    assert "HybridSequential" in page or "network:make" in page


def uncalled():
    """Return the public functions and classes of which nothing ran."""
    found = []
    for module in map(import_module, MODULES):
        for name in module.__all__:
            try:
                value = getattr(module, name)
            except ImportError as error:  # a name with its extra
                check_message("report", str(error))
                continue
            if isclass(value) and issubclass(value, Exception):
                continue
            members = vars(value).values() if isclass(value) else [value]
            members = [getattr(one, "fget", getattr(one, "__func__", one)) for one in members]
            codes = {getattr(unwrap(one), "__code__", None) for one in members} - {None}
            if codes and not codes & RAN:
                found.append(f"{module.__name__}.{name}")
    return found


def main():
    assert not [name for name in ASKED_FOR if name in PACKAGES and lacks(name)]
    if "x86-64-v2" in processor.levels():  # the wheel's lowest one
        native_operators()
    formats()
    net, trainer = train()
    save_and_load(net, trainer)
    fp32_gradients()
    by_hand()
    estimate()
    deploy(net)
    examine()
    draw()
    networks()
    processes(net, trainer)
    names_of_contrib_amp()  # the last one: amp.init() holds for the process
    finetune()
    left = uncalled()
    if lacks("plots"):  # what draws into axes, which matplotlib would make
        left = [name for name in left if not name.startswith("mpgluon.tools.plots.draw_")]
    assert not left, left
    commands()


if __name__ == "__main__":
    main()
