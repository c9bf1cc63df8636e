"""Changes of the files that a dataset was made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event

from gear_offline.convert.conversion import digest_file
from gear_offline.dataset.dataset import Dataset
from gear_offline.dataset.manifest import MANIFEST_NAME
from gear_offline.sources.input_files import InputFile
from gear_offline.sources.uri import place_of


def changed_files(source: str, dataset: Dataset) -> Iterator[str]:
    """Yield changes of the files of a `source`, as far as they are on this machine.

    Sizes come first.  A file is digested only if it was written to after the dataset was.
    """
    place, made = place_of(source), (dataset.path / MANIFEST_NAME).stat()
    recorded = dataset.manifest.source.files
    if place is None or not recorded:
        return
    known = {(file.name, file.bytes, file.digest) for file in recorded}
    names = {name for name, _, _ in known}
    kinds = {Path(name).suffix for name in names}
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    for name in sorted(names - {file.name for file in files}) if place.is_dir() else ():
        yield f"{name} is gone"
    for file in files:
        status = file.stat()
        is_newer = max(status.st_mtime_ns, status.st_ctime_ns) >= made.st_mtime_ns
        if not file.is_file() or file.suffix not in kinds:
            continue
        if file.name not in names:
            if is_newer:
                yield f"{file.name} is new"
        elif status.st_size not in {size for name, size, _ in known if name == file.name}:
            yield f"{file.name} has {status.st_size:,} bytes now"
        elif is_newer:
            present = digest_file(InputFile.find(file), Event())
            if (present.name, present.bytes, present.digest) not in known:
                yield f"{file.name} has another content now (xxh3-128:{present.digest})"
