# Every target that needs the environment makes it first.
PYTHON ?= python3
DOCKERFILE_LINT := npx -y dockerfile-utils@0.16.3 lint
BUF := npx -y @bufbuild/buf@1.75.0
OUT ?= .
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: setup demo bench test check protos

setup: .venv/.installed  ## make .venv with everything that runtime and development need

# pip would compile bytecode on one core, of every model of transformers too; files for other Pythons do not compile.
.venv/.installed: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	python -m pip install --quiet --upgrade pip
	python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	python -m compileall -qq -j 0 -x '/tests?/|/transformers/models/' .venv/lib || true
	touch $@

demo: setup  ## three services on this machine, and a prompt
	draftwood demo

bench: setup  ## tokens per second: plain decoding, chain, tree
	draftwood bench decode

# Two workers, one thread each; a file's services are started once, for all its tests. Dozens of processes start: with
# bytecode kept, wherever the environment would not, they need not compile our modules anew.
test: setup  ## every test that needs neither a GPU nor minutes
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 pytest -n 2 --dist loadfile --no-loadscope-reorder

check: setup  ## format, lint, types, imports, protos, Dockerfile, stubs
	ruff format --check .
	ruff check .
	pyright
	lint-imports
	$(BUF) lint protos
	$(DOCKERFILE_LINT) deploy/Dockerfile
	$(BUF) format -d --exit-code protos
	pytest -q tests/repository/test_project.py -k stubs

protos: setup  ## generate draftwood/v1 from protos/, below OUT
	python -m grpc_tools.protoc -Iprotos --python_out=$(OUT) --grpc_python_out=$(OUT) --mypy_out=$(OUT) --mypy_grpc_out=$(OUT) protos/draftwood/v1/*.proto
