"""Loading CUDA's libraries from NVIDIA's wheels: on stand-ins, and once on the real ones.

The stand-ins are small libraries with the names of the real ones, in the folders of the real ones.
Each writes down its file when it is loaded, and has the dependencies of the real one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from mpgluon.base.cuda_libraries import LIBRARIES, load

import mxnet as mx
import pytest

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).resolve().parents[1]
MODULE = ROOT / "mpgluon" / "base" / "cuda_libraries.py"

# As in the wheels that the extra "cu117" names.
WHEEL_FILES = [
    *("cuda_runtime/lib/libcudart.so.11.0", "cuda_nvrtc/lib/libnvrtc.so.11.2"),
    *("nvtx/lib/libnvToolsExt.so.1", "cublas/lib/libcublasLt.so.11", "cublas/lib/libcublas.so.11"),
    *("cufft/lib/libcufft.so.10", "curand/lib/libcurand.so.10", "cusparse/lib/libcusparse.so.11"),
    *("cusolver/lib/libcusolver.so.11", "cudnn/lib/libcudnn.so.8", "nccl/lib/libnccl.so.2"),
]
NEEDS = {
    "libcublas.so.11": ["libcublasLt.so.11"],
    "libcusolver.so.11": ["libcublas.so.11", "libcublasLt.so.11"],
}
STAND_IN = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void write_down(void) {
  Dl_info here;
  FILE *file = fopen(getenv("LOADED"), "a");
  dladdr((void *)write_down, &here);
  fprintf(file, "%s\\n", here.dli_fname);
  fclose(file);
}
"""
# NVIDIA's driver on a machine without a GPU: what MXNet's build for CUDA 11.7 links to. The runtime
# asks for many more functions by name, and accepts that a driver lacks them.
DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
enum { NO_DEVICE = 100, NOT_FOUND = 500 };
int cuInit(unsigned flags) { return NO_DEVICE; }
int cuDriverGetVersion(int *version) { *version = 12020; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no device"; return 0; }
int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
  *function = dlsym(RTLD_DEFAULT, name);
  return *function ? 0 : NOT_FOUND;
}
#define REFUSE(name) int name(void) { return NO_DEVICE; }
REFUSE(cuDeviceGet) REFUSE(cuDeviceGetCount) REFUSE(cuDevicePrimaryCtxRetain)
REFUSE(cuGraphKernelNodeGetParams) REFUSE(cuGraphNodeGetType) REFUSE(cuLaunchKernel)
REFUSE(cuModuleGetFunction) REFUSE(cuModuleLoadData) REFUSE(cuModuleLoadDataEx)
REFUSE(cuModuleUnload)
"""
FAKE_MXNET = """
import ctypes, pathlib
ctypes.CDLL(str(pathlib.Path(__file__).with_name("libmxnet.so")))
"""


@pytest.fixture(scope="session")
def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("the stand-ins for CUDA's libraries need a C compiler")
    return found


def compile_library(compiler: str, source: str, target: Path, needs=()) -> None:
    """Compile a library that is called like its file and needs others, by their files."""
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(target)]
    command += [f"-Wl,-soname,{target.name}", "-Wl,--no-as-needed", "-x", "none", *map(str, needs)]
    # Libraries of libraries are looked for when they are loaded, not here.
    command += ["-Wl,--allow-shlib-undefined", "-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    subprocess.run([*command, "-ldl"], input=source, text=True, check=True, timeout=60)


@pytest.fixture(scope="session")
def made(compiler, tmp_path_factory) -> Path:
    """Return a folder with site-packages of stand-ins, and one with the driver."""
    folder = tmp_path_factory.mktemp("cuda")
    site = folder / "site"
    files = {Path(file).name: site / "nvidia" / file for file in WHEEL_FILES}
    for name, file in files.items():
        needs = [files[other] for other in NEEDS.get(name, [])]
        compile_library(compiler, STAND_IN, file, needs)
    compile_library(compiler, STAND_IN, folder / "driver" / "libcuda.so.1")
    needs = [*files.values(), folder / "driver" / "libcuda.so.1"]
    compile_library(compiler, STAND_IN, site / "mxnet" / "libmxnet.so", needs)
    (site / "mxnet" / "__init__.py").write_text(FAKE_MXNET)
    make_distribution(site, "mxnet-cu117")
    return folder


def make_distribution(site: Path, name: str, version: str = "1.9.1") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def start(python: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run an interpreter with some variables more."""
    return subprocess.run(
        [python, "-W", "ignore", *arguments],
        **{"capture_output": True, "text": True, "timeout": 600, "check": False},
        env={**os.environ, **environment},
    )


class Machine:
    """A copy of the stand-ins, to change and to start Python on."""

    def __init__(self, folder: Path, made: Path) -> None:
        shutil.copytree(made, folder)
        self.site, self.driver = folder / "site", folder / "driver"
        self.system = folder / "system"
        self._record = folder / "loaded"
        self._record.touch()

    @property
    def wheel_files(self) -> list[Path]:
        return [self.site / "nvidia" / file for file in WHEEL_FILES]

    @property
    def loaded(self) -> list[Path]:
        return [Path(line) for line in self._record.read_text().splitlines()]

    def start(self, *arguments: str) -> subprocess.CompletedProcess:
        libraries = f"{self.driver}:{self.system}"
        own = {"PYTHONPATH": str(self.site), "LOADED": str(self._record)}
        return start(sys.executable, *arguments, LD_LIBRARY_PATH=libraries, **own)

    def runs(self, code: str) -> str:
        """Return the output of the code, which has the module at hand but not the package."""
        done = self.start("-c", f"import runpy\nM = runpy.run_path({str(MODULE)!r})\n{code}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def import_error(self) -> str:
        """Return the last line of what ``import mpgluon`` prints, which must fail."""
        done = self.start("-c", "import mpgluon")
        assert done.returncode == 1
        return done.stderr.splitlines()[-1]


@pytest.fixture
def machine(tmp_path, made) -> Machine:
    return Machine(tmp_path / "machine", made)


def test_without_help_the_loader_does_not_find_them(machine):
    done = machine.start("-c", "import mxnet")
    assert done.stderr.endswith("cannot open shared object file: No such file or directory\n")
    assert machine.loaded == []


def test_all_are_loaded_in_their_order_and_then_mxnet(machine):
    machine.runs("M['import_mxnet']()")
    *first, last = machine.loaded
    assert first[:-1] == machine.wheel_files
    assert first[-1] == machine.driver / "libcuda.so.1"
    assert last == machine.site / "mxnet" / "libmxnet.so"


def test_import_mpgluon_loads_them_and_goes_on(machine):
    # MXNet's real build for the CPU, in a folder that looks like the CUDA build's.
    shutil.rmtree(machine.site / "mxnet")
    (machine.site / "mxnet").symlink_to(Path(mx.__file__).parent)
    done = machine.start(
        "-c", "import mpgluon, mxnet as mx; print((mx.nd.ones(1) + 1).asscalar(), mx.__file__)"
    )
    assert done.stdout.split() == ["2.0", str(machine.site / "mxnet" / "__init__.py")], done.stderr
    assert machine.loaded == machine.wheel_files


CUDNN = "nvidia/cudnn/lib/libcudnn.so.8"


@pytest.mark.parametrize(
    ("file", "content", "messages"),
    [
        (
            "../driver/libcuda.so.1",
            None,
            [
                "ImportError: MXNet cannot be imported: libcuda.so.1: cannot open",
                "needs NVIDIA's driver, which has libcuda.so.1: install it",
                "pip uninstall the one for CUDA, then pip install mxnet==1.9.1",
            ],
        ),
        (
            "nvidia/cuda_nvrtc/lib/libnvrtc.so.11.2",
            None,
            ["libnvrtc.so.11.2: cannot open", "nvidia-cuda-nvrtc-cu11 has this library: pip inst"],
        ),
        (CUDNN, b"\x7fELF", [f"{CUDNN}: file too short", "nvidia-cudnn-cu11 has this library"]),
        ("mxnet/libmxnet.so", b"", ["`mpgluon doctor` says what this machine lacks"]),
    ],
    ids=["no driver", "no nvrtc", "damaged cuDNN", "damaged MXNet"],
)
def test_a_missing_or_damaged_library_is_named_with_what_to_do(machine, file, content, messages):
    path = machine.site / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    error = machine.import_error()
    assert all(message in error for message in messages), error


@pytest.mark.parametrize("build", ["mxnet", "mxnet-cu112", None])
def test_for_another_build_nothing_is_loaded_in_less_than_a_millisecond(machine, build):
    shutil.rmtree(machine.site / "mxnet_cu117-1.9.1.dist-info")
    if build is None:
        shutil.rmtree(machine.site / "mxnet")
    else:
        make_distribution(machine.site, build)
    # The quickest of some calls: others may need the processor.
    said = machine.runs(f"""
import sys, time
sys.path.remove({str(Path(mx.__file__).parents[1])!r})
times = []
for _ in range(20):
    began = time.perf_counter()
    assert M['load']() == []
    times.append(time.perf_counter() - began)
print(min(times))
""")
    assert float(said) < 1e-3
    assert machine.loaded == []


def test_with_mxnet_imported_already_nothing_is_loaded(machine):
    assert load() == []
    machine.runs("import sys\nsys.modules['mxnet'] = sys\nassert M['load']() == []")
    assert machine.loaded == []


# --- the real ones -----------------------------------------------------------------------------

NEEDED_BYTES = 12 * 2**30  # 4 GB installed, 3.5 GB of files on their way, and room
USE_THE_LIBRARIES = """
import ctypes, json
import mpgluon, mxnet as mx
from mxnet import autograd, gluon

assert mx.runtime.Features().is_enabled("CUDNN")
net = gluon.nn.Dense(2, in_units=3)
net.initialize()
mpgluon.cast_block(net)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
with autograd.record():
    loss = net(mx.nd.ones((1, 3))).sum()
loss.backward()
trainer.step(1)
assert net.weight.data().dtype.__name__ == "float16"

# Both look for more libraries of their own.
rtc = ctypes.CDLL("libnvrtc.so.11.2")
program = ctypes.c_void_p()
source = b'extern "C" __global__ void twice(float *x) { x[threadIdx.x] *= 2; }'
assert rtc.nvrtcCreateProgram(ctypes.byref(program), source, b"twice.cu", 0, None, None) == 0
assert rtc.nvrtcCompileProgram(program, 0, None) == 0
dnn = ctypes.CDLL("libcudnn.so.8")
for part in ("Ops", "Cnn", "Adv"):
    for half in ("Infer", "Train"):
        assert dnn[f"cudnn{part}{half}VersionCheck"]() == 0, (part, half)
print(json.dumps([mx.context.num_gpus(), dnn.cudnnGetVersion()]))
"""


@pytest.fixture(scope="module")
def cuda_python(tmp_path_factory) -> Path:
    """Return the interpreter of a new environment with mpgluon[cu117]."""
    folder = tmp_path_factory.mktemp("cu117")
    if shutil.disk_usage(folder).free < NEEDED_BYTES:
        pytest.skip(f"{NEEDED_BYTES / 2**30:.0f} GiB of free disk are needed for CUDA's libraries")
    source = folder / "source"
    for name in ("mpgluon", "mpgluon_tools"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("mpgluon_command.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    python = folder / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", f"{source}[cu117]"]
    subprocess.run(install, check=True, timeout=3600)
    yield python
    shutil.rmtree(folder)


@pytest.fixture
def driver(compiler, tmp_path) -> Path:
    compile_library(compiler, DRIVER, tmp_path / "driver" / "libcuda.so.1")
    return tmp_path / "driver"


@pytest.mark.network
def test_an_installed_extra_needs_nothing_but_a_driver(cuda_python, driver):
    done = start(cuda_python, "-c", USE_THE_LIBRARIES, LD_LIBRARY_PATH=str(driver))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 8906]"
    doctor = start(cuda_python, "-m", "mpgluon_command", "doctor", LD_LIBRARY_PATH=str(driver))
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    said = " ".join(doctor.stdout.split())
    assert "ok MXNet mxnet-cu117 1.9.1" in said
    assert "ok cuDNN 8.9.6" in said
    assert "note GPU none, though MXNet's build is for CUDA" in said
    assert "the driver's library is there and shows no GPU" in said


@pytest.mark.network
def test_the_real_files_are_where_the_table_says(cuda_python, driver):
    code = f"import runpy\nfor file in runpy.run_path({str(MODULE)!r})['load'](): print(file.name)"
    done = start(cuda_python, "-c", code, LD_LIBRARY_PATH=str(driver))
    assert done.stdout.split() == list(LIBRARIES), done.stderr
