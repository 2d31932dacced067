"""Whether nobody else can have written a checkpoint.

A digest does not help against somebody who can write the manifest too: no code of theirs would run
(see ``weights.contents``), but their numbers would be trained on. So every file must belong to this
user, must not be writable by others beyond what this user's own umask lets them write, and must lie
in the checkpoint itself.
"""

import os
import shlex
import stat
from pathlib import Path

from trainkit.checkpoint.whole.manifest import list_files
from trainkit.errors import CheckpointError
from trainkit.places import own_umask


def refuse_foreign(directory: Path) -> None:
    """Refuse a checkpoint that another user has made or could have changed.

    Call it after ``verify_directory`` and before anything is loaded.

    Args:
        directory: the checkpoint.

    Raises:
        CheckpointError: names the file or folder, and who may write it.
    """
    directory = Path(directory)
    me = os.getuid()
    above = directory.parent.lstat()
    if above.st_uid == me and not above.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return  # nobody else gets in here, whatever a lax umask wrote on the files
    folders = {(directory / name).parent for name in list_files(directory)}
    kept_out = own_umask()
    # Whoever may write a folder may replace a file in it.
    for path in [directory.parent, directory, *sorted(folders), *_files(directory)]:
        status = path.lstat()
        is_mine = status.st_uid in (me, 0)
        is_open = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) & kept_out)
        # In a sticky folder such as /tmp others can add files, but not replace mine.
        if path == directory.parent and status.st_mode & stat.S_ISVTX:
            is_mine, is_open = True, False
        if not is_mine or is_open:
            who = f"belongs to user {status.st_uid}" if not is_mine else "is writable by others"
            raise CheckpointError(
                f"{path} {who}, so the checkpoint may not be yours any more",
                where=str(directory),
                fix=f"if you trust it: {_cure(directory, is_mine=is_mine)}",
            )


def _cure(directory: Path, *, is_mine: bool) -> str:
    """The command after which this check passes, the folder around the checkpoint included."""
    parent = shlex.quote(str(directory.parent))
    if not is_mine:
        return f"sudo chown -R $USER {parent}"
    return f"chmod go-w {parent} && chmod -R go-w {shlex.quote(str(directory))}"


def _files(directory: Path) -> list[Path]:
    return [directory / name for name in list_files(directory)]
