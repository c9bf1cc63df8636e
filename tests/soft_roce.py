"""A virtual machine with an RDMA device in software, and a command run in it.

    python -m tests.soft_roce [--or-skip] COMMAND ARGUMENT ...

Debian's kernel boots under QEMU, loads Soft-RoCE (rdma_rxe) and sees this machine's files
read-only over 9p at their own paths, so that the command finds the checkout, the virtual
environment and itself; only /run and /dev/shm can be written.  Kernel and pyverbs come from
Debian's packages, are unpacked into a cache (~/.cache/gear-offline/rdma-vm), not installed.

The processor is emulated: KVM is not used, since some hosts offer one that hangs Debian's kernel.

Exit status: the command's; 2 if the machine cannot be made (0 with ``--or-skip``), 124 if it ran
too long.
"""

import gzip
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT_SECONDS = 900
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "crc32_generic", "rdma_rxe", "dummy")
KERNEL_PARTS = (
    "./boot/vmlinuz-*",
    "./lib/modules/*/kernel/drivers/infiniband/*",
    "./lib/modules/*/kernel/drivers/virtio/*",
    "./lib/modules/*/kernel/drivers/net/dummy.ko*",
    "./lib/modules/*/kernel/net/9p/*",
    "./lib/modules/*/kernel/net/ipv4/udp_tunnel.ko*",
    "./lib/modules/*/kernel/net/ipv6/ip6_udp_tunnel.ko*",
    "./lib/modules/*/kernel/fs/9p/*",
    "./lib/modules/*/kernel/fs/fscache/*",
    "./lib/modules/*/kernel/fs/netfs/*",
    "./lib/modules/*/kernel/crypto/crc32*",
)
LIBRARIES = ("python3-pyverbs", "ibverbs-providers", "libibverbs1", "librdmacm1")
INIT = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
while read m; do $b insmod /modules/$m || $b echo "vm: insmod $m failed"; done < /modules/order
o=trans=virtio,version=9p2000.L,msize=1048576
$b mount -t 9p -o $o,ro,cache=loose root /new || $b poweroff -f
$b mount -t 9p -o $o,rw,cache=none out /new/mnt || $b poweroff -f
for d in proc sys dev; do $b mount --move /$d /new/$d; done
$b mkdir -p /new/dev/shm /new/dev/pts
for d in dev/shm run; do $b mount -t tmpfs tmpfs /new/$d; done
$b mount -t devpts pts /new/dev/pts
read up _ < /new/proc/uptime; $b echo "vm: up after $up s"
$b chroot /new /bin/sh /mnt/guest.sh; status=$?
$b echo $status > /new/mnt/status; $b sync
read up _ < /new/proc/uptime; $b echo "vm: status $status after $up s"
$b poweroff -f
"""
GUEST = """export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run PYTHONDONTWRITEBYTECODE=1
export HYPOTHESIS_STORAGE_DIRECTORY=/run/hypothesis GEAR_OFFLINE_RDMA_INTERFACE=dummy0
export PYTHONPATH={path} LD_LIBRARY_PATH={libraries} IBV_DRIVERS={driver} OMP_NUM_THREADS=1
ulimit -l unlimited
ip link set lo up; ip link add dummy0 type dummy 2>/dev/null
ip addr add 10.9.0.1/24 dev dummy0; ip link set dummy0 up
rdma link add rxe0 type rxe netdev dummy0 || exit 98
cd {folder} && exec {command}
"""


class CannotError(Exception):
    """The machine cannot be made here; says why."""


def main(arguments: list[str]) -> int:
    or_skip = arguments[:1] == ["--or-skip"]
    command = arguments[or_skip:]
    if not command:
        print(__doc__)
        return 2
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "gear-offline/rdma-vm")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _need_programs()
        kernel, initrd = _kernel(cache)
        libraries = _libraries(cache)
    except (CannotError, OSError) as error:
        print(f"rdma-vm: {'SKIPPED: ' if or_skip else ''}{error}", file=sys.stderr)
        return 0 if or_skip else 2
    return _boot(kernel, initrd, libraries, command)


def _need_programs() -> None:
    """Install QEMU and busybox where they are missing."""
    if platform.machine() != "x86_64" or not shutil.which("apt-get"):
        raise CannotError("this needs Debian or Ubuntu on x86_64")
    wanted = {
        "qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "rdma": "iproute2",
        "dpkg-deb": "dpkg",
    }  # fmt: skip
    missing = [package for program, package in wanted.items() if not shutil.which(program)]
    if not missing:
        return
    if os.geteuid():
        raise CannotError(f"not installed: {', '.join(missing)} (apt-get install, as root)")
    print(f"rdma-vm: installing {', '.join(missing)}", flush=True)
    options = ["-qq", "--no-install-recommends"]
    _run(["apt-get", "update", "-qq"], quiet=True)
    _run(["apt-get", "install", *options, *missing], quiet=True)


def _run(command: list[str], *, quiet: bool = False, cwd: Path | None = None) -> str:
    """Run a program and return its output; `CannotError` with its last line if it fails."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise CannotError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["failed"]
        raise CannotError(f"{shlex.join(command)}: {lines[-1]}")
    return done.stdout


def _unpack(packages: list[str], target: Path, parts: tuple[str, ...] = ()) -> None:
    """Download Debian packages and unpack them (or `parts` of them) into `target`, whole or not."""
    draft = target.with_name(target.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        download = ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *packages]
        try:
            _run(download, cwd=Path(folder))
        except CannotError:  # old lists name packages that are gone
            _run(["apt-get", "update", "-qq"])
            _run(download, cwd=Path(folder))
        for package in Path(folder).glob("*.deb"):
            with subprocess.Popen(
                ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE
            ) as archive:
                wanted = ["--wildcards", *parts] if parts else []
                subprocess.run(
                    ["tar", "x", "-C", str(draft), *wanted], stdin=archive.stdout, check=True
                )
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    print(f"rdma-vm: {', '.join(packages)} in {time.monotonic() - begin:.1f} s", flush=True)


def _kernel(cache: Path) -> tuple[Path, Path]:
    """Return Debian's kernel and an initial file system with the modules that are needed."""
    folder = cache / "kernel"
    if not list(folder.glob("boot/vmlinuz-*")):
        # not linux-image-cloud-amd64, which has neither rdma_rxe nor 9p
        try:
            text = _run(["apt-cache", "depends", "linux-image-amd64"])
        except CannotError:
            text = ""
        if not (found := re.search(r"Depends: (linux-image-\S+)", text)):
            _run(["apt-get", "update", "-qq"])
            text = _run(["apt-cache", "depends", "linux-image-amd64"])
            found = re.search(r"Depends: (linux-image-\S+)", text)
        if not found:
            raise CannotError("apt knows no linux-image-amd64")
        _unpack([found[1]], folder, KERNEL_PARTS)
    initrd = folder / "initrd.gz"
    content = gzip.compress(b"".join(_archive(folder)), 1, mtime=0)
    if not initrd.exists() or initrd.read_bytes() != content:
        initrd.write_bytes(content)
    return next(folder.glob("boot/vmlinuz-*")), initrd


def _libraries(cache: Path) -> Path:
    """Return a folder with pyverbs and the libraries that belong to it."""
    folder = cache / "libraries"
    if not folder.exists():
        _unpack(list(LIBRARIES), folder)
    tag = f".{sys.implementation.cache_tag}-"
    modules = list(folder.glob("usr/lib/python3/dist-packages/pyverbs/device.*.so"))
    if not any(tag in module.name for module in modules):
        names = ", ".join(module.name for module in modules)
        raise CannotError(
            f"Debian's pyverbs ({names}) is not for this Python {platform.python_version()}: "
            "PYTHON=/usr/bin/python3 make test-rdma VENV=.venv-rdma"
        )
    return folder


def _archive(folder: Path) -> Iterator[bytes]:
    """Yield the initial file system, a cpio archive of the "newc" kind."""
    modules = {path.name.split(".")[0].replace("-", "_"): path for path in folder.rglob("*.ko*")}
    order: list[str] = []

    def add(name: str) -> None:
        if name in order:
            return
        depends = re.search(rb"\0depends=([^\0]*)\0", _module(modules[name]))
        for needed in filter(None, depends[1].decode().split(",") if depends else ()):
            add(needed.replace("-", "_"))
        order.append(name)

    for name in MODULES:
        add(name)
    busybox = shutil.which("busybox")
    assert busybox is not None, "installed by _need_programs"
    files = [(name, 0o40755, b"") for name in ("bin", "modules", "proc", "sys", "dev", "new")]
    files.append(("init", 0o100755, INIT.encode()))
    files.append(("bin/busybox", 0o100755, Path(busybox).read_bytes()))
    files.append(("modules/order", 0o100644, "\n".join([*order, ""]).encode()))
    files += [(f"modules/{name}", 0o100644, _module(modules[name])) for name in order]
    files.append(("TRAILER!!!", 0, b""))
    for number, (name, mode, data) in enumerate(files, start=1):
        title = name.encode() + b"\0"
        values = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(title), 0)
        head = b"070701" + b"".join(b"%08x" % value for value in values) + title
        yield head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def _module(path: Path) -> bytes:
    """Return a kernel module, which newer Debians compress."""
    if path.suffix == ".xz":
        import lzma

        return lzma.decompress(path.read_bytes())
    return path.read_bytes()


def _boot(kernel: Path, initrd: Path, libraries: Path, command: list[str]) -> int:
    begin = time.monotonic()
    python_path = libraries / "python"  # a folder with pyverbs and nothing else of Debian's
    python_path.mkdir(exist_ok=True)
    link = python_path / "pyverbs"
    if not link.is_symlink():
        link.symlink_to(libraries / "usr/lib/python3/dist-packages/pyverbs")
    shared = libraries / f"usr/lib/{platform.machine()}-linux-gnu"
    script = GUEST.format(
        path=shlex.quote(f"{python_path}:{Path.cwd()}"),
        libraries=shlex.quote(str(shared)),
        driver=shlex.quote(str(shared / "libibverbs" / "librxe")),
        folder=shlex.quote(str(Path.cwd())),
        command=shlex.join(command),
    )
    with tempfile.TemporaryDirectory(prefix="gear-offline-vm-") as out:
        Path(out, "guest.sh").write_text(script)
        share = "local,security_model=none,multidevs=remap"
        machine = [
            "qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max",
            "-m", "2048", "-smp", "2", "-nodefaults", "-no-user-config", "-display", "none",
            "-no-reboot", "-serial", "stdio", "-monitor", "none",
            "-kernel", str(kernel), "-initrd", str(initrd),
            # no_timer_check: where the host is busy, Linux finds the emulated timer too late
            "-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable "
            "no_timer_check",
            "-virtfs", f"{share},path=/,mount_tag=root,readonly=on",
            "-virtfs", f"{share},path={out},mount_tag=out",
        ]  # fmt: skip
        try:
            subprocess.run(machine, stdin=subprocess.DEVNULL, timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"rdma-vm: stopped after {LIMIT_SECONDS} s", file=sys.stderr)
            return 124
        status = Path(out, "status")
        if not status.exists():
            print("rdma-vm: the machine ended without a result", file=sys.stderr)
            return 1
        print(f"rdma-vm: {time.monotonic() - begin:.1f} s in all", flush=True)
        return int(status.read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
