# Two commands matter: `make demo` and `make test`. Each does all its own set-up in .venv.
PYTHON ?= python3
BIN    := .venv/bin
MODEL  ?= mini
DATA   ?=
LIMIT  ?=
export TOKENIZERS_PARALLELISM = false

# uv when it can be had (10 s), pip otherwise (2 min). A wheel folder named by PIP_FIND_LINKS is used by both,
# so that a CPU build of torch lying on disk is taken; elsewhere uv picks the build that fits the machine.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	if uv=$$(command -v uv) || { $(BIN)/python -m pip install -q uv && uv=$(BIN)/uv; }; then \
	  if [ -n "$$PIP_FIND_LINKS" ]; then UV_FIND_LINKS="$$PIP_FIND_LINKS" $$uv pip install -q --python $(BIN)/python $(1); \
	  else $$uv pip install -q --torch-backend=auto --python $(BIN)/python $(1); fi; \
	else $(BIN)/python -m pip install -q $(1); fi
endef

.PHONY: demo test check format bench test-slow test-docker gpu-check docs clean
demo: .venv/.run
	@$(BIN)/python -m evals.demo --model "$(MODEL)" $(if $(DATA),--data "$(DATA)") $(if $(LIMIT),--limit $(LIMIT))

test: check
	$(BIN)/python -m pytest

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix .

bench: .venv/.dev
	$(BIN)/python benchmarks/cpu_serve.py

test-slow: .venv/.dev
	$(BIN)/python -m pytest -m slow --timeout 1800

test-docker: .venv/.dev
	$(BIN)/python -m pytest -m docker --timeout 1800

gpu-check: .venv/.dev
	$(BIN)/python -m pytest -m "gpu or blackwell"

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/.docs: requirements-docs.txt .venv/.run
	@$(call install,-r requirements-docs.txt) && touch $@

.venv/.run: requirements-run.txt pyproject.toml
	@echo "setting up .venv (packages for running) ..."
	@$(call install,-r requirements-run.txt) && $(BIN)/python -m pip install -q --no-deps --no-build-isolation -e . && touch $@

.venv/.dev: requirements-dev.txt requirements-flashinfer.txt .venv/.run .venv/.docs
	@echo "setting up .venv (packages for testing) ..."
	@$(call install,-r requirements-dev.txt)
	@$(call install,--no-deps -r requirements-flashinfer.txt) && touch $@

clean:
	rm -rf .venv runs build dist *.egg-info
