"""Whether a checkpoint is ours to unpickle.

DeepSpeed reads its shards with the full unpickler, which runs whatever code is in them. A digest
does not help against somebody who can write the manifest too, so before such a load every file
must belong to this user, must not be writable by others, and must lie in the checkpoint itself.
"""

import os
import stat
from pathlib import Path

from trainkit.checkpoint.whole.manifest import list_files
from trainkit.errors import CheckpointError


def refuse_foreign(directory: Path) -> None:
    """Refuse a checkpoint that another user has made or could have changed.

    Call it after ``verify_directory`` and before DeepSpeed, or anything else that unpickles.

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
    # Whoever may write a folder may replace a file in it.
    for path in [directory.parent, directory, *sorted(folders), *_files(directory)]:
        status = path.lstat()
        is_mine = status.st_uid in (me, 0)
        is_open = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        # In a sticky folder such as /tmp others can add files, but not replace mine.
        if path == directory.parent and status.st_mode & stat.S_ISVTX:
            is_mine, is_open = True, False
        if not is_mine or is_open:
            who = f"belongs to user {status.st_uid}" if not is_mine else "is writable by others"
            raise CheckpointError(
                f"{path} {who}; loading its shards would run whatever code is in them",
                where=str(directory),
                fix=f"if you trust it: chown -R $USER {directory} && chmod -R go-w {directory}",
            )


def _files(directory: Path) -> list[Path]:
    return [directory / name for name in list_files(directory)]
