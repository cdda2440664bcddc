# Two commands matter: `make demo` and `make test`. Both need Python 3.11, for which the versions in
# requirements/dev.txt are pinned, and a package index; nothing has to be installed beforehand.

PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python
DEMO := runs/demo

.PHONY: demo test test-slow test-torch lint notebooks notebooks-check lab environment clean

environment: $(VENV)/.complete

# Written last, so that an installation that was cut short starts again.
$(VENV)/.complete: requirements/dev.txt pyproject.toml
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/dev.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(RUN) -m mpgluon.native
	touch $@

# ResNet-50 in float16 on a CPU, on rendered images of ten shapes: real JPEG files through the real
# loader.
demo: environment
	rm -rf $(DEMO)
	$(RUN) scripts/train_caltech.py --dtype float16 --dataset shapes --data-dir data \
		--image-size 48 --batch-size 20 --train-per-class 40 --min-crop-area 0.5 \
		--epochs 10 --learning-rate 0.02 --output-dir $(DEMO)

test: environment lint
	$(RUN) -m pytest -m "not slow and not gpu and not network"
	$(MAKE) notebooks-check

test-slow: environment
	$(RUN) -m pytest -m slow

# Against PyTorch, in an environment of its own: gluoncv refuses to be imported beside it.
test-torch: environment
	test -d .venv-torch || ($(PYTHON) -m venv .venv-torch && .venv-torch/bin/python -m pip install \
		--quiet --disable-pip-version-check torch==2.13.0 safetensors==0.8.0 numpy)
	$(RUN) -m pytest tests/weights/test_against_pytorch.py

lint: environment
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Executes notebooks/source/*.py and writes notebooks/*.ipynb with their outputs.
notebooks: environment
	$(RUN) scripts/build_notebooks.py

# Whether the notebooks are what their sources say, and whether each runs, on less data.
notebooks-check: environment
	$(RUN) scripts/build_notebooks.py --check --fast

lab: environment
	$(RUN) -m pip install --quiet --disable-pip-version-check "jupyterlab>=4"
	$(RUN) -m jupyter lab notebooks

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
