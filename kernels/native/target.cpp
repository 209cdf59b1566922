// What the library was compiled for, as the compiler that compiled it says.

#include "vectors.h"

extern "C" const char* instructions() {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512CD__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
    return "x86-64-v4";
#elif defined(__AVX2__) && defined(__FMA__) && defined(__BMI2__) && defined(__F16C__)
    return "x86-64-v3";
#elif defined(__SSE4_2__) && defined(__POPCNT__)
    return "x86-64-v2";
#elif defined(__x86_64__)
    return "x86-64";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "another processor";
#endif
}

extern "C" int vector_bits() { return 32 * heavypath::WIDTH; }
