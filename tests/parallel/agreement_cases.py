"""What the ranks of the agreement's tests run."""

import os


def differ(facts):
    """Rank 1 has these facts, the others none; what each says."""
    import torch
    from accelerate import PartialState

    from trainkit.errors import RecipeError
    from trainkit.parallel import ProcessRank
    from trainkit.parallel.agreement import refuse_disagreement

    PartialState(cpu=True)
    own = {"training.seed": 1, "versions": {"torch": torch.__version__}}
    if os.environ["RANK"] == "1":
        own |= facts
    try:
        refuse_disagreement(ProcessRank.from_environment(), own)
    except RecipeError as error:
        return str(error)
    return None


def differ_early(facts):
    """The same, where torchrun has a store, and no process group is there yet."""
    from torch.distributed import TCPStore

    from trainkit.errors import RecipeError
    from trainkit.parallel import ProcessRank
    from trainkit.parallel.agreement import refuse_early_disagreement

    process = ProcessRank.from_environment()
    port = int(os.environ["MASTER_PORT"])
    kept = TCPStore("127.0.0.1", port, process.world_size, is_master=process.is_main)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    found = []
    for attempt in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        own = {"training.seed": 1, "paths": [os.curdir]}
        if os.environ["RANK"] == "1":
            own |= facts
        try:
            refuse_early_disagreement(process, own)
            found.append(None)
        except RecipeError as error:
            found.append(str(error))
    kept.add("number that ended", 1)
    while process.is_main and kept.add("number that ended", 0) < process.world_size:
        pass
    assert found[0] == found[1]
    return found[0]


def differ_at_own_store(facts):
    """The same, where rank 0 keeps the store itself; where they agree, the group shares it."""
    import torch

    from trainkit.errors import RecipeError
    from trainkit.parallel import ProcessRank
    from trainkit.parallel.agreement import refuse_early_disagreement

    process = ProcessRank.from_environment()
    own = {"training.seed": 1, **(facts if process.dist_rank else {})}
    try:
        refuse_early_disagreement(process, own)
    except RecipeError as error:
        return str(error)
    torch.distributed.init_process_group("gloo")
    number = torch.tensor(process.dist_rank + 1)
    torch.distributed.all_reduce(number)
    assert number == 3
    return None


def restart():
    """As torchrun starts a process the second time; all ranks add up their numbers, from 1."""
    import torch
    from torch.distributed import TCPStore

    from trainkit.parallel import ProcessRank
    from trainkit.parallel.launch import meet_anew

    place = ProcessRank.from_environment()
    old = int(os.environ["MASTER_PORT"])
    # The agent's store, which outlives its processes; rank 0 keeps it here.
    kept = TCPStore("127.0.0.1", old, place.world_size, is_master=place.is_main)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    meet_anew(place)
    torch.distributed.init_process_group("gloo")
    number = torch.tensor(place.dist_rank + 1)
    torch.distributed.all_reduce(number)
    moved = int(os.environ["MASTER_PORT"]) - old
    del kept
    return moved, os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True", number.item()


def refuse_each(texts):
    """Each rank refuses with its text, or not at all; its exit code, and what it prints."""
    import contextlib
    import io

    from accelerate import PartialState

    from trainkit.cli.app import report_failure
    from trainkit.errors import ResumeRefusedError, TrainkitError
    from trainkit.parallel import ProcessRank
    from trainkit.parallel.agreement import decided_by_each

    PartialState(cpu=True)
    process = ProcessRank.from_environment()
    text = texts[process.dist_rank]

    def decide():
        if text is not None:
            raise ResumeRefusedError(text)
        return process.dist_rank

    try:
        return decided_by_each(process, decide), ""
    except TrainkitError as error:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            code = report_failure(error)
        return code, printed.getvalue()
