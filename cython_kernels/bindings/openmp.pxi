# Products on the threads of an OpenMP library. Textually included by _native.pyx.


cdef extern from "team/openmp_product.h" nogil:
    ctypedef struct pw_openmp:
        void (*parallel)(void (*task)(void *context) noexcept nogil, void *context, unsigned threads,
                         unsigned flags) noexcept nogil
        int (*member)() noexcept nogil

    ctypedef enum pw_number:
        PW_FLOAT32, PW_BFLOAT16

    ctypedef struct pw_openmp_call:
        const pw_weight *weight
        const pw_schedule *schedule
        int64_t rows
        pw_number number
        const void *x
        const void *bias
        void *y

    ctypedef struct pw_openmp_team:
        pass

    pw_openmp_team *pw_openmp_open(pw_openmp library, int threads)
    void pw_openmp_close(pw_openmp_team *team)
    void pw_openmp_observe(pw_openmp_team *team, int *cpus)
    bint pw_openmp_multiply(pw_openmp_team *team, const pw_openmp_call *call)


cdef enum:
    MOST_OPENMP_THREADS = 4096


cdef class OpenMPTeam:
    """`threads` threads of the OpenMP library whose functions lie at these addresses.

    parallel: its GOMP_parallel, member: its omp_get_thread_num. The team is that of whichever thread calls.
    """

    cdef pw_openmp_team *team
    cdef readonly int threads

    def __cinit__(self, int threads, size_t parallel, size_t member):
        cdef pw_openmp library
        if not 1 <= threads <= MOST_OPENMP_THREADS or not parallel or not member:
            raise TeamError(f"{threads} threads of an OpenMP library at {parallel:#x} and {member:#x}")
        (<size_t *>&library.parallel)[0], (<size_t *>&library.member)[0] = parallel, member
        self.threads = threads
        self.team = pw_openmp_open(library, threads)
        if self.team == NULL:
            raise MemoryError

    def __dealloc__(self):
        pw_openmp_close(self.team)

    def observed_cpus(self):
        """The CPU that each thread runs on now; -1 for one that the library did not send."""
        cdef int32_t[::1] cpus
        found = np.empty(self.threads, np.int32)
        cpus = found
        with nogil:
            pw_openmp_observe(self.team, <int *>&cpus[0])
        return found.tolist()


cdef class OpenMPProduct:
    """y = x W^T + bias by a packed weight on an OpenMPTeam, by schedules as a program has them; on the ISA in use.

    path and k_parts are the weight's arithmetic. schedules: pairs of a last number of rows and a schedule (None: the
    default one), in the order of their rows; beyond them the default runs.
    """

    cdef OpenMPTeam team
    cdef object packed
    cdef pw_weight weight
    cdef pw_schedules schedules

    def __cinit__(self, OpenMPTeam team, packed, path=None, int32_t k_parts=1, schedules=()):
        cdef pw_row_range[PW_MAX_ROW_RANGES] found
        cdef int32_t count = read_row_ranges(schedules, found)
        self.team, self.packed = team, packed
        self.weight = weight_view(packed, path, k_parts)
        if not pw_schedules_replace(&self.schedules, count, found):
            raise MemoryError

    def __dealloc__(self):
        free(self.schedules.ranges)

    @property
    def n(self):
        return self.weight.n

    @property
    def k(self):
        return self.weight.k

    def multiply(self, size_t x, size_t bias, size_t y, int64_t rows, bint is_bf16):
        """x [rows, k], bias [n] (0: none) and y [rows, n] lie at these addresses without gaps, all bf16 or float32."""
        cdef pw_openmp_call call
        cdef pw_schedule schedule
        cdef bint has_room
        if rows < 1:
            return
        schedule = pw_schedule_for(&self.schedules, &self.weight, rows, self.team.threads)
        call.weight, call.schedule, call.rows = &self.weight, &schedule, rows
        call.number = PW_BFLOAT16 if is_bf16 else PW_FLOAT32
        call.x, call.bias, call.y = <const void *>x, <const void *>bias, <void *>y
        with nogil:
            has_room = pw_openmp_multiply(self.team.team, &call)
        if not has_room:
            raise MemoryError(f"no memory for {rows} rows of a product")
