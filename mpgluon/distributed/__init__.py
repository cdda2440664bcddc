"""Training in several processes over MPI; `begin` makes MXNet's kvstore ``dist_sync`` usable."""

from mpgluon.distributed.batch_norm import average_batch_norm, synchronize_batch_norm
from mpgluon.distributed.kvstore import MpiKVStore
from mpgluon.distributed.mpi import MpiProcesses
from mpgluon.distributed.processes import OneProcess, Processes, devices_of_process
from mpgluon.distributed.state import begin, check_agreement, share_state
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
