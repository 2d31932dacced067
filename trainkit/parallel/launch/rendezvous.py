"""Where the processes of a run meet, when torchrun starts them once more."""

import os

from trainkit.parallel.launch.hosts import free_port
from trainkit.parallel.process import ProcessRank


def meet_anew(process: ProcessRank) -> None:
    """After a restart, agree on a store of this attempt's own; before there is a process group.

    torch 2.13 hands every attempt the same store of the agent's, in which the addresses of the
    killed processes still stand: the new ones would try to connect to those, for half a minute, and
    fail. On several hosts, attempts are not counted alike; ``trainkit launch`` asks for a store of
    each attempt's own there.
    """
    variables = os.environ
    attempt = int(variables.get("TORCHELASTIC_RESTART_COUNT") or 0)
    is_one_host = variables.get("LOCAL_WORLD_SIZE") == variables.get("WORLD_SIZE")
    if not attempt or variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not is_one_host:
        return
    from torch.distributed import TCPStore

    host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    old = TCPStore(host, port, process.world_size, is_master=False)
    key = f"trainkit/port_of_attempt_{attempt}"
    if process.is_main:
        old.set(key, str(free_port()))
    variables["MASTER_PORT"] = old.get(key).decode()
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "False"
