# Process groups in shared memory. Textually included by _native.pyx.

from phasewise.cython_kernels.errors import GroupError


cdef extern from "group/group.h" nogil:
    ctypedef struct pw_group:
        pass

    enum:
        PW_GROUP_FAILED, PW_GROUP_LATE, PW_GROUP_MAX_RANKS, PW_GROUP_ALIGNMENT

    int64_t pw_group_bytes(int ranks)
    void pw_group_init(pw_group *group, int ranks)
    int pw_group_ranks(const pw_group *group)
    int pw_group_barrier(pw_group *group, int rank, int n_ranks, long timeout_ns)
    void pw_group_ring(pw_group *group, int rank)
    uint32_t pw_group_bell(const pw_group *group, int rank)
    int pw_group_wait_bell(pw_group *group, int rank, uint32_t seen, long spin_ns, long timeout_ns, uint32_t *now)
    void pw_group_fail(pw_group *group)
    int pw_group_failed(const pw_group *group)


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
