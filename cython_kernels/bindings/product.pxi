# A product timed on a thread team. Textually included by _native.pyx.


cdef extern from "team/team_product.h" nogil:
    ctypedef struct pw_team_product:
        const pw_weight *weights
        int64_t rows, ldy
        float *y

    pw_team_product *pw_team_product_open(pw_team *team, int32_t n_weights, const pw_weight *weights, int64_t rows)
    void pw_team_product_close(pw_team_product *product)
    int pw_team_product_fill(pw_team_product *product, uint64_t seed)
    int pw_team_product_time(pw_team_product *product, const pw_schedule *schedule, int calls, bint prepare,
                             int64_t *ns)


cdef extern from "team/product.h" nogil:
    pw_range pw_weighed_part(int64_t count, int64_t unit, const int64_t *ends, int64_t parts, int64_t i)


def weighed_part(int64_t count, int64_t unit, weights, int64_t i):
    """(first, last + 1) of part i of some rows or panels, by weights of all parts; cut at multiples of `unit`."""
    sums = np.concatenate([[0], np.cumsum(np.asarray(weights, np.int64))])
    cdef const int64_t[::1] ends = sums
    cdef pw_range part
    if count < 0 or unit < 1 or not 0 <= i < len(weights) or min(weights) < 1:
        raise ValueError(f"no part {i} of {count} by weights {weights}")
    part = pw_weighed_part(count, unit, &ends[0], len(weights), i)
    return part.begin, part.end


cdef class TeamProduct:
    """y = x W^T with m rows of random x on a team, exactly as a program computes it, on the ISA active at the start.

    packs: PackedWeights of one kind and shape, taken in turn: one is measured warm, more than the last cache holds
    are measured cold. path and k_parts are their arithmetic. The team must outlive the product.
    """

    cdef pw_team_product *product
    cdef Team team
    cdef tuple packs
    cdef readonly int64_t m, n

    def __cinit__(self, Team team, packs, int64_t m, path=None, int32_t k_parts=1):
        cdef pw_weight *weights
        cdef int32_t i
        cdef int status
        self.team, self.packs, self.m = team, tuple(packs), m
        if m < 1 or not self.packs or len({(p.kind, p.n, p.k, p.group, p.zero_point) for p in self.packs}) != 1:
            raise ValueError("a product takes rows, and weights of one kind and shape")
        self.n = self.packs[0].n
        weights = <pw_weight *>PyMem_Malloc(sizeof(pw_weight) * len(self.packs))
        if weights == NULL:
            raise MemoryError
        try:
            for i in range(len(self.packs)):
                weights[i] = weight_view(self.packs[i], path, k_parts)
            self.product = pw_team_product_open(team._open(), len(self.packs), weights, m)
        finally:
            PyMem_Free(weights)
        if self.product == NULL:
            raise MemoryError(f"no memory for {m} rows of a product")
        with nogil:
            status = pw_team_product_fill(self.product, 1)
        _check_team(status)

    def __dealloc__(self):
        pw_team_product_close(self.product)

    def time(self, schedule, int calls, bint prepare=False):
        """Nanoseconds of each of `calls` products, int64 [calls]; a call ends when every thread has arrived.

        schedule: a mapping such as default_schedule gives, or None for that one. prepare: each call begins with
        bringing x into the form that the kernel reads, which is else done once.
        """
        cdef pw_schedule s
        cdef int status
        cdef int64_t[::1] ns
        if calls < 1:
            raise ValueError(f"{calls} calls cannot be timed")
        if schedule is None:
            s = pw_default_schedule(self.product.weights, self.m, self.team.size)
        else:
            s = schedule_of(schedule)
        taken = np.zeros(calls, np.int64)
        ns = taken
        self.team._open()
        with nogil:
            status = pw_team_product_time(self.product, &s, calls, prepare, &ns[0])
        _check_team(status)
        return taken

    def result(self):
        """y of the last call, float32 [m, n]."""
        cdef float[:, ::1] y = <float[:self.m, :self.product.ldy]>self.product.y
        return np.asarray(y)[:, : self.n].copy()
