"""The C program around a kernel: it lays out arguments between pages that cannot be touched, calls, and
writes what came out.

A file of cases goes in. For each argument of a case: 8 bytes, a number's bits or a size in bytes; behind a
size, the content. IS_SHARED in a size: another argument is this buffer too, so its pages may be written.
IS_ALIAS instead of a size: 8 bytes follow, the number of the argument that is the same buffer. Before the
arguments, 8 bytes: 1 if buffers end at a forbidden page, 0 if they begin behind one. For each case that was
run, out come the result's 8 bytes and the content of every buffer that is not const.

A kernel that touches anything else is stopped by the page, or found by the bytes around the buffer; a const
buffer lies in pages that cannot be written. The program says which argument it was, and exits with FAULT.
"""

from __future__ import annotations

from phasewise.ir import nodes as ir
from phasewise.ir.c_text import c_type, signature, struct_text
from phasewise.ir.types import Pointer, Scalar, Void

FAULT = 3
IS_ALIAS = 1 << 63
IS_SHARED = 1 << 62

_COMMON = r"""#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef struct { unsigned char *map, *data; size_t span, bytes; int is_const; } buffer;
static buffer buffers[64];
static long case_number;

static void put(const char *text) { if (write(1, text, strlen(text)) < 0) _exit(4); }
static void put_number(long value) {
    char digits[24];
    int at = 24;
    int is_negative = value < 0;
    unsigned long rest = is_negative ? 0ul - (unsigned long)value : (unsigned long)value;
    do { digits[--at] = (char)('0' + rest % 10); rest /= 10; } while (rest);
    if (is_negative) digits[--at] = '-';
    if (write(1, digits + at, (size_t)(24 - at)) < 0) _exit(4);
}

static void fault(int number, siginfo_t *info, void *context) {
    (void)context;
    const unsigned char *at = info->si_addr;
    put("fault ");
    put_number(case_number);
    for (int i = 0; i < 64; ++i) {
        if (buffers[i].map && at >= buffers[i].map && at < buffers[i].map + buffers[i].span) {
            put(" argument ");
            put_number(i);
            put(" offset ");
            put_number((long)(at - buffers[i].data));
            put("\n");
            _exit(3);
        }
    }
    put(" signal ");
    put_number(number);
    put("\n");
    _exit(3);
}

static void watch(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO;
    int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    for (int i = 0; i < 4; ++i) sigaction(signals[i], &action, NULL);
}

static void need(int is_true, const char *what) { if (!is_true) { fprintf(stderr, "%s\n", what); _exit(4); } }

static void place(buffer *b, size_t bytes, int is_at_end, FILE *in) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t room = (bytes + page - 1) / page * page + (bytes == 0 ? page : 0);
    b->span = room + 2 * page;
    b->bytes = bytes;
    b->map = mmap(NULL, b->span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(b->map != MAP_FAILED, "no memory");
    memset(b->map + page, 0xA5, room);
    b->data = b->map + page + (is_at_end ? room - bytes : 0);
    need(fread(b->data, 1, bytes, in) == bytes, "short file");
    mprotect(b->map, page, PROT_NONE);
    mprotect(b->map + page + room, page, PROT_NONE);
    if (b->is_const) mprotect(b->map + page, room, PROT_READ);
}

static void check_around(int i) {
    const buffer *b = &buffers[i];
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (const unsigned char *p = b->map + page; p < b->map + b->span - page; ++p)
        if ((p < b->data || p >= b->data + b->bytes) && *p != 0xA5) {
            put("fault ");
            put_number(case_number);
            put(" argument ");
            put_number(i);
            put(" offset ");
            put_number((long)(p - b->data));
            put("\n");
            _exit(3);
        }
}

static uint64_t word(FILE *in) {
    uint64_t x;
    need(fread(&x, 1, 8, in) == 8, "short file");
    return x;
}

static void take_buffer(int i, int is_const, int is_at_end, FILE *in) {
    const uint64_t is_shared = (uint64_t)1 << 62;
    buffer *b = &buffers[i];
    uint64_t size = word(in);
    if (size >> 63) {
        const buffer *same = &buffers[word(in)];
        b->map = NULL;
        b->data = same->data;
        b->bytes = same->bytes;
        return;
    }
    b->is_const = is_const && !(size & is_shared);
    place(b, (size_t)(size & ~is_shared), is_at_end, in);
}
"""

_CHECK = r"""
int main(int n_words, char **names) {
    need(n_words == 3, "two files");
    watch();
    FILE *in = fopen(names[1], "rb"), *out = fopen(names[2], "wb");
    need(in && out, "files");
    uint64_t is_at_end;
    while (fread(&is_at_end, 1, 8, in) == 8) {
        read_arguments(in, is_at_end != 0);
        uint64_t result = call(KERNEL);
        fwrite(&result, 1, 8, out);
        for (int i = 0; i < N_ARGUMENTS; ++i) {
            if (buffers[i].map) check_around(i);
            if (is_output[i]) fwrite(buffers[i].data, 1, buffers[i].bytes, out);
        }
        for (int i = 0; i < N_ARGUMENTS; ++i)
            if (buffers[i].map) { munmap(buffers[i].map, buffers[i].span); buffers[i].map = NULL; }
        ++case_number;
    }
    return fclose(out) != 0;
}
"""

_TIME = r"""
/* Commands on stdin: `l PATH` loads a library, `c N` the case number N; `t ID LOOPS CALLS` times, and prints
 * a number for each loop. */
static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int main(int n_words, char **names) {
    need(n_words == 2, "one file");
    watch();
    kernel *loaded[4096];
    int n_loaded = 0;
    char line[4096];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (line[0] == 'l') {
            need(n_loaded < 4096, "too many");
            void *library = dlopen(line + 2, RTLD_NOW | RTLD_LOCAL);
            void *symbol = library ? dlsym(library, NAME) : NULL;
            if (!symbol) { printf("error %s\n", dlerror()); fflush(stdout); continue; }
            memcpy(&loaded[n_loaded], &symbol, sizeof symbol);
            printf("%d\n", n_loaded++);
        } else if (line[0] == 'c') {
            FILE *in = fopen(names[1], "rb");
            need(in != NULL, "file");
            for (int i = 0; i < N_ARGUMENTS; ++i)
                if (buffers[i].map) { munmap(buffers[i].map, buffers[i].span); buffers[i].map = NULL; }
            case_number = atol(line + 2);
            for (long i = 0; i <= case_number; ++i) {
                for (int k = 0; k < N_ARGUMENTS; ++k)
                    if (buffers[k].map) { munmap(buffers[k].map, buffers[k].span); buffers[k].map = NULL; }
                int is_at_end = word(in) != 0;
                read_arguments(in, is_at_end);
            }
            fclose(in);
            printf("ok\n");
        } else {
            int id = 0, loops = 0, calls = 0;
            int n_read = sscanf(line + 1, "%d %d %d", &id, &loops, &calls);
            need(n_read == 3 && id >= 0 && id < n_loaded, "command");
            for (int i = 0; i < loops; ++i) {
                int64_t begun = now_ns();
                for (int k = 0; k < calls; ++k) call(loaded[id]);
                printf("%lld ", (long long)(now_ns() - begun));
            }
            printf("\n");
        }
        fflush(stdout);
    }
    return 0;
}
"""


def check_program(function: ir.FunctionDefinition) -> str:
    """C of the program that runs cases through the kernel that it is linked with."""
    head = signature(function.name, function.args, function.result)
    return f"{_COMMON}\n{_arguments(function)}\n{head};\n#define KERNEL {function.name}\n{_CHECK}"


def timing_program(function: ir.FunctionDefinition) -> str:
    """C of the program that times kernels of the libraries that it is told to load."""
    return f'{_COMMON}\n{_arguments(function)}\n#define NAME "{function.name}"\n{_TIME}'


def _arguments(function: ir.FunctionDefinition) -> str:
    """C that reads the arguments, and C that calls a kernel with them."""
    structs = "\n".join(struct_text(struct) for struct in function.structs)
    reads, values = [], []
    for i, (_, of) in enumerate(function.args):
        if isinstance(of, Pointer):
            reads.append(f"    take_buffer({i}, {int(of.is_const)}, is_at_end, in);")
            values.append(f"({c_type(of)})(void *)buffers[{i}].data")
        else:
            reads.append(f"    {{ uint64_t x = word(in); memcpy(&number_{i}, &x, sizeof number_{i}); }}")
            values.append(f"number_{i}")
    numbers = "\n".join(
        f"static {c_type(of)} number_{i};"
        for i, (_, of) in enumerate(function.args)
        if isinstance(of, Scalar)
    )
    arguments = ", ".join(values)
    if isinstance(function.result, Void):
        body = f"    function({arguments});\n    return 0;"
    else:
        body = (
            f"    uint64_t bits = 0;\n    {c_type(function.result)} x = function({arguments});\n"
            "    memcpy(&bits, &x, sizeof x);\n    return bits;"
        )
    is_output = (isinstance(of, Pointer) and not of.is_const for _, of in function.args)
    outputs = ", ".join(str(int(is_out)) for is_out in is_output) or "0"
    return "\n".join(
        [
            structs,
            f"enum {{ N_ARGUMENTS = {len(function.args)} }};",
            f"static const char is_output[] = {{{outputs}}};",
            numbers,
            f"typedef {signature('kernel', function.args, function.result)};",
            "static void read_arguments(FILE *in, int is_at_end) {",
            "    (void)is_at_end, (void)in;",
            *reads,
            "}",
            f"static uint64_t call(kernel *function) {{\n{body}\n}}",
        ]
    )
