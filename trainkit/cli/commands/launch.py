"""``trainkit launch``: a process for each GPU, on one host or several, and again after a crash."""

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer


def _as_torchrun(name: str, about: str) -> Any:
    """An option that torchrun has, in both of its spellings; it wins over its variable."""
    spelled = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
    return typer.Option(*spelled, help=f"{about} Wins over {name.upper()}.", show_default=False)


Form = Annotated[
    Literal["torchrun", "slurm", "hostfile"] | None,
    typer.Option("--print", help="Print the lines to run, and run nothing."),
]


def _refuse_other_launchers(words: Sequence[str], context: typer.Context) -> None:
    """Name our option for another launcher's, or the beginning of one: sft knows neither."""
    own = [name for each in context.command.params for name in each.opts]
    for name in (word.partition("=")[0] for word in words if word.startswith("--")):
        near = [each for each in own if each.startswith(name)]
        if name not in near and (near or re.fullmatch("--(num.)?(gpus|processes)", name)):
            near.append("--nproc-per-node")
            raise typer.BadParameter(f"there is no {name}; did you mean {near[0]}?")


def launch(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="SFT ARGUMENTS", help="What follows `trainkit sft`."),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            "--max_restarts",
            min=0,
            help="Start all processes again, so often, after one has died; the run goes on in its "
            "directory from its last checkpoint.",
        ),
    ] = 0,
    nproc_per_node: Annotated[
        str | None,
        _as_torchrun("nproc_per_node", "Processes on this host; by default one for each GPU."),
    ] = None,
    nnodes: Annotated[str | None, _as_torchrun("nnodes", "Hosts.")] = None,
    node_rank: Annotated[
        str | None, _as_torchrun("node_rank", "Which host this is, from 0.")
    ] = None,
    master_addr: Annotated[
        str | None, _as_torchrun("master_addr", "Host 0 as the others reach it.")
    ] = None,
    master_port: Annotated[
        str | None, _as_torchrun("master_port", "A port of host 0 that is free.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds that other hosts wait for host 0.")
    ] = 50,
    form: Form = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="As of `sft`; with --print, one JSON object {form, lines}."),
    ] = False,
) -> None:
    """Start ``sft`` on every GPU of this host, and of the others of a job.

    Several hosts: the same command on each, with --nnodes, --node-rank (0, 1, ...) and
    --master-addr (host 0), or NNODES, NODE_RANK and MASTER_ADDR in the environment; or `srun
    --ntasks-per-node=1`, which says all that.
    """
    _refuse_other_launchers(words or (), context)
    given = {
        "NPROC_PER_NODE": nproc_per_node,
        "NNODES": nnodes,
        "NODE_RANK": node_rank,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
    }
    os.environ.update({name: text for name, text in given.items() if text is not None})
    from trainkit.parallel import launch as processes
    from trainkit.parallel.launch import Hosts
    from trainkit.train.faults.signals import hold_back, watching_signals

    arguments = ["sft", *(words or ())]
    if form is not None:
        own = ["--max-restarts", str(max_restarts)] if max_restarts else []
        text = _lines(form, [*own, *arguments[1:]])
        row = {"form": form, "lines": text.removesuffix("\n").split("\n")}
        typer.echo(json.dumps(row) if as_json else text, nl=as_json)
        return
    arguments += ["--json"] if as_json else []
    hosts = Hosts.from_environment()
    gpus = processes.count_local_gpus()
    command = processes.launch_command(arguments, hosts, max(gpus, 1), max_restarts=max_restarts)
    threads = processes.threads_of_each(command, gpus)
    if threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", threads)
    with watching_signals():
        hosts.check_reachable(seconds=wait)
        hold_back()
    if max_restarts:
        os.environ.update(processes.LAUNCH_VARIABLES)
    typer.echo(f"+ {shlex.join(command)}", err=True)
    sys.stdout.flush()
    os.execv(command[0], command)


def _lines(form: str, arguments: Sequence[str]) -> str:
    """What is to be run, for NNODES hosts with NPROC_PER_NODE processes each."""
    from trainkit.parallel.launch import Hosts, count_local_gpus
    from trainkit.processes import module_command

    hosts = Hosts.from_environment()
    per_host = os.environ.get("NPROC_PER_NODE") or str(max(count_local_gpus(), 1))
    command = shlex.join(module_command("trainkit", "launch", *arguments))
    if form == "slurm":
        return (
            "#!/usr/bin/env bash\n"
            f"#SBATCH --nodes={hosts.number}\n"
            "#SBATCH --ntasks-per-node=1\n"
            f"#SBATCH --gpus-per-node={per_host}\n"
            "#SBATCH --requeue\n"
            f"srun {command}\n"
        )
    count = int(hosts.number) if hosts.number.isdecimal() else 1
    first = hosts.address if "MASTER_ADDR" in os.environ or count == 1 else "HOST0"
    names = [first, *(f"HOST{rank}" for rank in range(1, count))]
    lines = [_line(hosts.port, count, rank, first, per_host, command) for rank in range(count)]
    if form == "torchrun":
        return "".join(f"{line}\n" for line in lines)
    notes = [f"# on {name}: {line}\n" for name, line in zip(names, lines, strict=True)]
    return "".join([*notes, *(f"{name} slots={per_host}\n" for name in names)])


def _line(port: int, count: int, rank: int, first: str, per_host: str, command: str) -> str:
    """The command of one host, with what it has to know."""
    variables = f"NPROC_PER_NODE={per_host}"
    if count > 1:
        job = os.environ.get("TRAINKIT_JOB", "NEW_NAME")
        variables += f" NNODES={count} NODE_RANK={rank} MASTER_ADDR={first} MASTER_PORT={port}"
        variables += f" TRAINKIT_JOB={job}"
    return f"{variables} {command}"
