# What a newcomer types. Needs only python3 (3.11 to 3.13) with pip and venv.
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Each rank is a process: it starts 0.3 s later where Python may not keep the modules that it has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check bench format requirements clean

# The main job: a GPT on Python's own manual, four pipeline stages in four Ray actors.
# `make run ARGS=--resume` goes on from its newest checkpoint.
run: $(VENV)/.installed
	$(BIN)/freshet train examples/gpt.toml --dashboard $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 4 --dist loadgroup $(ARGS)

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# The long soaks, then every benchmark; they want a machine with nothing else to do.
bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(ARGS)

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The packages of the image in deploy/, pinned to their newest versions that go together.
requirements: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.12 --no-annotate pyproject.toml --output-file deploy/requirements.txt

clean:
	rm -rf $(VENV) runs

$(VENV)/.installed: pyproject.toml
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@
