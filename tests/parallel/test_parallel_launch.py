"""How the processes of a run are started: one host or several, by variables or by Slurm."""

import os
import secrets
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import python
from ranks import run_ranks
from torch.distributed import run
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.launcher import api

from trainkit.cli.app import main
from trainkit.errors import RecipeError
from trainkit.parallel.launch import (
    OWN_LAUNCH,
    Hosts,
    first_host,
    free_port,
    launch_command,
    threads_of_each,
)
from trainkit.processes import STARTER
from trainkit.train.faults import torchrun

ROOT = Path(__file__).parents[2]
LAUNCHER = "trainkit.train.faults.torchrun"
OF_TORCH_2_11 = {
    *("--nnodes", "--nproc_per_node", "--node_rank", "--master_addr", "--master_port"),
    *("--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    *("--local-addr", "--signals-to-handle"),
}
"""Options of the oldest torchrun that is served, as far as they are used."""

VARIABLES = ["NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_PORT"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*VARIABLES, "MASTER_ADDR", "TRAINKIT_JOB"):
        monkeypatch.delenv(name, raising=False)


def command(num_processes=2, **options):
    return launch_command(["sft"], Hosts.from_environment(), num_processes, **options)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_launch_is_refused_by_the_name_of_a_variable_that_is_no_number(name, monkeypatch):
    """torchrun would end in a traceback."""
    monkeypatch.setenv(name, "x")
    with pytest.raises(RecipeError, match=f"{name} is 'x' and must be a whole number"):
        command()


CANNOT_BE = [
    *(("NPROC_PER_NODE", "0"), ("NNODES", "0"), ("NNODES", "2:1"), ("NNODES", "1:x")),
    *(("NODE_RANK", "2"), ("MASTER_PORT", "65536")),
]


@pytest.mark.parametrize(("name", "text"), CANNOT_BE)
def test_a_number_that_cannot_be_is_refused_by_name(name, text, monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv(name, text)
    with pytest.raises(RecipeError, match=f"{name} is '{text}' and must be"):
        command()


@pytest.mark.parametrize("name", VARIABLES)
def test_an_empty_variable_is_as_none(name, monkeypatch):
    monkeypatch.setenv(name, "")
    assert "" not in command()
    monkeypatch.setenv("NPROC_PER_NODE", "gpu")
    monkeypatch.setenv("NNODES", "1:4")
    assert {"gpu", "1:4"} < set(command())


def test_one_process_needs_no_launcher_and_restarts_do():
    assert LAUNCHER not in command(1)
    assert LAUNCHER in command(2)
    assert {LAUNCHER, "--max-restarts", "c10d"} < set(command(1, max_restarts=2))


@pytest.mark.parametrize("restarts", [0, 2])
def test_torchrun_is_given_only_what_the_oldest_one_knows(restarts, monkeypatch):
    given = []
    monkeypatch.setenv(torchrun.LAUNCHER, "")
    monkeypatch.setattr(api, "LocalElasticAgent", api.LocalElasticAgent)
    monkeypatch.setattr(run, "main", given.extend)
    started = command(2, max_restarts=restarts)
    assert torchrun.main(started[started.index(LAUNCHER) + 1 : started.index(STARTER, 2)]) == 0
    options = {word for word in given if word.startswith("--")}
    assert options <= OF_TORCH_2_11
    assert "--signals-to-handle" in options


@pytest.mark.parametrize(
    ("count", "gpus", "threads"),
    [("1", 1, None), ("2", 0, "4"), ("3", 0, "2"), ("16", 0, "1"), ("8", 8, "1"), ("cpu", 0, "1")],
)
def test_processes_without_gpus_share_the_cores(monkeypatch, count, gpus, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("NPROC_PER_NODE", count)
    assert threads_of_each(command(max(gpus, 1)), gpus) == threads


def test_hosts_that_have_lost_host_0_say_so(monkeypatch, capsys):
    def lost(_):
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setenv(torchrun.LAUNCHER, "")
    monkeypatch.setattr(api, "LocalElasticAgent", api.LocalElasticAgent)
    monkeypatch.setattr(run, "main", lost)
    assert torchrun.main([]) == 1
    said = capsys.readouterr().err
    assert "C10d store has failed" in said
    assert "type the same line" in said


def test_one_process_on_a_host_of_many_gpus_is_not_started_over_and_over(monkeypatch):
    """sft starts itself on all GPUs unless a launcher has."""
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    assert LAUNCHER in command(8)


def test_every_launch_on_one_host_has_a_name_of_its_own():
    first, second = (Hosts.from_environment({}) for _ in range(2))
    assert first.job.startswith(OWN_LAUNCH)
    assert first.job != second.job
    assert first.port != 29500  # two runs on one host do not meet


def test_restarts_on_several_hosts_need_a_name(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    command()
    with pytest.raises(RecipeError, match="TRAINKIT_JOB"):
        command(max_restarts=1)
    monkeypatch.setenv("TRAINKIT_JOB", "night-7")
    assert {f"{OWN_LAUNCH}night-7", "is_host=1"} < set(command(max_restarts=1))


STEP = {
    "SLURM_STEP_ID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


def test_srun_says_who_is_who():
    hosts = Hosts.from_environment(STEP)
    assert (hosts.number, hosts.rank, hosts.address) == ("2", 1, "gpu03")
    assert hosts.job == f"{OWN_LAUNCH}slurm-123456-1"
    assert hosts == Hosts.from_environment({**STEP, "SLURM_RESTART_COUNT": "1"})
    assert Hosts.from_environment({**STEP, "MASTER_ADDR": "10.0.0.1"}).address == "10.0.0.1"
    with pytest.raises(RecipeError, match="--ntasks-per-node=1"):
        Hosts.from_environment({**STEP, "SLURM_STEP_NUM_TASKS": "16"})
    batch = {name: text for name, text in STEP.items() if not name.startswith("SLURM_STEP")}
    assert Hosts.from_environment({**batch, "SLURM_JOB_NUM_NODES": "2"}).is_one


@pytest.mark.parametrize(
    ("listed", "first"),
    [("gpu03", "gpu03"), ("a,b", "a"), ("gpu[03-05,9],login", "gpu03"), ("r[2]n[7-8]", "r2n7")],
)
def test_the_first_of_slurms_list(listed, first):
    assert first_host(listed) == first


def test_a_port_in_use_is_named():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        hosts = Hosts("2", port=other.getsockname()[1])
        with pytest.raises(RecipeError, match="in use by another program") as refused:
            hosts.check_reachable(seconds=0)
        assert "MASTER_PORT" in str(refused.value)
        Hosts("2", rank=1, port=hosts.port).check_reachable(seconds=0)


TAKES_PORT_7 = """
import os, secrets, sys
from trainkit.parallel.launch import free_port
secrets.randbelow = lambda _: 7
said = f"print({free_port()}, flush=True); input()"
os.execv(sys.executable, [sys.executable, "-c", said])
"""


def test_a_port_is_given_to_one_launch_only(monkeypatch):
    """Nobody listens on it before its launch has become torchrun, and another may look by then."""
    other = subprocess.Popen([sys.executable, "-c", TAKES_PORT_7], stdin=-1, stdout=-1, text=True)
    assert other.stdout.readline() == "20007\n"
    draws = iter([7, 8, 8, 9, 7])
    monkeypatch.setattr(secrets, "randbelow", lambda _: next(draws))
    assert (free_port(), free_port()) == (20_008, 20_009)
    other.communicate("\n")
    assert free_port() == 20_007


def test_host_0_must_meet_itself_at_the_address(monkeypatch):
    """A gateway may answer for any address, and the hosts would wait for one another there."""
    hosts, connect = Hosts("2", port=free_port()), socket.create_connection
    with socket.socket() as gateway:
        gateway.bind(("127.0.0.1", 0))
        gateway.listen()
        monkeypatch.setattr(
            socket, "create_connection", lambda _, **given: connect(gateway.getsockname(), **given)
        )
        with pytest.raises(RecipeError, match="another host answers there"):
            hosts.check_reachable(seconds=0)
        monkeypatch.undo()
        hosts.check_reachable(seconds=0)


def test_an_address_where_nobody_answers_is_named():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    Hosts("2", port=port).check_reachable(seconds=0)
    with pytest.raises(RecipeError, match=r"waited 0 s for host 0 at 127\.0\.0\.1:.*refused"):
        Hosts("2", rank=1, port=port).check_reachable(seconds=0)
    with pytest.raises(RecipeError, match=r"not reached at no\.such\.host\.invalid"):
        Hosts("2", address="no.such.host.invalid", port=port).check_reachable(seconds=0)


@pytest.mark.parametrize("spelling", ["-", "_"])
def test_options_of_torchrun_win_over_their_variables(spelling, monkeypatch, capsys):
    wanted = {"nproc_per_node": "3", "nnodes": "2", "node_rank": "1"}
    wanted |= {"master_addr": "10.0.0.9", "master_port": "1234"}
    for name in wanted:
        monkeypatch.setenv(name.upper(), "7")
    words = [f"--{name.replace('_', spelling)}={value}" for name, value in wanted.items()]
    assert main(["launch", "--print", "torchrun", "--config", "r.yaml", *words]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("NPROC_PER_NODE=3 NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.9")
    assert "MASTER_PORT=1234" in second
    assert second.endswith("launch --config r.yaml")
    assert Hosts.from_environment() == Hosts("2", 1, "10.0.0.9", 1234)


@pytest.mark.parametrize("word", ["--nproc", "--num_gpus=2", "--num-processes"])
def test_another_launchers_option_is_answered_with_ours(word, capsys):
    assert main(["launch", "--config", "r.yaml", word, "2"]) == 2
    assert "did you mean --nproc-per-node" in capsys.readouterr().err


def test_lines_to_run_are_printed(monkeypatch, capsys):
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("NPROC_PER_NODE", "8")
    given = ["--config", "my recipe.yaml", "--training.num_train_epochs=2", "--replace_kernel"]
    printed = {}
    for form in ("torchrun", "slurm", "hostfile"):
        assert main(["launch", "--print", form, "--max-restarts", "3", *given]) == 0
        printed[form] = capsys.readouterr().out
        assert all(shlex.quote(word) in printed[form] for word in given)
        assert "--max-restarts 3" in printed[form]
    assert [line.split("NODE_RANK=")[1][0] for line in printed["torchrun"].splitlines()] == [*"01"]
    assert "#SBATCH --nodes=2" in printed["slurm"]
    assert printed["hostfile"].endswith("HOST0 slots=8\nHOST1 slots=8\n")


COMPARE = ["differ", "differ_early", "differ_at_own_store"]


@pytest.mark.parametrize("compare", COMPARE)
def test_processes_that_were_given_the_same_go_on(compare):
    assert run_ranks(f"parallel.agreement_cases:{compare}", facts={}) == [None, None]


@pytest.mark.parametrize("compare", COMPARE)
@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"training.seed": 7}, "training.seed: 7, not 1"),
        ({"versions": {"torch": "1.0"}}, "versions.torch: '1.0', not "),
        ({"training.max_steps": 9}, "training.max_steps: 9, not None"),
    ],
)
def test_every_process_names_the_one_that_differs(facts, said, compare):
    first, second = run_ranks(f"parallel.agreement_cases:{compare}", facts=facts)
    assert first == second
    assert f"process 1 on {socket.gethostname()} has {said}" in first


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([None, None], [[0, ""], [1, ""]]),
        (["no", "no"], [[1, "error: no\n"], [1, ""]]),
        ([None, "no"], [[1, ""], [1, "error: rank 1: no\n"]]),
        (["no", None], [[1, "error: no\n"], [1, ""]]),
        (["no", "nor"], [[1, "error: no\n"], [1, "error: rank 1: nor\n"]]),
    ],
)
def test_what_one_rank_refuses_ends_all_and_is_said_once(texts, said):
    assert run_ranks("parallel.agreement_cases:refuse_each", texts=texts) == said


def test_what_hosts_compare_first_needs_nothing_slow(tmp_path):
    """Under load transformers takes a minute to load; the answer should be there by then."""
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from trainkit.train.resume import given as start\n"
        "from trainkit.recipe import load_recipe\n"
        "given = []\nstart.refuse_early_disagreement = lambda process, facts: given.append(facts)\n"
        "start.refuse_unlike_hosts(load_recipe(Path('r.yaml')), None)\n"
        "slow = {'transformers', 'peft', 'deepspeed', 'datasets', 'accelerate'}\n"
        "assert not slow & sys.modules.keys()\n"
        "print([given[0][key] for key in ('training.learning_rate', 'rows.jsonl')])"
    )
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "r.yaml").write_text(
        "model: {name_or_path: m}\ndata: {train: [rows.jsonl, away.jsonl]}\n"
    )
    environment = {**os.environ, "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    said = python("-c", code, cwd=tmp_path, env=environment)
    assert said.strip() == "[5e-05, '3 bytes, sha256 ca3d163bab05']"


def test_a_restart_meets_at_a_store_of_its_own():
    """The agent's store still has the addresses of the processes that were killed."""
    first, second = run_ranks("parallel.agreement_cases:restart")
    assert first == second
    port, meets_at_agent, total = first
    assert port != 0
    assert not meets_at_agent
    assert total == 3
