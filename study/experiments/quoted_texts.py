"""The numbers that pages and lessons take from records without a mark, as the records give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["QUOTES"]

# By page or notebook; expressions as in `study.experiments.page`.
QUOTES: Mapping[str, Sequence[str]] = {
    "docs/performance.md": (
        """time and {timings.memory("50_v1, batch 32,", CAST, "memory"):.2f} to
        {timings.memory("50_v1, batch 8,", CAST, "memory"):.2f} of the memory.""",
        """The geometric mean is {timings.mean(CAST, "zoo"):.2f} cast and
        {timings.mean(AUTOCAST, "zoo"):.2f} autocast, the worst {timings.most(CAST, "zoo"):.2f},
        MobileNet 1.0. With 0.1.0 they were 1.01, 0.97 and 1.30.""",
        """MobileNet v3 large well below 1, the others at most {timings.most(CAST, "zoo"):.2f}""",
        """BF16 takes {timings.over_pytorch()[0]:.2f} to {timings.over_pytorch()[-1]:.2f} of the
        time of PyTorch's better one.""",
        """its LSTM takes {timings.relative("lstm, 2 x 256", "PyTorch float32"):.2f} of Gluon's
        time, without any format of 16 bits. A step of the smallest takes
        {1000 * timings.seconds("lstm, 1 x 64", FLOAT32):.0f} ms.""",
        """They took up to {timings.most(CAST, "zoo-small"):.2f} in a record of 0.1.0""",
        """a training step {timings.relative("step, resnet50", BFLOAT16):.2f} (contrib.amp
        {timings.relative("step, resnet50", "contrib.amp bfloat16"):.2f}, and
        {timings.relative("step, resnet50", "contrib.amp bfloat16, scaled"):.2f} with its loss
        scale); folded and fused, 8 images
        {timings.relative("inference, resnet50_v1, batch 8", FOLDED):.2f}, one image
        {timings.relative("in a loop", FOLDED):.2f} called in a row,
        {timings.relative("after pauses", FOLDED):.2f} with pauses between calls. Loss scaling
        takes {100 * timings.relative("scaling, bfloat16", "amp") - 100:.1f} % of a BF16 step and
        {100 * timings.relative("scaling, float16", "amp") - 100:.1f} % of a FP16 one.""",
        """AlexNet takes {timings.memory("alexnet", CAST, "memory-alexnet"):.2f} times as much
        memory (autocast {timings.memory("alexnet", AUTOCAST, "memory-alexnet"):.2f}; record),
        VGG-16 {timings.memory("vgg16", CAST, "memory-vgg16"):.2f}
        ({timings.memory("vgg16", AUTOCAST, "memory-vgg16"):.2f}; record), VGG-11 with BatchNorm
        {timings.memory("vgg11_bn", CAST, "memory-vgg11_bn"):.2f}
        ({timings.memory("vgg11_bn", AUTOCAST, "memory-vgg11_bn"):.2f}; record). The others of
        the 18 networks take {timings.memories(CAST, "zoo")[0]:.2f} to
        {timings.memories(CAST, "zoo")[-4]:.2f}""",
        """a batch of {timings.largest_batch(FLOAT32)} images in FP32 and of
        {timings.largest_batch(CAST)} in FP16""",
        """mpgluon's native BF16 takes {timings.relative("step, resnet50", BFLOAT16):.2f},
        contrib.amp's {timings.relative("step, resnet50", "contrib.amp bfloat16"):.2f}, PyTorch's
        {timings.relative("step, resnet50", "PyTorch bfloat16"):.2f} and compiled
        {timings.relative("step, resnet50", "PyTorch bfloat16, compiled"):.2f}, TensorFlow's
        {timings.relative("step, resnet50", "TensorFlow bfloat16"):.2f}; FP16 takes
        {timings.relative("step, resnet50", CAST):.2f}""",
        """the geometric mean is {timings.mean(CAST, "avx2-zoo"):.2f} cast and
        {timings.mean(AUTOCAST, "avx2-zoo"):.2f} autocast, and the worst is Inception v3,
        {timings.most(CAST, "avx2-zoo"):.2f} in both""",
        """PyTorch {timings.version("torch")}, zentorch {timings.version("zentorch")}, TensorFlow
        {timings.version("tensorflow")}, OpenVINO {timings.version("openvino")}, ONNX Runtime
        {timings.version("onnxruntime")}""",
    ),
    "docs/performance-log.md": (
        """DataLoader takes {timings.relative("JPEG files", "DataLoader, 2 workers"):.2f} of the
        time of ImageLoader""",
        """From {timings.speeds()[0]:.1f} to {max(timings.speeds()):.1f} images a second""",
        """with depth to the power of {timings.exponent("float32"):.2f} (FP32) and
        {timings.exponent("float16"):.2f} (FP16)""",
    ),
    "docs/deployment.md": (
        """With a pause before each image BF16 takes {timings.relative("after pauses", FOLDED):.2f}
        of FP32's time too""",
    ),
    "docs/gpu.md": (
        """trained with PyTorch {gpu.version("h200-cifar10")} on an H200""",
        """Recorded on an H100 (80 GB, HBM3) with PyTorch {gpu.version("h100-80gb-hbm3")} and cuDNN
        {gpu.times["cudnn"] // 10000}.{gpu.times["cudnn"] // 100 % 100}, since""",
        """one run in FP16 was {gpu.faster("float16", 32):.1f} times as fast as FP32""",
        """{gpu.tflops("float32"):.0f} TFLOP/s in FP32, {gpu.tflops("float16"):.0f} in FP16""",
        """padded to 33,712: {gpu.dense("float16", 5120, 1024, 33708)
        / gpu.dense("float16", 5120, 1024, 33712):.1f} times as fast.""",
        """{gpu.convolution("NHWC", 63) / gpu.convolution("NHWC", 64):.1f} times slower with
        channels last, {gpu.convolution("NCHW", 63) / gpu.convolution("NCHW", 64):.1f} times with
        channels first, which is MXNet's layout.""",
        """{gpu.convolution("NHWC", 3) / gpu.convolution("NHWC", 4):.1f} times as fast with
        channels last, {gpu.convolution("NCHW", 3) / gpu.convolution("NCHW", 4):.1f} times with""",
    ),
    "notebooks/05_resnet50_on_caltech101.ipynb": (
        """FP32 {caltech101.mean("float32"):.1f} +0.0 0 of 5436 FP16
        {caltech101.mean("float16"):.1f}
        {caltech101.comparison("float16", figure=PER_CLASS).mean:+.1f}
        {caltech101.comparison("float16", figure=PER_CLASS).lower:+.1f} to
        {caltech101.comparison("float16", figure=PER_CLASS).upper:+.1f} 35 of 5436 BF16
        {caltech101.mean("bfloat16"):.1f}
        {caltech101.comparison("bfloat16", figure=PER_CLASS).mean:+.1f}
        {caltech101.comparison("bfloat16", figure=PER_CLASS).lower:+.1f} to
        {caltech101.comparison("bfloat16", figure=PER_CLASS).upper:+.1f} 0 of 5436""",
    ),
    "notebooks/07_speed_and_memory.ipynb": (
        """SE-ResNeXt, CIFAR ResNet v1 and MobileNet v3 large well below 1, the others at most
        {timings.most(CAST, "zoo"):.2f}""",
        """mpgluon float16: geometric mean {timings.mean(CAST, "zoo"):.2f}, worst
        {timings.most(CAST, "zoo"):.2f} of FP32's time mpgluon autocast float16: geometric mean
        {timings.mean(AUTOCAST, "zoo"):.2f}, worst {timings.most(AUTOCAST, "zoo"):.2f}""",
        """{gpu.tflops("float16"):.0f} TFLOP/s in FP16, {gpu.tflops("float32"):.0f} in FP32""",
    ),
}
