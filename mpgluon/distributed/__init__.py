"""Training in several processes: who they are, and what they exchange.

Engines that exist carry the messages: MPI here, and Horovod or ps-lite for those who bring them.
"""

from mpgluon.distributed.batch_norm import average_batch_norm, synchronize_batch_norm
from mpgluon.distributed.beginning import begin
from mpgluon.distributed.kvstore import MpiKVStore
from mpgluon.distributed.mpi import MpiProcesses
from mpgluon.distributed.placement import devices_of_process
from mpgluon.distributed.processes import OneProcess, Processes
from mpgluon.distributed.state import check_agreement, share_state
from mpgluon.errors import DistributedError

__all__ = [
    "DistributedError",
    "MpiKVStore",
    "MpiProcesses",
    "OneProcess",
    "Processes",
    "average_batch_norm",
    "begin",
    "check_agreement",
    "devices_of_process",
    "share_state",
    "synchronize_batch_norm",
]
