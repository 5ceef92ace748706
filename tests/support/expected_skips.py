"""The skips that CI accepts, by their reason. With `--no-unexpected-skips` any other one fails the run."""

EXPECTED_SKIPS = (
    # What the machine at hand is not.
    r"this machine has no (tile unit|float16 instructions)",  # both are tested emulated as well
    r"this CPU has no arithmetic of tiles",
    r"under AddressSanitizer",
    r"this CPU does not expand: auto asks for no measurement",
    r"needs (two|three|five) CPUs|two ranks need two cores|one CPU is allowed",
    r"CPU 0 may not be used here",
    r"a kernel without NUMA|the thread sanitizer does not work here|this system shows no /proc/sys",
    r"root may write everywhere|only root (makes devices|becomes another user)",
    r"no GPU is here",
    r"systemd-analyze is not here|this systemd-analyze judges no file",  # a container without systemd
    r"perf_event_open is refused here",
    r"may not do that here|^Skipped: skip",  # privileges that a container withholds: unshare, mount
    r"needs a machine with (avx|neon|portable)",
    r"(cc|aarch64-linux-gnu-gcc|qemu-aarch64) is not installed; kernels for",
    # Reference data, which is no part of the repository: ../shared, or PHASEWISE_SHARED_DATA.
    r"reference (data|machines|traces)|lists? of .* fields|no machines in|the authors' figures",
    # Other programs and libraries, which are found where their variables name them.
    r"PHASEWISE_(PEERS_PYTHON|LLAMA_(?:CPP|TOOLS)|NPM_TOKENIZERS|LM_EVAL)",
    r"could not import '(torch|transformers|compressed_tensors|awq|vllm)'|is not in the cache",
    r"this release of (compressed_tensors|transformers)",
    r"(cryptography|ssh-keygen|openssl) is not installed",
    r"no agents are installed: make test-agents",
    r"network namespaces need root",
    r"(virtiofsd|busybox and cpio) are not installed|only root may let a virtual machine",
    r"the emulated machines are x86-64",
    r"Ray is not installed|no Chromium is installed|nginx is not installed",
    r"PHASEWISE_AXE does not name|PHASEWISE_NODE_MODULES names no folder|node is not installed",
    r"Ray is installed here",
    # Parameters without a case of their own.
    r"has no commands of its own",
    r"its language model is a family of its own|transformers (refuses its own config|needs more for)",
)
