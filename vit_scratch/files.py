"""Files that may come from strangers: what is refused before it is read."""

import zipfile
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
