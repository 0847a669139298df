"""cocotb benches: blocks and the whole RNIC under Verilator, clock and bus models in Python.

`runner` builds a model and runs a bench module from pytest; the modules ``tb_*`` hold the cocotb tests; `harness` holds the
small components they drive; `streams`, `axi` and `machine` are the models around the design.
"""
