# Targets are one-liners over Python. `make sim` and `make test` need nothing but Python, g++, make, perl and git.
.PHONY: sim test mutants lint bench waves verilog clean
OUT := build/demo
SEED := 1
JOBS := 2

sim: .venv/ready
	.venv/bin/rnic sim demo --waves $(OUT)/demo.fst --pcap $(OUT)/demo.pcap --trace $(OUT)/demo.trace.json --json $(OUT)/demo.json

test: .venv/ready
	.venv/bin/python -m pytest -n 2 --dist loadgroup

mutants: .venv/ready
	.venv/bin/python tools/mutants.py --seed $(SEED) -j $(JOBS)

lint: .venv/ready
	.venv/bin/ruff check . && .venv/bin/pyright

bench: .venv/ready
	.venv/bin/rnic bench

waves: .venv/ready
	.venv/bin/rnic waves $(OUT)/demo.gtkw

verilog: .venv/ready
	.venv/bin/rnic verilog --config gigabit -o build/rnic.v

clean:
	rm -rf build

.venv/ready: pyproject.toml tools/bootstrap.py
	python3 tools/bootstrap.py
