"""Programs of a model run apart, and pass only if they run to their end."""

import pytest

from trainkit.evals.sandbox import Programs, run_program


@pytest.mark.parametrize(
    ("program", "passes", "word"),
    [
        ("print('fine')", True, ""),
        ("import sys; sys.exit(0)", False, "end"),
        ("import os; os._exit(0)", False, "end"),
        ("raise ValueError('no')", False, "ValueError: no"),
        ("x = bytearray(8 * 2**30)", False, "MemoryError"),
        ("open('big', 'wb').write(b'x' * 2**26)", False, ""),
        ("assert 'CANARY' not in __import__('os').environ", True, ""),
        ("import os; assert os.listdir('.') and len(os.getcwd()) > 1", True, ""),
        ("def f(:", False, "SyntaxError"),
    ],
)
def test_how_a_program_ends(monkeypatch, program, passes, word):
    monkeypatch.setenv("CANARY", "a secret")
    failure = run_program(program)
    assert (failure is None) is passes
    assert word in (failure or "")


def test_a_program_that_hangs_dies_with_all_that_it_started():
    program = (
        "import os, time\n"
        "pid = os.fork()\nopen('started' + str(os.getpid()), 'w').close()\n"
        "time.sleep(60)\n"
    )
    assert "timed out" in run_program(program, seconds=0.5)


def test_a_program_has_no_network_where_the_system_allows_that():
    probe = "import socket\nassert [name for _, name in socket.if_nameindex()] == ['lo']"
    reach = "import socket\nsocket.create_connection(('192.0.2.1', 9), timeout=1)"
    if run_program(probe) is not None:
        pytest.skip("this system gives no namespace of its own to a process")
    assert "unreachable" in run_program(reach)


def test_a_program_writes_in_its_own_folder_alone_where_the_system_allows_that(tmp_path):
    probe = "import os\nassert os.statvfs('/').f_flag & os.ST_RDONLY"
    if run_program(probe) is not None:
        pytest.skip("this system gives no mounts of its own to a process")
    for place in (tmp_path / "out", "/tmp/out", "/dev/shm/out"):
        assert "Read-only" in run_program(f"open({str(place)!r}, 'w').write('x')")
    assert run_program("open('in', 'w').write('x'); assert open('in').read() == 'x'") is None
    assert run_program("import tempfile; tempfile.TemporaryFile().write(b'x')") is None
    assert not list(tmp_path.iterdir())


DOC = {
    "prompt": "def one():\n",
    "test": "def check(f):\n    assert f() == 1\n",
    "entry_point": "one",
}


def test_answers_are_judged_by_their_tests():
    programs = Programs(fenced=False)
    answers = [["    return 1\n", "    return 2\n", "    exit(0)\n", "    return 1"]]
    built = programs.build(answers, [DOC])
    scores = programs.pass_at_k([f"{DOC['test']}\ncheck(one)"], built, [1, 2, 4])
    assert scores["pass@1"] == pytest.approx(0.5)
    assert scores["pass@2"] == pytest.approx(1 - 1 / 6)
    assert scores["pass@4"] == 1.0


def test_a_fence_ends_the_code_of_a_chat_answer():
    programs = Programs(fenced=True)
    ((program,),) = programs.build([["    return 1\n```\nIt returns one."]], [DOC])
    assert program == "def one():\n    return 1\n"
    assert programs.pass_at_k([f"{DOC['test']}\ncheck(one)"], [[program]], [1]) == {"pass@1": 1.0}
