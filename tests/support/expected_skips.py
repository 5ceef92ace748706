"""The skips that CI accepts, by their reason, each with why it cannot be otherwise there.

`--no-unexpected-skips` fails a run in which a test skips for any other reason.
"""

EXPECTED_SKIPS = (
    r"this machine has no (tile unit|float16 instructions)",  # emulated tests of both run everywhere
    r"root may write everywhere",  # CI runs as root in a container
    r"the thread sanitizer does not work here",  # some kernels' address layouts
    r"reference data|lists? of .* fields|shared",  # ../shared is no part of the repository
    r"PHASEWISE_PEERS_PYTHON may name an interpreter",  # other libraries are for measuring beside
    r"PHASEWISE_LLAMA_BIN",
    r"needs three CPUs",  # two are what CI has
)
