"""Two hosts, one RDMA WRITE: the smallest program worth copying. Run: .venv/bin/python examples/first_write.py"""

from rnic_sim.enums import AccessFlags, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.verbs import MR, SGE, SendWR

with Lab("tiny") as lab:  # builds the model at the first run
    a, b = lab.rc_pair()  # a connected RC queue pair: a on host A, b on host B

    source = MR(a.pd, 4096, AccessFlags.LOCAL_WRITE)
    target = MR(b.pd, 4096, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE)
    message = b"Hello from host A's memory, written by its RNIC into host B's."
    source.write(message)

    wr = SendWR(wr_id=1, opcode=WROpcode.RDMA_WRITE, sg=[SGE(source.buf, len(message), source.lkey)])
    wr.set_wr_rdma(target.rkey, target.buf + 100)  # how A learns these two numbers is B's business, e.g. by a SEND
    start = lab.world.cycle
    a.post_send(wr)

    (wc,) = lab.wait_wc(a.scq)
    assert wc.wr_id == 1 and wc.status.name == "SUCCESS", wc
    assert target.read(len(message), 100) == message
    print(f"{wc.opcode.name} of {len(message)} bytes: {wc.status.name}, CQE written {wc.stamp - start} cycles after the post")
    for frame in lab.world.frames:
        print(f"  cycle {frame.first - start:4d}..{frame.last - start:4d}: {len(frame.data)} bytes from host {'AB'[frame.nic]}")
    print("host B's memory now says:", target.read(len(message), 100).decode())
