# `make demo` and `make test` need nothing but Python 3.10 or newer; both make .venv first.
PYTHON ?= python3
# pip compiles nothing, and Python keeps what it compiles on import, which is much less; for that this has to be empty.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test lint clean

.venv/done: setup.cfg pyproject.toml vit_scratch/__init__.py
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: .venv/done
	rm -rf runs/demo
	.venv/bin/python train.py --config configs/digits.yaml --out runs/demo
	.venv/bin/python evaluate.py runs/demo

test: .venv/done
	.venv/bin/python -m pytest -n auto --maxprocesses 8

lint: .venv/done
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

clean:
	rm -rf .venv runs/demo
