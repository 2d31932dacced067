"""Nothing that a repository's configuration names is run when a command describes it."""

import os
import subprocess
import time
from pathlib import Path

import pytest

import trainkit
from trainkit.bench import cells
from trainkit.cli.app import main
from trainkit.run.environment import repository_state

NAMED = """
[core]
    fsmonitor = PROGRAM
    pager = PROGRAM
    editor = PROGRAM
    sshCommand = PROGRAM
    askPass = PROGRAM
    gitProxy = PROGRAM
    alternateRefsCommand = PROGRAM
    hooksPath = HOOKS
[diff]
    external = PROGRAM
    submodule = log
    ignoreSubmodules = none
[diff "named"]
    textconv = PROGRAM
    command = PROGRAM
[filter "named"]
    clean = PROGRAM
    smudge = PROGRAM
    required = true
[filter "process"]
    process = PROGRAM
    required = true
[pager]
    status = PROGRAM
    diff = PROGRAM
[alias]
    status = !PROGRAM
    diff = !PROGRAM
    rev-parse = !PROGRAM
[credential]
    helper = !PROGRAM
[gpg]
    program = PROGRAM
[log]
    showSignature = true
[status]
    submoduleSummary = true
[submodule]
    recurse = true
"""


def git(where, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    identity += ["-c", "protocol.file.allow=always"]
    done = subprocess.run(["git", *identity, *words], cwd=where, check=True, capture_output=True)
    return done.stdout.decode()


@pytest.fixture
def repository(tmp_path):
    """A changed repository with a submodule, whose every setting names a program."""
    marker, program, hooks = tmp_path / "MARKER", tmp_path / "program", tmp_path / "hooks"
    program.write_text(f"#!/bin/sh\necho \"$0 $@\" >> '{marker}'\nexit 0\n")
    program.chmod(0o755)
    hooks.mkdir()
    for hook in ("post-index-change", "post-checkout", "pre-commit", "fsmonitor-watchman"):
        (hooks / hook).symlink_to(program)
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for where in (inner, outer):
        where.mkdir()
        git(where, "init", "-q")
        (where / "plain.txt").write_text("one\n")
        (where / "sub").mkdir()
        (where / "sub" / "other.bin").write_text("one\n")
        (where / ".gitattributes").write_text(
            "*.txt filter=named diff=named\n*.bin filter=process diff=named\n"
        )
        git(where, "add", ".")
        git(where, "commit", "-qm", "first")
    git(outer, "submodule", "--quiet", "add", str(inner), "module")
    git(outer, "commit", "-qm", "second")
    named = NAMED.replace("PROGRAM", str(program)).replace("HOOKS", str(hooks))
    for config in (outer / ".git" / "config", outer / ".git/modules/module/config"):
        config.write_text(f"{config.read_text()}[include]\n\tpath = included\n")
        (config.parent / "included").write_text(named)
    for file in ("plain.txt", "sub/other.bin", "module/plain.txt"):
        (outer / file).write_text("two\n")
    (outer / "new.txt").write_text("three\n")
    return outer, marker


def test_what_changed_is_told_and_nothing_is_run(repository, monkeypatch):
    outer, marker = repository
    for name in ("GIT_EXTERNAL_DIFF", "GIT_SSH_COMMAND", "GIT_PAGER", "GIT_ASKPASS"):
        monkeypatch.setenv(name, str(outer.parent / "program"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.fsmonitor")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(outer.parent / "program"))
    monkeypatch.setenv("GIT_DIR", str(outer.parent / "inner" / ".git"))
    monkeypatch.setenv("GIT_TRACE", str(marker))
    before = {path: path.stat().st_mtime_ns for path in outer.rglob("*")}
    found = repository_state(outer / "sub")
    assert not marker.exists(), marker.read_text()
    assert found["dirty"]
    assert found["changed_files"] == [" M plain.txt", " M sub/other.bin", "?? new.txt"]
    assert found["diff"].count("-one\n+two\n") == 2
    assert found["branch"] in ("main", "master")
    assert {path: path.stat().st_mtime_ns for path in outer.rglob("*")} == before
    # The same repository does run them for git itself, so the test could fail.
    for name in ("GIT_DIR", "GIT_TRACE"):
        monkeypatch.delenv(name)
    subprocess.run(["git", "status"], cwd=outer, check=False, capture_output=True)
    assert marker.exists()


def test_a_measurement_names_its_commit_and_runs_nothing(repository, monkeypatch):
    outer, marker = repository
    monkeypatch.setattr(cells, "__file__", str(outer / "sub" / "record.py"))
    commit = cells._git_commit()
    assert commit.endswith("-dirty")
    assert repository_state(outer)["commit"].startswith(commit.removesuffix("-dirty"))
    assert not marker.exists()


def test_no_remote_is_asked_for_an_object_that_is_missing(repository):
    outer, marker = repository
    program = outer.parent / "program"
    config = outer / ".git" / "config"
    config.write_text(
        f'{config.read_text()}[remote "origin"]\n\turl = ext::{program}\n\tpromisor = true\n'
        "[extensions]\n\tpartialClone = origin\n[protocol]\n\tallow = always\n"
    )
    blob = git(outer, "rev-parse", "HEAD:plain.txt").strip()
    marker.unlink(missing_ok=True)
    (outer / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    found = repository_state(outer)
    assert not marker.exists(), marker.read_text()
    assert found["dirty"]
    assert found["diff"] is None


def test_a_configuration_that_takes_files_elsewhere_for_its_own_is_not_followed(repository):
    outer, _ = repository
    secret = outer.parent / "home"
    secret.mkdir()
    (secret / "plain.txt").write_text("private\n")
    config = outer / ".git" / "config"
    config.write_text(f"{config.read_text()}[core]\n\tworktree = {secret}\n")
    assert repository_state(outer) is None


def test_worktrees_split_indexes_and_folders_without_a_commit(tmp_path):
    assert repository_state(tmp_path) is None
    main, other = tmp_path / "main", tmp_path / "other"
    main.mkdir()
    git(main, "init", "-q")
    assert repository_state(main) is None
    (main / "f.txt").write_text("one\n")
    git(main, "add", ".")
    git(main, "commit", "-qm", "first")
    git(main, "remote", "add", "origin", "https://example.org/x.git")
    git(main, "worktree", "add", "-q", str(other))
    git(other, "update-index", "--split-index")
    (other / "f.txt").write_text("two\n")
    (main / ".git" / "info" / "exclude").write_text("hidden*\n")
    for where in (main, other):
        (where / "hidden.txt").write_text("three\n")
    assert repository_state(main)["dirty"] is False
    found = repository_state(other)
    assert found["changed_files"] == [" M f.txt"]
    assert (found["branch"], found["remote"]) == ("other", "https://example.org/x.git")


def test_a_repository_of_someone_else_is_not_read(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-qm", "first", "--allow-empty")
    assert repository_state(tmp_path)
    if os.geteuid() != 0:
        pytest.skip("only root gives a folder to someone else")
    os.chown(tmp_path, 12345, 12345)
    os.chown(tmp_path / ".git", 12345, 12345)
    assert repository_state(tmp_path) is None


def _worktree_config(outer, program, monkeypatch):
    git(outer, "config", "extensions.worktreeConfig", "true")
    (outer / ".git" / "config.worktree").write_text(f"[core]\n\tfsmonitor = {program}\n")


def _conditional_include(outer, program, monkeypatch):
    (outer / ".git" / "more").write_text(f"[core]\n\tfsmonitor = {program}\n\tpager = {program}\n")
    config = outer / ".git" / "config"
    config.write_text(f'{config.read_text()}[includeIf "gitdir:**"]\n\tpath = more\n')


def _daemon(outer, program, monkeypatch):
    git(outer, "config", "core.fsmonitor", "true")
    git(outer, "config", "core.untrackedCache", "true")


def _attributes_of_the_repository(outer, program, monkeypatch):
    (outer / ".git" / "info" / "attributes").write_text("* filter=named diff=named merge=named\n")


def _home(outer, program, monkeypatch):
    home = outer.parent / "home"
    (home / ".config" / "git").mkdir(parents=True)
    text = f"[core]\n\tfsmonitor = {program}\n[diff]\n\texternal = {program}\n"
    text += f'[filter "named"]\n\tclean = {program}\n[core]\n\tattributesFile = {home}/attributes\n'
    (home / ".gitconfig").write_text(text)
    (home / ".config" / "git" / "config").write_text(text)
    (home / "attributes").write_text("* filter=named\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))


def _parameters(outer, program, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", f"'core.fsmonitor={program}'")


def _files_of_the_environment(outer, program, monkeypatch):
    config = outer.parent / "elsewhere"
    config.write_text(f"[core]\n\tfsmonitor = {program}\n[diff]\n\texternal = {program}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(config))


def _programs_of_git(outer, program, monkeypatch):
    folder = outer.parent / "core"
    folder.mkdir()
    for name in ("git-status", "git-diff", "git-rev-parse", "git-config", "git-submodule"):
        (folder / name).symlink_to(program)
    monkeypatch.setenv("GIT_EXEC_PATH", str(folder))


def _traces(outer, program, monkeypatch):
    for name in ("GIT_TRACE2", "GIT_TRACE2_EVENT", "GIT_TRACE_SETUP", "GIT_TRACE_PACK_ACCESS"):
        monkeypatch.setenv(name, str(outer.parent / "MARKER"))
    for name in ("GIT_EDITOR", "GIT_SEQUENCE_EDITOR", "GIT_PROXY_COMMAND", "GIT_SSH"):
        monkeypatch.setenv(name, str(program))


def _submodule_updates(outer, program, monkeypatch):
    modules = outer / ".gitmodules"
    modules.write_text(f"{modules.read_text()}\tupdate = !{program}\n\tignore = none\n")
    git(outer, "config", "submodule.module.update", f"!{program}")


def _objects_of_others(outer, program, monkeypatch):
    other = outer.parent / "other" / "objects"
    other.mkdir(parents=True)
    (other.parent / "config").write_text(f"[core]\n\tfsmonitor = {program}\n")
    (outer / ".git" / "objects" / "info" / "alternates").write_text(f"{other}\n")


def _linked_directory(outer, program, monkeypatch):
    (outer / ".git").rename(outer.parent / "moved")
    (outer / ".git").write_text(f"gitdir: {outer.parent / 'moved'}\n")


@pytest.mark.parametrize(
    "name",
    [
        _worktree_config, _conditional_include, _daemon, _attributes_of_the_repository, _home,
        _parameters, _files_of_the_environment, _programs_of_git, _traces, _submodule_updates,
        _objects_of_others, _linked_directory,
    ],
    ids=lambda name: name.__name__[1:],
)  # fmt: skip
def test_wherever_a_program_is_named_it_is_not_run(name, repository, monkeypatch):
    outer, marker = repository
    name(outer, outer.parent / "program", monkeypatch)
    marker.unlink(missing_ok=True)
    found = repository_state(outer)
    assert not marker.exists(), marker.read_text()
    assert not (outer / ".git" / "fsmonitor--daemon.ipc").exists()
    assert found["dirty"]
    assert found["diff"].count("-one\n+two\n") == 2


@pytest.mark.parametrize("file", [".git/HEAD", ".git/index", ".gitignore"])
def test_a_file_of_git_that_never_ends_is_left(file, tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-qm", "first", "--allow-empty")
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    monkeypatch.setattr("trainkit.run.environment._SECONDS", 1)
    started = time.monotonic()
    found = repository_state(tmp_path)
    assert time.monotonic() - started < 10
    if file == ".gitignore" or not (found is None or file.endswith("index")):
        assert found["dirty"] is None


def test_git_is_run_in_one_place():
    package = Path(trainkit.__file__).parent
    files = [path for path in package.rglob("*.py") if '["git"' in path.read_text()]
    assert [path.relative_to(package) for path in files] == [Path("run/environment.py")]


@pytest.mark.parametrize("places", [".:{}", ":{}", "{}:", "", "..", "sub/.."])
def test_no_program_of_the_users_folder_is_run(places, tmp_path, monkeypatch):
    """What a command starts is looked for in whole paths alone."""
    (tmp_path / "sub").mkdir()
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\ntouch ran\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path / "sub" if places == ".." else tmp_path)
    monkeypatch.setenv("PATH", places.format(os.environ["PATH"]))
    assert main(["--version"]) == 0
    subprocess.run(["git", "--version"], check=False, capture_output=True)
    assert not [*tmp_path.rglob("ran")]
