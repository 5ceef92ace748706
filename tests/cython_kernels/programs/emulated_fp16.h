/* isa/avx512_fp16.h over emulated words, for any CPU. */
#define PW_ISA avx512_fp16
#include "emulated_f16.h"
