"""The state of a git repository, read without running anything that the repository names."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from trainkit.redact import redact_text

_SECONDS = 20
_LARGEST_DIFF_BYTES = 1 << 20


def repository_state(where: Path) -> dict[str, Any] | None:
    """Commit, branch and uncommitted changes of the repository around ``where``.

    A repository's configuration may name programs: monitors, filters, converters, hooks, helpers of
    remotes. So its own is read only to find it, which runs nothing; what changed is asked of a
    stand-in for its git directory that has its index and objects and no configuration.

    Returns:
        None without git, without a repository with a commit, and where git does not trust its
        owner. ``changed_files`` and ``diff`` are None where git could not tell them.
    """
    places = ["--absolute-git-dir", "--git-common-dir", "--show-toplevel"]
    found = _git(["rev-parse", *places, "HEAD", "--abbrev-ref", "HEAD"], where)
    if found is None or found.count("\n") != 5:
        return None
    directory, common, root, commit, branch = found.splitlines()
    # A configuration may also name files elsewhere as its own.
    if not where.resolve().is_relative_to(Path(root).resolve()):
        return None
    changed = diff = None
    with tempfile.TemporaryDirectory() as stand_in:
        _fill(Path(stand_in), Path(directory), where / common, commit)
        variables = {
            "GIT_DIR": stand_in,
            "GIT_WORK_TREE": root,
            "GIT_OBJECT_DIRECTORY": str((where / common / "objects").resolve()),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ATTR_NOSYSTEM": "1",
        }
        # A submodule has a configuration of its own: only which commit it is at is looked at.
        changed = _git(
            ["status", "--porcelain", "--ignore-submodules=dirty"], Path(root), variables
        )
        if changed is not None:
            words = ["diff", "HEAD", "--no-color", "--ignore-submodules=dirty"]
            diff = _git(words, Path(root), variables)
    if diff is not None:
        # First, so that no secret is cut in two and its rest not known for one.
        diff = redact_text(diff)
        if len(diff) > _LARGEST_DIFF_BYTES:
            diff = diff[:_LARGEST_DIFF_BYTES] + "\n... (cut: the diff is longer than 1 MiB)\n"
    return {
        "commit": commit,
        "branch": branch,
        "remote": (_git(["config", "--get", "remote.origin.url"], where) or "").strip() or None,
        "dirty": None if changed is None else bool(changed),
        "changed_files": None if changed is None else changed.splitlines(),
        "diff": diff,
    }


def _fill(stand_in: Path, directory: Path, common: Path, commit: str) -> None:
    """Make ``stand_in`` a git directory at ``commit`` with the index of ``directory``."""
    kind = "sha1" if len(commit) == 40 else "sha256"
    (stand_in / "config").write_text(
        "[core]\n\trepositoryFormatVersion = 1\n\tbare = false\n"
        f"[extensions]\n\tobjectFormat = {kind}\n"
    )
    (stand_in / "HEAD").write_text(f"{commit}\n")
    (stand_in / "refs").mkdir()
    for file in (directory / "index", *directory.glob("sharedindex.*"), common / "info"):
        if file.exists():
            (stand_in / file.name).symlink_to(file.resolve())


def _git(words: list[str], where: Path, variables: dict[str, str] | None = None) -> str | None:
    """What git prints, None if it is not installed, fails or takes too long."""
    if shutil.which("git") is None:
        return None
    # A variable of git's could name programs too, or another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", **(variables or {})}
    try:
        finished = subprocess.run(
            ["git", *words],
            cwd=where,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout.decode(errors="replace") if finished.returncode == 0 else None
