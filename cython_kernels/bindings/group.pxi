# Process groups in shared memory. Textually included by _native.pyx.

from libc.stdint cimport int64_t, uint32_t, uintptr_t
from libc.string cimport memcpy

from phasewise.cython_kernels.errors import GroupError


cdef extern from "group/group.h" nogil:
    ctypedef struct pw_group:
        pass

    enum:
        PW_GROUP_OK
        PW_GROUP_FAILED
        PW_GROUP_LATE
        PW_GROUP_MAX_RANKS
        PW_GROUP_ALIGNMENT

    int64_t pw_group_bytes(int ranks)
    void pw_group_init(pw_group *group, int ranks)
    int pw_group_ranks(const pw_group *group)
    int pw_group_barrier(pw_group *group, int rank, int n_ranks, long timeout_ns)
    void pw_group_ring(pw_group *group, int rank)
    uint32_t pw_group_bell(const pw_group *group, int rank)
    int pw_group_wait_bell(pw_group *group, int rank, uint32_t seen, long spin_ns, long timeout_ns, uint32_t *now)
    void pw_group_fail(pw_group *group)
    int pw_group_failed(const pw_group *group)

    ctypedef enum pw_all_reduce_kind:
        PW_RANK_SHIFTED
        PW_MASTER_COPIES
        PW_RING

    int pw_all_reduce(pw_group *group, int rank, int n_ranks, float *const *buffers, int64_t floats,
                      pw_all_reduce_kind kind, long timeout_ns)


ALL_REDUCE_KINDS = ("rank-shifted", "master-copies", "ring")
cdef tuple _KIND_NUMBERS = (PW_RANK_SHIFTED, PW_MASTER_COPIES, PW_RING)


cdef double MOST_SECONDS = 1e9  # as nanoseconds, still a long


cdef long _nanoseconds(timeout_s) except? -2:
    """None: for ever."""
    if timeout_s is None:
        return -1
    if not 0 <= timeout_s <= MOST_SECONDS:
        raise ValueError(f"a wait lasts 0 to {MOST_SECONDS:g} seconds, or None, not {timeout_s}")
    return <long>(timeout_s * 1e9)


cdef int _check_group(int status, str act, timeout_s) except -1:
    if status == PW_GROUP_FAILED:
        raise GroupError(f"{act}: the group has failed, because a rank ended or was late")
    if status == PW_GROUP_LATE:
        raise GroupError(f"{act}: not all ranks came within {timeout_s:g} s")
    return 0


def group_bytes(int ranks):
    """Bytes of shared memory that a group of `ranks` ranks takes, a multiple of its alignment."""
    if not 1 <= ranks <= PW_GROUP_MAX_RANKS:
        raise GroupError(f"a group has 1 to {PW_GROUP_MAX_RANKS} ranks, not {ranks}")
    return pw_group_bytes(ranks)


GROUP_ALIGNMENT = PW_GROUP_ALIGNMENT


# ---- adding up ----------------------------------------------------------------------------------------------------

cdef pw_all_reduce_kind _kind_number(str kind) except *:
    if kind not in ALL_REDUCE_KINDS:
        raise ValueError(f"no all-reduce is called {kind!r}: there are {', '.join(ALL_REDUCE_KINDS)}")
    return <pw_all_reduce_kind><int>_KIND_NUMBERS[ALL_REDUCE_KINDS.index(kind)]


cdef class _Rows:
    """The addresses of arrays of one length, float32, writable; and the arrays, as long as they are needed."""

    cdef float *pointers[PW_GROUP_MAX_RANKS]
    cdef list arrays
    cdef int count
    cdef int64_t floats

    def __cinit__(self, rows):
        cdef float[::1] row
        self.arrays = list(rows)
        if not 1 <= len(self.arrays) <= PW_GROUP_MAX_RANKS:
            raise ValueError(f"1 to {PW_GROUP_MAX_RANKS} arrays are added up, not {len(self.arrays)}")
        self.count = len(self.arrays)
        for i, row in enumerate(self.arrays):
            if i == 0:
                self.floats = row.shape[0]
            elif row.shape[0] != self.floats:
                raise ValueError(f"arrays of {self.floats} and of {row.shape[0]} floats cannot be added up")
            self.pointers[i] = &row[0] if self.floats else NULL


cdef int _check_message(const float[::1] message, _Rows rows) except -1:
    if rows.floats == 0 or message.shape[0] != rows.floats:
        raise ValueError(f"a message of {message.shape[0]} floats for buffers of {rows.floats}")
    return 0


# ---- the group -----------------------------------------------------------------------------------------------------

cdef class Group:
    """Ranks that wait for one another in shared memory: a thin door to group.h.

    buffer: writable, group_bytes(ranks) or more, aligned to GROUP_ALIGNMENT; each process maps it where it likes.
    One process calls `initialise` before any other rank uses the group.
    """

    cdef uint8_t[::1] memory
    cdef pw_group *group
    cdef readonly int ranks

    def __cinit__(self, buffer, int ranks):
        cdef int64_t wanted = group_bytes(ranks)
        self.memory = buffer
        if self.memory.shape[0] < wanted:
            raise GroupError(f"a group of {ranks} ranks takes {wanted} bytes, not {self.memory.shape[0]}")
        if <uintptr_t>&self.memory[0] % PW_GROUP_ALIGNMENT:
            raise GroupError(f"a group begins at a multiple of {PW_GROUP_ALIGNMENT} bytes in memory")
        self.group = <pw_group *>&self.memory[0]
        self.ranks = ranks

    cdef int _write_and_meet(self, int rank, _Rows rows, const float *message, long timeout_ns) noexcept nogil:
        """The rank writes its message anew, and all ranks meet."""
        memcpy(rows.pointers[rank], message, sizeof(float) * rows.floats)
        return pw_group_barrier(self.group, rank, rows.count, timeout_ns)

    cdef int _check_rank(self, int rank, int ranks) except -1:
        if pw_group_ranks(self.group) != self.ranks:
            raise GroupError(f"this memory holds no group of {self.ranks} ranks: initialise it first")
        if not 0 <= rank < ranks <= self.ranks:
            raise GroupError(f"no rank {rank} among {ranks} of a group of {self.ranks} ranks")
        return 0

    @property
    def address(self):
        """Where this process maps the group: for programs that take part in it."""
        return <uintptr_t>self.group

    def initialise(self):
        """Makes the memory an unused group."""
        pw_group_init(self.group, self.ranks)

    def barrier(self, int rank, ranks=None, timeout_s=None):
        """Returns when ranks 0..ranks - 1 (all, unless told) have called it; GroupError when they do not."""
        cdef int n = self.ranks if ranks is None else ranks
        cdef long timeout_ns = _nanoseconds(timeout_s)
        cdef int status
        self._check_rank(rank, n)
        with nogil:
            status = pw_group_barrier(self.group, rank, n, timeout_ns)
        _check_group(status, f"barrier of rank {rank}", timeout_s)

    def ring(self, int rank):
        self._check_rank(rank, self.ranks)
        pw_group_ring(self.group, rank)

    def bell(self, int rank):
        """How often that rank's bell was rung."""
        self._check_rank(rank, self.ranks)
        return pw_group_bell(self.group, rank)

    def wait_bell(self, int rank, uint32_t seen, timeout_s=None, spin_s=0.0):
        """How often the bell was rung, once that is more than `seen`; None when the time is over."""
        cdef long timeout_ns = _nanoseconds(timeout_s), spin_ns = _nanoseconds(spin_s)
        cdef uint32_t now = 0
        cdef int status
        self._check_rank(rank, self.ranks)
        with nogil:
            status = pw_group_wait_bell(self.group, rank, seen, spin_ns, timeout_ns, &now)
        if status == PW_GROUP_LATE:
            return None
        _check_group(status, f"bell of rank {rank}", timeout_s)
        return now

    def fail(self):
        """Ends every wait of every rank, now and later."""
        self._check_rank(0, self.ranks)
        pw_group_fail(self.group)

    @property
    def failed(self):
        return bool(pw_group_failed(self.group))

    def all_reduce(self, int rank, buffers, str kind="rank-shifted", timeout_s=None):
        """Adds up the buffers, one for each of the ranks 0..len(buffers) - 1: afterwards all of them hold the sum.

        buffers: float32, all in memory that all these ranks share, each in its own process's mapping.
        """
        cdef _Rows rows = _Rows(buffers)
        cdef pw_all_reduce_kind number = _kind_number(kind)
        cdef long timeout_ns = _nanoseconds(timeout_s)
        cdef int n = rows.count, status
        self._check_rank(rank, n)
        with nogil:
            status = pw_all_reduce(self.group, rank, n, rows.pointers, rows.floats, number, timeout_ns)
        _check_group(status, f"{kind} all-reduce of rank {rank}", timeout_s)

    def time_all_reduces(self, int rank, buffers, const float[::1] message, str kind, int64_t[::1] ns,
                         double timeout_s):
        """Nanoseconds of this rank's all-reduces, one for each element of `ns`.

        Before each, outside what is timed, the rank writes its message anew, and all ranks meet.
        """
        cdef _Rows rows = _Rows(buffers)
        cdef pw_all_reduce_kind number = _kind_number(kind)
        cdef long timeout_ns = _nanoseconds(timeout_s)
        cdef int n = rows.count, status = PW_GROUP_OK
        cdef int64_t i, began
        self._check_rank(rank, n)
        _check_message(message, rows)
        with nogil:
            for i in range(ns.shape[0]):
                status = self._write_and_meet(rank, rows, &message[0], timeout_ns)
                if status != PW_GROUP_OK:
                    break
                began = pw_now_ns()
                status = pw_all_reduce(self.group, rank, n, rows.pointers, rows.floats, number, timeout_ns)
                if status != PW_GROUP_OK:
                    break
                ns[i] = pw_now_ns() - began
        _check_group(status, f"{kind} all-reduce of rank {rank}", timeout_s)

    def time_copies(self, int rank, buffers, const float[::1] message, float[::1] target, int64_t[::1] ns,
                    double timeout_s):
        """The same for the plain copy of this rank's buffer to `target`, by all ranks at the same time."""
        cdef _Rows rows = _Rows(buffers)
        cdef long timeout_ns = _nanoseconds(timeout_s)
        cdef int n = rows.count, status = PW_GROUP_OK
        cdef int64_t i, began
        self._check_rank(rank, n)
        _check_message(message, rows)
        _check_message(target, rows)
        with nogil:
            for i in range(ns.shape[0]):
                status = self._write_and_meet(rank, rows, &message[0], timeout_ns)
                if status != PW_GROUP_OK:
                    break
                began = pw_now_ns()
                memcpy(&target[0], rows.pointers[rank], sizeof(float) * rows.floats)
                ns[i] = pw_now_ns() - began
        _check_group(status, f"copy of rank {rank}", timeout_s)
