/* Portable C: the reference every slot of the dispatch table is filled with first. */
typedef int pw_isa_portable_placeholder;
