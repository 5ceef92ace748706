# Rates of several cores at once. Textually included by _native.pyx.

from libcpp cimport bool as cbool


cdef extern from "team/probe.h" nogil:
    ctypedef struct pw_readers:
        pass
    int pw_probe_pace(pw_team *team, long duration_ns, double *operations_per_s)
    pw_readers *pw_readers_open(pw_team *team, int64_t bytes)
    int pw_readers_run(pw_readers *readers, const cbool *active, long duration_ns, double *bytes_per_s)
    void pw_readers_close(pw_readers *readers)


MIB = 1 << 20


def pace_of_members(Team team, double duration_s):
    """Operations per second of each member of a team, while all multiply and add at once."""
    cdef pw_team *members = team._open()
    cdef double rates[8192]
    cdef long duration_ns = <long>(duration_s * 1e9)
    cdef int status, member
    if not 0 < duration_s <= 60:
        raise ValueError(f"a pace is not measured for {duration_s} s")
    with nogil:
        status = pw_probe_pace(members, duration_ns, rates)
    _check_team(status)
    return [rates[member] for member in range(team.size)]


cdef class Readers:
    """A buffer for each member of a team, and how fast some of them read theirs at once.

    size_bytes: of each buffer, whole mebibytes. MemoryError where there is no room for them.
    """

    cdef pw_readers *readers
    cdef Team team

    def __cinit__(self, Team team, int64_t size_bytes):
        cdef pw_team *members = team._open()
        if size_bytes < MIB or size_bytes % MIB:
            raise ValueError(f"a buffer to read is whole mebibytes, not {size_bytes} bytes")
        self.team = team
        with nogil:
            self.readers = pw_readers_open(members, size_bytes)
        if self.readers == NULL:
            raise MemoryError(f"no memory for {team.size} buffers of {size_bytes >> 20} MiB")

    def rates(self, active, double duration_s):
        """Bytes per second of each member; zero for those whose number is not in `active`."""
        cdef double rates[8192]
        cdef cbool chosen[8192]
        cdef long duration_ns = <long>(duration_s * 1e9)
        cdef int status, member
        self.team._open()
        wanted = set(active)
        if not wanted or not wanted <= set(range(self.team.size)) or not 0 < duration_s <= 60:
            raise ValueError(f"readers {sorted(wanted)} of {self.team.size} cannot read for {duration_s} s")
        if self.readers == NULL:
            raise ValueError("these readers have been closed")
        for member in range(self.team.size):
            chosen[member] = member in wanted
        with nogil:
            status = pw_readers_run(self.readers, chosen, duration_ns, rates)
        _check_team(status)
        return [rates[member] for member in range(self.team.size)]

    def close(self):
        """Gives the memory back; closing twice is harmless."""
        pw_readers_close(self.readers)
        self.readers = NULL

    def __dealloc__(self):
        pw_readers_close(self.readers)
