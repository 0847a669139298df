"""Everything software and hardware agree on: registers, doorbells, queue elements, contexts, keys, commands.

One declaration each: the Amaranth layout, the Python packer, the documentation and the C header come out of it.
"""

from . import commands, contexts, queues, registers
from .commands import *
from .contexts import *
from .fields import *
from .queues import *
from .registers import *

__all__ = [
    *commands.__all__, *contexts.__all__, *queues.__all__, *registers.__all__, "Field", "Struct",
]  # fmt: skip
