"""Takes away what macOS does not have; Python runs this first wherever the folder is on its path.

The names are those that typeshed gives to Linux alone, of all that the package uses; ``/proc`` and
``/sys`` are not to be found.  Other programs and libraries keep what they call themselves.
"""

import builtins
import io
import mmap
import os
from typing import Any

NAMES: dict[Any, tuple[str, ...]] = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "MFD_CLOEXEC"),
        *("posix_fadvise", "POSIX_FADV_DONTNEED", "POSIX_FADV_RANDOM", "posix_fallocate"),
        *("fdatasync", "copy_file_range", "O_DIRECT", "O_TMPFILE", "pidfd_open", "eventfd"),
    ),
    mmap: ("MADV_HUGEPAGE",),
}
HIDDEN = ("/proc/", "/sys/")


def hiding(function: Any) -> Any:
    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(HIDDEN):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *arguments, **options)

    return call


for module, names in NAMES.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
os.sysconf_names.pop("SC_AVPHYS_PAGES", None)
os.stat, os.open, io.open, builtins.open = map(hiding, (os.stat, os.open, io.open, open))
