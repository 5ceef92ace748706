# Collectives over messages outside shared memory: a thin door to group/exchange.h. Textually included by _native.pyx.


cdef extern from "group/group.h" nogil:
    uint32_t pw_group_arrivals(const pw_group *group, int rank, int n_ranks)


cdef extern from "group/exchange.h" nogil:
    enum:
        PW_EXCHANGE_LINE, PW_EXCHANGE_UNLIKE

    ctypedef enum pw_addend:
        PW_ADDS_F32

    ctypedef struct pw_exchange:
        pw_group *group
        uint8_t *slots
        int64_t slot_bytes
        int rank, n_ranks
        uint64_t piece

    int64_t pw_exchange_slots_bytes(int n_ranks, int64_t slot_bytes)
    int pw_exchange_all_reduce(pw_exchange *exchange, pw_addend type, int64_t count, void *data, long timeout_ns)
    int pw_exchange_all_gather(pw_exchange *exchange, int64_t bytes, const void *own, void **outs, long timeout_ns)
    int pw_exchange_broadcast(pw_exchange *exchange, int root, int64_t bytes, void *data, long timeout_ns)
    int pw_exchange_barrier(pw_exchange *exchange, long timeout_ns)


ADDENDS = ("float32", "float64", "bfloat16", "int32", "int64")
"""What an Exchange adds up, in the order of pw_addend."""

cdef tuple _ADDEND_BYTES = (4, 8, 2, 4, 8)
EXCHANGE_LINE = PW_EXCHANGE_LINE


def exchange_bytes(int ranks, int64_t slot_bytes):
    """Bytes of shared memory that an Exchange takes: its group, then its slots."""
    if slot_bytes < 2 * PW_EXCHANGE_LINE or slot_bytes % PW_EXCHANGE_LINE:
        raise GroupError(f"a slot is a multiple of {PW_EXCHANGE_LINE} bytes, two or more, not {slot_bytes} bytes")
    return group_bytes(ranks) + pw_exchange_slots_bytes(ranks, slot_bytes)


cdef class Exchange:
    """One rank of a group whose messages lie anywhere. All ranks make the same calls in the same order.

    buffer: as a Group's, exchange_bytes(ranks, slot_bytes) or more. One process calls `initialise` before any other
    rank uses it. One thread of a rank at a time.
    """

    cdef Group group
    cdef pw_exchange exchange

    def __cinit__(self, buffer, int ranks, int rank, int64_t slot_bytes):
        cdef uint8_t[::1] memory = buffer
        cdef int64_t wanted = exchange_bytes(ranks, slot_bytes)
        if memory.shape[0] < wanted:
            raise GroupError(f"an exchange of {ranks} ranks takes {wanted} bytes, not {memory.shape[0]}")
        if not 0 <= rank < ranks:
            raise GroupError(f"no rank {rank} among {ranks}")
        self.group = Group(buffer, ranks)
        self.exchange.group = self.group.group
        self.exchange.slots = &memory[0] + pw_group_bytes(ranks)
        self.exchange.slot_bytes = slot_bytes
        self.exchange.rank = rank
        self.exchange.n_ranks = ranks
        self.exchange.piece = 0

    def initialise(self):
        """Makes the memory an unused group."""
        self.group.initialise()

    def fail(self):
        """Ends every wait of every rank, now and later."""
        self.group.fail()

    def arrivals(self, int rank):
        """How often that rank has come to a barrier of this exchange."""
        self.group._check_rank(rank, self.group.ranks)
        return pw_group_arrivals(self.group.group, rank, self.group.ranks)

    cdef int _check(self, int status, str act, timeout_s) except -1:
        if status == PW_EXCHANGE_UNLIKE:
            raise GroupError(f"{act}: the ranks do not call the same collective, with as many bytes of one type")
        return _check_group(status, f"{act} of rank {self.exchange.rank}", timeout_s)

    def all_reduce(self, uint8_t[::1] data, str addend, timeout_s=None):
        """Adds up `data` of all ranks, in their order; all of them hold the sum. addend: one of ADDENDS."""
        if addend not in ADDENDS:
            raise ValueError(f"{addend} is not added up: {', '.join(ADDENDS)} are")
        cdef int number = ADDENDS.index(addend), size = _ADDEND_BYTES[number], status
        if data.shape[0] % size:
            raise ValueError(f"{data.shape[0]} bytes are no whole number of {addend}")
        cdef int64_t count = data.shape[0] // size
        cdef void *target = &data[0] if count else NULL
        cdef long timeout_ns = _nanoseconds(timeout_s)
        self.group._check_rank(self.exchange.rank, self.group.ranks)
        with nogil:
            status = pw_exchange_all_reduce(&self.exchange, <pw_addend>number, count, target, timeout_ns)
        self._check(status, "all_reduce", timeout_s)

    def all_gather(self, const uint8_t[::1] own, outs, timeout_s=None):
        """outs[rank] becomes what that rank passes as `own`: all of one length, none overlapping."""
        cdef list targets = list(outs)
        cdef void *pointers[PW_GROUP_MAX_RANKS]
        cdef uint8_t[::1] out
        cdef int64_t count = own.shape[0]
        cdef const void *source = &own[0] if count else NULL
        cdef long timeout_ns = _nanoseconds(timeout_s)
        cdef int status
        if len(targets) != self.group.ranks:
            raise ValueError(f"{self.group.ranks} ranks fill {self.group.ranks} outputs, not {len(targets)}")
        for i, out in enumerate(targets):
            if out.shape[0] != count:
                raise ValueError(f"an output of {out.shape[0]} bytes for an input of {count}")
            pointers[i] = &out[0] if count else NULL
        self.group._check_rank(self.exchange.rank, self.group.ranks)
        with nogil:
            status = pw_exchange_all_gather(&self.exchange, count, source, pointers, timeout_ns)
        self._check(status, "all_gather", timeout_s)

    def broadcast(self, uint8_t[::1] data, int root, timeout_s=None):
        """`data` becomes that of rank `root`."""
        cdef int64_t count = data.shape[0]
        cdef void *target = &data[0] if count else NULL
        cdef long timeout_ns = _nanoseconds(timeout_s)
        cdef int status
        self.group._check_rank(root, self.group.ranks)
        with nogil:
            status = pw_exchange_broadcast(&self.exchange, root, count, target, timeout_ns)
        self._check(status, "broadcast", timeout_s)

    def barrier(self, timeout_s=None):
        """Returns when all ranks have called it."""
        cdef long timeout_ns = _nanoseconds(timeout_s)
        cdef int status
        self.group._check_rank(self.exchange.rank, self.group.ranks)
        with nogil:
            status = pw_exchange_barrier(&self.exchange, timeout_ns)
        self._check(status, "barrier", timeout_s)
