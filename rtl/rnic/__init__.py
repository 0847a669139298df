"""rnic: a cycle-level RDMA NIC (RoCEv2) in Amaranth HDL. Hardware only: imports amaranth and nothing of the simulator."""
