"""CPU seconds and memory out of /proc, for a process with all that it started and for the whole machine."""

import os
import platform
import re
import subprocess
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """The process and its living descendants."""
    parents = {int(p.name): int(_stat(int(p.name))[1]) for p in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of the process, its living descendants, and those of their children that have ended."""
    return sum(sum(map(int, _stat(member)[11:15])) for member in tree(pid)) / _TICK


def busy_seconds() -> float:
    """What all processors have done so far, less what was done at low priority: a neighbour's business."""
    user, _nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + system + irq + softirq + steal) / _TICK


def peak_mb(pid: int) -> float:
    """The most memory that the processes of the tree have had resident, each at its own time, in MB (10^6 bytes)."""
    return sum(_status(member, "VmHWM") for member in tree(pid))


def resident_mb(pid: int) -> float:
    """Resident now, in MB."""
    return sum(_status(member, "VmRSS") for member in tree(pid))


def own_mb(pid: int) -> float:
    """Memory that no other process has a part in (private pages), in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(n) for n in re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB", text, re.MULTILINE)) * 1.024e-3


def describe() -> dict[str, str]:
    """What the figures were measured on."""
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())
    system = re.search(r'^PRETTY_NAME="(.*)"', Path("/etc/os-release").read_text(), re.MULTILINE)
    return {
        "processor": f"{os.cpu_count()} cores, {cpu[1] if cpu else 'unknown'}",
        "memory": f"{int(memory[1]) / 1024**2:.0f} GiB" if memory else "unknown",
        "system": f"{system[1] if system else 'unknown'}, Linux {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def load() -> float:
    """How many others wanted a processor during the last minute."""
    return os.getloadavg()[0]


def commit() -> str:
    """The revision that is measured, marked when the working tree differs from it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _stat(pid: int) -> list[str]:
    """The fields of proc_pid_stat(5) from the state on; zeros for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["0"] * 50


def _status(pid: int, field: str) -> float:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return int(found[1]) * 1.024e-3 if found else 0.0
