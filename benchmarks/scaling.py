"""What a training step costs on many GPUs: a model of seconds, to plan a cluster with.

Each GPU computes gradients, and a ring sums them. The ring carries one way, through its slowest
link, 2 (n - 1) / n of the gradients' bytes, in 2 (n - 1) hops; the gradients travel in a few equal
messages, the first while backward is still busy with the others. Backward is two thirds of the
computation and is taken to make gradients at an even pace.

Left out is whatever else makes processes wait: images, unequal GPUs, a network that others use,
protocols. So figures are limits, and a plan that fails here fails. Trees and switches that add,
which NCCL may use instead of a ring, have fewer hops.

References
----------
Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
NVIDIA, nccl-tests, doc/PERFORMANCE.md: the factor 2 (n - 1) / n.
NVIDIA, NCCL, src/graph/tuning.cc, commit 01afd20: the hops inside and between machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Optional

import mxnet as mx

from mpgluon.diagnostics import alignment_report
from mpgluon.tables import Table
from mpgluon.training.networks import build_network

__all__ = [
    "A100",
    "ETHERNETS",
    "HDR",
    "NDR",
    "NVLINK",
    "Cluster",
    "Gpu",
    "Link",
    "Step",
    "Workload",
    "batch_for",
    "batch_table",
    "bytes_table",
    "clusters_of",
    "exchange_table",
    "predict",
    "ring_bytes",
    "workload_of",
]

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MESSAGES = (1, 2, 4, 8, 16, 32, 64)  # into how many gradients may be divided
ENOUGH = 0.95  # an efficiency at which the exchange is called hidden
LARGEST_BATCH = 4096

_BACKWARD = 2 / 3  # of a step's computation: two products for each of the forward pass


@dataclass(frozen=True)
class Link:
    """What carries gradients from one GPU to the next.

    Attributes
    ----------
    name : str
    gbit_per_s : float
        10**9 bits per second, one way; of all network cards of a machine together.
    latency_us : float
        Microseconds of one hop, whatever the size.
    """

    name: str
    gbit_per_s: float
    latency_us: float

    def __post_init__(self) -> None:
        if not self.gbit_per_s > 0:
            raise ValueError(f"a link's gbit_per_s must be positive, received {self.gbit_per_s}")
        if not self.latency_us >= 0:
            raise ValueError(f"latency_us must not be negative, received {self.latency_us}")


# Line rates, and the latencies with which NCCL plans a ring ("Simple" protocol). Their sources are
# in docs/scaling.md. NVLink: twelve links of 25 GB/s one way on an A100.
NVLINK = Link("NVLink 3", 8 * 300, 3.4)
_HOP_US = 9.6
HDR, NDR = Link("HDR InfiniBand", 200, _HOP_US), Link("NDR InfiniBand", 400, _HOP_US)
ETHERNETS = (Link("25 GbE", 25, _HOP_US), Link("100 GbE", 100, _HOP_US))


@dataclass(frozen=True)
class Gpu:
    """What computes.

    Attributes
    ----------
    name : str
    multiply_adds_per_s : mapping from dtype to float
        As reached in training: forward and backward together.
    """

    name: str
    multiply_adds_per_s: Mapping[str, float]

    @classmethod
    def from_speed(cls, name: str, images_per_s: Mapping[str, float], multiply_adds: float) -> Gpu:
        """Return the GPU that trains a network with so many images per second, alone.

        Parameters
        ----------
        name : str
        images_per_s : mapping from dtype to float
        multiply_adds : float
            Of one image's forward pass.
        """
        for dtype, speed in images_per_s.items():
            if dtype not in BYTES or not speed > 0:
                raise ValueError(
                    f"images per second are positive, by {', '.join(BYTES)}; received {speed:g} "
                    f"for {dtype!r}"
                )
        rates = {dtype: 3 * multiply_adds * speed for dtype, speed in images_per_s.items()}
        return cls(name, rates)


# NVIDIA's measurement with MXNet: ResNet-50 v1.5, which is gluoncv's resnet50_v1b, batch 256. What
# is float32 here were products in TF32 there.
A100 = Gpu.from_speed("A100", {"float16": 2180, "float32": 1022}, 4.089e9)


@dataclass(frozen=True)
class Cluster:
    """GPUs in machines, and the links of a ring through all of them.

    Attributes
    ----------
    gpus : int
        One machine's or fewer, or those of whole machines.
    between, inside : Link
        From machine to machine, and from GPU to GPU in one.
    gpus_per_machine : int
    gpu : Gpu
    """

    gpus: int
    between: Link
    inside: Link = NVLINK
    gpus_per_machine: int = 8
    gpu: Gpu = A100

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_machine < 1:
            raise ValueError(
                f"a cluster has at least one GPU, received {self.gpus} of {self.gpus_per_machine} "
                "in each machine"
            )
        if self.gpus > self.gpus_per_machine and self.gpus % self.gpus_per_machine:
            raise ValueError(
                f"{self.gpus} GPUs do not fill machines of {self.gpus_per_machine}; give a "
                "multiple, or another gpus_per_machine"
            )

    @property
    def machines(self) -> int:
        """How many are used."""
        return -(-self.gpus // self.gpus_per_machine)

    @property
    def name(self) -> str:
        """The slowest link, and where it is."""
        link = self.slowest.name
        if self.machines == 1:
            return f"{link} in one machine"
        return f"{link}, {self.gpus_per_machine} per machine"

    @property
    def slowest(self) -> Link:
        """The link that the whole ring waits for."""
        used = [self.between] if self.machines > 1 else []
        if self.gpus > self.machines:
            used.append(self.inside)
        return min(used or [self.inside], key=lambda link: link.gbit_per_s)

    @property
    def latency_s(self) -> float:
        """Seconds that a sum takes however small it is."""
        between = 2 * (self.machines - 1)
        inside = 2 * (self.gpus - 1) - between
        return (between * self.between.latency_us + inside * self.inside.latency_us) * 1e-6

    def sum_seconds(self, size: float) -> float:
        """Return how long a ring takes to sum a message of so many bytes over all GPUs."""
        return self.latency_s + 8e-9 * ring_bytes(self.gpus, size) / self.slowest.gbit_per_s


def clusters_of(gpus: Iterable[int], links: Sequence[Link], **options: Any) -> list[Cluster]:
    """Return a cluster for each number of GPUs and each link between machines.

    GPUs of one machine use none of them, and make one cluster.

    Parameters
    ----------
    gpus : iterable of int
    links : sequence of Link
        At least one.
    **options
        As for :class:`Cluster`.
    """
    found = []
    for count in gpus:
        clusters = [Cluster(count, link, **options) for link in links]
        found += clusters if clusters[0].machines > 1 else clusters[:1]
    return found


def ring_bytes(gpus: int, size: float) -> float:
    """Return how many bytes each GPU sends to the next when all together sum so many."""
    return 2 * (gpus - 1) / gpus * size


@dataclass(frozen=True)
class Workload:
    """A training step of one GPU.

    Attributes
    ----------
    name : str
    parameters : int
        That have a gradient.
    multiply_adds : int
        Of one image's forward pass.
    batch_size : int
        Images of one GPU.
    dtype : {"float32", "float16", "bfloat16"}
        In which it computes.
    sent_as : {"float32", "float16", "bfloat16"}, optional
        How gradients travel, if not in ``dtype``.
    """

    name: str
    parameters: int
    multiply_adds: int
    batch_size: int = 32
    dtype: str = "float16"
    sent_as: Optional[str] = None

    def __post_init__(self) -> None:
        for dtype in (self.dtype, self.travels_as):
            if dtype not in BYTES:
                raise ValueError(f"a format is one of {', '.join(BYTES)}; received {dtype!r}")
        smallest = min(self.parameters, self.multiply_adds, self.batch_size)
        if smallest < 1:
            raise ValueError(
                "parameters, multiply_adds and batch_size must be at least 1, received "
                f"{self.parameters}, {self.multiply_adds} and {self.batch_size}"
            )

    @property
    def travels_as(self) -> str:
        """The format of the gradients on their way."""
        return self.sent_as or self.dtype

    @property
    def gradient_bytes(self) -> int:
        """The size of all gradients on their way."""
        return self.parameters * BYTES[self.travels_as]

    def computation_s(self, gpu: Gpu) -> float:
        """Return the seconds of a step on one GPU alone."""
        if self.dtype not in gpu.multiply_adds_per_s:
            raise ValueError(f"the speed of {gpu.name} in {self.dtype} is not known; give it")
        return 3 * self.multiply_adds * self.batch_size / gpu.multiply_adds_per_s[self.dtype]


@dataclass(frozen=True)
class Step:
    """What a step takes.

    Attributes
    ----------
    computation_s, exchange_s : float
        Seconds of each by itself.
    exposed_s : float
        Seconds of the exchange after the computation has ended.
    messages : int
    """

    computation_s: float
    exchange_s: float
    exposed_s: float
    messages: int

    @property
    def hidden_fraction(self) -> float:
        """The share in [0, 1] of the exchange that happens during backward."""
        return 1 - self.exposed_s / self.exchange_s if self.exchange_s else 1.0

    @property
    def efficiency(self) -> float:
        """Speed per GPU, relative to one GPU alone."""
        return self.computation_s / (self.computation_s + self.exposed_s)


def predict(workload: Workload, cluster: Cluster, messages: Optional[int] = None) -> Step:
    """Return what a step takes, with the number of messages that is best, or with this one.

    The i-th of k messages can leave when i/k of backward is done, and when the one before it has
    come. Let each take m seconds: the last has come max(m, k m - b (k - 1)/k) seconds after a
    backward of b seconds.
    """
    if messages is None:
        steps = (predict(workload, cluster, count) for count in MESSAGES)
        return min(steps, key=lambda step: step.exposed_s)
    computation = workload.computation_s(cluster.gpu)
    each = cluster.sum_seconds(workload.gradient_bytes / messages)
    meanwhile = _BACKWARD * computation * (messages - 1) / messages
    exposed = max(each, messages * each - meanwhile)
    return Step(computation, messages * each, exposed, messages)


def batch_for(workload: Workload, cluster: Cluster, efficiency: float = ENOUGH) -> Optional[int]:
    """Return the smallest batch per GPU that gives this efficiency; ``None`` beyond 4096."""
    for batch in range(1, LARGEST_BATCH + 1):
        if predict(replace(workload, batch_size=batch), cluster).efficiency >= efficiency:
            return batch
    return None


def workload_of(model: str, image_size: int = 224, **options: Any) -> Workload:
    """Return a network of MXNet's or gluoncv's model zoo with 1000 classes, counted.

    Parameters
    ----------
    model : str
    image_size : int
        Pixels.
    **options
        As for :class:`Workload`.
    """
    net = build_network(model, classes=1000, image_size=image_size, devices=[mx.cpu()])
    parameters = sum(
        prod(parameter.shape)
        for parameter in net.collect_params().values()
        if parameter.grad_req != "null"
    )
    report = alignment_report(net, (1, 3, image_size, image_size))
    return Workload(model, parameters, report.multiply_adds, **options)


# --- tables ----------------------------------------------------------------------------------


def bytes_table(workload: Workload, gpus: Iterable[int]) -> Table:
    """Return what each GPU sends in a step, by format and number of GPUs; 1 MB is 10**6 bytes."""
    counts = sorted(set(gpus))
    rows = []
    for sent_as, meaning in (
        ("float32", "FP32 (float32, autocast, and all of MpiKVStore)"),
        ("float16", "16 bits (cast network, Horovod)"),
    ):
        size = replace(workload, sent_as=sent_as).gradient_bytes
        sent = [ring_bytes(count, size) for count in counts]
        rows.append([meaning, *(f"{number / 1e6:.1f}" for number in [size, *sent])])
    headings = ["gradients travel in", "MB", *(f"MB sent, {count:,} GPUs" for count in counts)]
    return Table(headings, rows)


def exchange_table(workload: Workload, clusters: Sequence[Cluster]) -> Table:
    """Return how long a ring takes for all gradients in one message, in milliseconds."""
    rows = []
    for cluster in clusters:
        sizes = [
            replace(workload, sent_as=dtype).gradient_bytes for dtype in ("float32", "float16")
        ]
        seconds = [cluster.sum_seconds(size) for size in sizes] + [cluster.latency_s]
        rows.append([*_names(cluster), *(_milliseconds(one) for one in seconds)])
    return Table(["GPUs", "slowest link", "FP32, ms", "16 bits, ms", "of which latency, ms"], rows)


def batch_table(
    workload: Workload, clusters: Sequence[Cluster], batch_sizes: Sequence[int] = (32, 256)
) -> Table:
    """Return at which batch the exchange is hidden, and what it costs at some batches.

    Efficiency, hidden share and messages are those of 16 bits, sent so; messages at the last batch
    size.
    """
    narrow = replace(workload, dtype="float16", sent_as=None)
    wide = replace(narrow, dtype="float32")
    mixed = replace(narrow, sent_as="float32")
    rows = []
    for cluster in clusters:
        batches = [batch_for(one, cluster) for one in (wide, mixed, narrow)]
        steps = [predict(replace(narrow, batch_size=size), cluster) for size in batch_sizes]
        rows.append(
            [
                *_names(cluster),
                *(f"> {LARGEST_BATCH}" if batch is None else str(batch) for batch in batches),
                *(
                    figure
                    for step in steps
                    for figure in (f"{step.efficiency:.0%}", f"{step.hidden_fraction:.0%}")
                ),
                str(steps[-1].messages),
            ]
        )
    headings = [
        "GPUs",
        "slowest link",
        "batch, FP32",
        "batch, 16 bits sent as FP32",
        "batch, 16 bits",
    ]
    for size in batch_sizes:
        headings += [f"efficiency, {size}", f"hidden, {size}"]
    return Table([*headings, "messages"], rows)


def _names(cluster: Cluster) -> list[str]:
    return [f"{cluster.gpus:,}", cluster.name]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds >= 0.01 else f"{1e3 * seconds:.2f}"
