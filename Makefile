# `make` sets up an environment and runs the study `laptop`; `make help` lists the rest.
PYTHON ?= python3
STUDY ?= laptop
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: all setup test lint bench smoke models help clean

all: $(READY)
	@$(BIN)/snakemake --cores all --config study=$(STUDY)

setup: $(READY)

# Made anew as a whole when the pinned versions change; a half-made one has no .ready and is made again.
$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is older than Python 3.11: install one and give it as 'make PYTHON=python3.11'" >&2; exit 2; }
	@echo "Setting up $(VENV) (once; a few minutes, most of it PyTorch)" >&2
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -r requirements.txt
	@touch $(READY)

test: $(READY)
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check --quiet .
	@$(BIN)/snakefmt --check Snakefile workflow
	@$(BIN)/python -m pytest

bench: $(READY)
	@$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-json=results/bench.json

smoke: STUDY := smoke
smoke: all

models: STUDY := laptop-pretrain
models: all

clean:
	rm -rf results/laptop results/laptop-pretrain results/smoke mlflow.db mlruns

help:
	@echo "make          the study laptop: tables, figures, report under results/laptop (STUDY=name for another)"
	@echo "make smoke    everything runs once, in under two minutes; scores mean nothing"
	@echo "make test     lint and tests"
	@echo "make bench    benchmarks of decoders, forwards and training (results/bench.json)"
	@echo "make models   train the shipped models from scratch (study laptop-pretrain, over an hour)"
	@echo "make clean    remove the results of these studies and the MLflow store"
