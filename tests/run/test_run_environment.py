import subprocess
import sys
from importlib import metadata

from commands import python

from trainkit.processes import STARTER
from trainkit.run import capture_environment, command_script


def test_the_command_script_runs_the_same_words(tmp_path):
    words = ["a b", "quote \" and ' too", "$(touch evil)", "数据", "*", "section.key=[1, 2]"]
    program = "import sys, os; print(sys.argv[1:], os.environ['NCCL_DEBUG'], os.getcwd())"
    environ = {"NCCL_DEBUG": "a; touch evil", "HF_TOKEN": "not-in-here"}
    script = command_script([sys.executable, "-c", program, *words], environ, tmp_path)
    assert "not-in-here" not in script
    (tmp_path / "command.sh").write_text(script)
    done = subprocess.run(
        ["bash", str(tmp_path / "command.sh")], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{words} a; touch evil {tmp_path}\n"
    assert not (tmp_path / "evil").exists()


def test_a_process_of_torchrun_is_started_by_torchrun_again(tmp_path):
    environ = {
        "TORCHELASTIC_RUN_ID": "none",
        "LOCAL_WORLD_SIZE": "8",
        "WORLD_SIZE": "16",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29501",
        "RANK": "8",
    }
    script = command_script(["python", "-m", "trainkit.cli.app", "sft"], environ, tmp_path)
    assert script.splitlines()[-1] == (
        "exec torchrun --nproc_per_node 8 --nnodes 2 --node_rank 1 --master_addr node0 "
        '--master_port 29501 --no_python python -m trainkit.cli.app sft "$@"'
    )
    assert "export" not in script


def test_a_process_of_a_launch_is_launched_again(tmp_path):
    """It must not take the launcher of before for its own, which is gone."""
    environ = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
        "TRAINKIT_LAUNCHER": "4711",
        "OMP_NUM_THREADS": "1",
    }
    argv = ["python", "-u", "-m", "trainkit.cli.app", "sft", "--config", "a b.yaml"]
    script = command_script(argv, environ, tmp_path)
    assert script.splitlines()[-2:] == [
        "export OMP_NUM_THREADS=1",
        f"exec python {STARTER} trainkit launch --nproc_per_node 2 --max_restarts 3 "
        "--config 'a b.yaml' \"$@\"",
    ]


def test_git_state_and_machine(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "f.txt").write_text("one\n")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "f.txt").write_text("two\n")
    found = capture_environment(tmp_path)
    assert found["git"]["dirty"]
    assert "+two" in found["git"]["diff"]
    assert len(found["git"]["commit"]) == 40
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    assert found["packages"] == installed
    assert found["machine"]["memory_gib"] > 0
    assert capture_environment(tmp_path.parent / "x" / "..")["git"] is None


def test_the_package_comes_without_torch_and_matplotlib():
    program = (
        "import sys, trainkit.run, trainkit.run.report;"
        "print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    assert python("-c", program).strip() == "set()"
