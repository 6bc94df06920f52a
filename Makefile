# make demo: train, evaluate and sample a small AC-GPT; make test: the tests. Both set up all that they need.
PYTHON ?= python3
PY = .venv/bin/python
RUN = out/demo

.PHONY: demo test lint

demo: .venv/ready
	$(PY) train.py configs/tiny.py --max_iters=2600 --out_dir=$(RUN) $(if $(wildcard $(RUN)/ckpt.pt),--resume)
	$(PY) evaluate.py $(RUN)
	$(PY) test_masks.py --run=$(RUN)
	$(PY) sample.py $(RUN) --n=3 --text "The Congress of the ____13 has the power to declare war."

test: .venv/ready-dev
	$(PY) -m pytest -q

lint: .venv/ready-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/ready: requirements.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check -r requirements.txt
	touch $@

.venv/ready-dev: requirements-dev.txt .venv/ready
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	touch $@
