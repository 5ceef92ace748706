"""Inspection of a library before it is loaded: what it could keep, call or change that a kernel has no need
of. A kernel is arithmetic on its arguments. Its library has no memory that stays writable, nothing that runs
when it is loaded, no import but pure functions, and no instruction that asks for the time, calls the system
or sets a mode. This reads compiled C; it is no defence against machine code that was written to deceive
it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phasewise.ir.errors import ToolError
from phasewise.ir.operations import LIBRARY, LIBRARY_F64
from phasewise.ir.running.limited import ChildLimits, run

PURE = frozenset((*LIBRARY, *LIBRARY_F64.values(), "memcpy", "memset", "memmove"))
LIBRARIES = frozenset(("libm.so.6", "libc.so.6"))
PAGE_BYTES = 4096

LIMITS = ChildLimits(seconds=60, memory_bytes=2 << 30, file_bytes=256 << 20)

_LOAD, _DYNAMIC, _TLS = 1, 2, 7
_STACK, _RELRO = 0x6474E551, 0x6474E552
_EXECUTABLE, _WRITABLE = 1, 2
_AT_LOAD = {12: "INIT", 13: "FINI", 25: "INIT_ARRAY", 26: "FINI_ARRAY", 32: "PREINIT_ARRAY", 22: "TEXTREL"}
_SEARCHES = {15: "RPATH", 29: "RUNPATH", 0x7FFFFFFD: "AUXILIARY", 0x7FFFFFFF: "FILTER"}
_RELOCATIONS = {62: (1, 6, 7, 8), 183: (257, 1025, 1026, 1027)}
"""Relocations that are allowed, by machine: addresses of its own and of imports; no IRELATIVE, whose function
runs when it is loaded."""

_FORBIDDEN = re.compile(
    r"(?:rep\w*\s+)?(?:syscall|sysenter|sysret|int|int1|int3|into|iret\w*|hlt|in[bwl]?|out[bwl]?|ins[bwl]|outs[bwl]"
    r"|rdtscp?|rdpmc|rdpid|rdrand|rdseed|cpuid|x?getbv|xsetbv|v?ldmxcsr|fldcw|fldenv|frstor|fn?init|fxrstor\w*"
    r"|xrstor\w*|xsave\w*|fxsave\w*|std|pushf\w*|popf\w*|sti|cli|clflush\w*|clwb|monitor\w*|u?mwait\w*|umonitor|tpause"
    r"|(?:rd|wr)[fg]sbase|rdpkru|wrpkru|xbegin|xend|enclu|vmcall|vmfunc|svc|hvc|smc|brk|mrs|msr|sys|dc|ic)\b"
)
_SEGMENT = re.compile(r"%[fg]s:")
_INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\t(.+)$")
_FUNCTION = re.compile(r"^[0-9a-f]+ <([^>]+)>:$")


@dataclass(frozen=True)
class _Segment:
    kind: int
    flags: int
    offset: int
    address: int
    file_bytes: int
    memory_bytes: int

    @property
    def end(self) -> int:
        return self.address + self.memory_bytes


def problem_of(library: Path) -> str | None:
    """The reason to refuse a library; None where there is none. ToolError where there is no `objdump`."""
    try:
        problem = _structure_problem(library.read_bytes())
    except (struct.error, IndexError, ValueError, UnicodeDecodeError):
        return "it is no library that a compiler makes"
    return problem or next(iter(instruction_problems(library).values()), None)


def _structure_problem(data: bytes) -> str | None:
    if data[:6] != b"\x7fELF\x02\x01":
        return "it is no library of 64 bits and little-endian bytes"
    (machine,) = struct.unpack_from("<H", data, 18)
    segments = list(_segments(data))
    if any(segment.kind == _TLS for segment in segments):
        return "it keeps memory of each thread from call to call"
    if any(segment.kind == _STACK and segment.flags & _EXECUTABLE for segment in segments):
        return "its stack could be executed"
    sealed = [segment for segment in segments if segment.kind == _RELRO]
    for segment in segments:
        if segment.kind != _LOAD or not segment.flags & _WRITABLE:
            continue
        if segment.flags & _EXECUTABLE:
            return "it has code that can be written"
        if not any(own.address <= segment.address and segment.end <= _whole_pages(own.end) for own in sealed):
            return "it keeps memory from call to call"
    return _dynamic_problem(data, segments, machine)


def _whole_pages(end: int) -> int:
    """The end of the whole pages up to `end`: the loader takes away the right to write by whole pages."""
    return end // PAGE_BYTES * PAGE_BYTES


def _segments(data: bytes) -> Iterator[_Segment]:
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for i in range(count):
        kind, flags, offset, address, _, file_bytes, memory_bytes, _ = struct.unpack_from(
            "<IIQQQQQQ", data, table + i * size
        )
        yield _Segment(kind, flags, offset, address, file_bytes, memory_bytes)


def _dynamic_problem(data: bytes, segments: list[_Segment], machine: int) -> str | None:
    dynamic = next((segment for segment in segments if segment.kind == _DYNAMIC), None)
    if dynamic is None:
        return "it is no shared library"
    entries = [struct.unpack_from("<QQ", data, dynamic.offset + i) for i in range(0, dynamic.file_bytes, 16)]
    last = next(i for i, (tag, _) in enumerate(entries) if tag == 0)
    entries = entries[:last]
    by_tag = dict(entries)
    for tag, name in (*_AT_LOAD.items(), *_SEARCHES.items()):
        if tag in by_tag:
            return f"it asks the loader for more than a kernel needs ({name})"

    def at(address: int) -> int:
        own = next(
            segment
            for segment in segments
            if segment.kind == _LOAD and segment.address <= address < segment.address + segment.file_bytes
        )
        return address - own.address + own.offset

    def text(offset: int) -> str:
        begin = at(by_tag[5]) + offset
        return data[begin : data.index(b"\0", begin)].decode()

    needed = {text(value) for tag, value in entries if tag == 1}
    if needed - LIBRARIES:
        return f"it needs the library {min(needed - LIBRARIES)}"
    for table, size in ((7, 8), (23, 2)):
        if table not in by_tag:
            continue
        begin = at(by_tag[table])
        for place in range(begin, begin + by_tag[size], 24):
            _, info = struct.unpack_from("<QQ", data, place)
            kind, symbol = info & 0xFFFFFFFF, info >> 32
            if kind not in _RELOCATIONS.get(machine, ()):
                return f"its loading needs a relocation of kind {kind}"
            name_at, _, _, section = struct.unpack_from("<IBBH", data, at(by_tag[6]) + 24 * symbol)
            name = text(name_at)
            if symbol and section == 0 and name not in PURE:
                return f"it calls `{name}`"
    return None


def instruction_problems(library: Path) -> dict[str, str]:
    """The instructions that no kernel needs, by the function that has them."""
    done = run(["objdump", "-d", "--no-show-raw-insn", str(library)], LIMITS)
    if done.code != 0:
        raise ToolError(f"objdump does not read {library.name}: {done.errors.splitlines()[:1]}")
    problems: dict[str, str] = {}
    function = ""
    for line in done.output.splitlines():
        if match := _FUNCTION.match(line):
            function = match[1]
        elif match := _INSTRUCTION.match(line):
            words = match[1].split("#")[0].strip()
            if _FORBIDDEN.match(words) or _SEGMENT.search(words):
                problems.setdefault(function, f"it has the instruction `{' '.join(words.split())}`")
    return problems
