"""A machine of NUMA nodes in QEMU, over this machine's file system, which it reads and does not write.

Its kernel is Debian's, its processors are emulated, and what it writes goes to its own memory. A module of
Python runs in it, with this process's Python and paths, and what that writes to `REPORT` comes out.
"""

from __future__ import annotations

import gzip
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

REPORT = Path("/dev/ttyS1")
"""The device by which a machine reports, a line at a time."""

MODULES = ("virtio_pci", "virtiofs", "overlay")
DAEMONS = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")
"""The server of files: QEMU's own up to Debian 12, later a package of that name."""

INIT = r"""#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc p /proc; $b mount -t sysfs s /sys; $b mount -t devtmpfs d /dev
for module in /mods/*; do $b insmod $module; done
$b mount -t virtiofs -o ro root /below
$b mount -t tmpfs t /above; $b mkdir -p /above/new /above/work
$b mount -t overlay -o lowerdir=/below,upperdir=/above/new,workdir=/above/work o /all
for folder in proc sys dev; do $b mount --bind /$folder /all/$folder; done
$b mkdir -p /all/dev/shm; $b mount -t tmpfs t /all/dev/shm
$b mount -t cgroup2 c /all/sys/fs/cgroup
$b ifconfig lo 127.0.0.1 up
$b stty -F /dev/ttyS1 -opost -echo
$b chroot /all /bin/sh -c "$($b cat /command)"
echo "ended with $?"
$b poweroff -f
"""


@dataclass(frozen=True)
class MemoryNode:
    """A NUMA node: its CPUs, and its memory; 0: it has none."""

    cpus: tuple[int, ...]
    mib: int


@dataclass(frozen=True)
class VirtualMachine:
    """Nodes in the order of their numbers. `cores` and `threads` shape its packages.

    distances: by pairs of nodes; what is not named is 20. booted_cpus: the others are off until they are
    switched on; None: all are on. cpu: QEMU's name of it; kernels see no threads in its plain "max".
    """

    name: str
    nodes: tuple[MemoryNode, ...]
    cores: int
    threads: int = 1
    distances: Mapping[tuple[int, int], int] | None = None
    booted_cpus: int | None = None
    cpu: str = "max"

    @property
    def n_cpus(self) -> int:
        return sum(len(node.cpus) for node in self.nodes)

    def distance(self, first: int, second: int) -> int:
        """By the firmware's rating."""
        if first == second:
            return 10
        return (self.distances or {}).get((min(first, second), max(first, second)), 20)

    def arguments(self) -> Iterator[str]:
        """QEMU's, of its processors and memory."""
        n_sockets = self.n_cpus // (self.cores * self.threads)
        yield from ("-smp", f"{self.n_cpus},sockets={n_sockets},cores={self.cores},threads={self.threads}")
        yield from ("-m", f"{sum(node.mib for node in self.nodes)}M")
        for number, node in enumerate(self.nodes):
            parts = ["node", f"nodeid={number}", *(f"cpus={cpu}" for cpu in node.cpus)]
            if node.mib:
                yield "-object"
                yield f"memory-backend-memfd,id=m{number},size={node.mib}M,share=on"
                parts.append(f"memdev=m{number}")
            yield from ("-numa", ",".join(parts))
        for first in range(len(self.nodes)):
            for second in range(first + 1, len(self.nodes)):
                yield from ("-numa", f"dist,src={first},dst={second},val={self.distance(first, second)}")


def why_none() -> str | None:
    """Why no machine can be had here; None where it can."""
    if platform.machine() != "x86_64":
        return "the emulated machines are x86-64, and what runs here is not"
    if shutil.which("qemu-system-x86_64") is None or _daemon() is None:
        return "QEMU for x86-64 and its virtiofsd are not installed"
    if _kernel() is None or shutil.which("busybox") is None or shutil.which("cpio") is None:
        return "a Debian kernel with its modules, busybox and cpio are not installed"
    if os.getuid() != 0:
        return "only root may let a virtual machine read all files"
    return None


@contextmanager
def booted(
    machine: VirtualMachine, module: str, environment: Mapping[str, str], folder: Path, limit_s: float
) -> Iterator[Reports]:
    """The machine while it runs `python -m module`. folder: for its console's log and other files."""
    initrd = _initrd(folder, _command(machine, module, environment))
    kernel, daemon = _kernel(), _daemon()
    assert kernel is not None
    assert daemon is not None
    socket = folder / "files.sock"
    shared = ["-o", "source=/", "-o", "cache=always", "-o", "sandbox=chroot"]
    with (folder / "files.log").open("wb") as log:
        files = subprocess.Popen([daemon, f"--socket-path={socket}", *shared], stdout=log, stderr=log)
    emulator = None
    try:
        _wait_for(socket)
        emulator = subprocess.Popen(
            _qemu(machine, kernel, initrd, socket, folder),
            stdin=subprocess.DEVNULL,
            stdout=(folder / "qemu.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        yield Reports(emulator, folder, time.monotonic() + limit_s)
    finally:
        for process in (emulator, files):
            if process is not None:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class Reports:
    """The lines that a running machine reports."""

    emulator: subprocess.Popen[bytes]
    folder: Path
    deadline_s: float

    def lines(self) -> Iterator[str]:
        """Each as it comes, until the machine is switched off or its time is over."""
        rest = b""
        with (self.folder / "report").open("rb") as report:
            while True:
                is_over = self.emulator.poll() is not None or time.monotonic() > self.deadline_s
                rest += report.read()
                *whole, rest = rest.split(b"\n")
                yield from (line.decode("utf-8", "replace").strip() for line in whole)
                if is_over:
                    return
                time.sleep(0.1)

    def last_words(self) -> str:
        """The end of the console, and of what QEMU said."""
        texts = [(self.folder / name).read_text(errors="replace") for name in ("qemu.log", "console")]
        return "\n".join(text[-4000:] for text in texts)


def _qemu(machine: VirtualMachine, kernel: Path, initrd: Path, socket: Path, folder: Path) -> Sequence[str]:
    (folder / "report").touch()
    cpus = "" if machine.booted_cpus is None else f" maxcpus={machine.booted_cpus}"
    return [
        "qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", machine.cpu,
        *machine.arguments(), "-kernel", str(kernel), "-initrd", str(initrd),
        "-append", f"console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on{cpus}",
        "-display", "none", "-nodefaults", "-no-reboot", "-no-user-config",
        "-serial", f"file:{folder}/console", "-serial", f"file:{folder}/report",
        "-chardev", f"socket,id=files,path={socket}", "-device", "vhost-user-fs-pci,chardev=files,tag=root",
    ]  # fmt: skip


def _command(machine: VirtualMachine, module: str, environment: Mapping[str, str]) -> str:
    paths = {"PATH": os.environ["PATH"], "HOME": "/root", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
    variables = " ".join(shlex.quote(f"{name}={value}") for name, value in {**paths, **environment}.items())
    return f"cd {ROOT} && exec env -i {variables} {sys.executable} -m {module}"


def _initrd(folder: Path, command: str) -> Path:
    """The first file system: busybox, the modules that the others need, and the command."""
    root = folder / "initrd.d"
    for name in ("bin", "proc", "sys", "dev", "below", "above", "all", "mods"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, root / "bin/busybox")
    for number, path in enumerate(_modules()):
        shutil.copy(path, root / "mods" / f"{number:02}-{path.name}")
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    (root / "command").write_text(command)
    names = "\0".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    archive = subprocess.run(
        ["cpio", "-0", "-o", "-H", "newc", "--quiet"],
        cwd=root,
        input=names.encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    packed = folder / "initrd"
    packed.write_bytes(gzip.compress(archive.stdout, 1))
    return packed


def _modules() -> list[Path]:
    """Those of the kernel, each after the ones that it needs."""
    kernel = _kernel()
    assert kernel is not None
    release, paths = kernel.name.removeprefix("vmlinuz-"), dict[Path, None]()
    for module in MODULES:
        shown = subprocess.run(
            ["/sbin/modprobe", "-S", release, "--show-depends", module],
            capture_output=True,
            text=True,
            check=True,
        )
        paths |= {
            Path(line.split()[1]): None for line in shown.stdout.splitlines() if line.startswith("insmod")
        }
    return list(paths)


def _kernel() -> Path | None:
    """The newest that has its modules here."""
    kernels = sorted(Path("/boot").glob("vmlinuz-*"))
    with_modules = [path for path in kernels if Path("/lib/modules", path.name[8:], "modules.dep").exists()]
    return with_modules[-1] if with_modules else None


def _daemon() -> str | None:
    return next((path for path in DAEMONS if Path(path).exists()), None)


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} did not appear"
        time.sleep(0.05)
