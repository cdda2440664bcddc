"""torchvision's networks without torchvision: names, shapes and forward passes, written by hand.

The forward passes ask for arrays by torchvision's names and know nothing of Gluon's layers, so that
they tell whether each array arrived where it belongs. They are run on MXNet's operators, and on
PyTorch's in an interpreter that has it: this imports neither.

Names and arithmetic follow torchvision 0.21 (resnet.py, vgg.py, mobilenetv2.py), and for
EfficientNet-Lite0 the implementation in the package efficientnet_lite_pytorch 0.1.
"""

import numpy as np

EPSILON = 1e-5
RESNETS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
VGGS = {"vgg11": (1, 1, 2, 2, 2), "vgg13": (2, 2, 2, 2, 2)}
BOTTLENECKS = [  # expansion, channels, how many, stride of the first
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
]
INVERTED = [  # of EfficientNet-Lite0: expansion, kernel, stride of the first, channels, how many
    *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
    *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
]
_STATISTICS = ("weight", "bias", "running_mean", "running_var")


class Shapes:
    """The names and shapes of a state dict, as a module with those layers would list them."""

    def __init__(self):
        self.shapes: dict[str, tuple[int, ...]] = {}

    def conv(self, name, outputs, inputs, size, *, bias=False):
        self.shapes[f"{name}.weight"] = (outputs, inputs, size, size)
        if bias:
            self.shapes[f"{name}.bias"] = (outputs,)

    def norm(self, name, channels):
        for word in _STATISTICS:
            self.shapes[f"{name}.{word}"] = (channels,)
        self.shapes[f"{name}.num_batches_tracked"] = ()

    def dense(self, name, outputs, inputs):
        self.shapes[f"{name}.weight"], self.shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)


def resnet_shapes(name, classes):
    shapes, inputs = Shapes(), 64
    bottleneck = name == "resnet50"
    shapes.conv("conv1", 64, 3, 7)
    shapes.norm("bn1", 64)
    for stage, blocks in enumerate(RESNETS[name]):
        width = 64 * 2**stage
        outputs = 4 * width if bottleneck else width
        for block in range(blocks):
            place = f"layer{stage + 1}.{block}"
            sizes = (1, 3, 1) if bottleneck else (3, 3)
            widths = (width, width, outputs)[-len(sizes) :]
            before = inputs
            for number, (size, channels) in enumerate(zip(sizes, widths), start=1):
                shapes.conv(f"{place}.conv{number}", channels, before, size)
                shapes.norm(f"{place}.bn{number}", channels)
                before = channels
            if block == 0 and (stage or bottleneck):
                shapes.conv(f"{place}.downsample.0", outputs, inputs, 1)
                shapes.norm(f"{place}.downsample.1", outputs)
            inputs = outputs
    shapes.dense("fc", classes, inputs)
    return shapes.shapes


def _norm(ops, state, name, x, **options):
    return ops.norm(x, *(state[f"{name}.{word}"] for word in _STATISTICS), **options)


def resnet(ops, state, x):
    x = ops.relu(_norm(ops, state, "bn1", ops.conv(x, state["conv1.weight"], stride=2)))
    x = ops.max_pool(x, 3, 2, 1)
    for stage in range(1, 5):
        block = 0
        while f"layer{stage}.{block}.conv1.weight" in state:
            place = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            last = 3 if f"{place}.conv3.weight" in state else 2
            strided = 2 if last == 3 else 1  # in a bottleneck the 3 x 3 convolution
            way = x
            for number in range(1, last + 1):
                weight = state[f"{place}.conv{number}.weight"]
                way = ops.conv(way, weight, stride=stride if number == strided else 1)
                way = _norm(ops, state, f"{place}.bn{number}", way)
                way = ops.relu(way) if number < last else way
            if f"{place}.downsample.0.weight" in state:
                x = ops.conv(x, state[f"{place}.downsample.0.weight"], stride=stride)
                x = _norm(ops, state, f"{place}.downsample.1", x)
            x = ops.relu(way + x)
            block += 1
    return ops.dense(ops.mean(x), state["fc.weight"], state["fc.bias"])


def vgg_shapes(name, classes, *, pixels):
    shapes, inputs, place = Shapes(), 3, 0
    base, _, norms = name.partition("_")
    for stage, layers in enumerate(VGGS[base]):
        channels = min(64 * 2**stage, 512)
        for _ in range(layers):
            shapes.conv(f"features.{place}", channels, inputs, 3, bias=True)
            if norms:
                shapes.norm(f"features.{place + 1}", channels)
            place += 3 if norms else 2  # and a ReLU
            inputs = channels
        place += 1  # a pooling
    shapes.dense("classifier.0", 4096, 512 * (pixels // 32) ** 2)
    shapes.dense("classifier.3", 4096, 4096)
    shapes.dense("classifier.6", classes, 4096)
    return shapes.shapes


def vgg(ops, state, x):
    """Compute a VGG, whose adaptive pooling does nothing where Gluon's twin fits."""
    place = 0
    norms = "features.1.running_mean" in state
    stages = VGGS["vgg13"] if f"features.{3 if norms else 2}.weight" in state else VGGS["vgg11"]
    for layers in stages:
        for _ in range(layers):
            x = ops.conv(x, state[f"features.{place}.weight"], state[f"features.{place}.bias"])
            x = _norm(ops, state, f"features.{place + 1}", x) if norms else x
            x = ops.relu(x)
            place += 3 if norms else 2
        x = ops.max_pool(x, 2, 2, 0)
        place += 1
    x = ops.flat(x)
    for number in (0, 3, 6):
        layer = f"classifier.{number}"
        x = ops.dense(x, state[f"{layer}.weight"], state[f"{layer}.bias"])
        x = ops.relu(x) if number < 6 else x
    return x


def _mobilenet_layers():
    """Yield the name of each layer with its output, input, size, stride, groups, and ReLU6."""
    yield "features.0.0", "features.0.1", 32, 3, 3, 2, 1, True
    inputs, place = 32, 1
    for expansion, channels, blocks, first_stride in BOTTLENECKS:
        for block in range(blocks):
            hidden, layer = inputs * expansion, f"features.{place}.conv"
            number = 0
            if expansion > 1:
                yield f"{layer}.0.0", f"{layer}.0.1", hidden, inputs, 1, 1, 1, True
                number = 1
            stride = first_stride if block == 0 else 1
            depthwise = f"{layer}.{number}.0", f"{layer}.{number}.1"
            yield *depthwise, hidden, hidden, 3, stride, hidden, True
            projection = f"{layer}.{number + 1}", f"{layer}.{number + 2}"
            yield *projection, channels, hidden, 1, 1, 1, False
            inputs, place = channels, place + 1
    yield "features.18.0", "features.18.1", 1280, 320, 1, 1, 1, True


def _efficientnet_layers():
    """Yield the name of each layer with its output, input, size, stride, groups, and ReLU6."""
    yield "_conv_stem", "_bn0", 32, 3, 3, 2, 1, True
    inputs, place = 32, 0
    for expansion, size, first_stride, channels, blocks in INVERTED:
        for block in range(blocks):
            hidden, layer = inputs * expansion, f"_blocks.{place}."
            stride = first_stride if block == 0 else 1
            if expansion > 1:
                yield f"{layer}_expand_conv", f"{layer}_bn0", hidden, inputs, 1, 1, 1, True
            depthwise = f"{layer}_depthwise_conv", f"{layer}_bn1"
            yield *depthwise, hidden, hidden, size, stride, hidden, True
            yield f"{layer}_project_conv", f"{layer}_bn2", channels, hidden, 1, 1, 1, False
            inputs, place = channels, place + 1
    yield "_conv_head", "_bn1", 1280, 320, 1, 1, 1, True


def _bottleneck_shapes(layers, head, classes):
    shapes = Shapes()
    for conv, norm, outputs, inputs, size, _, groups, _ in layers:
        shapes.conv(conv, outputs, inputs // groups, size)
        shapes.norm(norm, outputs)
    shapes.dense(head, classes, 1280)
    return shapes.shapes


def _bottlenecks(ops, state, x, layers, *, epsilon=EPSILON, as_tensorflow=False):
    """Compute the features; TensorFlow pads fewer zeros before than after at a stride of 2."""
    before = None
    for conv, norm, _, _, size, stride, groups, rectified in layers:
        pad = size // 2
        if as_tensorflow and stride == 2:
            x, pad = ops.pad(x, (size - 2) // 2, (size - 1) // 2), 0
        x = ops.conv(x, state[f"{conv}.weight"], stride=stride, groups=groups, pad=pad)
        x = _norm(ops, state, norm, x, epsilon=epsilon)
        x = ops.relu6(x) if rectified else x
        if before is None:  # the first convolution, behind which the bottlenecks begin
            before = x
        elif not rectified:  # the end of a bottleneck
            before = x = x + before if before.shape == x.shape else x
    return ops.mean(x)


def mobilenet_shapes(classes):
    return _bottleneck_shapes(_mobilenet_layers(), "classifier.1", classes)


def mobilenet(ops, state, x):
    x = _bottlenecks(ops, state, x, _mobilenet_layers())
    return ops.dense(x, state["classifier.1.weight"], state["classifier.1.bias"])


def efficientnet_shapes(classes):
    return _bottleneck_shapes(_efficientnet_layers(), "_fc", classes)


def efficientnet(ops, state, x):
    """Compute it for images whose sides are multiples of 32: TensorFlow's padding is fixed then."""
    x = _bottlenecks(ops, state, x, _efficientnet_layers(), epsilon=1e-3, as_tensorflow=True)
    return ops.dense(x, state["_fc.weight"], state["_fc.bias"])


def random_state(shapes, seed=0):
    """Return values that keep activations near 1 and differ in every element."""
    random = np.random.RandomState(seed)
    state = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            values = random.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
        elif name.endswith("running_var") or (
            name.endswith("weight") and f"{name.removesuffix('weight')}running_var" in shapes
        ):
            values = random.uniform(0.5, 1.5, shape)
        elif name.endswith("num_batches_tracked"):
            state[name] = np.array(7, np.int64)
            continue
        else:
            values = random.standard_normal(shape) * 0.1
        state[name] = values.astype(np.float32)
    return state


def images(pixels, batch=2):
    return np.random.RandomState(1).standard_normal((batch, 3, pixels, pixels)).astype(np.float32)


def run(ops, network, state, pixels):
    """Return the logits of a hand-written network as a NumPy array."""
    arrays = {name: ops.array(values) for name, values in state.items() if values.ndim}
    return ops.numpy(network(ops, arrays, ops.array(images(pixels))))


def networks(classes, vgg_pixels):
    """Return the shapes and the forward pass of each network."""
    return {
        **{name: (resnet_shapes(name, classes), resnet) for name in RESNETS},
        **{n: (vgg_shapes(n, classes, pixels=vgg_pixels), vgg) for n in ("vgg11", "vgg13_bn")},
        "mobilenet_v2": (mobilenet_shapes(classes), mobilenet),
        "efficientnet_lite0": (efficientnet_shapes(classes), efficientnet),
    }


def fitting_state(name, shapes):
    """Return random values that fit the twin: Gluon's MobileNetV2 has no bias in its head."""
    state = random_state(shapes)
    if name == "mobilenet_v2":
        state["classifier.1.bias"][:] = 0
    return state


NETWORKS = networks(1000, vgg_pixels=224)  # for images of 224 pixels
TWINS = {  # Gluon's names
    **{"resnet18": "resnet18_v1b", "resnet50": "resnet50_v1b", "vgg11": "vgg11"},
    **{"vgg13_bn": "vgg13_bn", "mobilenet_v2": "mobilenetv2_1.0"},
    "efficientnet_lite0": "efficientnet_lite0",
}
