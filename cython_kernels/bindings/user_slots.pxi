# Slots of the table that users' functions may fill, and how such a function is checked. Textually included by _native.pyx.

from libc.stdint cimport uintptr_t

cdef extern from "user_slots/check.h" nogil:
    enum:
        PW_SLOT_RMS_NORM
        PW_SLOT_GATES
        PW_SLOT_ACTIVATIONS
        PW_SLOT_EXPONENTIAL
        PW_SLOTS
        PW_SLOT_EVERY
        PW_SLOT_STEP
        PW_SLOT_MOST

    const char *PW_SLOT_SYMBOL
    ctypedef void (*pw_slot_function)()

    ctypedef struct pw_slot_verdict:
        int32_t outcome, signal, trial
        int64_t n, index
        uint64_t digest

    void pw_fill_slot(int slot, pw_slot_function function)
    void pw_empty_slots()
    bint pw_slot_is_filled(int slot)
    pw_slot_function pw_slot_of(const pw_op_kernels *ops, int slot)
    bint pw_slot_length_is_checked(int64_t n)
    const char *pw_slot_trial_name(int trial)
    void pw_check_slot(int slot, pw_slot_function function, uint64_t seed, int every_float, int seconds,
                       pw_slot_verdict *verdict)
    void pw_recheck_slot(int slot, pw_slot_function function, uint64_t seed, pw_slot_verdict *verdict)
    int pw_time_slot(int slot, pw_slot_function function, const int64_t *lengths, int n_lengths, int64_t loops,
                     int64_t calls, int64_t *loop_ns)


SLOTS = ("rms_norm", *(f"{name}_gate" for name in GATES), *ACTIVATIONS, "exponential")
SLOT_SYMBOL = PW_SLOT_SYMBOL.decode()
SLOT_VERDICT_BYTES = sizeof(pw_slot_verdict)
SLOT_LONGEST = PW_SLOT_MOST
assert len(SLOTS) == PW_SLOTS
SLOT_OUTCOMES = ("agrees", "differs", "repeats", "writes_beyond", "changes_modes", "faults", "is_late", "threads_differ",
                 "no_memory")


cdef int _slot_number(str slot) except -1:
    if slot not in SLOTS:
        raise ValueError(f"{slot!r} is no slot; there are {', '.join(SLOTS)}")
    return SLOTS.index(slot)


cdef _told_verdict(const pw_slot_verdict *verdict):
    trial = pw_slot_trial_name(verdict.trial).decode()
    return SLOT_OUTCOMES[verdict.outcome], trial, verdict.n, verdict.index, verdict.signal, verdict.digest


def slot_fill(str slot, size_t address):
    """Call the function at this address in place of the built-in one of a slot, for lengths that are checked."""
    pw_fill_slot(_slot_number(slot), <pw_slot_function><uintptr_t>address)


def slot_address(str slot):
    """Where the function of a slot lies that is called now."""
    return <uintptr_t>pw_slot_of(_ops(), _slot_number(slot))


def slots_empty():
    """Call the built-in functions in all slots."""
    pw_empty_slots()


def slots_filled():
    """The slots whose function is a user's."""
    return [slot for number, slot in enumerate(SLOTS) if pw_slot_is_filled(number)]


def slot_length_is_checked(int64_t n):
    """True of lengths that a user's function is called for."""
    return bool(pw_slot_length_is_checked(n))


def slot_check(str slot, size_t address, uint64_t seed, bint every_float, int seconds, uint8_t[::1] verdict):
    """Check a function in every way, in a process that it may end; `verdict` is memory shared with its parent."""
    if verdict.shape[0] < <Py_ssize_t>sizeof(pw_slot_verdict):
        raise ValueError("a verdict has more bytes")
    cdef int number = _slot_number(slot)
    cdef pw_slot_verdict *written = <pw_slot_verdict *>&verdict[0]
    with nogil:
        pw_check_slot(number, <pw_slot_function><uintptr_t>address, seed, every_float, seconds, written)


def slot_verdict(const uint8_t[::1] verdict):
    """Outcome, way of the call, n, index, signal and digest, as `slot_check` wrote them."""
    if verdict.shape[0] < <Py_ssize_t>sizeof(pw_slot_verdict):
        raise ValueError("a verdict has more bytes")
    return _told_verdict(<const pw_slot_verdict *>&verdict[0])


def slot_recheck(str slot, size_t address, uint64_t seed):
    """A verdict as `slot_verdict` gives it, of some calls in this process."""
    cdef pw_slot_verdict verdict
    cdef int number = _slot_number(slot)
    with nogil:
        pw_recheck_slot(number, <pw_slot_function><uintptr_t>address, seed, &verdict)
    return _told_verdict(&verdict)


def slot_time(str slot, size_t address, const int64_t[::1] lengths, int64_t loops, int64_t calls):
    """Nanoseconds of each loop of so many calls at every length; address 0: of the built-in function."""
    cdef int number = _slot_number(slot)
    cdef int64_t i
    if loops < 1 or calls < 1 or lengths.shape[0] < 1:
        raise ValueError("nothing is timed")
    for i in range(lengths.shape[0]):
        if not 1 <= lengths[i] <= PW_SLOT_MOST:
            raise ValueError(f"a row of {lengths[i]}")
    loop_ns = np.zeros(loops, np.int64)
    cdef int64_t[::1] written = loop_ns
    cdef int failed
    with nogil:
        failed = pw_time_slot(number, <pw_slot_function><uintptr_t>address, &lengths[0], <int>lengths.shape[0], loops,
                              calls, &written[0])
    if failed:
        raise MemoryError("no memory for rows")
    return loop_ns.tolist()
