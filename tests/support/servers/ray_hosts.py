"""Hosts of a Ray cluster on this machine: network namespaces that a bridge joins, each with its own /tmp/ray.

The head and whoever uses it are in namespaces of their own too: `run_inside` starts a program there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from phasewise.cluster.real import ray_cluster
from phasewise.cluster.real.front import Front
from phasewise.cluster.real.ray_connection import ray_connection, the_ray
from phasewise.cluster.real.supervisor import FrontSettings
from phasewise.cluster.routing import Role
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.processes.sockets import Keys
from phasewise.workflows.opening.open_model import Weights
from phasewise.workflows.serve.instance_process import MODULE, InstanceSpec
from tests.support import ROOT
from tests.support.servers.pools import PATIENCE_S, PoolServer

NETWORK = "10.79.0"
"""`.1` is the head, which has no cores; hosts are `.2` and on."""
HEAD = f"{NETWORK}.1"
PORT = 6379
ADDRESS = f"{HEAD}:{PORT}"
CORES = 2
"""Of each host, as Ray counts them."""
NEEDS = "network namespaces need root, iproute2, util-linux, and a kernel with veth and bridges"
NEEDS_RAY = "Ray is not installed (extra ray)"
_PROBE = (
    "ip link add bridge type bridge && ip link add left type veth peer name right && "
    "ip link set left master bridge && mount -t tmpfs tmpfs /mnt"
)
_TEMPORARY = "/tmp/ray"
_RAY = ("-c", "from ray.scripts.scripts import main; main()")
_START = ("start", "--disable-usage-stats", "--object-store-memory", str(80 << 20))
_OUTSIDE = "PHASEWISE_TEST_OUTSIDE"
"""The network namespace of who started this process in another one."""
_ENVIRONMENT = {
    "RAY_TMPDIR": _TEMPORARY,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "5d" * 16,
    # A host that is lost is noticed within some seconds.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}


def missing() -> str | None:
    """In one line, why there can be no such hosts here; None: there can."""
    if importlib.util.find_spec("ray") is None:
        return NEEDS_RAY
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip", "mount"))):
        return NEEDS
    probe = ["unshare", "--net", "--mount", "sh", "-c", _PROBE]
    return NEEDS if subprocess.run(probe, capture_output=True, check=False).returncode else None


def is_inside() -> bool:
    """True in a process that `run_inside` started."""
    return os.environ.get(_OUTSIDE, _namespace()) != _namespace()


def run_inside(words: Sequence[str]) -> int:
    """Python with these words in namespaces of its own: its exit code."""
    command = ["unshare", "--net", "--mount", sys.executable, *words]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command, check=False, env=_environment(Path(folder))).returncode


def _environment(folder: Path) -> dict[str, str]:
    """Of such a program, and so of the hosts: Ray reads it when it is imported. folder: for what is kept."""
    paths = [str(ROOT), *(path for path in sys.path if os.path.isabs(path))]
    return {
        _OUTSIDE: _namespace(),
        **os.environ,
        **_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder / "data"),
        "PHASEWISE_CONFIG": "/dev/null",
        "PHASEWISE_LOG_LEVEL": "off",
    }


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class RayHosts:
    """The head, and hosts that are started, lost, cut off and started again. By number, from 0 on."""

    def __init__(self, n_hosts: int) -> None:
        if not is_inside():
            raise RuntimeError("this process must be in namespaces of its own, of which it ends all others")
        self._holders: list[subprocess.Popen[bytes]] = []
        self._cover_temporary()
        ip("link", "set", "lo", "up")
        ip("link", "add", "hosts", "type", "bridge")
        ip("addr", "add", f"{HEAD}/24", "dev", "hosts")
        ip("link", "set", "hosts", "up")
        ip("route", "add", "default", "dev", "hosts")  # Ray asks by which address it would reach the world
        self._head = self._ray(
            [],
            *_START,
            "--head",
            "--include-dashboard=false",
            f"--node-ip-address={HEAD}",
            f"--port={PORT}",
            "--num-cpus=0",
        )
        self._wait_until_it_listens()
        for number in range(n_hosts):
            self._holders.append(self._make(number))
            self.start(number)

    def address(self, number: int) -> str:
        """The host's own."""
        return f"{NETWORK}.{number + 2}"

    def start(self, number: int) -> None:
        """Ray on this host, which joins when it is ready."""
        within = ["nsenter", f"--target={self._holders[number].pid}", "--net", "--mount"]
        own = f"--node-ip-address={self.address(number)}"
        self._ray(within, *_START, f"--address={ADDRESS}", own, f"--num-cpus={CORES}")

    def kill(self, number: int) -> None:
        """Every process of the host, at once."""
        holder = self._holders[number]
        for pid in _in_namespace(holder.pid):
            if pid != holder.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self, number: int) -> None:
        """Nothing reaches the host, and its processes go on."""
        ip("link", "set", _device(number), "down")

    def mend(self, number: int) -> None:
        """Undo `cut`."""
        ip("link", "set", _device(number), "up")

    def wait_for(self, n_hosts: int) -> None:
        """Until Ray counts so many hosts with cores. There must be a connection."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (n_alive := sum(_has_cores(node) for node in the_ray().nodes())) != n_hosts:
            assert time.monotonic() < deadline_s, f"{n_alive} of {n_hosts} hosts have joined"
            time.sleep(0.1)

    def close(self) -> None:
        """End every process of every host and of the head."""
        own = os.getpid()
        for number in range(len(self._holders)):
            self.kill(number)
        for holder in self._holders:
            holder.kill()
            holder.wait()
        for pid in _in_namespace(own):
            if pid != own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _make(self, number: int) -> subprocess.Popen[bytes]:
        """The process that holds the host's namespaces."""
        cover = f"mount -t tmpfs tmpfs {_TEMPORARY} && exec sleep infinity"
        holder = subprocess.Popen(["unshare", "--net", "--mount", "sh", "-c", cover])
        while _namespace(holder.pid) == _namespace() or _TEMPORARY not in _mounts(holder.pid):
            time.sleep(0.01)
        device, inside = _device(number), ["nsenter", f"--target={holder.pid}", "--net", "ip"]
        ip("link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        ip("link", "set", device, "master", "hosts", "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{self.address(number)}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", HEAD),
        ):
            subprocess.run([*inside, *words], check=True)
        return holder

    def _ray(self, within: Sequence[str], *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*within, sys.executable, *_RAY, *words, "--block"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _cover_temporary(self) -> None:
        os.makedirs(_TEMPORARY, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", _TEMPORARY], check=True)

    def _wait_until_it_listens(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HEAD, PORT), 1.0):
                return
            assert self._head.poll() is None, "the head ended"
            assert time.monotonic() < deadline_s, "the head does not listen"
            time.sleep(0.1)


def _namespace(pid: int | str = "self") -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _device(number: int) -> str:
    return f"host{number}"


def _mounts(pid: int) -> list[str]:
    return [line.split()[1] for line in Path(f"/proc/{pid}/mounts").read_text().splitlines()]


def _in_namespace(of_pid: int) -> list[int]:
    """Processes in the network namespace of this one."""
    wanted = _namespace(of_pid)
    pids_there = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(path / "ns/net") == wanted:
                pids_there.append(int(path.name))
    return pids_there


def _has_cores(node: dict[str, object]) -> bool:
    resources = node["Resources"]
    assert isinstance(resources, dict)
    return bool(node["Alive"]) and resources.get("CPU", 0) > 0


@contextlib.contextmanager
def ray_pools(
    hosts: RayHosts, model: Path, roles: Sequence[Role], size: EngineSize, **settings: object
) -> Iterator[PoolServer]:
    """Instances of a core each on the hosts, all ready. settings: of `FrontSettings`."""
    spec = InstanceSpec(str(model), Weights(), size, None, pinned=False, cores=1, node=ray_cluster.NODE_ID)
    with ray_connection(ADDRESS) as address:
        hosts.wait_for(2)
        wanted = [ray_cluster.WantedInstance(role, 1) for role in roles]
        launcher = ray_cluster.RayInstances(MODULE, wanted, spread=True)
        launcher.tell_with([spec.tell] * len(roles))
        chosen = FrontSettings(
            f"tcp://{address}:*",
            lambda index, life: f"tcp://{ray_cluster.NODE}:*",
            Keys.new(),
            kv_transfer="tcp",
            **settings,  # type: ignore[arg-type]
        )
        server = PoolServer(front=None)  # type: ignore[arg-type]
        restarts = partial(Restarts, most=1 << 20, longest_pause_s=0.1)
        server.front = Front(roles, launcher, chosen, server.deliver, restarts=restarts)
        server.front.start()
        try:
            server.wait_until(lambda: server.front.state != "starting", "the instances start")
            assert server.front.lost is None, server.front.lost
            yield server
        finally:
            server.front.stop(PATIENCE_S)
