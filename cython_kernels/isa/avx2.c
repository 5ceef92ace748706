typedef int pw_isa_avx2_placeholder;
