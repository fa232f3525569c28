"""Files: what is refused of those of strangers before they are read, and who may read ours."""

import os
import zipfile
from contextlib import suppress
from pathlib import Path


def check_archive(path: Path) -> None:
    """Raise ValueError for a file of `torch.save` that is not as it was written, or a trap; the message says why.

    Such a file is a zip archive with checksums, which torch does not look at, and compresses nothing; torch would
    unpack one that does until the memory is full.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            size = sum(entry.file_size for entry in entries)
            if size > path.stat().st_size or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError(f"it is compressed, as torch.save does not, and unpacks to {size:,} bytes")
            damaged = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"it is damaged ({error})") from error
    if damaged is not None:
        raise ValueError(f"it is damaged: the checksum of {damaged} is another")


def let_others_read(path: Path) -> None:
    """Give a file the permissions of any that is written here, as the process's umask has them.

    safetensors 0.8 lets nobody but the owner read its files (its issue 782).
    """
    umask = os.umask(0o077)  # which can't be read without setting it
    os.umask(umask)
    with suppress(OSError):  # on drives that know no permissions
        path.chmod(0o666 & ~umask)
