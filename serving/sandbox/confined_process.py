"""The process behind `confined.ConfinedProcess`: `python -m phasewise.serving.sandbox.confined_process`.

Three processes take part: the server; this one, which has everything loaded and waits; and a fork of it, the
child, which does the jobs under the kernel's limits. A fork takes milliseconds, so that a child that died or
grew is replaced at once. Both end with the process that started them. Few modules are imported here.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from phasewise._words import number
from phasewise.serving.errors import shortage_of
from phasewise.serving.processes.behind_others import end_with_parent, without_stderr
from phasewise.serving.sandbox.confined import Bounds, JobRefused, read_frame, write_frame

Job = Callable[[bytes], bytes]

_JOBS = {
    "grammar": "phasewise.serving.grammar.grammar_job",
    "template": "phasewise.serving.text.chat_template",
    "tokenizer": "phasewise.serving.text.confined_tokenizer",
}
"""Modules with a function `prepare(told)`, which loads what jobs need, or raises JobRefused."""
_ANSWERED, _REFUSED, _OVERRUN, _UNSERVED = b"a", b"r", b"o", b"u"
_HAS_GROWN, _GOES_ON = b"+", b"="
_FOR_THE_SERVER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NICE = 5
"""Niceness of jobs: answers in progress come before requests that may turn out to be bombs."""
_STACK_BYTES = 64 << 20
_MOST_GROWTH_BYTES = 16 << 20
"""Memory growth after which a child is replaced."""
_PREPARING_BYTES = 2 << 30
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    for signal_number in _FOR_THE_SERVER:  # sent to all of a service; this one ends when the server does
        signal.signal(signal_number, signal.SIG_IGN)
    commands, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # whatever is printed is no answer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends a process that has had its time
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    try:
        settings = json.loads(read_frame(commands))
        name, bounds, told = settings.pop("job"), Bounds(**settings), read_frame(commands)
        _confine(_PREPARING_BYTES, bounds.start_s)
        try:
            with without_stderr():  # messages of a library's panics are about its input, not about us
                job = import_module(_JOBS[name]).prepare(told)
        except JobRefused as error:
            write_frame(answers, _REFUSED + str(error).encode())
            return 1
        except (MemoryError, RecursionError):
            write_frame(answers, _REFUSED + b"it needs too much memory")
            return 1
        _release()
        write_frame(answers, _ANSWERED)
        _Keeper(job, bounds, commands, answers).serve()
    except (EOFError, BrokenPipeError):
        pass  # the server has ended
    except Exception as error:
        if shortage_of(error) is None:
            raise
        return 1  # the server says what it has to do without
    return 0


class _Keeper:
    """Passes jobs to a child process, and kills a child whose answer is no longer awaited."""

    def __init__(self, job: Job, bounds: Bounds, commands: int, answers: int) -> None:
        self._job = job
        self._bounds = bounds
        self._commands = commands
        self._answers = answers
        self._child = self._forked()

    def serve(self) -> None:
        """Serve jobs until the server ends (EOFError)."""
        while True:
            request = read_frame(self._commands)
            if not request:  # the wait for a job that had just ended
                continue
            write_frame(self._answers, self._done(request))
            del request  # megabytes, perhaps, until the next
            if self._child.has_ended:
                self._child = self._forked()

    def _done(self, request: bytes) -> bytes:
        try:
            return self._child.do(request, self._bounds, self._commands)
        except EOFError:
            self._child.kill()
            raise
        except BrokenPipeError:  # it died while it waited, as of a machine without memory
            self._child.kill()
            self._child = self._forked()
            return self._child.do(request, self._bounds, self._commands)

    def _forked(self) -> _Child:
        requests, for_child = os.pipe()
        from_child, answers = os.pipe()
        pid = os.fork()
        if pid:
            os.close(requests)
            os.close(answers)
            return _Child(pid, for_child, from_child)
        try:
            for descriptor in (for_child, from_child, self._commands, self._answers):
                os.close(descriptor)
            _work(self._job, self._bounds, requests, answers)
        except BaseException:
            os._exit(70)
        os._exit(0)


class _Child:
    """A fork that does jobs, seen from its parent."""

    def __init__(self, pid: int, requests: int, answers: int) -> None:
        self._pid = pid
        self._requests = requests
        self._answers = answers
        self.has_ended = False

    def do(self, request: bytes, bounds: Bounds, commands: int) -> bytes:
        """The child's verdict on one job; a child that gives none within its limits is killed. EOFError: the
        server ended."""
        write_frame(self._requests, request)
        waiting = select.poll()
        for descriptor in (self._answers, commands):
            waiting.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in waiting.poll(1000 * bounds.wall_s)]
        if commands in ready:
            read_frame(commands)  # that the caller has left; EOFError where the server has ended
            self.kill()
            return _OVERRUN + b"the caller has left"
        if self._answers not in ready:
            self.kill()
            return _UNSERVED + f"the machine did not get to it within {number(bounds.wall_s)} s".encode()
        try:
            answer = read_frame(self._answers)
        except EOFError:
            if self.kill() == signal.SIGPROF:
                return _OVERRUN + f"it takes more than {number(bounds.seconds)} s of processor time".encode()
            return _OVERRUN + b"it needs too much memory"
        if answer[:1] == _HAS_GROWN:
            self.kill()
        return answer[1:]

    def kill(self) -> int:
        """Kill the child, and return the signal that ended it; 0: none, or it was reaped before."""
        if self.has_ended:
            return 0
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self.has_ended = True
        os.close(self._requests)
        os.close(self._answers)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _work(job: Job, bounds: Bounds, requests: int, answers: int) -> None:
    """Serve jobs in the child until the parent closes the pipe or a limit ends the child."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # last words of libraries are about input, not about us
    end_with_parent()
    os.nice(_NICE)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    _limit(resource.RLIMIT_CORE, 0)
    begun_bytes = _resident_bytes()
    while True:
        try:
            request = read_frame(requests)
        except EOFError:
            return
        _confine(bounds.memory_bytes, bounds.seconds)
        try:
            verdict = _ANSWERED + job(request)
        except JobRefused as error:
            verdict = _REFUSED + str(error).encode("utf-8", "replace")
        except (MemoryError, RecursionError):
            verdict = _OVERRUN + b"it needs too much memory"
        _release()
        has_grown = _resident_bytes() > begun_bytes + _MOST_GROWTH_BYTES
        write_frame(answers, (_HAS_GROWN if has_grown else _GOES_ON) + verdict)
        del request, verdict


def _confine(n_bytes: int, seconds: float) -> None:
    """Limit this process to `n_bytes` more of address space, its stack included, and `seconds` of CPU
    time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    with open("/proc/self/statm") as sizes:
        mapped_bytes = int(sizes.read().split()[0]) * _PAGE_BYTES
    _limit(resource.RLIMIT_AS, mapped_bytes + n_bytes)
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)


def _release() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    _limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)


def _limit(kind: int, soft: int) -> None:
    """Set a soft limit, as far as the process's hard limit allows."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(kind, (soft, hard))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * _PAGE_BYTES


if __name__ == "__main__":
    sys.exit(main())
