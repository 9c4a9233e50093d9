# make demo   see it work          make lab      open JupyterLab
# make test   everything CI runs   make check    the quick half of it
# make docs   _docs/html/index.html
PYTHON ?= python3
NB     ?= nbs tutorials
BIN    := .venv/bin
TORCH  := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
export OMP_NUM_THREADS ?= 1
export TORCHINDUCTOR_COMPILE_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false
export PYTHONPATH =
ifeq ($(shell command -v nvidia-smi),)
export TRITON_INTERPRET = 1
endif

# what a network step prints goes to a log; what the reader sees is one line
define step
	@echo "· $(1)"; $(2) > .setup/log.txt 2>&1 || { grep -vi '^warning' .setup/log.txt | tail -n 3; echo "FAILED: $(1). $(3) (all of it: .setup/log.txt)"; exit 1; }
endef

.PHONY: demo docs test check lab readme clean test-gpu test-slow test-tutorials samples slowest outputs notebooks
.DEFAULT_GOAL := demo

.setup/venv: constraints.txt settings.ini setup.py
	@mkdir -p .setup
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "FAILED: bmlab needs Python 3.11 or newer; set PYTHON=python3.12, say"; exit 1; }
	$(call step,making .venv,$(PYTHON) -m venv .venv,Is the venv module of this Python installed?)
	$(call step,installing $(TORCH),$(PIP) $(TORCH),Is the package index reachable?)
	$(call step,installing bmlab and what its tests need,$(PIP) -e '.[dev]',Is the package index reachable?)
	$(call step,checking that the versions agree,$(BIN)/python -m pip check,Remove .venv and try again.)
	@touch $@

samples: .setup/venv
	@$(BIN)/python scripts/fetch_samples.py

demo: samples
	@$(BIN)/python scripts/quickstart.py --html demo.html

# each part says what it took, what was left out and what failed (tools/suite.py)
check: .setup/venv
	@$(BIN)/python tools/suite.py lines quick

test: samples
	@$(BIN)/python tools/suite.py lines tests notebooks tutorials

slowest: samples
	@$(BIN)/python tools/suite.py --slowest 40 lines tests notebooks tutorials

test-tutorials: samples
	@$(BIN)/python tools/suite.py tutorials

notebooks: samples
	@$(BIN)/python tools/suite.py notebooks

# stores what the cells of these notebooks and tutorials give
outputs: samples
	@$(BIN)/python -m pytest -n 2 --dist loadfile --store $(NB)

# (one page stands beside lm-evaluation-harness)
test-slow: samples
	@$(BIN)/python -c "import lm_eval" 2> /dev/null || $(PIP) -e '.[eval]'
	@$(BIN)/python -m pytest tests -m slow --durations=0 -o faulthandler_timeout=3600
	@$(BIN)/python -m pytest --nbval --slow-cells -o faulthandler_timeout=3600 \
	  $$(grep -rlE '^ *"#\| *slow' nbs tutorials --include='[0-9]*.ipynb')

# on a machine with a GPU, with the Python that has torch for it; no nbdev is needed there
test-gpu:
	@$(PYTHON) tools/run_cells.py $$(find nbs -name '[0-9]*.ipynb' -not -path '*/.ipynb_checkpoints/*' | sort)
	@$(PYTHON) -m pytest tests -m cuda

docs: .setup/venv
	@$(BIN)/python docs/build.py

lab: samples
	@$(BIN)/jupyter lab --notebook-dir=.

readme: samples
	@$(BIN)/jupyter nbconvert --to notebook --inplace --execute nbs/index.ipynb
	@$(BIN)/nbdev_clean --fname nbs/index.ipynb
	@$(BIN)/python tools/readme.py

clean:
	rm -rf .setup .venv build dist _docs _proc demo.html *.egg-info .pytest_cache
