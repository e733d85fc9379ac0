"""Who may see the files: a folder of 0700, files of 0600, and no store that others can write.

Knows paths and modes; nothing of what the files hold.
"""

from __future__ import annotations

import os
from pathlib import Path

from chatkv.errors import StoreError


def private_folder(folder: Path) -> Path:
    """Make `folder` and its missing parents, 0700, and check that nobody else can write there.

    Raises:
        StoreError: It cannot be made, is no folder, belongs to another user, or is writable by
            group or world.
    """
    try:
        for missing in [path for path in (*reversed(folder.parents), folder) if not path.exists()]:
            missing.mkdir(mode=0o700, exist_ok=True)
        if not folder.is_dir():
            raise NotADirectoryError(20, "not a folder")
    except OSError as error:
        raise StoreError(
            f"Cannot make the folder {folder}: {_reason(error)}.",
            hint="Choose another with --data-dir.",
        ) from error
    check_private(folder)
    return folder


def private_file(path: Path) -> bool:
    """Make an empty file of 0600 if there is none. Returns whether it was made.

    SQLite opens it afterwards, and its journals inherit the mode. A file of ours that others may
    read loses those bits.

    Raises:
        StoreError: It cannot be made, belongs to another user, or is writable by group or world.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        check_private(path)
        return False
    except OSError as error:
        raise StoreError(
            f"Cannot make {path}: {_reason(error)}.",
            hint="Check the folder and the free space, or use --ephemeral to chat without saving.",
        ) from error
    return True


def check_private(path: Path) -> None:
    """Refuse a file or folder that another user owns or can write.

    Raises:
        StoreError: It is such a one, or cannot be looked at.
    """
    try:
        info = path.stat()
    except OSError as error:
        raise StoreError(f"Cannot look at {path}: {_reason(error)}.") from error
    if info.st_uid != os.geteuid():
        raise StoreError(
            f"{path} belongs to user {info.st_uid}, and this is user {os.geteuid()}.",
            hint="Run as its owner, or choose another folder with --data-dir.",
        )
    if info.st_mode & 0o022:
        raise StoreError(
            f"{path} can be written by other users (mode {info.st_mode & 0o777:o}).",
            hint=f"Run `chmod go-w {path}`, or choose another folder with --data-dir.",
        )
    if path.is_file() and info.st_mode & 0o055 and os.access(path, os.W_OK):
        path.chmod(info.st_mode & 0o700)


def writable(path: Path) -> bool:
    """Whether `path` and its folder (where SQLite puts the journal) can be written."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
